"""Resizing the vocabulary of quantized models."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **SHAPE)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("arguments", [{"new_num_tokens": 80}, {"new_num_tokens": 64, "pad_to_multiple_of": 48}])
def test_a_quantized_head_is_refused_before_anything_changes(folder, arguments):
    config = KbitConfig(bits=3, module_bits={"lm_head": 5})
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=config)
    with pytest.raises(ValueError, match="lm_head: found a head of 64 rows quantized to 5 bits, expected"):
        model.resize_token_embeddings(**arguments)
    assert model.get_input_embeddings().num_embeddings == model.config.vocab_size == 64
    assert model.resize_token_embeddings(64).num_embeddings == model.resize_token_embeddings().num_embeddings == 64


def test_a_head_in_16_bits_is_resized(folder):
    model = LlamaForCausalLM.from_pretrained(folder, quantization_config=KbitConfig(bits=3))
    model.resize_token_embeddings(80)
    assert model.lm_head.out_features == model.config.vocab_size == 80
