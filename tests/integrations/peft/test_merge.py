"""Merging adapters into quantized layers: exact until the sum is quantized, undone to the byte, never in silence."""

import re
import threading
import warnings

import peft
import pytest
import torch
from accelerate.hooks import remove_hook_from_submodules
from adapters import (
    adapted,
    assert_same_state,
    both,
    kbit_layers,
    logits,
    lora,
    lora_on_experts,
    lora_on_parameters,
    merge,
    offload,
    packed_state,
    quantized,
    relative,
    tuner_layers,
)
from torch import nn
from transformers import AutoModelForCausalLM

import hf_kbit
from hf_kbit import KbitLinear
from hf_kbit.integrations.peft.merge_report import one_report

# Adapters on all of these widths and levels at once.
SETTINGS = {"bits": 3, "module_bits": {"v_proj": 5, "down_proj": 2}}
LOPSIDED = [-1, -0.7, -0.2, 0.1, 0.2, 0.3, 0.6, 0.9]
FIGURES = re.compile(
    r"merged into (\d+) layers of (\S+) bits. Requantizing changed the merged weights by (\S+)% "
    r"\(relative error; (\S+)% at most, in (\S+)\)"
    r"(?: and kept (\S+)% of what the adapters add; (\S+)% of the stored weights)?"
)


@pytest.mark.parametrize(
    ("configs", "settings"),
    [
        ((lora(), lora(use_dora=True, r=2), lora(target_modules=["v_proj", "up_proj"])), {}),
        ((lora_on_parameters(), lora_on_parameters(r=2), lora_on_parameters(r=3)), {}),
        ((lora_on_experts(), lora_on_experts(r=2), lora_on_experts(r=3)), {"name": "qwen3_moe"}),
    ],
    ids=["linear layers", "parameters", "experts"],
)
def test_adapters_merged_one_by_one_are_rounded_once(configs, settings, device):
    """And undone by unmerging, or while they are disabled; meanwhile no initialisation reads the weight."""
    at_once, one_by_one = (adapted(quantized(device, **settings), *configs) for _ in range(2))
    before, names = packed_state(at_once), ["default", "1", "2"]
    merge(at_once, adapter_names=names)
    for name in names:
        merge(one_by_one, adapter_names=[name])
    assert_same_state(packed_state(one_by_one), packed_state(at_once))
    assert next(iter(tuner_layers(one_by_one).values())).merged_adapters[:2] == names[:2]
    with pytest.warns(UserWarning, match="All adapters are already merged"):
        one_by_one.merge_adapter(adapter_names=names)
    for config in ({"init_lora_weights": "pissa"}, {"use_dora": True}):
        with pytest.raises(ValueError, match=r"q_proj: found default, 1.* merged, expected the layer as it was"):
            one_by_one.add_adapter("other", lora(target_modules=["q_proj"], **config))
    assert_same_state(packed_state(one_by_one), packed_state(at_once))
    with at_once.disable_adapter():
        assert torch.equal(logits(at_once), logits(quantized(device, **settings)))
    for model in (at_once, one_by_one):
        model.unmerge_adapter()
        assert_same_state(packed_state(model), before)
        assert not any(layer.merged_adapters or layer.unmerged for layer in tuner_layers(model).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_adapters_change_the_exponent(dtype, device, tmp_path):
    """Unmerging brings it back; config.json has it once the merged model is saved."""
    model = adapted(quantized(device, dtype), lora())
    before, expected = packed_state(model), logits(model)
    layer = model.base_model.model.model.layers[1].self_attn.v_proj
    layer.lora_B["default"].weight.data *= 2.0**13
    merge(model)
    assert layer.base_layer.decoding.exponent > 0
    model.unmerge_adapter()
    assert layer.base_layer.decoding.exponent == 0
    assert_same_state(packed_state(model), before)
    with pytest.warns(UserWarning, match="merged into 6 layers of 3 bits"):
        merged = model.merge_and_unload()
    assert not tuner_layers(merged) and len(kbit_layers(merged)) == 14
    assert merged.model.layers[1].self_attn.v_proj.decoding.exponent > 0
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=device)
    assert torch.equal(logits(loaded), logits(merged)) and not torch.equal(logits(merged), expected)
    assert_same_state(packed_state(loaded), packed_state(merged))


# --- what is told ---


