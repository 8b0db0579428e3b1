"""KbitExperts against the class it stands in for, on decoded weights."""

import copy

import pytest
import torch
from compiled import assert_replayed, is_hopper
from torch import nn
from transformers import GptOssConfig, Llama4TextConfig, NemotronHConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import hf_kbit
from hf_kbit import codebooks
from hf_kbit.format import reference
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.nn.experts import KbitExperts, KbitProjection
from hf_kbit.nn.site import empty, pack, sites
from hf_kbit.ops import grouped

E, H, INNER, TOP = 6, 72, 40, 2


def gated(**settings):
    return Qwen3MoeExperts(Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=INNER, num_experts=E, **settings))


def transposed_with_bias():
    return GptOssExperts(GptOssConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=E))


def not_gated():
    return NemotronHExperts(NemotronHConfig(hidden_size=H, moe_intermediate_size=INNER, n_routed_experts=E))


KINDS = {"gated": gated, "transposed, with bias": transposed_with_bias, "not gated": not_gated}


def made(build, bits=3, only=None):
    """The experts with packed projections, and with the decoded ones."""
    torch.manual_seed(0)
    plain = build()
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.2)
    packed = copy.deepcopy(plain)
    model = nn.ModuleDict({"experts": packed})
    for site in [site for site in sites(model).values() if only is None or site.own.endswith(only)]:
        weight = site.turned(site.weight.detach())
        decoding = ScalarDecoding(codebooks.optimal(bits, signed=True), transform="rotated")
        projection = pack(site, empty(site, decoding))
        projection.load_dense(weight)
        plain.get_parameter(site.own).data = site.turned(projection.dequantize()).contiguous()
    return packed, plain


def routed(tokens=9, experts=E):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, H, generator=generator)
    ids = torch.rand(tokens, experts, generator=generator).topk(TOP).indices
    return x, ids, torch.rand(tokens, TOP, generator=generator)


@pytest.mark.parametrize("only", [None, "up_proj", "down_proj"])
@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
def test_same_as_the_class_on_decoded_weights(build, only):
    """With one projection left dense too: results, and gradients of what goes in."""
    packed, plain = made(build, only=only)
    assert isinstance(packed, KbitExperts) and isinstance(packed, type(plain))
    assert sum(isinstance(module, KbitProjection) for module in packed.children()) == (1 if only else 2)
    x, ids, weights = routed()
    ids[0] = E - 1
    outcomes = []
    for module in (packed, plain):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        y = module(inputs[0], ids, inputs[1])
        outcomes.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_arguments_in_any_form():
    """By name, with leading dimensions, in another order, and none at all."""
    packed, _ = made(gated)
    x, ids, weights = routed(8)
    expected, order = packed(x, ids, weights), torch.randperm(8)
    assert torch.equal(packed(x, top_k_weights=weights, top_k_index=ids), expected)
    shaped = packed(x.view(2, 4, H), ids.view(2, 4, TOP), weights.view(2, 4, TOP))
    assert torch.equal(shaped, expected.view(2, 4, H))
    torch.testing.assert_close(packed(x[order], ids[order], weights[order]), expected[order])
    assert packed(x[:0], ids[:0], weights[:0]).shape == (0, H)


def test_experts_of_other_processes_count_nothing():
    packed, _ = made(transposed_with_bias)
    x, ids, weights = routed()
    elsewhere = ids.clone()
    elsewhere[:, 1] = E
    only_first = packed(x, ids[:, :1], weights[:, :1])
    torch.testing.assert_close(packed(x, elsewhere, weights), only_first, rtol=1e-6, atol=1e-6)
    assert not packed(x, torch.full_like(ids, E), weights).any()


def test_llama4():
    config = Llama4TextConfig(hidden_size=H, intermediate_size=INNER, num_local_experts=4)
    packed, plain = made(lambda: Llama4TextExperts(config))
    x = torch.randn(4 * 5, H)
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)


