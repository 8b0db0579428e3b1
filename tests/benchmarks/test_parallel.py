"""benchmarks/parallel.py: every way runs, in a group of one process, and leaves a line."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import transformers
from adapters import assert_same_state
from transformers import AutoModelForCausalLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GROUP = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("parallel_benchmark", BENCHMARKS / "parallel.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    verbosity = transformers.logging.get_verbosity()
    yield module
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


def test_a_line_for_each_way(benchmark, monkeypatch, tmp_path):
    """On one process; a second run finds the checkpoint of the first, which has as many layers as it was asked for."""
    file = tmp_path / "lines.jsonl"
    options = ["--folder", str(tmp_path), "--shape", "tiny", "--layers", "3", "--sequences", "1", "--tokens", "16"]
    options += ["--ways", "tensor,fsdp,ddp", "--modes", "eager", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["parallel.py", *options])
    benchmark.main()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["way"] for line in lines] == ["tensor", "fsdp", "ddp"]
    assert all(line["ms"] > 0 and line["processes"] == 1 for line in lines)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-3-4")
    assert len(model.model.layers) == 3
    one = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-one-4").model.layers[0]
    for layer in model.model.layers:
        assert_same_state(layer.state_dict(), one.state_dict())
    made = (tmp_path / "tiny-3-4" / "config.json").stat().st_mtime_ns
    benchmark.main()
    assert (tmp_path / "tiny-3-4" / "config.json").stat().st_mtime_ns == made
