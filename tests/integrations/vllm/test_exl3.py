"""Weights that have a trellis: folders of exllamav3's converter, and what save_pretrained makes of them."""

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import exl3
import peft
import pytest
import serving
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.quantization import get_quantization_config

import hf_kbit
from hf_kbit.format.trellis import TrellisDecoding
from hf_kbit.integrations.transformers.inputs import WISH
from hf_kbit.integrations.transformers.report import logger
from hf_kbit.integrations.vllm import config
from hf_kbit.integrations.vllm.embedding import KbitHeadMethod
from hf_kbit.integrations.vllm.fused_moe import KbitExpertsMethod
from hf_kbit.integrations.vllm.linear import KbitLinearMethod
from hf_kbit.integrations.vllm.loading import load_once
from hf_kbit.weight.tensor import KbitTensor, Packed

ALONE = {"distributed_executor_backend": "uni"}
DATA = Path(__file__).parents[2] / "data" / "exl3"
LAYER = "model.layers.1.self_attn"
EXPERT = "model.layers.1.mlp.experts.2.up_proj"


def copied(name: str, folder: Path) -> Path:
    """Without the file of logits, which vLLM would load too."""
    return Path(shutil.copytree(DATA / name, folder / "exl3", ignore=shutil.ignore_patterns("logits*")))


def change(folder: Path, edit) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", serving.DTYPES)
@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("llama", "exl3"), ("qwen2_padded", "exl3"), ("qwen3_moe", "exl3"), ("qwen3_moe", "saved")),
        *(pytest.param(name, "saved", marks=pytest.mark.slow) for name in ("llama", "llama_tied", "qwen2_padded")),
        pytest.param("llama_tied", "exl3", marks=pytest.mark.slow),
    ],
)
def test_same_as_transformers(name, form, dtype, tmp_path):
    """Of three codes; a head of its own in a tied model, padded sides and biases, and experts are among them."""
    folder = copied(name, tmp_path)
    if form == "saved":
        serving.load(folder).save_pretrained(tmp_path / "saved")
        folder = tmp_path / "saved"
    found = serving.generate(folder, **ALONE, dtype=dtype)
    serving.assert_same(found, serving.load(folder, dtype))


@pytest.mark.parametrize("dtype", serving.DTYPES)
@pytest.mark.parametrize("name", ["phi3", "mixtral"])
def test_one_on_disk_and_other_names_of_experts(name, dtype, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder, mixture = tmp_path / "exl3", {"num_local_experts": 4} if name == "mixtral" else {}
    serving.save_exl3(name, folder, **sizes, **mixture)
    own = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}

    def rename(tensors):
        for key in [*tensors]:
            made = key
            for ours, theirs in own.items():
                made = made.replace(ours, theirs)
            tensors[made] = tensors.pop(key)

    if mixture:
        change(folder, rename)
    found = serving.generate(folder, **ALONE, dtype=dtype)
    serving.assert_same(found, serving.load(folder, dtype))


@pytest.mark.parametrize("dtype", serving.DTYPES)
def test_signs_of_old_files(dtype, tmp_path):
    """In the place of scales, of layers and of experts; these are all 1 in one layer of each folder."""

    def only_signs(tensors):
        for key in [key for key in tensors if key.rpartition(".")[2] in ("suh", "svh")]:
            tensors[key] = torch.where(tensors[key] < 0, -1, 1).half()

    def pack_signs(tensors):
        for key in [key for key in tensors if key.rpartition(".")[2] in ("suh", "svh")]:
            bits = (tensors.pop(key) < 0).view(-1, 16).long() << torch.arange(16)
            tensors[key.removesuffix("h")] = bits.sum(1).to(torch.int16)

    folder = change(copied("qwen3_moe", tmp_path), only_signs)
    model = serving.load(folder, dtype)
    change(folder, pack_signs)
    assert f"{LAYER}.q_proj.su" in load_file(folder / "model.safetensors")
    serving.assert_same(serving.generate(folder, **ALONE, dtype=dtype), model)


