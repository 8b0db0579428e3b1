"""Learned scales: gradient descent on the error of a layer's outputs, through the rounding of its weights."""

import math

import torch
import torch.nn.functional as F

from hf_kbit.calibration import weighted
from hf_kbit.codebooks import bits_of
from hf_kbit.format import BLOCK_SIZE, E4M4_BIAS
from hf_kbit.reference import (
    MAGNITUDE,
    QUANTIZE_SLICE,
    SIGN,
    decode_e4m4,
    halfway,
    nearest,
    over_scales,
    pack_codes,
    with_signs,
)

DIAGONAL = False
STEPS = 100
RATE = 1.0  # of the first step, in steps between E4M4 bytes; it falls to 0 as a cosine
DECAY, DECAY_OF_SQUARES = 0.9, 0.99  # Adam's
SMALLEST = 1e-20  # added to a root of mean squares: a gradient that float32 cannot square moves nothing


def solve(
    weight: torch.Tensor, hessian: torch.Tensor, codebook: torch.Tensor, signed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales with a small squared error of the layer's outputs, ``trace(D @ hessian @ D.T)`` for the difference D of
    the decoded weight and ``weight``; for each weight the nearest level.

    The scales of ``weighted`` are where Adam starts. A scale moves in steps between E4M4 bytes, and the weight is
    decoded with the byte next to it. Each row keeps the best scales that it has had, so none ends with a larger error
    than it started with.

    Args:
        weight: float32 ``[N, K]``, finite, its largest magnitude within the range of the scales.
        hessian: float32 ``[K, K]``: the sum of ``x @ x.T`` over tokens.
        codebook: float32 ``[2**bits]``, ascending, the largest magnitude 1.
        signed: whether scales have signs (``hf_kbit.ops.quantize``).

    Returns:
        planes, int32 ``[N, B * bits]``, and absmax, uint8 ``[N, B]``.

    Source: FLUTE (arXiv:2407.10960) learns the scales of NormalFloat so, on the loss of the whole model, which needs
    its activations and gradients in memory; here the loss is that of one layer's outputs, and needs one layer at a
    time. The derivative through the rounding is that of LSQ (arXiv:1902.08153), the optimizer Adam (arXiv:1412.6980).

    >>> weight, inputs = torch.rand(4, 64), torch.rand(1000, 64)
    >>> planes, absmax = solve(weight, inputs.T @ inputs, torch.tensor([-1.0, -0.3, 0.3, 1.0]))
    >>> planes.shape, absmax.shape
    (torch.Size([4, 4]), torch.Size([4, 2]))
    """
    padding = -weight.shape[1] % BLOCK_SIZE
    start = weighted.solve(weight, hessian.diagonal(), codebook, signed)[1]
    hessian = F.pad(hessian, (0, padding, 0, padding))
    planes, absmax = [], []
    rows = max(QUANTIZE_SLICE // weight.shape[1], 1)
    for part, first in zip(weight.split(rows), start.split(rows), strict=True):
        signs = torch.where((first >= SIGN) & signed, -1.0, 1.0)
        blocks = F.pad(part, (0, padding)).unflatten(1, (-1, BLOCK_SIZE)) * signs[..., None]
        magnitudes = _descend(blocks, signs, first, MAGNITUDE if signed else 255, hessian, codebook)
        codes = nearest(over_scales(blocks, magnitudes), halfway(codebook)).to(torch.uint8)
        planes.append(pack_codes(codes, bits_of(len(codebook))))
        absmax.append(with_signs(magnitudes, signs))
    return torch.cat(planes), torch.cat(absmax)


def _descend(blocks, signs, absmax, most, hessian, codebook) -> torch.Tensor:
    """Of all iterates that start from ``absmax``, uint8 ``[N, B]``, the best one of each row: magnitudes from 1 to
    ``most``. ``blocks`` are over ``signs``."""
    absmax = absmax & most
    best, least = absmax, torch.full_like(blocks[:, 0, 0], torch.inf)
    place = absmax.float()  # between bytes
    mean, squares = torch.zeros_like(place), torch.zeros_like(place)
    for step in range(STEPS):
        current = torch.where(absmax > 0, place.round(), 0).to(torch.uint8)
        error, gradient = _error(blocks, signs, current, hessian, codebook)
        better = error < least
        best, least = torch.where(better[:, None], current, best), torch.where(better, error, least)
        gradient *= 2.0 ** ((current // 16).clamp(min=1).float() - (E4M4_BIAS + 4))  # of the byte, not of its value
        mean.lerp_(gradient, 1 - DECAY)
        squares.lerp_(gradient.square(), 1 - DECAY_OF_SQUARES)
        root = (squares / (1 - DECAY_OF_SQUARES ** (step + 1))).sqrt() + SMALLEST
        rate = RATE * (1 + math.cos(math.pi * step / STEPS)) / 2
        place = (place - rate * mean / (1 - DECAY ** (step + 1)) / root).clamp(1, most)
    return best


def _error(blocks, signs, absmax, hessian, codebook) -> tuple[torch.Tensor, torch.Tensor]:
    """The error of each row, float32 ``[N]``, and its gradient by the scales, ``[N, B]``.

    Straight through: rounding counts as adding a constant to the ratio of weight and scale, so that a decoded weight
    grows with the scale by level - ratio; one outside the levels stays at the last one, and grows by that level. With
    codes held, where all grow by their levels, errors ended 3 to 14% larger.
    """
    scale, ratios = decode_e4m4(absmax)[..., None], over_scales(blocks, absmax)
    levels = codebook[nearest(ratios, halfway(codebook))]
    difference = torch.addcmul(-blocks, levels, scale) * signs[..., None]
    by_decoded = (difference.flatten(1) @ hessian).view_as(difference)
    error = (difference * by_decoded).sum((1, 2))
    inside = (ratios >= codebook[0]) & (ratios <= codebook[-1])
    growth = levels - ratios * inside
    return error, 2 * signs * (growth * by_decoded).sum(2)