def test_the_warning_has_the_measured_figures(device):
    model = adapted(quantized(device, **SETTINGS), lora())
    exact, stored, before = [], [], []
    for layer in tuner_layers(model).values():
        before.append(layer.base_layer.dequantize().flatten())
        exact.append(before[-1] + layer.get_delta_weight("default").detach().flatten())
    (text,) = merge(model)
    stored = [layer.base_layer.dequantize().flatten() for layer in tuner_layers(model).values()]
    number, bits, error, most, worst, kept, changed = FIGURES.search(text).groups()
    assert (number, bits) == ("6", "2/3/5")
    errors = [relative(s, e) for s, e in zip(stored, exact, strict=True)]
    assert float(most) == pytest.approx(100 * max(errors), abs=0.01)
    assert worst == list(tuner_layers(model))[errors.index(max(errors))].removeprefix("base_model.model.")
    exact, stored, before = (torch.cat(parts) for parts in (exact, stored, before))
    assert float(error) == pytest.approx(100 * relative(stored, exact), abs=0.01)
    added = exact - before
    assert float(kept) == pytest.approx(100 * ((stored - before) @ added / (added @ added)).item(), abs=1)
    assert float(changed) == pytest.approx(100 * (stored != before).float().mean().item(), abs=0.01)
    assert "hf_kbit.merge_and_unload(model, dequantize=True)" in text and "away" not in text


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_an_adapter_that_is_rounded_away_is_reported(bits, device):
    model = adapted(quantized(device, bits=bits), lora())
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data *= 1e-3
    (text,) = merge(model)
    assert "the merge rounds most of the adapters away" in text
    assert float(FIGURES.search(text)[6]) < 50 and float(FIGURES.search(text)[7]) < 6


def test_an_adapter_that_adds_nothing_changes_nothing(device):
    """Not even where decoded weights, quantized again, are others, as with levels that reach less far up than down."""
    model = peft.get_peft_model(quantized(device, codebook=LOPSIDED), lora())
    before = packed_state(model)
    (text,) = merge(model)
    assert FIGURES.search(text)[6] is None
    assert_same_state(packed_state(model), before)
    model.unmerge_adapter()
    assert_same_state(packed_state(model), before)


def test_a_layer_merged_alone_reports_itself(device):
    model = adapted(quantized(device), lora())
    layer = model.base_model.model.model.layers[0].mlp.down_proj
    with pytest.warns(UserWarning, match=r"merged into 1 layers of 3 bits.*in model.layers.0.mlp.down_proj\)"):
        layer.merge()
    layer.unmerge()
    before = packed_state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="merged into 1 layers"):
            layer.merge()
    assert layer.merged, "the warning is an error to this program, and yet the merge is done"
    layer.unmerge()
    assert_same_state(packed_state(model), before)


def test_threads_that_merge_report_their_own_layers(device):
    model = adapted(quantized(device), lora())
    layers = [block.mlp.down_proj for block in model.base_model.model.model.layers]
    with pytest.warns(UserWarning) as caught, one_report():
        thread = threading.Thread(target=layers[0].merge)
        thread.start(), thread.join()
        layers[1].merge()
    texts = [str(warning.message) for warning in caught if "hf_kbit" in str(warning.message)]
    assert [FIGURES.search(text)[5] for text in texts] == [f"model.layers.{number}.mlp.down_proj" for number in (0, 1)]


