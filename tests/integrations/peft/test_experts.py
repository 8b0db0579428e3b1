"""LoRA on the packed experts of mixtures, beside PEFT's own on the same model with decoded weights."""

import copy
import functools
import pickle
import threading

import peft
import pytest
import torch
import transformers
from adapters import (
    adapted,
    assert_same_state,
    load,
    offload,
    packed_state,
    relative,
    through_transformers,
    train,
    trainable,
    warned,
)
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_kbit
from hf_kbit.integrations.peft.experts import KbitParamWrapper, low_rank_product
from hf_kbit.nn.experts import KbitExperts, KbitProjection
from hf_kbit.tensor import KbitTensor

SMALL = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
ROUTED = dict(num_experts_per_tok=2, num_local_experts=4, intermediate_size=40)
IDS = torch.arange(3, 27).view(2, 12)

# Class, configuration, and the module of experts.
MODELS = {
    "qwen3_moe": (
        "Qwen3Moe",
        dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, head_dim=16),
        "mlp",
    ),
    "mixtral": ("Mixtral", ROUTED, "mlp"),
    "gpt_oss": ("GptOss", ROUTED | dict(head_dim=16), "mlp"),  # transposed, with bias, gate and up interleaved
    "nemotron_h": (  # without a gate
        "NemotronH",
        dict(layers_block_type=["moe", "attention"], n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1)
        | dict(moe_intermediate_size=40, intermediate_size=40, head_dim=16, moe_shared_expert_intermediate_size=40)
        | dict(n_group=1, topk_group=1, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=1),
        "mixer",
    ),
    "llama4": (  # not decorated; transposed, but PEFT does not know
        "Llama4",
        ROUTED | dict(intermediate_size_mlp=40, head_dim=16, interleave_moe_layer_step=1, num_experts_per_tok=1),
        "feed_forward",
    ),
}  # fmt: skip

# Sums in float32 in another order: 2e-6 were found on a CPU.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}


@functools.cache
def _dense(name: str, dtype: torch.dtype):
    class_name, own, _ = MODELS[name]
    cls = getattr(transformers, f"{class_name}ForCausalLM")
    config_class = transformers.Llama4TextConfig if name == "llama4" else cls.config_class
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = cls(config_class(**(SMALL | own)))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


_loaded = {}


def quantized(name="qwen3_moe", device="cpu", dtype=torch.float32, bits=3, **settings):
    key = repr((name, device, dtype, bits, settings))
    if key not in _loaded:
        _loaded[key] = load(_dense(name, dtype), device, bits=bits, **settings).eval()
    return copy.deepcopy(_loaded[key])


def decoded(*args, **kwargs):
    return quantized(*args, **kwargs).dequantize()


def lora(name="qwen3_moe", **kwargs) -> LoraConfig:
    """On all projections of experts, and q_proj."""
    experts, up = f"{MODELS[name][2]}.experts", "up_proj" if name == "nemotron_h" else "gate_up_proj"
    targets = {"target_parameters": [f"{experts}.{up}", f"{experts}.down_proj"], "target_modules": ["q_proj"]}
    return LoraConfig(**(targets | {"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM"} | kwargs))


def both(name="qwen3_moe", device="cpu", configs=None, **kwargs):
    """The same adapters on the quantized model and on the decoded one."""
    configs = [{}] if configs is None else configs
    return [
        adapted(make(name, device, **kwargs), *(lora(name, **config) for config in configs))
        for make in (quantized, decoded)
    ]


def logits(model) -> torch.Tensor:
    return model(input_ids=IDS.to(model.device)).logits


def gradients(model) -> dict[str, torch.Tensor]:
    ids = IDS.to(model.device)
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in trainable(model).items()}


def wrappers(model) -> dict[str, KbitParamWrapper]:
    return {module.name: module for module in model.modules() if isinstance(module, KbitParamWrapper)}


# --- what adapters are, and compute ---


