"""Times vLLM on models of a known shape with random weights: 16 bits, hf_kbit, FP8 and GPTQ, on CUDA GPUs.

    python benchmarks/serving.py --folder /tmp/models [--shape llama-3-8b] [--model-layers 32]
                                 [--methods bf16,hf_kbit-4,hf_kbit-4-int8,hf_kbit-2,fp8,gptq,gptq-marlin,...]
                                 [--sequences 1,4,16,64,256] [--prompts 512,2048] [--tensor-parallel 2]
                                 [--json results.jsonl] [--plot serving.png] [--table]
    python benchmarks/serving.py --from results.jsonl [--plot serving.png] [--table]
    VLLM_CPU_KVCACHE_SPACE=1 python benchmarks/serving.py --folder /tmp/tiny --shape tiny --sequences 1,4 \\
        --prompts 32,64 --methods bf16,hf_kbit-4,gptq  # a rehearsal, where vLLM is one for CPUs; or tiny-mixture

The methods:

- bf16: 16 bits,
- hf_kbit-4 and so on: ours, so many bits, quantized before; hf_kbit-4-int8 with 8-bit inputs; hf_kbit-4-trellis and
  hf_kbit-4-trellis-int8 with a trellis,
- fp8: vLLM quantizes the 16-bit checkpoint while it loads it, activations at each step,
- gptq: 4 bits with a scale for each 128, by the kernel that vLLM chooses,
- gptq-marlin, gptq-machete, gptq-humming: the same checkpoint by a kernel that it is told to take.

Every layer of a checkpoint is the same layer of random weights, which each method rounds to nearest. Checkpoints stay
in --folder, where later runs find them. They are read once before, so that vLLM finds them in the page cache. Each
method has a process of its own, and a cache of its own for what vLLM compiles: every start compiles. What vLLM says
goes to METHOD.log in --folder. One that fails gets a line that says so, and the run goes on.

The kinds of lines, by ``what``; ``took_s`` is what measuring it took:

- start: seconds until ``LLM(...)`` returns, of which vLLM's log has the parts: reading the checkpoint, processing
  what it read too, then profiling, compiling and recording CUDA graphs; weights on each GPU; the KV cache that is left
  on each at vLLM's own limit of memory, and its tokens; the kernels of the linear layers,
- first token: milliseconds from handing over a prompt, none of which is cached, to its first token,
- decode: milliseconds from token to token, while all sequences decode after a prompt each, whose keys and values are
  there already. Where the KV cache has no room for all of them, ``fits`` is false, and nothing was measured,
- saturation: tokens a second in the end, of twice as many requests as there may be sequences at once, prefills
  included.

Ratios to bf16 are those to lines of this run, or else to lines of --json of the same day, GPUs and model. --plot needs
matplotlib; --table prints tables in Markdown.
"""

import argparse
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gemm import COLOURS
from load import SHAPES, report_of_model
from timing import markdown, numbers, read, run_and_plot, some_of

from hf_kbit.format.spec import BITS

WIDTHS = [f"hf_kbit-{bits}{kind}" for kind in ("", "-trellis") for bits in sorted(BITS, reverse=True)]
METHODS = ["bf16", *WIDTHS, *(f"{width}-int8" for width in WIDTHS), "fp8", "gptq"]
METHODS += ["gptq-marlin", "gptq-machete", "gptq-humming"]
DEFAULT_METHODS = [method for method in METHODS if "hf_kbit-5" not in method]
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that measures it, whose memory it then reads
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # nothing is sampled; and it is compiled where FlashInfer is
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # needs multicast between GPUs
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # for this file has asked for GPUs before vLLM is imported
    "HF_HUB_OFFLINE": "1",
}
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


# --- processes ------------------------------------------------------------------------------------


def checkpoint_of(method: str) -> str:
    """The name of what it serves; several serve the same."""
    if method == "fp8":
        return "bf16"
    return method.partition("-")[0] if method.startswith("gptq") else method.removesuffix("-int8")


def in_a_process(function: str, log: Path, **arguments) -> Iterator[dict]:
    """The lines of ``child``, as they come: of an own process, for what another leaves on the GPU would be missing."""
    code = "import json, sys, serving_process; serving_process.child(sys.argv[1], json.loads(sys.argv[2]))"
    command = [sys.executable, "-c", code, function, json.dumps(arguments)]
    with tempfile.TemporaryDirectory() as cache, log.open("w") as errors:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **ENVIRONMENT, **dict.fromkeys(CACHES, cache), "PYTHONPATH": path}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        last = {}
        for line in process.stdout:
            if line.startswith("{"):  # other libraries print too
                last = json.loads(line)
                yield last
        if process.wait() and last.get("what") != "failed":
            yield {"what": "failed", "error": f"exit code {process.returncode}, see {log}"}


