"""Saving, loading and copying adapters, which leaves the quantized weights below them where they are."""

import peft
import pytest
import torch
from adapters import TOLERANCE, adapted, logits, lora, quantized, relative, through_transformers, tuner_layers
from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_kbit.weight.scalar import ScalarTensor
from hf_kbit.weight.tensor import KbitTensor


@pytest.mark.parametrize("settings", [{}, {"bias": "all", "modules_to_save": ["lm_head"]}], ids=["alone", "and more"])
def test_saving_adapters_does_not_touch_packed_weights(settings, device, tmp_path, monkeypatch):
    """None is decoded or brought back to the stored form; tables are in no file."""
    targets = {"target_modules": ["q_proj", "embed_tokens"]}
    model = adapted(quantized(device, embedding_bits=4), lora(**targets, **settings))
    for method in ("dequantize", "as_stored", "file_tensors"):
        monkeypatch.setattr(ScalarTensor, method, None)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    state = peft.get_peft_model_state_dict(model, model.state_dict(keep_vars=True))
    assert len(saved) >= 6 and saved.keys() == {name for name in state if not isinstance(state[name], KbitTensor)}
    assert all(torch.equal(tensor.cpu(), state[name].cpu()) for name, tensor in saved.items())
    assert any(name.endswith("q_proj.base_layer.bias") for name in saved) == bool(settings)


@pytest.mark.parametrize("options", [{}, {"safe_serialization": False}, {"save_embedding_layers": True}], ids=str)
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_converted_to_plain_lora_while_saving(init, options, device, tmp_path):
    """What PEFT makes of an adapter that has changed the weight: its own product less the one that it began with."""
    model = quantized(device, embedding_bits=4)
    model = peft.get_peft_model(model, lora(target_modules=["q_proj"], init_lora_weights=init))
    config = model.peft_config["default"]
    config.init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    config.init_lora_weights = init
    start = peft.get_peft_model_state_dict(model)
    start = {name: tensor.clone() for name, tensor in start.items() if "lora_" in name}
    adapter = {name: part for name, part in model.named_parameters() if "lora_" in name}
    for part in adapter.values():
        part.data += 0.1
    before = logits(model.eval())
    model.save_pretrained(
        tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start"), **options
    )
    assert torch.equal(logits(model), before) and not model._state_dict_hooks
    folder = tmp_path / "plain"
    if "safe_serialization" in options:
        plain = torch.load(folder / "adapter_model.bin")
    else:
        plain = load_file(folder / "adapter_model.safetensors")
    assert plain.keys() == start.keys() and len(plain) == 4 and PeftConfig.from_pretrained(folder).r == 2 * config.r
    now = {name.replace(".default", ""): part for name, part in adapter.items()}
    for name in (name for name in plain if "lora_A" in name):
        of = [(tensors[name.replace("lora_A", "lora_B")], tensors[name]) for tensors in (plain, now, start)]
        found, trained, began = ((b @ a).cpu() for b, a in of)
        assert torch.allclose(found, trained - began, atol=1e-5) and found.abs().max() > 1e-2


def test_adapters_are_saved_alone_and_load_everywhere(device, tmp_path):
    quantized(device).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map=device)
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("PEFT puts what it loads on the GPU")
    model = adapted(base, lora(modules_to_save=["lm_head"]))
    expected = logits(model)
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
        assert len(tuner_layers(loaded)) == 6 and torch.equal(logits(loaded), expected), name
    onto_decoded = PeftModel.from_pretrained(reload().dequantize(), tmp_path / "adapter").eval()
    assert relative(logits(onto_decoded), expected) < TOLERANCE[device]


@through_transformers
def test_adapters_through_transformers(device, tmp_path):
    """``add_adapter``, ``save_pretrained`` and ``load_adapter`` of the model itself."""
    model = quantized(device, module_bits={"v_proj": 4})
    model.add_adapter(lora(init_lora_weights=False))
    expected, layers = logits(model.eval()), dict(model.config.quantization_config.stored.layers)
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.stored.layers == layers and len(layers) == 2
    assert {file.name for file in tmp_path.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    assert not (tmp_path / "model.safetensors").exists()
    other = quantized(device, module_bits={"v_proj": 4}).eval()
    other.load_adapter(tmp_path)
    assert torch.equal(logits(other), expected)
