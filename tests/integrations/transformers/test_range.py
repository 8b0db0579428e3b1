"""Layers of which a part is too small beside their largest weight for packed scales: what becomes of them is said."""

import re
from pathlib import Path

import peft
import pytest
import torch
from architectures import BY_NAME
from torch import nn
from torch.nn.utils import parametrizations
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig, KbitEmbedding, KbitLinear, quantize_model
from hf_kbit.integrations.transformers import parallel, quantizer
from hf_kbit.nn.site import site_of
from hf_kbit.nn.weight import KbitWeight

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 128}
IDS = torch.randint(5, 90, (4, 12), generator=torch.Generator().manual_seed(1))
# {architecture: (what is left in 16 bits, what is not transformed)}
ODD = {
    "llama": ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj", "model.embed_tokens"),
    "gpt2": ("transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_fc", "transformer.wte"),
    "t5": ("decoder.block.0.layer.0.SelfAttention.k", "encoder.block.1.layer.1.DenseReluDense.wi_1", "shared"),
    "qwen3_moe": ("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj", None),
}


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".safetensors", ".json")}


def rows(model, name: str) -> torch.Tensor:
    """The weight with its outputs first, whatever the order in the model."""
    weight = site_of(model, name).weight.data
    return weight.mT if name.startswith("transformer.h") else weight


def narrow(weight: torch.Tensor) -> torch.Tensor:
    """A weight of which a quarter of the rows, or of the experts, is 5,000 times smaller than the rest."""
    weight[: len(weight) // 4] *= 2e-4
    return weight


def wide(weight: torch.Tensor) -> torch.Tensor:
    """One that no exponent holds."""
    weight[(0,) * weight.dim()] = 1e7 * weight.abs().max()
    return weight


@pytest.fixture
def lines(monkeypatch):
    """What is logged as a warning."""
    found = []
    monkeypatch.setattr(quantizer.logger, "warning", lambda text, *args: found.append(text % args))
    return found


@pytest.mark.parametrize("name", ODD)
def test_left_in_16_bits_or_without_a_transform(name, lines, tmp_path):
    """While loading and in memory, to the same bytes, which load again; tables too, and what is tied to them."""
    architecture, (left, untransformed, table) = BY_NAME[name], ODD[name]
    model, config = architecture.build(), KbitConfig(bits=4, embedding_bits=4)
    wide(rows(model, left))
    narrow(rows(model, untransformed))
    if table is not None:
        wide(rows(model, table))
    model.save_pretrained(tmp_path / "dense")
    dense = architecture.cls.from_pretrained(tmp_path / "dense")
    loaded = architecture.cls.from_pretrained(tmp_path / "dense", quantization_config=config)
    changed, kept = lines
    assert re.fullmatch(
        rf"hf_kbit: quantized without a transform: {untransformed} \([\d,]+ of [\d,]+ rows .*\)", changed
    )
    assert kept.startswith("hf_kbit: left in 16 bits: ") and all(each in kept for each in (left, table or ""))
    for each in filter(None, (left, table)):
        assert torch.equal(site_of(loaded, each).weight, site_of(dense, each).weight)
        found, expected = (site_of(model, each).home for model in (loaded, dense))
        assert type(found) is type(expected) or "experts" in each
        for own, before in expected.named_parameters() if "experts" not in each else ():
            assert torch.equal(found.get_parameter(own), before) and found.get_parameter(own).requires_grad, own
    for target, source in getattr(dense, "all_tied_weights_keys", {}).items():
        assert loaded.get_parameter(target) is loaded.get_parameter(source)
    layer, expected = loaded.get_submodule(untransformed), rows(dense, untransformed)
    assert layer.decoding.transform == "none" and layer.bits == 4
    small = slice(len(expected) // 4)
    error = (layer.dequantize() - expected)[small].norm() / expected[small].norm()
    assert error < 0.11, "as of 4 bits without a transform; 1 before"

    done = quantize_model(model, config)
    assert {each for each, why in done.left.items() if why == "range"} == {left, table} - {None}
    assert not {left, table} & done.bits.keys() and untransformed in done.bits
    for each, folder in ((loaded, "loaded"), (model, "in memory")):
        each.save_pretrained(tmp_path / folder)
    assert files(tmp_path / "in memory") == files(tmp_path / "loaded")
    again = architecture.cls.from_pretrained(tmp_path / "loaded")
    inputs = architecture.inputs()
    torch.testing.assert_close(again(**inputs)[0], model(**inputs)[0], rtol=0, atol=0)


def llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SHAPE, **settings)).eval()


