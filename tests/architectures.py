"""Tiny models with random weights, one for each family of architectures, and what quantizing them should leave.

They are as small as the classes allow: sizes such as 40 and 72 are no multiples of a block of 32, so that padding is
at work nearly everywhere; a few, such as Qwen3's four heads of 16, are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import AutoConfig
from transformers.pytorch_utils import Conv1D

VOCABULARY = 99
IMAGE_TOKEN = 98
SMALL = 2.0**-9  # brings weights of about 0.2 under the range of E4M4


@dataclass(frozen=True)
class Architecture:
    """One row of the table.

    Attributes:
        name: what the tests call it.
        model_class: name in ``transformers``.
        model_type: of its configuration.
        settings: arguments of the configuration.
        inputs: makes the arguments of a forward pass.
        dense: linear layers that stay as they are, with ``*`` for numbers.
        left: tensors that the log line names as left in 16 bits, with ``*`` for numbers; of tied tensors one.
        bits: width of the rest.
        dtypes: of the float model.
        generates: whether ``generate`` is tried.
    """

    name: str
    model_class: str
    model_type: str
    settings: dict
    inputs: Callable[[], dict]
    dense: tuple[str, ...]
    left: tuple[str, ...]
    bits: int
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
        config = AutoConfig.for_model(self.model_type, **(self.settings | settings))
        model = getattr(transformers, model_class or self.model_class)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
            linears = [module for module in model.modules() if isinstance(module, (nn.Linear, Conv1D))]
            linears[len(linears) // 2].weight *= SMALL
        return model.to(dtype)


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


# No end token: every generation has the same length.
TOKENS = dict(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=None)
ENCODER = dict(hidden_size=40, intermediate_size=72, num_hidden_layers=2, num_attention_heads=4)
DECODER = dict(**ENCODER, **TOKENS, num_key_value_heads=2, max_position_embeddings=64)
VISION = dict(ENCODER, hidden_size=36, intermediate_size=50, image_size=16, patch_size=8)
SWIN = dict(image_size=16, patch_size=2, embed_dim=20, depths=[2, 1], num_heads=[2, 4], window_size=4)
POSITIONS = "attention.self.continuous_position_bias_mlp"
LOGIT_SCALE = "attention.self.logit_scale"
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
SPEECH_LEFT = (
    "feature_extractor.conv_layers.*.conv",
    "encoder.pos_conv_embed.conv.parametrizations.weight.original0",
    "encoder.pos_conv_embed.conv.parametrizations.weight.original1",
)
BERT_LEFT = (
    "bert.embeddings.word_embeddings",
    "bert.embeddings.position_embeddings",
    "bert.embeddings.token_type_embeddings",
)
BOTH = ("float32", "bfloat16")

ARCHITECTURES = [
    Architecture(
        "llama",
        "LlamaForCausalLM",
        "llama",
        DECODER,
        text,
        dense=("lm_head",),
        left=("model.embed_tokens", "lm_head"),
        bits=2,
        dtypes=BOTH,
        generates=True,
    ),
    Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        DECODER | {"head_dim": 16},
        text,
        dense=("lm_head",),
        left=("model.embed_tokens", "lm_head"),
        bits=3,
        generates=True,
    ),
    Architecture(
        "gemma2",  # tied; logits and attention soft-capped, every other layer sees a window
        "Gemma2ForCausalLM",
        "gemma2",
        DECODER | {"head_dim": 12, "sliding_window": 4},
        text,
        dense=("lm_head",),
        left=("model.embed_tokens",),
        bits=4,
        dtypes=BOTH,
        generates=True,
    ),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        DECODER | {"head_dim": 12, "sliding_window": 4},
        text,
        dense=("lm_head",),
        left=("model.embed_tokens",),
        bits=5,
        generates=True,
    ),
    Architecture(
        "mistral",
        "MistralForCausalLM",
        "mistral",
        DECODER | {"head_dim": 10, "sliding_window": 4},
        text,
        dense=("lm_head",),
        left=("model.embed_tokens", "lm_head"),
        bits=5,
        generates=True,
    ),
    Architecture(
        "phi",  # biases everywhere, in lm_head too
        "PhiForCausalLM",
        "phi",
        DECODER | {"hidden_size": 48},
        text,
        dense=("lm_head",),
        left=("model.embed_tokens", "lm_head"),
        bits=2,
        generates=True,
    ),
    Architecture(
        "opt",  # tied; embeddings narrower than the layers, and linear layers between them
        "OPTForCausalLM",
        "opt",
        dict(
            **TOKENS,
            hidden_size=40,
            word_embed_proj_dim=24,
            ffn_dim=72,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
        ),
        text,
        dense=("lm_head",),
        left=("model.decoder.embed_tokens", "model.decoder.embed_positions"),
        bits=3,
        generates=True,
    ),
    Architecture(
        "gpt2",  # Conv1D, whose weight is [in_features, out_features]
        "GPT2LMHeadModel",
        "gpt2",
        dict(**TOKENS, n_embd=40, n_layer=2, n_head=4, n_inner=72, n_positions=64),
        text,
        dense=("lm_head",),
        left=("transformer.wte", "transformer.wpe"),
        bits=4,
        dtypes=BOTH,
        generates=True,
    ),
    Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "gpt_neox",
        dict(**ENCODER, **TOKENS, max_position_embeddings=64),
        text,
        dense=("lm_head",),
        left=("gpt_neox.embed_in", "lm_head"),
        bits=5,
        generates=True,
    ),
    Architecture(
        "falcon",  # tied; its linear layers are of its own class
        "FalconForCausalLM",
        "falcon",
        dict(**TOKENS, hidden_size=40, num_hidden_layers=2, num_attention_heads=4),
        text,
        dense=("lm_head",),
        left=("transformer.word_embeddings",),
        bits=2,
        generates=True,
    ),
    Architecture(
        "mixtral",  # fused experts; the checkpoint calls mlp block_sparse_moe
        "MixtralForCausalLM",
        "mixtral",
        DECODER | {"num_local_experts": 4},
        text,
        dense=("lm_head",),
        left=(
            "model.embed_tokens",
            "model.layers.*.mlp.gate",
            "lm_head",
        ),
        bits=3,
        dtypes=BOTH,
        generates=True,
    ),
    Architecture(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        DECODER | {"head_dim": 12, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
        text,
        dense=("lm_head",),
        left=(
            "model.embed_tokens",
            "model.layers.*.mlp.gate",
            "lm_head",
        ),
        bits=4,
        generates=True,
    ),
    Architecture(
        "bert-masked",
        "BertForMaskedLM",
        "bert",
        dict(**ENCODER, vocab_size=VOCABULARY, max_position_embeddings=64),
        text,
        dense=("cls.predictions.decoder", "cls.predictions.transform.dense"),
        left=(*BERT_LEFT, "cls.predictions.transform.dense"),
        bits=5,
        dtypes=BOTH,
    ),
    Architecture(
        "bert-classifier",
        "BertForSequenceClassification",
        "bert",
        dict(**ENCODER, vocab_size=VOCABULARY, max_position_embeddings=64, num_labels=3),
        text,
        dense=("classifier",),
        left=(*BERT_LEFT, "classifier"),
        bits=2,
    ),
    Architecture(
        "nomic-bert",  # the checkpoint holds q, k and v in one tensor; two layers of the MLP have other names there
        "NomicBertForMaskedLM",
        "nomic_bert",
        dict(**ENCODER, vocab_size=VOCABULARY, max_position_embeddings=64),
        text,
        dense=("cls.predictions.decoder", "cls.predictions.transform.dense"),
        left=(
            "nomic_bert.embeddings.word_embeddings",
            "nomic_bert.embeddings.token_type_embeddings",
            "cls.predictions.transform.dense",
        ),
        bits=4,
    ),
    Architecture(
        "t5",  # tied; wo is kept in float32
        "T5ForConditionalGeneration",
        "t5",
        dict(
            d_model=40,
            d_kv=10,
            d_ff=72,
            num_layers=2,
            num_heads=4,
            vocab_size=VOCABULARY,
            feed_forward_proj="gated-gelu",
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=None,
        ),
        text_pair,
        dense=(
            "encoder.block.*.layer.*.DenseReluDense.wo",
            "decoder.block.*.layer.*.DenseReluDense.wo",
            "lm_head",
        ),
        left=(
            "shared",
            "encoder.block.*.layer.*.SelfAttention.relative_attention_bias",
            "encoder.block.*.layer.*.DenseReluDense.wo",
            "decoder.block.*.layer.*.SelfAttention.relative_attention_bias",
            "decoder.block.*.layer.*.DenseReluDense.wo",
        ),
        bits=3,
        dtypes=BOTH,
        generates=True,
    ),
    Architecture(
        "vit",
        "ViTForImageClassification",
        "vit",
        dict(**ENCODER, image_size=16, patch_size=8, num_labels=3),
        image,
        dense=("classifier",),
        left=(
            "vit.embeddings.cls_token",
            "vit.embeddings.position_embeddings",
            "vit.embeddings.patch_embeddings.projection",
            "classifier",
        ),
        bits=4,
        dtypes=BOTH,
    ),
    Architecture(
        "swinv2",  # reads the dtype of a perceptron's first parameter
        "Swinv2ForImageClassification",
        "swinv2",
        dict(SWIN, num_labels=3),
        image,
        dense=("classifier",),
        left=(
            "swinv2.embeddings.patch_embeddings.projection",
            f"swinv2.encoder.layers.*.blocks.*.{LOGIT_SCALE}",
            "classifier",
        ),
        bits=5,
    ),
    Architecture(
        "swin2sr",
        "Swin2SRForImageSuperResolution",
        "swin2sr",
        dict(SWIN, patch_size=1, upscale=2),
        image,
        dense=(),
        left=(
            "swin2sr.first_convolution",
            "swin2sr.embeddings.patch_embeddings.projection",
            f"swin2sr.encoder.stages.*.layers.*.{LOGIT_SCALE}",
            "swin2sr.encoder.stages.*.conv",
            "swin2sr.encoder.stages.*.patch_embed.projection",
            "swin2sr.conv_after_body",
            "upsample.conv_before_upsample",
            "upsample.upsample.convolution_0",
            "upsample.final_convolution",
        ),
        bits=3,
    ),
    Architecture(
        "whisper",
        "WhisperForConditionalGeneration",
        "whisper",
        dict(
            d_model=40,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=72,
            decoder_ffn_dim=72,
            num_mel_bins=10,
            max_source_positions=20,
            max_target_positions=24,
            vocab_size=VOCABULARY,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
        spectrogram,
        dense=("proj_out",),
        left=(
            "model.encoder.conv1",
            "model.encoder.conv2",
            "model.encoder.embed_positions",
            "model.decoder.embed_tokens",
            "model.decoder.embed_positions",
        ),
        bits=5,
        generates=True,
    ),
    Architecture(
        "llava",
        "LlavaForConditionalGeneration",
        "llava",
        dict(
            text_config=dict(model_type="llama", **DECODER),
            vision_config=dict(model_type="clip_vision_model", projection_dim=20, **VISION),
            image_token_index=IMAGE_TOKEN,
            image_seq_length=4,
            vision_feature_layer=-1,
        ),
        image_in_text,
        dense=("lm_head",),
        left=(
            "model.vision_tower.embeddings.patch_embedding",
            "model.vision_tower.embeddings.position_embedding",
            "model.language_model.embed_tokens",
            "lm_head",
        ),
        bits=2,
        dtypes=BOTH,
        generates=True,
    ),
    Architecture(
        "wav2vec2",
        "Wav2Vec2ForCTC",
        "wav2vec2",
        SPEECH,
        waveform,
        dense=("lm_head",),
        left=(*(f"wav2vec2.{name}" for name in SPEECH_LEFT), "lm_head"),
        bits=3,
    ),
    Architecture(
        "hubert",
        "HubertForCTC",
        "hubert",
        SPEECH,
        waveform,
        dense=("lm_head",),
        left=(*(f"hubert.{name}" for name in SPEECH_LEFT), "lm_head"),
        bits=4,
        dtypes=("bfloat16",),
    ),
    Architecture(
        "clip",
        "CLIPModel",
        "clip",
        dict(
            text_config=dict(
                **ENCODER,
                vocab_size=VOCABULARY,
                max_position_embeddings=32,
                projection_dim=20,
                bos_token_id=1,
                eos_token_id=2,
            ),
            vision_config=dict(**VISION, projection_dim=20),
            projection_dim=20,
        ),
        image_and_text,
        dense=("text_projection",),
        left=(
            "text_model.embeddings.token_embedding",
            "text_model.embeddings.position_embedding",
            "vision_model.embeddings.patch_embedding",
            "vision_model.embeddings.position_embedding",
            "text_projection",
        ),
        bits=5,
    ),
]
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
