"""How a weight of floats becomes a packed one."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from hf_kbit.format import codebooks
from hf_kbit.format.codebooks import Levels, bits_of
from hf_kbit.format.decoding import ABSMAX, DEFAULT_TRANSFORM, Decoding, ScalarDecoding
from hf_kbit.format.reference import decode_e4m4, row_slices
from hf_kbit.format.spec import (
    BLOCK_SIZE,
    encode_e4m4,
    layer_exponent,
    num_blocks,
)
from hf_kbit.format.transforms import to_stored
from hf_kbit.weight import dynamic_range
from hf_kbit.weight.balance import balance, largest_magnitude
from hf_kbit.weight.tensor import KINDS, Packed

SCALES = ("absmax", "search")
DEFAULT_CODEBOOK, DEFAULT_SCALE = "optimal", "search"  # made for each other

# From here on the largest scale rounds to 2**128, which float32 has not.
TOO_LARGE = 2.0**127 * (1 + 31 / 32)
# Up to here a weight divided by column scales, and sums of 32 of them, stay far below that.
MOST_TO_TRANSFORM = 2.0**100

# A weight so many times the root mean square stands out. The rotation spreads it over its block: all numbers there
# have nearly one magnitude, with both signs. Symmetric levels hold such a block best.
STANDS_OUT = 32
AT_A_TIME = 1 << 17  # weights: so many are mostly enough to tell that none does

# Weights that are transformed and quantized at a time: they keep a device busy, and stay a small part of a large one.
_SLICE_ON_CPU, _SLICE = 1 << 20, 1 << 25


def of_planes(
    planes: torch.Tensor, absmax: torch.Tensor, decoding: ScalarDecoding, columns: torch.Tensor | None = None
) -> Packed:
    """A scalar weight: int32 planes ``[*, N, B * bits]``, uint8 scales ``[*, N, B]`` and, where it is transformed,
    uint8 column scales ``[K]``."""
    tensors = zip(decoding.names, (planes, absmax, columns), strict=True)
    return Packed({name: tensor for name, tensor in tensors if tensor is not None}, decoding)


class Rows:
    """What is quantized for a weight ``[*, N, K]``: itself or, with column scales, what is left of it after the
    division by them and the rotation, float32 ``[*, N, 32 * B]``.

    It is an iterable of its rows in order, some at a time, ``[n, K]`` or ``[n, 32 * B]``: made anew each time, for all
    of them would take several times the memory of the weight.

    Args:
        weight: float32, float16 or bfloat16, a tensor or made a matrix at a time (``reference.matrices``).
        columns: uint8 ``[K]``, E4M4 column scales, or None.
        name: what errors call the weight.
    """

    def __init__(self, weight: torch.Tensor, columns: torch.Tensor | None, name: str):
        *rows, in_features = weight.shape
        self.shape = (*rows, in_features if columns is None else num_blocks(in_features) * BLOCK_SIZE)
        self.columns, self.device, self.original, self._name = columns, weight.device, weight, name
        self._largest: torch.Tensor | None = None

    def __iter__(self) -> Iterator[torch.Tensor]:
        columns, largest = None if self.columns is None else decode_e4m4(self.columns), []
        numbers = _SLICE_ON_CPU if self.device.type == "cpu" else _SLICE
        for rows in row_slices(self.original, numbers):
            part = rows if columns is None else to_stored(rows, columns, rotated=True)
            if self._largest is None:
                largest.append(largest_magnitude(part))
            yield part
        if largest:
            self._largest = torch.stack(largest).max()

    @property
    def largest(self) -> float:
        """The largest magnitude, for which all parts are made if that has not been done before.

        Raises:
            ValueError: there is NaN or infinity, or float32 cannot hold what the weight decodes to.
        """
        if self._largest is None:
            deque(self, maxlen=0)
        return check_magnitude(self._largest.item(), self._name)

    @property
    def weight(self) -> torch.Tensor:
        """All of it at once."""
        return self.original if self.columns is None else torch.cat(list(self)).view(self.shape)


def check_magnitude(largest: float, name: str) -> float:
    """Returns the largest magnitude of a weight, if it can be quantized."""
    if not largest < float("inf"):
        raise ValueError(f"{name}: found NaN or infinite values, expected finite ones")
    if largest >= TOO_LARGE:
        raise ValueError(f"{name}: found magnitudes up to {largest:.4g}, expected them below {TOO_LARGE:.4g}")
    return largest


def check_scale(scale: object) -> str:
    """Returns ``scale`` if it is one of ``SCALES``."""
    if scale not in SCALES:
        raise ValueError(f"scale: found {scale!r}, expected one of {list(SCALES)}")
    return scale


@dataclass(frozen=True)
class Recipe:
    """How a dense weight is quantized, besides its levels.

    Attributes:
        scale: how the scale of a block is found: ``"search"``, by the squared error, or ``"absmax"``, from its largest
            magnitude.
        transform: what is done to the weight first: ``"rotated"`` or ``"none"``.
        balances: whether column scales are found for a weight that is transformed; else all are 1.
    """

    scale: str = DEFAULT_SCALE
    transform: str = DEFAULT_TRANSFORM
    balances: bool = True

    def quantize(self, weight: torch.Tensor, decoding: Decoding, name: str, columns=None) -> Packed:
        """A weight ``[*lead, N, K]`` quantized so, on its own device, to decode about so. ``columns``: as for
        ``quantize_weight``."""
        return KINDS[type(decoding)].quantize(weight, decoding, self, name, columns)

    def quantize_scalar(self, weight: torch.Tensor, levels: Levels, name: str, columns=None) -> Packed:
        """A scalar weight; the rest is as for ``quantize_weight``."""
        if columns is None and not self.balances:
            columns = torch.full(weight.shape[-1:], encode_e4m4(1.0), dtype=torch.uint8, device=weight.device)
        search = self.scale == "search"
        return quantize_weight(weight, levels, search, transform=self.transform, name=name, columns=columns)


def quantize_weight(
    weight: torch.Tensor,
    levels: Levels,
    search: bool,
    transform: str = "none",
    name: str = "weight",
    columns: torch.Tensor | None = None,
) -> Packed:
    """Quantizes a weight on its own device, with memory for some of its rows besides the result.

    A huge weight, of which float32 might not hold sums, is not transformed, nor is one of which the scales would not
    hold some rows then. Of ``optimal`` for scales with signs, the symmetric levels take the place where scales have no
    signs, or a weight stands out.

    Args:
        weight: float32, float16 or bfloat16 ``[*, N, K]``, a tensor or ``reference.matrices``.
        levels: canonical codebook of ``2**bits`` levels.
        search: whether each scale is the one of least error (``ops.quantize``).
        transform: ``"rotated"``, column scales and the rotation, or ``"none"``.
        name: what errors call the weight.
        columns: uint8 ``[K]``, column scales to take instead of those of ``balance.balance``; none of them 0.

    Raises:
        ValueError: the weight holds NaN or infinity, or is so large that float32 cannot hold what it decodes to.

    >>> packed = quantize_weight(torch.rand(4, 64), codebooks.normal_float(3), search=True)
    >>> [tensor.shape for tensor in packed.tensors.values()], packed.decoding.exponent
    ([torch.Size([4, 6]), torch.Size([4, 2])], 0)
    """
    plain = stored = Rows(weight, None, name)
    if plain.largest <= MOST_TO_TRANSFORM and transform != "none":
        stored = Rows(weight, balance(weight) if columns is None else columns, name)
    # What nearly every weight turns out to need, tried while its largest magnitude is found: transforming takes time.
    usual = ScalarDecoding(levels, 0, "none" if stored.columns is None else "rotated")
    packed = _quantize(stored, usual, search)
    decoding = _choose_decoding(stored, levels)
    if decoding != usual:
        packed = _quantize(stored, decoding, search)
    if not (why := _out_of_range(plain, packed, coarse=True)):
        return packed
    for wider in dict.fromkeys((stored, plain)):
        packed = _quantize(wider, _choose_decoding(wider, levels, widest=True), search)
        if not (lost := _out_of_range(plain, packed)):
            break
    return packed._replace(untransformed="" if wider is stored else why, lost=lost)


def _choose_decoding(stored: Rows, levels: Levels, widest: bool = False) -> ScalarDecoding:
    """How a weight will decode; ``widest``: the exponent is to leave the most room below the largest scale."""
    transform = "none" if stored.columns is None else "rotated"
    signed = levels == codebooks.optimal(bits_of(len(levels)), signed=True)
    if signed and (transform == "none" or _stands_out(stored)):
        levels = codebooks.optimal(bits_of(len(levels)))
    return ScalarDecoding(levels, layer_exponent(stored.largest, transform != "none", widest), transform)


def _stands_out(stored: Rows) -> bool:
    """Whether the largest magnitude is more than ``STANDS_OUT`` times the root mean square: in a weight so small that
    one number decides on both it never is."""
    if stored.largest == 0.0:
        return False
    squares = 0.0  # of ratios to the largest, which float32 holds
    for rows in stored:
        for part in rows.split(max(AT_A_TIME // rows.shape[1], 1)):
            squares += (part.float() / stored.largest).square_().sum(dtype=torch.float64).item()
            if STANDS_OUT**2 * squares >= math.prod(stored.shape):
                return False
    return True


def _out_of_range(plain: Rows, packed: Packed, coarse: bool = False) -> str:
    """What the scales of a packed weight do not hold of the weight, in words; "" if they hold all of it. What is
    ``coarse`` costs less than the transform does, and nothing where another exponent mends it."""
    absmax = packed.tensors[ABSMAX]
    if lost := dynamic_range.lost_rows(plain.original, absmax, packed.decoding.transformed, coarse):
        return f"{lost} are too small beside its largest weight for one exponent"
    large = dynamic_range.FAR_FROM_LARGEST < plain.largest <= dynamic_range.LARGEST_FLOAT16
    if large and not dynamic_range.in_float16(packed, plain.shape[-1]):
        return f"of weights up to {plain.largest:.5g} some would decode to more than float16 holds"
    return ""


def _quantize(stored: Rows, decoding: ScalarDecoding, search: bool) -> Packed:
    layout = decoding.layout(stored.shape)
    planes, absmax = (torch.empty(size, dtype=own, device=stored.device) for own, size in list(layout.values())[:2])
    codebook, first = decoding.codebook(stored.device), 0
    for part in stored:
        rows = slice(first, first := first + len(part))
        quantized = torch.ops.hf_kbit.quantize(part, codebook, search, decoding.transformed)
        planes.flatten(0, -2)[rows], absmax.flatten(0, -2)[rows] = quantized
    return of_planes(planes, absmax, decoding, stored.columns)