@pytest.mark.parametrize("name", MODELS)
def test_as_peft_on_the_decoded_model(name, device):
    """Names, shapes and first numbers of parameters, logits and gradients."""
    models = []
    for make in (quantized, decoded):
        torch.manual_seed(0)
        models.append(get_peft_model(make(name, device), lora(name, init_lora_weights=False)))
    ours, theirs = (peft.get_peft_model_state_dict(model) for model in models)
    assert ours.keys() == theirs.keys() and len(ours) >= 6
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)

    layers = sum("experts" in key for key in ours) // 4
    assert len(wrappers(models[0])) == 2 * layers and not wrappers(models[1])
    assert all(isinstance(wrapper.quantized, KbitProjection) for wrapper in wrappers(models[0]).values())
    found, expected = (logits(model) for model in models)
    assert relative(found, expected) < TOLERANCE[device]
    assert relative(found, quantized(name, device)(IDS.to(device)).logits) > 1e-2
    found, expected = (gradients(model) for model in models)
    assert found.keys() == expected.keys()
    for key in found:
        assert expected[key].any() and relative(found[key], expected[key]) < 10 * TOLERANCE[device], key


def test_gradients_of_the_input(device):
    models = both(device=device)
    found = []
    for model in models:
        embedded = model.get_input_embeddings()(IDS.to(device)).detach().requires_grad_()
        model(inputs_embeds=embedded).logits.square().sum().backward()
        found.append(embedded.grad)
    assert relative(*found) < 10 * TOLERANCE[device]


def test_experts_without_tokens_have_gradients_of_zero(device):
    """And not none, for which DistributedDataParallel would wait."""
    model = adapted(quantized(device=device), lora())
    model(IDS[:1, :1].to(device)).logits.sum().backward()
    for wrapper in wrappers(model).values():
        for gradient in (
            wrapper.lora_A["default"].weight.grad.view(6, -1),
            wrapper.lora_B["default"].weight.grad.view(-1, 6).T,
        ):
            assert gradient.any(dim=1).sum() == 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant, device):
    model = adapted(quantized(device=device), lora()).train()
    expected = gradients(copy.deepcopy(model))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_threads_share_a_model_with_adapters():
    """One of them ends while the other is between its two projections."""
    model = adapted(quantized(), lora()).eval()
    experts = next(iter(wrappers(model).values())).get_base_layer()
    expected, act, turns = logits(model), experts.act_fn, threading.Barrier(2)

    class Waits(nn.Module):
        def forward(self, x):
            if threading.current_thread() is other:
                turns.wait(60)
                turns.wait(60)
            return act(x)

    experts.act_fn, found = Waits(), []
    other = threading.Thread(target=lambda: found.append(logits(model)))
    other.start()
    turns.wait(60)
    found.append(logits(model))
    turns.wait(60)
    other.join()
    assert len(found) == 2 and all(relative(each, expected) < 1e-5 for each in found)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("rank", [3, 8])  # rows of a multiple of 16 bytes, or not
def test_float32_adapters_over_bfloat16(rank, autocast, device):
    """As near to float32 as what PEFT computes in the same dtypes."""
    models = both(device=device, dtype=torch.bfloat16, configs=[{"r": rank}])
    found = []
    for model, dtype in (*((model, torch.bfloat16) for model in models), (models[1], torch.float32)):
        assert {parameter.dtype for parameter in trainable(model).values()} == {torch.float32}
        experts = copy.deepcopy(model.base_model.model.model.layers[0].mlp.experts)
        experts = experts.float() if dtype == torch.float32 else experts
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(40, 64, generator=generator).to(device, dtype).requires_grad_()
        ids = torch.rand(40, 6, generator=generator).topk(2).indices.to(device)
        with torch.autocast(device, torch.bfloat16, enabled=autocast and dtype != torch.float32):
            y = experts(x, ids, torch.ones(40, 2, device=device, dtype=dtype))
        assert y.dtype == dtype
        y.square().sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in trainable(experts).values())])
    assert len(found[0]) == 6 and all(gradient.dtype == torch.float32 for gradient in found[0][2:])
    for ours, theirs, exact in zip(*found, strict=True):
        assert relative(ours, exact) < 1.5 * relative(theirs, exact) < 0.05


