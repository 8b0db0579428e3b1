"""Saving adapters without touching the quantized weights below them."""

import functools

from hf_kbit.nn.weight import KbitWeight, whole, without_packed_weights


def wrap_get_state_dict(get_peft_model_state_dict):
    """``get_peft_model_state_dict``, which makes the state dict of the whole model and takes the adapters from it.

    On a GPU that would bring every quantized weight back to its stored form, and into CPU memory. Adapters of a
    quantized model that FSDP2 has sharded are gathered, so all processes have to call this.
    """

    @functools.wraps(get_peft_model_state_dict)
    def wrapped(model, *args, **kwargs):
        with without_packed_weights():
            state = get_peft_model_state_dict(model, *args, **kwargs)
        if not any(isinstance(module, KbitWeight) for module in model.modules()):
            return state
        return {name: whole(tensor) for name, tensor in state.items()}

    return wrapped
