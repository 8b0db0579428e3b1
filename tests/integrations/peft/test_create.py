"""Adapters on quantized layers: what they compute is what they compute on the same model with decoded weights."""

import copy
import pickle

import peft
import pytest
import torch
from adapters import (
    CONFIGS,
    IDS,
    TARGETS,
    adapted,
    assert_same_state,
    decoded,
    kbit_layers,
    load,
    lora,
    packed_state,
    quantized,
    relative,
)
from peft import AutoPeftModelForCausalLM, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hf_kbit
from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.integrations.peft.layer import KbitTunerLayer

# Sums in float32 in another order, through two layers: 1e-6 was found on a CPU.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}


def trainable(model) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- creating ---


@pytest.mark.parametrize(
    ("targets", "endings"),
    [
        ("all-linear", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        (["q_proj", "up_proj"], ["q_proj", "up_proj"]),
        (r".*\.(k|o)_proj", ["k_proj", "o_proj"]),
    ],
)
def test_targets(targets, endings, device):
    model = get_peft_model(quantized(device), lora(target_modules=targets))
    found = {name for name, module in model.named_modules() if isinstance(module, KbitTunerLayer)}
    assert {name.rpartition(".")[2] for name in found} == set(endings) and len(found) == 2 * len(endings)
    assert all(isinstance(model.get_submodule(name), peft.tuners.lora.Linear) for name in found)
    assert all(type(model.get_submodule(name).base_layer) is KbitLinear for name in found)
    assert all("lora_" in name for name in trainable(model))


def test_ranks_and_scalings(device):
    model = get_peft_model(quantized(device), CONFIGS["LoRA, rank-stabilized, patterns"]())
    block = model.base_model.model.model.layers[1]
    layers = block.self_attn.q_proj, block.self_attn.v_proj, block.mlp.down_proj
    assert [layer.r["default"] for layer in layers] == [4, 4, 6]
    assert [layer.scaling["default"] for layer in layers] == pytest.approx([8 / 2, 3 / 2, 8 / 6**0.5])
    assert layers[2].lora_A["default"].weight.shape == (6, 100)


def test_creating_lora_decodes_nothing(device, monkeypatch):
    monkeypatch.setattr(KbitLinear, "dequantize", None)
    model = get_peft_model(quantized(device, torch.bfloat16), lora(), autocast_adapter_dtype=False)
    assert {parameter.dtype for parameter in trainable(model).values()} == {torch.bfloat16}
    assert all(parameter.isfinite().all() for parameter in trainable(model).values())


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_of_methods(name, device):
    """Also that the layer decodes for methods that look at its weight, and that no packed tensor changes."""
    model, reference = (adapted(make(device), CONFIGS[name]()) for make in (quantized, decoded))
    before = packed_state(quantized())
    ids = IDS.to(device)
    outputs = [m(ids, labels=ids) for m in (model, reference)]
    assert relative(outputs[0].logits, outputs[1].logits) < TOLERANCE[device]
    with reference.disable_adapter():
        assert relative(outputs[0].logits, reference(ids).logits) > 3e-4, "the adapters do nothing"
    for output in outputs:
        output.loss.backward()
    expected = {name: parameter.grad for name, parameter in trainable(reference).items()}
    assert expected.keys() == trainable(model).keys()
    for name, parameter in trainable(model).items():
        if expected[name] is None or not expected[name].any():
            assert parameter.grad is None or not parameter.grad.any()
        else:
            assert relative(parameter.grad, expected[name]) < TOLERANCE[device], name
    state = packed_state(model)
    assert_same_state({name: state[name] for name in before}, before)


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "mica"])
def test_initialisations_that_read_the_weight(init, device):
    """PEFT's, on the decoded weight; what they leave of it is quantized again, with the bits of each layer."""
    models = []
    for make in (quantized, decoded):
        torch.manual_seed(0)
        models.append(get_peft_model(make(device, bits=3, module_bits={"v_proj": 4}), lora(init_lora_weights=init)))
    model, reference = models
    for name, layer in model.named_modules():
        if isinstance(layer, KbitTunerLayer):
            dense = reference.get_submodule(name)
            for part, expected in dense.named_parameters():
                if "lora_" in part:
                    torch.testing.assert_close(layer.get_parameter(part), expected, rtol=1e-3, atol=1e-4)
            residual = KbitLinear.from_linear(dense.base_layer, bits=4 if "v_proj" in name else 3)
            assert relative(layer.base_layer.dequantize(), residual.dequantize()) < (0.03 if "niter" in init else 0.01)


