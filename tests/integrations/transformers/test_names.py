"""Checkpoints of another class, or of other names: every packed layer finds its place, or is refused."""

import json
import re
import shutil

import pytest
import torch
import transformers
from architectures import BY_NAME, text
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, LlamaForCausalLM, LlamaModel

from hf_kbit import KbitConfig, quantize_model
from hf_kbit.nn.weight import KbitWeight

FILE = "model.safetensors"


def packed(model) -> int:
    return sum(isinstance(module, KbitWeight) for module in model.modules())


@torch.no_grad()
def hidden(model) -> torch.Tensor:
    """What comes out of the base model."""
    return getattr(model, "model", model)(**text()).last_hidden_state


def rename(folder, old: str, new: str):
    """A copy of a checkpoint whose names begin with ``new`` where they began with ``old``."""
    other = shutil.copytree(folder, folder.with_name(f"{folder.name}-{new}"))
    renamed = {re.sub(f"^{old}", new, name): tensor for name, tensor in load_file(other / FILE).items()}
    save_file(renamed, other / FILE, {"format": "pt"})
    config = other / "config.json"
    config.write_text(config.read_text().replace(f'"{old}.', f'"{new}.'))
    return other


# --- another class --------------------------------------------------------------------------------

KINDS = ("ForCausalLM", "Model", "ForSequenceClassification")


@pytest.mark.parametrize(
    ("name", "options", "config"),
    [
        ("llama", {}, {}),
        ("llama", {"embedding_bits": 5}, {"tie_word_embeddings": True}),
        ("mixtral", {"embedding_bits": 5, "module_bits": {"lm_head": 4}}, {}),
    ],
)
def test_every_class_loads_the_base_of_every_other(tmp_path, name, options, config):
    """Bit for bit, so that nothing of it was drawn at random; from one file and from several."""
    stem = BY_NAME[name].model_class.removesuffix("ForCausalLM")
    for kind in KINDS:
        model = BY_NAME[name].build(model_class=stem + kind, **config)
        heads = {} if kind == "ForCausalLM" else {"module_bits": {}}
        quantize_model(model, bits=3, **(options | heads))
        expected, base = hidden(model), packed(getattr(model, "model", model))
        for other in set(KINDS) - {kind}:
            folder = tmp_path / f"{kind} {other}"
            model.save_pretrained(folder, max_shard_size="10KB" if other == "Model" else "5GB")
            loaded = getattr(transformers, stem + other).from_pretrained(folder)
            assert packed(getattr(loaded, "model", loaded)) == base, (kind, other)
            assert torch.equal(hidden(loaded), expected), (kind, other)


class Scored(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.first = nn.Linear(config.hidden_size, 1)
        self.post_init()


class Marked(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.second = nn.Linear(config.hidden_size, 2)
        self.post_init()


def test_a_new_head_of_a_class_that_transformers_has_not(tmp_path):
    """As in 16 bits: it is initialised, Transformers reports it, and the rest is what was saved."""
    dense = Scored(AutoConfig.for_model("llama", **BY_NAME["llama"].settings)).eval()
    dense.save_pretrained(tmp_path / "dense")
    model = Scored.from_pretrained(tmp_path / "dense", quantization_config=KbitConfig(bits=3))
    model.save_pretrained(tmp_path / "saved")
    loaded, info = Marked.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert set(info["missing_keys"]) == {"second.weight", "second.bias"}
    assert set(info["unexpected_keys"]) == {"first.weight", "first.bias"}
    assert type(loaded.second) is nn.Linear and 0 < loaded.second.weight.std() < 0.1
    assert torch.equal(hidden(loaded), hidden(model)) and torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def quantize(model: nn.Module) -> nn.Module:
    quantize_model(model.eval(), bits=3)
    return model


# --- names that the caller maps -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_key_mapping(tmp_path, name):
    """Quantized and while quantizing; without it, or with another, nothing is drawn at random."""
    cls, how = BY_NAME[name].cls, {"^old": "model"}
    BY_NAME[name].build().save_pretrained(tmp_path / "dense")
    model = cls.from_pretrained(tmp_path / "dense", quantization_config=KbitConfig(bits=3))
    model.save_pretrained(tmp_path / "saved")
    dense, saved = (rename(tmp_path / folder, "model", "old") for folder in ("dense", "saved"))
    on_the_fly = cls.from_pretrained(dense, key_mapping=how, quantization_config=KbitConfig(bits=3))
    for loaded in (on_the_fly, cls.from_pretrained(saved, key_mapping=how)):
        assert torch.equal(hidden(loaded), hidden(model)) and packed(loaded) == packed(model)
    base = type(model.model).from_pretrained(saved, key_mapping=how)
    assert torch.equal(hidden(base), hidden(model)) and packed(base) == packed(model.model)
    with pytest.raises(ValueError, match=r"old\.layers\.0\.\S+: left over"):
        cls.from_pretrained(saved)
    place = r"old\.layers\.0\.\S+: found no place for it, expected that of layers\.0\.\S+; key_mapping of from_pretr"
    with pytest.raises(ValueError, match=place):
        type(model.model).from_pretrained(saved, key_mapping={"^lm_head": "head"})


def test_the_text_model_of_a_quantized_vision_language_model(tmp_path):
    """Its config has no ``quantization_config`` of its own, so the caller gives one; the folder says what it is."""
    model = quantize(BY_NAME["llava"].build())
    model.save_pretrained(tmp_path)
    model = model.model.language_model
    for cls, new in ((LlamaForCausalLM, "model."), (LlamaModel, "")):
        how = {r"^model\.language_model\.": new}
        loaded = cls.from_pretrained(tmp_path, key_mapping=how, quantization_config=KbitConfig())
        assert packed(loaded) == packed(model) and torch.equal(hidden(loaded), hidden(model))
        loaded.save_pretrained(tmp_path / "text")  # with the names that it was loaded by
        assert torch.equal(hidden(cls.from_pretrained(tmp_path / "text", key_mapping=how)), hidden(model))
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())["text_config"]
    place = r"language_model\.layers\.0\.\S+: found no place for it, expected that of model\.layers\.0"
    with pytest.raises(ValueError, match=place):
        LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=KbitConfig())
