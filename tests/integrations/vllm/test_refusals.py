"""What vLLM itself would load as garbage, and what it cannot run, is refused by name."""

import json

import pytest
import serving
from safetensors.torch import load_file, save_file

from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.integrations.vllm import config

LAYER, TABLE = "model.layers.1.self_attn", "model.embed_tokens"


def packed(name: str) -> list[str]:
    """The tensors of a weight."""
    return [f"{name}.{own}" for own in ScalarDecoding.names]


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


def without(*names):
    """A change that takes tensors out."""
    return lambda tensors, settings: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    "names",
    [
        [f"{LAYER}.k_proj.weight_absmax"],
        [f"{LAYER}.k_proj.weight_columns"],
        [f"{LAYER}.o_proj.weight"],
        ["model.layers.0.self_attn.o_proj.weight"],  # in 16 bits
        [f"{TABLE}.weight"],
        [f"{TABLE}.weight_absmax"],
        [f"{TABLE}.weight_columns"],
        ["lm_head.weight"],
        ["model.norm.weight"],
        ["model.layers.0.mlp.gate_proj.weight"],
        packed(f"{LAYER}.k_proj"),
        packed(TABLE),
    ],
)
def test_a_missing_tensor(damage, names):
    refused(damage(without(*names)), names[0])


def test_a_table_that_the_model_has_not(damage):
    def change(tensors, settings):
        for name in packed(TABLE):
            tensors[name.replace("tokens", "positions")] = tensors[name].clone()

    refused(damage(change), "model.embed_positions.weight: left over")


@pytest.mark.parametrize(("name", "rows"), [(f"{LAYER}.v_proj", 64), (TABLE, 250)])
def test_another_shape(damage, name, rows):
    def change(tensors, settings):
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"][:, :-1].contiguous()

    refused(damage(change), f"{name}.weight: found I32 [{rows}, 19], expected I32 [{rows}, 20]")


@pytest.mark.parametrize(("name", "rows"), [(f"{LAYER}.v_proj", 64), (TABLE, 250)])
def test_another_width_in_the_config(damage, name, rows):
    def change(tensors, settings):
        settings["quantization_config"]["layers"].setdefault(name, {})["bits"] = 4

    refused(damage(change), f"{name}.weight: found I32 [{rows}, 20]")


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


@pytest.mark.parametrize(
    "names",
    [
        *([f"{LAYER}.k_proj.weight"], [f"{LAYER}.k_proj.weight_absmax"], [f"{TABLE}.weight_columns"]),
        *(packed(f"{LAYER}.k_proj"), packed(TABLE)),
    ],
)
def test_what_does_not_arrive(folder, damage, monkeypatch, names):
    """Though it was there when headers were read."""
    read = config.read_decodings
    monkeypatch.setattr(config, "read_decodings", lambda _, *rest: read(folder, *rest))
    refused(damage(without(*names)), names[0].rpartition(".")[0])


def test_a_model_in_16_bits(folder):
    refused(folder.parent / "dense", "hf-kbit quantize", quantization="kbit")


def made(monkeypatch, folder, *model):
    monkeypatch.setitem(serving.MODELS, "other", model)
    return serving.make("other", folder)


def test_experts_that_are_packed_in_part(monkeypatch, tmp_path):
    half = {"bits": 4, "module_bits": {"experts.down_proj": None}}
    refused(
        made(monkeypatch, tmp_path, "qwen3_moe", serving.MODELS["qwen3_moe"][1], half),
        "['gate_up_proj'] alone packed",
    )


def test_layers_that_vllm_turns_around(monkeypatch, tmp_path):
    folder = made(monkeypatch, tmp_path, "gpt2", {}, {"bits": 4, "embedding_bits": 5})
    refused(folder, "transformer.h.0.attn.c_attn.weight: found a packed Conv1D")


def test_a_table_under_the_name_of_its_head(monkeypatch, tmp_path):
    tied = "llama", {"tie_word_embeddings": True}, {"bits": 4, "embedding_bits": 4}
    folder = made(monkeypatch, tmp_path, *tied)
    tensors = load_file(folder / "model.safetensors")
    for name in packed(TABLE):
        tensors[name.replace(TABLE, "lm_head")] = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(folder, f"lm_head.weight: found it instead of {TABLE}.weight")


@pytest.mark.parametrize("load_format", ["dummy", "sharded_state"])
def test_what_is_not_loaded_of_files(folder, load_format):
    refused(folder, f"load_format: found {load_format!r}", load_format=load_format)


def test_adapters_on_experts(tmp_path):
    """On attention alone they are served."""
    folder = serving.make("qwen3_moe", tmp_path)
    refused(folder, "model.layers.0.mlp.experts: found adapters", enable_lora=True)
    serving.generate(
        folder, distributed_executor_backend="uni", enable_lora=True, lora_target_modules=["q_proj", "o_proj"]
    )
