"""Gives a quantized layer the weight of a dense one as a solver rounds it, for what goes into the layer."""

from types import ModuleType

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_kbit import codebooks
from hf_kbit.balance import balance_for
from hf_kbit.calibration import launches
from hf_kbit.calibration.experts import DenseProjection
from hf_kbit.calibration.moments import Moments, aim
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.packed import Decoding, Stored
from hf_kbit.reference import decode_e4m4
from hf_kbit.transforms import of_moments, to_stored

# Rows that a solver has at once: a table has many, and none needs another.
ROWS = 1 << 16
# Of K: with fewer rows an expert of K in_features is quantized without data. With K / 8 feedback leaves, on rows that
# were not read, 0.23 to 0.41 of the error without data at 2 bits, 0.92 for the worst expert (a mixture of 2
# million parameters trained on Python's library, 2026-11-23).
FEW = 1 / 8


def round_linear(name: str, layer: KbitLinear, dense: nn.Module, moments: Moments, solver: ModuleType) -> None:
    """Gives a linear layer its weight."""
    _check(name, moments)
    weight = dense.weight.T if isinstance(dense, Conv1D) else dense.weight
    # Feedback lost more with column scales for the inputs: it has all of their moments anyway.
    columns = balance_for(weight, moments.second) if solver.DIAGONAL else None
    weight = aim(weight.float(), moments)
    how = layer.quantize(weight, f"{name}.weight", columns)
    stored = Stored(weight, how.columns, name).weight
    planes, absmax = _rounded(stored, moments, how.decoding, how.columns, solver)
    layer.load(how._replace(planes=planes, absmax=absmax))


@launches.shared()
def round_projection(name: str, layer: KbitProjection, dense: DenseProjection, shares, solver: ModuleType) -> int:
    """Each expert for its own share; levels, exponent and column scales are those of all together, as they are before
    the drift moves them. Experts with few rows are quantized without data: returns how many.

    Args:
        shares: an iterable of the experts' ``Share``, in their order.
    """
    weight = dense.matrices.detach()
    whole, columns = weight.flatten(0, 1), None
    if solver.DIAGONAL:
        shares = list(shares)
        columns = balance_for(whole, sum(share.moments.second for share in shares))
    how = layer.quantize(weight, name, columns)
    decoding, columns = how.decoding, how.columns
    found, few = [], 0
    for own, (rows, moments) in zip(weight, shares, strict=True):
        _check(name, moments)
        reached = rows >= FEW * layer.in_features
        own = aim(own.float(), moments) if reached else own.float()
        if columns is not None:
            own = to_stored(own, decode_e4m4(columns), rotated=True)
        if reached:
            found.append(_rounded(own, moments, decoding, columns, solver))
        else:
            few += 1
            found.append(torch.ops.hf_kbit.quantize(own, decoding.codebook(own.device), True, decoding.transformed))
    planes, absmax = map(torch.stack, zip(*found, strict=True))
    layer.load(how._replace(planes=planes, absmax=absmax))
    return few


def _check(name: str, moments: Moments) -> None:
    if not moments.second.isfinite().all():
        raise ValueError(f"{name}: found NaN or infinite inputs, expected finite ones")


def _rounded(stored, moments: Moments, decoding: Decoding, columns, solver: ModuleType):
    """Planes and scales of a weight in the form that is stored, float32."""
    second = of_moments(moments.second, None if columns is None else decode_e4m4(columns))
    codebook = codebooks.scaled(decoding.levels, 0, stored.device)
    stored = stored * 2.0**-decoding.codebook_exponent
    parts = [solver.solve(rows, second, codebook, decoding.transformed) for rows in stored.split(ROWS)]
    return tuple(map(torch.cat, zip(*parts, strict=True)))
