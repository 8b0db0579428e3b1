"""Saving adapters of quantized models: without packed weights, and whole where FSDP2 has sharded them."""

import functools

from hf_kbit.nn.weight import is_sharded, local, packed_layers
from hf_kbit.tensor import KbitTensor


def wrap_save_pretrained(save_pretrained):
    """``PeftModel.save_pretrained``, which leaves packed tables out, for files of adapters hold floats. What FSDP2 has
    sharded it gathers, so all processes have to call it."""

    @functools.wraps(save_pretrained)
    def wrapped(self, save_directory, *args, **kwargs):
        if packed_layers(self):
            given = kwargs.get("state_dict")
            state = self.state_dict() if given is None else given
            kwargs["state_dict"] = {
                name: tensor.full_tensor().cpu() if is_sharded(tensor) else tensor
                for name, tensor in state.items()
                if not isinstance(local(tensor), KbitTensor)
            }
        return save_pretrained(self, save_directory, *args, **kwargs)

    return wrapped
