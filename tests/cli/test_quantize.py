"""``hf-kbit quantize``: what it saves, what it says, what it refuses, and that it goes on where it was killed."""

import json
import os
import re
import shutil
import signal
from collections import Counter
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from architectures import BY_NAME
from command import hf_kbit_command, refuse, succeed
from gguf_file import write_gguf
from killing import in_a_child, killed_everywhere
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForMaskedLM,
    GgufConfig,
    LlamaForCausalLM,
)

import hf_kbit
from hf_kbit import KbitLinear, cli, codebooks
from hf_kbit.calibration import widths
from hf_kbit.calibration.loading import load
from hf_kbit.calibration.solving import METHODS
from hf_kbit.cli import beside
from hf_kbit.cli.folder import UNFINISHED, claim
from hf_kbit.files.finished import Finished
from hf_kbit.nn.weight import packed_layers
from hf_kbit.plan import memory
from tests import gpt_oss

OF_A_MODEL = {"config.json", "generation_config.json", "model.safetensors", "README.md"}
pytestmark = pytest.mark.usefixtures("folder")


def quantize(*arguments) -> str:
    return succeed("quantize", *arguments).stdout


def stored(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def files_of(folder) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_without_data(device, tmp_path):
    """To 4 bits if nothing is said."""
    quantize("dense", tmp_path / "plain", "--device", device)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "plain").config.quantization_config.bits == 4
    options = ("--bits", "2.0", "--codebook", "int", "--skip", "k_proj", "--embedding-bits", 5, "--device", device)
    options += ("--no-calibrate",)
    printed = quantize("dense", tmp_path / "out", *options)
    assert printed.splitlines()[-1].startswith(f"saved         {tmp_path / 'out'}: ")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    chosen = hf_kbit.KbitConfig(bits=2, codebook="int", modules_to_not_convert=["k_proj"], embedding_bits=5)
    expected = AutoModelForCausalLM.from_pretrained("dense", quantization_config=chosen)
    assert model.config.quantization_config.to_dict() == expected.config.quantization_config.to_dict()
    assert same(model.state_dict(), expected.state_dict()) and model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("text")["input_ids"] == list(b"text")


@pytest.mark.parametrize("way", ["few weights", "many weights", "a text"])
def test_with_few_bits_data_is_taken_unasked(way, device, text, monkeypatch, tmp_path):
    """By feedback, or of itself on a CPU and for many weights by the quick method; it is said before, and how to do
    without."""
    monkeypatch.setattr(cli.quantize, "MOST", 10 if way == "many weights" else 1e9)
    options = ["--bits", 3, "--sequences", 3, "--length", 40, "--device", device]
    printed = quantize("dense", tmp_path / "out", *options, *(["--text", "rows.txt"] if way == "a text" else []))
    quick = way == "many weights" or (way, device) == ("few weights", "cpu")
    how = {"bits": 3, "method": "weighted" if quick else "feedback", "sequences": 3, "length": 40, "device": device}
    how["codebook"] = "optimal" if quick or device == "cpu" else "trellis"
    hf_kbit.calibrate("dense", text if way == "a text" else None, **how).save_pretrained(tmp_path / "expected")
    assert same(stored(tmp_path / "out"), stored(tmp_path / "expected"))
    said = f"with data     by {how['method']}, as bits are few; --no-calibrate is quicker"
    assert (said in printed) == (way != "a text")


