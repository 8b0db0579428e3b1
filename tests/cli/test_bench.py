"""``hf-kbit bench``: a quantized model beside itself in 16 bits."""

import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import cli
from hf_kbit.cli import bench, generate
from hf_kbit.generation.unsupported import Unsupported

SHORT = ["--prompt-tokens", 20, "--new-tokens", 4, "--repeats", 1]


@pytest.fixture
def run_bench(folder, device, monkeypatch):
    monkeypatch.chdir(folder)

    def run(*arguments):
        return CliRunner().invoke(cli.app, list(map(str, ["bench", *arguments, "--device", device])))

    return run


def test_figures(run_bench, folder, device):
    """Weights are those of both models, and the longest bar is that of the largest figure."""
    result = run_bench("packed", *SHORT)
    assert result.exit_code == 0, result.output
    packed = AutoModelForCausalLM.from_pretrained(folder / "packed").to(device)  # where tiles are padded
    sizes = {"3 bits": packed.get_memory_footprint(), "bfloat16": packed.dequantize().get_memory_footprint()}
    machine, *sections = result.stdout.rstrip().split("\n\n")
    titles = ["weights, MB", "prompt of 20, tokens per second", "4 new tokens, tokens per second"]
    if device == "cuda":
        titles.insert(1, "most GPU memory, MB")
    assert machine.startswith("machine ") and [section.splitlines()[0] for section in sections] == titles
    for section in sections:
        rows = {row[0]: (len(row[1]), float(row[2].replace(",", ""))) for row in
                re.findall(r"^  (\S.*?) +(█+) ([\d.,]+)$", section, flags=re.MULTILINE)}  # fmt: skip
        assert list(rows) == list(sizes) and all(figure > 0 for _, figure in rows.values())
        longest = max(rows.values(), key=lambda row: row[1])
        assert longest[0] == bench.BAR == max(length for length, _ in rows.values())
        if section.startswith("weights"):
            assert {name: figure for name, (_, figure) in rows.items()} == {
                name: float(f"{size / 1e6:.4g}") for name, size in sizes.items()
            }


@pytest.mark.parametrize(("value", "shown"), [(0.07123, "0.07123"), (16.061, "16.06"), (12345.6, "12,346")])
def test_numbers(value, shown):
    assert bench._number(value) == shown


def test_the_clock(monkeypatch):
    """The prompt is handed on first and takes no time; the first token comes when the prompt has been read."""
    now = iter([10.0, 12.0, 12.5, 13.0, 13.5])
    monkeypatch.setattr(generate.time, "perf_counter", lambda: next(now))
    clock = generate.Clock()
    for n in range(5):
        clock.put(torch.tensor([n]))
    assert clock.times == [2.0, 2.5, 3.0, 3.5] and clock.tokens_per_second == 2.0


def test_gpus_decode_by_our_loop_where_it_can():
    """Else by Transformers' own; the prompt that both ways hand on counts once."""
    ways, clock = [], generate.Clock()

    class Model:
        device = torch.device("cuda")

        def generate(self, streamer, custom_generate=None):
            ways.append(custom_generate)
            streamer.put(torch.tensor([[1, 2]]))
            if custom_generate is not None:
                raise problem
            streamer.put(torch.tensor([3]))

    problem = Unsupported("hf_kbit.fast_generate: found beams, expected none")
    generate.generate(Model(), streamer=clock)
    assert ways == [hf_kbit.fast_generate, None] and len(clock.times) == 1
    problem = ValueError("hf_kbit.fast_generate: found probabilities that are NaN or all 0, expected finite logits")
    with pytest.raises(ValueError, match="that are NaN"):
        generate.generate(Model(), streamer=clock)
    assert ways == [hf_kbit.fast_generate, None, hf_kbit.fast_generate], "a broken model is not run again"


def test_drawn(run_bench, folder, tmp_path):
    pytest.importorskip("matplotlib")
    assert run_bench("packed", *SHORT, "--png", tmp_path / "x.png").exit_code == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_package_to_draw_with(run_bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run_bench("packed", "--png", "x.png")
    assert result.exit_code == 1 and "pip install matplotlib" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dense"], "dense: found a model that hf_kbit has not quantized"),
        (["packed", "--prompt-tokens", 90], "--prompt-tokens: found 90 and --new-tokens 64, expected at most 96"),
    ],
)
def test_refused(run_bench, arguments, message):
    result = run_bench(*arguments)
    assert result.exit_code == 1 and message in result.stderr
