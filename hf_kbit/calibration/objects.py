"""The tensors in what layers are given and return, wherever they are: in containers, and in attributes of objects."""

import copy
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

# Nothing that one layer leaves for another is in these.
CLOSED = (nn.Module, PreTrainedConfig, type, FunctionType, MethodType, ModuleType, partial, torch.Generator)


def mapped(value: Any, change: Callable[[torch.Tensor], Any], copying: bool) -> Any:
    """``value`` with ``change(tensor)`` in the place of each tensor in it. Objects and containers are themselves
    changed, or if ``copying``, copies of theirs, which have in common what they have; tuples are always new ones.

    >>> shared, x = {"keys": [torch.ones(2)]}, torch.zeros(1)
    >>> found, again, _ = mapped((shared, shared, x), torch.neg, copying=True)
    >>> found is again, found["keys"], shared["keys"]
    (True, [tensor([-1., -1.])], [tensor([1., 1.])])
    """
    return _mapped(value, change, copying, {})


def _mapped(value, change, copying: bool, known: dict[int, tuple]) -> Any:
    if id(value) in known:
        return known[id(value)][1]
    if isinstance(value, tuple):
        parts = [_mapped(part, change, copying, known) for part in value]
        found = type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    elif isinstance(value, torch.Tensor):
        found = change(value)
    elif isinstance(value, CLOSED):
        return value
    else:
        found = _copied(value) if copying else value
    known[id(value)] = value, found  # the value too, for an id is that of something else once it is gone
    if not isinstance(value, (torch.Tensor, tuple)):
        for place, part in list(_parts(value)):
            if (own := _mapped(part, change, copying, known)) is not part:
                _put(found, place, own)
    return found


def _copied(value) -> Any:
    """A copy that has the same parts; what cannot be copied, such as a generator, is itself."""
    try:
        return copy.copy(value)
    except TypeError:
        return value


def _parts(value) -> Iterator[tuple[tuple, Any]]:
    """What an object holds, each with its place: how it is reached, and by which key or name."""
    if isinstance(value, dict):
        yield from (((True, key), part) for key, part in value.items())
    elif isinstance(value, list | deque):
        yield from (((True, index), part) for index, part in enumerate(value))
    slots = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    for name in (*getattr(value, "__dict__", ()), *names):
        if not (name.startswith("__") and name.endswith("__")) and hasattr(value, name):
            yield (False, name), getattr(value, name)


def _put(value, place: tuple, part) -> None:
    by_key, name = place
    if by_key:
        value[name] = part
    else:
        object.__setattr__(value, name, part)
