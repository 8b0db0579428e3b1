"""``hf-kbit quantize``: what it saves, what it says, what it refuses, and that it goes on where it was killed."""

import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from architectures import BY_NAME
from cli.texts import TEXT
from killing import kill_at
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertForMaskedLM,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import KbitLinear, cli, codebooks, memory, post_training, widths
from hf_kbit.calibration.layerwise import METHODS, load
from hf_kbit.calibration.resume import Finished
from hf_kbit.cli.folder import UNFINISHED, claim
from tests import gpt_oss


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
    """To 4 bits if nothing is said."""
    assert run_quantize("dense", tmp_path / "plain").exit_code == 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "plain").config.quantization_config.bits == 4
    result = run_quantize(
        "dense", tmp_path / "out", "--bits", 2, "--codebook", "int", "--skip", "k_proj", "--embedding-bits", 5
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith(f"saved         {tmp_path / 'out'}: ")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    chosen = hf_kbit.KbitConfig(bits=2, codebook="int", modules_to_not_convert=["k_proj"], embedding_bits=5)
    expected = AutoModelForCausalLM.from_pretrained("dense", quantization_config=chosen)
    assert model.config.quantization_config.to_dict() == expected.config.quantization_config.to_dict()
    assert same(model.state_dict(), expected.state_dict()) and model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("text")["input_ids"] == list(b"text")


@pytest.mark.parametrize("bits", [4, 3])
def test_quantize_what_has_experts_in_mxfp4(run_quantize, bits, monkeypatch, tmp_path):
    """As ``from_pretrained`` does it, bit for bit in 4 bits; the decoded model, of 4 times the size, is not loaded."""
    original, loaded = tmp_path / "original", []
    gpt_oss.save(original, experts=2, hidden=64, inner=32, layers=1)

    def record(*args, **kwargs):
        loaded.append(kwargs.get("quantization_config"))
        return load(*args, **kwargs)

    monkeypatch.setattr("hf_kbit.calibration.layerwise.load", record)
    result = run_quantize(original, tmp_path / "out", "--bits", bits)
    assert result.exit_code == 0, result.output
    expected = AutoModelForCausalLM.from_pretrained(original, quantization_config=hf_kbit.KbitConfig(bits=bits))
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), expected.state_dict())
    projection = expected.model.layers[0].mlp.experts.down_proj
    assert (projection.levels == codebooks.fp4()) == (bits == 4)
    assert [config and config.bits for config in loaded] == [bits]
    for options in (["--calibrate"], ["--memory", "1MB"], ["--bits", 3.5]):
        result = run_quantize(original, tmp_path / "refused", *options)
        assert result.exit_code == 1 and "original: found experts in MXFP4, which are quantized" in result.stderr
        assert not (tmp_path / "refused").exists()


@pytest.mark.parametrize("data", ["--text", "--dataset", "its own", "its own, tuned"])
def test_quantize_with_data(run_quantize, data, device, tmp_path):
    """As ``calibrate`` does it, with the same text; nothing of the run is left in the folder."""
    if data == "--dataset":
        pytest.importorskip("datasets")
    tune = {"tune": 10} if data == "its own, tuned" else {}
    data = data.removesuffix(", tuned")
    source = ("--tune", "--steps", 10) if tune else () if data == "its own" else (data, "rows.txt")
    keywords = {"method": "weighted", "bits": 3, "codebook": "int", "sequences": 3, "length": 70, "batch": 2}
    choices = [part for name, value in keywords.items() for part in (f"--{name}", value)]
    result = run_quantize("dense", tmp_path, "--calibrate", *source, *choices)
    assert result.exit_code == 0, result.output
    name = "text that the model wrote" if data == "its own" else "rows.txt"
    assert f"calibrating   weighted, 3 x 70 tokens of {name}, on {device}" in result.stdout.splitlines()
    assert "calibrating: 100%" in result.stderr and ("writing: 100%" in result.stderr) == (data == "its own")
    text = {"--text": TEXT, "--dataset": "\n\n".join(TEXT.splitlines()), "its own": None}[data]
    expected = hf_kbit.calibrate("dense", text, device=device, **keywords, **tune)
    expected.save_pretrained(tmp_path / "expected")
    tuned = [line for line in result.stdout.splitlines() if line.startswith("tuned")]
    assert [line.split(maxsplit=1)[1] for line in tuned] == ([expected.hf_quantizer.tuned] if tune else [])
    assert same(stored(tmp_path), stored(tmp_path / "expected"))
    assert not (tmp_path / UNFINISHED).exists()


