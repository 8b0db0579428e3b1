"""benchmarks/calibrate.py: a layer's seconds are told from the rest, and a tiny model runs through it."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import transformers

from hf_kbit.calibration import tuning
from hf_kbit.calibration.layerwise import METHODS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPTIONS = ["--shape", "tiny", "--device", "cpu", "--sequences", "4", "--length", "32", "--batch", "2"]


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """A function that runs it with more options, and returns its lines; ``.module`` is its code."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("calibrate_benchmark", BENCHMARKS / "calibrate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*options: str) -> list[dict]:
        file = tmp_path / "lines.jsonl"
        monkeypatch.setattr(sys, "argv", ["benchmarks/calibrate.py", *OPTIONS, "--json", str(file), *options])
        module.main()
        return [json.loads(line) for line in file.read_text().splitlines()]

    verbosity = transformers.logging.get_verbosity()
    monkeypatch.setattr(tuning, "ROOM", tuning.ROOM)
    run.module = module
    yield run
    transformers.logging.set_verbosity(verbosity)


def test_seconds(benchmark, monkeypatch):
    """By a clock on which a model takes 5 s, each of its layers 2 s, and the first call of a method 100 s more."""
    now, calls = [0.0], []

    def calibrate(model, ids, *, device, batch, method, bits, tune, tune_whole):
        now[0] += 5 + 2 * len(model.model.layers) + 100 * (method not in {call[0] for call in calls})
        assert not tune_whole and tune == 50 * (method in {call[0] for call in calls}), "not to warm up"
        calls.append((method, bits))
        assert (model.device.type, device, batch, ids.shape[1]) == ("cpu", "cpu", 2, 32)
        assert 0 <= ids.min() <= ids.max() < model.config.vocab_size

    monkeypatch.setattr(benchmark.module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(benchmark.module.hf_kbit, "calibrate", calibrate)
    lines = benchmark("--methods", "weighted,feedback", "--bits", "2,4", "--layers", "4", "--tune", "50")
    assert [(line["method"], line["bits"]) for line in lines] == [
        (method, bits) for method in ("weighted", "feedback") for bits in (2, 4)
    ]
    for line in lines:
        assert (line["layers"], line["seconds"], line["layer_s"], line["rest_s"]) == (4, 13, 2, 5)
        assert line["all_layers_s"] == 5 + 2 * 2  # of the two that the shape has


@pytest.mark.slow
def test_a_tiny_model(benchmark):
    lines = benchmark("--layers", "2")
    assert [line["method"] for line in lines] == list(METHODS)
    for line in lines:
        assert line["shape"] == "tiny" and line["bits"] == 4 and line["command"].startswith("python benchmarks/")
        # The shape has two layers: nothing is left to extrapolate.
        assert line["all_layers_s"] == pytest.approx(line["seconds"]) and line["seconds"] > 0
        assert 0.1 < line["host_GB"] < 100 and line["gpu_GB"] == 0


def test_a_small_mixture(benchmark, monkeypatch):
    sizes = {"vocab_size": 512, "hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 8, "head_dim": 32}
    sizes |= {"num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shapes = benchmark.module.SHAPES
    monkeypatch.setitem(shapes, "qwen3-30b-a3b", shapes["qwen3-30b-a3b"] | sizes)
    (line,) = benchmark("--shape", "qwen3-30b-a3b", "--layers", "2", "--methods", "weighted")
    assert line["shape"] == "qwen3-30b-a3b" and line["seconds"] > 0
    assert line["all_layers_s"] == pytest.approx(line["rest_s"] + 48 * line["layer_s"])


def test_tuning_takes_the_stage_of_layers(benchmark, monkeypatch):
    steps, tune_layer = [], tuning.tune_layer

    def told(*arguments):
        steps.append(arguments[5])
        return tune_layer(*arguments)

    monkeypatch.setattr(tuning, "tune_layer", told)
    monkeypatch.setattr(tuning, "tune_model", None)
    (line,) = benchmark("--layers", "2", "--methods", "weighted", "--tune", "20")
    assert line["tune"] == 20 and steps == [4] * 3  # of one layer, and of two


def test_one_layer_is_refused(benchmark):
    with pytest.raises(SystemExit):
        benchmark("--layers", "1")
