"""Error feedback: what rounding a weight does to a layer's outputs, the weights not yet rounded make up for; then each
is rounded again, now that all the others are known."""

import torch
import torch.nn.functional as F

from hf_kbit.calibration.launches import one_launch
from hf_kbit.calibration.moments import cholesky, damping_of
from hf_kbit.format.codebooks import bits_of
from hf_kbit.format.reference import (
    MAGNITUDE,
    decode_e4m4,
    decode_scales,
    encode_e4m4,
    halfway,
    nearest,
    pack_codes,
    search_steps,
    signs_of,
    with_signs,
)
from hf_kbit.format.spec import BLOCK_SIZE

DIAGONAL = False
# Of the mean of the Hessian's diagonal, added to it: with less the error falls on the sample, and grows on other text.
DAMPING = 0.1
SWEEPS = 3  # more gain little: the error on other text falls by 4% with 3 of them, by half a percent more with 8


def solve(
    weight: torch.Tensor, hessian: torch.Tensor, codebook: torch.Tensor, signed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Planes and scales with a small squared error of the layer's outputs, ``trace(D @ hessian @ D.T)`` for the
    difference D of the decoded weight and ``weight``.

    Columns are rounded one after another, and the error of each is spread over those to come as the least squares
    say. A block's scale is the one for which its columns, rounded so, add least to the error. Blocks go in descending
    order of their inputs' moments, and so do the columns within each: the largest errors are made while many columns
    are left. Nothing of that order is stored. In sweeps over all blocks then, in the same order, each weight takes the
    level that is best while all others stay as they are, and each scale the best byte for its codes.

    Args:
        hessian: float32 ``[K, K]``: the sum of ``x @ x.T`` over tokens.
        weight, codebook, signed: as for ``weighted.solve``, and so are planes and absmax.

    Source: GPTQ (arXiv:2210.17323), which is LDLQ of QuIP (arXiv:2307.13304); here with scales of blocks that are
    searched by the error after the feedback. Sweeps by coordinates are those of QuantEase (arXiv:2309.01885), there
    from rounded weights on and with fixed scales.
    """
    bits, padding = bits_of(len(codebook)), -weight.shape[1] % BLOCK_SIZE
    damping = damping_of(hessian, DAMPING)
    kept = F.pad(torch.ones_like(weight[0]), (0, padding))
    columns, hessian = F.pad(weight, (0, padding)), F.pad(hessian, (0, padding, 0, padding))
    order = _order(hessian.diagonal())
    columns, hessian, kept = columns.T[order].contiguous(), hessian[order][:, order], kept[order]
    target, root = columns.clone(), inverse_root(hessian, damping)
    codes = torch.empty_like(columns, dtype=torch.uint8)
    absmax = torch.empty((len(columns) // BLOCK_SIZE, len(weight)), dtype=torch.uint8, device=weight.device)
    first = slice(BLOCK_SIZE)
    round_block = one_launch(_block, columns[first], root[first, first], kept[first], codebook, signed=signed)
    for block, start in enumerate(range(0, len(columns), BLOCK_SIZE)):
        own = slice(start, start + BLOCK_SIZE)
        codes[own], absmax[block], errors = round_block(columns[own], root[own, own], kept[own], codebook)
        columns[own.stop :] -= root[own, own.stop :].T @ errors
    hessian.diagonal().add_(damping)
    _sweep(codes, absmax, target, hessian, kept, codebook, signed)
    codes[order], absmax[order[::BLOCK_SIZE] // BLOCK_SIZE] = codes.clone(), absmax.clone()
    return pack_codes(codes.T.unflatten(1, (-1, BLOCK_SIZE)).contiguous(), bits), absmax.T.contiguous()


def _order(moments: torch.Tensor) -> torch.Tensor:
    """int64 ``[K]``: descending blocks of descending columns; equal ones stay in their order."""
    inside = moments.view(-1, BLOCK_SIZE).sort(descending=True, stable=True).indices
    blocks = moments.view(-1, BLOCK_SIZE).sum(1).sort(descending=True, stable=True).indices
    return (inside[blocks] + blocks[:, None] * BLOCK_SIZE).flatten()


def inverse_root(hessian: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    """float32 upper triangular U with ``U.T @ U`` the inverse of the Hessian with ``damping`` on its diagonal."""
    # Cholesky from the last column to the first: the inverse of this factor is U.
    upper = cholesky(hessian.flip(0, 1), damping).flip(0, 1)
    unit = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    return torch.linalg.solve_triangular(upper, unit, upper=True).float()


def _block(columns: torch.Tensor, root: torch.Tensor, kept: torch.Tensor, codebook: torch.Tensor, signed: bool):
    """Rounds the ``columns`` of one block, ``[32, N]``, with each scale of the search, for the block's own part of U;
    padding is what is 0 in ``kept``, ``[32]``. Returns what the best scale of each row gives: codes ``[32, N]``,
    absmax ``[N]``, and errors ``[32, N]`` over the diagonal of U."""
    signs = signs_of(columns.T, codebook) if signed else torch.ones_like(columns[0])
    columns = columns * signs
    most = MAGNITUDE if signed else 255
    tried = search_steps(signed)
    steps = torch.arange(tried.start, tried.stop, device=columns.device)
    largest = encode_e4m4(columns.abs().amax(0), most).int()
    absmax = torch.where(largest > 0, (largest + steps[:, None]).clamp(1, most), 0).to(torch.uint8)
    scale = decode_e4m4(absmax)
    inverse = torch.where(scale > 0, 1 / scale, 0)
    left = columns[:, None].expand(-1, *scale.shape).contiguous()  # [32, scales, N]
    codes = torch.empty_like(left, dtype=torch.uint8)
    between = halfway(codebook)
    for j in range(BLOCK_SIZE):
        code = nearest(left[j] * inverse, between)
        codes[j] = code
        left[j].addcmul_(codebook[code], scale, value=-1).div_(root[j, j])
        left[j + 1 :].addcmul_(root[j, j + 1 :, None, None], left[j][None], value=-1)
    best = (left.square() * kept[:, None, None]).sum(0).argmin(0)
    index = best.expand(BLOCK_SIZE, 1, -1)
    chosen = with_signs(absmax.gather(0, best[None])[0], signs)
    return codes.gather(1, index)[:, 0], chosen, left.gather(1, index)[:, 0] * signs


def _sweep(codes, absmax, target, hessian, kept, codebook, signed) -> None:
    """Lowers the error of codes ``[K, N]`` and absmax ``[B, N]``, in place, for the float32 weight ``target`` and the
    damped Hessian, both in the order of ``solve``."""
    scales = decode_scales(absmax, signed).repeat_interleave(BLOCK_SIZE, dim=0)
    gradient = hessian @ torch.addcmul(-target, codebook[codes.int()], scales)  # half of it

    def parts(own, block):
        return codes[own], absmax[block], gradient[own], hessian[own, own], kept[own], codebook

    blocks = [slice(start, start + BLOCK_SIZE) for start in range(0, len(codes), BLOCK_SIZE)]
    round_again = one_launch(_round_again, *parts(blocks[0], 0), signed=signed)
    for _ in range(SWEEPS):
        for block, own in enumerate(blocks):
            codes[own], absmax[block], change = round_again(*parts(own, block))
            gradient += hessian[:, own] @ change


def _round_again(codes, absmax, gradient, hessian, kept, codebook, signed):
    """Codes ``[32, N]`` and absmax ``[N]`` of one block, and the change of its decoded weight, float32 ``[32, N]``.

    What a weight should be, while the others stay, is where the gradient vanishes; the nearest level is best then. The
    error as a function of the scale is a parabola for given codes: the byte next to its bottom is best.
    """
    scale = decode_scales(absmax, signed)
    inverse = torch.where(scale != 0, 1 / scale, 0)
    before = codebook[codes.int()] * scale
    found, gradient, between = codes.int(), gradient.clone(), halfway(codebook)
    for j in range(BLOCK_SIZE):
        wanted = torch.addcdiv(before[j], gradient[j], hessian[j, j], value=-1)
        found[j] = code = nearest(wanted.mul_(inverse), between)
        change = torch.addcmul(-before[j], codebook[code], scale)
        gradient.addcmul_(hessian[:, j, None], change)
    codes = torch.where(kept[:, None] > 0, found.to(torch.uint8), codes)
    levels = codebook[codes.int()]
    shown = levels * kept[:, None]
    slope, curvature = (shown * gradient).sum(0), (shown * (hessian @ shown)).sum(0)
    bottom = scale - torch.where(curvature > 0, slope / curvature, 0)
    magnitude = encode_e4m4(bottom.abs(), MAGNITUDE if signed else 255).clamp(min=1)
    step = decode_e4m4(magnitude) * scale.sign() - scale
    better = (bottom * scale > 0) & (step * (2 * slope + step * curvature) < 0)
    absmax = torch.where(better, with_signs(magnitude, scale.sign()), absmax)
    return codes, absmax, levels * (scale + torch.where(better, step, 0)) - before