@pytest.mark.parametrize("method", ["feedback", "weighted"])
def test_with_data(method, lines):
    model = llama(tie_word_embeddings=True)
    first, last = model.model.layers
    wide(first.mlp.up_proj.weight.data)
    narrow(last.mlp.up_proj.weight.data)
    kept, before = first.mlp.up_proj.weight.clone(), last.mlp.up_proj.weight.clone()
    wide(model.model.embed_tokens.weight.data)
    done = quantize_model(model, bits=4, embedding_bits=5, data=IDS, method=method)
    assert [name for name, why in done.left.items() if why == "range"] == [
        "model.embed_tokens",
        "model.layers.0.mlp.up_proj",
    ]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(first.mlp.up_proj.weight, kept)
    layer = last.mlp.up_proj
    assert layer.decoding.transform == "none" and len(lines) == 2
    error = (layer.dequantize() - before)[:24].norm() / before[:24].norm()
    assert error < 0.3, "feedback moves weights, but none to zero"


def test_two_weights_that_the_model_ties():
    """A checkpoint may have a table that is left and a head that is not; a head that is left takes the table along."""
    for odd in ("model.embed_tokens.weight", "lm_head.weight"):
        model = llama(tie_word_embeddings=True)
        tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2
        wide(tensors[odd])
        config = KbitConfig(bits=4, embedding_bits=5)
        loaded = LlamaForCausalLM.from_pretrained(
            None, config=model.config, state_dict=dict(tensors), quantization_config=config
        )
        for name, tensor in tensors.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                layer = loaded.get_submodule(name.removesuffix(".weight"))
                assert not (name == odd and isinstance(layer, KbitWeight))
                found = layer.dequantize() if isinstance(layer, KbitWeight) else layer.weight
                assert ((found - tensor).norm() / tensor.norm()) < 0.1


def test_a_state_dict_without_files():
    """The config says what was left, where no header of a file does."""
    model = llama()
    wide(model.model.layers[0].mlp.up_proj.weight.data)
    quantize_model(model, bits=4)
    loaded = LlamaForCausalLM.from_pretrained(
        None,
        config=model.config,
        state_dict=model.state_dict(),
        quantization_config=KbitConfig.from_dict(model.config.quantization_config.to_dict()),
    )
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_several_processes_refuse_it(monkeypatch, tmp_path):
    """Rules have sharded what is to be packed by then."""
    model = llama()
    wide(model.model.layers[0].mlp.up_proj.weight.data)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(parallel, "is_shared", lambda config: True)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj: found that 95 of 96 rows .*modules_to_not_conv"):
        LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=KbitConfig(bits=4))


def test_layers_by_hand_and_merged_adapters_warn():
    dense = nn.Linear(64, 64)
    narrow(dense.weight.data)
    with pytest.warns(UserWarning, match=r"weight: 16 of 64 rows .*; quantized without a transform"):
        KbitLinear.from_linear(dense)
    wide(dense.weight.data)
    with pytest.warns(UserWarning, match=r"weight: 63 of 64 rows .*, and are lost. Leave the layer in 16 bits"):
        KbitLinear.from_linear(dense)
    table = nn.Embedding(100, 64)
    wide(table.weight.data)
    with pytest.warns(UserWarning, match="99 of 100 rows"):
        KbitEmbedding.from_embedding(table)
    dense = nn.Linear(64, 64)
    model = nn.Sequential(KbitLinear.from_linear(dense))
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    adapter = model.base_model.model[0]
    with torch.no_grad():
        adapter.lora_B["default"].weight.zero_()[0] = 1e6
    with pytest.warns(UserWarning, match=r"63 of 64 rows .* lost"):
        model.merge_adapter()


def test_a_module_of_nobody(lines):
    layers = [
        nn.Linear(64, 64),
        nn.ReLU(),
        nn.Linear(64, 64),
        parametrizations.weight_norm(nn.Linear(64, 64)),
        nn.ReLU(),
    ]
    model = nn.Sequential(*layers)
    wide(model[0].weight.data)
    narrow(model[2].weight.data)
    done = quantize_model(model, bits=4)
    assert done.left == {"0": "range", "3": "has parametrizations besides weight and bias"}
    assert done.bits == {"2": 4} and type(model[0]) is nn.Linear
    assert [line.split(" (")[0] for line in lines] == [
        f"hf_kbit: left in 16 bits, for quantized layers cannot take their places: 3 {done.left['3']}",
        "hf_kbit: quantized without a transform: 2",
        "hf_kbit: left in 16 bits: 0",
    ]
