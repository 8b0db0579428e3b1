"""8-bit inputs of whole models: which layers take them, and that the wish for them stays with the model."""

import copy
import json
import logging

import adapters
import peft
import pytest
import small
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import hf_kbit
from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.integrations.transformers.inputs import WISH, inputs_of
from hf_kbit.integrations.transformers.report import logger
from hf_kbit.nn.product import KbitProduct

IDS = torch.arange(2 * 9).reshape(2, 9)


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def quantized(**settings):
    model = small.llama()
    hf_kbit.quantize_model(model, bits=4, **settings)
    return model


def takes(model) -> set[str | None]:
    return {layer.inputs for layer in model.modules() if isinstance(layer, KbitProduct)}


@pytest.fixture(scope="module")
def plain():
    return quantized()


@pytest.fixture(scope="module")
def rounded(plain):
    model = copy.deepcopy(plain)
    assert hf_kbit.set_inputs(model, "int8") == {}
    return model


@pytest.fixture
def said(caplog, monkeypatch):
    """What is logged for a user who asks for it."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    return caplog


def test_on_and_off(plain, rounded):
    exact, near = logits(plain), logits(rounded)
    assert not torch.equal(exact, near) and (exact - near).norm() < 0.05 * exact.norm()
    model = copy.deepcopy(rounded)
    assert torch.equal(logits(model), near) and torch.equal(logits(model.train()), exact)
    assert hf_kbit.set_inputs(model.eval(), None) == {} and torch.equal(logits(model), exact)


@pytest.mark.parametrize("way", ["loaded", "in memory", "calibrated"])
def test_asked_for_while_quantizing(plain, rounded, tmp_path, way):
    """The bytes are those of a model with 16-bit inputs, whose data went through 16-bit inputs too."""
    config, model = KbitConfig(bits=4, inputs="int8"), small.llama()
    if way == "loaded":
        model.save_pretrained(tmp_path)
        model, expected = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config), plain
    elif way == "in memory":
        hf_kbit.quantize_model(model, config)
        expected = plain
    else:
        data = torch.arange(256).view(4, 64)
        hf_kbit.calibrate(model, data, config=config)
        expected = hf_kbit.calibrate(small.llama(), data, bits=4)
    assert takes(model) == {"int8"} and takes(expected) == {None}
    assert small.same(small.tensors(model), small.tensors(expected))
    assert model.hf_quantizer.quantization_config.inputs == "int8"
    if way != "calibrated":
        assert torch.equal(logits(model), logits(rounded))


def test_a_module_of_anybody():
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    hf_kbit.quantize_model(model, bits=4, inputs="int8")
    assert takes(model) == {"int8"}


# --- saved ----------------------------------------------------------------------------------------


def test_saved_as_a_wish(plain, rounded, tmp_path):
    """Beside ``quantization_config``, whose entries every hf_kbit checks, and nowhere else."""
    for name, model in (("plain", plain), ("rounded", rounded)):
        model.save_pretrained(tmp_path / name)
    files = {file.name: file.read_bytes() for file in (tmp_path / "rounded").iterdir()}
    config = json.loads(files.pop("config.json"))
    assert config.pop(WISH) == "int8" and config == json.loads((tmp_path / "plain" / "config.json").read_text())
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "plain").iterdir() if file.name in files}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded")
    assert takes(again) == {"int8"} and torch.equal(logits(again), logits(rounded))
    hf_kbit.set_inputs(again, None)
    again.save_pretrained(tmp_path / "off")
    assert json.loads((tmp_path / "off" / "config.json").read_text()) == config
    assert takes(AutoModelForCausalLM.from_pretrained(tmp_path / "off")) == {None}


def test_a_part_of_a_model(rounded, tmp_path):
    rounded.model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())[WISH] == "int8"


def test_a_wish_that_nobody_knows(plain, tmp_path, said):
    plain.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {WISH: "int7"}))
    assert takes(AutoModelForCausalLM.from_pretrained(tmp_path)) == {None}
    assert "config.json: kbit_inputs: found 'int7', which this hf_kbit does not know: ignored" in said.text


def test_nothing_is_left_of_it_in_16_bits(rounded, tmp_path):
    model = copy.deepcopy(rounded)
    model.save_pretrained(tmp_path / "packed")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed").dequantize()
    model.save_pretrained(tmp_path / "dense")
    assert WISH not in json.loads((tmp_path / "dense" / "config.json").read_text())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_experts(name, tmp_path):
    """Asked for while they load, saved, loaded again, and inputs_of back."""
    adapters.dense(name).save_pretrained(tmp_path / "dense")
    load = AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "dense", quantization_config=KbitConfig(bits=4, inputs="int8"))
    plain = load(tmp_path / "dense", quantization_config=KbitConfig(bits=4))
    exact, near = logits(plain), logits(model)
    assert takes(model) == {"int8"} and 0 < (exact - near).norm() < 0.2 * exact.norm()
    for layer in (layer for layer in model.modules() if isinstance(layer, KbitLinear)):
        layer.inputs = None
    assert not torch.equal(logits(model), exact), "experts round theirs"
    hf_kbit.set_inputs(model, "int8")
    model.save_pretrained(tmp_path / "rounded")
    again = load(tmp_path / "rounded")
    assert takes(again) == {"int8"} and torch.equal(logits(again), near)
    hf_kbit.set_inputs(again, None)
    assert torch.equal(logits(again), exact)


# --- what is left, or refused ---------------------------------------------------------------------


def test_layers_that_take_them_are_counted(said):
    """Those of experts too; a table of embeddings multiplies nothing."""
    model = copy.deepcopy(adapters.dense("mixtral"))
    done = hf_kbit.quantize_model(model, bits=4, embedding_bits=5, inputs="int8")
    assert "model.embed_tokens" in done.bits
    assert hf_kbit.set_inputs(model, "int8") == {} and takes(model) == {"int8"}
    assert said.text.count("hf_kbit: 8-bit inputs in 12 of 12 layers\n") == 2
    assert hf_kbit.set_inputs(model, None) == {} and inputs_of(model) is None


def test_a_layer_that_is_not_transformed(said):
    first, second = (nn.Linear(64, 64).eval() for _ in range(2))
    layers = [KbitLinear.from_linear(first), KbitLinear.from_linear(second, transform="none")]
    model = nn.Sequential(*layers)
    assert hf_kbit.set_inputs(model, "int8") == {"1": "not transformed"}
    assert [layer.inputs for layer in layers] == ["int8", None]
    assert "hf_kbit: 8-bit inputs in 1 of 2 layers; 16-bit ones stay in 1: not transformed (1 x)" in said.text
    with pytest.raises(
        ValueError, match=r"inputs: found '1 \(not transformed\)' in Sequential, expected a layer that"
    ):
        hf_kbit.set_inputs(model[1:], "int8")
    assert hf_kbit.set_inputs(model[1:], None) == {}


def test_refused(plain):
    with pytest.raises(ValueError, match="inputs: found 'no quantized layer' in Linear, expected a layer that takes"):
        hf_kbit.set_inputs(nn.Linear(4, 4), "int8")
    with pytest.raises(ValueError, match=r"inputs: found 'fp8', expected one of \[None, 'int8'\]"):
        hf_kbit.set_inputs(plain, "fp8")
    with pytest.raises(TypeError, match=r"model: found str, expected a torch\.nn\.Module"):
        hf_kbit.set_inputs("model", "int8")


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_adapters_on_top_get_16_bit_inputs(plain, when):
    """The base product alone is rounded; training rounds nothing."""
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    model = copy.deepcopy(plain)
    if when == "before":
        hf_kbit.set_inputs(model, "int8")
    lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    model = peft.get_peft_model(model, lora).eval()
    if when == "after":
        assert hf_kbit.set_inputs(model, "int8") == {}
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        adapter = layer.lora_B["default"](layer.lora_A["default"](x)) * layer.scaling["default"]
        base = layer.base_layer(x)
        assert torch.equal(layer(x), base + adapter)
    packed = copy.deepcopy(layer.base_layer)
    packed.inputs = None
    assert not torch.equal(base, packed(x))
    assert torch.equal(layer.train().base_layer(x), packed(x))
