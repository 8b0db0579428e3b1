"""``prepare_model_for_kbit_training`` of PEFT, for quantized models too."""

import functools
from collections.abc import Callable

import peft

from hf_kbit.nn.weight import packed_layers

_peft_prepare = peft.prepare_model_for_kbit_training


@functools.wraps(_peft_prepare, assigned=())  # its signature, our docstring
def prepare_model_for_kbit_training(model, *args, **kwargs):
    """PEFT's function of that name, with what it does for bitsandbytes done for ``KbitLinear`` and experts too.

    The base model is frozen, what is in 16 bits (norms, embeddings, the head, biases) is cast to float32, gradient
    checkpointing is switched on, and inputs require gradients. Packed weights stay as they are, and say float32 from
    then on, to which rows of tables are decoded. PEFT's own name is this function once both packages are imported.

    It takes what PEFT's takes: ``model``, of Transformers, before it gets adapters; ``use_gradient_checkpointing``,
    True by default; ``gradient_checkpointing_kwargs`` of ``torch.utils.checkpoint.checkpoint``, such as
    ``use_reentrant``. It returns the same model.

    >>> import torch
    >>> from hf_kbit import KbitLinear
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape)).to(torch.bfloat16)
    >>> model.model.layers[0].mlp.up_proj = KbitLinear.from_linear(model.model.layers[0].mlp.up_proj, bits=4)
    >>> model = prepare_model_for_kbit_training(model)
    >>> block = model.model.layers[0]
    >>> block.gradient_checkpointing, block.input_layernorm.weight.dtype, block.mlp.up_proj.weight.dtype
    (True, torch.float32, torch.float32)
    """
    if not packed_layers(model):
        return _peft_prepare(model, *args, **kwargs)
    # For the time of this call only: other libraries take the flag for a reason to import bitsandbytes.
    model.is_loaded_in_4bit = True
    try:
        return _peft_prepare(model, *args, **kwargs)
    finally:
        del model.is_loaded_in_4bit


def wrap_prepare(_) -> Callable:
    return prepare_model_for_kbit_training
