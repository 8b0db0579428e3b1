"""A model whose layers keep something is calibrated as if it read all sequences at once, or refused by name."""

import threading
from types import SimpleNamespace

import pytest
import torch
from small import llama, same, tensors
from torch import nn

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.calibration import check, layerwise, moments, sensitivity, stream
from hf_kbit.calibration.widths import measure
from hf_kbit.plan import selection
from hf_kbit.plan.allocation import units

IDS = torch.randint(5, 90, (5, 16), generator=torch.Generator().manual_seed(3))
CPU = torch.device("cpu")


def with_layers(make, **settings):
    """A model whose layers do ``make(place, forward, hidden, **kwargs)`` in the place of ``forward(hidden, ...)``."""
    model = llama(num_hidden_layers=3, **settings)
    for place, layer in enumerate(model.model.layers):

        def forward(hidden, *args, place=place, original=layer.forward, **kwargs):
            return make(place, original, hidden, *args, **kwargs)

        layer.forward = forward
    return model


def through(container):
    """The first layer leaves what it is given in an object that all layers are given, and others add it to theirs."""

    def build():
        inner = llama(num_hidden_layers=3)
        decoder = inner.model
        own = decoder.forward

        def forward(*args, **kwargs):
            return own(*args, **kwargs, state=container())

        decoder.forward = forward
        for place, layer in enumerate(decoder.layers):

            def run(hidden, *args, state, place=place, original=layer.forward, **kwargs):
                kept = state if isinstance(state, list) else vars(state).setdefault("kept", [])
                kept.append(hidden.clone())
                # As many as layers before it, and itself: one that is computed again finds more.
                return original(hidden + 0.5 * sum(kept) / len(kept) + len(kept) - place, *args, **kwargs)

            layer.forward = run
        return inner

    return build


def writes_into_its_input():
    def make(place, original, hidden, *args, **kwargs):
        hidden.mul_(1.5)
        return original(hidden, *args, **kwargs)

    return with_layers(make)


def threads() -> int:
    """But for tqdm's own."""
    return sum(type(thread) is threading.Thread for thread in threading.enumerate())


def given_to(model, names, ids) -> dict[str, torch.Tensor]:
    found = {}
    with stream.hooked({n: model.get_submodule(n) for n in names}, lambda n, x, *_: found.update({n: x.clone()})):
        stream.forward_pass(model, ids)
    return found


@pytest.mark.parametrize("build", [through(list), through(SimpleNamespace), writes_into_its_input])
@torch.no_grad()
def test_what_one_layer_leaves_for_another(build, monkeypatch):
    """In an object that layers are given, or in their input: each batch has its own, however often layers run, and
    gradients are found that way too, unless an input is no more what it was."""
    found, told_of, find = {}, [], moments.moments
    monkeypatch.setattr(sensitivity.logger, "warning", lambda line, *how: told_of.append(line % how))

    def told(linear, group, runs, *others):
        calls = [x for _, run in runs for x, *_ in moments.given(linear, run, group.once)]
        found.update(dict.fromkeys(group.names, torch.cat(calls)))
        return find(linear, group, runs, *others)

    monkeypatch.setattr(moments, "moments", told)
    model = hf_kbit.calibrate(build(), IDS, bits=3, batch=2, tune=10, tune_whole=False)
    expected = given_to(build(), found, IDS)
    assert len(told_of) == (build is writes_into_its_input)
    assert len(found) == 21 and len([m for m in model.modules() if isinstance(m, hf_kbit.KbitLinear)]) == 21
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], rtol=1e-4, atol=1e-4)


def counts_calls():
    calls = [0, 0, 0]

    def make(place, original, hidden, *args, **kwargs):
        calls[place] += 1
        return original(hidden * calls[place], *args, **kwargs)

    return with_layers(make)


def keeps_an_attribute_of_the_model():
    kept = []

    def make(place, original, hidden, *args, **kwargs):
        if place == 0:
            kept[:] = [hidden]
        other = kept[0] if kept[0].shape == hidden.shape else hidden
        return original(hidden + other if place == 2 else hidden, *args, **kwargs)

    return with_layers(make)


def draws_random_numbers():
    return with_layers(lambda _, original, x, *args, **kwargs: original(x + torch.rand_like(x), *args, **kwargs))


def mixes_sequences():
    return with_layers(lambda _, original, x, *args, **kwargs: original(x - x.mean(0), *args, **kwargs))


def goes_two_ways():
    """Through its last layer only with an even first token."""
    model = llama(num_hidden_layers=3)
    forward = model.model.forward

    def skips(input_ids, **kwargs):
        layers, skipped = model.model.layers, input_ids[0, 0] % 2
        model.model.config.num_hidden_layers = 2 if skipped else len(layers)
        return forward(input_ids=input_ids, **kwargs)

    model.model.forward = skips
    return model


REFUSED = {
    counts_calls: r"layers\.0\.\S+: found inputs that differ by .*%.* modules_to_not_convert, or quantize while load",
    keeps_an_attribute_of_the_model: r"layers\.2\.\S+: found inputs that differ",
    draws_random_numbers: r"layers\.0\.\S+: found inputs that differ .* or random numbers are drawn",
    mixes_sequences: r"layers\.0\.\S+: found inputs that differ",
    goes_two_ways: r"layers\.2: found that \d of 3 batches of sequences go through it, and others",
}


