"""benchmarks/model.py: shapes are those of published models, and small ones run through it on a CPU."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# What is in common, then what is of one kind.
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SMALLER = {
    "llama-3-8b": {"intermediate_size": 96},
    "qwen3-30b-a3b": {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss-20b": {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2},
}
BILLIONS = {"llama-3-8b": 8.03, "qwen3-30b-a3b": 30.53, "gpt-oss-20b": 20.91}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("model_benchmark", BENCHMARKS / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    verbosity = transformers.logging.get_verbosity()
    yield module
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def without_gpu(benchmark, monkeypatch):
    """The benchmark with the CPU in place of the GPU, of which it asks for memory and for the end of what it does."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", itertools.count().__next__)
    load, make = benchmark.load, benchmark.make_checkpoint
    monkeypatch.setattr(benchmark, "load", lambda folder, _, **kwargs: (*load(folder, "cpu", **kwargs)[:2], 1))
    monkeypatch.setattr(benchmark, "make_checkpoint", lambda shape, folder, _, **kw: make(shape, folder, "cpu", **kw))
    monkeypatch.setattr(benchmark, "gpu_and_command", dict)
    monkeypatch.setattr(benchmark, "host_us", lambda layer: 1.0)
    monkeypatch.setattr(benchmark.nn.Linear, "__init__", on_cpu(benchmark.nn.Linear.__init__))
    monkeypatch.setattr(benchmark, "PREFILLS", 2)
    monkeypatch.setattr(benchmark, "NEW_TOKENS", benchmark.SETTLED + 3)
    return benchmark


def on_cpu(init):
    def wrapped(self, *args, device=None, **kwargs):
        init(self, *args, device="cpu" if device == "cuda" else device, **kwargs)

    return wrapped


@pytest.mark.parametrize("shape", SMALLER)
def test_a_small_model(without_gpu, shape, monkeypatch, tmp_path):
    """A line for each measurement and way, beside the same of 16 bits; a mixture's experts are packed."""
    file, packed, measure = tmp_path / "lines.jsonl", [], without_gpu.prefill_ms
    monkeypatch.setitem(without_gpu.SHAPES, shape, without_gpu.SHAPES[shape] | SMALL | SMALLER[shape])

    def prefill_ms(model, tokens):
        packed.append(type(getattr(model.model.layers[0].mlp, "experts", None)).__name__.startswith("Kbit"))
        return measure(model, tokens)

    monkeypatch.setattr(without_gpu, "prefill_ms", prefill_ms)
    options = ["--model-layers", "2", "--bits", "4", "--batches", "1,3", "--prefill", "16", "--peers", ""]
    monkeypatch.setattr(sys, "argv", ["model.py", "--shape", shape, *options, "--json", str(file)])
    without_gpu.main()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert {(line["shape"], line["layers"]) for line in lines} == {(shape, 2)}
    whats = [("load", None), ("prefill", None), *(("decode", n) for n in (1, 3, 1, 3, 1, 3))]
    for name in ("bf16", "hf_kbit"):
        found = [(line["what"], line.get("batch")) for line in lines if line["name"] == name]
        assert found == [("host", None), *whats]
    assert all(line["ms"] > 0 and line["ms_over_bf16"] > 0 for line in lines if "ms" in line)
    assert packed == [False, shape != "llama-3-8b"]


@pytest.mark.parametrize(("shape", "billions"), BILLIONS.items())
def test_published_sizes(benchmark, shape, billions):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**benchmark.SHAPES[shape]))
    assert model.num_parameters() / 1e9 == pytest.approx(billions, abs=0.005)


def test_layers_by_default(without_gpu, monkeypatch):
    """Those of the shape."""
    asked = []
    monkeypatch.setattr(without_gpu, "measure", lambda *what: asked.append(what[:2]))
    for shape in ("gpt-oss-20b", "qwen3-30b-a3b"):
        monkeypatch.setattr(sys, "argv", ["model.py", "--shape", shape, "--peers", ""])
        without_gpu.main()
    assert asked == [("gpt-oss-20b", 24), ("qwen3-30b-a3b", 48)]


