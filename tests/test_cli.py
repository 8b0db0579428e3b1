"""The commands: what they print, what they refuse, and that they do what the functions behind them do."""

import csv
import importlib.metadata
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import KbitLinear, _native, cli, widths
from hf_kbit.calibration.model import METHODS
from hf_kbit.evaluation import evaluate

REINSTALL = "to install hf_kbit again, add --force-reinstall --no-deps --no-cache-dir to the command that installed it"
BUILD = {
    "torch": "2.13",
    "cpu": {"missing": "", "compiler": "GNU 12.2.0"},
    "cuda": {"missing": "", "compiler": "nvcc 13.0.88", "archs": "80-real 90a-real 120"},
}


def info():
    result = CliRunner().invoke(cli.app, ["info"])
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.fixture
def installed(monkeypatch):
    """Pretends that libraries are loaded, or missing for a reason, and what the build recorded."""

    def pretend(cpu="", cuda="", build=BUILD, torch_cuda="13.0"):
        missing = {"cpu": cpu, "cuda": cuda}
        monkeypatch.setattr(_native, "build_info", lambda: build)
        monkeypatch.setattr(_native, "instruction_set", lambda path: "avx2")
        monkeypatch.setattr(
            _native, "library", lambda name: _native.Library(name, f"/p/{name}.so", missing=missing[name])
        )
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.delenv("HF_KBIT_CPU", raising=False)

    return pretend


def test_this_installation():
    lines = info()
    assert lines[0].startswith(f"hf_kbit       {hf_kbit.__version__}, Python {sys.version.split()[0]}, ")
    assert lines[1] == f"torch         {torch.__version__} in {torch.__path__[0]}"
    assert f"transformers  {importlib.metadata.version('transformers')}" in lines
    found = _native.library("cpu")
    assert f"cpu kernels   {found.path if found.loaded else f'missing: {found.missing}'}" in lines


def test_all_loaded(installed):
    installed()
    assert info()[6:] == [
        "cpu kernels   /p/cpu.so",
        "              built by GNU 12.2.0 with the headers of torch 2.13",
        "              uses avx2 instructions",
        "cuda kernels  /p/cuda.so",
        "              built by nvcc 13.0.88 with the headers of torch 2.13",
        "              for sm_80, sm_90a, sm_120, newer ones",
    ]


def test_gpus_without_ptx(installed):
    installed(build={**BUILD, "cuda": {**BUILD["cuda"], "archs": "90a-real"}})
    assert info()[-1] == "              for sm_90a"


def test_chosen_instruction_set(installed, monkeypatch):
    installed()
    monkeypatch.setenv("HF_KBIT_CPU", "avx2")
    assert "              uses avx2 instructions, set by HF_KBIT_CPU" in info()


def test_library_without_record(installed):
    installed(build={})
    assert info()[6:] == [
        "cpu kernels   /p/cpu.so",
        "              uses avx2 instructions",
        "cuda kernels  /p/cuda.so",
    ]


def test_all_missing(installed):
    installed(cpu="no C++ compiler; install one", cuda="no nvcc; install the CUDA toolkit")
    assert info()[6:] == [
        "cpu kernels   missing: no C++ compiler; install one",
        "cuda kernels  missing: no nvcc; install the CUDA toolkit",
        f"              {REINSTALL}",
    ]


def test_installing_again_is_no_remedy_for_a_torch_without_cuda(installed):
    installed(cuda="torch was built without CUDA", torch_cuda=None)
    lines = info()
    assert lines[-1] == "cuda kernels  missing: torch was built without CUDA"
    assert not any(REINSTALL in line for line in lines)


def test_missing_package(monkeypatch):
    monkeypatch.setattr(cli, "version", lambda name: importlib.metadata.version("no-such-package"))
    assert "peft          not installed" in info()


def test_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    assert "GPUs          GPU 0, GPU 1" in info()


def test_command_is_declared():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    (target,) = re.findall(r'^hf-kbit = "(.+)"$', text, flags=re.MULTILINE)
    assert pkgutil.resolve_name(target) is cli.app


