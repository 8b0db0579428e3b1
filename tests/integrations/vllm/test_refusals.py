"""What vLLM itself would load as garbage, and what it cannot run, is refused by name."""

import json

import pytest
import serving
from safetensors.torch import load_file, save_file

from hf_kbit.integrations.vllm import config

LAYER = "model.layers.1.self_attn"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return serving.make("mixed widths", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def damage(folder, tmp_path):
    """Calls a function with the tensors and the config of a copy, and returns its folder."""

    def made(change):
        tensors, settings = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        change(tensors, settings)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(settings))
        return tmp_path

    return made


def refused(folder, message, **options):
    with pytest.raises(Exception) as caught:
        serving.generate(folder, distributed_executor_backend="uni", **options)
    assert message in str(caught.value), str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        f"{LAYER}.k_proj.weight_absmax",
        f"{LAYER}.k_proj.weight_columns",
        f"{LAYER}.o_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",  # in 16 bits
        "model.norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
    ],
)
def test_a_missing_tensor(damage, name):
    refused(damage(lambda tensors, settings: tensors.pop(name)), name)


def test_a_whole_layer_that_is_missing(damage):
    def change(tensors, settings):
        for suffix in ("", "_absmax", "_columns"):
            del tensors[f"{LAYER}.k_proj.weight{suffix}"]

    refused(damage(change), f"{LAYER}.k_proj.weight")


def test_another_shape(damage):
    def change(tensors, settings):
        tensors[f"{LAYER}.v_proj.weight"] = tensors[f"{LAYER}.v_proj.weight"][:, :-1].contiguous()

    refused(damage(change), f"{LAYER}.v_proj.weight: found I32 [64, 19], expected I32 [64, 20]")


def test_another_width_in_the_config(damage):
    def change(tensors, settings):
        settings["quantization_config"]["layers"][f"{LAYER}.v_proj"]["bits"] = 4

    refused(damage(change), f"{LAYER}.v_proj.weight: found I32 [64, 20]")


def test_a_file_that_was_cut_short(folder, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((folder / file).read_bytes())
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.truncate(20_000)
    refused(tmp_path, "model.safetensors: damaged or cut short")


def test_the_config_of_another_save(folder, tmp_path):
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["layers"][f"{LAYER}.v_proj"]["exponent"] = 0
    (tmp_path / "config.json").write_text(json.dumps(settings))
    refused(tmp_path, "kbit_digest")


@pytest.mark.parametrize("suffixes", [[""], ["_absmax"], ["", "_absmax", "_columns"]])
def test_what_does_not_arrive(folder, damage, monkeypatch, suffixes):
    """Though it was there when headers were read."""
    read = config.read_decodings
    monkeypatch.setattr(config, "read_decodings", lambda _, *rest: read(folder, *rest))

    def change(tensors, settings):
        for suffix in suffixes:
            del tensors[f"{LAYER}.k_proj.weight{suffix}"]

    refused(damage(change), f"{LAYER}.k_proj")


def test_a_model_in_16_bits(folder):
    refused(folder.parent / "dense", "hf-kbit quantize", quantization="kbit")


def test_experts_that_are_packed_in_part(tmp_path):
    table = serving.MODELS | {
        "half": ("qwen3_moe", serving.MODELS["qwen3_moe"][1], {"bits": 4, "module_bits": {"experts.down_proj": None}})
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "MODELS", table)
        refused(serving.make("half", tmp_path), "['gate_up_proj'] alone packed")
