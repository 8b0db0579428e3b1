"""Codebooks: the ``2**bits`` levels that codes index; how named ones are derived and given ones made canonical.

A canonical codebook is a tuple of Python floats that float32 holds exactly, ascending, with largest magnitude 1.
"""

import math
import struct
from collections.abc import Iterable
from functools import cache
from statistics import NormalDist

import torch

from hf_kbit.format.spec import BITS, check_bits

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
        if isinstance(levels, str):  # "0123" is iterable too
            raise TypeError
        values = sorted(_float32(float(level)) for level in levels)
    except (OverflowError, TypeError, ValueError):
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


# In units of 2**-13, as benchmarks/optimal_levels.py finds them: for scales without signs those above zero, whose
# opposites are levels too; for scales with signs all.
_SYMMETRIC = {
    2: (2344, 8192),
    3: (865, 2707, 4919, 8192),
    4: (390, 1181, 2006, 2876, 3837, 4939, 6288, 8192),
    5: (177, 535, 901, 1282, 1672, 2061, 2465, 2886, 3326, 3799, 4287, 4820, 5419, 6086, 6826, 8192),
}
_WITH_SIGNS = {
    2: (-5771, -1246, 2751, 8192),
    3: (-6370, -3899, -2048, -412, 1194, 2920, 5020, 8192),
    4: (-6181, -4854, -3802, -2888, -2080, -1319, -594, 113, 818, 1563, 2358, 3207, 4134, 5192, 6560, 8192),
    5: (-5952, -5287, -4668, -4153, -3686, -3254, -2851, -2454, -2086, -1737, -1392, -1047, -710, -383, -59)
    + (265, 599, 937, 1273, 1606, 1957, 2326, 2707, 3105, 3524, 3972, 4453, 4970, 5530, 6160, 6787, 8192),
}


@cache
def optimal(bits: int, signed: bool = False) -> Levels:
    """The levels with the least squared error for blocks of Gaussian weights whose scales are searched.

    They are multiples of 2**-13. Lloyd's iteration has found them: each block takes the best of the scales that E4M4
    has, each weight the nearest level; then each level becomes the mean of its weights over their scales, weighted by
    the squares of the scales, as far as the error of a weight counts.

    Args:
        bits: 2 to 5.
        signed: for scales with the sign of the weight of largest magnitude. That weight is near level 1 then, no
            weight is near -1, and the levels lie where weights are: the error is 6 to 8% less.

    Source: Lloyd 1982 (Least squares quantization in PCM), with the choice of a block's scale inside the iteration;
    that a scale may have a sign is known from llama.cpp's formats.

    >>> [round(level, 2) for level in optimal(2)]
    [-1.0, -0.29, 0.29, 1.0]
    >>> [round(level, 2) for level in optimal(2, signed=True)]
    [-0.7, -0.15, 0.34, 1.0]
    """
    units = (_WITH_SIGNS if signed else _SYMMETRIC)[check_bits(bits)]
    return canonical([unit / 2**13 for unit in (units if signed else (*units, *(-unit for unit in units)))], bits)


@cache
def integer(bits: int) -> Levels:
    """The integers of so many bits, from ``-2**(bits - 1)`` on, over their largest magnitude.

    >>> integer(2)
    (-1.0, -0.5, 0.0, 0.5)
    """
    half = 2 ** (check_bits(bits) - 1)
    return canonical(range(-half, half), bits)


@cache
def fp4(bits: int = 4) -> Levels:
    """The floating-point numbers of 4 bits, E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 with both signs, over 6.

    Raises:
        ValueError: bits is not 4.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 5.3.3.

    >>> fp4()[-3:]
    (0.5, 0.6666666865348816, 1.0)
    """
    if bits != 4:
        raise ValueError(f"codebook: found 'fp4' for {bits} bits, expected 4 bits")
    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    return canonical([*magnitudes, *(-magnitude for magnitude in magnitudes)], bits)


NAMED = {"fp4": fp4, "int": integer, "normal_float": normal_float, "optimal": optimal}


def named(name: str, bits: int, signed: bool = False) -> Levels:
    """The canonical codebook of that name and width, for scales with or without signs.

    Raises:
        ValueError: there is none; the message lists those there are.

    >>> len(named("normal_float", bits=3))
    8
    """
    if name not in NAMED:
        raise ValueError(f"codebook: found {name!r}, expected one of {sorted(NAMED)} or a table of 2**bits numbers")
    return optimal(bits, signed) if NAMED[name] is optimal else NAMED[name](bits)


def resolve(codebook: str | Iterable[float], bits: int, signed: bool = False) -> Levels:
    """The canonical codebook that a name or a table of numbers stands for; ``signed`` as in ``optimal``.

    >>> resolve("normal_float", 2) == resolve(normal_float(2), 2)
    True
    """
    return named(codebook, bits, signed) if isinstance(codebook, str) else canonical(codebook, bits)


def bits_of(num_levels: int) -> int:
    """The width of a codebook with ``num_levels`` entries."""
    for bits in BITS:
        if num_levels == 2**bits:
            return bits
    raise ValueError(f"codebook: found {num_levels} levels, expected one of {[2**bits for bits in BITS]}")


def scaled(levels: Levels, exponent: int, device: torch.device) -> torch.Tensor:
    """The codebook that ops take, float32 ``[2**bits]``: the levels times ``2**exponent``."""
    return torch.tensor(levels, dtype=torch.float32, device=device) * 2.0**exponent
