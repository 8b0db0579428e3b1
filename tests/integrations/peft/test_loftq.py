"""LoRA that starts at the quantization error."""

import pytest
import torch
from adapters import assert_same_state, decoded, lora, packed_state, quantized, trainable, tuner_layers
from peft import get_peft_model
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

import hf_kbit
from hf_kbit import KbitConfig


def test_loftq(device, tmp_path):
    """The adapter takes the quantization error, as well as any of its rank can, and a callback may refuse."""
    dense = decoded(device).to(torch.bfloat16)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    dense.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "other.safetensors")  # no file of the model
    base = LlamaForCausalLM.from_pretrained(tmp_path, device_map=device, quantization_config=KbitConfig(bits=3))
    before = packed_state(base)
    model = get_peft_model(base, lora(lora_alpha=3))
    start = {name: parameter.clone() for name, parameter in trainable(model).items()}
    refused = []
    hf_kbit.replace_lora_weights_loftq(
        model, callback=lambda model, name: refused.append(name) or not name.endswith("v_proj")
    )
    assert len(refused) == 6
    for name, layer in tuner_layers(model).items():
        factors = [f"{name}.lora_{part}.default.weight" for part in "AB"]
        if name.endswith("v_proj"):
            assert all(torch.equal(trainable(model)[factor], start[factor]) for factor in factors)
            continue
        original = dense.get_parameter(name.removeprefix("base_model.model.") + ".weight").float()
        error = original - layer.base_layer.dequantize(torch.float32)
        rest = torch.linalg.svdvals(error)[4:].norm()
        torch.testing.assert_close((error - layer.get_delta_weight("default")).norm(), rest, rtol=1e-3, atol=0)
    assert_same_state(packed_state(model), before)
    model.add_adapter("wide", lora(r=60))
    hf_kbit.replace_lora_weights_loftq(model, adapter_name="wide")
    layer = model.base_model.model.model.layers[0].self_attn.v_proj  # 36 out_features
    original = dense.model.layers[0].self_attn.v_proj.weight.float()
    decoded_weight = layer.base_layer.dequantize(torch.float32)
    torch.testing.assert_close(decoded_weight + layer.get_delta_weight("wide"), original)
    assert layer.lora_A["wide"].weight.shape == (60, 72) and layer.lora_B["wide"].weight.shape == (36, 60)

    with pytest.raises(ValueError, match="other: found no quantized layer with LoRA of that name"):
        hf_kbit.replace_lora_weights_loftq(model, adapter_name="other")
    quantized(device).save_pretrained(tmp_path / "packed")
    with pytest.raises(ValueError, match=r"q_proj.weight: found torch.int32 \[72, 9\], expected floats \[72, 72\]"):
        hf_kbit.replace_lora_weights_loftq(model, tmp_path / "packed")
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight: not in the checkpoint"):
        hf_kbit.replace_lora_weights_loftq(model, tmp_path / "other.safetensors")