def test_neither_the_weights_nor_what_is_added_are_made(monkeypatch):
    """Nothing as large as a tensor of experts, forward or backward; PEFT makes several."""
    monkeypatch.setattr(KbitTensor, "dequantize", None)

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            self.numel = max([self.numel, *sizes])
            return result

    settings = SMALL | MODELS["qwen3_moe"][1] | dict(num_experts=16, moe_intermediate_size=96)
    dense = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings))
    smallest = 16 * 64 * 96
    for model, made in ((load(dense, bits=3), False), (dense, True)):
        model = get_peft_model(model, lora(r=2))
        with Largest() as largest:
            gradients(model)
        assert (largest.numel >= smallest) == made


def test_one_projection_alone_and_one_left_in_16_bits(device):
    settings = {"module_bits": {"layers.0.mlp.experts.gate_up_proj": None, "layers.1.mlp.experts.down_proj": None}}
    ours, theirs = both(device=device, **settings)
    assert len(wrappers(ours)) == 2 and sum(type(module) is ParamWrapper for module in ours.modules()) == 2
    assert relative(logits(ours), logits(theirs)) < TOLERANCE[device]
    ours, theirs = both(device=device, configs=[{"target_parameters": ["experts.down_proj"]}])
    assert len(wrappers(ours)) == 2
    assert relative(logits(ours), logits(theirs)) < TOLERANCE[device]


# --- several adapters ---


def test_several_adapters(device):
    """Switched, together, rescaled, disabled, deleted."""
    configs = {}, {"r": 2, "lora_alpha": 9, "use_rslora": True}
    ours, theirs = both(device=device, configs=configs)
    seen = []

    def compare():
        found, expected = (logits(model) for model in (ours, theirs))
        assert relative(found, expected) < TOLERANCE[device]
        assert all(relative(found, other) > 1e-3 for other in seen)
        seen.append(found)

    compare()
    for model in (ours, theirs):
        model.set_adapter("1")
    compare()
    for model in (ours, theirs):
        model.base_model.set_adapter(["default", "1"])
    compare()
    for model in (ours, theirs):
        for module in model.modules():
            if isinstance(module, ParamWrapper):
                module.set_scale("1", 3.0)
    compare()
    with ours.disable_adapter(), theirs.disable_adapter():
        compare()
    for model in (ours, theirs):
        model.delete_adapter("default")
        model.set_adapter("1")
    compare()
    assert torch.equal(ours.unload()(IDS.to(device)).logits, quantized(device=device)(IDS.to(device)).logits)


def test_a_second_adapter_of_other_projections_is_refused_as_by_peft():
    model = adapted(quantized(), lora())
    with pytest.raises(ValueError, match="must target the same set"):
        model.add_adapter("1", lora(target_parameters=["mlp.experts.down_proj"]))
    assert len(wrappers(model)) == 4 and isinstance(wrappers(model).popitem()[1].get_base_layer(), KbitExperts)


# --- files ---


@pytest.mark.parametrize("name", MODELS)
def test_files_fit_the_16_bit_model_and_back(name, device, tmp_path):
    ours, theirs = both(name, device)
    expected = logits(ours)
    for model, other in ((ours, decoded), (theirs, quantized)):
        model.save_pretrained(tmp_path / other.__name__)
        again = PeftModel.from_pretrained(other(name, device), tmp_path / other.__name__).eval()
        assert relative(logits(again), expected) < TOLERANCE[device]
    assert (
        load_file(tmp_path / "decoded/adapter_model.safetensors").keys()
        == peft.get_peft_model_state_dict(theirs).keys()
    )


def test_state_dicts_and_low_memory(device, tmp_path):
    model = adapted(quantized(device=device), lora())
    state = peft.get_peft_model_state_dict(model)
    other = get_peft_model(quantized(device=device), lora())
    assert not peft.set_peft_model_state_dict(other, state).unexpected_keys
    assert torch.equal(logits(other), logits(model))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(quantized(device=device), tmp_path, low_cpu_mem_usage=True).eval()
    assert torch.equal(logits(again), logits(model))
    again.load_adapter(tmp_path, "second")
    again.set_adapter("second")
    assert torch.equal(logits(again), logits(model))


