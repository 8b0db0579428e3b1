"""Layers change in place: what stays, what is found, and what cannot be packed."""

import copy
import pickle
from types import MethodType

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_kbit import KbitEmbedding, KbitLinear, quantize_model
from hf_kbit.nn.linear import KbitConv1D
from hf_kbit.nn.site import obstacle, pack, site_of, sites, unpack, unpacked

X = torch.randn(3, 64)


class Slots(nn.Linear):
    """A class whose objects have a place in memory that nn.Linear's have not."""

    __slots__ = ("extra",)

    def twice(self, x):
        return 2 * self(x)


class Scaled(nn.Embedding):
    def __init__(self, *size):
        super().__init__(*size)
        self.factor = 3.0

    def forward(self, ids):
        return super().forward(ids) * self.factor


KINDS = {
    "linear": (lambda: nn.Linear(64, 48), KbitLinear, KbitLinear),
    "with slots": (lambda: Slots(64, 48), KbitLinear, None),
    "Conv1D": (lambda: Conv1D(48, 64), KbitConv1D, KbitConv1D),
    "table": (lambda: nn.Embedding(96, 64), KbitEmbedding, KbitEmbedding),
    "scaled table": (lambda: Scaled(96, 64), KbitEmbedding, None),
}


def given(layer) -> torch.Tensor:
    return torch.arange(5) if isinstance(layer, nn.Embedding) else X


@pytest.fixture(params=KINDS)
def kind(request):
    build, base, exact = KINDS[request.param]
    torch.manual_seed(0)
    layer = build()
    return nn.ModuleDict({"a": layer}), layer, base, exact


def packed(model) -> nn.Module:
    quantize_model(model, bits=5, embedding_bits=5, skip_default_modules=False)
    return model["a"]


@torch.no_grad()
def test_a_layer_stays_the_object_that_it_is(kind):
    """With all that holds it, hooks, attributes and what its class adds; its bias is the same parameter."""
    model, layer, base, exact = kind
    plain, bias, called = type(layer), getattr(layer, "bias", None), []
    layer.note, held = "mine", [layer]
    layer.register_forward_hook(lambda *_: called.append(1))
    expected = layer(given(layer))
    found = packed(model)
    assert found is layer is held[0] and found.note == "mine" and getattr(found, "bias", None) is bias
    assert isinstance(found, base) and (exact is None or type(found) is exact) and type(found).plain is plain
    error = (found(given(layer)) - expected).norm() / expected.norm()
    assert error < 0.1 and len(called) == 2
    if isinstance(found, Slots):
        found.extra = 7
        assert found.extra == 7 and torch.equal(found.twice(X), 2 * found(X))


@torch.no_grad()
def test_copies_and_pickles_are_of_its_class(kind):
    found = packed(kind[0])
    for other in (copy.deepcopy(found), copy.copy(found), pickle.loads(pickle.dumps(found))):
        assert type(other) is type(found) and torch.equal(other(given(found)), found(given(found)))


@torch.no_grad()
def test_unpacked_it_is_what_it_was(kind):
    model, layer, *_ = kind
    plain, before = type(layer), set(vars(layer))
    decoded = packed(model).dequantize()
    site = site_of(model, "a")
    expected, own = layer(given(layer)), dict(vars(layer))
    dense = nn.Parameter(site.turned(decoded).contiguous())
    with unpacked(site, dense):
        assert type(layer) is plain and layer.weight is dense
        torch.testing.assert_close(layer(given(layer)), expected)
    assert site.is_packed and vars(layer) == own and torch.equal(layer(given(layer)), expected)
    unpack(site, dense)
    assert type(layer) is plain and layer.weight is dense and set(vars(layer)) == before


@torch.no_grad()
@pytest.mark.parametrize("removed", [False, True])
def test_hooks_of_accelerate_call_the_new_forward(removed, monkeypatch):
    """It keeps the forward that a layer had, on the layer itself, also after its hook has gone."""
    from accelerate.hooks import remove_hook_from_module

    model = nn.ModuleDict({"a": nn.Linear(64, 48)})
    weight = packed(copy.deepcopy(model)).weight
    add_hook_to_module(model["a"], ModelHook())
    if removed:
        remove_hook_from_module(model["a"])
    pack(site_of(model, "a"), weight)
    called = []
    monkeypatch.setattr("hf_kbit.weight.scalar.product", lambda *args: called.append(1) or torch.zeros(3, 48))
    model["a"](X)
    assert called, "its own forward, which is quicker than that of nn.Linear on a packed weight"


@torch.no_grad()
def test_a_forward_of_ones_own_stays():
    model = nn.ModuleDict({"a": nn.Linear(64, 48)})
    model["a"].forward = MethodType(lambda self, x: nn.Linear.forward(self, x) + 1, model["a"])
    expected = model["a"](X)
    assert isinstance(packed(model), KbitLinear)
    assert (model["a"](X) - expected).norm() / expected.norm() < 0.1


def test_a_layer_in_two_places_changes_in_both():
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    assert list(sites(model)) == ["a"] and list(sites(model, remove_duplicate=False)) == ["a", "b.0"]
    quantize_model(model, bits=3, skip_default_modules=False)
    assert model["a"] is model["b"][0] is shared and isinstance(shared, KbitLinear)


def with_state_dict_hook():
    layer = nn.Linear(64, 64)
    layer.register_state_dict_pre_hook(lambda *args: None)
    return layer


def parametrized():
    return nn.utils.parametrizations.weight_norm(nn.Linear(64, 64))


def wrong_size():
    layer = nn.Linear(64, 64)
    layer.in_features = 32
    return layer


def with_our_name():
    layer = nn.Linear(64, 64)
    layer.decoding = "mine"
    return layer


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            "has parametrizations besides weight and bias",
        ),
        (with_state_dict_hook, "has hooks on its state dict"),
        (wrong_size, "has a weight [64, 64] for features [64, 32]"),
        (with_our_name, "has decoding, a name that a quantized layer uses"),
        (lambda: nn.Linear(64, 64), ""),
    ],
)
def test_what_cannot_be_packed(build, why):
    model = nn.ModuleDict({"a": build(), "b": nn.Linear(64, 64)})
    assert obstacle(site_of(model, "a")) == why
    done = quantize_model(model, bits=4, skip_default_modules=False)
    assert done.left.get("a", "") == why and isinstance(model["b"], KbitLinear)
    assert isinstance(model["a"], KbitLinear) == (not why)
