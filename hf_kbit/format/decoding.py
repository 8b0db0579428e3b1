"""How a packed weight decodes, as one value.

What decides on a decoded weight besides its tensors is a ``Decoding``. A layer has one, gets it together with its
tensors by ``KbitLinear.load``, and has it in its state dict. Its class is the *kind* of the weight: scalar levels in
blocks (``ScalarDecoding``, here), or a trellis in tiles (``trellis.TrellisDecoding``).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hf_kbit.format import codebooks
from hf_kbit.format.codebooks import Levels, bits_of
from hf_kbit.format.spec import (
    BLOCK_SIZE,
    E4M4_BIAS,
    SE3M4_BIAS,
    absmax_shape,
    check_exponent,
    weight_shape,
)

TRANSFORMS = ("rotated", "none")
# What files call the tensors of a scalar weight.
WORDS, ABSMAX, COLUMNS = "weight", "weight_absmax", "weight_columns"
DEFAULT_TRANSFORM = "rotated"
# What a file has of a weight: dtype and shape of each tensor by its name in the layer.
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def check_transform(transform: object, name: str = "transform") -> str:
    """Returns ``transform`` if it is one of ``TRANSFORMS``; a ValueError begins with ``name``."""
    if transform not in TRANSFORMS:
        raise ValueError(f"{name}: found {transform!r}, expected one of {list(TRANSFORMS)}")
    return transform


def lopsided(transform: str, scale: str) -> bool:
    """Whether the codebook ``"optimal"`` has its levels for scales with signs: those of a transformed layer have them,
    but only with scales that are searched are these levels better at every width."""
    return transform != "none" and scale == "search"


class Decoding(ABC):
    """How a weight decodes, of any kind.

    Attributes:
        kind: its word in errors and docs.
        marks: name of a tensor that a layer of this kind has in files, and no other has.
        names: of all tensors that such a layer may have there.
        bits: of a code.
        transformed: whether columns are scaled, or blocks rotated, before codes are chosen.
        keeps_inputs: why a product takes no 8-bit inputs; "" if it does.
        described: in words, besides the width.
        scale_bits: that scales take of each weight, besides those of whole rows or columns.
        read_whole: whether each of several processes that share a weight reads all of it.
        units: of rows, and of columns, between which a matrix can be cut into parts that decode alone.
    """

    kind: str
    marks: str
    names: tuple[str, ...]
    bits: int
    transformed: bool
    keeps_inputs: str
    described: str
    scale_bits = 0.0
    read_whole = False
    units: tuple[int, int]

    @abstractmethod
    def layout(self, shape: Sequence[int]) -> Layout:
        """The tensors that files have of a weight ``[*lead, N, K]``, first the one that has the codes."""

    def nbytes(self, shape: Sequence[int]) -> int:
        """Of all that files have of a weight ``[*lead, N, K]``."""
        return sum(math.prod(size) * dtype.itemsize for dtype, size in self.layout(shape).values())

    def codes(self, shape: Sequence[int]) -> int:
        """How many there are for a weight ``[*lead, N, K]``: as many as it has numbers, and those of the padding.

        >>> ScalarDecoding((-1.0, -0.25, 0.25, 1.0)).codes((4, 40))
        256
        """
        dtype, size = next(iter(self.layout(shape).values()))
        return math.prod(size) * dtype.itemsize * 8 // self.bits

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str:
        """What is wrong with the values of tensors, beginning with the name of one; "" if nothing is."""
        return ""

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """As plain numbers, for metadata."""

    @abstractmethod
    def to_tensor(self) -> torch.Tensor:
        """int64, one dimension, for state dicts."""

    @classmethod
    @abstractmethod
    def from_dict(cls, stored: Any, bits: int, name: str) -> "Decoding":
        """The inverse of ``to_dict``, of a value that may come from anywhere.

        Raises:
            ValueError: it is no decoding of so many bits; the message begins with ``name``.
        """

    @classmethod
    @abstractmethod
    def from_tensor(cls, stored: torch.Tensor, bits: int, name: str) -> "Decoding":
        """The inverse of ``to_tensor``; errors as of ``from_dict``."""


@dataclass(frozen=True)
class ScalarDecoding(Decoding):
    """What turns codes and scales into weights: ``W ~ 2**exponent * levels[code] * absmax``, or what is stored for W.

    Attributes:
        levels: canonical codebook of ``2**bits`` levels.
        exponent: power of two that keeps the scales of a layer inside E4M4 or SE3M4.
        transform: ``"rotated"`` if that is the weight after its columns were divided by column scales and its blocks
            rotated (``format.transforms``), its scales having signs, or ``"none"``.

    >>> ScalarDecoding((-1.0, -0.25, 0.25, 1.0), exponent=3).bits
    2
    """

    kind = "scalar"
    marks = ABSMAX
    names = WORDS, ABSMAX, COLUMNS
    units = 1, BLOCK_SIZE
    scale_bits = 8 / BLOCK_SIZE

    levels: Levels
    exponent: int = 0
    transform: str = "none"

    @property
    def bits(self) -> int:
        return bits_of(len(self.levels))

    @property
    def transformed(self) -> bool:
        return self.transform != "none"

    @property
    def keeps_inputs(self) -> str:
        return "" if self.transformed else "not transformed"

    @property
    def described(self) -> str:
        return f"transform {self.transform!r}"

    def layout(self, shape: Sequence[int]) -> Layout:
        *lead, rows, width = shape
        sizes = (*lead, *weight_shape(rows, width, self.bits)), (*lead, *absmax_shape(rows, width)), (width,)
        found = zip(self.names, zip((torch.int32, torch.uint8, torch.uint8), sizes, strict=True), strict=True)
        return dict(list(found)[: 3 if self.transformed else 2])

    def codebook(self, device: torch.device | str) -> torch.Tensor:
        """float32 ``[2**bits]``: what the ops take."""
        return codebooks.scaled(self.levels, self.codebook_exponent, device)

    @property
    def codebook_exponent(self) -> int:
        """Of the power of two by which ops want the levels multiplied: ``exponent`` and, as they read the scales of a
        transformed layer with the bias of E4M4, what that of SE3M4 is less."""
        return self.exponent + (E4M4_BIAS - SE3M4_BIAS if self.transformed else 0)

    def to_dict(self) -> dict[str, Any]:
        transform = {"transform": self.transform} if self.transformed else {}
        return {"levels": list(self.levels), "exponent": self.exponent, **transform}

    def to_tensor(self) -> torch.Tensor:
        """int64 ``[2**bits + 2]``, the bits of float64 numbers, which no cast of floats changes: the levels, the
        exponent, and 1 if the weight is transformed, else 0."""
        return torch.tensor([*self.levels, self.exponent, self.transformed], dtype=torch.float64).view(torch.int64)

    @classmethod
    def from_tensor(cls, stored: torch.Tensor, bits: int, name: str) -> "ScalarDecoding":
        """The inverse of ``to_tensor``, of a tensor that may come from anywhere; errors as of ``from_dict``.

        >>> decoding = ScalarDecoding((-1.0, -0.25, 0.25, 1.0), exponent=3)
        >>> ScalarDecoding.from_tensor(decoding.to_tensor(), bits=2, name="q_proj") == decoding
        True
        """
        size = 2**bits + 2
        if stored.dtype != torch.int64 or stored.shape != (size,):
            found = f"dtype {stored.dtype} and shape {list(stored.shape)}"
            raise ValueError(f"{name}: found {found}, expected dtype torch.int64 and shape [{size}]")
        *levels, exponent, transformed = stored.view(torch.float64).tolist()
        if exponent % 1 or transformed not in (0, 1):
            raise ValueError(f"{name}: found {[exponent, transformed]} at its end, expected an exponent, and 0 or 1")
        transform = {"transform": TRANSFORMS[0]} if transformed else {}
        return cls.from_dict({"levels": levels, "exponent": int(exponent), **transform}, bits, name)

    @classmethod
    def from_dict(cls, stored: Any, bits: int, name: str) -> "ScalarDecoding":
        """As of ``Decoding``.

        >>> decoding = ScalarDecoding((-1.0, -0.25, 0.25, 1.0), exponent=3)
        >>> ScalarDecoding.from_dict(decoding.to_dict(), bits=2, name="q_proj") == decoding
        True
        """
        if not isinstance(stored, dict) or stored.keys() - {"transform"} != {"levels", "exponent"}:
            raise ValueError(f"{name}: found {stored!r}, expected levels, exponent and perhaps transform")
        levels = codebooks.canonical(stored["levels"], bits, f"{name}.levels")
        if list(levels) != list(stored["levels"]):
            raise ValueError(f"{name}.levels: found {stored['levels']}, expected them ascending, of magnitude 1")
        transform = check_transform(stored.get("transform", "none"), f"{name}.transform")
        exponent = check_exponent(stored["exponent"], transform != "none", f"{name}.exponent")
        return cls(levels, exponent, transform)
