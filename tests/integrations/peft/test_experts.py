"""LoRA on the packed experts of mixtures, besides what ``test_methods.py`` has of it."""

import copy
import functools
import threading

import adapters
import pytest
import torch
import transformers
from adapters import (
    IDS,
    MIXTURE,
    MIXTURES,
    TOLERANCE,
    adapted,
    assert_same_state,
    dense,
    gradients,
    load,
    logits,
    lora_on_experts,
    offload,
    packed_state,
    relative,
    trainable,
    warned,
)
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_kbit
from hf_kbit.integrations.peft.expert_adapters import KbitParamWrapper, low_rank_product
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.weight.tensor import KbitTensor

quantized = functools.partial(adapters.quantized, name="qwen3_moe")
both = functools.partial(adapters.both, name="qwen3_moe")
lora = lora_on_experts


def wrappers(model) -> dict[str, KbitParamWrapper]:
    return {module.name: module for module in model.modules() if isinstance(module, KbitParamWrapper)}


# --- what adapters are, and compute ---


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
    models = both(lora(r=rank), device=device, dtype=torch.bfloat16)
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

    settings = MIXTURE | dict(num_experts=16, moe_intermediate_size=96)
    plain = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**settings))
    smallest = 16 * 64 * 96
    for model, made in ((load(plain, bits=3), False), (plain, True)):
        model = get_peft_model(model, lora(r=2))
        with Largest() as largest:
            gradients(model)
        assert (largest.numel >= smallest) == made


HALVES = {"layers.0.mlp.experts.gate_up_proj": None, "layers.1.mlp.experts.down_proj": None}


@pytest.mark.parametrize(
    ("targets", "settings", "plain"),
    [({}, {"module_bits": HALVES}, 2), ({"target_parameters": ["experts.down_proj"]}, {}, 0)],
    ids=["one left in 16 bits", "one alone"],
)
def test_one_projection(targets, settings, plain, device):
    ours, theirs = both(lora(**targets), device=device, **settings)
    assert len(wrappers(ours)) == 2 and sum(type(module) is ParamWrapper for module in ours.modules()) == plain
    assert relative(logits(ours), logits(theirs)) < TOLERANCE[device]


# --- several adapters ---


def test_several_adapters(device):
    """Switched, together, rescaled, disabled, deleted; one on other projections is refused by PEFT."""
    ours, theirs = both(lora(), lora(r=2, lora_alpha=9, use_rslora=True), device=device)
    seen = []

    def compare(change=lambda model: None):
        change(ours), change(theirs)
        found = logits(ours)
        assert relative(found, logits(theirs)) < TOLERANCE[device]
        assert all(relative(found, other) > 1e-3 for other in seen)
        seen.append(found)

    def rescale(model):
        for module in model.modules():
            if isinstance(module, ParamWrapper):
                module.set_scale("1", 3.0)

    compare()
    with pytest.raises(ValueError, match="must target the same set"):
        ours.add_adapter("2", lora(target_parameters=["mlp.experts.down_proj"]))
    assert len(wrappers(ours)) == 4 and torch.equal(logits(ours), seen[0])
    with pytest.raises(ValueError, match="mixed adapter batches"):
        logits(copy.deepcopy(ours), adapter_names=["default"] * len(IDS))
    compare(lambda model: model.set_adapter("1"))
    compare(lambda model: model.base_model.set_adapter(["default", "1"]))
    compare(rescale)
    with ours.disable_adapter(), theirs.disable_adapter():
        compare()
    for model in (ours, theirs):
        model.delete_adapter("default")
        model.set_adapter("1")
    compare()
    assert torch.equal(logits(ours.unload()), logits(quantized(device)))


# --- merging ---


