"""Measures what quantization costs the model that ``smollm2`` or ``train`` made: perplexity, divergence, size, time.

    python -m benchmarks.quality.measure --folder /tmp/smollm2 [--methods "4 normal_float"] [--tokens 65536]
                                         [--device cuda] [--json results.jsonl]

``methods`` and ``peers`` have the methods; ``--methods`` takes those whose label a regular expression finds. Each
model is loaded from the 16-bit checkpoint and evaluated on the held-out text beside it
(``hf_kbit.evaluation.evaluate``), in disjoint windows of the length it was trained with, at most ``WINDOW``.
A library that is not installed is skipped, with a line that says why.

A line has the perplexity, its gap (what it has above that of fp16) with the standard error of that, from ``PARTS``
parts of the text, KL divergence and agreement with fp16, the squared error of the weights over their squares, and
sizes: ``bits_per_weight`` of the quantized layers counts each code at its width, and scales, zeros and levels as they
are stored; ``stored_bits_per_weight`` counts codes as the library keeps them, some in whole bytes; ``model_MB`` is
that and the rest in 16 bits. ``load_seconds`` is from the 16-bit checkpoint to the quantized model, ``peak_MB`` the
most memory meanwhile above what was taken before: of the GPU, or of the process on a CPU. ``report`` makes tables and
plots of the lines.
"""

import argparse
import gc
import importlib.metadata
import json
import math
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks.quality.methods import Method, load, methods, squared_error
from benchmarks.quality.peers import peers
from benchmarks.quality.train import spread
from benchmarks.timing import Report, gpu_and_command
from hf_kbit.evaluation import evaluate

PARTS, WINDOW = 16, 2048


def window_of(config) -> int:
    return min(WINDOW, config.max_position_embeddings)


def compare(model, reference, tokens: torch.Tensor) -> dict[str, float]:
    """The whole text's figures from those of its parts, which have equally many tokens: ``PARTS``, or one a window."""
    window = window_of(reference.config)
    count = min(PARTS, len(tokens) // window)
    parts = tokens[: len(tokens) // (count * window) * count * window].view(count, -1)
    found = [evaluate(model, part, reference=reference, window=window) for part in parts]
    above = [math.log(each.perplexity / each.reference_perplexity) for each in found]
    perplexity = statistics.geometric_mean(each.perplexity for each in found)
    return {
        "perplexity": perplexity,
        "gap": perplexity - statistics.geometric_mean(each.reference_perplexity for each in found),
        "gap_error": perplexity * statistics.stdev(above) / math.sqrt(count),
        "kl_divergence": statistics.mean(each.kl_divergence for each in found),
        "top1_agreement": statistics.mean(each.top1_agreement for each in found),
    }


# --- for every model that is quantized ------------------------------------------------------------


def command_line(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--methods", default="", help="regular expression that labels of methods contain")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="file to append a JSON line for each method to")
    return parser


def sizes(method: Method, model, reference) -> dict[str, float]:
    storage = method.storage(model)
    stored = storage.code_bytes + storage.other_bytes
    rest = sum(parameter.numel() for parameter in reference.parameters()) - storage.weights
    return {
        "bits_per_weight": (storage.bits or method.bits) + 8 * storage.other_bytes / storage.weights,
        "stored_bits_per_weight": 8 * stored / storage.weights,
        "model_MB": (stored + 2 * rest) / 1e6,
    }


def load_measured(method: Method, folder: Path, device: str) -> tuple[torch.nn.Module, dict[str, float]]:
    """The quantized model, and what it took to make it."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
    start = time.perf_counter()
    model = method.load(folder, device)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")
    return model, {"load_seconds": seconds, "peak_MB": (peak - before) / 1e6}


def resident(name: str) -> int:
    """Bytes of this process's memory, by a name in /proc: held now, or at most."""
    return 1024 * int(re.search(rf"^{name}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1])


def measure_all(arguments, folder: Path, compare: Callable[..., dict], **context) -> None:
    """Reports, for each method asked for, ``compare(model, reference)`` and the sizes of the model in ``folder``."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = gpu_and_command() if arguments.device == "cuda" else {"gpu": "none"}
    where["command"] = shlex.join(["python", "-m", f"benchmarks.quality.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    report = Report(arguments.json, **where, transformers=transformers.__version__, **context)
    reference = load(folder, arguments.device)
    for method in [*methods(), *peers()]:
        if not re.search(arguments.methods, method.label):
            continue
        try:
            model, entry = load_measured(method, folder, arguments.device)
            entry |= sizes(method, model, reference)
            entry |= {**compare(model, reference), "squared_error": squared_error(model, reference)}
        except Exception as error:  # whatever is wrong with one, the others are measured
            reason = next(iter(str(error).strip().splitlines()), "")
            print(f"{method.label} skipped: {type(error).__name__}: {reason}", flush=True)
            continue
        named = {"library": method.library, "bits": method.bits, "way": method.way, "runs": method.runs}
        if method.library not in ("fp16", "hf_kbit"):  # whose versions are in every line
            named["version"] = importlib.metadata.version(method.library)
        report.line(**named, **entry)
        del model
        gc.collect()


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="that smollm2 or train filled")
    parser.add_argument("--tokens", type=int, help="so many of the held-out ones, evenly in them; default all")
    arguments = parser.parse_args()
    tokens = load_file(arguments.folder / "held_out.safetensors")["tokens"].long()
    window = window_of(AutoConfig.from_pretrained(arguments.folder))
    tokens = spread(tokens, window, arguments.tokens or len(tokens))
    if len(tokens) < 2 * window:
        parser.error(f"--tokens: found {arguments.tokens}, expected two windows of {window} or more")
    record = json.loads((arguments.folder / "record.json").read_text())
    measure_all(
        arguments,
        arguments.folder,
        partial(compare, tokens=tokens),
        model=record["model"],
        parameters=record["parameters"],
        text_sha256=record["text_sha256"],
        tokens=len(tokens),
    )


if __name__ == "__main__":
    main()
