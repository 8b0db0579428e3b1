"""Models of classes that are not in Transformers, whose layers have more to them than a weight and a bias.

A model is one of ``KINDS``: something stands on its layer ``a``. Each goes through a life: quantized while it loads,
saved, loaded again, offloaded, adapted, quantized in memory, dequantized. It computes what it did, but for 5 bits.
"""

import sys
from collections.abc import Callable
from types import MethodType

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from transformers.pytorch_utils import Conv1D

import hf_kbit
from hf_kbit import KbitConfig, KbitEmbedding, KbitLinear
from hf_kbit.integrations.transformers.plain import is_linear, unusual

IDS = torch.tensor([[5, 3, 17, 2, 40, 3]])
ROUNDED = 0.12  # relative error: 5 bits lose some 3% in a layer, of which there are three, and a table


class Twice(nn.Linear):
    def twice(self, x):
        return self(self(x))


class Named(nn.Linear):
    """Nothing but a name and a constructor."""

    def __init__(self, size: int):
        super().__init__(size, size)


def add(**attributes) -> Callable:
    def to(model):
        for name, value in attributes.items():
            setattr(model.a, name, value)

    return to


def own_forward(model) -> None:
    model.a.forward = lambda x, layer=model.a: F.linear(x.relu(), layer.weight, layer.bias)


def own_method(model) -> None:
    model.a.scaled = MethodType(lambda layer, x: 2 * layer(x), model.a)


def closure(model) -> None:
    layer = model.a
    model.apply_a = lambda x: layer(x) + x


def replaced(model, **layers) -> None:
    for name, layer in layers.items():
        setattr(model, name, layer)


def call(model, x):
    return model.a(x)


# {kind: (what is done to the model, how it uses the layer a, what the reason speaks of if a stays in 16 bits)}
KINDS = {
    "plain": (lambda model: None, call, ""),
    "of a class with a name": (lambda model: replaced(model, a=Named(64)), call, ""),
    "Conv1D": (lambda model: replaced(model, a=Conv1D(64, 64)), lambda m, x: m.a(x) * m.a.nf / 64, ""),
    "forward hook": (lambda m: m.a.register_forward_hook(lambda layer, args, y: y.relu()), call, ""),
    "pre-hook": (lambda m: m.a.register_forward_pre_hook(lambda layer, args: (args[0].abs(),)), call, ""),
    "hook with arguments": (
        lambda m: m.a.register_forward_hook(lambda layer, args, kwargs, y: y.abs(), with_kwargs=True),
        call,
        "",
    ),
    "attribute": (add(alpha=3.0), lambda m, x: m.a(x) * m.a.alpha, ""),
    "attribute with a default": (add(alpha=3.0), lambda m, x: x + m.a(x) * getattr(m.a, "alpha", 1.0), ""),
    "attribute of our name": (add(scale=3.0), lambda m, x: m.a(x) * m.a.scale, "scale"),
    "method of the class": (lambda m: replaced(m, a=Twice(64, 64)), lambda m, x: m.a.twice(x), "twice"),
    "method of the instance": (own_method, lambda m, x: m.a.scaled(x), "a.scaled"),
    "forward of the instance": (own_forward, call, "forward"),
    "weight_norm": (lambda m: nn.utils.weight_norm(m.a), call, "weight_g, weight_v"),
    "weight_norm, parametrized": (lambda m: parametrizations.weight_norm(m.a), call, "parametrizations"),
    "spectral_norm": (lambda m: nn.utils.spectral_norm(m.a), call, "weight_orig"),
    "spectral_norm, parametrized": (lambda m: parametrizations.spectral_norm(m.a), call, "parametrizations"),
    "pruned": (lambda m: prune.l1_unstructured(m.a, "weight", 0.5), call, "weight_mask"),
    "parameter": (
        lambda m: replaced(m.a, gain=nn.Parameter(torch.tensor(2.0))),
        lambda m, x: m.a(x) * m.a.gain,
        "gain",
    ),
    "in a list": (lambda m: replaced(m, layers=[m.a, m.b]), lambda m, x: m.layers[0](x), "layers"),
    "in a dict of lists": (lambda m: replaced(m, by={"x": [m.a]}), lambda m, x: m.by["x"][0](x), "by"),
    "bound": (lambda m: replaced(m, apply_a=m.a.forward), lambda m, x: m.apply_a(x), "apply_a"),
    "closed over": (closure, lambda m, x: m.apply_a(x), "apply_a"),
    "weight in a list": (lambda m: replaced(m, weights=[m.a.weight]), call, "weights"),
    "state-dict hook": (lambda m: m.a.register_state_dict_pre_hook(lambda *args: None), call, "state dict"),
}


