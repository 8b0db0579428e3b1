"""How much tokens count, against gradients of the whole model by each layer's output."""

import logging
from functools import partial

import pytest
import torch
from architectures import BY_NAME
from small import llama, same, tensors
from torch import nn

import hf_kbit
from hf_kbit.calibration import routed, sensitivity, stream
from hf_kbit.calibration.data import batches_of
from hf_kbit.calibration.writing import draw
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.plan import selection

IDS = torch.randint(5, 90, (5, 24), generator=torch.Generator().manual_seed(3))
CPU = torch.device("cpu")


def token_weights(model, names, ids, device, batch) -> dict[str, torch.Tensor]:
    """``[sequences, tokens]`` of layers whose inputs have sequences first."""
    found, _ = sensitivity.weigh(model, dict.fromkeys(names, 0), batches_of(ids, batch), device)
    return {name: torch.cat(own) for name, own in found.items()}


def weights_by_autograd(model, names, ids, batch, draws) -> dict[str, torch.Tensor]:
    """By the definition, one batch and one draw after another."""
    outputs, squares, generator = {}, dict.fromkeys(names, 0.0), torch.Generator().manual_seed(0)

    def keep(name, module, args, output):
        output.retain_grad()
        outputs[name] = output

    hooks = [model.get_submodule(name).register_forward_hook(partial(keep, name)) for name in names]
    for place, part in enumerate(ids.split(batch)):
        rows = slice(place * batch, place * batch + len(part))
        logs = model(part, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
        for _ in range(draws):
            logs.gather(1, draw(logs.detach().exp(), generator)).sum().backward(retain_graph=True)
            for name, output in outputs.items():
                own = torch.zeros(ids.shape)
                own[rows] = output.grad.square().sum(-1).view(part.shape)
                squares[name] = squares[name] + own
                output.grad = None
    for hook in hooks:
        hook.remove()
    found = {}
    for name, own in squares.items():
        clipped = own.clamp(max=sensitivity.MOST * own[:, 1:].quantile(0.99).item())
        found[name] = 0.75 + 0.25 * clipped / clipped[:, 1:].mean()
        found[name][:, 0] = 1
    return found


@pytest.mark.parametrize(("most", "draws"), [(10, 2), (0.5, 1)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "gemma2", "mixtral"])
def test_weights_are_what_gradients_say(name, most, draws, monkeypatch):
    """Of batches of unequal size, whatever other random numbers are drawn; outliers are cut. The model's parameters
    have no gradients, and need them as before."""
    monkeypatch.setattr(sensitivity, "MOST", most)
    monkeypatch.setitem(sensitivity.DRAWS, "cpu", draws)
    model = BY_NAME[name].build().eval()
    packable = selection.Packable(model)
    projections = [site for site in packable.sites.values() if site.kind is KbitProjection]
    names = [n for n in packable.choose(hf_kbit.KbitConfig()) if packable.sites[n] not in projections]
    expected = weights_by_autograd(model, names, IDS, 2, draws)
    model.zero_grad()
    with torch.no_grad(), routed.opened(projections):
        found, again = (token_weights(model, names, IDS, CPU, 2) for _ in range(2))
    assert found.keys() == expected.keys() and len(found) > 5 and same(found, again)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    for layer, own in found.items():
        torch.testing.assert_close(own, expected[layer], rtol=1e-3, atol=1e-4)
        assert (own[:, 0] == 1).all() and own.dtype == torch.float32
        assert own[:, 1:].mean() == pytest.approx(1, abs=1e-5) and own.std() > 0.01
        assert own.max() <= 1 - 0.25 + 0.25 * most * 30


def test_rounding_of_16_bits_is_no_other_gradient(caplog, monkeypatch):
    """A CPU computes layers in float32: of a model that rounds as much as this one, gradients are others by that."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = llama(initializer_range=1.0).bfloat16()
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear][:-1]
    assert list(token_weights(model, names, IDS, CPU, 2)) == names and not told(caplog)


def test_the_first_token_is_in_no_statistic():
    squares = torch.rand(4, 9)
    (found,) = sensitivity._weights([squares])
    squares[:, 0] = 1e6
    assert torch.equal(*sensitivity._weights([squares]), found) and (found[:, 0] == 1).all()
    assert found[:, 1:].std() > 0.05


@pytest.mark.parametrize("squares", [torch.zeros(2, 50), torch.eye(200)[1:2]], ids=["none", "few"])
def test_without_gradients_tokens_count_alike(squares):
    assert torch.equal(*sensitivity._weights([squares]), torch.ones_like(squares))


def test_the_weighted_error_of_outputs_falls(monkeypatch):
    """That of the first layers, whose inputs do not depend on how others are rounded; the plain one rises."""
    ids = torch.randint(256, (8, 24), generator=torch.Generator().manual_seed(5))
    dense, models, inputs = llama(initializer_range=0.5), {}, []
    layers = [f"model.layers.0.self_attn.{own}_proj" for own in "qkv"]
    with torch.no_grad(), stream.hooked({"": dense.get_submodule(layers[0])}, lambda _, x: inputs.append(x)):
        dense(ids)
    for blend in (0, 1.0):
        monkeypatch.setattr(sensitivity, "BLEND", blend)
        models[blend] = hf_kbit.calibrate(llama(initializer_range=0.5), ids, bits=2, batch=8)
    weights = sum(token_weights(dense, layers, ids, CPU, 8).values()) / 3

    def error(model, counts) -> float:
        changes = [model.get_submodule(n).dequantize(torch.float32) - dense.get_submodule(n).weight for n in layers]
        return sum((counts * (inputs[0] @ change.T).square().sum(-1)).sum().item() for change in changes)

    assert error(models[1.0], weights) < 0.93 * error(models[0], weights)
    assert error(models[1.0], torch.ones(8, 24)) > 1.02 * error(models[0], torch.ones(8, 24))


@pytest.mark.parametrize("settings", [{"module_bits": {"lm_head": 5}}, {"embedding_bits": 5}])
def test_all_tokens_count_alike_for_the_head(settings, monkeypatch):
    """Whether it is tied or not."""
    asked, model = [], llama(tie_word_embeddings="embedding_bits" in settings)
    monkeypatch.setattr(sensitivity, "weigh", lambda model, names, *how: asked.extend(names) or ({}, {}))
    hf_kbit.calibrate(model, IDS, bits=3, **settings)
    assert model.lm_head.bits == 5 and len(asked) == 14 and "lm_head" not in asked


@pytest.mark.gpu
def test_the_same_weights_each_time_on_the_gpu():
    """Also of sequences so long that usual kinds of attention add gradients up in any order; and of a model that is on
    the CPU, where it stays."""
    ids = torch.randint(256, (3, 600), generator=torch.Generator().manual_seed(6))
    model, device = llama().bfloat16(), torch.empty(0, device="cuda").device
    names = [n for n, layer in model.named_modules() if type(layer) is nn.Linear and n != "lm_head"]
    found = token_weights(model, names, ids, device, 2)
    assert model.device.type == "cpu"
    model.to(device)
    others = [token_weights(model, names, ids.to(device), device, 2) for _ in range(3)]
    assert list(found) == names and all(same(found, other) for other in others)
    assert all(own.device.type == "cpu" and own[:, 1:].std() > 0.01 for own in found.values())
    homes = (device, device, "cpu")
    first, *others = (hf_kbit.calibrate(llama().bfloat16().to(home), ids, bits=2, device=device) for home in homes)
    assert all(same(tensors(first), tensors(other)) for other in others)


# --- where tokens count alike ---------------------------------------------------------------------


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()


def without_way_back():
    model = llama()
    model.model.layers[1].mlp.register_forward_hook(lambda _, args, output: NoWayBack.apply(output))
    return model


def with_other_heads_in_each_layer():
    """As configs of models whose code is not in Transformers may have them."""
    model = llama()
    vars(model.config)["num_attention_heads"] = [2] * model.config.num_hidden_layers  # past its check of types
    return model


def told(caplog) -> set[str]:
    return {record.getMessage() for record in caplog.records if "count alike" in record.getMessage()}


@pytest.mark.parametrize(
    "build", [BY_NAME["bert-masked"].build, BY_NAME["t5"].build, without_way_back, with_other_heads_in_each_layer]
)
def test_what_cannot_be_weighed_is_calibrated_as_without_weights(build, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    found = tensors(hf_kbit.calibrate(build(), IDS, bits=2))
    assert len(told(caplog)) == (build in (without_way_back, with_other_heads_in_each_layer))
    monkeypatch.setattr(sensitivity, "gradients", None)
    monkeypatch.setattr(sensitivity, "BLEND", 0)
    assert same(found, tensors(hf_kbit.calibrate(build(), IDS, bits=2)))


def test_a_small_device_and_short_sequences_have_no_weights(monkeypatch, caplog):
    """The former is told, and one byte more is enough. Where there is enough, but not free, that is an error. To a
    device that is too small for all of the model its layers go one after another, with the same result."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model, name = llama(), "model.layers.0.mlp.up_proj"
    assert token_weights(model, [name], IDS[:, :1], CPU, 2) == {} and not told(caplog)
    room = 16 * 24 * model.config.vocab_size  # bytes, tokens; of one sequence, which is always read at once
    monkeypatch.setattr(stream, "memory_of", lambda _: (room, room))
    assert list(token_weights(model, [name], IDS, CPU, 2)) == [name] and not told(caplog)
    monkeypatch.setattr(stream, "memory_of", lambda _: (room - 1, room))
    with pytest.raises(MemoryError, match=r"expected 0\.0 for gradients of LlamaForCausalLM"):
        token_weights(model, [name], IDS, CPU, 2)
    monkeypatch.setattr(stream, "memory_of", lambda _: (room - 1, room - 1))
    assert token_weights(model, [name], IDS, CPU, 2) == {}
    assert told(caplog) == {"hf_kbit: all tokens count alike, for cpu is too small for gradients of the model"}


@pytest.mark.parametrize(("sequences", "sizes"), [(0.9, [1] * 5), (1, [1] * 5), (2, [2, 2, 1]), (9, [4, 1])])
def test_an_eighth_of_the_memory_beside_the_model_is_for_sequences_at_once(sequences, sizes, monkeypatch):
    """At most those of a batch, and at least one."""
    model, name, taken = llama(), "model.layers.0.mlp.up_proj", []
    size = 4 * sum(x.numel() for x in (*model.parameters(), *model.buffers()))
    memory = size + int(8 * 16 * sequences * 24 * model.config.vocab_size)
    monkeypatch.setattr(stream, "memory_of", lambda _: (memory, memory))
    monkeypatch.setattr(sensitivity, "check_gradients", lambda *_: None)
    monkeypatch.setattr(sensitivity, "gradients", lambda model, names, ids, *_: taken.append(len(ids)))
    token_weights(model, [name], IDS, CPU, 4)
    assert taken == sizes


def test_a_model_that_is_larger_than_the_device(device, monkeypatch):
    """Its layers go there one after another, with the same result but for rounding; one byte more, and all of it goes.
    A second name of the CPU stands for a device where the model is not yet."""
    model, place = llama(), torch.device("cuda:0" if device == "cuda" else "cpu:0")
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear][:-1]
    size, moves, whole = 4 * sum(x.numel() for x in (*model.parameters(), *model.buffers())), [], stream.whole
    room = 16 * 24 * model.config.vocab_size + size
    monkeypatch.setattr(stream, "moved_bytes", lambda *_: size)
    monkeypatch.setattr(stream, "whole", lambda *where: moves.append(where) or whole(*where))
    found = []
    for memory in (room, room - 1):
        monkeypatch.setattr(stream, "memory_of", lambda _, memory=memory: (memory, memory))
        found.append(token_weights(model, names, IDS, place, 2))
        assert moves == [(model, place)]
    together, alone = found
    assert together.keys() == alone.keys() == set(names)
    for name in names:
        torch.testing.assert_close(alone[name], together[name], rtol=1e-4, atol=1e-4)
    assert model.device == CPU