def test_initialisation_under_low_memory(device):
    """PEFT makes what is created a meta tensor then; the base layer must not become one."""
    before = packed_state(quantized(device))
    model = peft.PeftModelForCausalLM(quantized(device), lora(use_dora=True), low_cpu_mem_usage=True)
    assert any(parameter.is_meta for parameter in trainable(model).values())
    assert_same_state(packed_state(model), before)


def test_loftq(device, tmp_path):
    """The adapter takes the quantization error, as well as any of its rank can, and a callback may refuse."""
    dense = decoded(device).to(torch.bfloat16)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    dense.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    base = LlamaForCausalLM.from_pretrained(tmp_path, device_map=device, quantization_config=KbitConfig(bits=3))
    before = packed_state(base)
    model = get_peft_model(base, lora(lora_alpha=3))
    start = {name: parameter.clone() for name, parameter in trainable(model).items()}
    refused = []
    hf_kbit.replace_lora_weights_loftq(
        model, callback=lambda model, name: refused.append(name) or not name.endswith("v_proj")
    )
    assert len(refused) == 6
    for name, layer in model.named_modules():
        if isinstance(layer, KbitTunerLayer):
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
    save_file({"other": torch.ones(1)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj.weight: not in the checkpoint"):
        hf_kbit.replace_lora_weights_loftq(model, tmp_path / "other.safetensors")


# --- refusing ---


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: peft.HRAConfig(target_modules=TARGETS), "found the PEFT method HRA, expected one of ADALORA, BOFT"),
        (lambda: peft.FourierFTConfig(target_modules=TARGETS), "FOURIERFT.* call model.dequantize"),
        (lambda: peft.ShiraConfig(target_modules=TARGETS, r=2), "found the PEFT method SHIRA"),
        (lambda: peft.MissConfig(target_modules=TARGETS, init_weights="bat"), "MiSS with init_weights='bat'"),
        (lambda: lora(init_lora_weights="loftq", loftq_config={"loftq_bits": 4}), "replace_lora_weights_loftq"),
        (lambda: lora(init_lora_weights="corda"), "'corda' needs covariances"),
        (lambda: lora(kasa_config=peft.KasaConfig()) if hasattr(peft, "KasaConfig") else pytest.skip("old"), "KaSA"),
        (lambda: lora(target_modules=[], target_parameters=["q_proj.weight"]), "'weight' of it in target_parameters"),
        (lambda: lora(modules_to_save=["o_proj"]), "o_proj: found it in modules_to_save"),
        (lambda: lora(modules_to_save=["mlp"]), "mlp: found it in modules_to_save"),
    ],
)
def test_what_cannot_work_is_refused(config, message, device):
    model, ids = quantized(device), IDS.to(device)
    before, logits = packed_state(model), model(ids).logits
    with pytest.raises(ValueError, match=message) as error:
        get_peft_model(model, config())
    assert "model.layers.0." in str(error.value)
    assert torch.equal(model(ids).logits, logits)
    assert_same_state(packed_state(model), before)


def test_methods_may_not_stand_on_one_another(device):
    model, ids = get_peft_model(quantized(device), lora(init_lora_weights=False), mixed=True).eval(), IDS.to(device)
    logits = model(ids).logits
    with pytest.raises(
        ValueError, match="found a LOHA adapter over a KbitLoraLinear, expected adapters of one method"
    ):
        model.add_adapter("other", CONFIGS["LoHa"]())
    assert torch.equal(model(ids).logits, logits)


def test_unquantized_layers_take_any_method(device):
    model, ids = quantized(device, modules_to_not_convert=["q_proj"]), IDS.to(device)
    model = get_peft_model(model, peft.HRAConfig(target_modules=["q_proj"], r=4))
    model(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in trainable(model).values())


# --- several adapters ---