class ForeignConfig(PreTrainedConfig):
    model_type = "foreign"


class Foreign(PreTrainedModel):
    """A table, two layers, and what ``KINDS`` says of the first of them."""

    config_class = ForeignConfig
    kind, style = "plain", "init"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(96, 64, padding_idx=3)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        KINDS[self.kind][0](self)
        self.norm = nn.LayerNorm(64)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding):
            INITIALISATIONS[self.style](module)

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids):
        return self.norm(self.b(KINDS[self.kind][1](self, self.embed(input_ids))).tanh() + self.embed(input_ids))


def by_torch(module) -> None:
    nn.init.normal_(module.weight)
    if getattr(module, "bias", None) is not None:
        module.bias.data.zero_()


def by_data(module) -> None:
    module.weight.data.normal_(0, 0.02)
    if getattr(module, "padding_idx", None) is not None:
        module.weight.data[module.padding_idx].zero_()
    if getattr(module, "bias", None) is not None:
        module.bias.data.zero_()


def by_zeros(module) -> None:
    for _, parameter in module.named_parameters():
        parameter.data[:] = 0


def by_others(module) -> None:
    with torch.no_grad():
        module.weight.copy_(torch.eye(*module.weight.shape))
    if getattr(module, "bias", None) is not None:
        module.bias = nn.Parameter(torch.zeros_like(module.bias))


INITIALISATIONS = {"init": by_torch, "data": by_data, "zeros": by_zeros, "others": by_others}


def build(monkeypatch, kind: str = "plain", style: str = "init") -> Foreign:
    """A model that was trained, as far as it can be told: no parameter is what an initialisation would make it."""
    monkeypatch.setattr(Foreign, "kind", kind)
    monkeypatch.setattr(Foreign, "style", style)
    torch.manual_seed(0)
    model = Foreign(ForeignConfig()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() < 2))
    return model


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_whole_life(kind, monkeypatch, tmp_path, caplog):
    dense, reason = build(monkeypatch, kind), KINDS[kind][2]
    expected = dense(IDS)
    dense.save_pretrained(tmp_path / "dense")
    model = Foreign.from_pretrained(tmp_path / "dense", quantization_config=KbitConfig(bits=5, embedding_bits=5))
    assert isinstance(model.embed, KbitEmbedding) and isinstance(model.a, KbitLinear) != bool(reason)
    assert isinstance(model.b, KbitLinear) or kind == "in a list"
    output = model(IDS)
    assert error(output, expected) < ROUNDED
    assert not reason or [record for record in caplog.records if f"a {unusual(dense, ['a'])['a']}" in record.message]

    model.save_pretrained(tmp_path / "saved")
    reloaded = Foreign.from_pretrained(tmp_path / "saved")
    assert error(reloaded(IDS), output) < 1e-6
    # What is no more than a hook and a forward cannot be offloaded in 16 bits either.
    places = {"embed": "cpu", "a": "cpu" if reason else "disk", "b": "disk", "norm": "cpu"}
    offloaded = Foreign.from_pretrained(tmp_path / "saved", device_map=places, offload_folder=tmp_path / "offloaded")
    assert error(offloaded(IDS), output) < 1e-6

    adapted = get_peft_model(reloaded, LoraConfig(target_modules=["b"]))
    assert error(adapted(IDS), output) < 1e-6
    assert error(adapted.unload()(IDS), output) < 1e-6

    if reason:
        with pytest.raises(ValueError, match=rf"^a: module_bits asks for 5 bits, but it .*{reason}"):
            hf_kbit.quantize_model(dense, bits=4, module_bits={"a": 5})
    done = hf_kbit.quantize_model(dense, bits=5, embedding_bits=5)
    assert error(dense(IDS), output) < 1e-6 and (reason in done.left.get("a", "") if reason else "a" in done.bits)
    assert error(model.dequantize()(IDS), output) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("missing", [False, True], ids=["all there", "a bias missing"])
