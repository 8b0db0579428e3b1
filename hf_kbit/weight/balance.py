"""Column scales that balance a weight: from the weight alone, or for inputs whose second moments are known."""

import math

import torch

from hf_kbit.format.reference import encode_e4m4, power_of_two, row_slices

# Sums are of whole numbers that float64 holds, so that no order of adding changes them: of roots, the largest being
# this, and of ratios, 1 being this.
_ROOTS, _RATIOS = 2.0**24, 2.0**20
SMALLEST, LARGEST = 2.0**-10, 31.0  # of column scales: what E4M4 holds to a sixteenth of an octave
# One over the magnitude that typical weights are brought to, and the powers of two that may be taken for that.
_TYPICAL_INVERSE, _LEAST_POWER, _MOST_POWER = 2.0**5, -4, 3
SMALLEST_MOMENT = 1e-4  # of the mean, added to each: what a sample shows nothing of may come yet
# Weights at a time: on a CPU as many as its cache holds.
_SLICE_ON_CPU, _SLICE = 1 << 18, 1 << 24


def balance(weight: torch.Tensor) -> torch.Tensor:
    """Column scales c such that no column of ``weight / c`` stands out, as E4M4 bytes.

    Of each column m is the mean over its rows of ``sqrt|w|`` over the mean of that in the row, and c is ``m**2.25``:
    with m**2 the columns would be alike. Training makes the weights small that meet large inputs, so that a weight's
    error counts for more the smaller its column is: dividing by a little more than the magnitude is better. Roots,
    rather than squares, keep a few large weights from deciding. A power of two on top brings typical weights to 2**-5,
    from where the scales of blocks have room on either side. A column of zeros has scale 1.

    The same bytes on every device: every step is one that IEEE 754 rounds correctly, and no sum depends on its order.

    Args:
        weight: floating ``[*, N, K]``, finite: one matrix, or several that have their input in common
            (``reference.matrices``).

    Returns:
        uint8 ``[K]``.

    Source: SINQ (arXiv:2509.22944) balances rows and columns by their standard deviations, in turn, and keeps both
    scales; here blocks have their own, so only columns count. The measure and its power were found on SmolLM2-135M
    (docs/quality.md).

    >>> from hf_kbit.format.spec import decode_e4m4
    >>> weight = torch.ones(4, 3) * torch.tensor([1.0, 4.0, 0.0])
    >>> [round(decode_e4m4(byte), 1) for byte in balance(weight).tolist()]
    [8.0, 31.0, 1.0]
    """
    in_features, at_a_time = weight.shape[-1], _SLICE_ON_CPU if weight.device.type == "cpu" else _SLICE
    largest = torch.stack([largest_magnitude(rows) for rows in row_slices(weight, at_a_time)]).max().float()
    if not largest > 0:
        return encode_e4m4(torch.ones(in_features, dtype=torch.float32, device=weight.device))
    unit = _ROOTS / largest.sqrt()
    sums = torch.zeros(in_features, dtype=torch.float64, device=weight.device)
    total = torch.zeros((), dtype=torch.float64, device=weight.device)
    for rows in row_slices(weight, at_a_time):
        roots = rows.float().abs().sqrt_().mul_(unit).round_()
        of_row = roots.sum(1, keepdim=True, dtype=torch.float64)
        total += of_row.sum()
        factor = torch.where(of_row > 0, _RATIOS * in_features / of_row, 0.0).float()
        sums += roots.mul_(factor).round_().sum(0, dtype=torch.float64)
    rows = math.prod(weight.shape[:-1])
    mean = (sums * (1 / (_RATIOS * rows))).float()  # some devices divide by a number as by a tensor, some not
    root = (total / (unit.double() * rows * in_features)).float()
    return _encode(mean * mean * mean.sqrt().sqrt(), root * root)


def largest_magnitude(weight: torch.Tensor) -> torch.Tensor:
    """A scalar on the weight's device; NaN and infinity survive."""
    lowest, highest = torch.aminmax(weight)  # the magnitudes would be a second copy of the weight
    return torch.maximum(-lowest, highest)


def _encode(scale: torch.Tensor, typical: torch.Tensor) -> torch.Tensor:
    """E4M4 bytes of scales ``[K]`` times a power of two: the one for which ``typical``, a magnitude of weights over
    ``scale``, comes next to 2**-5, as far as the scales stay near 1. A scale of 0 becomes 1."""
    nearest = torch.frexp(typical * (_TYPICAL_INVERSE * 2**0.5)).exponent - 1
    scale = scale * power_of_two(nearest.clamp(_LEAST_POWER, _MOST_POWER))
    return encode_e4m4(torch.where(scale > 0, scale.clamp(SMALLEST, LARGEST), 1.0))


def balance_for(weight: torch.Tensor, moments: torch.Tensor) -> torch.Tensor:
    """Column scales for given inputs: those with which the squared error of the outputs is least, if rounding errors
    are alike in a block once it is rotated, and in proportion to its size.

    That error is the product of two sums over the block, of ``moments * c**2`` and of ``w**2 / c**2``, and least for
    ``c**4`` in proportion to w**2 over moments.

    Args:
        weight: floating ``[N, K]``, finite.
        moments: float32 ``[K]``: of each input the sum of squares over tokens.

    Returns:
        uint8 ``[K]``, E4M4.

    Source: AWQ (arXiv:2306.00978) finds scales between inputs and weights by trying powers of the former.

    >>> balance_for(torch.ones(4, 3), torch.tensor([1.0, 16.0, 16.0])).tolist() == balance_for(
    ...     torch.tensor([[4.0, 1.0, 1.0]]), torch.ones(3)).tolist()
    True
    """
    squares, moments = weight.float().square().mean(0), moments + SMALLEST_MOMENT * moments.mean()
    scale = torch.where((squares > 0) & (moments > 0), (squares / moments).sqrt().sqrt(), 0.0)
    scale /= (scale.sum() / (scale > 0).sum()).clamp(min=torch.finfo(scale.dtype).tiny)
    return _encode(scale, torch.where(scale > 0, squares / scale.square(), 0.0).mean().sqrt())
