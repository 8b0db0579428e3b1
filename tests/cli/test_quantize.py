"""``hf-kbit quantize``: what it saves, what it says, what it refuses, and that it goes on where it was killed."""

import re
import shutil
from collections import Counter

import pytest
import torch
from cli.texts import TEXT
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForMaskedLM,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import KbitLinear, cli, widths
from hf_kbit.calibration.layerwise import METHODS
from hf_kbit.cli.quantize import UNFINISHED


@pytest.fixture
def run_quantize(folder, device, monkeypatch):
    monkeypatch.chdir(folder)

    def run(*arguments):
        return CliRunner().invoke(cli.app, list(map(str, ["quantize", *arguments, "--device", device])))

    return run


def stored(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_quantize_without_data(run_quantize, tmp_path):
    result = run_quantize("dense", tmp_path / "out", "--bits", 2, "--codebook", "int", "--skip", "k_proj")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith(f"saved         {tmp_path / 'out'}: ")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    chosen = hf_kbit.KbitConfig(bits=2, codebook="int", modules_to_not_convert=["k_proj"])
    expected = AutoModelForCausalLM.from_pretrained("dense", quantization_config=chosen)
    assert model.config.quantization_config.to_dict() == expected.config.quantization_config.to_dict()
    assert same(model.state_dict(), expected.state_dict()) and model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("text")["input_ids"] == list(b"text")


def test_quantize_to_4_bits_if_nothing_is_said(run_quantize, tmp_path):
    assert run_quantize("dense", tmp_path).exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.quantization_config.bits == 4


@pytest.mark.parametrize("data", ["--text", "--dataset", "built-in"])
def test_quantize_with_data(run_quantize, data, device, tmp_path):
    """As ``calibrate`` does it, with the same text; nothing of the run is left in the folder."""
    source = () if data == "built-in" else (data, "rows.txt")
    choices = (
        "--bits",
        3,
        "--codebook",
        "layer",
        "--method",
        "weighted",
        "--sequences",
        3,
        "--length",
        70,
        "--batch",
        2,
    )
    result = run_quantize("dense", tmp_path, "--calibrate", *source, *choices)
    assert result.exit_code == 0, result.output
    name = "the built-in text" if data == "built-in" else "rows.txt"
    assert f"calibrating   weighted, 3 x 70 tokens of {name}, on {device}" in result.stdout.splitlines()
    assert "calibrating: 100%" in result.stderr
    text = {"--text": TEXT, "--dataset": "\n\n".join(TEXT.splitlines()), "built-in": None}[data]
    keywords = {"method": "weighted", "bits": 3, "codebook": "layer", "sequences": 3, "length": 70, "batch": 2}
    hf_kbit.calibrate("dense", text, device=device, **keywords).save_pretrained(tmp_path / "expected")
    assert same(stored(tmp_path), stored(tmp_path / "expected"))
    assert not (tmp_path / UNFINISHED).exists()


@pytest.mark.parametrize("calibrate", [False, True])
def test_quantize_to_a_mean_width(run_quantize, calibrate, device, tmp_path):
    """The widths are those that are chosen on the sequences evenly spread, and what is said of them is true."""
    choices = ("--bits", 3.4, "--text", "rows.txt", "--text", "rows.txt", *(["--calibrate"] if calibrate else []))
    result = run_quantize("dense", tmp_path, *choices)
    assert result.exit_code == 0, result.output
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config.quantization_config
    dense = AutoModelForCausalLM.from_pretrained("dense")
    text = torch.tensor(list(f"{TEXT}\n\n{TEXT}".encode()))
    tokens = torch.cat([text[:96], text[len(text) // 96 // 2 * 96 :][:96]])
    expected = widths.choose_widths(dense, tokens, 3.4, window=96, device=device)
    measured = widths.measure(dense, tokens, hf_kbit.KbitConfig(bits=2), window=96, device=device)
    costs = sorted(measured, key=lambda name: measured[name].costs[2] / measured[name].weights)
    assert config.module_bits == expected.module_bits and config.bits == expected.bits
    layers = {name: m for name, m in dense.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"}
    counts = Counter(config.bits_for(name) for name in layers)
    sizes = {name: layer.out_features * -(-layer.in_features // 32) for name, layer in layers.items()}  # with padding
    mean = sum(config.bits_for(name) * size for name, size in sizes.items()) / sum(sizes.values())
    said = ", ".join(f"{count} in {width} bits" for width, count in sorted(counts.items()))
    lines = [line.strip() for line in result.stdout.splitlines()]
    start = lines.index(
        f"measuring     what 2 bits in each layer cost on 192 tokens of rows.txt, rows.txt, on {device}"
    )
    assert lines[start + 1] == f"widths        {mean:.2f} bits for a weight: {said}"
    assert f"down_proj {config.bits_for('model.layers.0.mlp.down_proj'):.2f}" in lines[start + 2]
    for line, extreme, expected in zip(lines[start + 3 :], ("most", "least"), (costs[-1], costs[0]), strict=False):
        name, width = re.match(
            rf"(\S+): (\d) bits, for 2 cost \S+ nats a token, the {extreme} for its size", line
        ).groups()
        assert name == expected and config.bits_for(name) == int(width)


@pytest.mark.parametrize("calibrate", [False, True])
def test_quantize_to_a_memory(run_quantize, calibrate, tmp_path):
    """What is saved and the cache take at most so much, and nearly so much."""
    dense = AutoModelForCausalLM.from_pretrained("dense")
    cache = widths.cache_bytes(dense, 64)
    for index, size in enumerate((45_000, 46_000)):
        out = tmp_path / str(index)
        arguments = ["--memory", f"{size}B", "--context", 64, *(["--calibrate"] if calibrate else [])]
        result = run_quantize("dense", out, *arguments)
        assert result.exit_code == 0, result.output
        taken = sum(tensor.nbytes for tensor in stored(out).values()) + cache
        assert size - 1000 < taken <= size
        bits = widths.bits_for_memory(dense, size, context=64)
        said = re.findall(r"([0-9][0-9,]*) (for .*|left over|bytes)$", result.stdout, flags=re.MULTILINE)
        said = {what: int(number.replace(",", "")) for number, what in said}
        assert said.pop("bytes") == size == sum(said.values())
        assert said["for keys and values of 64 tokens"] == cache and said["left over"] <= 1
        assert any(what.endswith(f" weights, {bits:.2f} bits and 0.25 for scales") for what in said)


def test_quantize_to_more_memory_than_there_is_use_for(run_quantize, tmp_path):
    result = run_quantize("dense", tmp_path, "--memory", "1.5 MB", "--context", 0)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.quantization_config.bits == 5
    left = 1_500_000 - sum(tensor.nbytes for tensor in stored(tmp_path).values())
    assert f"{left:,} left over" in result.stdout


def test_quantize_goes_on_where_it_was_killed(run_quantize, folder, monkeypatch, tmp_path):
    arguments = ("dense", tmp_path / "out", "--calibrate", "--text", "rows.txt", "--bits", 2.5)

    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    def killed_while_saving(model, folder):
        (folder / "model.safetensors").write_bytes(b"half of it")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", killed_while_saving)
        with pytest.raises(Killed):
            run_quantize(*arguments)
    kept = [file.name for file in (tmp_path / "out" / UNFINISHED).iterdir()]
    assert sorted(kept) == ["model.layers.0.safetensors", "run.json"]
    refused = run_quantize(*arguments[:-1], 3.5)
    assert refused.exit_code == 1 and "expected this run's; take the same arguments" in refused.stderr
    with monkeypatch.context() as patch:
        patch.setattr(METHODS["feedback"], "solve", killed)
        assert run_quantize(*arguments).exit_code == 0
    assert run_quantize("dense", tmp_path / "whole", *arguments[2:]).exit_code == 0
    assert same(stored(tmp_path / "out"), stored(tmp_path / "whole"))
    assert not (tmp_path / "out" / UNFINISHED).exists()


def test_quantize_an_encoder(run_quantize, tmp_path):
    assert run_quantize("bert", tmp_path / "bert", "--calibrate", "--sequences", 2).exit_code == 0
    assert isinstance(
        BertForMaskedLM.from_pretrained(tmp_path / "bert").bert.encoder.layer[0].output.dense, KbitLinear
    )
    result = run_quantize("bert", tmp_path / "mixed", "--bits", 2.5)
    assert result.exit_code == 1 and "expected a causal language model" in result.stderr


def test_quantize_without_a_tokenizer(run_quantize, folder, tmp_path):
    shutil.copytree(folder / "dense", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    result = run_quantize(tmp_path / "bare", tmp_path / "out")
    assert result.exit_code == 0 and f"tokenizer     none in {tmp_path / 'bare'}" in result.stdout
    result = run_quantize(tmp_path / "bare", tmp_path / "calibrated", "--calibrate")
    assert result.exit_code == 1 and not (tmp_path / "calibrated").exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["packed"], "packed: found it quantized already, expected a model in 16 or 32 bits"),
        (["dense", "--bits", 6], "--bits: found 6.0, expected 2 to 5"),
        (["dense", "--bits", 3, "--memory", "1GB"], "--memory: found it and --bits, expected one"),
        (["dense", "--memory", "much"], "--memory: found 'much', expected a size such as 20GB"),
        (["dense", "--memory", "10kB"], "memory: found 10,000 bytes, expected 1,0"),
        (["dense", "--text", "rows.txt"], "--text: found data, but neither --calibrate nor mixed widths need it"),
        (["dense", "--calibrate", "--method", "gptq"], "--method: found 'gptq', expected one of ['feedback', "),
        (["dense", "--calibrate", "--text", "none.txt"], "No such file or directory: 'none.txt'"),
        (["dense", "--codebook", "best"], "codebook: found 'best'"),
        (["dense", "--skip", "("], "modules_to_not_convert: found pattern '('"),
        (["dense", "--device", "cuda:1"], "--device: found cuda:1, but torch can use no GPU"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_quantize_refuses(folder, monkeypatch, arguments, message, tmp_path):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out"
    result = CliRunner().invoke(cli.app, list(map(str, ["quantize", arguments[0], out, *arguments[1:]])))
    assert result.exit_code == 1 and message in result.stderr and "hf-kbit quantize: " in result.stderr
    assert not out.exists()


def test_quantize_overwrites_nothing(run_quantize, tmp_path):
    (tmp_path / "notes").write_text("mine")
    result = run_quantize("dense", tmp_path)
    assert result.exit_code == 1 and f"{tmp_path}: found files, expected a new folder" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["notes"]
