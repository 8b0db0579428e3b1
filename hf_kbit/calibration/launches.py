"""Functions of many small kernels, each of which becomes one launch on a GPU.

Recording one takes about as long as running it a few times, so the experts of a projection share records.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch

_records: ContextVar[dict | None] = ContextVar("recorded functions, by what they are and take", default=None)


class NotRecorded(RuntimeError):
    """A function that runs, but not while a graph is recorded: it reads back what a tensor holds."""


@contextmanager
def shared() -> Iterator[None]:
    """Inside, in this thread, what ``one_launch`` records is kept, and used again for the same function and shapes."""
    token = _records.set({})
    try:
        yield
    finally:
        _records.reset(token)


def one_launch(function: Callable, *like: torch.Tensor, **settings: Any) -> Callable:
    """``function`` with these settings, of tensors, to a tuple of tensors. On a GPU its hundreds of small kernels
    become one CUDA graph, whose results are good until the next call: launching them would take several times as long
    as they do.

    Args:
        like: tensors of the shapes, dtypes and device to come; all that differs from call to call is among these.
        settings: hashable.

    Raises:
        NotRecorded: the function cannot become a graph.
    """
    called, record = partial(function, **settings), RECORDERS.get(like[0].device.type)
    if record is None:
        return called
    records = _records.get()
    if records is None:
        return record(called, like)
    key = function, *settings.items(), *((tensor.shape, tensor.dtype, tensor.device) for tensor in like)
    if key not in records:
        records[key] = record(called, like)
    return records[key]


def _cuda_graph(function: Callable, like: tuple[torch.Tensor, ...]) -> Callable:
    taken = [tensor.clone() for tensor in like]
    function(*taken)  # libraries and tables come into being outside the graph
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = function(*taken)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotRecorded(str(error)) from error

    def replay(*tensors):
        for own, given in zip(taken, tensors, strict=True):
            own.copy_(given)
        graph.replay()
        return results

    return replay


RECORDERS = {"cuda": _cuda_graph}  # by type of device; others call the function as it is