@pytest.mark.parametrize("dtype", serving.DTYPES)
def test_kinds_in_one_layer(dtype, tmp_path):
    """q has a trellis, k is scalar, v is in 16 bits."""
    folder, dense = copied("llama", tmp_path), serving.load(DATA / "llama")

    def leave(tensors):
        for name in (f"model.layers.{number}.self_attn.{own}_proj" for number in range(2) for own in "kv"):
            for own in ("trellis", "suh", "svh", "mul1"):
                del tensors[f"{name}.{own}"]
            tensors[f"{name}.weight"] = dense.get_submodule(name).dequantize(torch.float16)

    (folder / "quantization_config.json").unlink()
    model = serving.load(change(folder, leave), dtype)
    for layer in model.model.layers:
        layer.self_attn.k_proj = hf_kbit.KbitLinear.from_linear(layer.self_attn.k_proj, bits=4)
    model.save_pretrained(tmp_path / "saved")
    kinds = {own for own in load_file(tmp_path / "saved/model.safetensors") if LAYER in own}
    assert {f"{LAYER}.q_proj.trellis", f"{LAYER}.k_proj.weight_absmax", f"{LAYER}.v_proj.weight"} <= kinds
    serving.assert_same(serving.generate(tmp_path / "saved", **ALONE, dtype=dtype), model)


@pytest.mark.parametrize("dtype", serving.DTYPES)
def test_an_adapter(dtype, tmp_path):
    folder = copied("llama", tmp_path)
    # So much that it counts beside the tolerance of bfloat16.
    adapter = peft.LoraConfig(r=8, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(serving.load(folder, dtype), adapter, autocast_adapter_dtype=False).eval()
    model.to(model.dtype).save_pretrained(tmp_path / "adapter")
    settings = {"enable_lora": True, "max_lora_rank": 8}
    found = serving.generate(folder, 3 * [tmp_path / "adapter"], **ALONE, **settings, dtype=dtype)
    serving.assert_same(found, model)
    assert serving.agreement(found, serving.load(folder, dtype))[0] < 0.5


@serving.ON_CPU
@pytest.mark.parametrize(
    "name, told",
    [
        ("qwen3_moe", "in 11 of 11 layers"),
        ("llama_tied", "in 0 of 15 layers; 16-bit ones stay in lm_head: a trellis of"),
    ],
)
def test_8_bit_inputs(name, told, tmp_path, caplog, monkeypatch):
    """Which a CPU leaves in 16 bits, and of some codes every device."""
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.INFO, logger.name)
    folder = copied(name, tmp_path)
    found = serving.generate(folder, **ALONE, hf_overrides={WISH: "int8"})
    serving.assert_same(found, serving.load(folder))
    (line,) = {record.getMessage() for record in caplog.records if "8-bit inputs" in record.getMessage()}
    assert line.startswith(f"hf_kbit: 8-bit inputs {told}") and ("a trellis of code 'mcg'" in line) == ("stay" in told)


def test_a_config_that_calls_a_head_tied(tmp_path):
    """Which has tensors of its own: some vLLMs would leave these out."""
    folder = copied("llama_tied", tmp_path)
    model_config = AutoConfig.from_pretrained(folder)
    assert model_config.tie_word_embeddings
    made = get_quantization_config("exl3").from_config(model_config.quantization_config)
    made.maybe_update_config(str(folder), model_config)
    assert (made.get_name(), made.head, model_config.tie_word_embeddings) == ("exl3", "lm_head", False)


def test_padding_is_taken_off_biases():
    class Model(torch.nn.Module):
        def load_weights(self, weights):
            return list(weights)

    load_once(model := Model(), {"a.bias": 2})
    given = [("a.bias", torch.arange(4)), ("b.bias", torch.arange(4))]
    assert [(name, len(tensor)) for name, tensor in model.load_weights(given)] == [("a.bias", 2), ("b.bias", 4)]


# --- parts of processes ---------------------------------------------------------------------------


