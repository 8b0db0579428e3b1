"""Whether a layer is nothing but a linear layer, a table or experts, so that a packed one can take its place.

What somebody has put on a layer decides on what it computes as much as its class does. Hooks and attributes move to
the packed layer (``take_over``). With anything else a layer stays in 16 bits, and ``unusual`` says why.
"""

import gc
from collections import deque
from collections.abc import Iterable
from functools import cache, partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from hf_kbit.nn.embedding import MEMBERS
from hf_kbit.nn.experts import LLAMA4, home_of, is_experts
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.weight import is_sharded

# Subclasses of nn.Linear whose own forward computes what nn.Linear's does.
PLAIN_LINEAR_CLASSES = ("FalconLinear",)
# Where a module keeps hooks: those of its state dict, which know the 16-bit weight, and those that calls go through.
STATE_DICT_HOOKS = [name for name in vars(nn.Module()) if "state_dict" in name]
HOOKS = [name for name in vars(nn.Module()) if "hook" in name and name not in STATE_DICT_HOOKS]
# What accelerate leaves on a module that it places: all of it refers to the module itself.
OF_ACCELERATE = frozenset(("_hf_hook", "_old_forward", "forward"))
CONTAINERS = (dict, list, tuple, set, frozenset, deque, CellType, MethodType, partial)
# Other objects of theirs are many, and hold no layer of a model.
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "builtins")


def is_linear(module: nn.Module) -> bool:
    """Whether a module is, by its class, a linear layer that is used by calling it: a Linear, or GPT-2's Conv1D."""
    # nn.MultiheadAttention reads the weight of its NonDynamicallyQuantizableLinear without calling it.
    others = KbitLinear | NonDynamicallyQuantizableLinear | nn.LazyLinear
    if not isinstance(module, nn.Linear | Conv1D) or isinstance(module, others):
        return False
    same = type(module).forward is _base(module).forward or type(module).__name__ in PLAIN_LINEAR_CLASSES
    return same and module.weight.numel() > 0


def _base(module: nn.Module) -> type[nn.Module]:
    return Conv1D if isinstance(module, Conv1D) else nn.Linear


def unusual(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """``{name: what it has}`` of the linear layers, tables and projections of experts that have more to them than a
    packed layer could take over.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    >>> unusual(model, ["0", "1"])
    {'1': 'has parametrizations besides weight and bias'}
    """
    found, replaced = {}, {}
    for name in names:
        layer, own = home_of(model, name)
        if what := _more(layer):
            found[name] = what
        else:
            replaced[id(layer._parameters[own])] = name
            if not is_experts(layer):
                replaced[id(layer)] = name
    for name, place in _held(model, replaced).items():
        found[name] = f"is held by {place} too"
    return found


def _more(layer: nn.Module) -> str:
    """What a layer, or its class, has that a packed layer cannot have."""
    own, linear = vars(layer), isinstance(layer, nn.Linear | Conv1D)
    if "forward" in own and "_hf_hook" not in own:
        return "has a forward of its own"
    if is_experts(layer):
        kind = next(kind for kind in type(layer).__mro__ if "forward" in vars(kind))
        known = hasattr(kind.forward, "__wrapped__") or kind.__name__ == LLAMA4
        return "" if known else f"has the forward of {kind.__name__}"
    weight = layer._parameters.get("weight")
    others = [name for kept in MEMBERS for name in getattr(layer, kept) if name not in ("weight", "bias")]
    if weight is None or "parametrizations" in layer._modules or (linear and others):
        return f"has {', '.join(others)} besides weight and bias"
    if type(weight.data) is not torch.Tensor and not is_sharded(weight):
        return f"has a weight of type {type(weight.data).__name__}"
    if any(own[hooks] for hooks in STATE_DICT_HOOKS):
        return "has hooks on its state dict"
    if not linear:  # the packed layer of a table is of a class that is derived from the table's own
        return ""
    size = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    if weight.shape != size:
        return f"has a weight {list(weight.shape)} for features {list(size)}"
    if taken := sorted(own.keys() & _reserved()):
        return f"has {', '.join(taken)}, a name that a quantized layer uses"
    kinds, plain = type(layer).__mro__, _base(layer)
    added = set().union(*(vars(kind) for kind in kinds[: kinds.index(plain)])) - vars(plain).keys()
    added = sorted(name for name in added if not name.startswith("__"))
    return f"has what its class {type(layer).__name__} adds: {', '.join(added)}" if added else ""


@cache
def _names_of_ours() -> frozenset[str]:
    return frozenset(vars(KbitLinear(1, 1, device="meta")).keys() | set(dir(KbitLinear)))


@cache
def _reserved() -> frozenset[str]:
    """Names of attributes that linear layers do not have, and ours do."""
    return _names_of_ours() - vars(nn.Linear(1, 1, device="meta")).keys() - OF_ACCELERATE


def _held(model: nn.Module, wanted: dict[int, str]) -> dict[str, str]:
    """Where a model refers to a layer or a weight besides where they stand: there the 16-bit one would stay.

    Args:
        model: looked through are its modules' attributes, down into lists, functions and plain objects.
        wanted: ``{id of the layer or the weight: name}``.
    """
    found, seen = {}, set()
    for name, module in model.named_modules() if wanted else ():
        passed = {*MEMBERS} | (OF_ACCELERATE if hasattr(module, "_hf_hook") else set())
        for attribute in vars(module).keys() - passed:
            waiting = [vars(module)[attribute]]
            while waiting:
                value = waiting.pop()
                if id(value) in wanted:
                    found.setdefault(wanted[id(value)], f"{name}.{attribute}".removeprefix("."))
                if id(value) not in seen:
                    seen.add(id(value))
                    waiting += _contents(value)
    return found


def _contents(value: Any) -> list[Any]:
    """What a value holds: a container, a function with what it closes over, or an object of a class of somebody's."""
    if isinstance(value, CONTAINERS):
        return gc.get_referents(value)
    if isinstance(value, FunctionType):  # not the globals, to which it refers too
        return [value.__closure__, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, nn.Module | torch.Tensor | type) or type(value).__module__.partition(".")[0] in LIBRARIES:
        return []
    return [getattr(value, "__dict__", None)]


# --- what moves to another layer ------------------------------------------------------------------


def take_over(new: nn.Module, old: nn.Module) -> None:
    """Gives a layer what somebody has put on the one whose place it takes, packed or not: hooks and attributes."""
    for hooks in HOOKS:
        setattr(new, hooks, getattr(old, hooks))
    left = _names_of_ours() | OF_ACCELERATE | {"_is_hf_initialized"}
    new.__dict__.update({name: value for name, value in vars(old).items() if name not in left})