def test_runs_as_a_module():
    ran = subprocess.run([sys.executable, "-m", "hf_kbit.cli", "info"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout.startswith("hf_kbit       "), ran.stderr


# --- eval ---

ROWS = [f"{n} bottles hang on the wall; take one away.\n" for n in range(8)]
TEXT = "\n\n".join(ROWS)
SHAPE = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``dense``, a model with a tokenizer; ``packed``, the same in 3 bits without one; ``bert``; and a text."""
    folder = tmp_path_factory.mktemp("eval")
    torch.manual_seed(0)
    config = LlamaConfig(num_hidden_layers=1, max_position_embeddings=96, initializer_range=0.2, **SHAPE)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "dense")
    packed = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=hf_kbit.KbitConfig(bits=3))
    packed.save_pretrained(folder / "packed")
    BertForMaskedLM(BertConfig(num_hidden_layers=1, **SHAPE)).save_pretrained(folder / "bert")
    for name in ("dense", "bert"):
        byte_tokenizer().save_pretrained(folder / name)
    (folder / "rows.txt").write_text(TEXT)
    return folder


@pytest.fixture
def run_eval(folder, monkeypatch):
    """Runs ``hf-kbit eval`` in the folder with these arguments; where they name no text, on ``rows.txt``."""
    monkeypatch.chdir(folder)

    def run(*arguments, device="cpu"):
        source = () if {"--text", "--dataset"} & set(arguments) else ("--text", "rows.txt")
        return CliRunner().invoke(cli.app, list(map(str, ["eval", *arguments, *source, "--device", device])))

    return run


@pytest.fixture
def figures(run_eval):
    """The same with ``--json``: what it printed, which is one line."""

    def run(*arguments, **keywords):
        result = run_eval(*arguments, "--json", **keywords)
        assert result.exit_code == 0, result.output
        (line,) = result.stdout.splitlines()
        return json.loads(line)

    return run


def expected_figures(text=TEXT, limit=None, dtype="auto", reference=True, window=64, stride=None, **config):
    dense, packed = (
        AutoModelForCausalLM.from_pretrained("dense", dtype=dtype, **given)
        for given in ({}, {"quantization_config": hf_kbit.KbitConfig(**config)})
    )
    tokens = torch.tensor(list(text.encode()))[:limit]
    return vars(evaluate(packed, tokens, reference=dense if reference else None, window=window, stride=stride))


def test_eval_quantizes_while_loading(figures):
    found = figures("dense", "--bits", 2, "--codebook", "optimal", "--scale", "search", "--window", 64)
    names = {"model": "dense", "bits": 2, "reference": "dense"}
    assert found == names | expected_figures(bits=2, codebook="optimal", scale="search")
    assert 0 < found["top1_agreement"] < 1 and found["kl_divergence"] > 0.01


def test_eval_of_a_saved_model(figures):
    found = figures("packed", "--reference", "dense", "--tokenizer", "dense", "--window", 64, "--stride", 32)
    assert found == {"model": "packed", "bits": 3, "reference": "dense"} | expected_figures(bits=3, stride=32)
    alone = figures("packed", "--tokenizer", "dense", "--window", 64, "--dtype", "float32")
    expected = expected_figures(bits=3, dtype="float32", reference=False)
    assert alone == {"model": "packed", "bits": 3, "reference": None} | expected
    assert alone["kl_divergence"] is None


def test_eval_of_a_model_in_16_bits(figures):
    found = figures("dense", "--reference", "dense", "--window", 64)
    assert (found["bits"], found["kl_divergence"], found["top1_agreement"]) == (None, 0, 1)


@pytest.mark.gpu
def test_eval_on_a_gpu(figures):
    arguments = ["dense", "--bits", 3, "--window", 64, "--dtype", "float32"]
    assert figures(*arguments, device="cuda") == pytest.approx(figures(*arguments), rel=1e-3)


def test_eval_for_people(run_eval, folder):
    result = run_eval("dense", "--bits", 3, "--window", 64, "--stride", 16)
    found = expected_figures(bits=3, stride=16)
    assert result.stdout.splitlines() == [
        f"tokens        {found['tokens']} predicted, in windows of 64, 16 apart",
        f"perplexity    {found['perplexity']:.4f}",
        f"reference     {found['reference_perplexity']:.4f}",
        f"KL divergence {found['kl_divergence']:.5f} nats",
        f"same top-1    {100 * found['top1_agreement']:.2f}%",
    ]
    assert "evaluating: 100%" in result.stderr
    alone = run_eval("dense", "--window", 64).stdout.splitlines()
    assert [line.split()[0] for line in alone] == ["tokens", "perplexity"] and "apart" not in alone[0]


def test_eval_of_several_files(figures, tmp_path):
    (tmp_path / "a").write_text("First, an é.")
    (tmp_path / "b").write_text("Then more of it.")
    found = figures("dense", "--text", tmp_path / "a", "--text", tmp_path / "b", "--bits", 3, "--limit-tokens", 20)
    assert found["tokens"] == 19
    expected = expected_figures("First, an é.\n\nThen more of it.", limit=20, bits=3, window=2048)
    assert found == {"model": "dense", "bits": 3, "reference": "dense"} | expected


def write(rows: list[str], file: Path) -> None:
    """With a second column, where the kind of file has columns."""
    if file.suffix == ".txt":
        file.write_text("".join(rows))
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps({"n": n, "body": row}) + "\n" for n, row in enumerate(rows)))
    elif file.suffix == ".csv":
        with file.open("w", newline="") as out:
            csv.writer(out).writerows([("n", "body"), *enumerate(rows)])
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").table({"n": range(len(rows)), "body": rows}), file)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.csv", "data/test.jsonl", "lines.txt"])
def test_eval_of_a_dataset(figures, folder, name):
    pytest.importorskip("datasets")
    (folder / "data").mkdir(exist_ok=True)
    write(ROWS, folder / name)
    source, column = ("data" if "/" in name else name), ("text" if name == "lines.txt" else "body")
    found = figures("dense", "--dataset", source, "--column", column, "--window", 64)
    rows = [row.removesuffix("\n") for row in ROWS] if name == "lines.txt" else ROWS
    expected = expected_figures("\n\n".join(rows), bits=3)
    assert (found["perplexity"], found["tokens"]) == (expected["reference_perplexity"], expected["tokens"])


def test_eval_of_a_dataset_of_the_hub(figures, folder, monkeypatch):
    datasets = pytest.importorskip("datasets")
    load_dataset, asked = datasets.load_dataset, []

    def local(*arguments, **keywords):
        asked.append((*arguments, keywords))
        return load_dataset("json", data_files=str(folder / "hub.jsonl"), split="train")

    write(ROWS, folder / "hub.jsonl")
    monkeypatch.setattr(datasets, "load_dataset", local)
    options = ["--column", "body", "--window", 64]
    found = figures("dense", "--dataset", "Salesforce/wikitext:wikitext-2-raw-v1", "--split", "validation", *options)
    assert found == figures("dense", "--window", 64)
    figures("dense", "--dataset", "org/name", *options)
    config = "wikitext-2-raw-v1"
    assert asked == [("Salesforce/wikitext", config, {"split": "validation"}), ("org/name", None, {"split": "test"})]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["packed"], "packed: found no tokenizer, expected one; name another with --tokenizer"),
        (["dense", "--text", "none.txt"], "No such file or directory: 'none.txt'"),
        (["dense", "--text", "empty.txt"], "tokens: found shape [0], expected one dimension of 2 or more"),
        (["dense", "--text", "bytes.txt"], "bytes.txt: found bytes that are no UTF-8"),
        (["dense", "--text", "rows.txt", "--dataset", "x"], "found both of --text and --dataset, expected one"),
        (["dense"], "window: found 358 tokens, expected at most 96, the positions of dense"),
        (["dense", "--window", "64", "--stride", "65"], "stride: found 65, expected 1 to 64"),
        (["dense", "--dtype", "int8"], "--dtype: found 'int8', expected one of ['auto', 'float32'"),
        (["dense", "--bits", "7"], "bits: found 7"),
        (["dense", "--scale", "search"], "--scale: found it without --bits"),
        (["packed", "--bits", "3"], "--bits: found 3, expected none, for packed is quantized already"),
        (["bert", "--window", "64"], "bert: found bert, an encoder, expected a causal language model"),
        (["dense", "--reference", "bert", "--window", "64"], "bert: found bert, an encoder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_eval_refuses(run_eval, folder, monkeypatch, arguments, message):
    (folder / "empty.txt").write_text("")
    (folder / "bytes.txt").write_bytes(b"\xff\xfe text")
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded a model"))
    result = run_eval(*arguments)
    assert result.exit_code == 1 and not result.stdout
    assert result.stderr.startswith("hf-kbit eval: ") and message in result.stderr


def test_eval_refuses_a_gpu_that_is_not_there(run_eval, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run_eval("dense", device="cuda:1")
    assert result.exit_code == 1 and "--device: found cuda:1, but torch can use no GPU" in result.stderr


def test_eval_refuses_no_text(folder):
    result = CliRunner().invoke(cli.app, ["eval", str(folder / "dense")])
    assert result.exit_code == 1 and "found neither of --text and --dataset, expected one" in result.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["rows.txt", "--column", "words"], "--column: found 'words', expected one of ['text'], which rows.txt has"),
        (["numbers.jsonl", "--column", "n"], "--column: found values in 'n' that are no text"),
        (["rows.xyz"], "rows.xyz: found '.xyz', expected a name with one of"),
    ],
)
def test_eval_refuses_datasets(run_eval, folder, arguments, message):
    pytest.importorskip("datasets")
    (folder / "numbers.jsonl").write_text('{"n": 1}\n')
    (folder / "rows.xyz").write_text("")
    result = run_eval("dense", "--dataset", *arguments)
    assert result.exit_code == 1 and message in result.stderr


@pytest.mark.parametrize(
    "package, arguments",
    [("datasets", ["eval", "dense", "--dataset", "rows.txt"]), ("lm_eval", ["lm-eval", "--tasks", "arc_easy"])],
)
def test_packages_to_install(monkeypatch, package, arguments):
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 1 and f"pip install {package}" in result.stderr


# --- quantize ---


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
    assert not (tmp_path / cli.UNFINISHED).exists()


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
    kept = [file.name for file in (tmp_path / "out" / cli.UNFINISHED).iterdir()]
    assert sorted(kept) == ["model.layers.0.safetensors", "run.json"]
    refused = run_quantize(*arguments[:-1], 3.5)
    assert refused.exit_code == 1 and "expected this run's; take the same arguments" in refused.stderr
    with monkeypatch.context() as patch:
        patch.setattr(METHODS["feedback"], "solve", killed)
        assert run_quantize(*arguments).exit_code == 0
    assert run_quantize("dense", tmp_path / "whole", *arguments[2:]).exit_code == 0
    assert same(stored(tmp_path / "out"), stored(tmp_path / "whole"))
    assert not (tmp_path / "out" / cli.UNFINISHED).exists()


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
