"""Saving adapters without touching the quantized weights below them."""

import functools

from hf_kbit.nn.weight import without_packed_weights


def wrap_get_state_dict(get_peft_model_state_dict):
    """``get_peft_model_state_dict``, which makes the state dict of the whole model and takes the adapters from it.

    On a GPU that would bring every quantized weight back to its stored form, and into CPU memory.
    """

    @functools.wraps(get_peft_model_state_dict)
    def wrapped(*args, **kwargs):
        with without_packed_weights():
            return get_peft_model_state_dict(*args, **kwargs)

    return wrapped