@pytest.mark.parametrize(
    ("options", "codebook"),
    [
        (("--bits", 2, "--text", "rows.txt"), "trellis"),
        (("--bits", 2.5, "--calibrate"), "trellis"),
        (("--bits", 3, "--calibrate", "--codebook", "optimal"), "optimal"),
        (("--bits", 3, "--calibrate", "--method", "weighted"), "optimal"),
        (("--bits", 3, "--no-calibrate"), "optimal"),
        (("--bits", 4, "--calibrate"), "optimal"),
    ],
)
@pytest.mark.parametrize("many", [False, True])
def test_few_bits_are_a_trellis_by_feedback(options, codebook, many, device, monkeypatch, tmp_path):
    """Where a GPU has kernels for it, unless there are many weights or a codebook is named; it is said before."""
    if device == "cpu":  # as if it were such a GPU when the command asks, and none when products do
        answers = chain([True], repeat(False))
        monkeypatch.setattr("hf_kbit.ops.trellis.has_kernels", lambda *_: next(answers))
    monkeypatch.setattr(cli.quantize, "MOST", 10 if many else 1e9)
    amount = () if "--no-calibrate" in options else ("--sequences", 2, "--length", 32)
    printed = quantize("dense", tmp_path / "out", *options, *amount, "--device", device)
    expected = "optimal" if many else codebook
    assert AutoConfig.from_pretrained(tmp_path / "out").quantization_config["codebook"] == expected
    said = "a trellis     as bits are few; --codebook optimal makes a quicker model, which loses more"
    assert (said in printed) == (expected == "trellis")


def test_what_few_bits_are_without_data(monkeypatch, tmp_path):
    """Where nobody asked for it: of a trellis on a CPU, of what reads no tokens, and without a tokenizer. An error
    says how to do without."""
    quantize("dense", tmp_path / "trellis", "--bits", 2, "--codebook", "trellis", "--device", "cpu")
    BY_NAME["vit"].build().save_pretrained(tmp_path / "vit")
    Path(shutil.copytree("dense", tmp_path / "mute"), "tokenizer.json").unlink()
    for name in ("vit", "mute"):
        quantize(tmp_path / name, tmp_path / f"{name}-3", "--bits", 3, "--device", "cpu")
    for name in ("trellis", "vit-3", "mute-3"):
        assert "Calibrated" not in (tmp_path / name / "README.md").read_text("utf-8")
    monkeypatch.setattr("hf_kbit.calibration.layerwise.check", Mock(side_effect=ValueError("layer: not visited")))
    found = refuse("quantize", "dense", tmp_path / "refused", "--bits", 3, "--device", "cpu")
    assert "layer: not visited (with --no-calibrate no data is needed)" in found


def test_8_bit_inputs(tmp_path):
    """Wished for by the saved model, with data too."""
    for name, options in (("plain", []), ("calibrated", ["--calibrate", "--sequences", 2, "--length", 32])):
        quantize("dense", tmp_path / name, "--inputs", "int8", "--device", "cpu", *options)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert {layer.inputs for layer in packed_layers(model).values()} == {"int8"}


@pytest.mark.parametrize("content", ["{", "3", '{"path": "x"}', '["x", {"path": 5}]'])
def test_other_files_called_modules(content, tmp_path):
    (tmp_path / "modules.json").write_text(content)
    assert beside._modules(tmp_path / "modules.json") == []


@pytest.mark.parametrize("options", [("--bits", 4), ("--bits", 3, "--calibrate", "--sequences", 3, "--length", 32)])
def test_what_is_in_fp8(options, tmp_path):
    """It is decoded, and then as any other model; the command says that what FP8 has lost is lost."""
    folder = Path(shutil.copytree("dense", tmp_path / "fp8"))
    tensors, decoded = stored(folder), {}
    for name in [name for name in tensors if "proj" in name]:  # all within one block of 128 x 128
        scale = (tensors[name].abs().max().float() / 448)[None, None]
        tensors[name] = (tensors[name].float() / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        decoded[name] = (tensors[name].float() * scale).bfloat16()
    config = json.loads((folder / "config.json").read_text())
    kind = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kind}))
    plain = Path(shutil.copytree("dense", tmp_path / "plain"))
    save_file(stored(plain) | decoded, plain / "model.safetensors", {"format": "pt"})
    printed = quantize(folder, tmp_path / "out", *options, "--device", "cpu")
    assert "\ndecoding      from FP8, whose errors stay" in f"\n{printed}"
    quantize(plain, tmp_path / "expected", *options, "--device", "cpu")
    assert same(stored(tmp_path / "out"), stored(tmp_path / "expected"))
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "kbit"


