"""Mixed widths: the best for a budget, by costs that are measured or by rule."""

import copy
import itertools

import pytest
import small
import torch
from adapters import kbit_layers
from architectures import ARCHITECTURES, BY_NAME
from byte_tokenizer import byte_tokenizer
from calibration.test_experts import KINDS as MIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    LlamaForCausalLM,
)

from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.calibration import stream, trellis_costs, widths
from hf_kbit.calibration.widths import choose_widths, measure
from hf_kbit.calibration.writing import draw, write
from hf_kbit.format.spec import BITS, layer_exponent
from hf_kbit.nn.site import site_of
from hf_kbit.plan import selection
from hf_kbit.plan.allocation import Layer, spend, stored_weights

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_hidden_layers": 2}
TOKENS = torch.arange(200) * 7 % 256
PLAIN = KbitConfig(bits=2, transform="none")


def llama() -> LlamaForCausalLM:
    return small.llama(num_key_value_heads=2, initializer_range=0.2, **SHAPE)


def convex(first: float, ratios) -> dict[int, float]:
    """Costs of which each is at most a third of the one before, as squared errors are."""
    return dict(zip(BITS, itertools.accumulate(ratios, lambda cost, ratio: cost * ratio, initial=first), strict=True))


COSTS = st.builds(convex, st.floats(0.01, 100), st.tuples(*[st.floats(0.05, 0.33)] * 3))


@given(st.lists(COSTS, min_size=1, max_size=4), st.sampled_from([2, 2.5, 3, 5]) | st.floats(2, 5), st.integers(1, 9))
@settings(deadline=None, max_examples=100)
def test_bits_are_spent_well(costs, bits, grown):
    """Nothing that fits is left; for layers of one size no other choice is better."""
    layers = {f"layer {place}": Layer(10 * grown**place, own) for place, own in enumerate(costs)}
    chosen, budget = spend(layers, bits), bits * sum(layer.weights for layer in layers.values())

    def used(chosen) -> int:
        return sum(layer.weights * chosen[name] for name, layer in layers.items())

    def cost(chosen) -> float:
        return sum(layer.costs[chosen[name]] for name, layer in layers.items())

    left = budget - used(chosen)
    assert 0 <= left and all(chosen[name] == 5 or layer.weights > left for name, layer in layers.items())
    if grown == 1:
        others = (dict(zip(layers, widths, strict=True)) for widths in itertools.product(BITS, repeat=len(layers)))
        assert cost(chosen) <= min(cost(other) for other in others if used(other) <= budget) * (1 + 1e-9)


def test_bits_go_where_a_weight_gains_most():
    """To ten small layers rather than to the one large layer that gains more than any of them."""
    layers = {f"small {n}": Layer(100, convex(4, (0.25, 0.25, 0.25))) for n in range(10)}
    layers |= {"large": Layer(1000, convex(10, (0.25, 0.25, 0.25)))}
    assert spend(layers, 2.5) == {name: 2 if name == "large" else 3 for name in layers}


def by_autograd(model, tokens, config, window) -> dict[str, dict[int, float]]:
    """Costs by the definition, from gradients of the whole model's weights, one window after another."""
    generator, costs = torch.Generator().manual_seed(widths.SEED), {}
    model = copy.deepcopy(model).eval().requires_grad_(True)
    pieces = [piece for piece in tokens.split(window) if len(piece) > 1]
    for piece in pieces:
        logs = model(piece[None], use_cache=False).logits[0].float().log_softmax(-1)
        logs.gather(1, draw(logs.detach().exp(), generator)).sum().backward()
        packable = selection.Packable(model)
        for name in packable.choose(config):
            site = packable.sites[name]
            dense, gradient = site.turned(site.weight.data), site.turned(site.weight.grad)
            dense, gradient = dense.flatten(0, -2), gradient.flatten(0, -2)  # experts have one exponent
            for bits in BITS:
                codebook = torch.tensor(config.levels_for(bits))
                exponent = layer_exponent(dense.abs().max().item())
                planes = torch.ops.hf_kbit.quantize(dense, codebook * 2.0**exponent, True)
                shape = list(dense.shape)
                decoded = torch.ops.hf_kbit.dequantize(*planes, codebook * 2.0**exponent, shape, torch.float32)
                found = costs.setdefault(name, dict.fromkeys(BITS, 0.0))
                found[bits] += ((decoded - dense) * gradient).square().sum().item() / 2
        model.zero_grad()
    return costs


