"""Calibrates a model with tokens that count alike, and with tokens that are weighed, on parts of its own text.

``docs/lab/2026-11-25-calibrating.md`` has the figures. To make such figures, from the root of the repository:

    python docs/lab/sketches/token_weights.py MODEL --bits 2 3

MODEL is a folder with ``held_out.safetensors``, as ``benchmarks.quality.pretrained`` makes it. A line for each model.
"""

import argparse
import copy
import dataclasses
import json
import time
from pathlib import Path

import torch
from hf_kbit.evaluation import evaluate
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import hf_kbit
from hf_kbit.calibration import sensitivity, writing

WINDOW = 2048


def held_out(folder: Path, windows: int) -> torch.Tensor:
    """So many windows, spread evenly, as one text."""
    rows = load_file(folder / "held_out.safetensors")["tokens"].long().flatten().unfold(0, WINDOW, WINDOW)
    return rows[torch.linspace(0, len(rows) - 1, min(windows, len(rows))).long()].flatten()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--parts", type=int, default=3, help="of the text, each of --sequences")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=640, help="tokens of a sequence")
    parser.add_argument("--windows", type=int, default=8, help="of held-out text")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype="auto").to(device).eval()
    text = writing.write(dense, arguments.parts * arguments.sequences, arguments.length)
    tokens, blends = held_out(arguments.folder, arguments.windows), (0, sensitivity.BLEND)
    for bits in arguments.bits:
        for part in range(arguments.parts):
            for sensitivity.BLEND in blends:
                model, start = copy.deepcopy(dense), time.perf_counter()
                hf_kbit.calibrate(model, text[part :: arguments.parts], bits=bits, batch=8)
                line = {"bits": bits, "part": part, "blend": sensitivity.BLEND, "seconds": time.perf_counter() - start}
                found = evaluate(model, tokens, reference=dense, window=WINDOW)
                print(json.dumps(line | dataclasses.asdict(found)), flush=True)


if __name__ == "__main__":
    main()
