"""What is added up of each layer's inputs, against a forward pass of the whole model for each layer."""

import copy
from functools import partial

import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME
from recorder import Recorder
from torch import nn

import hf_kbit
from hf_kbit.calibration import moments, rounding, sensitivity, stream
from hf_kbit.calibration.solving import METHODS
from hf_kbit.nn.site import pack, site_of
from hf_kbit.plan import selection
from hf_kbit.plan.allocation import units

READS_TOKENS = [
    row
    for row in ARCHITECTURES
    if row.name not in ("vit", "swinv2", "swin2sr", "whisper", "llava", "wav2vec2", "hubert", "clip")
]
IDS = torch.randint(5, 90, (5, 9), generator=torch.Generator().manual_seed(3))


def inputs_of(model, name: str, sequence: torch.Tensor) -> torch.Tensor:
    """What a layer is given in a pass of the whole model."""
    given = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: given.append(args[0].flatten(0, -2)))
    stream.forward_pass(model, sequence[None])
    hook.remove()
    return torch.cat(given)


@torch.no_grad()
def moments_by_whole_passes(original, quantized, names, ids, weights) -> list[moments.Moments]:
    """For each group of layers, in the order of use, passes of one sequence at a time: through the model in 16 bits,
    and through that with the groups before quantized. A token counts as much as the ``weights`` of the group's layers
    say on average, or 1."""
    linears, groups, current, found = {original.get_submodule(n): n for n in names}, [], copy.deepcopy(original), []
    calls = []
    hooks = [
        layer.register_forward_pre_hook(lambda module, args: calls.append((module, args[0]))) for layer in linears
    ]
    stream.forward_pass(original, ids)
    for hook in hooks:
        hook.remove()
    for place, (layer, x) in enumerate(calls):
        if place and calls[place - 1][1] is x:
            groups[-1].append(linears[layer])
        else:
            groups.append([linears[layer]])
    for group in groups:
        sums = drift = 0.0
        counts = torch.stack([weights.get(name, torch.ones(ids.shape)) for name in group]).mean(0)
        for sequence, own in zip(ids, counts, strict=True):
            x, dense = inputs_of(current, group[0], sequence), inputs_of(original, group[0], sequence)
            weighted = own[:, None] * x if group[0] in weights else x
            sums, drift = sums + weighted.T @ x, drift + (dense - x).T @ weighted
        found += [moments.Moments(sums, drift)] * len(group)
        for name in group:
            pack(site_of(current, name), quantized.get_submodule(name).weight)
    return found


CASES = [(row, 2, False, 5) for row in READS_TOKENS]
CASES += [(row, 1, True, 9) for row in READS_TOKENS if row.name in ("llama", "gpt2", "bert-masked", "t5")]


@pytest.mark.parametrize(("row", "batch", "diagonal", "length"), CASES, ids=str)
def test_moments(row, batch, diagonal, length, monkeypatch):
    """In parts of one sequence, and in unequal ones, with as many sequences as tokens."""
    model, ids = row.build(), IDS[:, :length]
    dense = copy.deepcopy(model).eval()
    solver = Recorder(diagonal)
    monkeypatch.setitem(METHODS, "recorder", solver)
    monkeypatch.setattr(rounding, "aim", solver.aim)
    weights, find = {}, sensitivity.weigh

    def kept(*given):
        found = find(*given)
        weights.update({name: torch.cat(own) for name, own in found[0].items()})
        return found

    monkeypatch.setattr(sensitivity, "weigh", kept)
    mixture = any(name.endswith(".experts") for name, _ in model.named_modules())
    left = {"modules_to_not_convert": ["experts"]} if mixture else {}  # test_experts.py has those
    hf_kbit.calibrate(model, ids, method="recorder", batch=batch, device="cpu", bits=2, **left)
    names = [name for name, layer in model.named_modules() if isinstance(layer, hf_kbit.KbitLinear)]
    assert sorted(names) == sorted(selection.Packable(dense).choose(hf_kbit.KbitConfig(**left)))
    assert sorted(weights) == sorted(names if stream.predicts_tokens(dense) and not diagonal else ())
    expected = moments_by_whole_passes(dense, model, names, ids, weights)
    assert len(solver.moments) == len(expected) == len(names)
    close = partial(torch.testing.assert_close, rtol=1e-3)
    for sums, found in zip(expected, solver.moments, strict=True):
        limit = 1e-4 * sums.second.max()
        if diagonal:
            close(found.second, sums.second.diagonal(), atol=limit)
            assert found.drift is None
        else:
            close(found.second, sums.second, atol=limit)
            close(found.drift, sums.drift, atol=limit)


