"""Adapters over packed layers start, compute, train and merge as over the decoded weights: each method of PEFT, and
LoRA on tables of embeddings and on experts."""

import copy
import functools
import warnings

import pytest
import torch
from adapters import (
    CONFIGS,
    MIXTURES,
    TOLERANCE,
    adapted,
    assert_same_state,
    decoded,
    expected_state,
    gradients,
    logits,
    lora,
    lora_on_experts,
    lora_on_parameters,
    merge,
    packed_state,
    quantized,
    relative,
    trainable,
    tuner_layers,
)
from peft import PeftModel, get_peft_model
from peft.utils import load_peft_weights

import hf_kbit
from hf_kbit import KbitLinear
from hf_kbit.nn.weight import packed_layers

# Adapters on all of these widths and levels at once.
WIDTHS = {"bits": 3, "module_bits": {"v_proj": 5, "down_proj": 2}}
REFUSED = {"GLORA": "not a plain torch.nn.Linear", "LN_TUNING": "a packed weight is frozen"}
READING = ("pissa", "pissa_niter_4", "olora")
LOPSIDED = [-1, -0.7, -0.2, 0.1, 0.2, 0.3, 0.6, 0.9]
ON_TABLES = {
    "LoRA": {},
    "tied LoRA": {"ensure_weight_tying": True},
    "rank-stabilized": {"use_rslora": True, "r": 3},
    "DoRA": {"use_dora": True},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 120]},
}
# {name: (what makes a configuration, the model)}
CASES = {name: (make, WIDTHS) for name, make in CONFIGS.items() if name not in REFUSED}
CASES |= {
    f"{codebook}, {scale}": (lora, {"codebook": levels, "scale": scale})
    for codebook, levels in (("optimal", "optimal"), ("lopsided", LOPSIDED))
    for scale in ("absmax", "search")
}
CASES |= {
    f"{init}, by parameters": (functools.partial(lora_on_parameters, init_lora_weights=init, use_rslora=True), WIDTHS)
    for init in (True, "orthogonal")
}
CASES |= {f"{name}, experts": (functools.partial(lora_on_experts, name), {"name": name}) for name in MIXTURES}
CASES |= {
    f"{name}, {how}": (
        functools.partial(lora, **{"target_modules": ["embed_tokens", "q_proj"]} | ON_TABLES[how]),
        {"name": name, "embedding_bits": 3},
    )
    for names, settings in {
        ("llama",): ("LoRA", "rank-stabilized", "DoRA", "rows"),
        ("gemma",): ("LoRA", "rows"),
        ("tied", "tied gemma"): ("LoRA", "tied LoRA", "rows"),
    }.items()
    for name in names
    for how in settings
}


def pair(make_config, device="cpu", dtype=torch.float32, **model):
    """The same adapters over packed layers and over decoded ones, as they start."""
    made = []
    for make in (quantized, decoded):
        torch.manual_seed(0)
        made.append(get_peft_model(make(device, dtype, **model), make_config(), autocast_adapter_dtype=False))
    return made


