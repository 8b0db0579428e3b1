"""How a packed weight decodes, as one value, and how a weight of floats becomes a packed one.

What decides on a decoded weight besides its planes and scales is a ``Decoding``. A layer has one, gets it together
with planes and scales by ``KbitLinear.load``, and keeps it in the metadata of its state dict.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hf_kbit import codebooks
from hf_kbit.codebooks import Levels, bits_of
from hf_kbit.format import MAX_EXPONENT, layer_exponent
from hf_kbit.refine import refine

# From here on the largest scale rounds to 2**128, which float32 has not.
TOO_LARGE = 2.0**127 * (1 + 31 / 32)


@dataclass(frozen=True)
class Decoding:
    """What turns codes and scales into weights: ``W ~ 2**exponent * levels[code] * absmax``.

    Attributes:
        levels: canonical codebook of ``2**bits`` levels.
        exponent: power of two that keeps the scales of a layer inside E4M4.

    >>> Decoding((-1.0, -0.25, 0.25, 1.0), exponent=3).bits
    2
    """

    levels: Levels
    exponent: int = 0

    @property
    def bits(self) -> int:
        return bits_of(len(self.levels))

    def codebook(self, device: torch.device | str) -> torch.Tensor:
        """float32 ``[2**bits]``, ``levels * 2**exponent``: what the ops take."""
        return codebooks.scaled(self.levels, self.exponent, device)

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers, for metadata."""
        return {"levels": list(self.levels), "exponent": self.exponent}

    @classmethod
    def from_dict(cls, stored: Any, bits: int, name: str) -> "Decoding":
        """The inverse of ``to_dict``, of a value that may come from anywhere.

        Raises:
            ValueError: it is no decoding of so many bits; the message begins with ``name``.

        >>> decoding = Decoding((-1.0, -0.25, 0.25, 1.0), exponent=3)
        >>> Decoding.from_dict(decoding.to_dict(), bits=2, name="q_proj") == decoding
        True
        """
        if not isinstance(stored, dict) or stored.keys() != {"levels", "exponent"}:
            raise ValueError(f"{name}: found {stored!r}, expected levels and exponent")
        levels, exponent = codebooks.canonical(stored["levels"], bits, f"{name}.levels"), stored["exponent"]
        if list(levels) != list(stored["levels"]):
            raise ValueError(f"{name}.levels: found {stored['levels']}, expected them ascending, of magnitude 1")
        if type(exponent) is not int or abs(exponent) > MAX_EXPONENT:
            raise ValueError(f"{name}.exponent: found {exponent!r}, expected an integer within +-{MAX_EXPONENT}")
        return cls(levels, exponent)


class Packed(NamedTuple):
    """A weight in the stored form, and how it decodes."""

    planes: torch.Tensor
    absmax: torch.Tensor
    decoding: Decoding


def choose_decoding(
    weight: torch.Tensor, levels: Levels, search: bool, refined: bool = False, name: str = "weight"
) -> Decoding:
    """How a weight will decode: its exponent and, if levels are refined, levels of its own.

    Args:
        weight: float32, float16 or bfloat16 ``[N, K]``.
        levels: canonical codebook of ``2**bits`` levels.
        search: how scales will be found (``hf_kbit.quantize``).
        refined: whether the levels are refined on this weight (the codebook ``"layer"``).
        name: what errors call the weight.

    Raises:
        ValueError: the weight holds NaN or infinity, or is so large that float32 cannot hold what it decodes to.

    >>> choose_decoding(torch.full((1, 32), 1000.0), codebooks.normal_float(3), search=True).exponent
    6
    """
    # NaN and infinity survive the extremes, so one value read back serves the checks and the exponent.
    lowest, highest = torch.aminmax(weight)
    largest = torch.maximum(-lowest, highest).item()
    if not largest < float("inf"):
        raise ValueError(f"{name}: found NaN or infinite values, expected finite ones")
    if largest >= TOO_LARGE:
        raise ValueError(f"{name}: found magnitudes up to {largest:.4g}, expected them below {TOO_LARGE:.4g}")
    exponent = layer_exponent(largest)
    return Decoding(refine(weight, levels, exponent, search) if refined else levels, exponent)


def quantize_weight(
    weight: torch.Tensor, levels: Levels, search: bool, refined: bool = False, name: str = "weight"
) -> Packed:
    """Quantizes a weight ``[N, K]`` on its own device; arguments and errors as for ``choose_decoding``.

    >>> packed = quantize_weight(torch.rand(4, 64), codebooks.normal_float(3), search=True)
    >>> packed.planes.shape, packed.absmax.shape, packed.decoding.exponent
    (torch.Size([4, 6]), torch.Size([4, 2]), 0)
    """
    weight = weight.detach()
    decoding = choose_decoding(weight, levels, search, refined, name)
    planes, absmax = torch.ops.hf_kbit.quantize(weight, decoding.codebook(weight.device), search)
    return Packed(planes, absmax, decoding)