ROWS = {name: BY_NAME[name].build for name in ("llama", "gemma2", "gpt2", "opt", "falcon", "mixtral")} | MIXTURES


@pytest.mark.parametrize(("name", "frozen"), list(zip(ROWS, itertools.cycle([False, True]), strict=False)))
def test_costs_are_what_gradients_say(name, frozen, monkeypatch):
    """Those of several windows, the last a shorter one; of layers that are transposed, have a bias, or are experts'.
    The model is as before, and its weights have no gradients."""
    monkeypatch.setattr(widths, "LOGITS", 1)  # one window at a time: the squares of several together differ by chance
    model, tokens, config = ROWS[name]().train().requires_grad_(not frozen), torch.arange(30) * 7 % 90, PLAIN
    before, kinds = {**model.state_dict()}, [type(module) for module in model.modules()]
    values = {name: tensor.clone() for name, tensor in before.items()}
    found, expected = measure(model, tokens, config, window=12), by_autograd(model, tokens, config, 12)
    assert found.keys() == expected.keys() == set(selection.Packable(model).choose(config))
    largest = max(costs[2] for costs in expected.values())
    for layer, costs in expected.items():
        assert found[layer].costs == pytest.approx(costs, rel=1e-2, abs=1e-5 * largest), layer
        assert found[layer].weights == stored_weights([site_of(model, layer)], KbitConfig())
    assert model.training and [type(module) for module in model.modules()] == kinds
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad is not frozen for p in model.parameters() if p.is_floating_point())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_costs_of_trellises_are_those_of_encoded_ones(name, monkeypatch):
    """But for what is left of small blocks' own shapes."""
    monkeypatch.setattr(KbitConfig, "widths", (2, 4))
    config, ids = KbitConfig(bits=2, codebook="trellis"), torch.arange(30) * 7 % 90
    found = measure(BY_NAME[name].build(), ids, config)
    monkeypatch.setattr(widths, "TRELLIS", "")  # so that weights are encoded in each width
    expected = measure(BY_NAME[name].build(), ids, config)
    assert found.keys() == expected.keys()
    for width in config.widths:
        ours, theirs = (torch.tensor([layer.costs[width] for layer in each.values()]) for each in (found, expected))
        torch.testing.assert_close(ours, theirs, rtol=0.4, atol=0.02 * theirs.max().item())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_costs_that_feedback_leaves(name, monkeypatch):
    """Of trellises alone: less of each width, by what the moments of a layer's sides say, and of experts' inputs."""
    model, ids, moments, given = BY_NAME[name].build().eval(), torch.arange(30) * 7 % 90, {}, {}
    trellis, left = KbitConfig(bits=2, codebook="trellis"), trellis_costs.trellis.left

    def watched(hessian, scales, block, damping):
        moments[names[len(moments)]] = hessian
        return left(hessian, scales, block, damping)

    plain = measure(model, ids, trellis)
    names = [f"{layer}{side}" for layer in plain for side in (" in", " out")]
    experts = {layer for layer in plain if "experts" in layer}
    names = [each for each in names if not (each.endswith(" out") and each.removesuffix(" out") in experts)]
    monkeypatch.setattr(trellis_costs.trellis, "left", watched)
    found = measure(model, ids, trellis, method="feedback")
    assert list(moments) == names
    for layer, own in found.items():
        shares = {own.costs[width] / plain[layer].costs[width] for width in own.costs}
        assert max(shares) == pytest.approx(min(shares)) and 0 < max(shares) < 0.9
    layers = {layer: model.get_submodule(layer) for layer in plain.keys() - experts}
    with stream.hooked(layers, lambda layer, x: given.update({layer: x.flatten(0, -2)})), torch.no_grad():
        model(ids[None])
    for layer, x in given.items():
        x = x[1:]  # but for the first token
        torch.testing.assert_close(moments[f"{layer} in"], x.T @ x, rtol=1e-3, atol=1e-3)
    for method, config in ((None, trellis), ("weighted", trellis), ("feedback", PLAIN), (None, PLAIN)):
        again = measure(model, ids, config, method=method)
        assert again == (plain if config is trellis else measure(model, ids, config))
    with pytest.raises(ValueError, match="method: found 'gptq', expected None or one of"):
        choose_widths(model, ids, 3, method="gptq")


