"""What ``save_pretrained`` does besides where a model is quantized."""

import copy
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import wraps

import torch
from torch import nn

from hf_kbit.files.checkpoint import seal
from hf_kbit.format.errors import refuse
from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer
from hf_kbit.nn.weight import KbitWeight, is_sharded, packed_layers
from hf_kbit.plan.config import KbitConfig
from hf_kbit.weight.tensor import KbitTensor


def wrap(save_pretrained):
    """``save_pretrained`` that gives a quantizer to quantized models without one, and seals their files. Transformers
    takes no notice of a state dict that it is given of a quantized model: one of other tensors is refused."""

    @wraps(save_pretrained)
    def wrapped(self, save_directory, is_main_process=True, state_dict=None, *args, **kwargs):
        model = with_quantizer(self)
        if not is_kbit(model):
            return save_pretrained(self, save_directory, is_main_process, state_dict, *args, **kwargs)
        if state_dict:
            refuse_other_tensors(model, state_dict)
        result = save_pretrained(model, save_directory, is_main_process, state_dict, *args, **kwargs)
        if model.should_save_on_this_rank(is_main_process) and os.path.isdir(save_directory):
            seal(save_directory)
        return result

    return wrapped


def with_quantizer(model):
    """``model`` as it can be saved: itself, or a copy around the same tensors with a quantizer of its own, if it has
    quantized layers and no quantizer: it is a part of a quantized model, or was given such layers by hand."""
    layers = packed_layers(model)
    adapters_alone = getattr(model, "_hf_peft_config_loaded", False)
    if not layers or adapters_alone or getattr(model, "hf_quantizer", None) is not None:
        return model
    config = getattr(model.config, "quantization_config", None)
    if not isinstance(config, KbitConfig):
        (bits, _), *_ = Counter(layer.bits for layer in layers.values()).most_common()
        config = KbitConfig(bits=bits)
    model = copy.copy(model)
    model.config = copy.deepcopy(model.config)
    model.hf_quantizer = KbitHfQuantizer(config, pre_quantized=True)
    model.is_quantized, model.quantization_method = True, config.quant_method
    model.hf_quantizer.keep_packed_names(model, layers)
    return model


def is_kbit(model) -> bool:
    """Whether it is a quantized model that is saved, and not adapters on it alone."""
    adapter_alone = getattr(model, "_hf_peft_config_loaded", False)
    return getattr(model, "quantization_method", None) == "kbit" and not adapter_alone


def refuse_other_tensors(model: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> None:
    """Compares a state dict with those of the model's own tensors that are in this process: neither offloaded nor
    shards.

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
            map(torch.equal, given.file_tensors("cpu").values(), own.file_tensors("cpu").values())
        )
    if given.device == own.device and given.data_ptr() == own.data_ptr() and given.stride() == own.stride():
        return True
    bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (given.to(own.device), own)]
    return torch.equal(*bits)