def test_quantize_to_a_mean_width(run_quantize, device, tmp_path):
    """The widths are those that are chosen on the sequences evenly spread, and what is said of them is true."""
    result = run_quantize("dense", tmp_path, "--bits", 3.4, "--text", "rows.txt", "--text", "rows.txt")
    assert result.exit_code == 0, result.output
    config = AutoModelForCausalLM.from_pretrained(tmp_path).config.quantization_config
    dense = AutoModelForCausalLM.from_pretrained("dense")
    text = torch.tensor(list(f"{TEXT}\n\n{TEXT}".encode()))
    rows = text[: len(text) // 96 * 96].view(-1, 96)  # fewer than are wanted, so all of them
    assert len(rows) <= post_training.MEASURED[0]
    tokens = rows.flatten()
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
        f"measuring     what few bits in each layer cost on {len(tokens)} tokens of rows.txt, rows.txt, on {device}"
    )
    assert lines[start + 1] == f"widths        {mean:.2f} bits for a weight: {said}"
    assert f"down_proj {config.bits_for('model.layers.0.mlp.down_proj'):.2f}" in lines[start + 2]
    for line, extreme, expected in zip(lines[start + 3 :], ("most", "least"), (costs[-1], costs[0]), strict=False):
        name, width = re.match(
            rf"(\S+): (\d) bits, for 2 cost \S+ nats a token, the {extreme} for its size", line
        ).groups()
        assert name == expected and config.bits_for(name) == int(width)


def test_quantize_to_a_memory(run_quantize, tmp_path):
    """What is saved and the cache take at most so much, and nearly so much; in less of it tables are packed."""
    dense = AutoModelForCausalLM.from_pretrained("dense")
    cache = memory.cache_bytes(dense, 64)
    for out, size, calibrate in ((tmp_path / "small", 35_000, ()), (tmp_path / "large", 47_000, ("--calibrate",))):
        result = run_quantize("dense", out, "--memory", f"{size}B", "--context", 64, *calibrate)
        assert result.exit_code == 0, result.output
        taken = sum(tensor.nbytes for tensor in stored(out).values()) + cache
        assert size - 1000 < taken <= size
        tables = memory.embedding_bits_for_memory(dense, size, context=64)
        bits = memory.bits_for_memory(dense, size, context=64, embedding_bits=tables)
        said = re.findall(r"([0-9][0-9,]*) (for .*|left over|bytes)$", result.stdout, flags=re.MULTILINE)
        said = {what: int(number.replace(",", "")) for number, what in said}
        assert said.pop("bytes") == size == sum(said.values())
        assert said["for what is kept of 64 tokens"] == cache and said["left over"] <= 1
        assert any(what.endswith(f" weights, {bits:.2f} bits and 0.25 for scales") for what in said)


def test_quantize_goes_on_where_it_was_killed(run_quantize, folder, monkeypatch, tmp_path):
    arguments = ("dense", tmp_path / "out", "--calibrate", "--text", "rows.txt", "--bits", 2.5)

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
            run_quantize(*arguments)
    assert [file.name for file in (tmp_path / "out").iterdir()] == [UNFINISHED]
    kept = [file.name for file in (tmp_path / "out" / UNFINISHED / "layers").iterdir()]
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
    result = run_quantize("bert", tmp_path / "bert", "--calibrate", "--sequences", 2)
    assert result.exit_code == 0 and "tokens of the built-in text" in result.stdout
    assert isinstance(
        BertForMaskedLM.from_pretrained(tmp_path / "bert").bert.encoder.layer[0].output.dense, KbitLinear
    )
    result = run_quantize("bert", tmp_path / "mixed", "--bits", 2.5)
    assert result.exit_code == 1 and "expected a causal language model" in result.stderr


# --- what lies beside a model ---------------------------------------------------------------------

