"""Ways to make adapters on quantized layers, and what is refused; ``test_methods.py`` has what each computes."""

import copy

import peft
import pytest
import torch
from adapters import (
    CONFIGS,
    IDS,
    TOLERANCE,
    adapted,
    assert_same_state,
    both,
    decoded,
    kbit_layers,
    load,
    logits,
    lora,
    offload,
    packed_state,
    quantized,
    relative,
    trainable,
    tuner_layers,
)
from peft import get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from hf_kbit import KbitLinear
from hf_kbit.integrations.peft.layer import tuner_class

# --- creating ---


def test_all_linear(device):
    model = get_peft_model(quantized(device), lora(target_modules="all-linear"))
    found = tuner_layers(model)
    assert len(found) == 2 * 7 and len({name.rpartition(".")[2] for name in found}) == 7
    assert all(isinstance(layer, peft.tuners.lora.Linear) for layer in found.values())
    assert all(type(layer.base_layer) is KbitLinear for layer in found.values())
    assert all("lora_" in name for name in trainable(model))


def test_initialisation_under_low_memory(device):
    """PEFT makes what is created a meta tensor then; the base layer must not become one."""
    before = packed_state(quantized(device))
    model = peft.PeftModelForCausalLM(quantized(device), lora(use_dora=True), low_cpu_mem_usage=True)
    assert any(parameter.is_meta for parameter in trainable(model).values())
    assert_same_state(packed_state(model), before)


# --- offloaded layers ---


@pytest.mark.parametrize(
    "name", ["LORA", "DoRA", "MiCA", "IA3", "LOHA", "OFT", "VERA", "LoRA, rank-stabilized, patterns"]
)
def test_layers_whose_weight_is_not_there(name, device):
    """Adapters are where the layer computes; only those that start from the weight are refused.

    BOFT reads the base layer's bias in each forward, and ``bias="lora_only"`` trains it: it is offloaded too, so on a
    model in 16 bits PEFT fails just the same.
    """
    models = quantized(device), quantized(device)
    for layer in kbit_layers(models[1]).values():
        offload(layer, device)
    before = logits(models[1])
    if name in ("DoRA", "MiCA"):
        with pytest.raises(ValueError, match=r"q_proj.weight: found it offloaded, expected it on a device"):
            get_peft_model(models[1], CONFIGS[name]())
        assert torch.equal(logits(models[1]), before)
        return
    there, offloaded = (adapted(model, CONFIGS[name]()) for model in models)
    assert all(layer.weight.is_meta for layer in kbit_layers(offloaded).values())
    assert {parameter.device.type for parameter in trainable(offloaded).values()} == {device}
    torch.testing.assert_close(logits(offloaded), logits(there))
    assert relative(logits(offloaded), before) > 3e-4, "the adapters do nothing"


def test_a_model_without_memory_gets_adapters_without(device):
    with torch.device("meta"):
        model = nn.Sequential(KbitLinear(64, 64))
    assert all(p.is_meta for p in get_peft_model(model, lora(target_modules=["0"], task_type=None)).parameters())


# --- classes of the user's own ---


class OwnLora(peft.tuners.lora.Linear):
    """As users write them in a script."""

    fails = False

    def update_layer(self, *args, **kwargs):
        super().update_layer(*args, **kwargs)
        if self.fails:
            raise ArithmeticError("does not work")


def custom(key: type, **kwargs) -> peft.LoraConfig:
    config = peft.LoraConfig(target_modules=["0"], init_lora_weights=False, **kwargs)
    config._register_custom_module({nn.Conv1d: nn.Identity, key: OwnLora})
    return config


