"""Measures what quantization costs the model of ``pretrained`` or ``train``: perplexity, divergence, size, time.

    python -m benchmarks.quality.measure --folder /tmp/smollm2 [--methods "4 normal_float" ...] [--tokens 65536]
                                         [--code] [--questions 1000] [--device cuda] [--json results.jsonl [--resume]]

``methods`` and ``peers`` have the methods; ``--methods`` takes those whose label a regular expression finds, in the
order of the expressions, and with ``--resume`` those alone that the file has no line of. Each model is loaded from the
16-bit checkpoint and evaluated on the held-out text beside it (``hf_kbit.evaluate``), in disjoint windows of the
length it was trained with, at most ``WINDOW``. A library that is not installed is skipped, with a line that says why.

A line has the perplexity, its gap (what it has above that of fp16) with the standard error of that, from ``PARTS``
parts of the text, KL divergence (its mean, and what 99% and 99.9% of the tokens do not exceed) and agreement with
fp16, the part of the questions of ``endings`` that it answers rightly, the squared error of the weights over their
squares, and sizes: ``bits_per_weight`` of the quantized layers counts each code at its width, and scales, zeros and
levels as they are stored; ``stored_bits_per_weight`` counts codes as the library keeps them, some in whole bytes;
``model_MB`` is that and the rest in 16 bits. ``load_seconds`` is from the 16-bit checkpoint to the quantized model,
``peak_MB`` the most memory meanwhile above what was taken before: of the GPU, or of the process on a CPU. ``report``
makes tables and plots of the lines.
"""

import argparse
import gc
import importlib.metadata
import json
import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig

from benchmarks.quality.endings import questions, right
from benchmarks.quality.methods import Method, load, methods, squared_error
from benchmarks.quality.peers import peers
from benchmarks.quality.train import spread
from benchmarks.timing import Report, gpu_and_command
from hf_kbit.calibration.evaluation import of_tokens, summary

PARTS, WINDOW = 16, 2048


def window_of(config) -> int:
    return min(WINDOW, config.max_position_embeddings)


def compare(model, reference, tokens: torch.Tensor, asked: torch.Tensor) -> dict[str, float]:
    """Figures of the whole text; the error of the gap is from its parts of equally many tokens: ``PARTS``, or one a
    window. ``asked`` are the questions."""
    window = window_of(reference.config)
    count = min(PARTS, len(tokens) // window)
    parts = tokens[: len(tokens) // (count * window) * count * window].view(count, -1)
    figures = of_tokens({"model": model, "reference": reference}, parts, window, window)
    found, (nll, reference_nll) = summary(figures, window, window), figures[:2].double().view(2, count, -1).mean(2)
    return {
        "perplexity": found.perplexity,
        "gap": found.perplexity - found.reference_perplexity,
        "gap_error": found.perplexity * (nll - reference_nll).std().item() / math.sqrt(count),
        "kl_divergence": found.kl_divergence,
        "kl_p99": found.kl_p99,
        "kl_p999": found.kl_p999,
        "top1_agreement": found.top1_agreement,
        "right_endings": right(model, asked).float().mean().item(),
    }


# --- for every model that is quantized ------------------------------------------------------------


def command_line(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--methods", nargs="+", default=[""], help="regular expressions that labels of methods contain, in their order"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="file to append a JSON line for each method to")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has lines of")
    return parser


def chosen(arguments) -> list[Method]:
    every = [*methods(), *peers()]
    found = dict.fromkeys(method for each in arguments.methods for method in every if re.search(each, method.label))
    if arguments.resume and (file := Path(arguments.json or "")).is_file():
        lines = map(json.loads, file.read_text().splitlines())
        measured = {(line["library"], line["bits"], line["way"]) for line in lines}
        return [method for method in found if (method.library, method.bits, method.way) not in measured]
    return [*found]


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
    for method in chosen(arguments):
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
    parser.add_argument("--folder", type=Path, required=True, help="that pretrained or train filled")
    parser.add_argument("--tokens", type=int, help="so many of the held-out ones, evenly in them; default all")
    parser.add_argument("--code", action="store_true", help="on code in the place of prose, if pretrained has filled")
    parser.add_argument("--questions", type=int, default=1000, help="at most; default %(default)s")
    arguments = parser.parse_args()
    kind, code = ("code", ", code") if arguments.code else ("text", "")
    held_out = load_file(arguments.folder / f"held_out{code and '_code'}.safetensors")["tokens"].long()
    window = window_of(AutoConfig.from_pretrained(arguments.folder))
    tokens = spread(held_out, window, arguments.tokens or len(held_out))
    asked = questions(held_out, window, arguments.questions)
    if len(tokens) < 2 * window:
        parser.error(f"--tokens: found {arguments.tokens}, expected two windows of {window} or more")
    record = json.loads((arguments.folder / "record.json").read_text())
    measure_all(
        arguments,
        arguments.folder,
        partial(compare, tokens=tokens, asked=asked),
        model=record["model"] + code,
        parameters=record["parameters"],
        text_sha256=record[f"{kind}_sha256"],
        tokens=len(tokens),
        questions=len(asked),
    )


if __name__ == "__main__":
    main()