@pytest.mark.parametrize("style", INITIALISATIONS)
def test_initialisation_leaves_what_was_loaded(style, missing, monkeypatch, tmp_path):
    dense = build(monkeypatch, style=style)
    expected = dense(IDS)
    state = dense.state_dict()
    dense.save_pretrained(
        tmp_path / "dense", state_dict={n: t for n, t in state.items() if not missing or n != "a.bias"}
    )
    model = Foreign.from_pretrained(tmp_path / "dense", quantization_config=KbitConfig(bits=5, embedding_bits=5))
    assert torch.equal(model.b.bias, dense.b.bias) and isinstance(model.a, KbitLinear)
    assert not model.a.bias.any() if missing else torch.equal(model.a.bias, dense.a.bias)
    dense.a.bias.copy_(model.a.bias)
    assert error(model(IDS), expected if not missing else dense(IDS)) < ROUNDED

    model.save_pretrained(tmp_path / "saved")
    reloaded = Foreign.from_pretrained(tmp_path / "saved")
    before = {name: tensor.clone() for name, tensor in reloaded.state_dict().items()}
    reloaded.init_weights()
    assert all(torch.equal(tensor, before[name]) for name, tensor in reloaded.state_dict().items())
    assert torch.equal(reloaded(IDS), model(IDS))


def test_a_packed_layer_that_the_class_has_made_unusual_is_refused(monkeypatch, tmp_path):
    hf_kbit.quantize_model(model := build(monkeypatch), bits=4)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(Foreign, "kind", "forward of the instance")
    with pytest.raises(
        ValueError, match="a: found it packed, expected 16 bits: a of Foreign has a forward of its own"
    ):
        Foreign.from_pretrained(tmp_path)


@torch.no_grad()
def test_remote_code(monkeypatch, tmp_path):
    """A model whose code comes with it."""
    (tmp_path / "modeling_remote.py").write_text(
        """
from torch import nn
from transformers import PreTrainedModel, PretrainedConfig


class RemoteConfig(PretrainedConfig):
    model_type = "remote"


class RemoteModel(PreTrainedModel):
    config_class = RemoteConfig

    def __init__(self, config):
        super().__init__(config)
        self.fc, self.norm = nn.Linear(64, 64), nn.LayerNorm(64)
        self.post_init()

    def forward(self, x):
        return self.norm(self.fc(x))
"""
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    import modeling_remote

    dense, x = modeling_remote.RemoteModel(modeling_remote.RemoteConfig()).eval(), torch.randn(4, 64)
    nn.init.normal_(dense.fc.weight), nn.init.normal_(dense.fc.bias)
    modeling_remote.RemoteConfig.register_for_auto_class()
    modeling_remote.RemoteModel.register_for_auto_class("AutoModel")
    dense.save_pretrained(tmp_path / "dense")
    trusted = {"trust_remote_code": True}
    model = AutoModel.from_pretrained(tmp_path / "dense", quantization_config=KbitConfig(bits=5), **trusted)
    assert type(model) is not type(dense) and isinstance(model.fc, KbitLinear)
    assert torch.equal(model.fc.bias, dense.fc.bias) and error(model(x), dense(x)) < ROUNDED
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "saved", **trusted)(x), model(x))
    for name in [name for name in sys.modules if "modeling_remote" in name]:
        monkeypatch.delitem(sys.modules, name)


class Doubled(Qwen3MoeExperts):
    def forward(self, *args, **kwargs):
        return 2 * super().forward(*args, **kwargs)


@torch.no_grad()
def test_experts_with_a_forward_of_their_own():
    small = dict(hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_attention_heads=2, head_dim=32)
    small |= dict(num_experts=4, num_experts_per_tok=2, num_key_value_heads=2)
    config = Qwen3MoeConfig(**small, num_hidden_layers=2, vocab_size=96)
    torch.manual_seed(0)
    model = Qwen3MoeModel(config).eval()
    model.layers[0].mlp.experts.__class__ = Doubled
    first = model.layers[1].mlp.experts
    first.forward = MethodType(lambda self, *args: 3 * type(self).forward(self, *args), first)
    expected = model(IDS).last_hidden_state
    done = hf_kbit.quantize_model(model, bits=5)
    assert done.left["layers.0.mlp.experts.down_proj"] == "has the forward of Doubled"
    assert done.left["layers.1.mlp.experts.gate_up_proj"] == "has a forward of its own"
    assert error(model(IDS).last_hidden_state, expected) < ROUNDED