@through_transformers
def test_adapters_of_transformers_itself(device, tmp_path):
    """``add_adapter``, ``save_pretrained`` and ``load_adapter`` of the model."""
    model = quantized(device=device)
    model.add_adapter(lora(init_lora_weights=False))
    expected = logits(model)
    model.save_pretrained(tmp_path)
    for make in (quantized, decoded):
        other = make(device=device)
        other.load_adapter(str(tmp_path))
        assert relative(logits(other.eval()), expected) < TOLERANCE[device]
    model.disable_adapters()
    assert torch.equal(logits(model), logits(quantized(device=device)))


def test_status(device):
    model = adapted(quantized(device=device), lora())
    status = model.get_model_status()
    assert status.quantization_backend == "kbit" and status.active_adapters == ["default"] and status.enabled
    assert len(model.get_layer_status()) == 4 + 2


def test_copies_and_pickles():
    model = adapted(quantized(), lora())
    expected = logits(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert wrappers(other).keys() == wrappers(model).keys()
        assert torch.equal(logits(other), expected)


# --- merging ---


def merged_bytes(reference, model) -> dict[str, torch.Tensor]:
    """What quantizing the tensors of a merged reference gives, with the column scales of the model's."""
    state = {}
    for name, wrapper in wrappers(model).items():
        packed, tensor = wrapper.quantized, reference.base_model.model.get_parameter(_within(reference, name)).detach()
        twin = copy.deepcopy(packed).cpu()
        twin.load(twin.quantize((tensor.mT if packed.transposed else tensor).cpu(), columns=twin.weight.columns))
        state |= {f"{name}.{key}": value for key, value in twin.packed.items()}
    return state


def _within(model, name: str) -> str:
    """The name of a tensor under the wrappers around its module."""
    experts, _, own = name.rpartition(".")
    module = model.base_model.model.get_submodule(experts)
    while isinstance(module, ParamWrapper):
        module, experts = module.base_layer, f"{experts}.base_layer"
    return f"{experts}.{own}"


@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_merge_and_unmerge(name, safe, device):
    """The bytes of quantizing what PEFT merges into the decoded model; afterwards those from before."""
    ours, theirs = both(name, device)
    before, unmerged = packed_state(ours), logits(ours)
    (message,) = warned(lambda: ours.merge_adapter(safe_merge=safe))
    layers = len(wrappers(ours)) + sum("q_proj.lora_A" in key for key in ours.state_dict())
    assert f"merged into {layers} layers of 3 bits" in message and "kept" in message
    theirs.merge_adapter(safe_merge=safe)
    after, expected = packed_state(ours), merged_bytes(theirs, ours)
    assert len(expected) >= 6
    for key, tensor in expected.items():  # sums in another order may fall on the other side of a border
        assert (after[key] != tensor).float().mean() <= (0 if device == "cpu" else 0.01), key
    columns = [key for key in before if key.endswith("_columns")]
    assert columns and all(torch.equal(after[key], before[key]) for key in columns)
    assert relative(logits(ours), unmerged) < 0.5
    assert any(not torch.equal(after[key], before[key]) for key in expected)
    ours.unmerge_adapter()
    assert_same_state(packed_state(ours), before)
    assert torch.equal(logits(ours), unmerged)


def test_merged_one_by_one_is_rounded_once(device):
    models = [adapted(make(device=device), lora(), lora(r=2)) for make in (quantized, quantized, decoded)]
    theirs = models.pop()
    before = packed_state(models[0])
    warned(lambda: models[0].merge_adapter(adapter_names=["default", "1"]))
    theirs.merge_adapter(adapter_names=["default", "1"])
    after = packed_state(models[0])
    for key, tensor in merged_bytes(theirs, models[0]).items():
        assert (after[key] != tensor).float().mean() <= (0 if device == "cpu" else 0.01), key
    for name in ("default", "1"):
        warned(lambda name=name: models[1].merge_adapter(adapter_names=[name]))
    assert_same_state(packed_state(models[1]), packed_state(models[0]))
    for model in models:
        model.unmerge_adapter()
        assert_same_state(packed_state(model), before)


def test_what_is_not_finite_is_not_merged(device):
    model = adapted(quantized(device=device), lora())
    before = packed_state(model)
    wrapper = wrappers(model)["model.layers.1.mlp.experts.down_proj"]
    for wrapper.merge_dtype, bad in ((None, torch.inf), (torch.float32, torch.inf), (torch.float16, 1e7)):
        wrapper.lora_B["default"].weight.data[3, 2] = bad
        with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.down_proj\.weight.*NaN or infinite"):
            wrapper.merge()
        assert not wrapper.merged
    assert_same_state(packed_state(model), before)


class Alive(TorchDispatchMode):
    """The most bytes that tensors made inside have taken at a time."""

    def __init__(self):
        super().__init__()
        self.sizes, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given, made = (
            {StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in tree_leaves(tree)
             if isinstance(x, torch.Tensor) and not isinstance(x, KbitTensor)}  # whose own storage is none
            for tree in ((args, kwargs), result)
        )  # fmt: skip
        self.sizes |= {storage: size for storage, size in made.items() if storage not in given}
        self.sizes = {storage: size for storage, size in self.sizes.items() if not storage.expired()}
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_merging_takes_memory_for_some_copies_of_one_expert(name):
    """Besides what it leaves: the tensors of all 64 experts would take 64 of them each."""
    count = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}[name]
    settings = SMALL | MODELS[name][1] | {count: 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    dense = getattr(transformers, f"{MODELS[name][0]}ForCausalLM")
    model = adapted(load(dense(dense.config_class(**settings)), bits=3), lora(name, target_modules=[]))
    wrapper = wrappers(model)["model.layers.0.mlp.experts.gate_up_proj"]
    one = 4 * wrapper.quantized.num_weights / 64
    size = sum(tensor.nbytes for tensor in wrapper.quantized.packed.values())
    with Alive() as merging:
        warned(wrapper.merge)
    with Alive() as unmerging:
        wrapper.unmerge()
    wrapper.merge_dtype = torch.bfloat16
    with Alive() as into_16_bits:
        wrapper.merge()
    # Measured: 9.1 while what was merged is compared with what was before, and 4 in 16 bits.
    assert size < merging.peak < size + 10 * one
    assert unmerging.peak < one
    assert 32 * one < into_16_bits.peak < (32 + 5) * one


def test_merge_and_unload_into_few_bits(device, tmp_path):
    model = adapted(quantized(device=device), lora())
    warned(model.merge_adapter)
    expected, bits = logits(model), packed_state(model)
    model.unmerge_adapter()
    found = []
    warned(lambda: found.append(model.merge_and_unload()))
    (merged,) = found
    assert not any(isinstance(module, ParamWrapper) for module in merged.modules())
    assert torch.equal(merged(IDS.to(device)).logits, expected)
    assert_same_state(packed_state(merged), bits)
    merged.save_pretrained(tmp_path)
    again = type(merged).from_pretrained(tmp_path, device_map=device)
    assert torch.equal(again(IDS.to(device)).logits, expected)


@pytest.mark.parametrize("name", MODELS)
def test_merge_into_16_bits(name, device, tmp_path):
    """An ordinary model with what PEFT merges into the decoded one, saved under the names of the architecture's
    checkpoints, whose experts PEFT adapts alike."""
    base = quantized(name, device)
    base.save_pretrained(tmp_path / "packed")
    model = adapted(type(base).from_pretrained(tmp_path / "packed", device_map=device), lora(name))
    expected = logits(model)
    merged = hf_kbit.merge_and_unload(model, dequantize=True)
    assert type(merged) is type(_dense(name, torch.float32))
    assert not any(isinstance(module, (KbitExperts, ParamWrapper)) for module in merged.modules())
    assert relative(merged(IDS.to(device)).logits, expected) < TOLERANCE[device]
    theirs = adapted(decoded(name, device), lora(name)).merge_and_unload()
    for key, parameter in theirs.named_parameters():
        difference = (merged.get_parameter(key) - parameter).norm()
        assert difference <= (0 if device == "cpu" else TOLERANCE[device]) * parameter.norm(), key
    merged.save_pretrained(tmp_path / "merged")
    _dense(name, torch.float32).save_pretrained(tmp_path / "dense")
    stored = [load_file(tmp_path / folder / "model.safetensors").keys() for folder in ("merged", "dense")]
    assert stored[0] == stored[1]
    names = [
        list(trainable(get_peft_model(m, lora(name)))) for m in (merged, copy.deepcopy(_dense(name, torch.float32)))
    ]
    assert names[0] == names[1]


def test_merge_into_16_bits_without_a_quantizer(device):
    """Also of experts that have no adapter."""
    model = quantized(device=device)
    part = adapted(model.model, lora(target_parameters=["layers.1.mlp.experts.down_proj"], task_type=None))
    expected = part(IDS.to(device)).last_hidden_state
    merged = hf_kbit.merge_and_unload(part, dequantize=True)
    assert not any(isinstance(module, KbitProjection) for module in merged.modules())
    assert relative(merged(IDS.to(device)).last_hidden_state, expected) < TOLERANCE[device]


# --- all-linear ---


@pytest.mark.parametrize("name", MODELS)
def test_all_linear_is_what_it_is_in_16_bits(name, device, capsys):
    """For some architectures PEFT takes the experts with it, and the router."""
    models = []
    told = warned(
        lambda: models.extend(both(name, device, [{"target_parameters": None, "target_modules": "all-linear"}]))
    )
    if name != "llama4":  # whose router PEFT adapts, and then fails, in 16 bits too
        assert relative(*(logits(model) for model in models)) < TOLERANCE[device]
    shapes = [{key: tuple(tensor.shape) for key, tensor in trainable(model).items()} for model in models]
    assert shapes[0] == shapes[1]
    printed = []
    for model in models:
        model.print_trainable_parameters()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and f"{sum(p.numel() for p in trainable(models[0]).values()):,}" in printed[0]

    on_experts = {key: tensor.numel() for key, tensor in trainable(models[0]).items() if "experts" in key}
    on_experts = {key: count for key, count in on_experts.items() if "shared_experts" not in key}
    assert bool(on_experts) == bool(wrappers(models[0])) == (name in ("qwen3_moe", "mixtral")) == bool(told)
    if told:
        assert f"{sum(on_experts.values()):,} parameters of adapter 'default'" in told[0] and len(told) == 1
    assert not warned(lambda: get_peft_model(quantized(name, device), lora(name)))


# --- training ---


def test_prepared_training_lowers_the_loss_and_leaves_the_base(device):
    model = peft.prepare_model_for_kbit_training(quantized(device=device, dtype=torch.bfloat16, bits=4))
    model = get_peft_model(model, lora(target_modules=[])).train()
    before, ids = packed_state(model), IDS.to(device)
    losses = train(model, ids, steps=8, rate=2e-2)
    assert losses[-1] < losses[0] - 0.5
    assert_same_state(packed_state(model), before)


# --- what is refused ---


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_dropout": 0.1}, r"found lora_dropout=0\.1, expected none"),
        ({"use_dora": True}, "found use_dora=True"),
        ({"lora_bias": True}, "found lora_bias=True"),
        ({"fan_in_fan_out": True}, "found fan_in_fan_out=True"),
        *(({"init_lora_weights": init}, f"found init_lora_weights='{init}'")
          for init in ("pissa", "olora", "eva", "orthogonal")),
    ],
)  # fmt: skip
def test_refused(settings, message):
    model = quantized()
    with pytest.raises(
        ValueError, match=rf"model\.layers\.0\.mlp\.experts\.gate_up_proj: experts of 3 bits.*{message}"
    ):
        get_peft_model(model, lora(target_modules=[], **settings))
    assert torch.equal(logits(model), logits(quantized()))
    assert not any(isinstance(module, ParamWrapper) for module in model.modules())


