"""The models that the tests of commands share."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from cli.texts import SHAPE, TEXT
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_kbit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``dense``, a model with a tokenizer; ``packed``, the same in 3 bits without one; ``bert``; and a text."""
    folder = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=96, initializer_range=0.2, **SHAPE)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "dense")
    packed = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=hf_kbit.KbitConfig(bits=3))
    packed.save_pretrained(folder / "packed")
    BertForMaskedLM(BertConfig(num_hidden_layers=1, **SHAPE)).save_pretrained(folder / "bert")
    for name in ("dense", "bert"):
        byte_tokenizer().save_pretrained(folder / name)
    (folder / "rows.txt").write_text(TEXT)
    return folder
