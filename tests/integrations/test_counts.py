"""The number of parameters of a quantized model is that of the model before it was quantized."""

import peft
import pytest
import torch
from adapters import decoded, kbit_layers, lora, quantized, relative


@pytest.mark.parametrize("bits", [3, 5])
def test_parameters_of_the_model(bits, device):
    model, dense = quantized(device, bits=bits), decoded(device)
    assert model.num_parameters() == dense.num_parameters()
    assert model.num_parameters(exclude_embeddings=True) == dense.num_parameters(exclude_embeddings=True)
    assert model.num_parameters(True) == model.num_parameters(only_trainable=True)
    assert model.num_parameters(only_trainable=True) == sum(p.numel() for p in model.parameters() if p.requires_grad)
    for layer in kbit_layers(model).values():  # tiles are padded to 16 rows of 256, and are no further weights
        if not layer.is_tiled:
            layer.weight.data, layer.weight_absmax.data = layer._repacked(inverse=False)
    assert model.num_parameters() == dense.num_parameters()


@pytest.mark.parametrize("mixed", [False, True])
def test_parameters_with_adapters(mixed, device, capsys):
    model, dense = (peft.get_peft_model(make(device), lora(), mixed=mixed) for make in (quantized, decoded))
    assert model.get_nb_trainable_parameters() == dense.get_nb_trainable_parameters()
    model.print_trainable_parameters(), dense.print_trainable_parameters()
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2] == printed[-1] and "trainable%" in printed[0]


def test_status(device):
    """PEFT's own summary has the counts, and names the format."""
    model = peft.get_peft_model(quantized(device), peft.VeraConfig(target_modules=["q_proj"], r=4))
    dense = peft.get_peft_model(decoded(device), peft.VeraConfig(target_modules=["q_proj"], r=4))
    status, expected = model.get_model_status(), dense.get_model_status()
    assert status.total_params == expected.total_params and status.trainable_params == expected.trainable_params
    assert status.quantization_backend == "kbit" and expected.quantization_backend is None
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert "quantization_backend='kbit'" in repr(layer) and layer.quantization_backend.supports_merge
    weight = layer.get_base_weight()
    assert torch.equal(weight, layer.base_layer.dequantize(torch.float32))
    layer.set_base_weight(2 * weight)
    assert relative(layer.get_base_weight(), 2 * weight) < 0.1  # quantized again
