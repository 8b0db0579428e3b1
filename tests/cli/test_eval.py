"""``hf-kbit eval``: what it prints, what it refuses, and that it measures what ``evaluate`` does."""

import csv
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from command import refuse, succeed
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_kbit
from hf_kbit.calibration.evaluation import evaluate

ON_CPU = ("--device", "cpu")
ROWS = ("--text", "rows.txt", *ON_CPU)


def figures(*arguments) -> dict:
    """What it prints with ``--json``, which is one line."""
    (line,) = succeed("eval", *arguments, "--json").stdout.splitlines()
    return json.loads(line)


@pytest.fixture
def expected(folder, text):
    """What ``evaluate`` finds."""

    def of(read=text, limit=None, dtype="auto", reference=True, window=64, stride=None, **config):
        dense, packed = (
            AutoModelForCausalLM.from_pretrained("dense", dtype=dtype, **given)
            for given in ({}, {"quantization_config": hf_kbit.KbitConfig(**config)})
        )
        tokens = torch.tensor(list(read.encode()))[:limit]
        return vars(evaluate(packed, tokens, reference=dense if reference else None, window=window, stride=stride))

    return of


def test_quantized_while_loading(expected):
    found = figures("dense", "--bits", 2, "--codebook", "int", "--scale", "absmax", "--window", 64, *ROWS)
    names = {"model": "dense", "bits": 2, "reference": "dense"}
    assert found == names | expected(bits=2, codebook="int", scale="absmax")
    assert 0 < found["top1_agreement"] < 1 and found["kl_divergence"] > 0.01


def test_saved_models(expected):
    """Compared with another, alone, and one in 16 bits with itself."""
    packed = ("packed", "--tokenizer", "dense", "--window", 64, *ROWS)
    names = {"model": "packed", "bits": 3, "reference": "dense"}
    assert figures(*packed, "--reference", "dense", "--stride", 32) == names | expected(bits=3, stride=32)
    alone = {"model": "packed", "bits": 3, "reference": None, "kl_divergence": None}
    assert figures(*packed, "--dtype", "float32") == expected(bits=3, dtype="float32", reference=False) | alone
    found = figures("dense", "--reference", "dense", "--window", 64, *ROWS)
    assert (found["bits"], found["kl_divergence"], found["top1_agreement"]) == (None, 0, 1)


def test_8_bit_inputs(expected, tmp_path):
    """Of a model quantized while loading, and of a saved one, whose wish they are or not."""
    read, names = ("--window", 64, *ROWS), {"model": "dense", "bits": 3, "reference": "dense"}
    rounded = expected(bits=3, inputs="int8")
    found = figures("dense", "--bits", 3, "--inputs", "int8", *read)
    assert found == names | {"inputs": "int8"} | rounded and rounded != expected(bits=3)
    model = AutoModelForCausalLM.from_pretrained("packed")
    hf_kbit.set_inputs(model, "int8")
    model.save_pretrained(tmp_path)
    saved = (tmp_path, "--tokenizer", "dense", "--reference", "dense", *read)
    assert figures(*saved) == names | {"inputs": "int8", "model": str(tmp_path)} | rounded
    assert figures(*saved, "--inputs", "none") == names | {"model": str(tmp_path)} | expected(bits=3)
    assert "inputs " in succeed("eval", *saved).stdout
    said = refuse("eval", "dense", "--inputs", "int8", *read)
    assert "inputs: found 'no quantized layer' in LlamaForCausalLM, expected a layer that takes 8-bit inputs" in said


def test_several_files(expected, tmp_path):
    (tmp_path / "a").write_text("First, an é.")
    (tmp_path / "b").write_text("Then more of it.")
    files = ("--text", tmp_path / "a", "--text", tmp_path / "b")
    found = figures("dense", *files, "--bits", 3, "--limit-tokens", 20, *ON_CPU)
    read = expected("First, an é.\n\nThen more of it.", limit=20, bits=3, window=2048)
    assert found == {"model": "dense", "bits": 3, "reference": "dense"} | read and found["tokens"] == 19


@pytest.mark.gpu
def test_on_a_gpu(folder):
    arguments = ["dense", "--bits", 3, "--window", 64, "--dtype", "float32", "--text", "rows.txt"]
    assert figures(*arguments, "--device", "cuda") == pytest.approx(figures(*arguments, *ON_CPU), rel=1e-3)


def test_for_people(expected):
    shown = succeed("eval", "dense", "--bits", 3, "--window", 64, "--stride", 16, *ROWS)
    found = expected(bits=3, stride=16)
    assert shown.stdout.splitlines() == [
        f"tokens        {found['tokens']} predicted, in windows of 64, 16 apart",
        f"perplexity    {found['perplexity']:.4f}",
        f"reference     {found['reference_perplexity']:.4f}",
        f"KL divergence {found['kl_divergence']:.5f} nats",
        f"KL of 99%     {found['kl_p99']:.5f} nats or less",
        f"KL of 99.9%   {found['kl_p999']:.5f} nats or less",
        f"same top-1    {100 * found['top1_agreement']:.2f}%",
    ]
    assert "evaluating: 100%" in shown.stderr
    alone = succeed("eval", "dense", "--window", 64, *ROWS).stdout.splitlines()
    assert [line.split()[0] for line in alone] == ["tokens", "perplexity"] and "apart" not in alone[0]


