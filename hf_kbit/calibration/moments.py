"""What goes into the linear layers of one layer of the model: in which order, its second moments, and what follows."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_kbit.calibration.check import rows_of
from hf_kbit.calibration.stream import forwards, hooked

DRIFT_DAMPING = 0.01
SHARE = 0.35  # of the way to the least squares: on SmolLM2-135M 0.35 and 0.5 are alike, 0.7 and none are worse


class Group(NamedTuple):
    """Linear layers that are given the same tensor, such as q, k and v; or one projection of experts."""

    names: list[str]
    once: bool  # whether no layer around is called more than once, so that a run may end where this group is called


class Moments(NamedTuple):
    """Sums over tokens, which may have weights, float32: of ``x @ x.T``, ``[K, K]``, or its diagonal, ``[K]``, for
    what the layers are given; and of ``(d - x) @ x.T``, ``[K, K]``, where d is what they would be given had nothing
    been quantized yet."""

    second: torch.Tensor
    drift: torch.Tensor | None

    def check(self, name: str) -> None:
        if not self.second.isfinite().all():
            raise ValueError(f"{name}: found NaN or infinite inputs, expected finite ones")


class _Enough(Exception):
    pass


def groups(linears: dict[str, nn.Module], run: Callable[[], Any]) -> list[Group]:
    """Groups of linear layers in the order in which ``run()`` calls them; those that it does not call come last."""
    calls: list[tuple[str, object]] = []
    # Projections of experts, which are told more than x, are in no group with others.
    with hooked(linears, lambda name, x, *ways: calls.append((name, ways or x))):
        run()
    once = len(calls) == len({name for name, _ in calls}) == len(linears)
    alike = [[name for name, _ in same] for _, same in groupby(calls, lambda call: id(call[1]))]
    seen, ordered = set(), []
    for names in (*alike, *([name] for name in linears)):
        if new := [name for name in dict.fromkeys(names) if name not in seen]:
            ordered.append(Group(new, once))
            seen.update(new)
    return ordered


def moments(
    linear: nn.Module,
    group: Group,
    runs: Sequence[tuple[Callable, Callable | None]],
    diagonal: bool,
    weights: Sequence[torch.Tensor] = (),
    dimension: int | None = None,
) -> Moments:
    """The ``Moments`` of a group, one of whose layers is ``linear``; ``runs`` are for each part of the data what runs
    it through the quantized layers, and, to find the drift, what runs it through the dense ones; ``weights``, float32
    ``[sequences, tokens]``, are for each part how much its tokens count, if they do not count alike, and sequences are
    in this ``dimension`` of what the layer is given (``rows_of``)."""
    second, drift = None, None
    for (run, run_dense), own in zip(runs, weights or [None] * len(runs), strict=True):
        x = _inputs(linear, run, group.once, own, dimension)
        if second is None:
            second = x.new_zeros(x.shape[1:] if diagonal else (x.shape[1], x.shape[1]))
            drift = None if run_dense is None else torch.zeros_like(second)
        if diagonal:
            second += x.square().sum(0)
        else:
            add_products(second, x, x)
        if run_dense is not None:
            add_products(drift, _inputs(linear, run_dense, group.once, own, dimension) - x, x)
    return Moments(second, drift)


def add_products(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds ``left.T @ right`` to ``total``, all float32. A GPU's tensor cores, which are many times as fast as its
    float32, round ``left`` and ``right`` to the 11 bits of TF32 first: more than activations in bfloat16 have."""
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        total.addmm_(left.T, right)
    finally:
        matmul.fp32_precision = before


def _inputs(
    linear: nn.Module, run: Callable[[], Any], once: bool, weights: torch.Tensor | None, dimension: int | None
) -> torch.Tensor:
    """float32 ``[tokens, K]``: all that the layer is given in ``run()``, times roots of the tokens' weights if it is
    given each once."""
    found = [x for x, *_ in given(linear, run, once)]
    if not found:
        weight = linear.weight  # of a layer that no token has reached, such as an expert
        return weight.new_zeros((0, getattr(linear, "in_features", weight.shape[0])), dtype=torch.float32)
    if weights is not None and len(found) == 1:
        rows = rows_of(found[0], dimension, len(weights))
        if rows is not None and rows.shape[:-1] == weights.shape:
            return (rows.float() * weights.to(rows.device).unsqueeze(-1).sqrt()).flatten(0, 1)
    return torch.cat([x.flatten(0, -2).float() for x in found])


def given(module: nn.Module, run: Callable[[], Any], once: bool) -> list[tuple]:
    """What the module is called with in ``run()``, each time; that ends there if once is enough."""
    calls = []

    def take(_, *arguments):
        calls.append(arguments)
        if once:
            raise _Enough

    with hooked({"": module}, take), suppress(_Enough):
        run()
    return calls


def standing_in(modules: dict[str, nn.Module], others: dict[str, nn.Module]) -> AbstractContextManager[None]:
    """Inside, each of ``modules`` that has one among ``others`` computes what that one does."""
    return forwards({modules[name]: other.forward for name, other in others.items() if name in modules})


# --- what follows from them -----------------------------------------------------------------------


def damping_of(hessian: torch.Tensor, share: float) -> torch.Tensor:
    """What to add to the diagonal of a Hessian, float32 ``[K, K]``: ``share`` of its mean, or 1 if it is all zeros."""
    mean = hessian.diagonal().mean()
    return torch.where(mean > 0, share * mean, 1.0)


def cholesky(hessian: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    """The lower Cholesky factor ``[K, K]`` of the Hessian with ``damping`` on its diagonal: float32, or float64 where
    float32 finds none."""
    for dtype in (torch.float32, torch.float64):
        damped = hessian.to(dtype, copy=True)
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return lower
    raise ValueError("hessian: found a matrix that is not positive semidefinite, expected sums of x @ x.T")


def aim(weight: torch.Tensor, moments: Moments) -> torch.Tensor:
    """The weight to quantize instead of ``weight``, float32 ``[N, K]``, to make up for part of the drift of its
    inputs.

    It lies on the way from ``weight`` to ``weight @ (H + drift) @ inverse(H)`` for the Hessian H: the weight whose
    outputs for today's inputs are nearest to those of ``weight`` for the inputs in 16 bits. Only part of the way is
    taken, since both are known from a sample. Without drift the weight stays as it is.

    Source: the objective is that of GPTAQ (arXiv:2504.02692), which weaves it into the feedback; here the weight is
    changed first, so that any solver can follow.

    >>> _, x = torch.manual_seed(0), torch.randn(100, 8)
    >>> weight, moments = torch.randn(4, 8), Moments(x.T @ x, (2 * x - x).T @ x)  # all inputs have become half of it
    >>> bool(torch.allclose(aim(weight, moments), 1.35 * weight, rtol=0.1))
    True
    """
    if moments.drift is None:
        return weight
    lower = cholesky(moments.second, damping_of(moments.second, DRIFT_DAMPING))
    change = (weight @ moments.drift).T.to(lower.dtype)
    return weight + SHARE * torch.cholesky_solve(change, lower).T.float()