def test_a_gguf_file(tmp_path):
    """It is decoded, with its tokenizer; what lies beside it is somebody's."""
    pytest.importorskip("gguf")
    file, data = tmp_path / "small.gguf", ("--calibrate", "--sequences", 2, "--length", 32)
    write_gguf(file)
    (tmp_path / "notes.txt").write_text("mine")
    how = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True), "dtype": torch.bfloat16}
    AutoModelForCausalLM.from_pretrained(tmp_path, **how).save_pretrained(tmp_path / "decoded")
    AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name).save_pretrained(tmp_path / "decoded")
    for name, options in (("plain", ()), ("calibrated", data)):
        out = tmp_path / name
        assert "decoding      from GGUF, whose errors stay" in quantize(file, out, "--device", "cpu", *options)
        quantize(tmp_path / "decoded", tmp_path / f"{name} expected", "--device", "cpu", *options)
        assert same(stored(out), stored(tmp_path / f"{name} expected"))
        tokenizers = (AutoTokenizer.from_pretrained(each) for each in (out, tmp_path / "decoded"))
        assert len({tuple(own("xx zz")["input_ids"]) for own in tokenizers}) == 1 and "notes.txt" not in files_of(out)
    model = hf_kbit.calibrate(file, bits=4, sequences=2, length=32)
    assert same(model.state_dict(), AutoModelForCausalLM.from_pretrained(tmp_path / "calibrated").state_dict())
    assert "none.gguf" in refuse("quantize", tmp_path / "none.gguf", tmp_path / "out")


@pytest.mark.parametrize("bits", [4, 3])
def test_what_has_experts_in_mxfp4(device, bits, monkeypatch, tmp_path):
    """As ``from_pretrained`` does it, bit for bit in 4 bits; the decoded model, of 4 times the size, is not loaded."""
    original, loaded = tmp_path / "original", []
    gpt_oss.save(original, experts=2, hidden=64, inner=32, layers=1)

    def record(*args, **kwargs):
        loaded.append(kwargs.get("quantization_config"))
        return load(*args, **kwargs)

    monkeypatch.setattr("hf_kbit.calibration.loading.load", record)
    quantize(original, tmp_path / "out", "--bits", bits, "--device", device)
    expected = AutoModelForCausalLM.from_pretrained(original, quantization_config=hf_kbit.KbitConfig(bits=bits))
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), expected.state_dict())
    projection = expected.model.layers[0].mlp.experts.down_proj
    assert (projection.decoding.levels == codebooks.fp4()) == (bits == 4)
    assert [config and config.bits for config in loaded] == [bits]
    for options in (["--calibrate"], ["--memory", "1MB"], ["--bits", 3.5]):
        found = refuse("quantize", original, tmp_path / "refused", *options, "--device", device)
        assert "original: found experts in MXFP4, which are quantized" in found
    assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("data", ["--text", "--dataset", "its own", "its own, tuned"])