def test_tables_keep_what_stands_on_them(monkeypatch, tmp_path):
    dense = build(monkeypatch)
    dense.embed.register_forward_hook(lambda table, args, rows: rows * table.factor)
    dense.embed.factor = 3.0
    expected = dense(IDS)
    hf_kbit.quantize_model(dense, bits=5, embedding_bits=5)
    assert isinstance(dense.embed, KbitEmbedding) and error(dense(IDS), expected) < ROUNDED

    held = build(monkeypatch)
    held.tables = [held.embed]
    done = hf_kbit.quantize_model(held, bits=5, embedding_bits=5)
    assert done.left["embed"] == "is held by tables too" and type(held.embed) is nn.Embedding


class Steps(nn.Module):
    """Two layers in a block; before they run ``step`` does something with them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(64, 64)})])
        self.a, self.b = self.blocks[0]["a"], self.blocks[0]["b"]

    @torch.no_grad()
    def forward(self, x):
        self.before()
        return self.b(self.a(x).relu())

    def before(self):
        self.step()

    def reset(self):
        nn.init.zeros_(self.a.weight)


class Clamps(Steps):
    def step(self):
        self.a.weight.data.clamp_(-1, 1)


class Scales(Steps):
    def step(self):
        for block in self.blocks:
            block.a.weight.mul_(0.5)


class Halves(Steps):
    def step(self):
        self.a.weight *= 0.5


class Replaces(Steps):
    def step(self):
        self.a.weight.data = self.a.weight.data / 2


class Masks(Steps):
    def step(self):
        self.blocks[0].a.weight[:, 0] = 0


class Calls(Steps):
    def step(self):
        nn.init.zeros_(self.a.weight)


class Outputs(Steps):
    def step(self):
        torch.clamp(self.a.weight, -1, 1, out=self.a.weight)


class Views(Steps):
    def step(self):
        self.a.weight.detach().t().mul_(2)


class Reads(Steps):
    def step(self):
        self.norm = torch.clamp(self.a.weight, -1, 1).mul_(2).norm()


class Aliases(Steps):
    def step(self):
        weight = self.a.weight
        weight.mul_(2)


@pytest.mark.parametrize("kind", [Clamps, Scales, Halves, Replaces, Masks, Calls, Outputs, Views, Reads, Aliases])
def test_what_a_model_writes_into_stays_in_16_bits(kind, caplog):
    """What its code does not show is refused at the write, by the name of the layer and with the way out."""
    model, x = kind(), torch.randn(2, 64)
    done = hf_kbit.quantize_model(model, bits=4)
    if kind in (Reads, Aliases):
        assert len(done.bits) == 2 and not done.left
    else:
        why = f"is written by {kind.__name__}.step"
        assert done.left == {"blocks.0.a": why} and f"blocks.*.a {why} (1 x)" in caplog.text
    if kind is not Aliases:
        assert model(x).isfinite().all()
    asked = kind()
    hf_kbit.quantize_model(asked, module_bits={"a": 4, "b": 4})
    if kind not in (Reads, Views):
        with pytest.raises((RuntimeError, TypeError), match=r"^blocks.0.a.weight: found .*\(modules_to_not_convert\)"):
            asked(x)


def test_is_linear():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    class Moved(Conv1D):
        def forward(self, x):
            return super().forward(x) + 1

    assert is_linear(nn.Linear(2, 2)) and is_linear(Renamed(2, 2)) and is_linear(Conv1D(2, 2))
    assert not is_linear(Scaled(2, 2)) and not is_linear(Moved(2, 2)), "their forward does something else"
    assert not is_linear(nn.MultiheadAttention(4, 2).out_proj), "its weight is read by nn.MultiheadAttention"
    assert not is_linear(KbitLinear(2, 2)) and not is_linear(nn.Linear(0, 2))