def one_layer(device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(KbitLinear.from_linear(nn.Linear(64, 64), bits=3)).to(device)


@pytest.mark.parametrize("module", ["__main__", "script", "package.module"])
def test_a_class_for_linear_layers_is_used(module, device, monkeypatch):
    """And gets what those of PEFT get: merging, unmerging, copies."""
    monkeypatch.setattr(OwnLora, "__module__", module)
    tuner_class.cache_clear()
    model = get_peft_model(one_layer(device), custom(nn.Linear)).eval()
    layer, x = model.base_model.model[0], torch.randn(3, 64, device=device)
    assert isinstance(layer, OwnLora) and type(layer).__name__ == f"Kbit{'Package' * (module[0] == 'p')}OwnLora"
    y, plain = model(x), one_layer(device)(x)
    torch.testing.assert_close(y - plain, x @ layer.get_delta_weight("default").T, rtol=1e-4, atol=1e-4)
    layer.merge()
    assert relative(model(x), y) < 0.5 and type(layer.base_layer) is KbitLinear
    layer.unmerge()
    assert torch.equal(model(x), y) and torch.equal(copy.deepcopy(model)(x), y)


def test_a_class_for_quantized_layers_stays_what_it_is(device):
    model = get_peft_model(one_layer(device), custom(KbitLinear)).eval()
    layer, x = model.base_model.model[0], torch.randn(3, 64, device=device)
    assert type(layer) is OwnLora and type(layer.base_layer) is KbitLinear
    first = model(x)
    model.add_adapter("other", custom(KbitLinear))
    assert model.base_model.model[0] is layer and set(layer.lora_A) == {"default", "other"}
    assert torch.equal(model(x), first)
    model.set_adapter("other")
    assert relative(model(x), first) > 0.01


@pytest.mark.parametrize("key", [nn.Linear, KbitLinear])
def test_what_fails_leaves_the_layer_as_it_was(key, device, monkeypatch):
    model, x = one_layer(device), torch.randn(3, 64, device=device)
    layer, y = model[0], model(x)

    def failing(create):
        with monkeypatch.context() as patch, pytest.raises(ArithmeticError, match="does not work"):
            patch.setattr(OwnLora, "fails", True)
            create()

    failing(lambda: get_peft_model(model, custom(key)))
    assert model[0] is layer and torch.equal(model(x), y)
    model = get_peft_model(model, custom(key)).eval()
    y = model(x)
    failing(lambda: model.add_adapter("other", custom(key)))
    adapted_layer = model.base_model.model[0]
    assert adapted_layer.base_layer is layer and torch.equal(model(x), y) and set(adapted_layer.lora_A) == {"default"}


# --- prompts ---

PROMPTS = {
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROMPTS)
def test_prompts(name, dtype, device):
    """Methods that put no adapters on layers: the same prompts, outputs and gradients, in the same dtype."""
    ids, results = IDS.to(device), []
    for make in (quantized, decoded):
        torch.manual_seed(0)
        model = get_peft_model(make(device, dtype=dtype), PROMPTS[name]()).train()
        for parameter in trainable(model).values():
            parameter.data += 0.1  # gates of adaption prompts are closed at first
        output = model(ids, labels=ids)
        output.loss.backward()
        results.append((output.logits, {name: (p.dtype, p.grad) for name, p in trainable(model).items()}))
    (logits, found), (reference, expected) = results
    tolerance = TOLERANCE[device] if dtype == torch.float32 else 5e-2  # W is rounded to bfloat16 on one side only
    assert relative(logits, reference) < tolerance and found.keys() == expected.keys()
    for key, (dtype, grad) in expected.items():
        assert found[key][0] == dtype, key
        assert found[key][1].isfinite().all(), key
        # Those of p-tuning are sums of what nearly cancels: in bfloat16 there are no digits left of them.
        assert logits.dtype == torch.bfloat16 or relative(found[key][1], grad) < 4 * tolerance, key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_adaption_prompts_after_preparing(dtype, device):
    model = peft.prepare_model_for_kbit_training(quantized(device, dtype), use_gradient_checkpointing=False)
    model = get_peft_model(model, PROMPTS["adaption prompt"]())
    output = model(IDS.to(device), labels=IDS.to(device))
    output.loss.backward()
    assert output.logits.dtype == torch.float32
    assert all(parameter.grad.isfinite().all() for parameter in trainable(model).values())


# --- refusing ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: lora(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}), "replace_lora_weights_loftq"),
        (lambda: lora(init_lora_weights="lora_ga"), "'lora_ga' needs gradients"),
        (lambda: lora(init_lora_weights="corda"), "please run `preprocess_corda` first"),
        (lambda: lora(kasa_config=peft.KasaConfig()) if hasattr(peft, "KasaConfig") else pytest.skip("old"), "KaSA"),
        (
            lambda: lora(target_modules=[], target_parameters=["q_proj.bias"]),
            "q_proj.bias: LORA over a KbitLinear: .* only 2d",
        ),
        (lambda: lora(modules_to_save=["o_proj"]), "o_proj: found it in modules_to_save"),
        (lambda: lora(modules_to_save=["mlp"]), "mlp: found it in modules_to_save"),
    ],
)
def test_what_cannot_work_is_refused(config, message, device):
    model = quantized(device)
    before, expected = packed_state(model), logits(model)
    with pytest.raises(ValueError, match=message) as error:
        get_peft_model(model, config())
    assert "model.layers.0." in str(error.value)
    assert torch.equal(logits(model), expected)
    assert_same_state(packed_state(model), before)


