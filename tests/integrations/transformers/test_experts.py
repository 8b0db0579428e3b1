"""Mixtures of experts in Transformers: quantized while they load, saved, loaded and undone."""

import logging

import pytest
import small
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import modeling_utils

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.integrations.transformers.names import stored_names
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.weight import packed_layers
from hf_kbit.weight.tensor import KbitTensor

SMALL = dict(vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
IDS = torch.arange(3, 27).view(2, 12)

# Name of the class, its configuration, and where the checkpoint of Transformers has the experts.
CASES = {
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        SMALL | TOKENS | dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40, head_dim=16),
        "model.layers.0.mlp.experts.0.gate_proj.weight",
    ),
    "mixtral": (
        "MixtralForCausalLM",
        SMALL | TOKENS | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=40),
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
    ),
    "gpt_oss": (  # transposed, with bias, gate and up interleaved
        "GptOssForCausalLM",
        SMALL | TOKENS | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=40, head_dim=16),
        "model.layers.0.mlp.experts.gate_up_proj",
    ),
    "granitemoe": (  # only renamed
        "GraniteMoeForCausalLM",
        SMALL | TOKENS | dict(num_local_experts=4, num_experts_per_tok=2, intermediate_size=40),
        "model.layers.0.block_sparse_moe.input_linear.weight",
    ),
    "nemotron_h": (  # without a gate
        "NemotronHForCausalLM",
        SMALL
        | TOKENS
        | dict(layers_block_type=["moe", "attention"], n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1)
        | dict(moe_intermediate_size=40, intermediate_size=40, head_dim=16, moe_shared_expert_intermediate_size=40)
        | dict(n_group=1, topk_group=1, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16, n_groups=1),
        "backbone.layers.0.mixer.experts.0.up_proj.weight",
    ),
}


def build(name: str, **settings):
    class_name, own, _ = CASES[name]
    torch.manual_seed(0)
    cls = getattr(transformers, class_name)
    model = cls(cls.config_class(**(own | settings))).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.fixture
def saved(tmp_path):
    def save(name: str, **settings):
        model = build(name, **settings)
        model.save_pretrained(tmp_path / "dense")
        return model, tmp_path / "dense"

    return save


def load(model, path, config=None, **kwargs):
    config = {} if config is None else {"quantization_config": config}
    return type(model).from_pretrained(path, **config, **kwargs).eval()


def projections(model) -> dict[str, KbitProjection]:
    return {name: module for name, module in model.named_modules() if isinstance(module, KbitProjection)}


def tensors(path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


@pytest.mark.parametrize("name", CASES)
def test_packed_while_they_load_and_where_files_have_them(saved, tmp_path, name):
    dense, path = saved(name)
    assert CASES[name][2] in tensors(path)
    model = load(dense, path, KbitConfig(bits=3))
    found = projections(model)
    assert found.keys() == set(small.dense_projections(dense)) and found
    assert not list(small.dense_projections(model)) and model.num_parameters() == dense.num_parameters()
    for own, projection in found.items():
        weight = dense.get_parameter(own).detach()
        assert projection.num_weights == weight.numel()
        twin = small.projection(dense, own, bits=3)
        twin.load_dense(weight.mT if projection.transposed else weight)
        assert all(map(torch.equal, projection.packed.values(), twin.packed.values()))

    model.save_pretrained(tmp_path / "packed")
    stored = tensors(tmp_path / "packed")
    assert {own for own, tensor in stored.items() if tensor.is_floating_point()} < tensors(path).keys()
    for name, own in stored_names(model, found).items():
        projection = found[name]
        assert own.rpartition(".")[2] == name.rpartition(".")[2], "the name of the projection, as docs/format.md says"
        assert torch.equal(stored[f"{own}.weight"], projection.weight.words), own
        assert stored[f"{own}.weight"].dtype == torch.int32 and stored[f"{own}.weight"].dim() == 3
        assert stored[f"{own}.weight_absmax"].shape == stored[f"{own}.weight"].shape[:-1] + (
            projection.weight.absmax.shape[-1],
        )


def test_transposed_checkpoint(tmp_path):
    """Qwen3-VL's has experts transposed, and Transformers tells by the shape in the model, which is another now."""
    text = (
        SMALL
        | TOKENS
        | CASES["qwen3_moe"][1]
        | {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2]}}
    )
    vision = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, out_hidden_size=64, patch_size=4)
    vision |= dict(deepstack_visual_indexes=[0], num_position_embeddings=16)
    config = transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    dense = transformers.Qwen3VLMoeForConditionalGeneration(config).eval()
    dense.save_pretrained(tmp_path / "dense")
    stored = tensors(tmp_path / "dense")
    own = next(name for name in small.dense_projections(dense) if name.endswith("gate_up_proj"))
    turned = {name: tensor.mT.contiguous() for name, tensor in stored.items() if "experts." in name}
    assert own in turned
    save_file(stored | turned, tmp_path / "dense/model.safetensors", {"format": "pt"})
    model = load(dense, tmp_path / "dense", KbitConfig(bits=4))
    twin = small.projection(dense, own, bits=4)
    twin.load_dense(dense.get_parameter(own).detach())
    assert torch.equal(projections(model)[own].weight, twin.weight)
    expected = logits(model)
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(load(dense, tmp_path / "packed")), expected)


