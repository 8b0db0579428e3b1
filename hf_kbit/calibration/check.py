"""Whether a model can be calibrated: what its layers are given when it runs as usual, and as it is calibrated."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kbit.calibration import passes, stream

SAMPLE = (3, 128)  # sequences, and tokens of each at most, that a check reads
NUMBERS = 8  # of each input of a layer that are compared, as many random projections
SEED = 0  # of these
# Of tokens, which rounding may change by more: in a mixture it sends one that is between two experts elsewhere.
FEW = 0.1
LEAST, UNITS = 5e-3, 16  # what rounding changes others by at most, of their size; in units of their dtype's precision
WAY_OUT = "name what stays in 16 bits in modules_to_not_convert, or quantize while loading, without data"

Calls = dict[str, list[torch.Tensor]]  # of layers, what each call was given


def sample_of(batches: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 ``[sequences, tokens]``: the beginnings of some, and of those backwards where there are too few."""
    rows = [row for batch in batches[: SAMPLE[0]] for row in batch][: SAMPLE[0]]
    length = min(SAMPLE[1], *(len(row) for row in rows))
    rows = [row[:length] for row in rows]
    while len(rows) < SAMPLE[0]:
        rows.append(rows[-1].flip(0).roll(len(rows)))
    return torch.stack(rows)


@torch.no_grad()
def check(
    model: PreTrainedModel, layers: Mapping[str, list[str]], batches: Sequence[torch.Tensor], device: torch.device
) -> dict[str, int | None]:
    """Runs the model on a few sequences twice: on all at once, each layer once; and as ``stream`` does, one sequence
    at a time, each layer again and again. Where a layer is given something else then, it cannot be calibrated.

    Args:
        layers: ``{layer of the model: names in it to quantize}``.
        batches: int64 ``[sequences, tokens]`` each.

    Returns:
        In which dimension of what each of the names is given the sequences are, for ``rows_of``; None where in none.

    Raises:
        ValueError: the model needs more than tokens, tokens do not go through one of the layers, or what a layer is
            given is not finite, or not the same in both ways. The model is as it was.
    """
    ids, names = sample_of(batches), [name for own in layers.values() for name in own]
    limit = limit_of(model.dtype)  # what layers hand on is in it, whatever they compute in
    with _recording(model, names) as record:
        whole = _whole(model, layers, ids, device, record)
        for name, calls in whole.items():
            if not all(x.isfinite().all() for x in calls):
                raise ValueError(f"{name}: found NaN or infinite inputs, expected finite ones")
        record.calls = {}
        dimensions, turns = {}, _in_parts(model, layers, ids, device, record)
    for parts in turns:
        for name, calls in whole.items():
            dimensions[name], error = _compared(calls, [part.get(name, []) for part in parts], limit)
            if error > limit:
                raise ValueError(
                    f"{name}: found inputs that differ by {error:.1%} where {type(model).__name__} reads one sequence "
                    "at a time and computes each layer again and again, expected those of one pass of all: what one "
                    f"layer leaves for another is lost, or random numbers are drawn; {WAY_OUT}"
                )
    return dimensions


def limit_of(dtype: torch.dtype) -> float:
    """The share of their size by which numbers may differ that are the same but for rounding."""
    return max(LEAST, UNITS * torch.finfo(dtype).eps)


def rows_of(x: torch.Tensor, dimension: int | None, sequences: int) -> torch.Tensor | None:
    """``[sequences, rows, K]``, of ``[*, K]``: what a layer is given, or the gradient of what it makes of that, by
    sequences, which are in this dimension, alone or before others. None where they are in none.

    >>> x = torch.arange(12).view(3, 2, 2)  # tokens, sequences, K
    >>> rows_of(x, 1, 2)[0].tolist()
    [[0, 1], [4, 5], [8, 9]]
    """
    if dimension is None or dimension >= x.dim() - 1 or x.shape[dimension] % sequences:
        return None
    return x.unflatten(dimension, (sequences, -1)).movedim(dimension, 0).reshape(sequences, -1, x.shape[-1])


# --- what layers are given ------------------------------------------------------------------------


