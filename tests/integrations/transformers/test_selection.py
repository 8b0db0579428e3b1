"""Which modules are quantized: told from how a model uses them, not from names alone."""

import re

import pytest
import torch
import transformers
from architectures import small_config
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from hf_kbit import KbitConfig, KbitLinear, quantize_model
from hf_kbit.plan import selection


def build(class_name, config_name, **kwargs):
    with torch.device("meta"):
        return getattr(transformers, class_name)(getattr(transformers, config_name)(**kwargs))


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
T5 = {"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16}


def test_models_that_read_weights_are_quantized_whole():
    sizes = {"hidden_size": 32, "time_step_rank": 16}
    mamba = build("MambaForCausalLM", "MambaConfig", num_hidden_layers=1, vocab_size=64, **sizes)
    layers = [f"backbone.layers.0.mixer.{child}" for child in ("dt_proj", "in_proj", "out_proj", "x_proj")]
    assert sorted(selection.Packable(mamba).choose(KbitConfig())) == layers
    wavlm = build("WavLMModel", "WavLMConfig", **SMALL)
    layers = {f"encoder.layers.0.attention.{child}_proj" for child in ("q", "k", "v", "out")}
    assert layers <= selection.Packable(wavlm).choose(KbitConfig()).keys()


def test_a_model_that_reads_weights_runs(tmp_path):
    config = transformers.WavLMConfig(**SMALL, conv_dim=(16,), conv_kernel=(10,), conv_stride=(5,))
    transformers.WavLMModel(config).save_pretrained(tmp_path)
    model = transformers.WavLMModel.from_pretrained(tmp_path, quantization_config=KbitConfig(bits=4))
    assert any(isinstance(module, KbitLinear) for module in model.modules())
    assert model(torch.randn(1, 400)).last_hidden_state.isfinite().all()


def test_heads():
    llama = build("LlamaForCausalLM", "LlamaConfig", vocab_size=64, **SMALL)
    assert selection.Packable(llama).reasons == {"lm_head": "head"}
    assert "lm_head" in selection.Packable(llama).choose(KbitConfig(skip_default_modules=False))
    assert selection.Packable(llama).choose(KbitConfig(module_bits={"lm_head": 5}))["lm_head"] == 5
    bert = build("BertForSequenceClassification", "BertConfig", vocab_size=64, **SMALL)
    assert selection.Packable(bert).reasons == {"classifier": "head", "bert.embeddings.token_type_embeddings": "small"}
    base = build("BertModel", "BertConfig", vocab_size=64, **SMALL)
    base.pooler = None
    assert "encoder.layer.0.output.dense" in selection.Packable(base).choose(KbitConfig()), (
        "the end of a layer is no head"
    )


@pytest.mark.parametrize(
    ("kind", "settings", "name", "why"),
    [
        (
            "LlamaForCausalLM",
            {"tie_word_embeddings": True},
            "lm_head",
            "ties its weight to model.embed_tokens: embedd",
        ),
        ("BertForMaskedLM", {}, "cls.predictions.decoder", "ties its weight to bert.embeddings.word_embeddings: emb"),
        ("T5ForConditionalGeneration", {}, "lm_head", "ties its weight to shared: embedding_bits, or a pattern"),
        ("T5ForConditionalGeneration", {}, "encoder.block.0.layer.1.DenseReluDense.wo", "ties its weight or keeps it"),
    ],
)
def test_what_is_tied_or_kept_in_float32_cannot_be_asked_for(kind, settings, name, why):
    shape = T5 if kind.startswith("T5") else {**SMALL, "vocab_size": 64}
    packable = selection.Packable(build(kind, f"{re.sub('For.*', '', kind)}Config", **shape, **settings))
    assert name not in packable.choose(KbitConfig(skip_default_modules=False))
    with pytest.raises(ValueError, match=rf"{name}: module_bits asks for 4 bits, but {kind} {why}"):
        packable.choose(KbitConfig(module_bits={name: 4}))


def test_what_would_not_get_smaller_is_left_unless_asked_for():
    """Held against what layers of 5 bits store: of every kind, on both sides of where they begin to gain."""
    shapes = [(rows, width) for rows in (1, 2, 64, 512) for width in (1, 8, 10, 12, 31, 32, 33, 63)]
    kinds = {"linear": nn.Linear, "conv": Conv1D, "table": nn.Embedding}
    modules = {
        f"{kind}-{rows}-{width}": make(*((width, rows) if kind == "linear" else (rows, width)))
        for kind, make in kinds.items()
        for rows, width in shapes
        if kind != "table" or rows >= selection.FEW_ROWS
    }
    model = nn.ModuleDict({**modules, "end": nn.Linear(64, 64)})
    done = quantize_model(model, bits=5, embedding_bits=5)
    stored = {}
    for name in modules:
        _, *shape = name.split("-")
        layer = KbitLinear(*reversed([int(size) for size in shape]), bits=5, device="meta")
        stored[name] = sum(tensor.nbytes for tensor in layer.packed.values()) < 2 * layer.num_weights
    assert {name: name in done.bits for name in modules} == stored and len({*stored.values()}) == 2
    assert {done.left[name] for name, fits in stored.items() if not fits} == {"small"}
    assert quantize_model(nn.Sequential(nn.Linear(8, 64)), module_bits={"0": 4}).bits == {"0": 4}
    sizes = {**SMALL, "num_experts": 4, "moe_intermediate_size": 8, "vocab_size": 64}
    mixture = selection.Packable(build("Qwen3MoeModel", "Qwen3MoeConfig", **sizes))
    assert mixture.reasons["layers.0.mlp.experts.down_proj"] == "small"
    assert "layers.0.mlp.experts.gate_up_proj" in mixture.choose(KbitConfig())


# --- routers --------------------------------------------------------------------------------------

# A number that no other size of these models is, under each name that configurations have for it.
EXPERTS = 7
NAMES = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
MIXTURE = {
    **dict.fromkeys(NAMES, EXPERTS),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers"), 4),
    "is_moe": True,
}
DBRX = dict(d_model=64, n_heads=4, n_layers=2, vocab_size=96)
DBRX |= {"ffn_config": {"moe_num_experts": EXPERTS, "ffn_hidden_size": 32}}
DBRX |= {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}


def mixture(kind: str):
    """A small model of that type on the meta device."""
    auto_class = AutoModelForCausalLM if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModel
    with torch.device("meta"):
        return auto_class.from_config(
            CONFIG_MAPPING[kind](**DBRX) if kind == "dbrx" else small_config(kind, **MIXTURE)
        )


ROUTERS = {
    "afmoe": {"mlp.router.gate"},
    "dbrx": {"ffn.router.layer"},
    "doge": {"mlp.router_gate"},
    "jetmoe": {"mlp.router.layer", "self_attention.experts.router.layer"},
    "nllb-moe": {"ffn.router.classifier"},
    "qwen2_moe": {"mlp.shared_expert_gate"},
    "switch_transformers": {"mlp.router.classifier"},
}


@pytest.mark.parametrize("kind", ROUTERS)
def test_routers_stay_unless_asked_for(kind):
    packable = selection.Packable(mixture(kind))
    found = {name for name, reason in packable.reasons.items() if reason == "router"}
    endings = {name: ending for name in found for ending in ROUTERS[kind] if name.endswith(f".{ending}")}
    assert endings.keys() == found and set(endings.values()) == ROUTERS[kind]
    chosen = packable.choose(KbitConfig(skip_default_modules=False))
    assert chosen and not found & chosen.keys()
    name = min(found)
    assert packable.choose(KbitConfig(module_bits={name: 5}))[name] == 5


def test_gates_of_dense_layers_are_quantized():
    class Block(nn.Module):
        def __init__(self, **children):
            super().__init__()
            for name, child in children.items():
                self.add_module(name, child)

    gates = {name: nn.Linear(4, 4) for name in ("gate", "gate_proj", "output_gate", "shared_expert_gate")}
    dense, sparse = Block(mlp=Block(**gates)), Block(mlp=Block(**gates, experts=nn.ModuleList()))
    assert not any(selection._is_router(dense, f"mlp.{name}") for name in gates)
    assert {name for name in gates if selection._is_router(sparse, f"mlp.{name}")} == {"gate", "shared_expert_gate"}


@pytest.mark.slow
def test_no_mixture_has_its_router_quantized():
    """Every type that can be built from ``MIXTURE``; sizes near the number of experts are those of routers alone."""
    built = 0
    for model_type in sorted(CONFIG_MAPPING):
        try:
            if (
                not {"num_experts", "n_routed_experts", "num_local_experts"}
                & vars(CONFIG_MAPPING[model_type]()).keys()
            ):
                continue
            model = mixture(model_type)
        except Exception:  # a type needs other settings, or a library
            continue
        built += 1
        packable = selection.Packable(model)
        chosen = packable.choose(KbitConfig(skip_default_modules=False))
        routers = [name for name in chosen if EXPERTS <= packable.sites[name].shape[-2] <= EXPERTS + 1]
        assert not routers, f"{model_type}: {routers}"
    assert built > 40


@pytest.mark.parametrize(
    ("option", "pattern", "kind"),
    [
        *(("module_bits", name, "linear layer, table or experts") for name in ("dwn_proj", "input_layernorm")),
        *(("modules_to_not_convert", name, "module") for name in ("donw_proj", "model.layers.0.", "re:.*mlp.*")),
    ],
)
def test_patterns_that_match_nothing_are_errors(option, pattern, kind):
    llama = build("LlamaForCausalLM", "LlamaConfig", **SMALL, vocab_size=64)
    found = f"{option}[{pattern!r}]: found no {kind} of that name in LlamaForCausalLM"
    for value in (4, None) if option == "module_bits" else (None,):
        with pytest.raises(ValueError, match=re.escape(found)):
            wish = {pattern: value} if option == "module_bits" else [pattern]
            selection.Packable(llama).choose(KbitConfig(**{option: wish}))


def test_modules_not_to_convert_may_be_any():
    """A part of a name is enough, whether it starts or ends with it or neither."""
    llama = build("LlamaForCausalLM", "LlamaConfig", **SMALL, vocab_size=64)
    named = ["norm", "rotary_emb", "lm_head", "layers.0.self_attn", "up_proj"]
    chosen = selection.Packable(llama).choose(KbitConfig(modules_to_not_convert=named))
    assert list(chosen) == ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"]
    for options in ({"module_bits": {"self_attn": None}}, {"modules_to_not_convert": ["self_attn"]}):
        chosen = selection.Packable(llama).choose(KbitConfig(**options))
        assert {name.split(".")[3] for name in chosen} == {"mlp"}
    chosen = selection.Packable(llama).choose(KbitConfig(bits=3, module_bits={"self_attn": 5}))
    assert all(bits == (5 if "self_attn" in name else 3) for name, bits in chosen.items())


def test_layers_outside_the_base_model_are_heads():
    bert = build("BertForMaskedLM", "BertConfig", **SMALL, vocab_size=64)
    t5 = build("T5ForSequenceClassification", "T5Config", **T5)
    wav2vec2 = build("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SMALL)
    for model, head in (
        (bert, "cls.predictions.transform.dense"),
        (t5, "classification_head.dense"),
        (wav2vec2, "projector"),
    ):
        packable = selection.Packable(model)
        assert packable.reasons[head] == "head" and head not in packable.choose(KbitConfig())
        assert head in packable.choose(KbitConfig(skip_default_modules=False))
        assert packable.choose(KbitConfig(module_bits={head: 3}))[head] == 3
        chosen = packable.choose(KbitConfig())
        assert chosen and all(name.startswith(selection.base_of(model)) for name in chosen)