def own_tensors(model) -> dict[str, torch.Tensor]:
    """Parameters and buffers of adapters."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor for name, tensor in tensors.items() if ".default" in name}


def levels_of(model) -> dict[str, tuple]:
    return {name: (layer.decoding.levels, layer.recipe) for name, layer in packed_layers(model).items()}


def outcome(call):
    """What a call gives, or what it raises."""
    try:
        return call()
    except NotImplementedError as error:
        return type(error)


@pytest.mark.parametrize("name", CASES)
def test_as_over_decoded_weights(name, device, tmp_path):
    """Dtypes and first values, logits, gradients and files, bytes after merging and unmerging, and the exact merge."""
    make_config, settings = CASES[name]
    model, reference = pair(make_config, device, **settings)
    start, before = own_tensors(reference), packed_state(quantized(device, **settings))
    assert own_tensors(model).keys() == start.keys() and (start or name == "BEFT")
    generator = torch.Generator().manual_seed(0)
    for key, tensor in own_tensors(model).items():
        if name != "FROD":  # decomposes what weights have in common: signs are a matter of the last digit
            torch.testing.assert_close(tensor, start[key], rtol=1e-3, atol=1e-4)
        if start[key].is_floating_point():
            start[key].data += 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor)
        tensor.data.copy_(start[key])
    outputs, grads = [], []
    for each in (model.train(), reference.train()):
        torch.manual_seed(0)  # some draw random numbers in each step
        outputs.append(logits(each))
        torch.manual_seed(0)
        grads.append(gradients(each))
    assert relative(*outputs) < TOLERANCE[device]
    assert grads[0].keys() == grads[1].keys()
    for key, gradient in grads[1].items():
        if gradient is None or not gradient.any():
            assert grads[0][key] is None or not grads[0][key].any()
        else:
            assert relative(grads[0][key], gradient) < 5 * TOLERANCE[device], key
    state = packed_state(model)
    assert_same_state({key: state[key] for key in before}, before)

    unmerged = logits(model.eval())
    with model.disable_adapter():
        assert relative(unmerged, logits(model)) > 1e-5, "the adapters do nothing"
    if name not in CONFIGS:
        check_files(model, reference, unmerged, device, settings, tmp_path)
    if not settings.get("name", "").startswith("tied"):  # else refused: test_embedding.py
        check_merging(model, reference, unmerged, device)


def check_files(model, reference, expected, device, settings, folder) -> None:
    """They fit the other model too, and have no packed tensor."""
    for each, other in ((model, decoded), (reference, quantized)):
        each.save_pretrained(folder / other.__name__, save_embedding_layers=False)
        again = PeftModel.from_pretrained(other(device, **settings), folder / other.__name__).eval()
        assert relative(logits(again), expected) < TOLERANCE[device]
    model.save_pretrained(folder / "whole")  # with the table that it adapts, if PEFT knows one that it can save
    kinds = [load_peft_weights(str(folder / name)).keys() for name in ("decoded", "quantized", "whole")]
    assert kinds[0] == kinds[1] == kinds[2]


def check_merging(model, reference, unmerged, device) -> None:
    before, levels, packed = packed_state(model), levels_of(model), copy.deepcopy(model)
    done = outcome(lambda: merge(reference, safe_merge=True))
    found = outcome(lambda: merge(model, safe_merge=True))
    if done is NotImplementedError:
        assert found is done
        return
    assert len(found) == (1 if tuner_layers(model) else 0)
    state = packed_state(model)
    for key, tensor in (expected := expected_state(reference, model)).items():
        if tensor.is_floating_point():
            torch.testing.assert_close(state[key], tensor, rtol=1e-5, atol=1e-6)
        else:  # sums in another order may fall on the other side of a border between two codes
            assert (state[key] != tensor).float().mean() <= (0.001 if device == "cpu" else 0.01), key
    assert len(expected) > len(tuner_layers(model)) and 0 < relative(logits(model), unmerged) < 0.5
    assert_same_state(*({key: all_of[key] for key in before.keys() - expected.keys()} for all_of in (state, before)))
    assert levels_of(model) == levels
    merged = logits(model)
    if outcome(model.unmerge_adapter) is NotImplementedError:
        return
    assert_same_state(packed_state(model), before)
    assert torch.equal(logits(model), unmerged)
    with pytest.warns(UserWarning, match="hf_kbit: merged into"):
        packed = packed.merge_and_unload()
    assert not tuner_layers(packed) and packed_layers(packed) and torch.equal(logits(packed), merged)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hf_kbit")
        exact = hf_kbit.merge_and_unload(model, dequantize=True)
    assert not packed_layers(exact) and not tuner_layers(exact)
    assert relative(logits(exact), unmerged) < TOLERANCE[device]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_the_layer(name):
    with pytest.raises(ValueError, match=rf"^model\.layers\.0\.self_attn\.q_proj: {name}.*{REFUSED[name]}"):
        get_peft_model(quantized(), CONFIGS[name]())


@pytest.mark.parametrize("name", ["LORA", "DoRA", "IA3", "HRA"])
def test_adapters_have_the_dtype_they_have_on_16_bits(name):
    found, expected = (
        {key: tensor.dtype for key, tensor in own_tensors(model).items()}
        for model in pair(CONFIGS[name], "cpu", torch.bfloat16, **WIDTHS)
    )
    assert found == expected and torch.bfloat16 in found.values()
    for cast, dtype in ((True, torch.float32), (False, torch.bfloat16)):  # PiSSA starts from a float32 weight
        model, pissa = quantized(dtype=torch.bfloat16), lora(init_lora_weights="pissa")
        model = get_peft_model(model, pissa, autocast_adapter_dtype=cast)
        assert {parameter.dtype for parameter in trainable(model).values()} == {dtype}


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
