"""A model that is quantized to be saved: its packed weights need not be in memory."""

from pathlib import Path

import pytest
import small
import torch
from transformers import AutoModelForCausalLM

from hf_kbit import KbitConfig
from hf_kbit.integrations.transformers import conversions
from hf_kbit.integrations.transformers.conversions import packed_away
from hf_kbit.nn.weight import packed_layers


@pytest.fixture
def folder(tmp_path):
    small.llama(hidden_size=64, intermediate_size=128, num_attention_heads=4).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def load(folder, **config):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=KbitConfig(**config))


@pytest.mark.parametrize("config", [{"bits": 3, "embedding_bits": 5}, {"bits": 2, "codebook": "trellis"}])
def test_packed_weights_are_mapped_from_files_without_a_name(config, folder, tmp_path, device):
    """And are those of a model that is loaded to be used, whatever packs them; others are not."""
    (tmp_path / "away").mkdir()
    plain = load(folder, **config)
    with packed_away(tmp_path / "away", device):
        model = load(folder, **config)
    layers, state = packed_layers(model), plain.state_dict()
    assert layers and not any((tmp_path / "away").iterdir())
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    mapped = [[int(end, 16) for end in line[0].split("-")] for line in lines]
    for of, expected in ((layers, True), (packed_layers(plain), False)):
        for layer in of.values():
            for tensor in layer.weight.file_tensors().values():
                assert any(start <= tensor.data_ptr() < end for start, end in mapped) == expected
    model.save_pretrained(tmp_path / "saved")
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "saved/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


def test_a_full_disk_is_named(folder, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(conversions, "NamedTemporaryFile", full)
    with (
        packed_away(tmp_path, "cpu"),
        pytest.raises(ValueError, match=r"q_proj.weight: .* \(No space left on device\)"),
    ):
        load(folder, bits=3)
