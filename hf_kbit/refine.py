"""The codebook ``"layer"``: levels refined on the weights of the layer that they are for."""

import math
from collections.abc import Iterable

import torch

from hf_kbit.balance import largest_magnitude
from hf_kbit.codebooks import Levels, bits_of, canonical, scaled
from hf_kbit.reference import QUANTIZE_SLICE, decode_scales, unpack_codes

SAMPLE = 1 << 18  # about so many weights, of rows evenly spaced, decide on the levels
TURNS = 8
_UNIT = 2.0**40  # sums are of integers, in this part of the largest weight: no order of adding changes them


def refine(parts: Iterable[torch.Tensor], levels: Levels, exponent: int, search: bool, signed: bool = False) -> Levels:
    """Levels with a squared error of this weight not above that of ``levels``, and mostly below.

    Lloyd's iteration: the weight is quantized, then each level becomes the mean of its weights over their scales,
    weighted by the squares of the scales. A sample of the rows is used, and all of them to compare the result with
    ``levels``. The same on every device and with any number of threads, however the weight is cut into parts.

    Args:
        parts: the rows of the weight, float32, float16 or bfloat16 ``[n, K]`` at a time, finite; gone through three
            times.
        levels: canonical codebook of ``2**bits`` levels, where the iteration starts.
        exponent: of the power of two by which ``hf_kbit.ops.quantize`` wants levels multiplied for this weight.
        search: how scales are found (``hf_kbit.ops.quantize``).
        signed: whether they have signs.

    Source: Lloyd 1982 (Least squares quantization in PCM), with the choice of a block's scale inside the iteration.

    >>> from hf_kbit.codebooks import optimal
    >>> weight = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) - 0.3  # uniform and lopsided
    >>> [round(level, 1) for level in refine([weight], optimal(2), exponent=0, search=True)]
    [-0.3, 0.1, 0.5, 1.0]
    """
    extremes, sizes = zip(*((largest_magnitude(part), part.numel()) for part in parts), strict=True)
    largest, numbers = torch.stack(extremes).max().item(), sum(sizes)
    if largest == 0.0:
        return levels
    unit = math.frexp(largest)[1]  # weights times 2**-unit are within 1
    refined, sample = levels, _every(max(numbers // SAMPLE, 1), parts)
    for _ in range(TURNS):
        refined = canonical(_means(sample, refined, exponent, search, signed, unit), bits_of(len(levels)))
    gained = 0
    for part in parts:
        before, after = (_squared_error(part, table, exponent, search, signed, unit) for table in (levels, refined))
        gained += before - after
    return refined if gained > 0 else levels


def _every(step: int, parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """Each row whose number is a multiple of ``step``."""
    chosen, first = [], 0
    for part in parts:
        chosen.append(part[-first % step :: step].clone())  # a view would keep the whole part
        first += len(part)
    return torch.cat(chosen)


def _integers(values: torch.Tensor) -> torch.Tensor:
    return (values * _UNIT).round().long()


def _means(weight: torch.Tensor, levels: Levels, exponent: int, search: bool, signed: bool, unit: int) -> list[float]:
    """What each level should be for the codes and scales that it leads to; a level without weights stays."""
    planes, absmax = torch.ops.hf_kbit.quantize(weight, scaled(levels, exponent, weight.device), search, signed)
    codes = unpack_codes(planes, bits_of(len(levels))).flatten(-2)[:, : weight.shape[1]].flatten().int()
    scales = decode_scales(absmax, signed).double().repeat_interleave(32, dim=-1)[:, : weight.shape[1]] * 2.0 ** (
        exponent - unit
    )
    products = scales * (weight.double() * 2.0**-unit)
    added, counted = (
        torch.zeros(len(levels), dtype=torch.int64, device=weight.device).index_add_(
            0, codes, _integers(part).flatten()
        )
        for part in (products, scales.square())
    )
    pairs = zip(levels, added.tolist(), counted.tolist(), strict=True)
    return [level + 1.8 * (a / c - level) if c else level for level, a, c in pairs]


def _squared_error(weight: torch.Tensor, levels: Levels, exponent: int, search: bool, signed: bool, unit: int) -> int:
    codebook, total = scaled(levels, exponent, weight.device), 0
    for rows in weight.split(max(QUANTIZE_SLICE // weight.shape[1], 1)):
        planes, absmax = torch.ops.hf_kbit.quantize(rows, codebook, search, signed)
        ratios = codebook[unpack_codes(planes, bits_of(len(codebook))).int()]
        decoded = (ratios * decode_scales(absmax, signed)[..., None]).flatten(-2)[:, : rows.shape[1]]
        total += int(_integers(((rows.double() - decoded) * 2.0**-unit).square()).sum())
    return total
