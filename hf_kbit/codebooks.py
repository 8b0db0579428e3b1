"""Codebooks: the ``2**bits`` levels that codes index; how named ones are derived and given ones made canonical.

A canonical codebook is a tuple of Python floats that float32 holds exactly, ascending, with largest magnitude 1.
"""

import math
import struct
from collections.abc import Iterable
from functools import cache
from statistics import NormalDist

import torch

from hf_kbit.format import BITS, BLOCK_SIZE, check_bits

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


def _gaussian_blocks(count: int):
    """float32 ``[count, 32]``: numbers of N(0, 1) without order, the same on every machine (hashes of their index)."""
    hashed = torch.arange(1, count * BLOCK_SIZE + 1) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        hashed = (hashed ^ (hashed >> shift & (1 << 64 - shift) - 1)) * factor
    uniform = ((hashed >> 12 & (1 << 52) - 1).double() + 0.5) / 2**52
    return torch.special.ndtri(uniform).float().view(count, BLOCK_SIZE)


def _lloyd(bits: int) -> torch.Tensor:
    """Of ``optimal``, float64, the largest 1."""
    weights = _gaussian_blocks(8192)
    # Those of E4M4 from 1 to 3.875.
    scales = torch.tensor([i / step for step in (16, 8) for i in range(16, 32)], dtype=torch.float32)
    levels = torch.special.ndtri((torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits)
    levels = levels / levels[-1]
    chosen = torch.zeros(len(weights), dtype=torch.int64)
    for turn in range(28):
        table = levels.float()
        halfway = (table[1:] + table[:-1]) / 2
        # Every fourth time all scales, else those near the last best one.
        around, steps = (0 * chosen, range(len(scales))) if turn % 4 == 0 else (chosen, range(-2, 3))
        least = torch.full((len(weights),), torch.inf, dtype=torch.float32)
        for step in steps:
            index = (around + step).clamp(0, len(scales) - 1)
            scale = scales[index][:, None]
            ratio = weights / scale
            error = ((ratio - table[torch.bucketize(ratio, halfway)]) * scale).square().sum(dim=1)
            chosen, least = torch.where(error < least, index, chosen), torch.minimum(error, least)
        scale = scales[chosen].double()[:, None].expand_as(weights).flatten()
        codes = torch.bucketize(weights / scales[chosen][:, None], halfway).flatten()
        added, counted = (torch.zeros(2**bits, dtype=torch.float64) for _ in range(2))
        added.index_add_(0, codes, weights.flatten() * scale)
        counted.index_add_(0, codes, scale.square())
        mean = added / counted
        mean = (mean - mean.flip(0)) / 2  # of both signs
        levels = levels + 1.8 * (mean / mean[-1] - levels)
        levels = levels / levels[-1]
    return levels


@cache
def optimal(bits: int) -> Levels:
    """The levels with the least squared error for blocks of Gaussian weights whose scales are searched.

    Lloyd's iteration on 8192 blocks: with these levels each block takes the best of the scales that E4M4 has, each
    weight the nearest level; then each level becomes the mean of its weights over their scales, weighted by the
    squares of the scales, as far as the error of a weight counts. Steps are taken 1.8 times as far, which needs half
    as many. It starts at quantiles of N(0, 1), and takes a second or two, once in a process. Levels are rounded to
    multiples of 2**-13, so that the order in which a machine adds cannot be seen.

    Source: Lloyd 1982 (Least squares quantization in PCM), with the choice of a block's scale inside the iteration.

    >>> [round(level, 2) for level in optimal(2)]
    [-1.0, -0.29, 0.29, 1.0]
    """
    with torch.device("cpu"):  # whatever the default is: meta while a model is loaded
        levels = _lloyd(check_bits(bits))
    return canonical([round(level * 2**13) / 2**13 for level in levels.tolist()], bits)


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