def test_several_adapters(device):
    """Switching, disabling, weighing and a batch of several, as on the decoded model."""
    configs = lora(), lora(r=8, target_modules=["q_proj", "up_proj"]), lora(use_rslora=True)
    model, reference = (adapted(make(device), *configs) for make in (quantized, decoded))
    plain, ids = quantized(device).eval()(IDS.to(device)).logits, IDS.to(device)
    for m in (model, reference):
        for kind in ("linear", "cat", "svd"):
            m.add_weighted_adapter(["default", "2"], [0.7, 0.4], kind, combination_type=kind)
    found = {}
    for name in ("default", "1", "2", "linear", "cat", "svd"):
        for m in (model, reference):
            m.set_adapter(name)
        found[name] = model(ids).logits
        assert relative(found[name], reference(ids).logits) < TOLERANCE[device], name
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, plain)
    assert all(relative(found[name], plain) > 1e-3 for name in found)
    mixed = model(ids, adapter_names=["1", "__base__"]).logits
    torch.testing.assert_close(mixed, torch.stack([found["1"][0], plain[1]]), rtol=1e-4, atol=1e-5)
    model.delete_adapter("1")
    with pytest.raises(ValueError, match="1"):
        model(ids, adapter_names=["1", "__base__"])


def test_modules_to_save_and_dropout(device):
    config = lora(lora_dropout=0.5, modules_to_save=["lm_head", "embed_tokens"], init_lora_weights=False)
    model, ids = get_peft_model(quantized(device), config).train(), IDS.to(device)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model(ids, labels=ids).loss.backward()
    parts = {name.split(".")[-4] for name, p in trainable(model).items() if "modules_to_save" in name}
    assert len(parts) == 2 and all(parameter.grad.any() for parameter in trainable(model).values())


# --- saving ---


def test_adapters_are_saved_alone_and_load_everywhere(device, tmp_path):
    quantized(device).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", device_map=device)
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


def test_adapters_through_transformers(device, tmp_path):
    """``add_adapter``, ``save_pretrained`` and ``load_adapter`` of the model itself."""
    model, ids = quantized(device, module_bits={"v_proj": 4}), IDS.to(device)
    model.add_adapter(lora(init_lora_weights=False))
    logits, layers = model.eval()(ids).logits, dict(model.config.quantization_config.layers)
    model.save_pretrained(tmp_path)
    assert model.config.quantization_config.layers == layers and len(layers) == 2
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


# --- other architectures ---


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_conv1d(fan_in_fan_out, device):
    """GPT-2's layers are stored as ``[in, out]`` and quantized as ``[out, in]``, whatever the config says."""
    config = GPT2Config(n_embd=40, n_layer=1, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    dense = GPT2LMHeadModel(config)
    settings = {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": fan_in_fan_out}
    models = load(dense, device, bits=3), load(dense, device, bits=3).dequantize()
    (model, reference), ids = (adapted(m, lora(**settings)) for m in models), IDS.to(device)
    assert len(kbit_layers(model)) == 4
    logits = reference(ids).logits
    assert relative(model(ids).logits, logits) < TOLERANCE[device]
    merged = hf_kbit.merge_and_unload(model, dequantize=True)
    assert type(merged.transformer.h[0].attn.c_attn) is type(dense.transformer.h[0].attn.c_attn)
    assert relative(merged(ids).logits, logits) < TOLERANCE[device]


def test_experts_left_in_16_bits(device):
    """``target_parameters`` on fused experts, which are not quantized, beside adapters on quantized attention."""
    shape = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    config = Qwen3MoeConfig(num_hidden_layers=1, vocab_size=64, **shape, **experts)
    dense = Qwen3MoeForCausalLM(config)
    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    settings = {"target_modules": ["q_proj"], "target_parameters": names}
    models = load(dense, device, bits=3), load(dense, device, bits=3).dequantize()
    (model, reference), ids = (adapted(m, lora(**settings)) for m in models), IDS.to(device)
    found = [m(ids, labels=ids) for m in (model, reference)]
    assert relative(found[0].logits, found[1].logits) < TOLERANCE[device]
    for output in found:
        output.loss.backward()
    for name, parameter in trainable(reference).items():
        assert relative(trainable(model)[name].grad, parameter.grad) < 10 * TOLERANCE[device], name