@pytest.mark.parametrize("safe", [False, True])
def test_nan_is_refused_and_leaves_the_layer_as_it_was(safe, device):
    model = adapted(quantized(device), lora(), lora())
    merge(model, adapter_names=["default"])
    before = packed_state(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj  # the first to be merged
    layer.lora_B["1"].weight.data[2, 1] = float("nan")
    message = "NaNs detected in the merged weights" if safe else "q_proj.weight with default, 1 merged: found NaN"
    with pytest.raises(ValueError, match=message):
        model.merge_adapter(adapter_names=["1"], safe_merge=safe)
    assert_same_state(packed_state(model), before)
    assert layer.merged_adapters == ["default"] and type(layer.base_layer) is KbitLinear


def test_a_bias_that_cannot_be_merged_is_refused(device):
    model = adapted(quantized(device), lora(target_modules=["up_proj"], lora_bias=True))
    before = packed_state(model)
    with pytest.raises(RuntimeError, match="base layer has no bias"):
        model.merge_adapter()
    assert_same_state(packed_state(model), before)
    assert not model.base_model.model.model.layers[0].mlp.up_proj.merged


# --- into 16 bits ---


def test_dtype_of_the_exact_merge(device):
    for dtype, kwargs in [(torch.bfloat16, {}), (torch.float16, {"dtype": torch.float16})]:
        model = peft.prepare_model_for_kbit_training(quantized(device, torch.bfloat16))
        merged = hf_kbit.merge_and_unload(adapted(model, lora()), dequantize=True, **kwargs)
        assert {parameter.dtype for parameter in merged.parameters()} == {dtype}
    with pytest.raises(ValueError, match=r"dtype: found torch.float16, expected None without dequantize=True"):
        hf_kbit.merge_and_unload(adapted(quantized(device), lora()), dtype=torch.float16)


@pytest.mark.parametrize(("value", "dtype"), [(float("nan"), torch.float32), (1e5, torch.float16)])
def test_exact_merge_refuses_what_is_not_finite(value, dtype, device):
    """And leaves nothing of the attempt: the next merge is quantized."""
    model = adapted(quantized(device), lora())
    before = packed_state(model)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj  # the first to be merged
    layer.lora_B["default"].weight.data[:, 0] = value
    layer.lora_A["default"].weight.data[0] = 1
    with pytest.raises(ValueError, match=f"q_proj.weight with default merged: found NaN or infinite .* in {dtype}"):
        hf_kbit.merge_and_unload(model, dequantize=True, dtype=dtype)
    assert_same_state(packed_state(model), before)
    layer.lora_B["default"].weight.data[:, 0] = 0
    merge(model)
    assert len(kbit_layers(model)) == 14


def test_only_the_named_adapters_are_merged(device):
    model, reference = both(lora(), lora(target_modules=["up_proj"]), device=device)
    merged = hf_kbit.merge_and_unload(model, dequantize=True, adapter_names=["1"])
    assert relative(logits(merged), logits(reference.merge_and_unload(adapter_names=["1"]))) < 1e-5


def test_a_model_that_transformers_did_not_quantize(device):
    torch.manual_seed(0)
    layers = [KbitLinear.from_linear(nn.Linear(40, 40), bits=bits) for bits in (2, 4)]
    x = torch.randn(3, 40).to(device)
    model = adapted(nn.Sequential(*layers).to(device), peft.LoraConfig(target_modules=["0"]))
    y = model(x)
    merged = hf_kbit.merge_and_unload(model, dequantize=True)
    assert [type(layer) for layer in merged] == [nn.Linear, nn.Linear]
    torch.testing.assert_close(merged(x), y)


def test_layers_offloaded_to_the_cpu(device):
    """PEFT brings such a layer in, has it merged and takes it out again, in the stored form."""
    model = adapted(quantized(device), lora())
    unmerged = logits(model)
    merge(model)
    state, merged = packed_state(model), logits(model)
    model.unmerge_adapter()
    for layer in tuner_layers(model).values():
        offload(layer.base_layer, device)
    assert all(layer.base_layer.weight.is_meta for layer in tuner_layers(model).values())
    torch.testing.assert_close(logits(model), unmerged)
    merge(model)
    torch.testing.assert_close(logits(model), merged)
    with (
        model.disable_adapter(),
        pytest.raises(ValueError, match="found it offloaded, expected it on a device to unm"),
    ):
        logits(model)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), unmerged)
    merge(model)
    remove_hook_from_submodules(model)
    assert_same_state(packed_state(model), state)
    offload(model.base_model.model.model.layers[0].self_attn.k_proj, device)
    with pytest.raises(ValueError, match="found it offloaded, expected it on a device"):
        model.add_adapter("reads", lora(target_modules=["k_proj"], init_lora_weights="pissa"))


@pytest.mark.gpu
def test_gpu_to_cpu_and_back_while_merged():
    model = adapted(quantized("cuda"), lora(), lora(r=2))
    before = packed_state(model)
    merge(model)
    merged = packed_state(model)
    model.cpu()
    assert_same_state(packed_state(model), merged)
    merge(model, adapter_names=["1"])
    model.unmerge_adapter()
    assert_same_state(packed_state(model), before)
    merge(model)
    model.cuda()
    merge(model, adapter_names=["1"])
    model.unmerge_adapter()
    assert_same_state(packed_state(model), before)
    assert all(layer.weight.is_cuda for layer in kbit_layers(model).values())
