"""Saving adapters of quantized models: without packed weights, and whole where FSDP2 has sharded them."""

import functools

import torch
from torch import nn

from hf_kbit.format.kinds import NAMES
from hf_kbit.nn.weight import AS_ONE_VALUE, KbitWeight, is_sharded
from hf_kbit.weight.tensor import HOW, WEIGHT


def wrap_save_pretrained(save_pretrained):
    """``PeftModel.save_pretrained``, to which state dicts have no packed weights, for files of adapters hold floats.
    What FSDP2 has sharded it gathers, so all processes have to call it."""

    @functools.wraps(save_pretrained)
    def wrapped(self, save_directory, *args, **kwargs):
        packed = _packed_names(self)
        if not packed:
            return save_pretrained(self, save_directory, *args, **kwargs)
        if kwargs.get("state_dict") is not None:
            kwargs["state_dict"] = dict(kwargs["state_dict"])
            _to_be_saved(kwargs["state_dict"], packed)
        # PEFT asks for a state dict whenever it has loaded another adapter, as to convert one into plain LoRA.
        hook = self.register_state_dict_post_hook(lambda module, state, *rest: _to_be_saved(state, packed))
        as_one_value = AS_ONE_VALUE.set(True)  # nothing is copied that is left out
        try:
            return save_pretrained(self, save_directory, *args, **kwargs)
        finally:
            AS_ONE_VALUE.reset(as_one_value)
            hook.remove()

    return wrapped


def _packed_names(model: nn.Module) -> set[str]:
    """What a state dict calls the tensors of packed layers."""
    modules, names = model.named_modules(remove_duplicate=False), (WEIGHT, *NAMES, HOW)
    return {f"{name}.{own}" for name, module in modules if isinstance(module, KbitWeight) for own in names}


def _to_be_saved(state: dict[str, torch.Tensor], packed: set[str]) -> None:
    """Leaves in a state dict what files of adapters may hold."""
    for name in list(state):
        if name in packed:
            del state[name]
        elif is_sharded(state[name]):
            state[name] = state[name].full_tensor().cpu()
