"""Error feedback for a weight that has a trellis: tiles are encoded one after another, and what that does to the
layer's outputs, those to come make up for: tiles of the in_features behind them, and of the out_features too if it is
known what errors of outputs cost together."""

import math

import torch
import torch.nn.functional as F

from hf_kbit.calibration.feedback import inverse_root
from hf_kbit.calibration.moments import damping_of
from hf_kbit.format.trellis import MOST_LEAD, TILE, TrellisDecoding, rotate, tiles_of
from hf_kbit.weight.tensor import Packed
from hf_kbit.weight.trellis_packing import (
    CODE,
    best_factor,
    check,
    encodable,
    inner_of,
    outer_of,
    scales_of,
)

# Of the mean of the Hessian's diagonal, added to it. With .01 the error on like text is 1% less, with .1 it is 3% more
# (docs/lab/2026-11-28-trellis-quantizing.md); unlike text wants more.
DAMPING = 0.03
OUTPUT_DAMPING = 0.03  # the same of the outputs' Hessian
ROWS = 1 << 15  # out_features that are solved at once, a multiple of all blocks
PART = 256  # of a strip of tiles, what a product sums at once


def solve(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    decoding: TrellisDecoding,
    balances: bool,
    name: str = "weight",
    outputs: torch.Tensor | None = None,
) -> Packed:
    """A weight with a small squared error of the layer's outputs, ``trace(outputs @ D @ hessian @ D.T)`` for the
    difference D of the decoded weight and ``weight``.

    Scales of both sides are those without data. Tiles go in descending order of their rotated inputs' moments, and of
    their outputs', so that the largest errors are made while many are left; nothing of that order is stored. At last
    each out_feature gets the scale that is best for its codes, whatever the others have.

    Args:
        weight: float32 ``[N, K]``, finite.
        hessian: float32 ``[K, K]``: the sum of ``x @ x.T`` over tokens.
        outputs: float32 ``[N, N]``: the sum of ``g @ g.T`` over gradients by the outputs. None: the identity.
        decoding, balances, name: as for ``trellis_packing.quantize``.

    Raises:
        ValueError: as there; or float16 scales do not hold the weight.

    Source: GPTQ (arXiv:2210.17323), which is LDLQ of QuIP (arXiv:2307.13304); by blocks of the columns of a tile as
    QTIP (arXiv:2406.11235) has it, and on both sides as YAQA (arXiv:2505.22988) has it.

    >>> x = torch.randn(200, 32)
    >>> packed = solve(torch.randn(64, 32), x.T @ x, TrellisDecoding(3, block=32), balances=True)
    >>> packed.tensors["trellis"].shape
    torch.Size([2, 4, 48])
    """
    check(weight, name)
    decoding = encodable(decoding)
    scales = scales_of(weight, decoding, balances)
    if scales.lost:
        raise ValueError(f"{name}: {scales.lost}; leave the layer in 16 bits")
    scales = scales.times(best_factor(weight, decoding, scales))
    order, places, root = _in_turn(_turned(hessian, scales.suh, decoding.block), DAMPING)
    trellis, svh = [], []
    step = ROWS if outputs is None else len(scales.svh)
    for start in range(0, len(weight), step):
        rows, own = weight[start : start + step], scales.svh[start : start + step]
        columns = inner_of(rows, scales.suh, own, decoding.block)[:, places]
        if outputs is None:
            codes = _encoded(columns, root, decoding.bits)
        else:
            down, below, by_outputs = _in_turn(_turned(outputs, own, decoding.block), OUTPUT_DAMPING)
            codes = _encoded_on_both_sides(columns[below], root, by_outputs, decoding.bits)
            codes = torch.empty_like(codes).index_copy_(1, down, codes)
        codes = torch.empty_like(codes).index_copy_(0, order, codes)
        inner = torch.ops.hf_kbit.decode_trellis(codes, CODE, torch.float32)
        decoded = outer_of(inner, scales.suh, decoding.block)[: len(rows), : rows.shape[1]]
        trellis.append(codes)
        svh.append(_best_sizes(rows, decoded, own, hessian))
    tensors = torch.cat(trellis, 1), scales.suh, torch.cat(svh)
    return Packed(dict(zip(decoding.names, tensors, strict=True)), decoding)


