"""Saving, loading and copying adapters, which leaves the quantized weights below them where they are."""

import copy
import pickle

import peft
import pytest
import torch
from adapters import IDS, adapted, kbit_layers, lora, quantized, relative, through_transformers
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_kbit import KbitLinear
from hf_kbit.integrations.peft.layer import KbitTunerLayer
from hf_kbit.nn.weight import PACKED, without_packed_weights

TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}  # sums in float32 in another order


def tiled(model):
    """With its weights as they are on a GPU, if it is on a CPU."""
    for layer in kbit_layers(model).values():
        if not layer.is_tiled:
            layer.weight.data, layer.weight_absmax.data = layer._repacked(inverse=False)
    return model


def save_adapters(model, folder) -> None:
    model.save_pretrained(folder)


def save_through_transformers(model, folder) -> None:
    model.get_base_model().save_pretrained(folder)


def take_state_dict(model, folder) -> None:
    torch.save(peft.get_peft_model_state_dict(model), folder / "state.pt")


@pytest.mark.parametrize(
    "save", [save_adapters, pytest.param(save_through_transformers, marks=through_transformers), take_state_dict]
)
@pytest.mark.parametrize("settings", [{}, {"bias": "all", "modules_to_save": ["lm_head"]}], ids=["alone", "and more"])
def test_saving_adapters_does_not_touch_packed_weights(settings, save, device, tmp_path, monkeypatch):
    """No tile is brought back to the stored form or copied, and the files are those of a model that has none."""
    folders = [tmp_path / "planes", tmp_path / "tiles"]
    for folder in folders:
        folder.mkdir()
        model = quantized(device)
        if save is save_through_transformers:
            model.add_adapter(lora(init_lora_weights="gaussian", **settings | {"modules_to_save": None}))
            model.get_base_model = lambda model=model: model
        else:
            model = adapted(model, lora(**settings))
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape).to(parameter)
        if folder.name == "tiles":
            tiled(model)
            assert all(layer.is_tiled for layer in kbit_layers(model).values())
            monkeypatch.setattr(KbitLinear, "_repacked", None)
        save(model, folder)
    files = [sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".pt")) for folder in folders]
    assert len(files[0]) == 1 and [file.name for file in files[0]] == [file.name for file in files[1]]
    saved = [torch.load(*f) if f[0].suffix == ".pt" else load_file(*f) for f in files]
    assert saved[0].keys() == saved[1].keys() and len(saved[0]) >= 12
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])
    assert any(name.endswith("q_proj.base_layer.bias") for name in saved[0]) == bool(settings)


def test_only_packed_weights_are_left_out_and_only_inside(device):
    model = quantized(device)
    whole = model.state_dict()
    packed = {f"{name}.{key}" for name in kbit_layers(model) for key in PACKED}
    with without_packed_weights():
        assert model.state_dict().keys() == whole.keys() - packed
    with pytest.raises(ZeroDivisionError), without_packed_weights():
        raise ZeroDivisionError
    assert model.state_dict().keys() == whole.keys() and len(packed) == 42


def test_adapters_are_saved_alone_and_load_everywhere(device, tmp_path):
    quantized(device).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map=device)
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("PEFT puts what it loads on the GPU")
    model, ids = adapted(base, lora(modules_to_save=["lm_head"])), IDS.to(device)
    logits = model(ids).logits
    model.save_pretrained(tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(tensors) == 13 and all("lora_" in name or "lm_head" in name for name in tensors)

    def reload():
        return AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map=device)

    ways = {
        "PeftModel": lambda: PeftModel.from_pretrained(reload(), tmp_path / "adapter"),
        "low memory": lambda: PeftModel.from_pretrained(reload(), tmp_path / "adapter", low_cpu_mem_usage=True),
        "AutoPeftModel": lambda: AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter", device_map=device),
    }
    for name, way in ways.items():
        loaded = way().eval()
        assert sum(isinstance(module, KbitTunerLayer) for module in loaded.modules()) == 6
        assert torch.equal(loaded(ids).logits, logits), name
    onto_decoded = PeftModel.from_pretrained(reload().dequantize(), tmp_path / "adapter").eval()
    assert relative(onto_decoded(ids).logits, logits) < TOLERANCE[device]


@through_transformers
def test_adapters_through_transformers(device, tmp_path):
    """``add_adapter``, ``save_pretrained`` and ``load_adapter`` of the model itself."""
    model, ids = quantized(device, module_bits={"v_proj": 4}), IDS.to(device)
    model.add_adapter(lora(init_lora_weights=False))
    logits, layers = model.eval()(ids).logits, dict(model.config.quantization_config.stored.layers)
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.stored.layers == layers and len(layers) == 2
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "model.safetensors").exists()
    other = quantized(device, module_bits={"v_proj": 4}).eval()
    other.load_adapter(tmp_path)
    assert torch.equal(other(ids).logits, logits)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_copies(way, device):
    model, ids = adapted(quantized(device), lora()), IDS.to(device)
    other = copy.deepcopy(model) if way == "deepcopy" else pickle.loads(pickle.dumps(model))
    assert torch.equal(other(ids).logits, model(ids).logits)
    other.merge_adapter()
    merged = other(ids).logits
    other = copy.deepcopy(other) if way == "deepcopy" else pickle.loads(pickle.dumps(other))
    assert torch.equal(other(ids).logits, merged) and not torch.equal(merged, model(ids).logits)
    other.unmerge_adapter()
    assert torch.equal(other(ids).logits, model(ids).logits)
