"""The models that the tests of commands share."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import hf_kbit

SHAPE = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


@pytest.fixture(scope="session")
def rows() -> list[str]:
    return [f"{n} bottles hang on the wall; take one away.\n" for n in range(8)]


@pytest.fixture(scope="session")
def text(rows) -> str:
    return "\n\n".join(rows)


@pytest.fixture(scope="session")
def made(tmp_path_factory, text):
    """``dense``, a model with a tokenizer; ``packed``, the same in 3 bits without one; ``bert``; and files of text."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=96, initializer_range=0.2, **SHAPE)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "dense")
    packed = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=hf_kbit.KbitConfig(bits=3))
    packed.save_pretrained(folder / "packed")
    BertForMaskedLM(BertConfig(num_hidden_layers=1, **SHAPE)).save_pretrained(folder / "bert")
    for name in ("dense", "bert"):
        byte_tokenizer().save_pretrained(folder / name)
    (folder / "rows.txt").write_text(text)
    (folder / "empty.txt").write_text("")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe text")
    return folder


@pytest.fixture
def folder(made, monkeypatch):
    """Where they are, the current folder of the test."""
    monkeypatch.chdir(made)
    return made