def _in_turn(turned: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of one side, by its Hessian between the rotations: the order of its tiles, that of its features, and U with
    ``U.T @ U`` the inverse of the Hessian in that order."""
    order = turned.diagonal().view(-1, TILE).sum(1).sort(descending=True, stable=True).indices
    places = (order[:, None] * TILE + torch.arange(TILE, device=order.device)).flatten()
    return order, places, inverse_root(turned[places][:, places], damping_of(turned, damping))


def left(hessian: torch.Tensor, scales: torch.Tensor, block: int, damping: float) -> float:
    """What feedback along one side leaves of what errors of a weight cost, of 1, for that side's Hessian and scales.

    Source: QuIP (arXiv:2307.13304): the cost is as the mean of D, for factors ``L @ D @ L.T`` of the Hessian, where it
    is as the mean of its diagonal without feedback. Here D is that of tiles, in which there is none.
    """
    turned = _turned(hessian, scales, block)
    *_, root = _in_turn(turned, damping)
    tiles = root.view(len(root) // TILE, TILE, -1, TILE).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    kept = torch.linalg.inv(tiles).square().sum() / len(root)
    return (kept / (turned.diagonal().mean() + damping_of(turned, damping))).item()


def _turned(hessian: torch.Tensor, scales: torch.Tensor, block: int) -> torch.Tensor:
    """The Hessian of one side of the weight between the rotations, padded."""
    missing, scale = len(scales) - len(hessian), scales.float()
    padded = F.pad(hessian, (0, missing, 0, missing)) * scale * scale[:, None]
    return rotate(rotate(padded, block).T, block)


def _encoded(columns: torch.Tensor, root: torch.Tensor, bits: int) -> torch.Tensor:
    """int16 ``[K / 16, N / 16, 16 * bits]`` of what is to be encoded, float32 ``[N, K]``, and upper triangular U with
    ``U.T @ U`` the inverse of the Hessian, both in the order to go by."""
    codes = []
    columns = columns.clone()
    for start in range(0, columns.shape[1], TILE):
        own, later = slice(start, start + TILE), slice(start + TILE, None)
        found = torch.ops.hf_kbit.encode_trellis(tiles_of(columns[:, own])[0], bits, MOST_LEAD)[None]
        errors = columns[:, own] - torch.ops.hf_kbit.decode_trellis(found, CODE, torch.float32)
        errors = torch.linalg.solve_triangular(root[own, own], errors, upper=True, left=False)
        columns[:, later] -= errors @ root[own, later]
        codes.append(found)
    return torch.cat(codes)


def _encoded_on_both_sides(
    weight: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor, bits: int
) -> torch.Tensor:
    """``_encoded`` with U of both sides. Tile (j, i) leaves e, and tiles that come later on both sides lose their part
    of ``outputs[j].T @ E @ inputs[i]``, E being ``inv(outputs[j, j]).T @ e @ inv(inputs[i, i])``; none of a diagonal
    needs another of it."""
    down, across = (size // TILE for size in weight.shape)
    # Rows of tiles, the last first: so the tiles that are encoded together lie on a diagonal from the left above to
    # the right below, of which torch has views, and their strips of both sides are slices.
    tiles = weight.view(down, TILE, across, TILE).transpose(1, 2).flip(0)
    outputs = outputs.view(down, TILE, down, TILE).flip(0, 2).flatten(2).flatten(0, 1)
    above, along = _strips(outputs), _strips(inputs)
    own_above, own_along = (_diagonal(strips.unflatten(1, (-1, TILE)), 0) for strips in (above, along))
    inverse_above, inverse_along = torch.linalg.inv(own_above).mT, torch.linalg.inv(own_along)
    errors = weight.new_zeros(across, down, TILE, TILE)  # E
    passed = weight.new_zeros(down, across, TILE, TILE)  # tiles of outputs.T @ E, each transposed
    found = torch.empty(across, down, 16 * bits, dtype=torch.int16, device=weight.device)
    for offset in range(down - 1, -across, -1):  # of the row, over the column
        row, column = max(offset, 0), max(-offset, 0)
        count = min(down - row, across - column)
        j, i = slice(row, row + count), slice(column, column + count)
        from_above = _product(above[j], errors[i].flatten(1, 2))
        target = _diagonal(tiles, -offset) - _product(passed[j].flatten(1, 2), along[i]) - from_above @ own_along[i]
        codes = torch.ops.hf_kbit.encode_trellis(tiles_of(target.flatten(0, 1))[0], bits, MOST_LEAD)
        decoded = torch.ops.hf_kbit.decode_trellis(codes[None], CODE, torch.float32).view_as(target)
        left = inverse_above[j] @ (target - decoded) @ inverse_along[i]
        _diagonal(errors, offset).copy_(left)
        _diagonal(passed, -offset).copy_((from_above + own_above[j].mT @ left).mT)
        _diagonal(found, offset).copy_(codes)
    return found.flip(1)


def _strips(root: torch.Tensor) -> torch.Tensor:
    """Of a square matrix, ``[n, K, 16]``: the columns of each tile."""
    return root.view(len(root), -1, TILE).transpose(0, 1).contiguous()


def _diagonal(tiles: torch.Tensor, offset: int) -> torch.Tensor:
    """Of ``[n, m, ...]``, a view with the tiles of a diagonal first."""
    return tiles.diagonal(offset).movedim(-1, 0)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left.mT @ right`` of strips, ``[n, K, 16]``, summed over parts of K: as whole products, so small and so long,
    they would keep a few processors of a GPU busy."""
    part = math.gcd(left.shape[1], PART)
    return (left.unflatten(1, (-1, part)).mT @ right.unflatten(1, (-1, part))).sum(1)


def _best_sizes(rows: torch.Tensor, decoded: torch.Tensor, svh: torch.Tensor, hessian: torch.Tensor) -> torch.Tensor:
    """float16, as ``svh``: of each row the scale for which the error of the layer's outputs is least; the one that it
    has where that would have another sign."""
    through = decoded @ hessian
    square = (through * decoded).sum(1)
    found = (through * rows).sum(1) / torch.where(square > 0, square, 1.0)
    found = F.pad(found, (0, len(svh) - len(rows)))
    return torch.where((found * svh > 0) & found.half().isfinite(), found.half(), svh)
