"""Offloading to CPU and disk with accelerate, and the sizes by which Transformers places layers; all on a CPU."""

import accelerate
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.integrations import accelerate as placement

from hf_kbit import KbitConfig

TOKENS = torch.arange(12).reshape(2, 6)
CONFIG = {"bits": 3, "module_bits": {"down_proj": 5}}

DEVICE_MAPS = {
    "cpu and disk": {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    },
    "a layer in two places": {
        "model.embed_tokens": "cpu",
        "model.layers.0.self_attn": "disk",
        "model.layers.0.mlp": "cpu",
        "model.layers.0.input_layernorm": "cpu",
        "model.layers.0.post_attention_layernorm": "cpu",
        "model.layers.1": "cpu",
        "model.norm": "disk",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    },
    "all on disk": {"": "disk"},
}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A bfloat16 Llama with biases, one layer of which needs an exponent."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight *= 2.0**-12
        for layer in model.model.layers:
            layer.self_attn.q_proj.bias.normal_()
    directory = tmp_path_factory.mktemp("dense")
    model.save_pretrained(directory)
    return directory


def quantize(dense, **kwargs):
    return AutoModelForCausalLM.from_pretrained(dense, quantization_config=KbitConfig(**CONFIG), **kwargs)


@pytest.fixture(scope="module")
def model(dense):
    return quantize(dense)


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    model.save_pretrained(directory)
    assert model.config.quantization_config.stored.layers["model.layers.1.self_attn.q_proj"].exponent < 0
    return directory


def load(saved, **kwargs):
    return AutoModelForCausalLM.from_pretrained(saved, **kwargs)


def generate(model):
    return model.generate(TOKENS, max_new_tokens=4, do_sample=False)


@pytest.fixture(scope="module")
def expected(model):
    """What the model that is not offloaded computes: logits and generated tokens."""
    return model(TOKENS).logits, generate(model)


def assert_same_outputs(model, expected):
    logits, tokens = expected
    assert torch.equal(model(TOKENS).logits, logits)
    assert torch.equal(generate(model), tokens)


def assert_dequantize_is_refused(model, expected):
    with pytest.raises(ValueError, match=r"model\.layers\.\d\.\S+\.weight: found it offloaded, expected"):
        model.dequantize()
    assert torch.equal(model(TOKENS).logits, expected[0])  # and has changed nothing


# --- device_map -----------------------------------------------------------------------------------


@pytest.mark.parametrize("device_map", DEVICE_MAPS.values(), ids=DEVICE_MAPS)
def test_a_device_map_with_disk(expected, saved, tmp_path, device_map):
    """What is on disk is read for each call, cannot be decoded in place, and is saved again to the same bytes."""
    offloaded = load(saved, device_map=device_map, offload_folder=tmp_path / "offload")
    on_disk = {name for name, place in device_map.items() if place == "disk"}
    for name, parameter in offloaded.named_parameters():
        assert parameter.is_meta == any(f"{name}.".startswith(f"{module}.") or not module for module in on_disk)
    assert_same_outputs(offloaded, expected)
    assert_dequantize_is_refused(offloaded, expected)
    offloaded.save_pretrained(tmp_path / "again")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (saved / file).read_bytes(), file


def test_offloaded_by_accelerate(expected, saved, tmp_path):
    offloaded = load(saved)
    accelerate.cpu_offload(offloaded, execution_device="cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert_same_outputs(offloaded, expected)
    assert_dequantize_is_refused(offloaded, expected)
    offloaded = load(saved)
    accelerate.disk_offload(offloaded, tmp_path, execution_device="cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert_same_outputs(offloaded, expected)


# --- how large Transformers takes the layers to be ------------------------------------------------
# integrations/accelerate.py of Transformers places layers by compute_module_sizes(model, hf_quantizer), which asks
# the quantizer's param_element_size for every parameter and buffer. What exceeds max_memory={"cpu": ...} goes to disk.


def size(module):
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def test_a_budget_that_is_too_small_to_quantize_is_refused(model, dense):
    with pytest.raises(ValueError, match=r"device_map: found .* disk, expected"):
        quantize(dense, device_map="auto", max_memory={"cpu": size(model) - 1})


@pytest.mark.parametrize("source", ["dense", "saved"])
def test_every_module_has_its_quantized_size(model, dense, saved, source, monkeypatch):
    seen, original = [], placement.compute_module_sizes

    def record(model, hf_quantizer=None, **kwargs):
        sizes = original(model, hf_quantizer, **kwargs)
        if isinstance(model, LlamaForCausalLM):  # it is also called for single modules
            seen.append(sizes[0])
        return sizes

    monkeypatch.setattr(placement, "compute_module_sizes", record)
    if source == "dense":
        quantize(dense, device_map="auto")
    else:
        load(saved, device_map="auto")
    expected = {name: size(module) for name, module in model.named_modules() if size(module)}
    assert seen
    for sizes in seen:
        assert {name: sizes[name] for name in expected} == expected
