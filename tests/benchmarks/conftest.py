"""Benchmarks run in the process of their test, on a CPU, with small models."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import transformers

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benched(monkeypatch, tmp_path):
    """A function of a benchmark's name: its module. ``module.run_main(*options)`` returns the lines that it writes."""
    monkeypatch.syspath_prepend(BENCHMARKS)

    def load(name):
        spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

        def run_main(*options, json_lines=True):
            file = tmp_path / "written.jsonl"
            file.unlink(missing_ok=True)
            written = ["--json", str(file)] if json_lines else []
            monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", *options, *written])
            module.main()
            return [json.loads(line) for line in file.read_text().splitlines()] if json_lines else None

        module.run_main = run_main
        return module

    verbosity = transformers.logging.get_verbosity()
    yield load
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()
