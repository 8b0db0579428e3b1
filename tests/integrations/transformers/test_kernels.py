"""Kernels of the Hub that would read packed experts."""

import pytest
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from hf_kbit import KbitConfig

MLP = "model.layers.0.mlp"
MESSAGE = f"{MLP}: found packed experts, expected 16-bit ones for the kernel 'MegaBlocksMoeMLP'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, head_dim=16)
    experts = dict(num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=64)
    folder = tmp_path_factory.mktemp("dense")
    GptOssForCausalLM(GptOssConfig(vocab_size=64, pad_token_id=0, **sizes, **experts)).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def kernelized(monkeypatch):
    """What is so with the library installed, which is not needed for this; the list of models that got to it."""
    monkeypatch.setattr(GptOssMLP, "kernel_layer_name", "MegaBlocksMoeMLP", raising=False)
    reached = []
    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda: True)
    monkeypatch.setattr("transformers.integrations.hub_kernels.register_kernel_mapping_transformers", lambda: None)
    monkeypatch.setattr("transformers.modeling_utils.kernelize", lambda model, mode=None: reached.append(model))
    return reached


def load(folder, *left, **kwargs):
    config = KbitConfig(modules_to_not_convert=left)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, **kwargs)


@pytest.mark.parametrize(
    "use",
    [
        lambda folder: load(folder, use_kernels=True),
        lambda folder: load(folder).set_use_kernels(True),
        lambda folder: setattr(load(folder), "use_kernels", 1),
    ],
)
def test_packed_experts_are_refused(folder, kernelized, use):
    with pytest.raises(ValueError, match=MESSAGE):
        use(folder)
    assert not kernelized


def test_experts_in_16_bits_and_other_models_get_their_kernels(folder, kernelized, monkeypatch):
    model = load(folder, "experts", use_kernels=True)
    assert kernelized == [model] and isinstance(model, PreTrainedModel)
    packed = load(folder)
    packed.set_use_kernels(False)
    monkeypatch.delattr(GptOssMLP, "kernel_layer_name")
    packed.set_use_kernels(True)  # no kernel for experts: those of norms, say
    assert kernelized == [model, packed]