def test_units_are_the_outermost_elements_of_lists():
    inner = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    model = nn.ModuleDict({"layers": nn.ModuleList([inner, nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    experts = ["layers.0.experts.0", "layers.0.experts.1"]
    assert units(model, names) == {"layers.0": experts, "layers.1": ["layers.1"], "head": ["head"]}


def test_a_forward_of_an_instance_is_put_back():
    """Such as accelerate's, which moves inputs first."""
    model, calls = BY_NAME["llama"].build(), []
    first, second = model.model.layers[:2]
    forward = first.forward

    def own(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    first.forward = own
    hf_kbit.calibrate(model, IDS, batch=5, method="weighted")
    # The check: all at once, and each of three sequences three times. The search for groups, a pass for each of four,
    # the outputs.
    assert first.forward is own and len(calls) == 1 + 9 + 1 + 4 + 1
    assert "forward" not in vars(second)


def test_what_torch_keeps_of_a_gpu_is_free(monkeypatch):
    of_gpu = {"mem_get_info": (5, 100), "memory_reserved": 7, "memory_allocated": 3}
    for name, found in of_gpu.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, found=found: found)
    assert stream.memory_of(torch.device("cuda", 0)) == (9, 100)


def test_layers_are_grouped_by_what_they_are_given():
    """By position or keyword; those that are called twice, or not at all, too. A run ends where its group is."""
    q, k, out, shared, idle = (nn.Linear(4, 4) for _ in range(5))
    linears, given, ended = {"out": out, "k": k, "idle": idle, "shared": shared, "q": q}, [], []
    shared.register_forward_pre_hook(lambda _, args: given.append(args[0]))

    def run():
        x = torch.ones(2, 4)
        y = shared(out(shared(q(input=x) + k(x))))
        ended.append(1)
        return y

    assert moments.groups(linears, run) == [(names, False) for names in (["q", "k"], ["shared"], ["out"], ["idle"])]
    assert moments.groups({"k": k, "q": q}, run) == [(["q", "k"], True)]
    moments.moments(q, moments.Group(["q", "k"], True), [(run, run)], diagonal=False)
    assert len(ended) == 2, "those that find the groups"
    given.clear()
    twice = moments.moments(shared, moments.Group(["shared"], False), [(run, None)], diagonal=False)
    torch.testing.assert_close(twice.second, sum(x.T @ x for x in given))
    assert len(given) == 2 and twice.drift is None
    none = moments.moments(idle, moments.Group(["idle"], False), [(run, None)], diagonal=False).second
    assert torch.equal(none, torch.zeros(4, 4))


def test_tokens_count_as_much_as_their_weights():
    """Not where they go through a layer twice, for then its inputs are not theirs alone."""
    layer, x = nn.Linear(4, 4), torch.randn(2, 3, 4)
    weights, once = torch.rand(2, 3), moments.Group(["layer"], True)
    run, run_dense = (lambda: layer(x)), (lambda: layer(3 * x))
    found = moments.moments(layer, once, [(run, run_dense)], False, [weights], 0)
    expected = torch.einsum("st,sti,stj->ij", weights, x, x)
    torch.testing.assert_close(found, moments.Moments(expected, 2 * expected))
    turned = [(lambda: layer(x.transpose(0, 1)), lambda: layer(3 * x.transpose(0, 1)))]
    torch.testing.assert_close(moments.moments(layer, once, turned, False, [weights], 1), found)
    alike = moments.moments(layer, once, turned, False)
    assert torch.equal(moments.moments(layer, once, turned, False, [weights], None).second, alike.second)
    twice = [(lambda: layer(layer(x)), None)], False
    group = moments.Group(["layer"], False)
    assert torch.equal(
        moments.moments(layer, group, *twice, [weights], 0).second, moments.moments(layer, group, *twice).second
    )


def test_layers_stand_in_for_others():
    dense, other, own = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    own.forward = forward = own.forward
    x = torch.ones(1, 4)
    before = dense(x), own(x)
    with moments.standing_in({"a": dense, "b": own}, {"a": other, "b": other, "c": other}):
        assert torch.equal(dense(x), other(x)) and torch.equal(own(x), other(x))
    assert torch.equal(dense(x), before[0]) and torch.equal(own(x), before[1])
    assert "forward" not in vars(dense) and own.forward is forward


def test_parts_of_the_data():
    """A layer takes them also if nothing of it is quantized. Passes end after the last layer that is: logits of all
    the data would take more memory than the model."""
    model, seen, logits = BY_NAME["llama"].build(), [], []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])), prepend=True)
    model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    model.lm_head.register_forward_pre_hook(lambda _, args: logits.append(len(args[0])))
    hf_kbit.calibrate(model, IDS, batch=2, method="weighted", modules_to_not_convert=["layers.0"])
    check = [3, 3] + 3 * [1] + 2 * 3 * [1, 1] + 3 * [1, 1]  # at once; one at a time, computed twice, and for the next
    assert seen == [*check, 2, 2, 1, *(2, 2), *(2, 2), *(1, 1)] and not logits
