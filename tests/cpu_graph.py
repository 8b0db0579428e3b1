"""A stand-in for CUDA graphs on a CPU, as strict: what was launched is repeated, with the tensors it was given."""

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"_local_scalar_dense", "nonzero", "_unique2", "masked_select"}


def _refuse() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


class _Lists(TorchFunctionMode):
    """On a CPU these read memory, past every operation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.tolist, torch.Tensor.numpy):
            _refuse()
        return function(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Keeps each operation with its tensors and results, and what the tensors held that it wrote to."""

    def __init__(self):
        super().__init__()
        self.launched, self.before = [], {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = operation._schema
        if schema.name.removeprefix("aten::") in READS:
            _refuse()
        given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given[argument.name]):
                    self.before.setdefault(id(tensor), (tensor, tensor.clone()))
        result = operation(*args, **kwargs)
        self.launched.append((operation, args, kwargs, result))
        return result


def cpu_graph(function: Callable) -> Callable:
    """Repeats what ``function`` launched when this was called, which itself has had no effect."""
    random = torch.get_rng_state()
    with _Lists(), (mode := Launches()):
        recorded = function()
    torch.set_rng_state(random)
    for tensor, held in mode.before.values():
        tensor.copy_(held)

    def replay():
        for operation, args, kwargs, result in mode.launched:
            if operation.is_view:
                continue
            found = operation(*args, **kwargs)
            if not operation._schema.is_mutable:
                for place, new in zip(tree_leaves(result), tree_leaves(found), strict=True):
                    if isinstance(place, torch.Tensor):
                        place.copy_(new)
        return recorded

    return replay
