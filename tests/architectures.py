"""Tiny models with random weights, one for each family of architectures, and what quantizing them should leave.

They are as small as the classes allow: sizes such as 40 and 72 are no multiples of a block of 32, so that padding is
at work nearly everywhere; a few, such as Qwen3's four heads of 16, are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

VOCABULARY = 99
IMAGE_TOKEN = 98
SMALL = 2.0**-9  # brings weights of about 0.2 under the range of E4M4


def _numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def text() -> dict:
    tokens = torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def text_pair() -> dict:
    return {**text(), "decoder_input_ids": torch.tensor([[0, 7, 8], [0, 9, 11]])}


def image() -> dict:
    return {"pixel_values": _numbers(2, 3, 16, 16)}


def image_in_text() -> dict:
    tokens = text()["input_ids"]
    tokens[:, 1:5] = IMAGE_TOKEN  # an image of 16 x 16 has four patches
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), **image()}


def image_and_text() -> dict:
    return {**text(), **image()}


def waveform() -> dict:
    return {"input_values": _numbers(2, 160)}


def spectrogram() -> dict:
    return {"input_features": _numbers(2, 10, 40), "decoder_input_ids": torch.tensor([[3, 7], [3, 9]])}


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: what the tests call it.
        model_class: name in ``transformers``.
        settings: arguments of the configuration.
        bits: width of what is quantized.
        dense: linear layers that stay as they are, with ``*`` for numbers.
        inputs: makes the arguments of a forward pass.
        dtypes: of the float model.
        generates: whether ``generate`` is tried.
    """

    name: str
    model_class: str
    settings: dict
    bits: int
    dense: tuple[str, ...] = ("lm_head",)
    inputs: Callable[[], dict] = text
    dtypes: tuple[str, ...] = ("float32",)
    generates: bool = False

    def __str__(self):
        return self.name

    @property
    def cls(self) -> type[transformers.PreTrainedModel]:
        return getattr(transformers, self.model_class)

    def build(self, dtype: torch.dtype = torch.float32, model_class: str | None = None, **settings):
        """A float model in which no tensor is constant; its middle linear layer is so small that it needs an exponent.

        Args:
            dtype: of the weights.
            model_class: another class with the same configuration.
            settings: changes to the configuration.
        """
        torch.manual_seed(0)
        config = self.cls.config_class(**(self.settings | settings))
        model = getattr(transformers, model_class or self.model_class)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
            linears = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
            linears[len(linears) // 2].weight *= SMALL
        return model.to(dtype)


# No end token: every generation has the same length.
TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=None)
ENCODER = dict(hidden_size=40, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4)
DECODER = dict(**ENCODER, **TOKENS, num_key_value_heads=2, max_position_embeddings=64)
VISION = dict(ENCODER, hidden_size=36, intermediate_size=50, image_size=16, patch_size=8)
SWIN = dict(image_size=16, patch_size=2, embed_dim=20, depths=[2, 1], num_heads=[2, 4], window_size=4)
SPEECH = dict(
    **ENCODER,
    vocab_size=19,
    conv_dim=(12, 12),
    conv_kernel=(4, 4),
    conv_stride=(4, 4),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=4,
    num_conv_pos_embedding_groups=2,
)
BERT = dict(ENCODER, vocab_size=VOCABULARY, max_position_embeddings=64)
MASKED = ("cls.predictions.decoder", "cls.predictions.transform.dense")
BOTH = ("float32", "bfloat16")
OPT = dict(**TOKENS, hidden_size=40, word_embed_proj_dim=24, ffn_dim=72, num_hidden_layers=2, num_attention_heads=4)
T5 = dict(d_model=40, d_kv=10, d_ff=72, num_layers=2, num_heads=4, vocab_size=VOCABULARY, pad_token_id=0)
T5 |= dict(feed_forward_proj="gated-gelu", decoder_start_token_id=0, eos_token_id=None)
WHISPER = dict(
    **dict(d_model=40, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4),
    **dict(encoder_ffn_dim=72, decoder_ffn_dim=72, num_mel_bins=10, max_source_positions=20, max_target_positions=24),
    **dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3),
    **dict(suppress_tokens=None, begin_suppress_tokens=None),
)
LLAVA = dict(
    text_config=dict(model_type="llama", **DECODER),
    vision_config=dict(model_type="clip_vision_model", projection_dim=20, **VISION),
    **dict(image_token_index=IMAGE_TOKEN, image_seq_length=4, vision_feature_layer=-1),
)
CLIP = dict(
    text_config=dict(BERT, max_position_embeddings=32, projection_dim=20, bos_token_id=1, eos_token_id=2),
    vision_config=dict(**VISION, projection_dim=20),
    projection_dim=20,
)
OF_TWO = "attention.self.continuous_position_bias_mlp.0"  # coordinates: packed they would take more