@pytest.mark.parametrize(("draws", "apart", "block"), [(1, 1, 2048), (2, 1, 48), (2, 2, 32)])
def test_moments_of_outputs_as_autograd_has_them(draws, apart, block, monkeypatch):
    """Of the layers that are asked for, whatever else has weights, and of so many outputs; of every second batch where
    half of all are enough. A row that is longer than most, of which there are a few here, is cut to a length of
    those."""
    monkeypatch.setattr(sensitivity, "BLOCK", block)
    monkeypatch.setitem(sensitivity.DRAWS, "cpu", draws)
    monkeypatch.setattr(sensitivity, "ROWS", draws * IDS.numel() // apart)
    monkeypatch.setattr(sensitivity, "MOST", 0.8)
    model = llama()
    names = ["model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj"]
    sizes = {name: model.get_submodule(name).out_features for name in names}
    dimensions = dict.fromkeys([*names, "model.layers.1.mlp.up_proj"], 0)
    weights, found = sensitivity.weigh(model, dimensions, batches_of(IDS, 2), CPU, False, sizes)
    assert weights.keys() == dimensions.keys() and found.keys() == sizes.keys()
    outputs, generator = {}, torch.Generator().manual_seed(0)
    expected = {name: torch.zeros(size, size) for name, size in sizes.items()}
    cut = 0

    def keep(name, module, args, output):
        output.retain_grad()
        outputs[name] = output

    for name in names:
        model.get_submodule(name).register_forward_hook(partial(keep, name))
    for number, part in enumerate(IDS.split(2)):
        logs = model(part, use_cache=False).logits.float().log_softmax(-1).flatten(0, 1)
        for _ in range(draws):
            logs.gather(1, draw(logs.detach().exp(), generator)).sum().backward(retain_graph=True)
            for name, output in outputs.items():
                squares = output.grad.square().sum(-1, keepdim=True)
                limit = 0.8 * squares[:, 1:].quantile(0.99)
                cut += (squares > limit).sum()
                rows = (output.grad * (limit / squares).clamp(max=1).sqrt()).flatten(0, -2)
                expected[name] += (number % apart == 0) * (rows.T @ rows)
                output.grad = None
    assert 0 < cut < draws * len(names) * IDS.numel() // 4
    for name, size in sizes.items():
        place = torch.arange(size) // block
        moments, blocks = expected[name] * (place == place[:, None]), found[name]
        assert [len(each) for each in blocks] == place.bincount().tolist()
        torch.testing.assert_close(torch.block_diag(*blocks), moments, rtol=1e-3, atol=1e-4 * moments.max().item())


def test_moments_of_outputs_want_room(monkeypatch, caplog):
    """The smaller ones have it first; where there is none, tokens still have weights. What a CPU is too small for, no
    other device has."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = llama()
    names = ["model.layers.0.mlp.up_proj", "model.layers.0.self_attn.k_proj"]
    sizes = {name: model.get_submodule(name).out_features for name in names}
    needed = 16 * 24 * model.config.vocab_size
    large, small = (32 * size * size for size in sizes.values())
    said = "hf_kbit: errors of outputs count alike for {} of 2 layers: cpu or the CPU has too little memory for what "
    for room, kept in ((large, names), (large - 2, names[1:]), (small, names[1:]), (small - 2, [])):
        caplog.clear()
        memory = needed + room
        monkeypatch.setattr(stream, "memory_of", lambda _, memory=memory: (memory, memory))
        found = sensitivity.weigh(model, dict.fromkeys(names, 0), batches_of(IDS, 2), CPU, False, sizes)
        assert [sorted(each) for each in found] == [sorted(names), sorted(kept)]
        missing = 2 - len(kept)
        assert told(caplog) == ({said.format(missing) + "they cost together"} if missing else set())
    for memory, kept in ((small // 4, names[1:]), (small // 4 - 2, [])):
        monkeypatch.setattr(stream, "memory_of", lambda _, memory=memory: (memory, memory))
        assert [*sensitivity._with_room(sizes, large, torch.device("meta"))] == kept


def test_layers_that_read_some_of_the_tokens_have_no_weights(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    model = llama()
    mlp, names = model.model.layers[0].mlp, [n for n, m in model.named_modules() if type(m) is nn.Linear][:-1]
    forward = mlp.forward
    mlp.forward = lambda x: torch.cat([forward(part) for part in x.chunk(2, 1)], 1)
    found = token_weights(model, names, IDS, CPU, 2)
    assert names and found.keys() == {n for n in names if "layers.0.mlp" not in n}
    assert told(caplog) == {"hf_kbit: all tokens count alike for 3 of 14 layers"}
    hf_kbit.calibrate(model, IDS, bits=2)


def test_memory_that_is_short_is_an_error(monkeypatch):
    def fail(*given, **how):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(sensitivity, "gradients", fail)
    with pytest.raises(torch.OutOfMemoryError):
        hf_kbit.calibrate(llama(), IDS, bits=2)


def test_what_a_run_with_other_weights_finished_is_refused(monkeypatch, tmp_path):
    hf_kbit.calibrate(llama(), IDS, bits=2, resume=tmp_path)
    monkeypatch.setattr(sensitivity, "BLEND", 0)
    with pytest.raises(ValueError, match="found what a run with another model"):
        hf_kbit.calibrate(llama(), IDS, bits=2, resume=tmp_path)