def test_parameters_of_other_layers_are_refused_by_name(device):
    """Of a table, and of a Conv1D, whose adapters would have sizes that are no ones beside the layer."""
    conv = load(GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=50)), device)
    for model, name in ((quantized(device, embedding_bits=4), "embed_tokens"), (conv, "c_attn")):
        with pytest.raises(
            ValueError, match=rf"{name}.weight: .* found 'weight' of it in target_parameters; name the"
        ):
            get_peft_model(model, lora(target_modules=[], target_parameters=[f"{name}.weight"]))
        assert not tuner_layers(model)


def test_methods_may_not_stand_on_one_another(device):
    model = get_peft_model(quantized(device), lora(init_lora_weights=False), mixed=True).eval()
    expected = logits(model)
    with pytest.raises(ValueError, match="found a LOHA adapter over a KbitLoraLinear, expected adapters of one meth"):
        model.add_adapter("other", CONFIGS["LOHA"]())
    assert torch.equal(logits(model), expected)


# --- several adapters ---


def test_several_adapters(device):
    """Switching, disabling, weighing and a batch of several, as on the decoded model."""
    configs = lora(), lora(r=8, target_modules=["q_proj", "up_proj"]), lora(use_rslora=True)
    model, reference = both(*configs, device=device)
    plain, found = logits(quantized(device)), {}
    for m in (model, reference):
        for kind in ("linear", "cat", "svd"):
            m.add_weighted_adapter(["default", "2"], [0.7, 0.4], kind, combination_type=kind)
    for name in ("default", "1", "2", "linear", "cat", "svd"):
        for m in (model, reference):
            m.set_adapter(name)
        found[name] = logits(model)
        assert relative(found[name], logits(reference)) < TOLERANCE[device], name
        with model.disable_adapter():
            assert torch.equal(logits(model), plain)
    assert all(relative(found[name], plain) > 1e-3 for name in found)
    mixed = logits(model, adapter_names=["1", "__base__"])
    torch.testing.assert_close(mixed, torch.stack([found["1"][0], plain[1]]), rtol=1e-4, atol=1e-5)
    model.delete_adapter("1")
    with pytest.raises(ValueError, match="1"):
        logits(model, adapter_names=["1", "__base__"])


def test_modules_to_save_and_dropout(device):
    config = lora(lora_dropout=0.5, modules_to_save=["lm_head", "embed_tokens"], init_lora_weights=False)
    model, ids = get_peft_model(quantized(device), config).train(), IDS.to(device)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model(ids, labels=ids).loss.backward()
    parts = {name.split(".")[-4] for name, p in trainable(model).items() if "modules_to_save" in name}
    assert len(parts) == 2 and all(parameter.grad.any() for parameter in trainable(model).values())


# --- other architectures ---