ARCHITECTURES = [
    Architecture("llama", "LlamaForCausalLM", DECODER, 2, dtypes=BOTH, generates=True),
    Architecture("qwen3", "Qwen3ForCausalLM", DECODER | {"head_dim": 16}, 3, generates=True),
    # Tied; logits and attention soft-capped, every other layer sees a window.
    Architecture(
        "gemma2", "Gemma2ForCausalLM", DECODER | {"head_dim": 12, "sliding_window": 4}, 4, dtypes=BOTH, generates=True
    ),
    Architecture("gemma3", "Gemma3ForCausalLM", DECODER | {"head_dim": 12, "sliding_window": 4}, 5, generates=True),
    Architecture("mistral", "MistralForCausalLM", DECODER | {"head_dim": 10, "sliding_window": 4}, 5, generates=True),
    # Biases everywhere, in lm_head too.
    Architecture("phi", "PhiForCausalLM", DECODER | {"hidden_size": 48}, 2, generates=True),
    # Tied; embeddings narrower than the layers, and linear layers between them.
    Architecture("opt", "OPTForCausalLM", OPT | {"max_position_embeddings": 64}, 3, generates=True),
    # Conv1D, whose weight is [in_features, out_features].
    Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        dict(**TOKENS, n_embd=40, n_layer=2, n_head=4, n_inner=72, n_positions=64),
        4,
        dtypes=BOTH,
        generates=True,
    ),
    Architecture(
        "gpt_neox", "GPTNeoXForCausalLM", dict(**ENCODER, **TOKENS, max_position_embeddings=64), 5, generates=True
    ),
    # Tied; its linear layers are of its own class.
    Architecture(
        "falcon",
        "FalconForCausalLM",
        dict(**TOKENS, hidden_size=40, num_hidden_layers=2, num_attention_heads=4),
        2,
        generates=True,
    ),
    # Fused experts; the checkpoint calls mlp block_sparse_moe.
    Architecture("mixtral", "MixtralForCausalLM", DECODER | {"num_local_experts": 4}, 3, dtypes=BOTH, generates=True),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        DECODER | {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        4,
        generates=True,
    ),
    Architecture("bert-masked", "BertForMaskedLM", BERT, 5, MASKED, dtypes=BOTH),
    Architecture("bert-classifier", "BertForSequenceClassification", BERT | {"num_labels": 3}, 2, ("classifier",)),
    # The checkpoint holds q, k and v in one tensor; two layers of the MLP have other names there.
    Architecture("nomic-bert", "NomicBertForMaskedLM", BERT, 4, MASKED),
    # Tied; wo is kept in float32.
    Architecture(
        "t5",
        "T5ForConditionalGeneration",
        T5,
        3,
        (*(f"{part}.block.*.layer.*.DenseReluDense.wo" for part in ("encoder", "decoder")), "lm_head"),
        text_pair,
        BOTH,
        generates=True,
    ),
    Architecture(
        "vit",
        "ViTForImageClassification",
        dict(**ENCODER, image_size=16, patch_size=8, num_labels=3),
        4,
        ("classifier",),
        image,
        BOTH,
    ),
    # Reads the dtype of a perceptron's first parameter.
    Architecture(
        "swinv2",
        "Swinv2ForImageClassification",
        dict(SWIN, num_labels=3),
        5,
        ("classifier", f"swinv2.encoder.layers.*.blocks.*.{OF_TWO}"),
        image,
    ),
    Architecture(
        "swin2sr",
        "Swin2SRForImageSuperResolution",
        dict(SWIN, patch_size=1, upscale=2),
        3,
        (f"swin2sr.encoder.stages.*.layers.*.{OF_TWO}",),
        image,
    ),
    Architecture("whisper", "WhisperForConditionalGeneration", WHISPER, 5, ("proj_out",), spectrogram, generates=True),
    Architecture(
        "llava", "LlavaForConditionalGeneration", LLAVA, 2, inputs=image_in_text, dtypes=BOTH, generates=True
    ),
    Architecture("wav2vec2", "Wav2Vec2ForCTC", SPEECH, 3, inputs=waveform),
    Architecture("hubert", "HubertForCTC", SPEECH, 4, inputs=waveform, dtypes=("bfloat16",)),
    Architecture("clip", "CLIPModel", CLIP, 5, ("text_projection",), image_and_text),
]
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}

# --- any type of model ----------------------------------------------------------------------------

# Small values for the names that configurations have for sizes; each takes those that it knows.
EIGHT = ("rotary_dim", "state_size", "patch_size")
SIXTEEN = (
    "head_dim",
    "d_kv",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "hidden_size_per_layer_input",
)
SIZES = {
    **dict.fromkeys(EIGHT, 8),
    **dict.fromkeys(SIXTEEN, 16),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner"), 64),
    **dict.fromkeys(("n_inner", "hidden_dim", "lru_width", "max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "image_size"), 32),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group"), 1),
}


def small_config(kind: str, **changes) -> transformers.PreTrainedConfig:
    """Of any type of model, as small as its names of sizes are known."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    sizes = {k: size for k, size in (SIZES | changes).items() if type(getattr(default, k, None)) is type(size)}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return config_class(**sizes, **{name: token for name, token in tokens.items() if hasattr(default, name)})