def test_moments_of_a_side_are_those_of_some_of_its_blocks(monkeypatch):
    """Evenly spread, with the last, which has padding; all of a short side."""
    monkeypatch.setattr(trellis_costs, "FEATURES", 96)
    x, scales = torch.randn(50, 300), torch.rand(2, 320) + 0.5
    side = trellis_costs._Side(300, scales, 32)
    side.add(x[:20])
    side.add(x[20:])
    places = torch.cat([torch.arange(start, min(start + 32, 300)) for start in (0, 128, 288)])
    torch.testing.assert_close(side.moments, x[:, places].T @ x[:, places])
    assert len(side.scales) == 96 and torch.equal(side.scales[:32], scales[:, :32].square().mean(0).sqrt())
    assert 0 < trellis_costs.trellis.left(side.moments, side.scales, side.block, 0.03) < 1
    assert len(trellis_costs._Side(40, scales[:, :64], 32).places) == 40


def test_errors_of_trellises_are_those_of_gaussian_weights():
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    for width, error in trellis_costs.ERRORS.items():
        decoded = widths._decoded(weight, width, KbitConfig(bits=width, codebook="trellis"))
        assert (decoded - weight).square().mean().item() == pytest.approx(
            error * weight.square().mean().item(), rel=0.04
        )


def test_windows_and_dtypes_cost_the_same(monkeypatch):
    """Several at once, one at a time, as sequences, and of a model in 16 bits, which computes in 32 on a CPU."""
    rows, seen = TOKENS[:192].view(3, 64), set()
    expected = measure(llama(), rows.flatten(), PLAIN, window=64)
    half = llama().bfloat16()

    def see(_, args, output):
        if output.shape[1] > 16:  # not where gradients are compared with those that a CPU gives in 16 bits
            seen.add(output.dtype)

    half.model.layers[0].mlp.up_proj.register_forward_hook(see)
    found = {"sequences": (measure(llama(), rows, PLAIN, window=16), 1e-4), "half": (measure(half, rows, PLAIN), 0.2)}
    monkeypatch.setattr(widths, "LOGITS", 1)
    found["alone"] = measure(llama(), rows.flatten(), PLAIN, window=64), 1e-4
    for way, (layers, tolerance) in found.items():
        for name, layer in layers.items():
            assert layer.costs == pytest.approx(expected[name].costs, rel=tolerance), (way, name)
    assert seen == {torch.float32}


def test_costs_are_near_to_the_divergence():
    """That of the model with one layer of so many bits, on tokens enough for the mean over what is drawn."""
    model, config = llama().eval(), KbitConfig(bits=2, transform="none")
    tokens = torch.randint(256, (2048,), generator=torch.Generator().manual_seed(0))
    found = measure(model, tokens, config, window=64)
    for name in ("model.layers.0.self_attn.v_proj", "model.layers.1.mlp.down_proj"):
        for bits in (2, 3):
            other = copy.deepcopy(model)
            layer = other.get_submodule(name)
            layer.weight.data = KbitLinear.from_linear(layer, bits, transform="none").dequantize()
            with torch.no_grad():
                p, q = (each(tokens.view(-1, 64)).logits.double().log_softmax(-1) for each in (model, other))
            assert found[name].costs[bits] == pytest.approx((p.exp() * (p - q)).sum().item(), rel=0.3)


