"""Tensors that a model's class leaves out while it loads, such as layers that predict further tokens: they are saved
with the quantized model, and packed where they are as layers of the model."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from command import succeed
from exl3 import save_random
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.integrations.transformers import ignored

DENSE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
}
SHAPE = DENSE | {"num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
KINDS = {  # the layer that the class leaves out, and the shape
    "qwen3_next": (
        "mtp.layers.0.",
        {
            **{"num_experts": 12, "shared_expert_intermediate_size": 32, "head_dim": 16},
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
LAST, MARK = "model.layers.1.", ".weight_absmax"
IDS = torch.randint(1, 60, (4, 16), generator=torch.Generator().manual_seed(0))


@dataclass
class Original:
    """A folder with a layer more than the class knows, which is the last one of the model in another folder, what the
    names in it begin with, and its tensors."""

    folder: Path
    another: Path
    before: str
    further: dict[str, torch.Tensor]

    def packed(self, folder: Path, **settings) -> dict[str, torch.Tensor]:
        """The packed tensors of that layer: those that it has in its own model, without data."""
        config = KbitConfig(**{"bits": 3} | settings)
        AutoModelForCausalLM.from_pretrained(self.another, quantization_config=config).save_pretrained(folder)
        found = renamed(saved(folder), self.before)
        modules = {name.removesuffix(MARK) for name in found if name.endswith(MARK)}
        assert len(modules) > 5 and any(name.endswith("experts.gate_up_proj") for name in modules)
        return {name: x for name, x in found.items() if name.rpartition(".")[0] in modules}

    def others(self) -> dict[str, torch.Tensor]:
        """Those that stay as they are: norms, routers, and one such as no layer of the model has."""
        kept = "eh_proj.weight", "gate.weight"
        return {name: x for name, x in self.further.items() if x.dim() < 2 or name.endswith(kept)}


@pytest.fixture
def said(monkeypatch) -> list[tuple]:
    """What is warned of: a text, and what stands in it."""
    warned = []
    monkeypatch.setattr(ignored.logger, "warning", lambda *args: warned.append(args))
    return warned


@pytest.fixture(scope="module", params=KINDS)
def original(request, tmp_path_factory):
    folders, (before, shape) = [tmp_path_factory.mktemp(request.param) for _ in range(2)], KINDS[request.param]
    config = AutoConfig.for_model(request.param, **SHAPE, **shape)
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    further = renamed(saved(folders[1]), before)
    further[f"{before}eh_proj.weight"] = torch.randn(8, 16)
    other = {f"{before}ids": torch.arange(3)}  # no float: nothing that was learnt
    save_file(saved(folders[0]) | further | other, folders[0] / "model.safetensors", {"format": "pt"})
    return Original(*folders, before, further)


def saved(folder) -> dict[str, torch.Tensor]:
    return {name: x for file in folder.glob("*.safetensors") for name, x in load_file(file).items()}


def renamed(tensors: dict[str, torch.Tensor], before: str) -> dict[str, torch.Tensor]:
    """Those of the last layer of a model by the names of the further one."""
    return {name.replace(LAST, before): x.clone() for name, x in tensors.items() if name.startswith(LAST)}


def assert_saved(folder, before: str, expected: dict[str, torch.Tensor]) -> None:
    """That these tensors are there, and no other ones of the further layer."""
    found = {name: x for name, x in saved(folder).items() if name.startswith(before)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def on_loading(folder, **settings):
    config = KbitConfig(**{"bits": 3} | settings)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)


def calibrated_on_loading(folder):
    return on_loading(folder, calibrate=IDS)


def in_memory(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    hf_kbit.quantize_model(model, bits=3)
    return model


@pytest.mark.parametrize("quantize", [on_loading, calibrated_on_loading, in_memory])
def test_all_of_it_is_saved(quantize, original, tmp_path):
    """Packed without data, experts as the model's; also by the one who loads what was saved, over the files that it
    was loaded from, and in several files."""
    model, expected = quantize(original.folder), original.packed(tmp_path / "another") | original.others()
    plain = model.state_dict()
    assert not any(name.startswith(original.before) for name in plain)
    for how in ({}, {"max_shard_size": "20KB"}):
        model.save_pretrained(tmp_path / "out", **how)
        assert_saved(tmp_path / "out", original.before, expected)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model.state_dict().keys() == plain.keys()
        shutil.copytree(tmp_path / "out", tmp_path / f"kept-{len(how)}")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert expected.keys() <= index.keys()


@pytest.mark.parametrize(
    "settings",
    [
        {"bits": 2, "module_bits": {"layers.0": 4, "layers.1.mlp": 5}},
        {"module_bits": {"layers.1.self_attn": None}, "transform": "none", "scale": "absmax"},
        {"codebook": "trellis"},
    ],
    ids=["widths", "some in 16 bits", "trellis"],
)
def test_it_is_packed_as_the_last_layer(settings, original, tmp_path):
    on_loading(original.folder, **settings).save_pretrained(tmp_path / "out")
    on_loading(original.another, **settings).save_pretrained(tmp_path / "another")
    layer, other = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("out", "another"))
    said, expected = (each["quantization_config"]["layers"] for each in (layer, other))
    assert renamed_entries(said, original.before) == renamed_entries(expected, LAST)
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "again")
    joins = f"{original.before}eh_proj.weight"
    for folder in ("out", "again"):
        layer = renamed(saved(tmp_path / "another"), original.before)
        assert_saved(tmp_path / folder, original.before, layer | {joins: original.further[joins]})


def renamed_entries(layers: dict, before: str) -> dict:
    return {name.removeprefix(before): entry for name, entry in layers.items() if name.startswith(before)}


def test_patterns_name_it(original, tmp_path):
    """Though the model has no such layer."""
    part = original.before.rstrip(".")
    on_loading(original.folder, modules_to_not_convert=[part]).save_pretrained(tmp_path / "left")
    assert_saved(tmp_path / "left", original.before, original.further)
    on_loading(original.folder, module_bits={f"^{re.escape(part)}": 5}).save_pretrained(tmp_path / "wide")
    assert_saved(tmp_path / "wide", original.before, original.packed(tmp_path / "another", bits=5) | original.others())


def test_a_folder_that_has_it_in_16_bits_stays_so(original, tmp_path):
    """As those that an hf_kbit before this one wrote."""
    on_loading(original.folder, modules_to_not_convert=[original.before.rstrip(".")]).save_pretrained(tmp_path / "old")
    config = json.loads((tmp_path / "old/config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = []
    (tmp_path / "old/config.json").write_text(json.dumps(config))
    AutoModelForCausalLM.from_pretrained(tmp_path / "old").save_pretrained(tmp_path / "again")
    assert_saved(tmp_path / "again", original.before, original.further)


def test_what_cannot_be_packed_is_saved_as_it_is(original, tmp_path, said):
    copy = shutil.copytree(original.folder, tmp_path / "copy")
    tensors, name = saved(copy), f"{original.before}self_attn.o_proj.weight"
    tensors[name][3, 4] = torch.nan
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    model = on_loading(copy)
    model.save_pretrained(tmp_path / "out")
    ((text, *what),) = said
    assert (
        text % tuple(what) == f"hf_kbit: saved in 16 bits: {name}: found NaN or infinite values, expected finite ones"
    )
    assert torch.equal(saved(tmp_path / "out")[name].isnan(), tensors[name].isnan())


@pytest.mark.parametrize("damage", ["gone", "narrow"])
def test_damaged_ones_are_refused(damage, original, tmp_path):
    on_loading(original.folder).save_pretrained(tmp_path)
    tensors, name = saved(tmp_path), f"{original.before}self_attn.o_proj.weight_columns"
    columns = tensors.pop(name)
    if damage == "narrow":
        tensors[name] = columns[1:].clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(f"{name}: found {'none' if damage == 'gone' else 'U8'}")):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_files_that_are_gone_are_named(original, tmp_path, said):
    copy = shutil.copytree(original.folder, tmp_path / "copy")
    model = on_loading(copy)
    shutil.rmtree(copy)
    model.save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", original.before, {})
    assert said[0][1] == len(original.further) and str(copy) in said[0][2]


def test_files_that_were_written_over_are_named(original, tmp_path, said):
    """There is what is packed now, under the same names or, where it was experts one by one, under others."""
    copy = shutil.copytree(original.folder, tmp_path / "copy")
    model = on_loading(copy)
    model.save_pretrained(copy)
    model.save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", original.before, original.others())
    lost = original.further.keys() - original.others().keys()
    assert said[0][1] == len(lost) and all(name in said[0][3] for name in lost)


def test_a_part_of_a_model_goes_without(original, tmp_path):
    config = KbitConfig(bits=3)
    AutoModel.from_pretrained(original.folder, quantization_config=config).save_pretrained(tmp_path / "out")
    assert not any("mtp" in name or "layers.61" in name for name in saved(tmp_path / "out"))
    on_loading(original.folder).save_pretrained(tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "part")
    assert not any("mtp" in name or "layers.61" in name for name in saved(tmp_path / "part"))


def test_what_has_scales_is_left_out_and_named(original, tmp_path, said):
    """In 16 bits it would be other numbers."""
    copy = shutil.copytree(original.folder, tmp_path / "copy")
    tensors = saved(copy)
    first = min(name for name in original.further if "proj" in name)
    tensors[first] = tensors[first].to(torch.float8_e4m3fn)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    on_loading(copy).save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", original.before, {})
    assert said[0][1:] == (len(original.further), "F8_E4M3", min(original.further))


def test_the_command_says_what_is_kept(original, tmp_path):
    printed = succeed("quantize", original.folder, tmp_path / "out", "--bits", 3, "--device", "cpu").stdout
    expected = original.packed(tmp_path / "another") | original.others()
    packed = sum(name.endswith(MARK) for name in expected)
    first = f"such as {min(original.further)}: {packed} layers of them packed, the rest as they are"
    assert f"\nkept          {len(original.further)} tensors that " in printed and first in printed
    assert_saved(tmp_path / "out", original.before, expected)


@pytest.mark.parametrize("settings", [{"bits": 3}, {"bits": 3, "codebook": "trellis"}])
def test_layers_of_the_model_with_an_ignored_name(settings, tmp_path, monkeypatch):
    """They are the model's, packed tables among them, and are saved once, though the class would ignore the name."""
    model = AutoModel.from_config(AutoConfig.for_model("deberta", **DENSE, max_position_embeddings=32))
    monkeypatch.setattr(type(model), ignored.PATTERNS, ["word_embeddings", "output"])
    model.save_pretrained(tmp_path / "dense")
    config = KbitConfig(embedding_bits=4, **settings)
    AutoModel.from_pretrained(tmp_path / "dense", quantization_config=config).save_pretrained(tmp_path / "first")
    again = AutoModel.from_pretrained(tmp_path / "first")
    assert not again.hf_quantizer.ignored.places and not again.hf_quantizer.further
    again.save_pretrained(tmp_path / "second")
    first, second = saved(tmp_path / "first"), saved(tmp_path / "second")
    assert any(name.startswith("embeddings.word_embeddings.") and name.endswith(MARK) for name in first)
    assert first.keys() == second.keys() and all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_a_folder_of_exllamav3_keeps_them(tmp_path, monkeypatch):
    config = AutoConfig.for_model("llama", **DENSE | {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 128})
    monkeypatch.setattr(LlamaPreTrainedModel, ignored.PATTERNS, [r"^mtp\."])
    save_random(config, tmp_path / "exl3")
    (file,) = (tmp_path / "exl3").glob("*.safetensors")
    further = {"mtp.fc.weight": torch.randn(8, 16)}
    save_file(load_file(file) | further, file, {"format": "pt"})
    AutoModelForCausalLM.from_pretrained(tmp_path / "exl3").save_pretrained(tmp_path / "out")
    assert_saved(tmp_path / "out", "mtp.", further)
