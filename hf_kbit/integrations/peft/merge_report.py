"""What merging adapters into quantized layers changed, measured and told in one warning."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from hf_kbit.reference import matrices
from hf_kbit.tensor import KbitTensor

# Below this part of what adapters add, a merge that requantizes is said to have lost them.
LOST = 0.5


class MergedLayer(NamedTuple):
    """``sums`` over the weights, float64 ``[6]``: squares of the exact ones, of what requantizing changed, and of what
    adapters add; what is kept of that, ``<stored - before, added>``; stored ones that changed; all."""

    name: str
    bits: int
    sums: torch.Tensor


def measure(name: str, before: KbitTensor, exact, after: KbitTensor) -> MergedLayer:
    """Compares the weight before merging, the exact sum in float32 (``reference.matrices``), and what is kept."""
    sums = []
    decoded = before.matrices(torch.float32), matrices(exact), after.matrices(torch.float32)
    for old, new, stored in zip(*decoded, strict=True):
        added, error = new - old, stored - new
        kept, changed = ((stored - old) * added).sum(), (stored != old).sum()
        sums.append(torch.stack([*(x.square().sum() for x in (new, error, added)), kept, changed]).double())
    count = torch.tensor([math.prod(after.whole_shape)])
    return MergedLayer(name, after.bits, torch.cat([torch.stack(sums).sum(0).cpu(), count]))


def _relative(error: float, exact: float) -> float:
    return (error / exact) ** 0.5 if exact else 0.0


def _summary(layers: list[MergedLayer]) -> str:
    exact, error, added, kept, changed, weights = sum(layer.sums for layer in layers).tolist()
    widths = "/".join(str(bits) for bits in sorted({layer.bits for layer in layers}))
    most, worst = max((_relative(layer.sums[1].item(), layer.sums[0].item()), layer.name) for layer in layers)
    text = (
        f"hf_kbit: merged into {len(layers)} layers of {widths} bits. Requantizing changed the merged weights by "
        f"{_relative(error, exact):.2%} (relative error; {most:.2%} at most, in {worst})"
    )
    if added:
        text += (
            f" and kept {kept / added:.0%} of what the adapters add; {changed / weights:.2%} of the stored weights "
            "are not what they were"
        )
        if kept < LOST * added:
            text += ". So the merge rounds most of the adapters away: keep them unmerged, or merge into 16 bits"
    return text + ". Without this loss, into 16 bits: hf_kbit.merge_and_unload(model, dequantize=True)"


_collected: ContextVar[list[MergedLayer] | None] = ContextVar("layers merged in one call", default=None)


def report(layer: MergedLayer) -> None:
    if (layers := _collected.get()) is None:
        warnings.warn(_summary([layer]), stacklevel=4)
    else:
        layers.append(layer)


@contextmanager
def one_report() -> Iterator[None]:
    """Gathers the reports of all layers that are merged inside, and in this thread, into one warning."""
    layers: list[MergedLayer] = []
    token = _collected.set(layers)
    try:
        yield
    finally:
        _collected.reset(token)
    if layers:
        warnings.warn(_summary(layers), stacklevel=5)
