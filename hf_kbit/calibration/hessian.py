"""Hessians of layers' squared errors: sums of ``x @ x.T``, damped so that they have an inverse."""

import torch


def damping_of(hessian: torch.Tensor, share: float) -> torch.Tensor:
    """What to add to the diagonal of a Hessian, float32 ``[K, K]``: ``share`` of its mean, or 1 if it is all zeros."""
    mean = hessian.diagonal().mean()
    return torch.where(mean > 0, share * mean, 1.0)


def cholesky(hessian: torch.Tensor, damping: torch.Tensor) -> torch.Tensor:
    """The lower Cholesky factor ``[K, K]`` of the Hessian with ``damping`` on its diagonal: float32, or float64 where
    float32 finds none.

    Raises:
        ValueError: the Hessian is not positive semidefinite.
    """
    for dtype in (torch.float32, torch.float64):
        damped = hessian.to(dtype, copy=True)
        damped.diagonal().add_(damping)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            return lower
    raise ValueError("hessian: found a matrix that is not positive semidefinite, expected sums of x @ x.T")
