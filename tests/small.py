"""A small Llama, and what a model holds."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4, "num_hidden_layers": 2}


def llama(**settings) -> LlamaForCausalLM:
    """The same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 256, **SHAPE, **settings})).eval()


def tensors(model) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
