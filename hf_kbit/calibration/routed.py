"""What goes into the experts of a mixture: to each the tokens that the router sends to it.

A projection of all experts is a tensor of their module, which no hook sees. Inside ``opened`` it is a module, called
as a packed one is (``nn.experts``), and what is done to linear layers can be done to it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from hf_kbit.calibration.moments import Moments, add_products, given
from hf_kbit.nn.classes import change
from hf_kbit.nn.experts import KbitExperts, KbitProjection, arguments
from hf_kbit.nn.site import Site, put_projection
from hf_kbit.ops import route_experts
from hf_kbit.ops.grouped import dense_product

# Numbers of float32, 4 GiB: in one run of the data the moments of so many experts are added up as take this. Those of
# Qwen3-30B-A3B, 2048 wide, all 128; of the down projections of Mixtral-8x7B, 14336 wide, two at a time.
AT_ONCE = 1 << 30


class DenseProjection(nn.Module):
    """A projection of all experts in 16 or 32 bits, called as a ``KbitProjection`` is."""

    def __init__(self, weight: nn.Parameter, transposed: bool):
        super().__init__()
        self.weight, self.transposed = weight, transposed

    @property
    def matrices(self) -> torch.Tensor:
        """``[E, N, K]``."""
        return self.weight.mT if self.transposed else self.weight

    def forward(self, x, rows, offsets, bias=None):
        return dense_product(x if rows is None else x[rows], self.weight, bias, offsets, self.transposed)


@contextmanager
def opened(projections: Iterable[Site]) -> Iterator[None]:
    """Inside, dense projections are modules; afterwards tensors again, but for those that are packed."""
    before = {site.home: (type(site.home), dict(site.home._parameters)) for site in projections}
    for site in projections:
        put_projection(site, DenseProjection(site.weight, site.transposed))
    try:
        yield
    finally:
        for experts, (plain, tensors) in before.items():
            for own in [own for own, child in experts._modules.items() if isinstance(child, DenseProjection)]:
                del experts._modules[own]
            experts._parameters.clear()
            experts._parameters.update({own: x for own, x in tensors.items() if own not in experts._modules})
            if not any(isinstance(child, KbitProjection) for child in experts.children()):
                change(experts, plain)


class Share(NamedTuple):
    """What one expert is given: how many rows that are not all zeros, and their ``Moments``."""

    rows: int
    moments: Moments


def shares(
    projection: DenseProjection,
    experts: KbitExperts,
    once: bool,
    runs: Sequence[tuple[Callable, Callable | None]],
    diagonal: bool,
    counts: Sequence[torch.Tensor] = (),
) -> Iterator[Share]:
    """The ``Share`` of each of the experts that a projection is of, in their order, for the ``runs`` of
    ``moments.moments``, and ``counts``, its ``weights``. The data is run for as many at a time as memory allows.

    For the drift, a token goes through the dense experts to which the quantized layers before send it: where it would
    have gone in 16 bits, other experts may be, whose inputs say nothing of these.
    """
    count, _, size = projection.matrices.shape
    at_once = count if diagonal else max(AT_ONCE // (2 * size**2), 1)
    for first in range(0, count, at_once):
        numbers = range(first, min(first + at_once, count))
        yield from _shares(projection, experts, once, runs, diagonal, counts, numbers)


def _shares(projection, experts, once, runs, diagonal, counts, numbers) -> list[Share]:
    sent = []

    def keep(module, args, keywords):
        sent.append(arguments(type(module).plain, args, keywords)[1:2])  # Llama 4's experts are given none

    def send_again(module, args, keywords):
        hidden_states, *others = arguments(type(module).plain, args, keywords)
        return (hidden_states, *sent.pop(0), *others[1:]), {}

    size = projection.matrices.shape[-1]
    shape = (len(numbers), size) if diagonal else (len(numbers), size, size)
    second = projection.weight.new_zeros(shape, dtype=torch.float32)
    drift = None if diagonal else torch.zeros_like(second)
    rows = [0] * len(numbers)
    for (run, run_dense), of_tokens in zip(runs, counts or [None] * len(runs), strict=True):
        sent.clear()
        with experts.register_forward_pre_hook(keep, with_kwargs=True):
            calls = given(projection, run, once)
        scales = [_scales(of_tokens, *indices, experts=experts.num_experts) for indices in sent]
        dense_calls = calls
        if not diagonal:
            with experts.register_forward_pre_hook(send_again, with_kwargs=True):
                dense_calls = given(projection, run_dense, once)
        for (x, order, offsets, *_), (dense, *_), scale in zip(calls, dense_calls, scales, strict=True):
            bounds = offsets.tolist()
            for place, number in enumerate(numbers):
                part = slice(*bounds[number : number + 2])
                own = part if order is None else order[part]
                now, before = x[own].float(), dense[own].float()
                rows[place] += int(now.any(1).sum())
                if scale is not None:
                    now, before = now * scale[part], before * scale[part]
                if diagonal:
                    second[place] += now.square().sum(0)
                    continue
                # Zeros are what Llama 4 gives to experts that a token is not sent to.
                before = torch.where(before.any(1, keepdim=True), before, now)
                add_products(second[place], now, now)
                add_products(drift[place], before - now, now)
    found = map(Moments, second, [None] * len(numbers) if diagonal else drift)
    return [Share(*each) for each in zip(rows, found, strict=True)]


def _scales(counts: torch.Tensor | None, indices: torch.Tensor | None = None, *, experts: int) -> torch.Tensor | None:
    """float32 ``[rows, 1]``: roots of what tokens count, of the rows that experts are given in their order, by the
    experts of each token; those of Llama 4 are given all tokens. None where all count alike."""
    if counts is None:
        return None
    roots = counts.reshape(-1, 1).sqrt()
    if indices is None:
        return roots.repeat(experts, 1)
    rows, *_ = route_experts(indices.reshape(-1, indices.shape[-1]), experts)
    return roots.to(rows.device)[rows]
