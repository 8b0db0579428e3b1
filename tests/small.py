"""A small Llama, and what a model holds."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kbit.format.codebooks import optimal
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import empty, site_of, sites

SHAPE = {"hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4, "num_hidden_layers": 2}


def llama(**settings) -> LlamaForCausalLM:
    """The same each time."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{"vocab_size": 256, **SHAPE, **settings})).eval()


def tensors(model) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def dense_projections(model) -> list[str]:
    """Names of the projections of experts that are not packed."""
    return [name for name, site in sites(model).items() if site.kind is KbitProjection and not site.is_packed]


def projection(model, name: str, bits: int) -> KbitProjection:
    """An empty one for a dense projection of a model."""
    site = site_of(model, name)
    weight = empty(site, ScalarDecoding(optimal(bits, signed=True), 0, "rotated"))
    return KbitProjection.of(weight, KbitProjection.recipe, site.transposed)