def test_state_dict():
    packed, _ = made(gated, bits=4)
    shapes = {name: tuple(tensor.shape) for name, tensor in packed.state_dict(keep_vars=True).items()}
    assert shapes == {"gate_up_proj.weight": (E, 2 * INNER, H), "down_proj.weight": (E, H, INNER)}
    stored = {name: tuple(tensor.shape) for name, tensor in packed.down_proj.packed.items()}
    assert stored == {"weight": (E, H, 2 * 4), "weight_absmax": (E, H, 2), "weight_columns": (INNER,)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_product_of_dense_matrices(dtype, transposed):
    """As expert by expert, also for experts without rows, and rows without an expert."""
    generator = torch.Generator().manual_seed(0)
    matrices = torch.randn(4, H, INNER, generator=generator).to(dtype)
    weight = matrices if transposed else matrices.mT.contiguous()
    x, bias = torch.randn(9, H, generator=generator).to(dtype), torch.randn(4, INNER, generator=generator).to(dtype)
    for ends in ([0, 3, 3, 7, 9], [0, 0, 2, 5, 6], [0, 9, 9, 9, 9]):
        offsets = torch.tensor(ends, dtype=torch.int32)
        for its_bias in (None, bias):
            expected = grouped.dense_product(x, weight, its_bias, offsets, transposed)
            found = grouped.grouped_product(x, weight if transposed else weight.mT, its_bias, offsets)
            torch.testing.assert_close(found, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
            assert not found[ends[-1] :].any()


def test_one_projection_left_dense_compiles():
    packed, _ = made(gated, only="gate_up_proj")
    packed.bfloat16()
    x, ids, weights = routed()
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    expected = packed(x.bfloat16(), ids, weights.bfloat16())
    torch.testing.assert_close(compiled(x.bfloat16(), ids, weights.bfloat16()), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("inputs", [None, "int8"])
def test_the_gate_is_in_a_product_where_experts_are_compiled(inputs):
    packed, names = made(gated)[0].eval(), []
    for projection in packed.children():
        if isinstance(projection, KbitProjection):
            projection.take_inputs(inputs)

    def backend(graph, _):
        names.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    x, ids, weights = routed()
    with torch.no_grad():
        torch.compile(packed, backend=backend, fullgraph=True)(x, ids, weights)
    assert sum("gemm_experts" in name for name in names) == 2 and not any("silu" in name for name in names), names


def test_gates_of_their_own_run():
    """What stands in for a class's gate, or looks at its function, is not passed by."""
    packed, plain = made(gated)
    called = []
    packed.act_fn.register_forward_hook(lambda *_: called.append("hook"))
    torch.testing.assert_close(packed(*routed()), plain(*routed()), rtol=1e-4, atol=1e-5)
    assert called == ["hook"]
    packed, _ = made(gated)
    packed._apply_gate = lambda hidden: called.append("gate") or hidden.chunk(2, dim=-1)[1]
    packed(*routed())
    assert called == ["hook", "gate"]


def test_compiles_without_breaks():
    packed, _ = made(gated)
    compiled = torch.compile(packed, fullgraph=True)
    torch.testing.assert_close(compiled(*routed()), packed(*routed()), rtol=1e-5, atol=1e-5)


def test_autocast():
    packed, _ = made(transposed_with_bias)
    x, ids, weights = routed()
    with torch.autocast("cpu", torch.bfloat16):
        found = packed(x, ids, weights)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, packed(x, ids, weights), rtol=0.05, atol=0.1)


# --- 8-bit inputs -----------------------------------------------------------------------------------


def with_int8(build):
    """Experts in 16 bits, and the same with 8-bit inputs."""
    exact = made(build)[0].eval()
    rounded = copy.deepcopy(exact)
    for projection in (module for module in rounded.children() if isinstance(module, KbitProjection)):
        projection.take_inputs("int8")
    return exact, rounded


def by_the_op(experts, x, ids, weights):
    """Each token by each of its experts."""

    def product(name, x, expert):
        weight = getattr(experts, name).weight
        packed = weight.words[expert], weight.absmax[expert], weight.codebook
        bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
        return reference.gemm_int8(x, *packed, bias, weight.shape[1], weight.columns)

    up, y = "gate_up_proj" if experts.has_gate else "up_proj", torch.zeros_like(x)
    for token in range(len(x)):
        for expert, times in zip(ids[token], weights[token], strict=True):
            hidden = product(up, x[token], expert)
            hidden = experts._apply_gate(hidden) if experts.has_gate else experts.act_fn(hidden)
            y[token] += times * product("down_proj", hidden, expert)
    return y


@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
@torch.no_grad()
def test_8_bit_inputs(build):
    exact, rounded = with_int8(build)
    x, ids, weights = routed()
    found, expected = rounded(x, ids, weights), exact(x, ids, weights)
    torch.testing.assert_close(found, by_the_op(rounded, x, ids, weights), rtol=1e-6, atol=1e-6)
    assert 1e-3 * expected.norm() < (found - expected).norm() < 0.05 * expected.norm()
    for token in range(len(x)):
        one = slice(token, token + 1)
        assert torch.equal(rounded(x[one], ids[one], weights[one]), found[one]), "the same in every batch"
    compiled = torch.compile(rounded, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, ids, weights), found)
    kept = rounded.down_proj.weight.parts["inverses"]
    assert kept.shape == (E, H) and rounded.down_proj.find_inverses(rounded.down_proj.parts) is kept
    other = copy.deepcopy(rounded)
    assert "inverses" not in other.down_proj.weight.parts and torch.equal(other(x, ids, weights), found)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(rounded(x, ids, weights), exact(x, ids, weights))


@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
def test_what_has_16_bit_inputs_all_the_same(build):
    """Whatever trains, float64, and projections that are not transformed."""
    exact, rounded = with_int8(build)
    x, ids, weights = routed()
    outcomes = []
    for module in (exact, rounded):
        wanting = x.clone().requires_grad_()
        y = module(wanting, ids, weights)
        outcomes.append((y, *torch.autograd.grad(y.square().sum(), wanting)))
    assert all(map(torch.equal, *outcomes))
    with torch.no_grad():
        assert torch.equal(
            rounded.double()(x.double(), ids, weights.double()), exact.double()(x.double(), ids, weights.double())
        )
        rounded, exact = rounded.float(), exact.float()
        assert torch.equal(rounded.train()(x, ids, weights), exact(x, ids, weights))
    plain = KbitProjection(4, in_features=64, out_features=48, transform="none")
    plain.take_inputs("int8")
    assert plain.inputs is None


@pytest.mark.gpu
@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tokens", [1, 9, 300])
def test_on_a_gpu(build, tokens):
    packed, _ = made(build)
    stored = {name: tensor.clone() for name, tensor in packed.state_dict().items()}
    x, ids, weights = routed(tokens)
    expected = packed(x, ids, weights)
    packed.cuda().bfloat16()
    assert all(module.weight.is_tiled for module in packed.children() if isinstance(module, KbitProjection))
    found = packed(x.cuda().bfloat16(), ids.cuda(), weights.cuda())
    assert (found.cpu().float() - expected).norm() <= 0.02 * expected.norm()
    for name, tensor in packed.state_dict().items():
        assert tensor.is_floating_point() or torch.equal(tensor, stored[name]), name
    held = [x.cuda().bfloat16(), ids.cuda(), weights.cuda()]
    assert_replayed(packed, [held, [held[0], (held[1] + 1) % E, held[2]]])


@pytest.mark.gpu
@pytest.mark.parametrize("build", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("tokens", [1, 9, 300])
@pytest.mark.skipif(not is_hopper(), reason="no kernel but for Hopper")
@torch.no_grad()
def test_8_bit_inputs_on_a_gpu(build, tokens, always_int8):
    """As far from those of a CPU as the gate between two products is; as a graph where a kernel makes them. Experts of
    few rows each have 16-bit inputs there if nothing else is said."""
    exact, rounded = (experts.bfloat16() for experts in with_int8(build))
    x, ids, weights = routed(tokens)
    x = x.bfloat16()
    expected = rounded(x, ids, weights)
    exact.cuda(), rounded.cuda()
    held = [x.cuda(), ids.cuda(), weights.cuda()]
    found = rounded(*held)
    assert (found.cpu() - expected).norm() <= 0.01 * expected.norm()
    assert torch.equal(torch.compile(rounded, backend="aot_eager")(*held), found)
    assert_replayed(rounded, [held, [held[0], (held[1] + 1) % E, held[2]]])
    hf_kbit.set_batch_invariant(False)
    assert torch.equal(rounded(*held), exact(*held)) == (tokens < 300) and not torch.equal(found, exact(*held))
