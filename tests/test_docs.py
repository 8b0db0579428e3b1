"""The documentation is true where it can be run: the reader in docs/format.md reads what the library writes."""

import re
from pathlib import Path

import cases
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kbit
from hf_kbit import codebooks

DOCS = Path(__file__).parents[1] / "docs"


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def reader():
    (code,) = code_blocks("format.md", "python")
    assert "torch" not in code and "hf_kbit." not in code, "the reader must need nothing but the standard library"
    namespace = {}
    exec(compile(code, "docs/format.md", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("bits", cases.BITS)
def test_reader_of_the_format_page(reader, bits, tmp_path):
    torch.manual_seed(bits)
    shape = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=64, **shape))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1e-4
    model.save_pretrained(tmp_path / "dense")
    other = 2 if bits == 5 else bits + 1
    config = hf_kbit.KbitConfig(bits=bits, module_bits={"down_proj": other})
    model = LlamaForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1

    layers = {name: module for name, module in model.named_modules() if isinstance(module, hf_kbit.KbitLinear)}
    assert layers["model.layers.1.mlp.up_proj"].exponent < 0
    read = reader["read_kbit"](tmp_path / "packed")
    assert read.keys() == layers.keys() and len(layers) == 14
    for name, (rows, width) in read.items():
        layer = layers[name]
        assert width == layer.bits == (other if "down_proj" in name else bits)
        decoded = torch.tensor(rows, dtype=torch.float64).float()[:, : layer.in_features]
        assert torch.equal(decoded, layer.dequantize(torch.float32)), name


def test_example_of_the_format_page():
    page = (DOCS / "format.md").read_text()
    words = [int(number) for number in re.search(r"weight        = \[(.*?)\]", page)[1].split(",")]
    byte = int(re.search(r"weight_absmax = \[(.*?)\]", page)[1], 16)
    value = float(re.search(r"W             = (\S+)", page)[1])
    codebook = torch.tensor(codebooks.normal_float(3))
    assert f"levels[5]     = {codebooks.normal_float(3)[5]}" in page
    planes, absmax = torch.tensor([words], dtype=torch.int32), torch.tensor([[byte]], dtype=torch.uint8)
    decoded = hf_kbit.dequantize(planes, absmax, codebook, (1, 32))
    assert decoded.tolist() == [[value] * 32]


def test_named_codebooks_are_documented():
    for name in codebooks.NAMED:
        assert name in (DOCS / "index.md").read_text()
