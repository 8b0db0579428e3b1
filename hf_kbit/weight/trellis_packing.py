"""How a weight of floats becomes one that has a trellis.

What is encoded is the weight over the scales of both sides, rotated on both. A rotation leaves in each block one
magnitude of weights, the root mean square, so scales bring that to about 1, where the code is made for it.

The same bytes on every device: what is rounded is computed by single operations that IEEE 754 rounds correctly, sums
are of whole numbers that float64 holds, and the encoder adds whole numbers.

Sources: scales and signs of both sides before Hadamard's matrix as in QuIP# (arXiv:2402.04396) and EXL3 (exllamav3,
MIT), which searches the scale of all on some tiles too.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn import functional as F

from hf_kbit.format.reference import decode_e4m4, matrices
from hf_kbit.format.trellis import MOST_LEAD, TILE, TrellisDecoding, rotate, tiles_of, values, windows
from hf_kbit.weight.balance import balance, largest_magnitude
from hf_kbit.weight.dynamic_range import DEAD, FAR_FROM_LARGEST, LARGEST_FLOAT16
from hf_kbit.weight.packing import MOST_TO_TRANSFORM, check_magnitude
from hf_kbit.weight.tensor import Packed

CODE = "mul1"  # the one that there is an encoder for
INPUTS, OUTPUTS = 0, 1  # sides, of which each has signs of its own
# Whole numbers that stand for 1, or for the largest of a row, in sums of squares.
_LARGEST, _ONE = 2.0**16, 2.0**10
# Of a scale of rows, as ``frexp`` gives it: below, float16 has fewer bits for it, and above there is not another one.
_LEAST_EXPONENT, _MOST_EXPONENT = -13, 15
# The scale of all is searched among powers of this, on so many tiles of so many blocks of rows.
_STEP, _FIRST, _TILES, _BLOCKS, _SHORT_LEAD = 2 ** (1 / 16), 1, 32, 4, 32
# Weights that are rotated and encoded at a time: they keep a device busy, and stay a small part of a large one.
_SLICE_ON_CPU, _SLICE = 1 << 20, 1 << 24


class Scales(NamedTuple):
    """Of a matrix ``[N, K]``: float16 ``suh`` and ``svh``, padded; and why they do not hold it, if they do not."""

    suh: torch.Tensor
    svh: torch.Tensor
    lost: str = ""

    def times(self, factor: float) -> "Scales":
        """With that for the outputs."""
        return self._replace(svh=(self.svh.float() * factor).clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16).half())


def quantize(
    weight: torch.Tensor, decoding: TrellisDecoding, balances: bool, name: str, columns: torch.Tensor | None = None
) -> Packed:
    """A weight on its own device, with memory for some of its rows besides the result.

    A row or a column of zeros decodes to zeros. The code is ``mul1``, whatever ``decoding`` has, and each matrix has
    scales of its own.

    Args:
        weight: float32, float16 or bfloat16 ``[*lead, N, K]``, a tensor or ``reference.matrices``.
        balances: whether columns get scales (``balance.balance``).
        columns: as for ``packing.quantize_weight``.
        name: what errors call the weight.

    Raises:
        ValueError: as of ``packing.quantize_weight``.

    >>> packed = quantize(torch.randn(64, 100), TrellisDecoding(4, block=32), True, "weight")
    >>> [tuple(tensor.shape) for tensor in packed.tensors.values()]
    [(8, 4, 64), (128,), (64,)]
    """
    decoding = encodable(decoding)
    layout = decoding.layout(weight.shape).items()
    tensors = {own: torch.empty(size, dtype=dtype, device=weight.device) for own, (dtype, size) in layout}
    places = itertools.product(*map(range, weight.shape[:-2]))
    lost = ""
    for place, matrix in zip(places, matrices(weight), strict=True):
        own, its = {name: tensor[place] for name, tensor in tensors.items()}, check(matrix, name)
        scales = scales_of(matrix, decoding, balances, columns)
        scales = scales.times(best_factor(matrix, decoding, scales))
        too_large = _encode(matrix, decoding, scales, its, own)
        lost = lost or scales.lost or too_large
    return Packed(tensors, decoding, lost=lost)


def encodable(decoding: TrellisDecoding) -> TrellisDecoding:
    """How a weight decodes that was to decode so, once it is encoded."""
    return replace(decoding, code=CODE, stacked=1)


def check(matrix: torch.Tensor, name: str) -> float:
    """The largest magnitude of a matrix, unless that is NaN or too large."""
    return check_magnitude(largest_magnitude(matrix).item(), name)


# --- scales ---------------------------------------------------------------------------------------


def signs(count: int, side: int, device: torch.device | str) -> torch.Tensor:
    """float32 ``[count]`` of 1 and -1, the same ones always: a hash of the place and the side.

    >>> signs(8, OUTPUTS, "cpu").int().tolist() == signs(100, OUTPUTS, "cpu")[:8].int().tolist()
    True
    """
    found = 2 * torch.arange(count, device=device) + side + 1
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39), (15, 1)):  # factors below 2**31: int64 holds products
        found = (found ^ found >> shift) * factor & 0xFFFFFFFF
    return (1 - 2 * (found >> 16 & 1)).float()


def scales_of(
    matrix: torch.Tensor, decoding: TrellisDecoding, balances: bool, columns: torch.Tensor | None = None
) -> Scales:
    """Scales with which all blocks of a matrix have root mean square 1, as far as float16 holds them."""
    rows, width = matrix.shape
    if columns is None and balances and largest_magnitude(matrix) <= MOST_TO_TRANSFORM:
        columns = balance(matrix)
    columns = torch.ones(width, device=matrix.device) if columns is None else decode_e4m4(columns)
    used = torch.zeros(width, dtype=torch.bool, device=matrix.device)
    squares, sizes = torch.zeros(decoding.padded(width), dtype=torch.float64, device=matrix.device), []
    for part in _parts(matrix, decoding):
        used |= (part != 0).any(0)
        part = part.float() / columns
        sizes.append(_root_mean_square(part))
        ratios = part / torch.where(sizes[-1] > 0, sizes[-1], 1.0)[:, None]
        squares[:width] += (ratios * _ONE).round_().square_().sum(0, dtype=torch.float64)
    sizes = F.pad(torch.cat(sizes), (0, decoding.padded(rows) - rows))
    sizes = sizes * _of_blocks((sizes > 0).double(), decoding.block, 1.0)
    of_inputs = F.pad(torch.where(used, columns, 0.0), (0, len(squares) - width))
    suh = of_inputs * _of_blocks(squares, decoding.block, _ONE**2 * rows) * signs(len(squares), INPUTS, matrix.device)
    power, lost = _power(sizes, rows)
    svh = sizes * 2.0**-power * signs(len(sizes), OUTPUTS, matrix.device)
    suh = suh * 2.0**power
    return Scales(*(each.clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16).half() for each in (suh, svh)), lost)


def _parts(matrix: torch.Tensor, decoding: TrellisDecoding) -> Iterator[torch.Tensor]:
    """Some rows at a time: whole blocks, but for the last ones."""
    at_a_time = _SLICE_ON_CPU if matrix.device.type == "cpu" else _SLICE
    yield from matrix.split(max(at_a_time // (matrix.shape[1] * decoding.block), 1) * decoding.block)


def _root_mean_square(rows: torch.Tensor) -> torch.Tensor:
    """float32 ``[n]``, of float32 ``[n, K]``."""
    largest = rows.abs().amax(1)
    whole = (rows / torch.where(largest > 0, largest, 1.0)[:, None] * _LARGEST).round_()
    mean = whole.square_().sum(1, dtype=torch.float64) * (1 / rows.shape[1])
    return (largest.double() * mean.sqrt() / _LARGEST).float()


def _of_blocks(squares: torch.Tensor, block: int, unit: float) -> torch.Tensor:
    """float32 ``[n]``: for each number the root of the mean of its block, in units; 1 in a block of zeros. Here too
    what is added are whole numbers."""
    mean = squares.view(-1, block).sum(1) * (1 / (block * unit))  # some devices divide by a number as by a tensor
    return torch.where(mean > 0, mean.sqrt(), 1.0).float().repeat_interleave(block)


def _power(sizes: torch.Tensor, rows: int) -> tuple[int, str]:
    """By which power of two the scales of rows become less, and those of columns more, so that float16 holds the
    former; and what of them it does not hold even so, in words."""
    used = sizes[sizes > 0]
    if not len(used):
        return 0, ""
    least, most = (torch.frexp(each).exponent.item() for each in used.aminmax())
    # Room above for the scale of all. Those of columns stay far from both ends.
    power = min(max(most - _MOST_EXPONENT + 1, min(least - _LEAST_EXPONENT, 0)), 10)
    power = max(power, -10)
    if most - power > _MOST_EXPONENT - 1:
        return power, f"of its rows some are of magnitude {used.max().item():.4g}, too large for float16 scales"
    small = (used.double() * 2.0**-power < 2.0**-24) & (used >= DEAD * used.median())
    count = int(small.sum())
    return power, f"{count:,} of {rows:,} rows are too small for float16 scales" if count else ""


# --- the scale of all -----------------------------------------------------------------------------


def best_factor(matrix: torch.Tensor, decoding: TrellisDecoding, scales: Scales) -> float:
    """What scales are multiplied by, for the least squared error of some tiles."""
    block, starts = decoding.block, range(0, len(matrix), decoding.block)
    count = min(_BLOCKS, len(starts))
    chosen, each = [starts[number * len(starts) // count] for number in range(count)], _TILES // count

    def error(power: int) -> float:
        own, targets = scales.times(_STEP**power), []
        for start in chosen:
            rows = slice(start, start + block)
            tiles = tiles_of(inner_of(matrix[rows], own.suh, own.svh[rows], decoding.block)).flatten(0, 1)
            number = min(each, len(tiles))
            targets.append(tiles[torch.arange(number, device=tiles.device) * len(tiles) // number])
        targets = torch.cat(targets)
        found = torch.ops.hf_kbit.encode_trellis(targets, decoding.bits, _SHORT_LEAD)
        missed = (values(windows(found[None]), CODE)[0].float() - targets).clamp(-64, 64) * _ONE
        return missed.round().square().sum(dtype=torch.float64).item() * _STEP ** (2 * power)

    best, least = _FIRST, error(_FIRST)
    for step in (1, -1):
        while (new := error(best + step)) < least and abs(best) < 16:
            best, least = best + step, new
        if best != _FIRST:
            break
    return _STEP**best


# --- encoding -------------------------------------------------------------------------------------


def inner_of(rows: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, block: int) -> torch.Tensor:
    """What is encoded of rows ``[n, K]`` of a weight, float32, padded: that over the scales, rotated on both sides."""
    padding = 0, len(suh) - rows.shape[1], 0, len(svh) - len(rows)
    weight = F.pad(rows.float(), padding) / _or_one(suh) / _or_one(svh)[:, None]
    return rotate(rotate(weight, block).T, block).T


def _or_one(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale != 0, scale.float(), 1.0)


def _encode(matrix: torch.Tensor, decoding: TrellisDecoding, scales: Scales, largest: float, into: dict) -> str:
    """Fills the tensors of a matrix; says what is lost, if something is."""
    into["suh"].copy_(scales.suh)
    start, most = 0, 0.0
    for part in _parts(matrix, decoding):
        rows = slice(start, start := start + decoding.padded(len(part)))
        tiles = slice(rows.start // TILE, rows.stop // TILE)
        targets = tiles_of(inner_of(part, scales.suh, scales.svh[rows], decoding.block))
        across = len(targets)
        codes = torch.ops.hf_kbit.encode_trellis(targets.flatten(0, 1), decoding.bits, MOST_LEAD)
        codes = into["trellis"][:, tiles] = codes.unflatten(0, (across, -1))
        decoded = outer_of(torch.ops.hf_kbit.decode_trellis(codes, CODE, torch.float32), scales.suh, decoding.block)
        decoded = decoded[: len(part), : part.shape[1]]
        svh = into["svh"][rows] = F.pad(
            nearest_scales(part.float(), decoded, scales.svh[rows][: len(part)]),
            (0, rows.stop - rows.start - len(part)),
        )
        if FAR_FROM_LARGEST < largest <= LARGEST_FLOAT16:
            most = max(most, (decoded * svh[: len(part), None].float()).abs().max().item())
    if most > LARGEST_FLOAT16:
        return f"of weights up to {largest:.5g} some would decode to more than float16 holds"
    return ""


def outer_of(inner: torch.Tensor, suh: torch.Tensor, block: int) -> torch.Tensor:
    """What rows decode to, before the scales of outputs, of what is between the rotations."""
    return rotate((rotate(inner, block) * suh.float()).T, block).T


def nearest_scales(rows: torch.Tensor, decoded: torch.Tensor, svh: torch.Tensor) -> torch.Tensor:
    """float16 ``[n]``: of each row the scale with which what it decodes to is nearest to it; the one that it has where
    that would have another sign."""
    largest = [each.abs().amax(1, keepdim=True) for each in (rows, decoded)]
    whole = [
        (each / torch.where(most > 0, most, 1.0) * _LARGEST).round_().double()
        for each, most in zip((rows, decoded), largest, strict=True)
    ]
    product, square = (whole[0] * whole[1]).sum(1), whole[1].square().sum(1)
    ratio = largest[0].double() / torch.where(largest[1] > 0, largest[1], 1.0).double()
    found = (product / square.clamp(min=1) * ratio[:, 0]).float()
    return torch.where(found * svh > 0, found.clamp(-LARGEST_FLOAT16, LARGEST_FLOAT16).half(), svh)
