"""Drift: quantizing the layers before has changed what a layer is given, and its weight can make up for part of it."""

import torch

from hf_kbit.calibration.hessian import cholesky, damping_of
from hf_kbit.calibration.inputs import Moments

DAMPING = 0.01
SHARE = 0.35  # of the way to the least squares: on SmolLM2-135M 0.35 and 0.5 are alike, 0.7 and none are worse


def aim(weight: torch.Tensor, moments: Moments) -> torch.Tensor:
    """The weight to quantize: on its way from ``weight`` to the one whose outputs for what the layer is given now are
    nearest, in the sum of squares, to those of ``weight`` for what the layer was given in 16 bits.

    That one is ``weight @ (H + drift) @ inverse(H)`` for the Hessian H; only part of the way is taken, since both are
    known from a sample.

    Args:
        weight: float32 ``[N, K]``.
        moments: with drift, or without, when the weight stays as it is.

    Returns:
        float32 ``[N, K]``.

    Raises:
        ValueError: the Hessian is not positive semidefinite.

    Source: the objective is that of GPTAQ (arXiv:2504.02692), which weaves it into the feedback; here the weight is
    changed first, so that any solver can follow.

    >>> x = torch.randn(100, 8)
    >>> weight, moments = torch.randn(4, 8), Moments(x.T @ x, (2 * x - x).T @ x)  # all inputs have become half of it
    >>> bool(torch.allclose(aim(weight, moments), 1.35 * weight, rtol=0.1))
    True
    """
    if moments.drift is None:
        return weight
    lower = cholesky(moments.second, damping_of(moments.second, DAMPING))
    change = (weight @ moments.drift).T.to(lower.dtype)
    return weight + SHARE * torch.cholesky_solve(change, lower).T.float()
