"""Scales by the error of a layer's outputs, as far as it is the sum of the errors of single weights.

Of a transformed weight those are the column scales (``balance.balance_for``): once it is rotated, the inputs of a
block are alike on average. ``solve`` is for one that is not.
"""

import torch

from hf_kbit.format.codebooks import bits_of
from hf_kbit.format.reference import QUANTIZE_SLICE, quantize_rows

DIAGONAL = True


def solve(
    weight: torch.Tensor, moments: torch.Tensor, codebook: torch.Tensor, signed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each block the scale with the least squared error of its weights, each weighted by its input's moment; for
    each weight the nearest level.

    Args:
        weight: float32 ``[N, K]``, finite, its largest magnitude within the range of the scales.
        moments: float32 ``[K]``: of each input the sum of squares over tokens.
        codebook: float32 ``[2**bits]``, ascending, the largest magnitude 1.
        signed: whether scales have signs (``hf_kbit.ops.quantize``).

    Returns:
        planes, int32 ``[N, B * bits]``, and absmax, uint8 ``[N, B]``.

    Source: the weighting is that of AWQ (arXiv:2306.00978) and of llama.cpp's importance matrix.
    """
    mean = moments.mean()  # without any input every error counts the same
    importance = torch.where(mean > 0, moments / mean, 1.0)
    rows = weight.split(max(QUANTIZE_SLICE // weight.shape[1], 1))
    parts = [quantize_rows(part, codebook, bits_of(len(codebook)), True, signed, importance) for part in rows]
    planes, absmax = zip(*parts, strict=True)
    return torch.cat(planes), torch.cat(absmax)