BESIDE = {  # made up, but for their names: they are copied as they are
    "preprocessor_config.json": "{}",
    "processor_config.json": "{}",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "vocab.json": "{}",
    "merges.txt": "a b",
    "spiece.model": "pieces",
}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A folder with a model, what belongs to it, and what does not."""
    folder = tmp_path_factory.mktemp("whisper")
    model = BY_NAME["whisper"].build()
    model.generation_config.max_new_tokens = 17
    model.save_pretrained(folder)
    others = {"notes.txt": "mine", "pytorch_model.bin": "", "README.md": "# A card"}
    for name, text in (BESIDE | others).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def files_of(folder) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


OF_A_MODEL = {"config.json", "generation_config.json", "model.safetensors", "README.md"}


def test_quantize_keeps_processors_and_templates(run_quantize, whisper, tmp_path):
    result = run_quantize(whisper, tmp_path)
    assert result.exit_code == 0 and "tokenizer" not in result.stdout, result.output
    assert files_of(tmp_path) == OF_A_MODEL | {*BESIDE}
    assert all((tmp_path / name).read_text() == text for name, text in BESIDE.items())
    assert json.loads((tmp_path / "generation_config.json").read_text())["max_new_tokens"] == 17


def test_quantize_makes_up_no_tokenizer(run_quantize, folder, tmp_path):
    shutil.copytree(folder / "dense", tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*"))
    result = run_quantize(tmp_path / "bare", tmp_path / "out")
    assert result.exit_code == 0 and f"tokenizer     none in {tmp_path / 'bare'}" in result.stdout
    assert files_of(tmp_path / "out") == OF_A_MODEL
    choices = ("--calibrate", "--method", "weighted", "--sequences", 2)
    result = run_quantize(tmp_path / "bare", tmp_path / "calibrated", *choices, "--text", "rows.txt")
    assert result.exit_code == 1 and "tokenizer: found none, expected one" in result.stderr
    assert not (tmp_path / "calibrated").exists()
    assert run_quantize(tmp_path / "bare", tmp_path / "its own text", *choices).exit_code == 0


def test_what_lies_beside_a_model_of_the_hub(run_quantize, folder, monkeypatch, tmp_path):
    """As much of it as is wanted, and of the revision that the model is of; and what is uploaded."""
    asked, uploaded = [], []

    def snapshot(name, *, revision, allow_patterns):
        asked.append((name, revision))
        assert "tokenizer*" in allow_patterns and "*.safetensors" not in allow_patterns
        return str(folder / "dense")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    monkeypatch.setattr("huggingface_hub.upload_folder", lambda **keywords: uploaded.append(keywords))
    monkeypatch.setattr("huggingface_hub.create_repo", lambda name, exist_ok: SimpleNamespace(repo_id=f"me/{name}"))
    monkeypatch.setattr("huggingface_hub.file_exists", lambda name, file: written)
    for loader in (AutoConfig, LlamaForCausalLM):  # as if the name was one on the Hub
        load = loader.from_pretrained

        def from_the_hub(name, *arguments, load=load, **keywords):
            asked.append((name, keywords.pop("revision")))
            return load(folder / "dense", *arguments, **keywords)

        monkeypatch.setattr(loader, "from_pretrained", from_the_hub)
    options = ["--revision", "v1", "--push-to-hub", "packed", "--dtype", "float32"]
    for written in (False, True):
        out = tmp_path / f"out {written}"
        result = run_quantize("org/name", out, *options)
        assert result.exit_code == 0, result.output
        assert set(asked) == {("org/name", "v1")} and "uploaded      me/packed" in result.stdout
        kept = ["README.md"] if written else []
        assert uploaded.pop() == {"repo_id": "me/packed", "folder_path": out, "ignore_patterns": kept}
        assert (out / "tokenizer.json").exists() and '.from_pretrained("packed")' in (out / "README.md").read_text()
        assert stored(out)["lm_head.weight"].dtype == torch.float32


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["packed"], "packed: found it quantized already, expected a model in 16 or 32 bits"),
        (["dense", "--bits", 6], "--bits: found 6.0, expected 2 to 5"),
        (["dense", "--bits", 3, "--memory", "1GB"], "--memory: found it and --bits, expected one"),
        (["dense", "--memory", "much"], "--memory: found 'much', expected a size such as 20GB"),
        (["dense", "--memory", "10kB"], "memory: found 10,000 bytes, expected 1,0"),
        (["dense", "--text", "rows.txt"], "--text: found data, but neither --calibrate nor mixed widths need it"),
        (["dense", "--tune"], "--tune: found it without --calibrate, expected both"),
        (["dense", "--calibrate", "--steps", 9], "--steps: found 9 without --tune, expected both"),
        (["dense", "--calibrate", "--no-tune-whole"], "--no-tune-whole: found it without --tune, expected both"),
        (["dense", "--calibrate", "--method", "gptq"], "--method: found 'gptq', expected one of ['feedback', "),
        (
            ["dense", "--calibrate", "--text", "none.txt"],
            "--text: found no file none.txt, expected one of text",
        ),
        (["dense", "--codebook", "best"], "codebook: found 'best'"),
        (["dense", "--skip", "("], "modules_to_not_convert: found pattern '('"),
        (["dense", "--dtype", "int8"], "--dtype: found 'int8', expected one of ['auto', 'float32'"),
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


@pytest.mark.parametrize("name", ["notes", "unfinished/thesis.txt", f"{UNFINISHED}.txt"])
@pytest.mark.parametrize("before", [False, True])
def test_quantize_touches_nothing_of_others(run_quantize, tmp_path, name, before):
    """In a new folder, and in that of a run that was killed."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    if before:
        (tmp_path / UNFINISHED / "model" / "x").mkdir(parents=True)
    result = run_quantize("dense", tmp_path)
    assert result.exit_code == 1
    assert f"{tmp_path}: found files, {Path(name).parts[0]} for one, expected a new folder" in result.stderr
    assert files_of(tmp_path) == {name} and (tmp_path / name).read_text() == "mine"