@pytest.mark.parametrize("name", ["mlp.down_proj", "mlp.experts.down_proj"])
def test_bits_go_to_the_layers_that_matter(name, tmp_path):
    """None to one of zeros, which costs nothing; the model loads with what was chosen, and that is the mean."""
    model = MIXTURES["qwen3_moe"]() if "experts" in name else llama()
    layer = model.get_submodule("model.layers.0")
    with torch.no_grad():
        layer.get_parameter(name if "experts" in name else f"{name}.weight").zero_()
    config = choose_widths(model, TOKENS % 90, 3.5, config=KbitConfig(modules_to_not_convert=["k_proj"]), window=64)
    assert config.modules_to_not_convert == ["k_proj"]
    chosen = selection.Packable(model).choose(config)
    assert chosen[f"model.layers.0.{name}"] == 2 < chosen[f"model.layers.1.{name}"]
    sizes = {own: stored_weights([site_of(model, own)], KbitConfig()) for own in chosen}
    assert 3.3 < sum(sizes[own] * chosen[own] for own in chosen) / sum(sizes.values()) <= 3.5
    model.save_pretrained(tmp_path)
    layers = kbit_layers(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config))
    assert {own: layer.bits for own, layer in layers.items()} == {own: chosen[own] for own in layers}


@pytest.mark.parametrize("backward", [False, True])
def test_the_model_is_as_before_after_an_error(backward, monkeypatch):
    """One in the middle of a pass, or on the way back, while a layer is in another dtype."""
    model = llama().bfloat16()
    before, calls = {name: (x.data_ptr(), x.dtype) for name, x in model.named_parameters()}, itertools.count()
    layer = model.model.layers[1].mlp.down_proj
    forward = layer.forward

    def broken(x):
        if x.shape[1] > 16 and torch.is_grad_enabled() and next(calls) == backward:
            raise RuntimeError("out of memory")
        return forward(x)

    monkeypatch.setattr(layer, "forward", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        choose_widths(model, TOKENS, 3, window=64, device="cpu")
    assert next(calls) == 1 + backward
    assert {name: (x.data_ptr(), x.dtype) for name, x in model.named_parameters()} == before
    assert not any("forward" in vars(module) for module in model.modules() if module is not layer)


def test_widths_for_a_text(monkeypatch):
    """As for its ids: all of a short text, windows that are evenly spread over a long one."""
    text = "".join(f"{n} bottles hang on the wall. " for n in range(60))
    ids, taken = torch.tensor(list(text.encode())), []

    def recorded(model, ids, *arguments, **keywords):
        taken.append(ids)
        return measure(model, ids, *arguments, **keywords)

    monkeypatch.setattr(widths, "measure", recorded)
    choices = {"tokenizer": byte_tokenizer(), "window": 64, "modules_to_not_convert": ["k_proj"], "codebook": "int"}
    found = [choose_widths(llama(), text[:320], 3.5, **choices), choose_widths(llama(), text, 3.5, **choices)]
    assert torch.equal(torch.stack(taken[0]), ids[:320].view(5, 64))
    windows = ids.unfold(0, 64, 64)
    assert torch.equal(torch.stack(taken[1]), windows[[place * (len(windows) - 1) // 7 for place in range(8)]])
    for config in found:
        assert config.modules_to_not_convert == ["k_proj"] and config.codebook == "int" and config.module_bits
    choose_widths(llama(), None, 3.5, tokenizer=byte_tokenizer(), window=48)
    assert torch.equal(taken[2], write(llama(), 8, 48, tokenizer=byte_tokenizer()))


@pytest.mark.gpu
@pytest.mark.parametrize(("codebook", "method"), [("optimal", None), ("trellis", None), ("trellis", "feedback")])
def test_a_model_on_the_cpu_goes_through_the_gpu(codebook, method, monkeypatch):
    # Generators of devices give different numbers.
    monkeypatch.setattr(widths, "draw", lambda probabilities, generator: probabilities.argmax(-1, keepdim=True))
    model, how = llama(), {"window": 64, "method": method}
    config = KbitConfig(bits=2, codebook=codebook)
    weights = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    found = measure(model, TOKENS, config, device="cuda", **how)
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == weights  # put back, not copied
    expected = measure(model, TOKENS, config, device="cpu", **how)
    for name, layer in found.items():
        assert layer.costs == pytest.approx(expected[name].costs, rel=1e-2, abs=1e-4), name


# --- without data ---


def by_rule(bits, build=LlamaForCausalLM, **settings):
    """Of a model without weights: the mean for its layers, and the width of each."""
    shape = {"hidden_size": 96, "intermediate_size": 256, "num_attention_heads": 6, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = build(build.config_class(**{**shape, "vocab_size": 256, "num_hidden_layers": 12, **settings}))
    config = widths.widths_by_rule(model, bits)
    chosen = selection.Packable(model).choose(config)
    sizes = {name: stored_weights([site_of(model, name)], KbitConfig()) for name in chosen}
    return sum(chosen[name] * size for name, size in sizes.items()) / sum(sizes.values()), chosen


def test_a_rule_spends_what_it_has():
    for bits in (2, 2.6, 3.3, 4, 5):
        mean, chosen = by_rule(bits)
        assert bits - 0.05 < mean <= bits and len(chosen) == 84


def test_a_rule_spends_it_where_it_counts():
    """On keys and values that heads share, at the beginning, and on the last MLPs."""
    _, chosen = by_rule(3.4)
    width = {
        part: [chosen[f"model.layers.{place}.{part}"] for place in (0, 6, 11)]
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert width["self_attn.k_proj"][1] == width["self_attn.v_proj"][1] == 4 > width["self_attn.q_proj"][1]
    assert width["mlp.down_proj"][0] == width["mlp.down_proj"][2] == 4 > width["mlp.up_proj"][1]
    assert width["self_attn.q_proj"][2] == 3 < width["mlp.up_proj"][2]
    _, chosen = by_rule(3.2, num_key_value_heads=6)  # which no heads share
    assert chosen["model.layers.6.self_attn.k_proj"] == chosen["model.layers.6.self_attn.q_proj"]


@pytest.mark.parametrize("row", ARCHITECTURES, ids=str)
def test_a_rule_for_every_model(row):
    with torch.device("meta"):
        model = row.build()
    if selection.Packable(model).choose(KbitConfig()):
        config = widths.widths_by_rule(model, 3.5, config=KbitConfig(codebook="int"))
        assert config.codebook == "int" and set(selection.Packable(model).choose(config).values()) <= set(BITS)


def test_a_mean_while_a_model_loads(device, tmp_path):
    """Each layer gets the width that the rule gives it, what stays in 16 bits does, and the saved config says so."""
    model = llama()
    model.save_pretrained(tmp_path / "dense")
    config = KbitConfig(bits=3.3, module_bits={"k_proj": None})
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config, device_map=device)
    chosen = selection.Packable(model).choose(widths.widths_by_rule(model, 3.3, config=config))
    assert {name: layer.bits for name, layer in kbit_layers(quantized).items()} == chosen
    assert len(set(chosen.values())) > 1 and not any("k_proj" in name for name in chosen) and config.bits == 3.3
    quantized.save_pretrained(tmp_path / "quantized")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized", device_map=device)
    assert {name: layer.bits for name, layer in kbit_layers(again).items()} == chosen
    assert again.config.quantization_config.bits in BITS


# --- what is refused ---


def test_what_is_refused():
    model = llama()
    for bits in (1.9, 5.1, float("nan")):
        for choose in (
            lambda bits: choose_widths(model, TOKENS, bits),
            lambda bits: widths.widths_by_rule(model, bits),
        ):
            with pytest.raises(ValueError, match=f"bits: found {bits}, expected 2 to 5"):
                choose(bits)
    with pytest.raises(ValueError, match="found no linear layer to quantize in Llama"):
        choose_widths(model, TOKENS, 3, modules_to_not_convert=["proj"])
    with pytest.raises(TypeError, match="config: found it and"):
        choose_widths(model, TOKENS, 3, config=KbitConfig(), codebook="int")
    with pytest.raises(ValueError, match="an encoder"):
        choose_widths(BertForMaskedLM(BertConfig(vocab_size=256, **SHAPE)), TOKENS, 3)
    quantized = LlamaForCausalLM.from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), quantization_config=KbitConfig(bits=3)
    )
    with pytest.raises(ValueError, match="found a quantized one"):
        choose_widths(quantized, TOKENS, 3)
    model.model.layers[1].forward = lambda hidden, *_, **__: hidden
    with pytest.raises(ValueError, match=r"layers\.1\.\S+: found that tokens do not go through it"):
        choose_widths(model, TOKENS, 3)
    model = llama()
    model.lm_head.weight.data[5] = torch.nan
    with pytest.raises(ValueError, match=r"model.layers.0.\S+: found NaN or infinite gradients"):
        choose_widths(model, TOKENS, 3)