def test_with_data(data, device, text, tmp_path):
    """As ``calibrate`` does it, with the same text; nothing of the run is left in the folder."""
    if data == "--dataset":
        pytest.importorskip("datasets")
    own, tune = data.startswith("its own"), {"tune": 10} if data.endswith("tuned") else {}
    keywords = {"method": "weighted", "bits": 3, "codebook": "int", "sequences": 3, "length": 70, "batch": 2}
    options = [part for name, value in keywords.items() for part in (f"--{name}", value)]
    options += ["--tune", "--steps", 10] if tune else []
    options += [] if own else [data, "rows.txt"]
    ended = succeed("quantize", "dense", tmp_path, "--calibrate", *options, "--device", device)
    printed = ended.stdout.splitlines()
    own_name = "text that the model wrote" if tune else "the built-in text"
    name = own_name if own else "rows.txt"
    assert f"calibrating   weighted, 3 x 70 tokens of {name}, on {device}" in printed
    assert "calibrating: 100%" in ended.stderr and ("writing: 100%" in ended.stderr) == bool(tune)
    read = {"--text": text, "--dataset": "\n\n".join(text.splitlines())}.get(data)
    expected = hf_kbit.calibrate("dense", read, device=device, **keywords, **tune)
    expected.save_pretrained(tmp_path / "expected")
    tuned = [line.split(maxsplit=1)[1] for line in printed if line.startswith("tuned")]
    assert tuned == ([expected.hf_quantizer.outcome.tuned] if tune else [])
    assert same(stored(tmp_path), stored(tmp_path / "expected"))
    assert not (tmp_path / UNFINISHED).exists()


def test_to_a_mean_width(device, text, tmp_path):
    """The widths are those that are chosen on the sequences evenly spread, and what is said of them is true."""
    twice = ("--text", "rows.txt", "--text", "rows.txt")
    options = ("--bits", 3.4, "--no-calibrate", "--device", device)
    lines = quantize("dense", tmp_path, *options, *twice).splitlines()
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config.quantization_config
    dense = AutoModelForCausalLM.from_pretrained("dense")
    ids = torch.tensor(list(f"{text}\n\n{text}".encode()))
    window = len(ids) // -(-len(ids) // 96)  # fewer sequences than are wanted, so all of them
    tokens = ids[: len(ids) // window * window]
    expected = widths.choose_widths(dense, tokens, 3.4, window=window, device=device)
    assert config.module_bits == expected.module_bits and config.bits == expected.bits
    measured = widths.measure(dense, tokens, hf_kbit.KbitConfig(bits=2), window=window, device=device)
    bits = {name: config.bits_for(name) for name in measured}
    mean = sum(bits[name] * layer.weights for name, layer in measured.items())
    mean /= sum(layer.weights for layer in measured.values())
    said = ", ".join(f"{count} in {width} bits" for width, count in sorted(Counter(bits.values()).items()))
    first, _, kinds, *extremes = lines[lines.index(f"widths        {mean:.2f} bits for a weight: {said}") - 1 :]
    where = f"{len(tokens)} tokens of rows.txt, rows.txt, on {device}"
    assert first == f"measuring     what few bits in each layer cost on {where}"
    assert f"down_proj {bits['model.layers.0.mlp.down_proj']:.2f}" in kinds
    costs = sorted(measured, key=lambda name: measured[name].costs[2] / measured[name].weights)
    for line, extreme, name in zip(extremes, ("most", "least"), (costs[-1], costs[0]), strict=False):
        assert re.search(
            rf" {name}: {bits[name]} bits, for 2 cost \S+ nats a token, the {extreme} for its size$", line
        )


def test_to_a_memory(device, tmp_path):
    """What is saved and the cache take at most so much, and nearly so much; in less of it tables are packed."""
    dense = AutoModelForCausalLM.from_pretrained("dense")
    cache = memory.cache_bytes(dense, 64)
    for out, size, calibrate in ((tmp_path / "small", 35_000, ()), (tmp_path / "large", 47_000, ("--calibrate",))):
        printed = quantize("dense", out, "--memory", f"{size}B", "--context", 64, *calibrate, "--device", device)
        assert size - 1000 < sum(tensor.nbytes for tensor in stored(out).values()) + cache <= size
        tables = memory.embedding_bits_for_memory(dense, size, context=64)
        bits = memory.bits_for_memory(dense, size, context=64, embedding_bits=tables)
        said = re.findall(r"([0-9][0-9,]*) (for .*|left over|bytes)$", printed, flags=re.MULTILINE)
        said = {what: int(number.replace(",", "")) for number, what in said}
        assert said.pop("bytes") == size == sum(said.values())
        assert said["for what is kept of 64 tokens"] == cache and said["left over"] <= 1
        assert any(what.endswith(f" weights, {bits:.2f} bits and 0.25 for scales") for what in said)


def test_an_encoder(device, tmp_path):
    printed = quantize("bert", tmp_path / "bert", "--calibrate", "--sequences", 2, "--device", device)
    assert "tokens of the built-in text" in printed
    layer = BertForMaskedLM.from_pretrained(tmp_path / "bert").bert.encoder.layer[0]
    assert isinstance(layer.output.dense, KbitLinear)
    found = refuse("quantize", "bert", tmp_path / "mixed", "--bits", 2.5, "--device", device)
    assert "expected a causal language model" in found


def test_it_goes_on_where_it_was_killed(device, monkeypatch, tmp_path):
    arguments = ("--device", device, "--calibrate", "--text", "rows.txt", "--bits", 2.5)
    out = tmp_path / "out"

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    def killed_while_saving(model, folder):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", killed_while_saving)
        with pytest.raises(Killed):
            hf_kbit_command("quantize", "dense", out, *arguments)
    assert files_of(out) == {
        f"{UNFINISHED}/{name}" for name in ("lock", "layers/run.json", "layers/model.layers.0.safetensors")
    }
    assert "expected this run's; take the same arguments" in refuse("quantize", "dense", out, *arguments[:-1], 3.5)
    with monkeypatch.context() as patch:
        patch.setattr(METHODS["feedback"], "solve", killed)
        quantize("dense", out, *arguments)
    quantize("dense", tmp_path / "whole", *arguments)
    assert same(stored(out), stored(tmp_path / "whole"))
    assert not (out / UNFINISHED).exists()


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_full_disk(device, monkeypatch, tmp_path, calibrate):
    """One line, nothing that looks like a model, and the same command goes on."""
    options = ["--calibrate", "--method", "weighted", "--sequences", 2] if calibrate else []
    arguments = ("dense", tmp_path, "--device", device, *options)

    def full(tensors, file, *_, **__):
        Path(file).write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full)
        assert "hf-kbit quantize: the disk is full" in refuse("quantize", *arguments)
    assert all(file.startswith(f"{UNFINISHED}/") for file in files_of(tmp_path))
    assert any(tmp_path.rglob("run.json")) and not any(tmp_path.rglob("model/*"))
    quantize(*arguments)
    assert files_of(tmp_path) == OF_A_MODEL | {"tokenizer.json", "tokenizer_config.json"}