def method_of(rows: int, own: int, columns: int, method=KbitLinearMethod) -> tuple[KbitLinearMethod, KbitTensor, dict]:
    """One for a layer of 256 columns, with its weight and tensors."""
    made, decoding = method({"layer": TrellisDecoding(3)}), TrellisDecoding(3)
    made.rows, made.all_rows, made.columns, made.all_columns = [own], rows, columns, 256
    made.dtype = torch.float32
    random = exl3.random_layer("layer", rows, 256, 3, torch.Generator().manual_seed(0))
    tensors = {own: random[f"layer.{own}"] for own in decoding.names}
    return made, KbitTensor.of(Packed(tensors, decoding), (rows, 256), torch.float32), tensors


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_parts_of_processes(side, processes):
    """Of 384 rows four processes have 96 each, decoded in blocks of 128; columns are cut between blocks. Nothing of
    the whole stays in memory."""
    rows, x = 384, torch.randn(5, 256)
    if side == "columns" and processes == 4:
        pytest.skip("refused")
    own, columns = (rows // processes, 256) if side == "rows" else (rows, 256 // processes)
    method, weight, tensors = method_of(rows, own, columns)
    expected, found = x @ weight.dequantize().T, []
    for rank in range(processes):
        layer = SimpleNamespace(tp_rank=rank, tp_size=processes)
        (part,) = method._parts_of(layer, (0,), tensors)
        found.append(part.product(x[:, rank * columns :][:, :columns] if side == "columns" else x, None))
        bias = torch.randn(own)
        assert torch.equal(part.product(x[:, :columns], bias), part.product(x[:, :columns], None) + bias)
        words = part.weight.words
        assert words.untyped_storage().nbytes() == words.nbytes and words.transpose(0, 1).is_contiguous()
    found = torch.cat(found, 1) if side == "rows" else torch.stack(found).sum(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_names_of_parts_that_are_one_on_disk():
    """As q, k and v in one, and a gate in another."""
    method = KbitLinearMethod({"qkv": None, "gate": None})
    method.rows = [8, 8, 8, 8]
    assert [method._name(sources) for sources in ((0, 1, 2), (3,))] == ["qkv", "gate"]
    method.decodings = {"qk": None, "v": None, "gate": None}
    with pytest.raises(ValueError, match="found trellises of 4 parts, expected one each, or two in all"):
        method._name((2,))


def test_heads_of_two_processes():
    """Of 300 tokens, padded to 384 rows on disk, the second one has 140, and zeros for 20 that the model has not."""
    method, weight, tensors = method_of(384, 160, 256, KbitHeadMethod)
    x, found = torch.randn(5, 256), []
    for first, end in ((0, 160), (160, 300)):
        indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=end)
        layer = SimpleNamespace(shard_indices=indices, org_vocab_size=300)
        layer.parts = method._parts_of(layer, (0,), tensors)
        found.append(method.apply(layer, x, torch.ones(160)))
    expected = torch.nn.functional.pad(x @ weight.dequantize()[:300].T + 1, (0, 20))
    torch.testing.assert_close(torch.cat(found, 1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rank", "processes", "experts"), [(0, 2, 4), (1, 2, 4), (0, 1, 4), (0, 1, 2)])
def test_experts_of_processes(rank, processes, experts):
    """The same of a stacked projection and of single matrices, in the order that products read: rows of gates and of
    what they open, or the last experts."""
    generator, inner, outer = torch.Generator().manual_seed(0), 256, 128
    members = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", 0)}
    decodings = {"gate_up_proj": TrellisDecoding(3, stacked=2), "down_proj": TrellisDecoding(3)}
    moe = SimpleNamespace(
        is_act_and_mul=True, tp_size=processes, tp_rank=rank, intermediate_size=inner, hidden_dim=outer
    )
    moe.intermediate_size_per_partition, moe.has_bias = inner // processes, False
    places = SimpleNamespace(map_global_to_local=lambda expert: expert - 4 + experts if expert >= 4 - experts else -1)
    layer = SimpleNamespace(activation=MoEActivation.SILU, expert_map_manager=places)
    layer.apply_router_weight_on_input, layer.swiglu_limit = False, None
    single, stacked = (KbitExpertsMethod(moe, "experts", decodings, each) for each in (members, {}))
    with set_current_vllm_config(VllmConfig()):
        for method in (single, stacked):
            method.create_weights(layer, experts, outer, inner // processes, torch.float32)
    for own, decoding in decodings.items():
        tensors = {}
        for member in (member for member, (projection, _) in members.items() if projection == own):
            size = (outer, inner) if member == "down" else (inner, outer)
            for expert in range(4):
                for name, tensor in exl3.random_layer(f"{expert}.{member}", *size, 3, generator).items():
                    single.load(layer, name, tensor)
                    tensors.setdefault(name.rpartition(".")[2], []).append(tensor)
        for name in decoding.names:
            whole = torch.stack(tensors[name]).unflatten(0, (-1, 4)).transpose(0, 1)
            stacked.load(layer, f"{own}.{name}", whole if decoding.stacked > 1 else whole[:, 0])
            tensors[name] = whole if decoding.stacked > 1 else whole[:, 0]
        shape = (4, outer, inner) if own == "down_proj" else (4, 2 * inner, outer)
        whole = KbitTensor.of(Packed({name: tensors[name] for name in decoding.names}, decoding), shape, torch.float32)
        part = slice(rank * inner // processes, (rank + 1) * inner // processes)
        dense = whole.dequantize()[-experts:]
        halves = dense[:, :, part] if own == "down_proj" else dense.unflatten(1, (2, inner))[:, :, part].flatten(1, 2)
        for method in (single, stacked):
            weight = method._weight(own, decoding)
            torch.testing.assert_close(weight.dequantize(), halves, rtol=0, atol=1e-6)
            assert weight.words.transpose(-3, -2).is_contiguous()


# --- refused --------------------------------------------------------------------------------------


def refused(folder, message, **options):
    with pytest.raises(Exception) as caught:
        serving.generate(folder, **ALONE, **options)
    assert message in str(caught.value), str(caught.value)


def without(name: str):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("llama", f"{LAYER}.q_proj.suh", f"{LAYER}.q_proj.suh: found none, expected it or su"),
        ("qwen3_moe", f"{EXPERT}.trellis", f"{EXPERT}.trellis: missing"),
        ("llama", "model.norm.weight", "model.norm.weight: missing"),
    ],
)
def test_a_missing_tensor(name, tensor, message, tmp_path):
    refused(change(copied(name, tmp_path), without(tensor)), message)


@pytest.mark.parametrize(
    ("name", "form", "tensor", "message"),
    [
        ("llama", "exl3", f"{LAYER}.k_proj.suh", f"{LAYER}.k_proj: found ['svh', 'trellis'] alone"),
        ("llama", "exl3", "lm_head.trellis", "lm_head: found ['suh', 'svh'] alone"),
        ("qwen3_moe", "exl3", f"{EXPERT}.svh", "model.layers.1.mlp.experts.gate_up_proj: found 7 matrices of 4"),
        (
            "qwen3_moe",
            "saved",
            "model.layers.1.mlp.experts.down_proj.svh",
            "model.layers.1.mlp.experts.down_proj: found ['suh', 'trellis'] alone",
        ),
    ],
)
def test_what_does_not_arrive(name, form, tensor, message, tmp_path, monkeypatch):
    """Though it was there when headers were read."""
    folder, read = copied(name, tmp_path), config.read_decodings
    if form == "saved":
        serving.load(folder).save_pretrained(folder := tmp_path / "saved")
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    monkeypatch.setattr(config, "read_decodings", lambda _, *rest: read(whole, *rest))
    refused(change(folder, without(tensor)), message)


def test_a_tensor_that_vllm_has_cut():
    method, _, tensors = method_of(384, 384, 256)
    half = {**tensors, "trellis": tensors["trellis"][:8]}
    with pytest.raises(ValueError, match=r"^layer: found .*\(8, 24, 48\).*, expected .*\(16, 24, 48\)"):
        method._parts_of(SimpleNamespace(tp_rank=0, tp_size=1), (0,), half)


def test_scales_that_are_not_finite(tmp_path):
    def spoil(tensors):
        tensors[f"{LAYER}.q_proj.svh"][3] = torch.nan

    refused(change(copied("llama", tmp_path), spoil), f"{LAYER}.q_proj.svh: found 1 NaN or infinite values")


def test_the_width_of_another_config(tmp_path):
    folder = copied("llama", tmp_path)
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"]["head_bits"] = 5
    (folder / "config.json").write_text(json.dumps(settings))
    refused(folder, "lm_head: found 6 bits, expected head_bits 5")


def test_a_head_that_vllm_has_not(tmp_path):
    """It multiplies by the table, which here is another weight."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
    serving.save_exl3("gemma2", tmp_path / "exl3", **sizes)
    refused(tmp_path / "exl3", "lm_head: found tensors of its own, expected a head that is tied")


def test_adapters_on_experts(tmp_path):
    """On attention alone they are served."""
    folder = copied("qwen3_moe", tmp_path)
    refused(folder, "model.layers.0.mlp.experts: found adapters", enable_lora=True)
    serving.generate(folder, **ALONE, enable_lora=True, lora_target_modules=["q_proj", "o_proj"])