class _Record:
    """What layers are given from when on ``calls`` was set, which is a dictionary of lists."""

    def __init__(self):
        self.calls, self._projections = {}, {}

    def take(self, name: str, x: torch.Tensor, *_) -> None:
        generator = torch.Generator().manual_seed(SEED)
        size = x.shape[-1]
        if (own := self._projections.get((size, x.device))) is None:
            own = torch.randn(size, NUMBERS, generator=generator).to(x.device)
            self._projections[size, x.device] = own
        self.calls.setdefault(name, []).append((x.detach().float() @ own).cpu())


@contextmanager
def _recording(model: nn.Module, names: Iterable[str]) -> Iterator[_Record]:
    record = _Record()
    with stream.hooked({name: model.get_submodule(name) for name in names}, record.take):
        yield record


def _whole(model, layers: Mapping[str, list[str]], ids: torch.Tensor, device, record: _Record) -> Calls:
    """What each layer is given in one pass of all sequences, all of them."""
    called, units = set(), {unit: model.get_submodule(unit) for unit in layers}
    try:
        with stream.hooked(units, lambda name, *_: called.add(name)):
            stream.run_whole(model, layers, ids, device)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a forward does without what it needs, such as pixels
        raise ValueError(
            f"model: found that {type(model).__name__} does not run on token ids alone "
            f"({type(error).__name__}: {error}), so nothing can be measured of its layers; quantize it while loading, "
            "without data"
        ) from error
    wanted = {name for unit, names in layers.items() for name in (unit, *names)}
    if missed := sorted(wanted - called - record.calls.keys()):
        raise ValueError(
            f"{missed[0]}: found that tokens do not go through it ({len(missed)} such modules), so nothing can be "
            f"measured of it; {WAY_OUT}"
        )
    return record.calls


def _in_parts(model, layers: Mapping[str, list[str]], ids: torch.Tensor, device, record: _Record) -> list[list[Calls]]:
    """What each layer is given for each sequence by itself: the first and the second time that it is computed."""
    turns = [[{} for _ in ids] for _ in range(2)]

    def visit(name: str, run: Callable[..., Any]) -> Iterator[Any]:
        for turn in turns:
            for number, record.calls in enumerate(turn):
                run(number)
        record.calls = {}
        return (run(number, last=True) for number in range(len(ids)))

    try:
        stream.stream(model, layers, ids.split(1), device, visit)
    except (passes.Parted, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"model: found that {type(model).__name__} does not run where its layers are computed one after another "
            f"for each sequence ({type(error).__name__}: {error}), so it cannot be calibrated; quantize it while "
            "loading, without data"
        ) from error
    return turns


def _compared(whole: list[torch.Tensor], parts: list[list[torch.Tensor]], limit: float) -> tuple[int | None, float]:
    """The dimension in which the calls of all sequences are those of each put together, and by which share of their
    size most rows differ. If it is none, whatever the order of rows."""
    if all(len(part) == len(whole) for part in parts):
        for dimension in range(min(x.dim() for x in whole) - 1):
            try:
                joined = [torch.cat(own, dimension) for own in zip(*parts, strict=True)]
            except RuntimeError:  # of other sizes
                continue
            if [x.shape for x in joined] == [x.shape for x in whole]:
                error = max(_share((x - y).norm(dim=-1), x) for x, y in zip(whole, joined, strict=True))
                if error <= limit:
                    return dimension, error
    of_all, of_parts = (
        torch.cat([x.flatten(0, -2) for x in calls]) if calls else torch.zeros(0, NUMBERS)
        for calls in (whole, [x for part in parts for x in part])
    )
    if not (len(of_all) and len(of_parts)):
        return None, float(len(of_all) != len(of_parts))
    distances = torch.cdist(of_all, of_parts)
    return None, max(_share(distances.amin(dim), of_all) for dim in (0, 1))


def _share(distances: torch.Tensor, x: torch.Tensor) -> float:
    """How large all but a few distances of rows are at most, over the size of rows; 0 if there are none."""
    if not distances.numel():
        return 0.0
    size = x.square().sum(-1).mean().sqrt()
    return torch.where(size > 0, distances.flatten().quantile(1 - FEW) / size, 0.0).item()
