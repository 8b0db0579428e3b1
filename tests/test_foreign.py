"""Code of others: it is quantized, run, saved and loaded as its own authors do, where their packages are installed."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import BertConfig, BertModel

import hf_kbit
from hf_kbit import KbitLinear


def test_sentence_transformers(tmp_path):
    """Its own ``save``, and loading by its own class."""
    package = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=256, initializer_range=0.2, **shape)).save_pretrained(tmp_path / "bert")
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
    tokenizer.save_pretrained(tmp_path / "bert")
    model = package.SentenceTransformer(str(tmp_path / "bert"), device="cpu")
    sentences = ["First, a sentence.", "Then another, which is longer."]
    before = model.encode(sentences, convert_to_tensor=True)
    hf_kbit.quantize_model(model, bits=4)
    after = model.encode(sentences, convert_to_tensor=True)
    assert 0.9 < cosine_similarity(before, after).min() < 1
    model.save(str(tmp_path / "saved"))
    again = package.SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert any(isinstance(part, KbitLinear) for part in again.modules())
    assert torch.equal(again.encode(sentences, convert_to_tensor=True), after)


def compare(before: torch.Tensor, after: torch.Tensor) -> None:
    """Outputs of tiny models with random weights in 4 bits."""
    assert 0.9 < cosine_similarity(before.flatten(), after.flatten(), 0) < 1


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"])
def test_timm(name, tmp_path):
    """Layers in windows, whose buffers no state dict holds; patch embeddings are convolutions, and stay."""
    package = pytest.importorskip("timm", exc_type=ImportError)
    shape = {"depths": (1, 1), "embed_dim": 32, "num_heads": (2, 2)} if "swin" in name else {"depth": 2}

    def build():
        torch.manual_seed(0)
        return package.create_model(name, num_classes=5, img_size=56 if "swin" in name else 32, **shape).eval()

    model, image = build(), torch.randn(1, 3, *[56 if "swin" in name else 32] * 2)
    with torch.no_grad():
        before = model.forward_features(image)
        hf_kbit.quantize_model(model, bits=4)
        compare(before, model.forward_features(image))
        hf_kbit.save(model, tmp_path)
        with torch.device("meta"):
            fresh = build()
        hf_kbit.load_into(fresh, tmp_path)
        assert torch.equal(fresh(image), model(image)) and isinstance(model.patch_embed.proj, nn.Conv2d)


def test_a_pipeline_of_diffusers(tmp_path):
    """The image that Flux makes beside that of 16 bits, and that of the transformer saved and loaded."""
    package = pytest.importorskip("diffusers", exc_type=ImportError)

    def build():
        torch.manual_seed(0)
        transformer = package.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=4,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
        )
        vae = package.AutoencoderKL(
            block_out_channels=(4,), latent_channels=4, norm_num_groups=1, sample_size=32, shift_factor=0.1
        )
        texts = dict.fromkeys(("text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2"))
        scheduler = package.FlowMatchEulerDiscreteScheduler()
        return package.FluxPipeline(scheduler=scheduler, vae=vae, transformer=transformer, **texts)

    def image(pipeline):
        torch.manual_seed(1)
        prompt = {"prompt_embeds": torch.randn(1, 7, 32), "pooled_prompt_embeds": torch.randn(1, 32)}
        return pipeline(height=32, width=32, num_inference_steps=2, output_type="pt", **prompt).images

    pipeline, fresh = build(), build()
    before = image(pipeline)
    done = hf_kbit.quantize_model(pipeline.transformer, bits=4, module_bits={"to_[qkv]|add_[qkv]_proj": 4})
    compare(before, image(pipeline))
    assert dict(done.left) == {"proj_out": "head"}
    hf_kbit.save(pipeline.transformer, tmp_path)
    hf_kbit.load_into(fresh.transformer, tmp_path)
    assert torch.equal(image(fresh), image(pipeline))
    with pytest.raises(TypeError, match=r"found FluxPipeline, expected a .* part of a pipeline"):
        hf_kbit.quantize_model(pipeline, bits=4)
