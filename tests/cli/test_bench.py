"""``hf-kbit bench``: a quantized model beside itself in 16 bits."""

import re
import sys

import pytest
import torch
from command import refuse, succeed
from transformers import AutoModelForCausalLM

import hf_kbit
from hf_kbit.cli import bench, generate
from hf_kbit.generation.unsupported import Unsupported


def test_figures(folder, device, tmp_path):
    """Weights are those of both models, and the longest bar is that of the largest figure; drawn too."""
    pytest.importorskip("matplotlib")
    sizes = ("--prompt-tokens", 20, "--new-tokens", 4, "--repeats", 1)
    printed = succeed("bench", "packed", *sizes, "--png", tmp_path / "x.png", "--device", device).stdout
    packed = AutoModelForCausalLM.from_pretrained("packed").to(device)  # where tiles are padded
    weights = {"3 bits": packed.get_memory_footprint(), "bfloat16": packed.dequantize().get_memory_footprint()}
    machine, *sections, drawn = printed.rstrip().split("\n\n")
    titles = ["weights, MB", "prompt of 20, tokens per second", "4 new tokens, tokens per second"]
    if device == "cuda":
        titles.insert(1, "most GPU memory, MB")
    assert machine.startswith("machine ") and [section.splitlines()[0] for section in sections] == titles
    for section in sections:
        rows = re.findall(r"^  (\S.*?) +(█+) ([\d.,]+)$", section, flags=re.MULTILINE)
        figures = {name: float(number.replace(",", "")) for name, _, number in rows}
        bars = {name: len(bar) for name, bar, _ in rows}
        assert list(figures) == list(weights) and min(figures.values()) > 0
        assert bars[max(figures, key=figures.get)] == bench.BAR == max(bars.values())
        if section.startswith("weights"):
            assert figures == {name: float(f"{size / 1e6:.4g}") for name, size in weights.items()}
    assert drawn.startswith("drawn ") and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_8_bit_inputs_are_named(folder):
    sizes = ("--prompt-tokens", 20, "--new-tokens", 2, "--repeats", 1, "--device", "cpu")
    assert "\n  3 bits, int8 inputs" in succeed("bench", "packed", "--inputs", "int8", *sizes).stdout


def test_numbers():
    assert [bench._number(value) for value in (0.07123, 16.061, 12345.6)] == ["0.07123", "16.06", "12,346"]


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


def test_refused(folder, monkeypatch):
    assert "dense: found a model that hf_kbit has not quantized" in refuse("bench", "dense")
    found = "--prompt-tokens: found 90 and --new-tokens 64, expected at most 96"
    assert found in refuse("bench", "packed", "--prompt-tokens", 90)
    assert "--repeats: found 0, expected 1 or more" in refuse("bench", "packed", "--repeats", 0)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refuse("bench", "packed", "--png", "x.png")
