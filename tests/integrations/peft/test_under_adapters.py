"""Quantizing under adapters that are there already, and heads that an adapter trains as a whole."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

import hf_kbit
from hf_kbit import KbitConfig, KbitEmbedding, KbitLinear
from hf_kbit.nn.weight import KbitWeight

IDS = torch.tensor([[1, 2, 3, 4]])
SMALL = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=256)


def dense(path) -> LlamaForCausalLM:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMALL)).save_pretrained(path)
    return LlamaForCausalLM.from_pretrained(path)


@torch.no_grad()
def test_quantizing_under_adapters_is_adding_them_to_a_quantized_model(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "embed_tokens"], modules_to_save=["lm_head"])
    model = get_peft_model(dense(tmp_path / "dense"), config).eval()
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    before, trained = model(IDS).logits, [name for name, p in model.named_parameters() if p.requires_grad]
    done = hf_kbit.quantize_model(model, bits=4, embedding_bits=5)
    assert not [name for name in done.bits if "lora_" in name or "lm_head" in name]
    assert set(done.left.values()) == {"adapter"} and len(done.bits) == 7 * 2 + 1
    assert [name for name, p in model.named_parameters() if p.requires_grad] == trained
    assert isinstance(model.base_model.model.model.embed_tokens.base_layer, KbitEmbedding)
    output = model(IDS).logits
    assert 0 < (output - before).norm() / before.norm() < 0.2

    quantized = KbitConfig(bits=4, embedding_bits=5)
    base = LlamaForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=quantized)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    assert torch.equal(loaded(IDS).logits, output)
    model.merge_adapter()
    assert 0 < (model(IDS).logits - output).norm() / output.norm() < 0.3
    model.unmerge_adapter()
    assert torch.equal(model(IDS).logits, output)
    model.save_pretrained(tmp_path / "again")
    again = PeftModel.from_pretrained(model.unload(), tmp_path / "again").eval()
    assert torch.equal(again(IDS).logits, output)


def test_weights_that_adapters_are_merged_into_stay(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(dense(tmp_path), config).eval()
    model.merge_adapter()
    done = hf_kbit.quantize_model(model, bits=4)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    assert done.left[f"{name}.base_layer"] == "adapter" and type(model.get_submodule(name).base_layer) is nn.Linear
    before = model(IDS).logits
    model.unmerge_adapter()
    assert (model(IDS).logits - before).norm() < 1e-4 * before.norm()


@pytest.mark.parametrize("in_few_bits", [False, True], ids=["head in 16 bits", "head in few bits"])
@pytest.mark.parametrize(
    ("model_class", "config", "head"),
    [
        (RobertaForSequenceClassification, RobertaConfig(**SMALL), "classifier.dense"),
        (
            DistilBertForSequenceClassification,
            DistilBertConfig(dim=64, hidden_dim=128, n_layers=1, n_heads=4),
            "classifier",
        ),
    ],
)
@torch.no_grad()
def test_a_classifier_trains_with_stock_lora(model_class, config, head, in_few_bits, tmp_path):
    """Its head is decoded, for PEFT has that trained as a whole."""
    torch.manual_seed(0)
    model_class(config).save_pretrained(tmp_path / "dense")
    quantized = KbitConfig(bits=4, skip_default_modules=not in_few_bits)
    first = AutoModelForSequenceClassification.from_pretrained(tmp_path / "dense", quantization_config=quantized)
    first.save_pretrained(tmp_path / "quantized")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "quantized").eval()
    assert isinstance(model.get_submodule(head), KbitLinear) == in_few_bits
    output, targets = model(IDS).logits, ["query", "value", "q_lin", "v_lin"]
    adapted = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", target_modules=targets)).eval()
    torch.testing.assert_close(adapted(IDS).logits, output)
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    assert [name for name in trained if "classifier" in name and name.endswith("weight")]
    with torch.enable_grad():
        adapted(IDS, labels=torch.tensor([1])).loss.backward()
    assert all(p.grad is not None for p in trained.values())
    saved = [module for name, module in adapted.named_modules() if "modules_to_save" in name]
    assert saved and not any(isinstance(module, KbitWeight) for module in saved)

    adapted.save_pretrained(tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "quantized")
    again = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(again(IDS).logits, adapted(IDS).logits)