def test_experts_as_modules_are_refused():
    with pytest.raises(ValueError, match=r"Target modules .* not found"):
        get_peft_model(quantized(), LoraConfig(target_modules=["gate_up_proj"]))
    with pytest.raises(ValueError, match=r"experts: found it in modules_to_save"):
        get_peft_model(quantized(), LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))


def test_rows_with_adapters_of_their_own_are_refused_by_peft():
    with pytest.raises(ValueError, match="mixed adapter batches"):
        adapted(quantized(), lora())(IDS, adapter_names=["default"] * len(IDS))


def test_loftq_leaves_experts_alone(tmp_path):
    model = get_peft_model(quantized(), lora())
    before = {name: parameter.clone() for name, parameter in trainable(model).items()}
    _dense("qwen3_moe", torch.float32).save_pretrained(tmp_path)
    hf_kbit.replace_lora_weights_loftq(model, tmp_path)
    changed = {name for name, parameter in trainable(model).items() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "q_proj" in name}


def test_offloaded_experts(device):
    """Adapters are where the experts compute; merging is refused, for PEFT would lose what is merged."""
    experts = lora(target_modules=[])
    model, expected = quantized(device=device), adapted(quantized(device=device), experts)
    for module in model.modules():
        if isinstance(module, KbitProjection):
            offload(module.cpu(), device)
    model = adapted(model, experts)
    assert {parameter.device.type for parameter in trainable(model).values()} == {device}
    assert torch.equal(logits(model), logits(expected))
    for merge in (model.merge_adapter, model.merge_and_unload, wrappers(model).popitem()[1].merge):
        with pytest.raises(ValueError, match=r"experts\.(gate_up|down)_proj\.weight: found it offloaded"):
            merge()
    assert torch.equal(logits(model), logits(expected))