def test_widths_of_projections(saved, tmp_path):
    dense, path = saved("qwen3_moe")
    asked = {"layers.1.mlp.experts.down_proj": None, "gate_up_proj": 3, "layers.0.mlp.experts.down_proj": 5}
    model = load(dense, path, KbitConfig(bits=4, transform="none", module_bits=asked))
    found = {name.removeprefix("model.layers."): module.bits for name, module in projections(model).items()}
    assert found == {"0.mlp.experts.gate_up_proj": 3, "0.mlp.experts.down_proj": 5, "1.mlp.experts.gate_up_proj": 3}
    assert model.model.layers[1].mlp.experts.down_proj.is_floating_point()
    left = load(dense, path, KbitConfig(bits=4, transform="none", modules_to_not_convert=["experts"]))
    assert not projections(left)
    for folder, made, version in (("packed", model, 2), ("left", left, 1)):  # version 1 has matrices alone
        made.save_pretrained(tmp_path / folder)
        again = load(dense, tmp_path / folder)
        assert torch.equal(logits(again), logits(made))
        assert again.config.quantization_config.stored.format_version == version
    assert CASES["qwen3_moe"][2] in tensors(tmp_path / "left"), "as checkpoints of 16 bits have it"


def test_a_mean_width_counts_experts(saved):
    dense, path = saved("qwen3_moe")
    layers = packed_layers(load(dense, path, KbitConfig(bits=3.3))).values()
    weights = sum(layer.num_weights for layer in layers)
    assert 2.9 < sum(layer.num_weights * layer.bits for layer in layers) / weights < 3.5


def test_the_report_and_the_card_count_experts(saved, tmp_path, caplog):
    dense, path = saved("qwen3_moe")
    transformers.logging.set_verbosity_info()
    try:
        with caplog.at_level(logging.INFO, "transformers.hf_kbit"):
            transformers.logging.enable_propagation()
            model = load(dense, path, KbitConfig(bits=4))
    finally:
        transformers.logging.disable_propagation()
        transformers.logging.set_verbosity_warning()
    line = next(record.getMessage() for record in caplog.records if "quantized layers with" in record.getMessage())
    packed = sum(module.num_weights for module in model.modules() if hasattr(module, "num_weights"))
    assert f"{packed:,} weights" in line and "experts" not in line.split("left as they are")[1]
    assert "linear layers and the experts are quantized to 4 bits" in hf_kbit.model_card(model, "x").text


def test_experts_that_are_not_in_the_checkpoint(saved):
    dense, path = saved("gpt_oss")
    file = path / "model.safetensors"
    stored = load_file(file)
    del stored["model.layers.1.mlp.experts.down_proj"]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts\.down_proj: not in the checkpoint"):
        load(dense, path, KbitConfig(bits=4))


def test_a_bias_that_is_not_in_the_checkpoint(saved):
    """It is made anew by its class, which would make experts, other biases and routers anew too, were they not marked
    as loaded."""
    dense, path = saved("gpt_oss")
    file = path / "model.safetensors"
    stored = load_file(file)
    del stored["model.layers.1.mlp.experts.down_proj_bias"]
    save_file(stored, file, {"format": "pt"})
    model = load(dense, path, KbitConfig(bits=4))
    for own in small.dense_projections(dense):
        twin = small.projection(dense, own, bits=4)
        twin.load_dense(dense.get_parameter(own).detach().mT)
        assert torch.equal(projections(model)[own].weight, twin.weight)
    made = "model.layers.1.mlp.experts.down_proj_bias"
    assert not model.get_parameter(made).any() and dense.get_parameter(made).any()
    for own, parameter in model.named_parameters():
        if not isinstance(parameter, KbitTensor) and own != made:
            assert parameter.any() or "self_attn" in own, "or this would prove nothing"
            assert torch.equal(parameter, dense.get_parameter(own)), own


def test_memory_of_a_gpu_is_taken_for_packed_words(saved, monkeypatch):
    """Before loading to one, by names of tensors that a module stands for meanwhile."""
    counted = []

    def count(model, devices, quantizer):
        devices = {name: torch.device(device) for name, device in devices.items()}
        counted.append(modeling_utils.get_total_byte_count(model, devices, quantizer)[torch.device("cpu")])

    monkeypatch.setattr(modeling_utils, "caching_allocator_warmup", count)
    dense, path = saved("qwen3_moe")
    model = load(dense, path, config=KbitConfig(bits=3), device_map={"": "cpu"})
    everything = sum(parameter.nbytes for parameter in model.parameters())
    assert counted[0] == everything
    model.save_pretrained(path / "kbit")
    load(dense, path / "kbit", device_map={"": "cpu"})
    assert counted[1] == everything
