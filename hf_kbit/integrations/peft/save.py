"""Saving adapters that FSDP2 has sharded."""

import functools

from hf_kbit.nn.weight import KbitWeight, is_sharded
from hf_kbit.tensor import KbitTensor


def wrap_save_pretrained(save_pretrained):
    """``PeftModel.save_pretrained``, which gathers what FSDP2 has sharded of a quantized model, but for its packed
    weights: files hold whole tensors. So all processes have to call it."""

    @functools.wraps(save_pretrained)
    def wrapped(self, save_directory, *args, **kwargs):
        packed = any(isinstance(module, KbitWeight) for module in self.modules())
        if packed and kwargs.get("state_dict") is None and any(map(is_sharded, self.parameters())):
            kwargs["state_dict"] = {
                name: tensor.full_tensor().cpu() if _is_to_be_gathered(tensor) else tensor
                for name, tensor in self.state_dict().items()
            }
        return save_pretrained(self, save_directory, *args, **kwargs)

    return wrapped


def _is_to_be_gathered(tensor) -> bool:
    return is_sharded(tensor) and not isinstance(tensor._local_tensor, KbitTensor)