# --- the product ---


def loop(x, a, b, offsets):
    ends = offsets.tolist()
    parts = [x[ends[e] : ends[e + 1]] @ a[e].T @ b[e] for e in range(len(a))]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], b.shape[-1])])


def factors(device, dtype=torch.float32, width=64, rank=4):
    torch.manual_seed(0)
    shapes = (11, width), (5, rank, width), (5, rank, 48)
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("ends", [[0, 3, 3, 7, 11, 11], [0, 0, 0, 0, 0, 11]])
@pytest.mark.parametrize("width", [64, 63])  # a multiple of 16 bytes, and none
@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_low_rank_product(dtype, rank, width, ends, device):
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    tensors = factors(device, dtype, width, rank)
    found = low_rank_product(*tensors, offsets, 1.5)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = 1.5 * loop(*exact, offsets)
    assert found.dtype == dtype and relative(found, expected) < 16 * torch.finfo(dtype).eps
    outer = torch.randn_like(found)
    found, expected = (
        torch.autograd.grad(y, of, outer.to(y.dtype)) for y, of in ((found, tensors), (expected, exact))
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert relative(ours, theirs) < 16 * torch.finfo(dtype).eps


def test_low_rank_product_gradcheck():
    offsets = torch.tensor([0, 3, 3, 7, 11, 11], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda *tensors: low_rank_product(*tensors, offsets), factors("cpu", torch.float64, 6, 2)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_low_rank_product_reads_no_numbers(dtype):
    """There are none on this device."""
    x, a, b = factors("meta", dtype)
    found = low_rank_product(x, a, b, torch.empty(6, dtype=torch.int32, device="meta"))
    found.sum().backward()
    assert found.shape == (11, 48) and a.grad.shape == a.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_without_breaks(dtype, device):
    """Experts with their adapters, for other routings too."""
    torch.compiler.reset()
    model = adapted(quantized(device=device, dtype=dtype), lora())
    experts = model.base_model.model.model.layers[0].mlp.experts
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(9, 64, device=device, dtype=dtype)
        ids, weights = torch.rand(9, 6, device=device).topk(2).indices, torch.rand(9, 2, device=device, dtype=dtype)
        found, expected = (module(x, ids, weights) for module in (compiled, experts))
        assert relative(found, expected) < (1e-5 if dtype == torch.float32 else 2e-2)
        grads = [torch.autograd.grad(y.square().sum(), wrappers(experts).popitem()[1].lora_A["default"].weight)[0]
                 for y in (found, expected)]  # fmt: skip
        assert relative(*grads) < (1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """The routing of each replay is read on the device."""
    model = adapted(quantized(device="cuda", dtype=torch.bfloat16), lora(r=8))
    experts = model.base_model.model.model.layers[0].mlp.experts
    x = torch.randn(9, 64, device="cuda", dtype=torch.bfloat16)
    ids, weights = torch.zeros(9, 2, dtype=torch.int64, device="cuda"), torch.ones(9, 2, device="cuda").bfloat16()
    ids[:, 1] = 1
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            experts(x, ids, weights)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = experts(x, ids, weights)
        for seed in range(3):
            torch.manual_seed(seed)
            ids.copy_(torch.rand(9, 6, device="cuda").topk(2).indices)
            graph.replay()
            torch.testing.assert_close(found, experts(x, ids, weights))
