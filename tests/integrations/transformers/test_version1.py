"""Models of format version 1, as all were before there were transforms: read, and written, to the same bytes.

``tests/data/version1`` was saved by the last hf_kbit that knew no other version, of ``dense()``, quantized with
``CONFIG`` alone.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig, KbitLinear

SAVED = Path(__file__).parents[2] / "data" / "version1"
CONFIG = {"bits": 3, "module_bits": {"down_proj": 5, "lm_head": 2}}


def dense() -> LlamaForCausalLM:
    """Weights from whole numbers: no generator of random ones has to stay as it is. One layer needs an exponent."""
    shape = dict(vocab_size=32, hidden_size=40, intermediate_size=48, num_attention_heads=2, num_hidden_layers=1)
    model = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            steps = torch.arange(parameter.numel()) * (2 * number + 7) ** 3 % 4099
            parameter.copy_((steps.view(parameter.shape) - 2049) / 2**14)
        model.model.layers[0].mlp.up_proj.weight *= 2.0**-10
    return model


def without_seal(file: Path) -> tuple[dict, bytes]:
    """Header and data of a file, but for the digest of its tensors, which came later."""
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"].pop("kbit_tensors", None)
    return header, content[end:]


def assert_same_bytes(folder: Path) -> None:
    """But for what Transformers itself writes into config.json, which is for each of its versions to say."""
    assert without_seal(folder / "model.safetensors") == without_seal(SAVED / "model.safetensors")
    found, expected = (json.loads((path / "config.json").read_text()) for path in (folder, SAVED))
    assert json.dumps(found["quantization_config"]) == json.dumps(expected["quantization_config"])
    if found["transformers_version"] == expected["transformers_version"]:
        assert (folder / "config.json").read_bytes() == (SAVED / "config.json").read_bytes()


def test_loaded_and_saved(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(SAVED, folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = [module for module in model.modules() if isinstance(module, KbitLinear)]
    assert len(layers) == 8 and all(layer.weight.columns is None for layer in layers)
    assert model(torch.arange(6)[None]).logits.isfinite().all()
    model.save_pretrained(tmp_path / "again" / "model")
    assert_same_bytes(tmp_path / "again" / "model")


@pytest.mark.parametrize("transform", ["none", "rotated"])
def test_quantized_again(tmp_path, transform):
    """Without a transform to the same bytes; with one to others, of version 2."""
    dense().save_pretrained(tmp_path / "dense" / "model")
    config = KbitConfig(**CONFIG, transform=transform)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense" / "model", quantization_config=config)
    model.save_pretrained(tmp_path / "model")
    if transform == "none":
        assert_same_bytes(tmp_path / "model")
    else:
        stored = json.loads((tmp_path / "model" / "config.json").read_text())["quantization_config"]
        assert (stored["format_version"], "transform" in stored) == (2, False)
