"""Codebooks: the ``2**bits`` levels that codes index; how named ones are derived and given ones made canonical.

A canonical codebook is a tuple of Python floats that float32 holds exactly, ascending, with largest magnitude 1.
"""

import math
import struct
from collections.abc import Iterable
from functools import cache
from statistics import NormalDist

from hf_kbit.format import BITS, check_bits

Levels = tuple[float, ...]


def _float32(value: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)


def canonical(levels: Iterable[float], bits: int, name: str = "codebook") -> Levels:
    """Any table of ``2**bits`` numbers as a canonical codebook: sorted, divided by its largest magnitude, in float32.

    The division loses nothing: each block's scale takes it up. Equal levels are allowed (FP4 has two zeros).

    Args:
        levels: ``2**bits`` finite numbers in any order (a list, a tensor, an array).
        bits: 2 to 5.
        name: what errors call the table.

    Raises:
        ValueError: the number of levels is not ``2**bits``, a level is no finite number, or all are zero.

    >>> canonical([1, -2, 0, 2], bits=2)
    (-1.0, 0.0, 0.5, 1.0)
    """
    try:
        values = sorted(_float32(float(level)) for level in levels)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: found {levels!r}, expected a table of numbers") from None
    if len(values) != 2 ** check_bits(bits):
        raise ValueError(f"{name}: found {len(values)} levels, expected 2**bits = {2**bits} for {bits} bits")
    if not all(map(math.isfinite, values)):
        raise ValueError(f"{name}: found {values}, expected finite float32 levels")
    largest = max(abs(values[0]), abs(values[-1]))
    if largest == 0.0:
        raise ValueError(f"{name}: found only zeros, expected at least one level that is not zero")
    return tuple(_float32(value / largest) for value in values)


@cache
def normal_float(bits: int) -> Levels:
    """NormalFloat generalised to any width: levels for Gaussian weights that use every code equally often.

    N(0, 1) is cut into ``2**bits`` bins of equal probability; a level is the mean of the Gaussian within its bin,
    ``2**bits * (pdf(left edge) - pdf(right edge))``, and the levels are scaled to [-1, 1].

    Source: the idea of QLoRA's NF4 (Dettmers et al. 2023, arXiv:2305.14314), which takes quantiles instead of bin
    means and forces a zero.

    >>> [round(level, 4) for level in normal_float(2)]
    [-1.0, -0.2554, 0.2554, 1.0]
    """
    normal, bins = NormalDist(), 2 ** check_bits(bits)
    pdf = [0.0] + [normal.pdf(normal.inv_cdf(i / bins)) for i in range(1, bins)] + [0.0]
    lower = [bins * (pdf[i] - pdf[i + 1]) for i in range(bins // 2)]
    # The upper half mirrors the lower one, so that rounding cannot make the codebook lopsided.
    return canonical(lower + [-level for level in lower], bits)


NAMED = {"normal_float": normal_float}


def named(name: str, bits: int) -> Levels:
    """The canonical codebook of that name and width.

    Raises:
        ValueError: there is none; the message lists those there are.

    >>> len(named("normal_float", bits=3))
    8
    """
    if name not in NAMED:
        raise ValueError(f"codebook: found {name!r}, expected one of {sorted(NAMED)} or a table of 2**bits numbers")
    return NAMED[name](bits)


def resolve(codebook: str | Iterable[float], bits: int) -> Levels:
    """The canonical codebook that a name or a table of numbers stands for.

    >>> resolve("normal_float", 2) == resolve(normal_float(2), 2)
    True
    """
    return named(codebook, bits) if isinstance(codebook, str) else canonical(codebook, bits)


def bits_of(num_levels: int) -> int:
    """The width of a codebook with ``num_levels`` entries.

    Raises:
        ValueError: no width has that many.

    >>> bits_of(8)
    3
    """
    for bits in BITS:
        if num_levels == 2**bits:
            return bits
    raise ValueError(f"codebook: found {num_levels} levels, expected one of {[2**bits for bits in BITS]}")
