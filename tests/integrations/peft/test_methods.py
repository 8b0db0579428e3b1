"""Each method of PEFT over packed layers: it starts, computes, trains and merges as over the decoded weights."""

import warnings

import pytest
import torch
from adapters import (
    CONFIGS,
    IDS,
    TOLERANCE,
    adapted,
    assert_same_state,
    decoded,
    expected_state,
    logits,
    lora,
    merge,
    packed_state,
    quantized,
    relative,
    trainable,
    tuner_layers,
)
from peft import get_peft_model

import hf_kbit
from hf_kbit import KbitLinear

# Adapters on all of these widths and levels at once.
WIDTHS = {"bits": 3, "module_bits": {"v_proj": 5, "down_proj": 2}}
REFUSED = {"GLORA": "not a plain torch.nn.Linear", "LN_TUNING": "a packed weight is frozen"}
READING = ("pissa", "pissa_niter_4", "olora")


def pair(name: str, device: str, dtype=torch.float32):
    """The same adapters over packed layers and over decoded ones, as they start."""
    made = []
    for make in (quantized, decoded):
        torch.manual_seed(0)
        model = get_peft_model(make(device, dtype, **WIDTHS), CONFIGS[name](), autocast_adapter_dtype=False)
        made.append(model)
    return made


def own_tensors(model) -> dict[str, torch.Tensor]:
    """Parameters and buffers of adapters."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor for name, tensor in tensors.items() if ".default" in name}


def outcome(call):
    """What a call gives, or what it raises."""
    try:
        return call()
    except NotImplementedError as error:
        return type(error)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in REFUSED])
def test_as_over_decoded_weights(name, device):
    """Dtypes and first values, losses and gradients, bytes after merging and unmerging, and the exact merge."""
    model, reference = pair(name, device)
    ids, start = IDS.to(device), own_tensors(reference)
    before = packed_state(quantized(device, **WIDTHS))
    assert own_tensors(model).keys() == start.keys() and (start or name == "BEFT")
    generator = torch.Generator().manual_seed(0)
    for key, tensor in own_tensors(model).items():
        if name != "FROD":  # decomposes what weights have in common: signs are a matter of the last digit
            torch.testing.assert_close(tensor, start[key], rtol=1e-3, atol=1e-4)
        if start[key].is_floating_point():
            start[key].data += 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor)
        tensor.data.copy_(start[key])
    outputs = []
    for each in (model, reference):
        torch.manual_seed(0)  # some draw random numbers in each step
        outputs.append(each.train()(ids, labels=ids))
        outputs[-1].loss.backward()
    assert relative(*(output.logits for output in outputs)) < TOLERANCE[device]
    for key, parameter in trainable(reference).items():
        found = trainable(model)[key].grad
        if parameter.grad is None or not parameter.grad.any():
            assert found is None or not found.any()
        else:
            assert relative(found, parameter.grad) < 5 * TOLERANCE[device], key
    state = packed_state(model)
    assert_same_state({key: state[key] for key in before}, before)

    unmerged = logits(model.eval())
    with model.disable_adapter():
        assert relative(unmerged, logits(model)) > 1e-5, "the adapters do nothing"
    done = outcome(lambda: merge(reference, safe_merge=True))
    found = outcome(lambda: merge(model, safe_merge=True))
    if done is NotImplementedError:
        assert found is done
        return
    assert len(found) == (1 if tuner_layers(model) else 0)
    for key, tensor in (expected := expected_state(reference, model)).items():
        if tensor.is_floating_point():
            torch.testing.assert_close(packed_state(model)[key], tensor, rtol=1e-5, atol=1e-6)
        else:  # sums in another order may fall on the other side of a border between two codes
            assert (packed_state(model)[key] != tensor).float().mean() <= (0.001 if device == "cpu" else 0.01), key
    assert len(expected) > len(tuner_layers(model)) and relative(logits(model), unmerged) < 0.4
    if outcome(model.unmerge_adapter) is NotImplementedError:
        return
    assert_same_state(packed_state(model) | before, packed_state(model))
    assert torch.equal(logits(model), unmerged)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hf_kbit")
        merged = hf_kbit.merge_and_unload(model, dequantize=True)
    assert not any(isinstance(module, KbitLinear) for module in merged.modules()) and not tuner_layers(merged)
    assert relative(logits(merged), unmerged) < TOLERANCE[device]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_layer(name):
    with pytest.raises(ValueError, match=rf"^model\.layers\.0\.self_attn\.q_proj: {name}.*{REFUSED[name]}"):
        get_peft_model(quantized(), CONFIGS[name]())


@pytest.mark.parametrize("name", ["LORA", "DoRA", "IA3", "HRA"])
def test_adapters_have_the_dtype_they_have_on_16_bits(name):
    found, expected = (
        {key: tensor.dtype for key, tensor in own_tensors(model).items()}
        for model in pair(name, "cpu", torch.bfloat16)
    )
    assert found == expected and torch.bfloat16 in found.values()
    model = get_peft_model(quantized(dtype=torch.bfloat16), lora(init_lora_weights="pissa"))
    assert {parameter.dtype for parameter in trainable(model).values()} == {torch.float32}


@pytest.mark.parametrize("init", READING)
def test_initialisations_that_change_the_weight(init, device):
    """PEFT's, on the decoded weight; what they leave of it is quantized again, with the bits of each layer."""
    models = []
    for make in (quantized, decoded):
        torch.manual_seed(0)
        models.append(get_peft_model(make(device, **WIDTHS), lora(init_lora_weights=init)))
    model, reference = models
    for name, layer in tuner_layers(model).items():
        dense, own = reference.get_submodule(name), layer.base_layer
        for part, expected in dense.named_parameters():
            if "lora_" in part:
                torch.testing.assert_close(layer.get_parameter(part), expected, rtol=1e-3, atol=1e-4)
        rest = KbitLinear.from_linear(dense.base_layer, own.bits)
        rest.load(rest.quantize(dense.base_layer.weight, columns=own.weight.columns))  # they end a hair apart
        assert relative(own.dequantize(), rest.dequantize()) < 0.03
    assert relative(logits(model), logits(quantized(device, **WIDTHS))) < 0.4
    model = adapted(model.unload(), lora(init_lora_weights=init, target_modules=["q_proj"]))
    expected = logits(model)
    assert relative(logits(hf_kbit.merge_and_unload(model, dequantize=True)), expected) < TOLERANCE[device]