PARTS = {
    "read_s": r"Loading weights took ([\d.]+) seconds",
    "load_s": r"Model loading took .* and ([\d.]+) seconds",
    "compile_s": r"init engine .* took .*\(compilation: ([\d.]+) s",
    "capture_s": r"Graph capturing finished in ([\d.]+) secs",
    "engine_s": r"init engine .* took ([\d.]+) s",
}


def parts(log: str) -> dict[str, float]:
    """What vLLM says that the parts of a start took."""
    found = {part: re.search(pattern, log) for part, pattern in PARTS.items()}
    return {part: float(match[1]) for part, match in found.items() if match}


# --- the run --------------------------------------------------------------------------------------

WHERE = ("what", "prompt", "sequences")  # what a line is of
COMPARED = ("seconds", "weights_GB", "kv_GB", "kv_tokens", "ms", "tokens_per_s")
MODEL = ("shape", "layers", "tensor_parallel", "gpu")


def cell(line: dict) -> tuple:
    return tuple(line.get(key) for key in WHERE)


def dense_lines(file: str | None, context: dict) -> dict[tuple, dict]:
    """Those of bf16 in a file, by cells, which can be compared with."""
    if not file or not Path(file).exists():
        return {}
    same = [line for line in read(file) if all(line.get(key) == context[key] for key in ("date", *MODEL))]
    return {cell(line): line for line in same if line["method"] == "bf16"}


def run(arguments) -> list[dict]:
    report = report_of_model(arguments, vllm=vllm_version(), tensor_parallel=arguments.tensor_parallel)
    context, lines = report.context, []
    dense = dense_lines(arguments.json, context)
    arguments.folder.mkdir(parents=True, exist_ok=True)

    def emit(method: str, measured: dict) -> None:
        if method == "bf16":
            dense[cell(measured)] = measured
        first = dense.get(cell(measured), {})
        compared = [key for key in COMPARED if measured.get(key) and first.get(key)]
        ratios = {f"{key}_over_bf16": measured[key] / first[key] for key in compared}
        entry = {"method": method, **measured, **ratios}
        report.line(**entry)
        lines.append({**context, **entry})

    for method in arguments.methods:
        log = arguments.folder / f"{method}.log"
        wanted = {key: context[key] for key in ("shape", "layers", "tensor_parallel")}
        (made,) = in_a_process("make", log, folder=str(arguments.folder), name=checkpoint_of(method), **wanted)
        if made.get("what") == "failed":
            emit(method, made)
            continue
        print(f"{made['path']}: {made['GB']:.1f} GB, written or read in {made['seconds']:.0f} s", flush=True)
        settings = {key: getattr(arguments, key) for key in ("tensor_parallel", "sequences", "prompts")}
        for line in in_a_process("serve", log, path=made["path"], method=method, **settings):
            emit(method, {**line, **(parts(log.read_text()) if line["what"] == "start" else {})})
    return lines


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "none"  # each method says so


# --- the plot -------------------------------------------------------------------------------------

OTHERS = {
    "bf16": {"color": "#555555"},
    "fp8": {"color": "#e6ab02"},
    "gptq": {"color": "#66a61e"},
    "gptq-marlin": {"color": "#1f78b4", "linestyle": "--"},
    "gptq-machete": {"color": "#a6761d", "linestyle": "--"},
    "gptq-humming": {"color": "#e31a1c", "linestyle": "--"},
}


def style(method: str) -> dict:
    if not method.startswith("hf_kbit"):
        return {"label": method.replace("-", ", "), **OTHERS[method]}
    _, bits, *kind = method.split("-")
    inputs, trellis = "int8" in kind, "trellis" in kind
    label = f"hf_kbit, {bits} bits" + ", trellis" * trellis + ", 8-bit inputs" * inputs
    style = {"label": label, "color": COLOURS[int(bits)], "linestyle": "-." if inputs else "-"}
    return style | ({"marker": "^"} if trellis else {})


def latest(lines: list[dict]) -> dict[tuple, dict[str, dict]]:
    """By cells and methods; where a file holds several runs, the last one counts."""
    cells = {}
    for line in lines:
        cells.setdefault(cell(line), {})[line["method"]] = line
    return cells


def title(line: dict) -> str:
    gpus = f"{line['tensor_parallel']} x " if line["tensor_parallel"] > 1 else ""
    return f"{line['shape']}, {line['layers']} layers, {gpus}{line['gpu']}"