def test_tables(benchmark, monkeypatch, capsys, tmp_path):
    """One for each shape; of several lines for a cell the last counts, and what was not measured is empty."""
    bf16, ours = {"name": "bf16", "bits": 16}, {"name": "hf_kbit", "bits": 4}
    peer, small = {"name": "bitsandbytes", "bits": 4}, {"shape": "s", "layers": 2}
    decode = {"what": "decode", "mode": "eager", "batch": 16}
    loaded = {"seconds": 2.0, "resident_GB": 11.2, "peak_GB": 123.4}
    ratios = {f"{field}_over_bf16": 0.5 for field in loaded}
    lines = [
        small | bf16 | {"what": "load"} | loaded,
        small | ours | {"what": "load"} | loaded | ratios,
        small | ours | decode | {"ms": 1.0, "ms_over_bf16": 9.0},
        small | ours | decode | {"ms": 2.345, "ms_over_bf16": 0.5},
        small | peer | decode | {"ms": 4.0, "ms_over_bf16": 0.8},
        small | bf16 | {"what": "prefill", "tokens": 8, "ms": 3.0},
        {"shape": "t", "layers": 2} | bf16 | {"what": "host", "us": 10.0},
    ]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["model.py", "--from", str(tmp_path / "lines.jsonl"), "--table"])
    benchmark.main()
    assert capsys.readouterr().out.splitlines() == [
        "s, 2 layers",
        "",
        "|  | 16 bits | 4 bits | bitsandbytes |",
        "|---|---:|---:|---:|",
        "| loading, s | 2.00 | 2.00 (0.50) |  |",
        "| GPU memory, GB | 11.2 | 11.2 (0.50) |  |",
        "| its peak while loading, GB | 123 | 123 (0.50) |  |",
        "| eager, batch 16, ms per token |  | 2.35 (0.50) | 4.00 (0.80) |",
        "| prefill of 8 tokens, ms | 3.00 |  |  |",
        "",
        "t, 2 layers",
        "",
        "|  | 16 bits |",
        "|---|---:|",
        "| a call of a 256 x 256 layer, us of the host | 10.0 |",
        "",
    ]


@pytest.mark.parametrize("modes", [["compiled"], ["hf_kbit.decode"], ["eager", "compiled", "hf_kbit.decode"], []])
def test_panels_are_of_what_was_timed(benchmark, modes):
    """One for each compiled way of decoding, and one for prompts, each with its own lines alone."""
    decoding = [{"what": "decode", "mode": mode, "batch": 1, "ms": 2.0} for mode in modes]
    prefill = {"what": "prefill", "tokens": 128, "ms": 3.0}
    shown = benchmark.panels([{"what": "host", "us": 1.0}, *decoding, prefill])
    expected = [(f"Decode, {line['mode']}", "batch", [line]) for line in decoding if line["mode"] != "eager"]
    found = [(title, key, lines) for title, key, _, lines in shown]
    assert found == [*expected, ("Prefill, batch 1", "tokens", [prefill])]


def test_plot(benchmark, monkeypatch, tmp_path):
    """Of lines of a run: the panels beside each other, with the bars of what was timed."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, file: (drawn.append(self), save(self, file)))
    lines = BENCHMARKS / "results" / "model-decode-h100-2026-11-25.jsonl"
    monkeypatch.setattr(sys, "argv", ["model.py", "--from", str(lines), "--plot", str(tmp_path / "plot.png")])
    benchmark.main()
    decode, prefill = drawn[0].axes
    assert (decode.get_title(), prefill.get_title()) == ("Decode, hf_kbit.decode", "Prefill, batch 1")
    assert [[round(bar.get_height(), 2) for bar in bars] for bars in decode.containers] == [
        [6.68, 7.08],
        [2.66, 3.5],
        [2.41, 3.4],
    ]
    assert (tmp_path / "plot.png").stat().st_size > 1000
