"""Which modules are quantized: told from how a model uses them, not from names alone."""

import re

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_kbit import KbitConfig, KbitLinear, allocation
from hf_kbit.integrations.transformers import selection


def build(class_name, config_name, **kwargs):
    with torch.device("meta"):
        return getattr(transformers, class_name)(getattr(transformers, config_name)(**kwargs))


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def test_models_that_read_weights_are_quantized_whole():
    mamba = build("MambaForCausalLM", "MambaConfig", hidden_size=32, num_hidden_layers=1, vocab_size=64)
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


def test_what_is_tied_or_kept_in_float32_cannot_be_asked_for():
    tied = build("LlamaForCausalLM", "LlamaConfig", vocab_size=64, tie_word_embeddings=True, **SMALL)
    assert "lm_head" not in selection.Packable(tied).choose(KbitConfig(skip_default_modules=False))
    with pytest.raises(ValueError, match="lm_head: module_bits asks for 4 bits, but LlamaForCausalLM ties its weight"):
        selection.Packable(tied).choose(KbitConfig(module_bits={"lm_head": 4}))
    t5 = build("T5ForConditionalGeneration", "T5Config", d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16)
    assert {name for name, reason in selection.Packable(t5).reasons.items() if reason == "fixed"} >= {
        "encoder.block.0.layer.1.DenseReluDense.wo"
    }


# --- routers --------------------------------------------------------------------------------------

EXPERTS = 7  # a number that no other size of these models is
MIXTURE = dict(
    vocab_size=96, hidden_size=64, d_model=64, intermediate_size=64, encoder_ffn_dim=64, decoder_ffn_dim=64, d_ff=64,
    num_hidden_layers=4, num_layers=4, encoder_layers=4, decoder_layers=4, num_decoder_layers=4,
    num_attention_heads=4, num_heads=4, encoder_attention_heads=4, decoder_attention_heads=4, num_key_value_heads=2,
    head_dim=16, d_kv=16, max_position_embeddings=64, moe_intermediate_size=32, num_experts=EXPERTS,
    n_routed_experts=EXPERTS, num_local_experts=EXPERTS, moe_num_experts=EXPERTS, num_experts_per_tok=2,
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_group=1, topk_group=1,
    shared_expert_intermediate_size=32, is_moe=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
DBRX = dict(
    d_model=64,
    n_heads=4,
    n_layers=2,
    vocab_size=96,
    ffn_config={"moe_num_experts": EXPERTS, "ffn_hidden_size": 32},
    attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
)


def mixture(model_type, **settings):
    """A small model of that type on the meta device."""
    config_class = CONFIG_MAPPING[model_type]
    if not settings:
        defaults = config_class()
        settings = {name: value for name, value in MIXTURE.items() if hasattr(defaults, name)}
    auto_class = AutoModelForCausalLM if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else AutoModel
    with torch.device("meta"):
        return auto_class.from_config(config_class(**settings))


ROUTERS = [
    ("afmoe", {}, {"mlp.router.gate"}),
    ("dbrx", DBRX, {"ffn.router.layer"}),
    ("doge", {}, {"mlp.router_gate"}),
    ("jetmoe", {}, {"mlp.router.layer", "self_attention.experts.router.layer"}),
    ("nllb-moe", {}, {"ffn.router.classifier"}),
    ("qwen2_moe", {}, {"mlp.shared_expert_gate"}),
    ("switch_transformers", {}, {"mlp.router.classifier"}),
]


@pytest.mark.parametrize(("model_type", "settings", "routers"), [pytest.param(*row, id=row[0]) for row in ROUTERS])
def test_routers_stay_unless_asked_for(model_type, settings, routers):
    model = mixture(model_type, **settings)
    found = {name for name, reason in selection.Packable(model).reasons.items() if reason == "router"}
    endings = {name: ending for name in found for ending in routers if name.endswith(f".{ending}")}
    assert endings.keys() == found and set(endings.values()) == routers
    chosen = selection.Packable(model).choose(KbitConfig(skip_default_modules=False))
    assert chosen and not found & chosen.keys()
    name = min(found)
    assert selection.Packable(model).choose(KbitConfig(module_bits={name: 5}))[name] == 5


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
        chosen = selection.Packable(model).choose(KbitConfig(skip_default_modules=False))
        routers = [name for name in chosen if EXPERTS <= allocation.dense_shape(model, name)[-2] <= EXPERTS + 1]
        assert not routers, f"{model_type}: {routers}"
    assert built > 40


def test_patterns_that_match_nothing_are_errors():
    llama = build("LlamaForCausalLM", "LlamaConfig", vocab_size=64, **SMALL)
    with pytest.raises(
        ValueError, match=r"module_bits\['dwn_proj'\]: found no linear layer, table or experts of that name in Llama"
    ):
        selection.Packable(llama).choose(KbitConfig(module_bits={"dwn_proj": 4}))


@pytest.mark.parametrize("pattern", ["donw_proj", "model.layers.0.", "visual", "re:.*mlp.*"])
def test_a_module_not_to_convert_that_is_none_is_an_error(pattern):
    llama = build("LlamaForCausalLM", "LlamaConfig", **SMALL, vocab_size=64)
    found = "found no module of that name in LlamaForCausalLM"
    with pytest.raises(ValueError, match=re.escape(f"modules_to_not_convert[{pattern!r}]: {found}")):
        selection.Packable(llama).choose(KbitConfig(modules_to_not_convert=[pattern]))


def test_modules_not_to_convert_may_be_any():
    llama = build("LlamaForCausalLM", "LlamaConfig", **SMALL, vocab_size=64)
    named = ["norm", "rotary_emb", "lm_head", "layers.0.self_attn", "up_proj"]
    chosen = selection.Packable(llama).choose(KbitConfig(modules_to_not_convert=named))
    assert list(chosen) == ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate_proj"]


def test_layers_outside_the_base_model_are_heads():
    bert = build("BertForMaskedLM", "BertConfig", **SMALL, vocab_size=64)
    t5 = build("T5ForSequenceClassification", "T5Config", d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
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


def test_a_shared_module_is_replaced_everywhere():
    shared = nn.Linear(4, 4)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    selection.replace_modules(model, {"b.0": nn.Identity()})
    assert model["a"] is model["b"][0] and isinstance(model["a"], nn.Identity)
