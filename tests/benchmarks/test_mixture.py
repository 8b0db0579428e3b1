"""benchmarks/mixture.py: a mixture that is hardly trained runs through it."""

import importlib.util
import re
import sys
from pathlib import Path

import transformers

BENCHMARK = Path(__file__).parents[2] / "benchmarks/mixture.py"


def test_a_line_for_each_width_and_method(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("mixture_benchmark", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "READ", 16)
    monkeypatch.setattr(module, "HELD_OUT", 4)
    monkeypatch.setattr(sys, "argv", ["mixture.py", "--steps", "10", "--bits", "2,4", "--methods", "feedback"])
    verbosity = transformers.logging.get_verbosity()
    try:
        module.main()
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    dense, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"16 bits: loss [2-5]\.\d{4}", dense)
    found = {}
    for line in lines:
        name, errors = re.fullmatch(r"(. bits, [\w ]+): errors ([\d., ]+); loss \+-?[\d.]+", line).groups()
        found[name] = [float(error) for error in errors.split(", ")]
    assert found.keys() == {
        f"{bits} bits, {name}" for bits in (2, 4) for name in ("none", "experts without", "feedback")
    }
    assert all(few > many for few, many in zip(found["2 bits, none"], found["4 bits, none"], strict=True))
    assert found["4 bits, feedback"] != found["4 bits, experts without"] != found["4 bits, none"]