def test_what_is_not_finite_is_not_merged(device):
    model = adapted(quantized(device), lora())
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
    model_class = getattr(transformers, f"{MIXTURES[name][0]}ForCausalLM")
    count = {"qwen3_moe": "num_experts", "gpt_oss": "num_local_experts"}[name]
    settings = MIXTURE | {count: 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    model = adapted(load(model_class(model_class.config_class(**settings)), bits=3), lora(name, target_modules=[]))
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


def test_merge_into_16_bits_without_a_quantizer(device):
    """Also of experts that have no adapter."""
    part = adapted(quantized(device).model, lora(target_parameters=["layers.1.mlp.experts.down_proj"], task_type=None))
    expected = part(IDS.to(device)).last_hidden_state
    merged = hf_kbit.merge_and_unload(part, dequantize=True)
    assert not any(isinstance(module, KbitProjection) for module in merged.modules())
    assert relative(merged(IDS.to(device)).last_hidden_state, expected) < TOLERANCE[device]


# --- all-linear ---


@pytest.mark.parametrize("name", MIXTURES)
def test_all_linear_is_what_it_is_in_16_bits(name, device, capsys):
    """For some architectures PEFT takes the experts with it, and the router."""
    models, printed = [], []
    everything = lora(name, target_parameters=None, target_modules="all-linear")
    told = warned(lambda: models.extend(both(everything, device=device, name=name)))
    if name != "llama4":  # whose router PEFT adapts, and then fails, in 16 bits too
        assert relative(*(logits(model) for model in models)) < TOLERANCE[device]
    shapes = [{key: tuple(tensor.shape) for key, tensor in trainable(model).items()} for model in models]
    assert shapes[0] == shapes[1]
    for model in models:
        model.print_trainable_parameters()
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and f"{sum(p.numel() for p in trainable(models[0]).values()):,}" in printed[0]

    counts = {key: tensor.numel() for key, tensor in trainable(models[0]).items()}
    on_experts = [count for key, count in counts.items() if "experts" in key and "shared_experts" not in key]
    assert bool(on_experts) == bool(wrappers(models[0])) == (name in ("qwen3_moe", "mixtral")) == bool(told)
    if told:
        count = sum(on_experts)
        assert f"{count:,} parameters of adapter 'default' are on them, {16 * count / 1e9:.3g} GB" in told[0]
    assert not warned(lambda: get_peft_model(quantized(device, name=name), lora(name)))


# --- what is refused ---


@pytest.mark.parametrize(
    ("setting", "value"),
    [("lora_dropout", 0.1), ("use_dora", True), ("lora_bias", True), ("fan_in_fan_out", True)]
    + [("init_lora_weights", init) for init in ("pissa", "olora", "eva", "orthogonal")],
)
def test_refused(setting, value):
    model = quantized()
    what = r"model\.layers\.0\.mlp\.experts\.gate_up_proj: experts of 3 bits"
    with pytest.raises(ValueError, match=f"{what}.*found {setting}={value!r}, expected"):
        get_peft_model(model, lora(target_modules=[], **{setting: value}))
    assert torch.equal(logits(model), logits(quantized()))
    assert not any(isinstance(module, ParamWrapper) for module in model.modules())


def test_experts_as_modules_are_refused():
    with pytest.raises(ValueError, match=r"Target modules .* not found"):
        get_peft_model(quantized(), LoraConfig(target_modules=["gate_up_proj"]))
    with pytest.raises(ValueError, match=r"experts: found it in modules_to_save"):
        get_peft_model(quantized(), LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"]))


def test_loftq_leaves_experts_alone(tmp_path):
    model = get_peft_model(quantized(), lora())
    before = {name: parameter.clone() for name, parameter in trainable(model).items()}
    dense("qwen3_moe").save_pretrained(tmp_path)
    hf_kbit.replace_lora_weights_loftq(model, tmp_path)
    changed = {name for name, parameter in trainable(model).items() if not torch.equal(parameter, before[name])}
    assert changed == {name for name in before if "q_proj" in name}


def test_offloaded_experts(device):
    """Adapters are where the experts compute; merging is refused, for PEFT would lose what is merged."""
    model, expected = quantized(device), adapted(quantized(device), lora(target_modules=[]))
    for module in model.modules():
        if isinstance(module, KbitProjection):
            offload(module.cpu(), device)
    model = adapted(model, lora(target_modules=[]))
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


@pytest.mark.parametrize("ends", [[0, 3, 3, 7, 11, 11], [0, 0, 0, 0, 0, 11]])
@pytest.mark.parametrize("width", [64, 63])  # a multiple of 16 bytes, and none
@pytest.mark.parametrize("rank", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_low_rank_product(dtype, rank, width, ends, device):
    """And its gradients: experts without tokens have zeros, and not none, for which DDP would wait."""
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    torch.manual_seed(0)
    shapes = (11, width), (5, rank, width), (5, rank, 48)
    tensors = [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]
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


def test_low_rank_product_reads_no_numbers():
    """There are none on this device."""
    shapes = (11, 64), (5, 4, 64), (5, 4, 48)
    x, a, b = (torch.empty(shape, device="meta", requires_grad=True) for shape in shapes)
    found = low_rank_product(x, a, b, torch.empty(6, dtype=torch.int32, device="meta"))
    found.sum().backward()
    assert found.shape == (11, 48) and a.grad.shape == a.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_without_breaks(dtype, device):
    """Experts with their adapters, for other routings too."""
    torch.compiler.reset()
    model = adapted(quantized(device, dtype), lora())
    experts = model.base_model.model.model.layers[0].mlp.experts
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(9, 64, device=device, dtype=dtype)
        ids, weights = torch.rand(9, 6, device=device).topk(2).indices, torch.rand(9, 2, device=device, dtype=dtype)
        found, expected = (module(x, ids, weights) for module in (compiled, experts))
        assert relative(found, expected) < (1e-5 if dtype == torch.float32 else 2e-2)
        factor = wrappers(experts).popitem()[1].lora_A["default"].weight
        grads = [torch.autograd.grad(y.square().sum(), factor)[0] for y in (found, expected)]
        assert relative(*grads) < (1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    """The routing of each replay is read on the device."""
    model = adapted(quantized("cuda", torch.bfloat16), lora(r=8))
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
