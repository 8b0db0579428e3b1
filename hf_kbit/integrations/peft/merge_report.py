"""What merging adapters into quantized layers changed, measured and told in one warning."""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from hf_kbit.format.reference import matrices
from hf_kbit.weight.tensor import KbitTensor

# Below this part of what adapters add, a merge that requantizes is said to have lost them.
LOST = 0.5


class Sums(NamedTuple):
    """Over weights: squares of the exact ones, of what requantizing changed, and of what adapters add; of that what is
    kept, ``<stored - before, added>``; and numbers of stored weights that changed, and of all."""

    exact: float
    error: float
    added: float
    kept: float
    changed: float
    weights: float

    @property
    def relative_error(self) -> float:
        return (self.error / self.exact) ** 0.5 if self.exact else 0.0


class MergedLayer(NamedTuple):
    name: str
    bits: int
    sums: Sums


def measure(name: str, before: KbitTensor, exact, after: KbitTensor) -> MergedLayer:
    """Compares the weight before merging, the exact sum in float32 (``reference.matrices``), and what is kept."""
    sums = []
    decoded = before.matrices(torch.float32), matrices(exact), after.matrices(torch.float32)
    for old, new, stored in zip(*decoded, strict=True):
        added, error = new - old, stored - new
        kept, changed = ((stored - old) * added).sum(), (stored != old).sum()
        sums.append(torch.stack([*(x.square().sum() for x in (new, error, added)), kept, changed]).double())
    return MergedLayer(name, after.bits, Sums(*torch.stack(sums).sum(0).tolist(), math.prod(after.whole_shape)))


def _summary(layers: list[MergedLayer]) -> str:
    total = Sums(*map(sum, zip(*(layer.sums for layer in layers), strict=True)))
    widths = "/".join(str(bits) for bits in sorted({layer.bits for layer in layers}))
    worst = max(layers, key=lambda layer: layer.sums.relative_error)
    text = (
        f"hf_kbit: merged into {len(layers)} layers of {widths} bits. Requantizing changed the merged weights by "
        f"{total.relative_error:.2%} (relative error; {worst.sums.relative_error:.2%} at most, in {worst.name})"
    )
    added, kept = total.added, total.kept
    if added:
        text += (
            f" and kept {kept / added:.0%} of what the adapters add; {total.changed / total.weights:.2%} of the "
            "stored weights are not what they were"
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
