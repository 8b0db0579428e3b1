"""A stand-in for CUDA graphs on a CPU, as strict: what was launched is repeated, with the tensors it was given."""

from collections.abc import Callable

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::masked_select"}


def _refuse() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


class _Lists(TorchFunctionMode):
    """On a CPU these read memory, past every operation."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.tolist, torch.Tensor.numpy):
            _refuse()
        return function(*args, **(kwargs or {}))


class _Launches(TorchDispatchMode):
    """Keeps each operation with its tensors and results, and what the tensors held that it wrote to."""

    def __init__(self):
        super().__init__()
        self.launched, self.before = [], {}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs, arguments = kwargs or {}, operation._schema.arguments
        if operation._schema.name in READS:
            _refuse()
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for tensor in tree_leaves(given[argument.name]):
                    self.before.setdefault(id(tensor), (tensor, tensor.clone()))
        result = operation(*args, **kwargs)
        if not operation.is_view:
            self.launched.append((operation, args, kwargs, result))
        return result


def cpu_graph(function: Callable) -> Callable:
    """Repeats what ``function`` launched when this was called, which itself has had no effect."""
    random = torch.get_rng_state()
    with _Lists(), (launches := _Launches()):
        recorded = function()
    torch.set_rng_state(random)
    for tensor, held in launches.before.values():
        tensor.copy_(held)

    def replay():
        for operation, args, kwargs, result in launches.launched:
            found = operation(*args, **kwargs)
            if not operation._schema.is_mutable:
                for place, new in zip(tree_leaves(result), tree_leaves(found), strict=True):
                    if isinstance(place, torch.Tensor):
                        place.copy_(new)
        return recorded

    return replay