def plot(lines, file: str) -> None:
    """Of the model measured last, a panel of decoding for each length of prompts, and one of saturation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    last = lines[-1]
    own = [line for line in lines if all(line[key] == last[key] for key in MODEL)]
    lengths = sorted({line["prompt"] for line in own if line["what"] == "decode"})
    figure, axes = plt.subplots(1, len(lengths) + 1, figsize=(6 * len(lengths) + 6, 5), dpi=100, squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=False):
        of_length = [line for line in own if line["what"] == "decode" and line["prompt"] == length]
        curves(axis, of_length)
        axis.set(title=f"Decode after {length} tokens", xlabel="sequences", ylabel="ms per token")
    done = {line["method"]: line["tokens_per_s"] for line in own if line["what"] == "saturation"}
    for place, (method, tokens) in enumerate(done.items()):
        drawn = axes[0, -1].bar(place, tokens, color=style(method)["color"])
        axes[0, -1].bar_label(drawn, fmt="%.0f", fontsize=8)
    axes[0, -1].set_xticks(range(len(done)), [style(method)["label"] for method in done], rotation=30, ha="right")
    axes[0, -1].set(title="Saturation", ylabel="tokens per second")
    axes[0, -1].grid(axis="y", alpha=0.3)
    figure.suptitle(f"{title(last)}, vLLM {last['vllm']}, {last['date']}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(file)


def curves(axis, lines) -> None:
    methods = {}
    for line in lines:
        if line["fits"]:
            methods.setdefault(line["method"], {})[line["sequences"]] = line["ms"]
    for method, ms in methods.items():
        how = {"marker": "o", "markersize": 4, **style(method)}
        axis.plot(sorted(ms), [ms[count] for count in sorted(ms)], **how)
    counts = sorted({line["sequences"] for line in lines})
    axis.set_xscale("log", base=4)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(counts, counts)
    axis.grid(alpha=0.3)


# --- the tables -----------------------------------------------------------------------------------

ROWS = {  # of a kind of line: a label for each field
    "start": {
        "seconds": "start, s",
        "weights_GB": "weights, GB",
        "kv_GB": "KV cache, GB",
        "kv_tokens": "its tokens, thousands",
    },
    "first token": {"ms": "first token, prompt {prompt}, ms"},
    "decode": {"ms": "decode, prompt {prompt}, {sequences} sequences, ms a token"},
    "saturation": {"tokens_per_s": "saturation, tokens a second"},
}
MORE_IS_BETTER = ("kv_GB", "kv_tokens", "tokens_per_s")


def four_bits(method: str) -> bool:
    return method.startswith(("hf_kbit-4", "gptq"))


def tables(lines: list[dict]) -> str:
    """In Markdown, one for each model: a column for each method, with ratios to bf16 in brackets, the best method of 4
    bits in bold; below it the kernels, and what failed."""
    models = {}
    for line in lines:
        models.setdefault(title(line), []).append(line)
    return "\n".join(f"{name}\n\n{table(own)}" for name, own in models.items())


def table(lines: list[dict]) -> str:
    cells = latest(lines)
    methods = list(dict.fromkeys(line["method"] for line in lines if line["what"] != "failed"))
    rows = []
    for own in cells.values():
        for field, label in ROWS.get(next(iter(own.values()))["what"], {}).items():
            best = best_of(own, field)
            label = label.format(**next(iter(own.values())))
            row = [shown(own.get(method), field, method == best) for method in methods]
            if any(row):
                rows.append([label, *row])
    kernels = {method: line["kernels"] for own in cells.values() for method, line in own.items() if "kernels" in line}
    notes = [f"- {method}: {names}" for method, names in kernels.items()]
    last = {line["method"]: line for line in lines}
    notes += [f"- {method} failed: {line['error']}" for method, line in last.items() if "error" in line]
    return markdown(["", *methods], rows) + "\n" + "\n".join([*notes, ""])


def best_of(own: dict[str, dict], field: str) -> str | None:
    values = {method: line[field] for method, line in own.items() if four_bits(method) and field in line}
    choose = max if field in MORE_IS_BETTER else min
    return choose(values, key=values.get) if len(values) > 1 else None


def shown(line: dict | None, field: str, best: bool) -> str:
    if line is None or field not in line:
        return "no room" if line and not line.get("fits", True) else ""
    number = line[field] / 1000 if field == "kv_tokens" else line[field]
    value = f"{number:#.3g}" if number < 99.5 else f"{number:.0f}"
    ratio = line.get(f"{field}_over_bf16")
    value += f" ({ratio:.2f})" if ratio and line["method"] != "bf16" else ""
    return f"**{value}**" if best else value


# --- command line ---------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="of the checkpoints, which stay there")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--model-layers", type=int, help="fewer are quicker; default: those of the shape")
    parser.add_argument(
        "--methods", type=some_of(METHODS), default=DEFAULT_METHODS, help=f"some of {', '.join(METHODS)}"
    )
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="tokens")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share a model")
    parser.add_argument("--json", help="file to append a JSON line for each measurement to")
    parser.add_argument("--plot", help="PNG to draw")
    parser.add_argument("--from", dest="source", help="measure nothing; take this file of JSON lines")
    parser.add_argument("--table", action="store_true", help="print tables at the end")
    arguments = parser.parse_args()
    if not arguments.source and not arguments.folder:
        parser.error("expected --folder, to measure, or --from, to look at what was measured")
    lines = run_and_plot(arguments, run, plot)
    if arguments.table:
        print(tables(lines))


if __name__ == "__main__":
    main()
