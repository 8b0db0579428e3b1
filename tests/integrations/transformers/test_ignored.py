"""Tensors that a model's class leaves out while it loads, such as layers that predict further tokens: they are saved
with the quantized model."""

import json
import shutil

import pytest
import torch
from command import succeed
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.integrations.transformers import ignored

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = {  # the layer that the class leaves out, and the shape
    "qwen3_next": (
        "mtp.layers.0.",
        {
            **{"num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 16},
            **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"]},
        },
    ),
    "deepseek_v3": (
        "model.layers.61.",
        {
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16},
            **{"v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        },
    ),
}
IDS = torch.randint(1, 60, (4, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=KINDS)
def original(request, tmp_path_factory):
    """A folder with a layer more than the class knows, and what is in that layer."""
    folder, (before, shape) = tmp_path_factory.mktemp(request.param), KINDS[request.param]
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SHAPE, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    own = load_file(folder / "model.safetensors")
    first = {name: x for name, x in own.items() if ".layers.1." in name}
    further = {name.replace("model.layers.1.", before): x.clone() + 1 for name, x in first.items()}
    further[f"{before}eh_proj.weight"] = torch.randn(8, 16)
    other = {f"{before}ids": torch.arange(3)}  # no float: nothing that was learnt
    save_file(own | further | other, folder / "model.safetensors", {"format": "pt"})
    assert len(further) > 5
    return folder, further


def saved(folder) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def on_loading(folder):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=KbitConfig(bits=3))


def calibrated_on_loading(folder):
    config = KbitConfig(bits=3, calibrate=IDS)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def in_memory(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    hf_kbit.quantize_model(model, bits=3)
    return model


@pytest.mark.parametrize("quantize", [on_loading, calibrated_on_loading, in_memory])
def test_all_of_it_is_saved(quantize, original, tmp_path):
    """Also by the one who loads what was saved, over the files that it was loaded from, and in several files."""
    folder, further = original
    model = quantize(folder)
    plain = model.state_dict()
    assert not any(name in plain for name in further)
    for how in ({}, {"max_shard_size": "20KB"}):
        model.save_pretrained(tmp_path / "out", **how)
        found = saved(tmp_path / "out")
        assert all(torch.equal(found[name], x) for name, x in further.items())
        assert not any(name.endswith(".ids") for name in found)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model.state_dict().keys() == plain.keys()
        shutil.copytree(tmp_path / "out", tmp_path / f"kept-{len(how)}")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert further.keys() <= index.keys()


def test_files_that_are_gone_are_named(original, tmp_path, monkeypatch):
    folder, further = original
    copy = shutil.copytree(folder, tmp_path / "copy")
    model = on_loading(copy)
    shutil.rmtree(copy)
    said = []
    monkeypatch.setattr(ignored.logger, "warning", lambda *args: said.append(args))
    model.save_pretrained(tmp_path / "out")
    assert not saved(tmp_path / "out").keys() & further.keys()
    assert said[0][1] == len(further) and str(copy) in said[0][2]


def test_a_part_of_a_model_goes_without(original, tmp_path):
    folder, _ = original
    AutoModel.from_pretrained(folder, quantization_config=KbitConfig(bits=3)).save_pretrained(tmp_path / "out")
    assert not any("mtp" in name or "layers.61" in name for name in saved(tmp_path / "out"))


def test_what_has_scales_is_left_out_and_named(original, tmp_path, monkeypatch):
    """In 16 bits it would be other numbers."""
    folder, further = original
    copy = shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    first = min(name for name in further if "proj" in name)
    tensors[first] = tensors[first].to(torch.float8_e4m3fn)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    said = []
    monkeypatch.setattr(ignored.logger, "warning", lambda *args: said.append(args))
    on_loading(copy).save_pretrained(tmp_path / "out")
    assert not saved(tmp_path / "out").keys() & further.keys()
    assert said[0][1:] == (len(further), "F8_E4M3", min(further))


def test_the_command_says_what_is_kept(original, tmp_path):
    folder, further = original
    printed = succeed("quantize", folder, tmp_path / "out", "--bits", 3, "--device", "cpu").stdout
    assert f"\nkept          {len(further)} tensors that " in printed and f"such as {min(further)}: as they" in printed
    assert further.keys() <= saved(tmp_path / "out").keys()