# --- what lies beside a model ---------------------------------------------------------------------

BESIDE = {  # made up, but for their names: they are copied as they are
    "modules.json": '[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense/"}, {"type": "Normalize"}]',
    "1_Pooling/config.json": '{"pooling_mode_cls_token": true}',
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "a layer behind the model",
    "notes.txt": "mine",
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "vocab.json": "{}",
    "merges.txt": "a b",
    "spiece.model": "pieces",
}


def test_what_lies_beside_a_model_is_kept_or_named(tmp_path):
    """All but weights, what belongs to these, and what is made anew."""
    whisper, out = tmp_path / "whisper", tmp_path / "out"
    model = BY_NAME["whisper"].build()
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(whisper)
    of_the_model = (
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "README.md",
        ".git/config",
        "__pycache__/a.pyc",
    )
    left = (
        "2_Dense_of_before/model.safetensors",
        "onnx/fp16/model.onnx",
        "onnx/ort.json",
        "optimizer.pt",
    )
    for name, text in (BESIDE | dict.fromkeys((*of_the_model, *left), "other")).items():
        (whisper / name).parent.mkdir(parents=True, exist_ok=True)
        (whisper / name).write_text(text)
    printed = quantize(whisper, out)
    assert "tokenizer" not in printed
    assert (
        f"left behind   2_Dense_of_before/, onnx/, optimizer.pt: with weights that were not read, so in {whisper} al"
        in printed
    )
    assert files_of(out) == OF_A_MODEL | {*BESIDE}
    assert all((out / name).read_text() == text for name, text in BESIDE.items())
    assert json.loads((out / "generation_config.json").read_text())["max_new_tokens"] == 17
    named = shutil.copytree("dense", tmp_path / "named")  # by its index, as nobody else's file is
    weights = (named / "model.safetensors").rename(named / "layers.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(load_file(weights), weights.name)}
    (named / "model.safetensors.index.json").write_text(json.dumps(index))
    for model in ("dense", named):
        assert "left behind" not in quantize(model, tmp_path / f"{Path(model).name} and nothing left")


def test_no_tokenizer_is_made_up(folder, tmp_path):
    bare = shutil.copytree(folder / "dense", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    assert f"tokenizer     none in {bare}" in quantize(bare, tmp_path / "out")
    assert files_of(tmp_path / "out") == OF_A_MODEL
    how = ("--calibrate", "--method", "weighted", "--sequences", 2)
    found = refuse("quantize", bare, tmp_path / "calibrated", *how, "--text", "rows.txt")
    assert "tokenizer: found none, expected one" in found and not (tmp_path / "calibrated").exists()
    found = refuse("quantize", bare, tmp_path / "calibrated", *how)
    assert "tokenizer: found none, expected one, for what is read without data is a text" in found
    quantize(bare, tmp_path / "its own text", "--calibrate", "--sequences", 2, "--length", 9)


def test_a_model_of_the_hub(folder, monkeypatch, tmp_path):
    """What lies beside it but weights, of the revision that the model is of, without a connection of what the cache
    has; and what is uploaded."""
    asked, uploaded = [], []

    def snapshot(name, *, revision, allow_patterns=(), local_files_only=False):
        asked.append((name, revision))
        wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
        assert local_files_only or set(allow_patterns) == wanted
        return str(folder / "dense")

    def names(name, *, revision):
        asked.append((name, revision))
        if written:
            raise OSError("no connection")
        return [".gitattributes", "onnx/model.onnx", "onnx/config.json", *files_of(folder / "dense")]

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.list_repo_files", names)
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **keywords: uploaded.append(keywords))
    monkeypatch.setattr("huggingface_hub.create_repo", lambda name, exist_ok: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr("huggingface_hub.file_exists", lambda name, file: written)
    for loader in (AutoConfig, LlamaForCausalLM):  # as if the name was one on the Hub
        load = loader.from_pretrained

        def from_the_hub(name, *arguments, load=load, **keywords):
            asked.append((name, keywords.pop("revision")))
            return load(folder / "dense", *arguments, **keywords)

        monkeypatch.setattr(loader, "from_pretrained", from_the_hub)
    for written in (False, True):
        out = tmp_path / f"out {written}"
        how = ("--revision", "v1", "--push-to-hub", "packed", "--dtype", "float32")
        printed = quantize("org/name", out, *how)
        assert "uploaded      me/packed" in printed and ("left behind   onnx/: " in printed) != written
        assert set(asked) == {("org/name", "v1")}
        kept = ["README.md"] if written else []
        assert uploaded.pop() == {"repo_id": "me/packed", "folder_path": out, "ignore_patterns": kept}
        assert (out / "tokenizer.json").exists() and '.from_pretrained("packed")' in (out / "README.md").read_text()
        assert stored(out)["lm_head.weight"].dtype == torch.float32


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("packed", "packed: found it quantized already (kbit), expected a model in 16 or 32 bits, in FP8, in a"),
        ("dense --bits 6", "bits: found 6, expected one of 2, 3, 4, 5"),
        ("dense --bits 3 --memory 1GB", "argument --memory: not allowed with argument --bits"),
        ("dense --memory much", "--memory: found 'much', expected a size such as 20GB"),
        ("dense --memory 10kB", "memory: found 10,000 bytes, expected 1,0"),
        ("dense --text rows.txt", "--text: found data, but neither --calibrate nor mixed widths need it"),
        ("dense --tune", "--tune: found it without --calibrate, expected both"),
        ("dense --calibrate --steps 9", "--steps: found it without --tune, expected both"),
        ("dense --calibrate --no-tune-whole", "--no-tune-whole: found it without --tune, expected both"),
        ("dense --calibrate --method gptq", "argument --method: invalid choice: 'gptq' (choose from"),
        ("dense --calibrate --text none.txt", "No such file or directory: 'none.txt'"),
        ("dense --codebook best", "codebook: found 'best'"),
        ("dense --skip (", "modules_to_not_convert: found pattern '('"),
        ("dense --device cuda:1", "--device: found cuda:1, but torch can use no GPU"),
    ],
)
def test_refused(monkeypatch, arguments, message, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, *options = arguments.split()
    assert message in refuse("quantize", model, tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["notes", "unfinished/thesis.txt", f"{UNFINISHED}.txt"])
def test_nothing_of_others_is_touched(tmp_path, name):
    """In a new folder, and in that of a run that was killed."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    for _ in range(2):
        found = refuse("quantize", "dense", tmp_path)
        assert f"{tmp_path}: found files, {Path(name).parts[0]} for one, expected a new folder" in found
        assert files_of(tmp_path) == {name} and (tmp_path / name).read_text() == "mine"
        (tmp_path / UNFINISHED / "model" / "x").mkdir(parents=True)


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        assert "found something else, expected a folder" in refuse("quantize", "dense", tmp_path / name)
    assert (tmp_path / "file").read_text() == "mine"


# --- the folder -----------------------------------------------------------------------------------


def test_one_process_writes_a_folder(tmp_path):
    out = tmp_path / "out"
    with claim(out):
        message = f"{out}: found another process that writes there, expected none; wait until it ends\n"
        assert refuse("quantize", "dense", out).endswith(message)
    assert not out.exists()
    with claim(out) as output, pytest.raises(ValueError, match="another process"), claim(out):
        pass
    assert not out.exists() and output.folder == out


def test_a_claim_ends_with_its_process(tmp_path):
    """However it ends; and what it was saving is gone, while what it had calibrated stays."""

    def act_and_die():
        with claim(tmp_path) as output:
            output.model.mkdir(parents=True)
            (output.model / "half").write_text("")
            Finished(output.layers, "of a run")
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(act_and_die) == -signal.SIGKILL and f"{UNFINISHED}/model/half" in files_of(tmp_path)
    with claim(tmp_path) as output:
        assert files_of(tmp_path) == {f"{UNFINISHED}/lock", f"{UNFINISHED}/layers/run.json"}
    output.layers.joinpath("run.json").unlink()
    with claim(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_killed_while_the_model_moves_out(tmp_path):
    """What has moved is no model without config.json. Once the model was whole, the rest follows when the command is
    given again, and refused."""
    files = {"config.json", "model.safetensors", "additional_chat_templates/a"}

    def save(folder, name):
        with claim(folder) as output:
            for file in files:
                (output.model / file).parent.mkdir(parents=True, exist_ok=True)
                (output.model / file).write_text(name)
            Finished(output.layers, "of a run")
            output.publish()

    ended = []
    for folder in killed_everywhere(tmp_path, lambda folder: None, lambda folder: save(folder, "killed")):
        if (folder / UNFINISHED / "whole").exists() or (folder / "config.json").exists():
            with pytest.raises(ValueError, match=r"found files, .* for one, expected a new folder"), claim(folder):
                pass
        else:
            save(folder, "new")
        assert files_of(folder) == files and not (folder / UNFINISHED).exists()
        assert len({(folder / name).read_text() for name in files}) == 1
        ended.append((folder / "config.json").read_text())
    assert ended == sorted(ended, reverse=True) and set(ended) == {"killed", "new"}, ended