def test_quantize_into_what_is_no_folder(run_quantize, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link"):
        result = run_quantize("dense", tmp_path / name)
        assert result.exit_code == 1 and "found something else, expected a folder" in result.stderr
    assert (tmp_path / "file").read_text() == "mine"


def test_one_process_writes_a_folder(run_quantize, tmp_path):
    out = tmp_path / "out"
    with claim(out):
        result = run_quantize("dense", out)
        assert result.exit_code == 1
        assert result.stderr.strip().endswith(
            f"{out}: found another process that writes there, expected none; wait until it ends"
        )
    assert not out.exists()
    with claim(out) as output, pytest.raises(ValueError, match="another process"), claim(out):
        pass
    assert not out.exists() and output.folder == out


def test_a_claim_ends_with_its_process(tmp_path):
    """However it ends; and what it was saving is gone, while what it had calibrated stays."""

    def killed():
        with claim(tmp_path) as output:
            output.model.mkdir(parents=True)
            (output.model / "half").write_text("")
            Finished(output.layers, "of a run")
            os.kill(os.getpid(), signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=killed)
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL and f"{UNFINISHED}/model/half" in files_of(tmp_path)
    with claim(tmp_path) as output:
        assert files_of(tmp_path) == {f"{UNFINISHED}/lock", f"{UNFINISHED}/layers/run.json"}
    output.layers.joinpath("run.json").unlink()
    with claim(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_killed_while_the_model_moves_out(tmp_path):
    """What has moved is no model without config.json. Once the model was whole, the rest follows when the command is
    given again, and refused."""
    files = {"config.json", "model.safetensors", "tokenizer.json", "additional_chat_templates/a"}

    def save(folder, name):
        with claim(folder) as output:
            for file in files:
                (output.model / file).parent.mkdir(parents=True, exist_ok=True)
                (output.model / file).write_text(name)
            Finished(output.layers, "of a run")
            output.publish()

    def save_until_killed(folder, step):
        kill_at(step, folder)
        save(folder, "killed")

    ended = []
    for step in itertools.count(1):
        folder = tmp_path / str(step)
        process = multiprocessing.get_context("fork").Process(target=save_until_killed, args=(folder, step))
        process.start()
        process.join(timeout=60)
        if process.exitcode == 0:
            break
        if (folder / UNFINISHED / "whole").exists() or (folder / "config.json").exists():
            with pytest.raises(ValueError, match=r"found files, .* for one, expected a new folder"), claim(folder):
                pass
        else:
            save(folder, "new")
        assert files_of(folder) == files and not (folder / UNFINISHED).exists()
        assert len({(folder / name).read_text() for name in files}) == 1
        ended.append((folder / "config.json").read_text())
    assert ended == sorted(ended, reverse=True) and set(ended) == {"killed", "new"}, ended


# --- faults of the machine ------------------------------------------------------------------------


@pytest.mark.parametrize("calibrate", [False, True])
def test_a_full_disk(run_quantize, monkeypatch, tmp_path, calibrate):
    """One line, nothing that looks like a model, and the same command goes on."""
    arguments = [
        "dense",
        tmp_path / "out",
        *(["--calibrate", "--method", "weighted", "--sequences", 2] if calibrate else []),
    ]

    def full(tensors, file, *_, **__):
        Path(file).write_bytes(b"half of it")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full)
        result = run_quantize(*arguments)
    assert result.exit_code == 1 and "hf-kbit quantize: the disk is full" in result.stderr
    assert "Traceback" not in result.stderr
    left = {f"{UNFINISHED}/{name}" for name in ("lock", "layers/run.json", "layers/model.layers.0.safetensors")}
    assert files_of(tmp_path) == ({f"out/{name}" for name in left} if calibrate else set())
    assert run_quantize(*arguments).exit_code == 0
    assert files_of(tmp_path / "out") == OF_A_MODEL | {"tokenizer.json", "tokenizer_config.json"}