def test_figures_in_the_card(folder, tmp_path):
    """If it is asked to, what it prints; of a folder that has one alone."""
    packed = shutil.copytree("packed", tmp_path / "packed")
    (packed / "README.md").write_text("# A card\n")
    card = ("--reference", "dense", "--tokenizer", "dense", "--window", 64, *ROWS, "--card")
    shown = succeed("eval", packed, *card).stdout.splitlines()
    text = (packed / "README.md").read_text()
    assert text.startswith("# A card") and "| text | rows.txt |\n| compared with | dense |\n" in text
    assert len(shown) == 7 and all(f"| {row[:14].strip()} | {row[14:]} |" in text for row in shown)
    for refused in (["dense"], ["org/name"], [packed, "--bits", 3]):
        assert f"--card: found it for {refused[0]}" in refuse("eval", *refused, "--card", *ROWS)


# --- datasets -------------------------------------------------------------------------------------


def write(rows: list[str], file: Path) -> None:
    """With a second column, where the kind of file has columns."""
    file.parent.mkdir(exist_ok=True)
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
def test_a_dataset(folder, tmp_path, rows, name):
    pytest.importorskip("datasets")
    write(rows, tmp_path / name)
    source, column = tmp_path / name, "body"
    if name == "data/test.jsonl":
        source = source.parent
    if name == "lines.txt":
        column, rows = "text", [row.removesuffix("\n") for row in rows]
    (tmp_path / "expected").write_text("\n\n".join(rows))
    options = ("dense", "--window", 64, *ON_CPU)
    found = figures(*options, "--dataset", source, "--column", column)
    assert found == figures(*options, "--text", tmp_path / "expected")


def test_a_dataset_of_the_hub(folder, tmp_path, rows, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked, load_dataset = [], datasets.load_dataset

    def local(*arguments, **keywords):
        asked.append((*arguments, keywords))
        return load_dataset("json", data_files=str(tmp_path / "hub.jsonl"), split="train")

    write(rows, tmp_path / "hub.jsonl")
    monkeypatch.setattr(datasets, "load_dataset", local)
    options = ("--column", "body", "--window", 64, *ON_CPU)
    config = "wikitext-2-raw-v1"
    found = figures("dense", "--dataset", f"Salesforce/wikitext:{config}", "--split", "validation", *options)
    assert found == figures("dense", "--window", 64, *ROWS) == figures("dense", "--dataset", "org/name", *options)
    assert asked == [("Salesforce/wikitext", config, {"split": "validation"}), ("org/name", None, {"split": "test"})]


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("packed", "packed: found no tokenizer, expected one; name another with --tokenizer"),
        ("dense --text none.txt", "No such file or directory: 'none.txt'"),
        ("dense --text empty.txt", "data: found shape [0], expected [length] or [sequences, length] of 2"),
        ("dense --text bytes.txt", "bytes.txt: found bytes that are no UTF-8"),
        ("dense --text rows.txt --dataset x", "argument --dataset: not allowed with argument --text"),
        ("dense", "window: found 358 tokens, expected at most 96, the positions of dense"),
        ("dense --window 64 --stride 65", "stride: found 65, expected 1 to 64"),
        ("dense --dtype int8", "argument --dtype: invalid choice: 'int8' (choose from"),
        ("dense --bits 7", "bits: found 7"),
        ("dense --scale search", "--scale: found it without --bits"),
        ("packed --bits 3", "--bits: found 3, expected none, for packed is quantized already"),
        ("bert --window 64", "bert: found bert, an encoder, expected a causal language model"),
        ("dense --reference bert --window 64", "bert: found bert, an encoder"),
        ("dense --device cuda:1", "--device: found cuda:1, but torch can use no GPU"),
    ],
)
def test_refused(folder, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded a model"))
    source = [] if "--text" in arguments else ["--text", "rows.txt"]
    assert message in refuse("eval", *arguments.split(), *source)


def test_datasets_that_are_refused(folder, tmp_path, monkeypatch):
    assert "one of the arguments --text --dataset is required" in refuse("eval", "dense")
    pytest.importorskip("datasets")
    (tmp_path / "numbers.jsonl").write_text('{"n": 1}\n')
    (tmp_path / "rows.xyz").write_text("")
    for file, column, message in (
        ("rows.txt", "words", "--column: found 'words', expected one of ['text'], which rows.txt has"),
        (tmp_path / "numbers.jsonl", "n", "--column: found values in 'n' that are no text"),
        (tmp_path / "rows.xyz", "text", "rows.xyz: found '.xyz', expected a name with one of"),
    ):
        assert message in refuse("eval", "dense", "--dataset", file, "--column", column)
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refuse("eval", "dense", "--dataset", "rows.txt")


def test_which_model_a_revision_is_of(folder, monkeypatch):
    """The model, also where it is the reference and the tokenizer; of others the newest is taken."""
    asked = []
    for loader in (AutoConfig, AutoModelForCausalLM, AutoTokenizer):

        def recorded(name, load=loader.from_pretrained, **keywords):
            asked.append((str(name), keywords.get("revision"), keywords.get("trust_remote_code")))
            return load(name, **keywords)

        monkeypatch.setattr(loader, "from_pretrained", recorded)
    code = ["--revision", "v1", "--trust-remote-code", "--window", 64, "--limit-tokens", 70, *ROWS]
    succeed("eval", "dense", "--bits", 3, *code)
    assert set(asked) == {("dense", "v1", True)}
    asked.clear()
    succeed("eval", "packed", "--reference", "dense", "--tokenizer", "dense", *code)
    assert set(asked) == {("packed", "v1", True), ("dense", None, True)}