@pytest.mark.parametrize("build", REFUSED)
def test_what_cannot_be_kept_apart_is_refused(build):
    """Before anything changes, by name, and nothing of ours is left in the model."""
    ids = IDS.clone()
    ids[:3, 0] = torch.tensor([6, 8, 7])
    model, before_it = build(), threads()
    before, forwards = tensors(model), [vars(module).get("forward") for module in model.modules()]
    with pytest.raises(ValueError, match=REFUSED[build]):
        hf_kbit.calibrate(model, ids, bits=3)
    assert same(tensors(model), before) and threads() == before_it
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_rounding_is_that_of_the_dtype_between_layers():
    """A CPU computes a model in bfloat16 in float32, and its layers hand on bfloat16 all the same."""

    def make(place, original, hidden, *args, **kwargs):
        return original(hidden * (1 + 2.0**-6 if len(hidden) > 1 else 1.0), *args, **kwargs)

    with pytest.raises(ValueError, match="found inputs that differ by"):
        hf_kbit.calibrate(with_layers(make), IDS, method="weighted", bits=3)
    hf_kbit.calibrate(with_layers(make).bfloat16(), IDS, method="weighted", bits=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_are_lost(dtype):
    """Those of layers that write into their input are of another one where they are computed again: tokens count
    alike, which the log says, and widths are refused."""
    model = writes_into_its_input().to(dtype)
    with pytest.raises(ValueError, match=r"layers\.\d\.\S+: found gradients that differ by .*%"):
        measure(model, IDS, KbitConfig(bits=2))
    names = list(selection.Packable(model).choose(KbitConfig()))
    assert sensitivity.weigh(model, dict.fromkeys(names, 0), [IDS], CPU) == ({}, {})


# --- where sequences are --------------------------------------------------------------------------


class Turned(nn.Module):
    """Inputs of ``linear`` as ``turn`` makes them of ``[sequences, tokens, K]``."""

    def __init__(self, linear, turn, back):
        super().__init__()
        self.linear, self.turn, self.back = linear, turn, back

    def forward(self, x):
        return self.back(self.linear(self.turn(x)), len(x))


TURNS = {
    "first": (lambda x: x, lambda y, n: y, 0),
    "second": (lambda x: x.transpose(0, 1), lambda y, n: y.transpose(0, 1), 1),
    "in one with tokens": (lambda x: x.flatten(0, 1), lambda y, n: y.view(n, -1, y.shape[-1]), 0),
    "after another": (lambda x: torch.stack([x, -x]), lambda y, n: y[0] - y[1], 1),
    "after tokens, in one": (
        lambda x: x.transpose(0, 1).flatten(0, 1),
        lambda y, n: y.view(-1, n, y.shape[-1]).transpose(0, 1),
        None,
    ),
    "in none": (lambda x: x.new_ones(7, x.shape[-1]), lambda y, n: y.mean(0), None),
}


@pytest.mark.parametrize("kind", TURNS)
@pytest.mark.parametrize("tokens", [3, 16])
def test_the_dimension_of_sequences(kind, tokens):
    """Also of as many tokens as there are sequences; rows of tokens are told apart by it."""
    turn, back, dimension = TURNS[kind]
    model = llama(num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = Turned(mlp.up_proj, turn, back)
    name, ids = "model.layers.0.mlp.up_proj.linear", IDS[:, :tokens]
    found = check.check(model, units(model, [name]), [ids], CPU)
    assert found == {name: dimension}
    x = given_to(model, [name], ids)[name]
    rows = check.rows_of(x, found[name], len(ids))
    if dimension is None:
        assert rows is None
    else:
        alone = torch.cat([given_to(model, [name], row[None])[name].flatten(0, -2)[None] for row in ids])
        torch.testing.assert_close(rows, alone, rtol=1e-4, atol=1e-5)


def test_sequences_that_are_too_few_are_made_more():
    """Short ones are cut as long as the shortest."""
    sample = check.sample_of([torch.arange(4)[None], torch.arange(5, 11)[None]])
    assert sample.shape == (3, 4) and len({tuple(row.tolist()) for row in sample}) == 3
    assert check.sample_of([torch.zeros(9, 500, dtype=torch.int64)]).shape == check.SAMPLE


# --- errors in the midst --------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, RuntimeError])
@pytest.mark.parametrize("place", [0, 1])
def test_a_run_that_stops(place, error, monkeypatch, tmp_path):
    """Leaves the model as it was, or says what is packed and how to go on; nothing of ours is left in it."""
    told, model, solve = [], llama(tie_word_embeddings=True), layerwise.round_linear
    monkeypatch.setattr(layerwise.logger, "error", lambda line, *how: told.append(line % how))

    def stop(name, *others):
        if name == f"model.layers.{place}.mlp.down_proj":
            raise error("stop")
        solve(name, *others)

    monkeypatch.setattr(layerwise, "round_linear", stop)
    before, before_it = tensors(model), threads()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(error, match="stop"):
        hf_kbit.calibrate(model, IDS, bits=3, batch=2, resume=tmp_path if place else None)
    assert threads() == before_it and not any("forward" in vars(module) for module in model.modules())
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    if not place:
        assert same(tensors(model), before) and [type(module) for module in model.modules()] == kinds and not told
        return
    (line,) = told
    assert "stopped with 7 layers packed, model.layers.0.mlp.down_proj the last" in line and str(tmp_path) in line
    monkeypatch.undo()
    expected = hf_kbit.calibrate(llama(tie_word_embeddings=True), IDS, bits=3, batch=2)
    again = hf_kbit.calibrate(llama(tie_word_embeddings=True), IDS, bits=3, batch=2, resume=tmp_path)
    assert same(tensors(again), tensors(expected))
