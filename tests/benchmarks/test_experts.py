"""benchmarks/experts.py: small mixtures run through it on a CPU, beside a Humming that is made up, and its tables."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QWEN3 = Qwen3MoeConfig(hidden_size=64, moe_intermediate_size=96, num_experts=8, num_experts_per_tok=2)
MIXTRAL = MixtralConfig(hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)


@pytest.fixture
def benchmark(monkeypatch, tmp_path):
    """A function that runs it with more options, and returns its lines; ``.module`` is its code."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("experts_benchmark", BENCHMARKS / "experts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    configs = {"qwen3-30b-a3b": QWEN3, "mixtral-8x7b": MIXTRAL}
    models = {name: (cls, configs[name], 2) for name, (cls, _, _) in module.MODELS.items()}
    monkeypatch.setattr(module, "MODELS", models)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "gpu_and_command", dict)
    monkeypatch.setattr(module, "floor_us", lambda block, calls: 1.0)
    monkeypatch.setattr(module, "in_turns_us", in_turns_us)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def run(*options: str) -> list[dict]:
        file = tmp_path / "lines.jsonl"
        monkeypatch.setattr(sys, "argv", ["experts.py", *options, "--json", str(file)])
        module.main()
        return [json.loads(line) for line in file.read_text().splitlines()]

    run.module = module
    return run


def in_turns_us(sides, budget_ms, failed):
    """Runs every call; a side takes as many microseconds as there are sides before it."""
    found = {}
    for place, (name, calls) in enumerate(sides.items()):
        try:
            for call in calls:
                call()
            found[name] = float(place)
        except RuntimeError as error:
            failed(name, error)
    return found


class Humming:
    """Only ``indexed`` is right: ``grouped`` gives twice as much, and cannot run at 3 bits."""

    def __init__(self, dense, bits: int):
        if bits == 5:
            raise AssertionError("no such width")
        self.decoded, self.bits = dense, bits

    def indexed(self, x, ids, weights):
        return self.decoded(x, ids, weights)

    def grouped(self, x, ids, weights):
        if self.bits == 3:
            raise RuntimeError("no such kernel\nand more")
        return 2 * self.decoded(x, ids, weights)


@pytest.fixture
def humming(benchmark, monkeypatch):
    asked = []

    def compile_kernels(blocks, rows):
        asked.append(([block.bits for block in blocks], rows))

    made_up = SimpleNamespace(HummingExperts=Humming, compile_kernels=compile_kernels)
    monkeypatch.setitem(sys.modules, "humming_experts", made_up)
    monkeypatch.setattr(benchmark.module, "find_peers", lambda names: dict.fromkeys(names, "1.2"))
    return asked


def test_a_line_for_each_width(benchmark):
    lines = benchmark("--bits", "2,4", "--tokens", "1,20", "--peers", "grouped_mm,batched_mm")
    assert [(line["model"], line["tokens"], line["bits"]) for line in lines] == [
        (model, tokens, bits) for model in ("qwen3-30b-a3b", "mixtral-8x7b") for tokens in (1, 20) for bits in (2, 4)
    ]
    fields = ("us", "up_us", "down_us", "grouped_mm_us", "batched_mm_us", "floor_us", "floor_16_us")
    for two, four in zip(lines[::2], lines[1::2], strict=True):
        assert set(fields) <= two.keys() == four.keys() and "humming" not in two
        # In the order of sides: both blocks, products of either, then peers, which both lines share.
        assert [two[field] for field in fields[:5]] == [0, 2, 3, 6, 7]
        assert [four[field] for field in fields[:5]] == [1, 4, 5, 6, 7]


def test_a_peer_counts_where_it_is_right(benchmark, humming, capsys):
    lines = benchmark("--models", "mixtral-8x7b", "--bits", "3,4,5", "--tokens", "4,6", "--peers", "humming")
    assert humming == [([3, 4], [8, 12])]
    for line in lines:
        assert line["humming"] == "1.2" and "humming_grouped_us" not in line
        assert ("humming_indexed_us" in line) == (line["bits"] != 5)
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if "skipped" in line] == [
        "humming skipped at 5 bits: AssertionError: no such width",
        *(
            f"humming skipped, grouped, at {told.format(tokens=tokens)}"
            for tokens in (4, 6)
            for told in (
                "3 bits, {tokens} tokens: RuntimeError: no such kernel",
                "4 bits, {tokens} tokens: ValueError: found an error of 1 of the result, expected less than 0.02",
            )
        ),
    ]


def test_our_own_failure_is_raised(benchmark, monkeypatch):
    def broken(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr(benchmark.module.nn_experts.KbitExperts, "forward", broken)
    with pytest.raises(RuntimeError, match="broken"):
        benchmark("--bits", "2", "--tokens", "1", "--peers", "")


def test_tables(benchmark, monkeypatch, capsys, tmp_path):
    """Of several lines for a cell the last counts; what was not measured is empty."""
    common = {"model": "m", "up_us": 2.0, "down_us": 1.4, "floor_us": 1.0, "grouped_mm_us": 30.2, "floor_16_us": 5.0}
    humming = {"humming": "1.2", "humming_indexed_us": 15.0, "humming_grouped_us": 6.0}
    lines = [
        common | {"tokens": 1, "bits": 2, "us": 9.0},
        common | {"tokens": 1, "bits": 2, "us": 4.0} | humming,
        common | {"tokens": 1, "bits": 3, "us": 5.0} | {"humming": "1.2"},
        common | {"tokens": 4, "bits": 3, "us": 8.0, "batched_mm_us": 99.0},
    ]
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["experts.py", "--from", str(tmp_path / "lines.jsonl"), "--table"])
    benchmark.module.main()
    assert capsys.readouterr().out.splitlines() == [
        "| model | tokens | grouped_mm | batched_mm | read, 16 bits | 2 bits | 3 bits |",
        "|---|---:|---:|---:|---:|---:|---:|",
        "| m | 1 | 30 |  | 5 | 4 (2 + 1; 1) | 5 (2 + 1; 1) |",
        "| m | 4 | 30 | 99 | 5 |  | 8 (2 + 1; 1) |",
        "",
        "| model | tokens | 2 bits | 3 bits |",
        "|---|---:|---:|---:|",
        "| m | 1 | 4 (1.50) |  |",
        "| m | 4 |  |  |",
        "",
    ]
