"""Which modules are quantized: told from how a model uses them, not from names alone."""

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.integrations.transformers import selection


class Reader(nn.Module):
    """Uses its layers in every way that matters."""

    def __init__(self):
        super().__init__()
        self.called, self.multiplied, self.cast_to, self.written, self.deep = (nn.Linear(4, 4) for _ in range(5))
        self.written.weight = nn.Parameter(torch.zeros(4, 4))
        nn.init.normal_(self.called.weight)

    def forward(self, x):
        # self.called.weight in a comment is no use of it
        return self.helper(self.called(x) @ self.multiplied.weight.T)

    def helper(self, x):
        return self.written(x.to(self.cast_to.weight.dtype))


class Heir(Reader):
    def helper(self, x):
        return x + sum(self.deep.weight.flatten())


def test_reads_are_found_in_the_code():
    assert selection._children_read(Reader) == {"multiplied", "cast_to"}
    assert selection._children_read(Heir) == {"multiplied", "deep"}, "an overridden method reads no more"
    assert selection._children_read(nn.Linear) == frozenset()


def build(class_name, config_name, **kwargs):
    with torch.device("meta"):
        return getattr(transformers, class_name)(getattr(transformers, config_name)(**kwargs))


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def test_mamba_and_wavlm_read_weights():
    mamba = build("MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=1, vocab_size=64)
    read = [name for name, reason in selection.skips(mamba).items() if reason == "read"]
    assert sorted(read) == [f"backbone.layers.0.mixer.{child}" for child in ("dt_proj", "out_proj", "x_proj")]
    assert list(selection.choose(mamba, KbitConfig())) == ["backbone.layers.0.mixer.in_proj"]
    assert len(selection.choose(mamba, KbitConfig(skip_default_modules=False))) == 1, (
        "only the head is cleared by that"
    )
    assert selection.choose(mamba, KbitConfig(module_bits={"out_proj": 3}))["backbone.layers.0.mixer.out_proj"] == 3

    wavlm = build("WavLMModel", "WavLMConfig", **SMALL)
    read = {name.rpartition(".")[2] for name, reason in selection.skips(wavlm).items() if reason == "read"}
    assert read == {"q_proj", "k_proj", "v_proj", "out_proj"}


def test_a_model_that_reads_weights_runs(tmp_path):
    config = transformers.WavLMConfig(**SMALL, conv_dim=(16,), conv_kernel=(10,), conv_stride=(5,))
    transformers.WavLMModel(config).save_pretrained(tmp_path)
    model = transformers.WavLMModel.from_pretrained(tmp_path, quantization_config=KbitConfig(bits=4))
    assert any(isinstance(module, KbitLinear) for module in model.modules())
    assert model(torch.randn(1, 400)).last_hidden_state.isfinite().all()


def test_heads():
    llama = build("LlamaForCausalLM", "LlamaConfig", vocab_size=64, **SMALL)
    assert selection.skips(llama) == {"lm_head": "head"}
    assert "lm_head" in selection.choose(llama, KbitConfig(skip_default_modules=False))
    assert selection.choose(llama, KbitConfig(module_bits={"lm_head": 5}))["lm_head"] == 5
    bert = build("BertForSequenceClassification", "BertConfig", vocab_size=64, **SMALL)
    assert selection.skips(bert) == {"classifier": "head"}
    base = build("BertModel", "BertConfig", vocab_size=64, **SMALL)
    base.pooler = None
    assert "encoder.layer.0.output.dense" in selection.choose(base, KbitConfig()), "the end of a layer is no head"


def test_what_is_tied_or_kept_in_float32_cannot_be_asked_for():
    tied = build("LlamaForCausalLM", "LlamaConfig", vocab_size=64, tie_word_embeddings=True, **SMALL)
    assert "lm_head" not in selection.choose(tied, KbitConfig(skip_default_modules=False))
    with pytest.raises(ValueError, match="lm_head: module_bits asks for 4 bits, but LlamaForCausalLM ties its weight"):
        selection.choose(tied, KbitConfig(module_bits={"lm_head": 4}))
    t5 = build("T5ForConditionalGeneration", "T5Config", d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16)
    assert {name for name, reason in selection.skips(t5).items() if reason == "fixed"} >= {
        "encoder.block.0.layer.1.DenseReluDense.wo"
    }


def test_patterns_that_match_nothing_are_errors():
    llama = build("LlamaForCausalLM", "LlamaConfig", vocab_size=64, **SMALL)
    with pytest.raises(
        ValueError, match=r"module_bits\['dwn_proj'\]: found no linear layer of that name in LlamaForCausalLM"
    ):
        selection.choose(llama, KbitConfig(module_bits={"dwn_proj": 4}))


def test_is_linear():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Renamed(nn.Linear):
        pass

    attention = nn.MultiheadAttention(8, 2)
    assert (
        selection.is_linear(nn.Linear(2, 2))
        and selection.is_linear(Renamed(2, 2))
        and selection.is_linear(Conv1D(2, 2))
    )
    assert not selection.is_linear(Scaled(2, 2)), "its forward does something else"
    assert not selection.is_linear(attention.out_proj), "its weight is read by nn.MultiheadAttention"
    assert not selection.is_linear(KbitLinear(2, 2)) and not selection.is_linear(nn.Linear(0, 2))


def test_a_shared_module_is_replaced_everywhere():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    selection.replace_modules(model, {"b.0": nn.Identity()})
    assert model["a"] is model["b"][0] and isinstance(model["a"], nn.Identity)
