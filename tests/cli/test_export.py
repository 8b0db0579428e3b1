"""``hf-kbit export``, and other commands of a folder that has trellises."""

import json
from pathlib import Path

import pytest
import torch
from command import refuse, succeed
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

DATA = Path(__file__).parents[1] / "data" / "exl3"


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen2_padded", "qwen3_moe"])
def test_what_came_from_exllamav3_goes_back(name, tmp_path):
    """All tensors of its folder, by its names, bit for bit: experts apart, biases padded, heads untied."""
    AutoModelForCausalLM.from_pretrained(DATA / name).save_pretrained(tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer.json").write_bytes((DATA / name / "tokenizer.json").read_bytes())
    succeed("export", "exl3", str(tmp_path / "ours"), str(tmp_path / "out"))
    found, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", DATA / name))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    said, original = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", DATA / name))
    assert not original.keys() - said.keys() and said.get("num_experts") == original.get("num_experts")
    assert (tmp_path / "out/tokenizer.json").exists() and (tmp_path / "out/quantization_config.json").exists()
    ids = torch.arange(12)[None]
    models = [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (tmp_path / "out", DATA / name)]
    with torch.no_grad():
        assert torch.equal(*(model(ids).logits for model in models))


def test_what_exllamav3_cannot_load_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(DATA / "llama").dequantize()
    model.save_pretrained(tmp_path / "dense")
    succeed("quantize", str(tmp_path / "dense"), str(tmp_path / "scalar"))
    assert "no layer with a trellis" in refuse("export", "exl3", str(tmp_path / "scalar"), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
