"""Products of dense matrices of experts, each with rows of its own, by torch."""

from itertools import pairwise

import torch
from torch.nn import functional as F


def dense_product(x, weight, bias, offsets, transposed: bool) -> torch.Tensor:
    """What a ``KbitProjection`` computes, of a 16-bit tensor that was left as it is; waits for the GPU where torch has
    no grouped product for it."""
    fits = not any(size * x.element_size() % 16 for size in weight.shape[1:])
    if (x.is_cuda or torch.compiler.is_compiling()) and fits and has_grouped_product(x):
        return grouped_product(x, weight if transposed else weight.mT, bias, offsets)
    parts, numbers = [], offsets.tolist()
    for expert, (first, last) in enumerate(pairwise(numbers)):
        own = weight[expert] if transposed else weight[expert].T
        part = x[first:last] @ own
        parts.append(part if bias is None else part + bias[expert])
    return torch.cat([*parts, x.new_zeros(len(x) - numbers[-1], parts[0].shape[-1])])


def grouped_product(x, matrices, bias, offsets) -> torch.Tensor:
    """``x[i] @ matrices[e] + bias[e]`` for the rows i of expert e, zeros for those of none; matrices ``[E, K, N]``."""
    y = F.grouped_mm(x, matrices, offs=offsets[1:])
    owners = owners_of(len(x), offsets)
    if bias is not None:
        y = y + bias[owners.clamp(max=len(bias) - 1)]
    return y.masked_fill((owners == len(matrices))[:, None], 0)  # which the product leaves as memory was


def owners_of(rows: int, offsets: torch.Tensor) -> torch.Tensor:
    """The expert of each row, or how many experts there are for those of none."""
    places = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets[1:], places, right=True)


def has_grouped_product(x: torch.Tensor) -> bool:
    """Whether ``F.grouped_mm`` takes x, without waiting for a GPU or stopping the compiler, as its loops do."""
    if x.is_cuda:  # others get a loop: torch 2.10, _scaled_mm_allowed_device in GroupedBlas.cpp
        suits = x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)
    elif torch.compiler.is_compiling():
        suits = x.dtype == torch.bfloat16
    else:
        suits = x.is_cpu and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return suits and len(x) > 0
