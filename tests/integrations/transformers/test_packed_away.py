"""A model that is quantized to be saved: its packed weights need not be in memory."""

import pytest
import small
import torch
from mapping import is_mapped
from transformers import AutoModelForCausalLM

from hf_kbit import KbitConfig
from hf_kbit.files import finished
from hf_kbit.integrations.transformers.conversions import packed_away
from hf_kbit.nn.weight import KbitWeight, packed_layers


@pytest.fixture
def folder(tmp_path):
    small.llama(hidden_size=64, intermediate_size=128, num_attention_heads=4).save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def load(folder, **config):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=KbitConfig(**config))


@pytest.mark.parametrize("config", [{"bits": 3, "embedding_bits": 5}, {"bits": 2, "codebook": "trellis"}])
def test_packed_weights_are_mapped_from_files(config, folder, tmp_path, device):
    """And are those of a model that is loaded to be used, whatever packs them; others are not."""
    plain = load(folder, **config)
    with packed_away(tmp_path / "away", device):
        model = load(folder, **config)
    layers, state = packed_layers(model), plain.state_dict()
    names = {layer.qualified_name for layer in layers.values()}
    assert names and {file.stem for file in (tmp_path / "away").glob("*.safetensors")} == names
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    for of, expected in ((layers, True), (packed_layers(plain), False)):
        for layer in of.values():
            tensors = layer.weight.file_tensors().values()
            assert all(is_mapped(tensor, tmp_path / "away") == expected for tensor in tensors)
    model.save_pretrained(tmp_path / "saved")
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "saved/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


def test_goes_on_after_it_was_interrupted(folder, tmp_path, monkeypatch):
    """With the weights that are missing, to the same ones; of another config, or damaged, they are refused."""
    expected, quantize, calls = load(folder, bits=3).state_dict(), KbitWeight.quantize, []

    def counted(layer, weight, name):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(name)
        return quantize(layer, weight, name)

    monkeypatch.setattr(KbitWeight, "quantize", counted)
    with packed_away(tmp_path / "away", "cpu"), pytest.raises(KeyboardInterrupt):
        load(folder, bits=3)
    monkeypatch.setattr(KbitWeight, "quantize", lambda *given: calls.append(given[2]) or quantize(*given))
    with packed_away(tmp_path / "away", "cpu"):
        found = load(folder, bits=3)
        assert len(calls) == len(set(calls)) == len(packed_layers(found))
        assert all(torch.equal(x, found.state_dict()[name]) for name, x in expected.items())
        with pytest.raises(ValueError, match="away: found what a run with another model"):
            load(folder, bits=2)
        file = sorted((tmp_path / "away").glob("*q_proj*"))[0]
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.raises(ValueError, match=r"q_proj.safetensors: found it damaged .* quantized again"):
            load(folder, bits=3)


def test_a_full_disk_is_named(folder, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(finished, "save_file", full)
    with (
        packed_away(tmp_path / "away", "cpu"),
        pytest.raises(ValueError, match=r"q_proj: .* \(No space left on device\)"),
    ):
        load(folder, bits=3)
