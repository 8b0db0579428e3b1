"""EXL3 folders of exllamav3's own converter: loaded, run beside its own logits, trained on, saved and loaded again.

``tests/data/exl3`` has four tiny models, of which docs/lab/2026-11-28-exl3-form.md says how they were made.
"""

import copy
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import hf_kbit
from hf_kbit.format.trellis import pack
from hf_kbit.nn.weight import packed_layers
from hf_kbit.ops import native
from hf_kbit.weight.trellis import TrellisTensor

DATA = Path(__file__).parents[2] / "data" / "exl3"
MODELS = "llama", "llama_tied", "qwen2_padded", "qwen3_moe"
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def load(folder: Path, **settings):
    return AutoModelForCausalLM.from_pretrained(folder, **{"dtype": torch.float32, **settings}).eval()


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids if model.device.type == "meta" else ids.to(model.device)).logits[0]


def some_ids(name: str) -> torch.Tensor:
    return load_file(DATA / name / "logits.safetensors")["ids"][:, :24]


@pytest.fixture(params=MODELS)
def name(request) -> str:
    return request.param


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_answers_as_exllamav3_does(name, device):
    """Which computes in float16: its logits are rounded by far less than quantizing has changed them."""
    model, theirs = load(DATA / name, device_map=device), load_file(DATA / name / "logits.safetensors")
    own = logits(model, theirs["ids"]).cpu()
    expected, dense = (theirs[each].float() for each in ("logits", "logits_16_bits"))
    apart, changed = ((each[: len(expected)] - expected).square().mean().sqrt() for each in (own, dense))
    assert apart < 0.002 < changed / 5
    with safe_open(DATA / name / "logits.safetensors", "pt") as file:
        loss = float(file.metadata()["loss"])
    assert cross_entropy(own[:-1], theirs["ids"][0, 1:]).item() == pytest.approx(loss, abs=1e-4)


def test_what_is_packed(name):
    """All that has a trellis, in the width that each has; a head too, though the model ties it."""
    model, files = load(DATA / name), load_file(DATA / name / "model.safetensors")
    assert not any(parameter.is_meta for parameter in model.parameters())
    found = {layer: weight.bits for layer, weight in packed_layers(model).items()}
    stored = {key.removesuffix(".trellis"): t.shape[2] // 16 for key, t in files.items() if key.endswith(".trellis")}
    experts = {layer: bits for layer, bits in stored.items() if ".experts." in layer}
    assert found.items() >= (stored.items() - experts.items())
    assert len(found) == len(stored) - len(experts) + (4 if experts else 0)
    assert all(type(layer.weight.data) is TrellisTensor for layer in packed_layers(model).values())
    packed = sum(layer.weight.nbytes_packed for layer in packed_layers(model).values())
    assert packed == sum(t.nbytes for key, t in files.items() if key.rpartition(".")[2] in ("trellis", "suh", "svh"))


def test_saved_it_is_the_same(name, tmp_path):
    """And saved again the same bytes, by way of any dtype."""
    model, ids = load(DATA / name), some_ids(name)
    model.save_pretrained(tmp_path / "first")
    config = json.loads((tmp_path / "first/config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["format_version"]) == ("kbit", 3)
    for dtype in (torch.float32, torch.float16):
        again = load(tmp_path / "first", dtype=dtype)
        again.save_pretrained(tmp_path / str(dtype))
        theirs, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("first", str(dtype)))
        packed = [key for key in ours if key.rpartition(".")[2] in ("trellis", "suh", "svh")]
        assert packed and theirs.keys() == ours.keys()
        assert all(torch.equal(theirs[key], ours[key]) for key in packed)
        if dtype == torch.float32:
            assert torch.equal(logits(again, ids), logits(model, ids))
            files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("first", str(dtype))]
            assert files[0] == files[1]
    its = {key: t for key, t in load_file(DATA / name / "model.safetensors").items() if ".experts." not in key}
    for key in (key for key in its if key.rpartition(".")[2] in ("trellis", "suh", "svh")):
        assert torch.equal(its[key], theirs[key]), key


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_other_dtypes(name, dtype):
    """As near as float16 and bfloat16 are. Of experts a token may choose others."""
    model, ids = load(DATA / name, dtype=dtype), some_ids(name)
    apart = (logits(model, ids).float() - logits(load(DATA / name), ids)).abs()
    assert model.dtype == dtype and apart.median() < (0.002 if dtype == torch.float16 else 0.03)


def test_copies_and_dense_ones(name):
    model, ids = load(DATA / name), some_ids(name)
    expected = logits(model, ids)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(made, ids), expected)
    fresh = load(DATA / name)
    for parameter in fresh.parameters():
        if not isinstance(parameter, TrellisTensor):
            parameter.data.zero_()
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(logits(fresh, ids), expected)
    given = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict()).eval()
    assert torch.equal(logits(given, ids), expected)
    dense = model.dequantize()
    assert not packed_layers(dense)
    torch.testing.assert_close(logits(dense, ids), expected, rtol=0, atol=5e-5)


