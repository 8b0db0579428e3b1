"""Gives a quantized layer the weight of a dense one as a solver rounds it, for what goes into the layer."""

from types import ModuleType

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_kbit.calibration import launches, trellis
from hf_kbit.calibration.moments import Moments, aim
from hf_kbit.calibration.routed import DenseProjection
from hf_kbit.format import codebooks
from hf_kbit.format.decoding import COLUMNS
from hf_kbit.format.reference import decode_e4m4
from hf_kbit.format.transforms import of_moments, to_stored
from hf_kbit.format.trellis import TrellisDecoding
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.weight import trellis_packing
from hf_kbit.weight.balance import balance_for
from hf_kbit.weight.tensor import Packed

# Rows that a solver has at once: a table has many, and none needs another.
ROWS = 1 << 16
# Of K: with fewer rows an expert of K in_features is quantized without data. With K / 8 feedback leaves, on rows that
# were not read, 0.23 to 0.41 of the error without data at 2 bits, 0.92 for the worst expert (a mixture of 2
# million parameters trained on Python's library, 2026-11-23).
FEW = 1 / 8


def round_linear(
    name: str,
    layer: KbitLinear,
    dense: nn.Module,
    moments: Moments,
    solver: ModuleType,
    outputs: list[torch.Tensor] | None = None,
) -> str:
    """Returns why the weight is not transformed, if it was to be. ``outputs`` are blocks of the diagonal of those of
    ``trellis.solve``."""
    moments.check(name)
    weight = dense.weight.T if isinstance(dense, Conv1D) else dense.weight
    # Feedback lost more with column scales for the inputs: it has all of their moments anyway.
    columns = balance_for(weight, moments.second) if solver.DIAGONAL else None
    weight = aim(weight.float(), moments)
    if _has_trellis(layer, solver):
        together = outputs and torch.block_diag(*(block.to(weight.device) for block in outputs))
        how = layer.decoding, layer.recipe.balances, f"{name}.weight", together
        layer.load(trellis.solve(weight, moments.second, *how))
        return ""
    how = layer.quantize(weight, f"{name}.weight", columns)
    if not _is_done(how, solver):
        for stored, found in zip(how.tensors.values(), _rounded(weight, moments, how, solver), strict=False):
            stored.copy_(found)
    layer.load(how)
    return how.untransformed


@launches.shared()
def round_projection(
    name: str, layer: KbitProjection, dense: DenseProjection, shares, solver: ModuleType
) -> tuple[list[bool], str]:
    """Each expert for its own one of the ``shares``; levels, exponent and column scales are those of all together, as
    they are before the drift moves them. Experts with few rows are quantized without data: returns which, if an
    expert's own moments count, and why weights are not transformed, if they were to be."""
    weight, columns, few = dense.matrices.detach(), None, []
    if solver.DIAGONAL:
        shares = list(shares)
        together = Moments(sum(share.moments.second for share in shares), None)
        together.check(name)
        columns = balance_for(weight.flatten(0, 1), together.second)
    if _has_trellis(layer, solver):
        return _round_trellises(name, layer, weight, shares), ""
    how = layer.quantize(weight, name, columns)
    for expert, (rows, moments) in enumerate(() if _is_done(how, solver) else shares):
        moments.check(name)
        few.append(rows < FEW * layer.in_features)
        if not few[-1]:
            own = aim(weight[expert].float(), moments)
            for stored, found in zip(how.tensors.values(), _rounded(own, moments, how, solver), strict=False):
                stored[expert] = found
    layer.load(how)
    return few, how.untransformed


def _has_trellis(layer: KbitWeight, solver: ModuleType) -> bool:
    """Whether a layer is solved as a trellis. With the diagonal alone column scales are all that a solver changes."""
    return isinstance(layer.decoding, TrellisDecoding) and not solver.DIAGONAL


def _round_trellises(name: str, layer: KbitProjection, weight: torch.Tensor, shares) -> list[bool]:
    """``round_projection`` for trellises: no two experts have scales in common."""
    found, few, how = [], [], (layer.decoding, layer.recipe.balances, name)
    for matrix, (rows, moments) in zip(weight, shares, strict=True):
        moments.check(name)
        few.append(rows < FEW * layer.in_features)
        if few[-1]:
            found.append(trellis_packing.quantize(matrix, *how))
        else:
            found.append(trellis.solve(aim(matrix.float(), moments), moments.second, *how))
    tensors = {own: torch.stack([each.tensors[own] for each in found]) for own in layer.decoding.names}
    layer.load(Packed(tensors, found[0].decoding))
    return few


def _is_done(how: Packed, solver: ModuleType) -> bool:
    """Whether column scales are all that a solver changes: a rotated block's inputs are alike on average, so none of
    its errors counts more than another."""
    return solver.DIAGONAL and how.decoding.transformed


def _rounded(weight: torch.Tensor, moments: Moments, how: Packed, solver: ModuleType):
    """Planes and scales of a float32 weight, quantized ``how``."""
    columns = decode_e4m4(how.tensors[COLUMNS]) if how.decoding.transformed else None
    stored = weight if columns is None else to_stored(weight, columns, rotated=True)
    stored = stored * 2.0**-how.decoding.codebook_exponent
    second, codebook = of_moments(moments.second, columns), codebooks.scaled(how.decoding.levels, 0, weight.device)
    parts = [solver.solve(rows, second, codebook, how.decoding.transformed) for rows in stored.split(ROWS)]
    return tuple(map(torch.cat, zip(*parts, strict=True)))
