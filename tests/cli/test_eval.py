"""``hf-kbit eval``: what it prints, what it refuses, and that it measures what ``evaluate`` does."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from cli.texts import ROWS, TEXT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import cli
from hf_kbit.evaluation import evaluate


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


def test_eval_writes_into_the_card(run_eval, folder, tmp_path):
    """If it is asked to, what it prints; of a folder that has one alone."""
    shutil.copytree(folder / "packed", tmp_path / "packed")
    arguments = ["--reference", "dense", "--tokenizer", "dense", "--window", 64]
    result = run_eval(tmp_path / "packed", *arguments)
    before = "# A card\n"
    (tmp_path / "packed" / "README.md").write_text(before)
    assert run_eval(tmp_path / "packed", *arguments, "--card").stdout == result.stdout
    text = (tmp_path / "packed" / "README.md").read_text()
    assert text.startswith(before.rstrip()) and "| text | rows.txt |\n| compared with | dense |\n" in text
    assert all(f"| {row[:14].strip()} | {row[14:]} |" in text for row in result.stdout.splitlines())
    for refused in (["dense"], ["org/name"], [tmp_path / "packed", "--bits", 3]):
        result = run_eval(*refused, "--card")
        assert result.exit_code == 1 and f"--card: found it for {refused[0]}" in result.stderr


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
        (["dense", "--text", "none.txt"], "--text: found no file none.txt, expected one of text in UTF-8"),
        (["dense", "--text", "empty.txt"], "data: found shape [0], expected [length] or [sequences, length] of 2"),
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


def test_a_package_to_install(run_eval, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    result = run_eval("dense", "--dataset", "rows.txt")
    assert result.exit_code == 1 and "pip install datasets" in result.stderr


def test_which_model_a_revision_is_of(run_eval, monkeypatch):
    """The model, also where it is the reference and the tokenizer; of others the newest is taken."""
    asked = []
    for loader in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):

        def recorded(name, load=loader.from_pretrained, **keywords):
            asked.append((str(name), keywords.get("revision"), keywords.get("trust_remote_code")))
            return load(name, **keywords)

        monkeypatch.setattr(loader, "from_pretrained", recorded)
    code = ["--revision", "v1", "--trust-remote-code", "--window", 64, "--limit-tokens", 70]
    assert run_eval("dense", "--bits", 3, *code).exit_code == 0
    assert set(asked) == {("dense", "v1", True)}
    asked.clear()
    assert run_eval("packed", "--reference", "dense", "--tokenizer", "dense", *code).exit_code == 0
    assert set(asked) == {("packed", "v1", True), ("dense", None, True)}