def test_offloaded(name, tmp_path):
    ids = some_ids(name)
    expected = logits(load(DATA / name), ids)
    parts = "embed_tokens", "layers.0", "layers.1", "norm", "rotary_emb"
    places = {f"model.{part}": "disk" if part == "layers.0" else "cpu" for part in parts} | {"lm_head": "disk"}
    on_disk = load(DATA / name, device_map=places, offload_folder=tmp_path)
    assert torch.equal(logits(on_disk, ids), expected)
    in_memory = cpu_offload(load(DATA / name), execution_device=torch.device("cpu"))
    assert torch.equal(logits(in_memory, ids), expected)


def test_in_shards(name, tmp_path):
    """Tensors of a layer, and of experts, may lie in several files."""
    shutil.copytree(DATA / name, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "logits.safetensors").unlink()
    files = {f"model-0000{i + 1}-of-00003.safetensors": sorted(tensors)[i::3] for i in range(3)}
    for file, names in files.items():
        save_file({key: tensors[key] for key in names}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {key: file for file, names in files.items() for key in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = some_ids(name)
    assert torch.equal(logits(load(tmp_path), ids), logits(load(DATA / name), ids))


def test_adapters_are_trained_and_loaded(name, tmp_path):
    ids, target = some_ids(name), {"target_modules": ["q_proj", "o_proj"]}
    if name == "qwen3_moe":
        target["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = get_peft_model(load(DATA / name), LoraConfig(**target, init_lora_weights=False))
    before = {key: t.clone() for key, t in load(DATA / name).state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(load(DATA / name), tmp_path).eval()
    expected = logits(model.eval(), ids)
    assert torch.equal(logits(again, ids), expected)
    after = again.unload().state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    merged = hf_kbit.merge_and_unload(model, dequantize=True)
    torch.testing.assert_close(logits(merged, ids), expected, rtol=0, atol=5e-5)


def test_generate(name):
    model, ids = load(DATA / name), some_ids(name)
    plain = model.generate(ids, max_new_tokens=5, do_sample=False)
    fast = model.generate(ids, max_new_tokens=5, do_sample=False, custom_generate=hf_kbit.fast_generate)
    assert torch.equal(plain, fast)


def test_compiled():
    """Of padded sides what is cut off, too."""
    model, ids = load(DATA / "qwen2_padded"), some_ids("qwen2_padded")
    compiled = torch.compile(model)
    torch.testing.assert_close(logits(compiled, ids), logits(model, ids), rtol=0, atol=5e-5)


# --- folders that were changed --------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(DATA / "llama", tmp_path / "llama")
    (tmp_path / "llama/logits.safetensors").unlink()
    return tmp_path / "llama"


def change(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")


def test_signs_of_old_files(folder):
    """One folder has scales of 1 and -1, the other the same as packed signs."""
    signs = {}

    def only_signs(tensors):
        for key in [key for key in tensors if key.rpartition(".")[2] in ("suh", "svh")]:
            signs[key] = tensors[key] = torch.where(tensors[key] < 0, -1, 1).half()

    change(folder, only_signs)
    expected = logits(load(folder), some_ids("llama"))

    def pack_signs(tensors):
        for key, sign in signs.items():
            del tensors[key]
            bits = (sign < 0).view(-1, 16).long() << torch.arange(16)
            tensors[key.removesuffix("h")] = bits.sum(1).to(torch.int16)

    change(folder, pack_signs)
    assert torch.equal(logits(load(folder), some_ids("llama")), expected)


def test_layers_in_16_bits_stay_so(folder):
    dense = load(DATA / "llama").get_submodule(Q).dequantize(torch.float16)

    def leave(tensors):
        for own in ("trellis", "suh", "svh", "mul1"):
            del tensors[f"{Q}.{own}"]
        tensors[f"{Q}.weight"] = dense

    change(folder, leave)
    model = load(folder)
    assert Q not in packed_layers(model) and len(packed_layers(model)) == 14
    difference = logits(model, some_ids("llama")) - logits(load(DATA / "llama"), some_ids("llama"))
    assert difference.abs().max() < 0.005


def entry(folder: Path, file: str, *path):
    """What sets an entry of a JSON file."""
    content = json.loads((folder / file).read_text())
    place = content
    for key in path[:-2]:
        place = place[key]
    place[path[-2]] = path[-1]
    (folder / file).write_text(json.dumps(content))


def tensor(name: str, make):
    """What replaces a tensor; by None: removes it."""

    def edit(folder: Path) -> None:
        def replace(tensors):
            made = make(tensors.get(name))
            tensors.pop(name, None)
            tensors.update({} if made is None else {name: made})

        change(folder, replace)

    return edit


def config(*path):
    return lambda folder: entry(folder, "config.json", "quantization_config", *path)


def with_nan(scales: torch.Tensor) -> torch.Tensor:
    scales[3] = torch.nan
    return scales


@pytest.mark.parametrize(
    "name, device",
    [("llama", "cpu"), ("qwen3_moe", "cpu"), pytest.param("llama", "cuda", marks=pytest.mark.gpu)],
)
def test_8_bit_inputs(name, device, tmp_path):
    """A wish that stays with the model, and that devices without kernels, such as CPUs, have no use for."""
    model, ids = load(DATA / name, device_map=device, dtype=torch.bfloat16), some_ids(name).to(device)
    before = logits(model, ids)
    assert hf_kbit.set_inputs(model, "int8") == {}
    after = logits(model, ids)
    rounded = device != "cpu" and native.cuda_arch(torch.device(device)) >= 900
    assert torch.equal(after, before) != rounded and (after - before).norm() < 0.1 * before.norm()
    model.save_pretrained(tmp_path)
    again = load(tmp_path, device_map=device, dtype=torch.bfloat16)
    assert torch.equal(logits(again, ids), after)


def test_codes_that_keep_their_inputs():
    with pytest.raises(ValueError, match=r"inputs: found .*q_proj \(a trellis of code 'mcg'\).*, expected a layer"):
        hf_kbit.set_inputs(load(DATA / "llama_tied"), "int8")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (tensor(f"{Q}.trellis", lambda t: t[:, :, :40]), rf"{Q}.trellis: found I16 \[8, 16, 40\], expected I16"),
        (tensor(f"{Q}.trellis", lambda t: t[:, :8]), rf"{Q}.svh: found F16 \[256\], expected F16 \[128\]"),
        (tensor(f"{Q}.trellis", lambda t: t.int()), rf"{Q}.trellis: found I32"),
        (tensor(f"{Q}.trellis", lambda t: t[:, :15]), rf"{Q}.trellis: found I16 .*multiples of 128"),
        (tensor(f"{Q}.trellis", lambda t: torch.zeros(8, 16, 144).short()), r"16 \* bits\] of 1 to 8 bits"),
        (tensor(f"{Q}.trellis", lambda t: torch.zeros(8, 16, 0).short()), r"16 \* bits\] of 1 to 8 bits"),
        (tensor(f"{Q}.trellis", lambda t: torch.zeros(8, 16, 16).short()), rf"{Q}: found 1 bits, expected 3"),
        (tensor(f"{Q}.trellis", lambda t: None), rf"{Q}.trellis: missing, expected beside {Q}.mul1"),
        (tensor(f"{Q}.suh", lambda t: None), rf"{Q}.suh: found none, expected it or su"),
        (tensor(f"{Q}.su", lambda t: torch.zeros(8).short()), rf"{Q}.suh: found \['suh', 'su'\]"),
        (tensor(f"{Q}.svh", lambda t: t.float()), rf"{Q}.svh: found F32 \[256\], expected F16"),
        (tensor(f"{Q}.svh", with_nan), rf"{Q}.svh: found 1 NaN or infinite values, expected finite ones"),
        (tensor(f"{Q}.mcg", lambda t: torch.tensor(1)), rf"{Q}: found tensors \['mcg', 'mul1'\], expected one"),
        (tensor(f"{Q}.code9", lambda t: torch.tensor(1)), rf"{Q}.code9: left over"),
        (
            tensor("model.layers.7.mlp.up_proj.trellis", lambda t: torch.zeros(8, 8, 48).short()),
            r"layers.7.*suh: found",
        ),
        (config("bits", 5), r"bits: found 5 in quantization_config, expected \[2, 3\]"),
        (config("bits", 0), "bits: found 0, expected one of 1, 2"),
        (config("bits", 9), "bits: found 9, expected one of 1, 2"),
        (config("head_bits", 5), "lm_head: found 6 bits, expected head_bits 5"),
        (config("codebook", "mul9"), "codebook: found 'mul9'"),
        (
            lambda folder: entry(folder, "quantization_config.json", "tensor_storage", K, "bits_per_weight", 8),
            rf"{K}: found 3 bits, expected 8, as quantization_config.json says",
        ),
        (
            lambda folder: (folder / "quantization_config.json").write_text("[1, 2"),
            "quantization_config.json: found no",
        ),
    ],
)
def test_what_is_damaged_is_named(folder, damage, message):
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_experts_that_differ_are_refused(tmp_path):
    """They are one weight here."""
    shutil.copytree(DATA / "qwen3_moe", tmp_path, dirs_exist_ok=True)
    (tmp_path / "quantization_config.json").unlink()
    name = "model.layers.1.mlp.experts.2.up_proj"
    change(tmp_path, lambda tensors: tensors.update({f"{name}.trellis": torch.zeros(8, 8, 48).short()}))
    with pytest.raises(ValueError, match=rf"{name}: found I16 \[8, 8, 48\].*expected what .*experts.0.gate_proj has"):
        load(tmp_path)

    def lose(tensors):
        for own in ("trellis", "suh", "svh", "mul1"):
            del tensors[f"{name}.{own}"]

    change(tmp_path, lose)
    with pytest.raises(
        ValueError, match=r"layers.1.mlp.experts.gate_up_proj: found 7 matrices, expected 2 of each of 4"
    ):
        load(tmp_path)


def test_other_codes_and_all_widths(folder):
    """Random trellises of 1 to 8 bits beside their decoded weights."""
    generator = torch.Generator().manual_seed(0)
    (folder / "quantization_config.json").unlink()
    entry(folder, "config.json", "quantization_config", "bits", 3)

    def draw(tensors):
        for number, key in enumerate(
            key for key in sorted(tensors) if key.endswith("trellis") and "lm_head" not in key
        ):
            bits, (across, down, _) = number % 8 + 1, tensors[key].shape
            tensors[key] = pack(torch.randint(0, 256, (across, down, 256), generator=generator), bits)

    change(folder, draw)
    model, ids = load(folder), some_ids("llama")
    assert {layer.bits for layer in packed_layers(model).values()} == set(range(1, 9))
    dense = copy.deepcopy(model).dequantize()
    torch.testing.assert_close(logits(model, ids), logits(dense, ids), rtol=0, atol=1e-3)


def test_a_config_without_files_is_refused():
    config = AutoConfig.from_pretrained(DATA / "llama")
    with pytest.raises(ValueError, match="found 'exl3' and no files, expected a folder"):
        LlamaForCausalLM.from_pretrained(None, config=config, state_dict={})
