"""Saving adapters without touching the quantized weights below them."""

import functools
from contextvars import ContextVar

from hf_kbit.nn.weight import KbitWeight, whole, without_packed_weights

_WRITES_FILES = ContextVar("adapters are written to files", default=False)


def wrap_save_pretrained(save_pretrained):
    """``save_pretrained``, which gathers adapters of a quantized model that FSDP2 has sharded, for files hold whole
    tensors; so all processes have to call it."""

    @functools.wraps(save_pretrained)
    def wrapped(*args, **kwargs):
        token = _WRITES_FILES.set(True)
        try:
            return save_pretrained(*args, **kwargs)
        finally:
            _WRITES_FILES.reset(token)

    return wrapped


def wrap_get_state_dict(get_peft_model_state_dict):
    """``get_peft_model_state_dict``, which makes the state dict of the whole model and takes the adapters from it.

    On a GPU that would bring every quantized weight back to its stored form, and into CPU memory. Adapters that FSDP2
    has sharded stay shards, as in any state dict, but for ``save_pretrained``: accelerate reads its checkpoints into
    what it gets here, and loads that into a model of shards.
    """

    @functools.wraps(get_peft_model_state_dict)
    def wrapped(model, *args, **kwargs):
        with without_packed_weights():
            state = get_peft_model_state_dict(model, *args, **kwargs)
        if not _WRITES_FILES.get() or not any(isinstance(module, KbitWeight) for module in model.modules()):
            return state
        return {name: whole(tensor) for name, tensor in state.items()}

    return wrapped
