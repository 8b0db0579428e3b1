"""The state dict that a caller hands to ``save_pretrained``: Transformers takes no notice of it where a model is
quantized, and saves the model's own tensors. Trainers hand in just these, which is right; other ones would be lost."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hf_kbit.integrations.transformers.checkpoint import refuse
from hf_kbit.nn.weight import KbitWeight, is_sharded
from hf_kbit.tensor import KbitTensor


def refuse_other_tensors(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Compares a state dict with the model's own tensors, but for those that are not in this process: offloaded ones
    and shards, of which it has what was gathered.

    Raises:
        ValueError: a tensor differs, or is not the model's.
    """
    problems, unknown = [], set(state_dict)
    for name, own in _own_tensors(model):
        if name in unknown:
            unknown.remove(name)
            if not (own.is_meta or is_sharded(own) or _same(state_dict[name], own)):
                problems.append(f"{name}: found another tensor than the model's")
    refuse(
        [*problems, *(f"{name}: found it in state_dict, not in the model" for name in sorted(unknown))],
        "save_pretrained: expected the model's own tensors in state_dict, for those of a quantized model are saved; "
        "put others into the model first",
    )


def _own_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names in a state dict and tensors, of packed weights in the stored form, a layer at a time."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, KbitWeight):
            tensors = module.state_dict()
        else:
            tensors = {name: t for name, t in (module._parameters | module._buffers).items() if t is not None}
        yield from ((f"{prefix}.{name}".removeprefix("."), tensor) for name, tensor in tensors.items())


def _same(given: torch.Tensor, own: torch.Tensor) -> bool:
    """Bit for bit."""
    if given is own or given.shape != own.shape or given.dtype != own.dtype:
        return given is own
    given, own = given.detach(), own.detach()
    if isinstance(own, KbitTensor):
        return isinstance(given, KbitTensor) and all(
            map(torch.equal, given.stored("cpu").values(), own.stored("cpu").values())
        )
    if given.device == own.device and given.data_ptr() == own.data_ptr() and given.stride() == own.stride():
        return True
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (given.to(own.device), own)]
    return torch.equal(*bits)
