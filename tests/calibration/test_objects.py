"""Tensors inside of what layers are given: each found, copied or changed where it is."""

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import DynamicCache, LlamaConfig
from transformers.modeling_outputs import BaseModelOutput

from hf_kbit.calibration.objects import mapped

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor


class Slots:
    __slots__ = ("x",)


class MoreSlots(Slots):
    __slots__ = ("y",)


def slots(x):
    found = MoreSlots()
    found.x, found.y = x, [x]
    return found


def cache(x):
    found = DynamicCache()
    found.update(x.view(1, 1, 1, 2), x.view(1, 1, 1, 2), 0)
    return found


class Rows(list):
    pass


# How an object is made of a tensor, and how the tensor is found in it.
OBJECTS = {
    "dict": (lambda x: {"a": {"b": x}}, lambda o: o["a"]["b"]),
    "default": (lambda x: defaultdict(list, a=[x]), lambda o: o["a"][0]),
    "ordered": (lambda x: OrderedDict(a=x), lambda o: o["a"]),
    "user": (lambda x: UserDict(a=x), lambda o: o["a"]),
    "list": (lambda x: [1, [None, x]], lambda o: o[1][1]),
    "subclass": (lambda x: Rows([x]), lambda o: o[0]),
    "deque": (lambda x: deque([x]), lambda o: o[0]),
    "tuple": (lambda x: ("a", (x,)), lambda o: o[1][0]),
    "named": (lambda x: Pair(1, [x]), lambda o: o.second[0]),
    "frozen": (Frozen, lambda o: o.x),
    "slots": (slots, lambda o: o.y[0]),
    "attributes": (lambda x: SimpleNamespace(a=SimpleNamespace(b=x)), lambda o: o.a.b),
    "output": (BaseModelOutput, lambda o: o.last_hidden_state),
    "cache": (cache, lambda o: o.layers[0].keys),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_copy_and_the_object_itself(kind):
    make, find = OBJECTS[kind]
    x = torch.tensor([1.0, 2.0])
    given = make(x)
    copied = mapped(given, lambda x: x + 1, copying=True)
    assert type(copied) is type(given)
    assert find(copied).flatten().tolist() == [2, 3] and find(given).flatten().tolist() == [1, 2]
    changed = mapped(given, lambda x: x + 1, copying=False)
    assert find(changed).flatten().tolist() == [2, 3]
    assert isinstance(given, tuple) or changed is given


def test_what_is_one_object_stays_one():
    """Also through cycles; the tensor is changed once."""
    x, calls = torch.ones(1), []
    shared = {"x": x}
    shared["self"] = shared
    first, second, alone = mapped((shared, [shared], x), lambda x: calls.append(1) or x + 1, copying=True)
    assert first is second[0] is first["self"] is not shared and first["x"] is alone and calls == [1]


def test_what_is_no_state_of_a_pass_is_not_copied():
    """Modules, configs, functions; and what cannot be copied."""
    module, config, numbers = nn.Linear(2, 2), LlamaConfig(), (number for number in range(3))
    given = {"module": module, "config": config, "function": len, "numbers": numbers, "kind": dict, "name": "a"}
    copied = mapped(given, lambda x: x + 1, copying=True)
    assert copied is not given and all(copied[key] is given[key] for key in given)
