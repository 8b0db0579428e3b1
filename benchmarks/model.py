"""Times whole models of a known shape with random weights: bf16, hf_kbit and other libraries, on one CUDA GPU.

    python benchmarks/model.py [--shape llama-3-8b] [--model-layers 32] [--bits 2,3,4,5] [--batches 1,4,16]
                               [--prefill 128,512,2048] [--modes eager,compiled,hf_kbit.fast_generate]
                               [--inputs int8] [--trellis] [--peers bitsandbytes] [--json results.jsonl]
                               [--plot model.png] [--table]
    python benchmarks/model.py --shape qwen3-30b-a3b --model-layers 12  # a mixture; gpt-oss-20b is another
    python benchmarks/model.py --from results.jsonl [--plot model.png] [--table]

One 16-bit checkpoint is written to a temporary folder, and every model is loaded from it as a user would, quantized on
the fly. Every number stands beside its ratio to that of bf16 in the same run. The kinds of lines, by ``what``:

- host: microseconds of host time of one call of a 256 x 256 layer with one token, as calls are queued,
- load: seconds of ``from_pretrained`` with the files in the page cache, GPU memory that stays in use, and its peak,
- prefill: milliseconds of the eager forward of a prompt, as ``generate`` runs it,
- decode: milliseconds from token to token in ``generate``, after a prompt of 128 tokens: eager with the cache that
  ``generate`` takes by default; compiled with ``cache_implementation="static"``, which replays a CUDA graph; and with
  ``custom_generate=hf_kbit.fast_generate``. Compiled lines, which are the last two, tell the seconds of the first
  call, graphs, graph breaks, and the graphs that Inductor's CUDA graphs leave out.

A mixture's experts in 16 bits run as Transformers chooses: ``grouped_mm`` for a prompt, ``batched_mm`` to decode.
bitsandbytes, with NF4 in blocks of 64, runs where it is installed. --inputs int8 measures each width once more, with
8-bit inputs, and --trellis with a trellis: of one layer, which then is all layers of a packed folder, since quantizing
takes half a minute for a billion weights. --plot needs matplotlib; --table prints a table in Markdown for docs/lab.
"""

import argparse
import copy
import gc
import itertools
import math
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import transformers
from gemm import COLOURS, find_peers, skipped
from load import SHAPES, load, make_checkpoint, repeat, report_of_model
from timing import markdown, numbers, parse, run_and_plot, some_of
from torch import nn
from torch._dynamo.utils import counters
from transformers import BitsAndBytesConfig
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

import hf_kbit
from hf_kbit.format.spec import BITS

SHAPE = "llama-3-8b"
PROMPT, NEW_TOKENS = 128, 48
SETTLED = 8  # tokens after which a call has recorded its CUDA graphs
CALLS = 6  # for the CUDA graphs of a process are replayed faster until it has made some
PREFILLS = 5
HOST_SIZE, HOST_CALLS, HOST_RUNS = 256, 200, 5


# --- measuring ------------------------------------------------------------------------------------


def prompt(model, batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(model.config.vocab_size, (batch, tokens), device=model.device)


def host_us(layer) -> float:
    """Microseconds until a call returns, while the GPU follows: the median of several queues of calls."""
    x = torch.randn(1, HOST_SIZE, device="cuda", dtype=torch.bfloat16)
    times = []
    for _ in range(HOST_RUNS):
        layer(x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            layer(x)
        times.append((time.perf_counter() - start) / HOST_CALLS)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def prefill_ms(model, tokens: int) -> float:
    ids, times = prompt(model, 1, tokens), []
    for _ in range(PREFILLS + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


class Clock:
    """A streamer: when each token was known to the host, after the prompt."""

    def __init__(self):
        self.stamps = []

    def put(self, tokens) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None: ...


def decode(model, batch: int, **kwargs) -> tuple[float, float]:
    """Milliseconds from token to token, the median of several calls of ``generate``, and seconds of the first."""
    ids, steps = prompt(model, batch, PROMPT), []
    kwargs |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    start = time.perf_counter()
    model.generate(ids, **kwargs)
    first = time.perf_counter() - start
    for _ in range(CALLS):
        clock = Clock()
        model.generate(ids, streamer=clock, **kwargs)
        steps += [after - before for before, after in itertools.pairwise(clock.stamps[SETTLED + 1 :])]
    return statistics.median(steps) * 1e3, first


MODES = ["eager", "compiled", "hf_kbit.fast_generate"]
COMPILED = {
    "compiled": {"cache_implementation": "static"},
    "hf_kbit.fast_generate": {"custom_generate": hf_kbit.fast_generate},
}


def decode_compiled(model, batch: int, mode: str) -> tuple[float, dict]:
    # Forgets the graphs of other batches: beside them this one would be compiled for any size.
    torch._dynamo.reset()
    counters.clear()
    ms, first = decode(model, batch, **COMPILED[mode])
    return ms, {
        "first_call_s": first,
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "cudagraph_skips": counters["inductor"]["cudagraph_skips"],
    }


def measure_model(folder: str, config, batches, lengths, modes, emit) -> None:
    torch._dynamo.reset()
    gc.collect()
    before = torch.cuda.memory_allocated()
    # Transformers takes None for what a packed folder says of itself.
    model, seconds, peak = load(folder, "cuda", **({"quantization_config": config} if config else {}))
    resident = torch.cuda.memory_allocated() - before
    emit({"what": "load"}, {"seconds": seconds, "resident_GB": resident / 1e9, "peak_GB": peak / 1e9})
    for tokens in lengths:
        emit({"what": "prefill", "tokens": tokens}, {"ms": prefill_ms(model, tokens)})
    for mode, batch in itertools.product(modes, batches):
        ms, compilation = decode_compiled(model, batch, mode) if mode in COMPILED else (decode(model, batch)[0], {})
        emit({"what": "decode", "mode": mode, "batch": batch}, {"ms": ms}, **compilation)


# --- the run --------------------------------------------------------------------------------------

DENSE = {"name": "bf16", "bits": 16}
INT8, TRELLIS = "hf_kbit, 8-bit inputs", "hf_kbit, trellis"
KINDS = {"hf_kbit": {}, INT8: {"inputs": "int8"}, TRELLIS: {"codebook": "trellis"}}  # arguments of KbitConfig


def bitsandbytes_config() -> BitsAndBytesConfig:
    # By itself Transformers leaves it eager with a static cache, though it can be compiled.
    Bnb4BitHfQuantizer.is_compileable = True
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


PEERS = {"bitsandbytes": bitsandbytes_config}


def pack_one_layer(shape: str, layers: int, config, folder: Path) -> None:
    """Writes ``folder / "all"``, whose layers all are the same one, quantized; it is in the page cache then."""
    make_checkpoint(shape, folder / "one", "cuda", num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
    load(folder / "one", "cuda", quantization_config=config)[0].save_pretrained(folder / "packed")
    repeat(folder / "packed", folder / "all", layers)


def measure(shape: str, layers: int, widths, kinds, batches, lengths, modes, peers: dict[str, str], emit) -> None:
    """Calls ``emit`` with each measurement, those of bf16 first."""
    linear = nn.Linear(HOST_SIZE, HOST_SIZE, bias=False, device="cuda", dtype=torch.bfloat16)
    emit(DENSE, {"what": "host"}, {"us": host_us(linear)})
    for bits, kind in itertools.product(widths, kinds):
        model = nn.Sequential(copy.deepcopy(linear))
        hf_kbit.quantize_model(model, bits=bits, device=linear.weight.device, **KINDS[kind])
        emit({"name": kind, "bits": bits}, {"what": "host"}, {"us": host_us(model[0])})
    with tempfile.TemporaryDirectory() as folder:
        # Without an end of sequence every generation has the same length.
        make_checkpoint(shape, folder, "cuda", num_hidden_layers=layers, bos_token_id=None, eos_token_id=None)
        for file in Path(folder).iterdir():
            file.read_bytes()  # puts it into the page cache, which the first model to load would do else
        measure_model(folder, None, batches, lengths, modes, partial(emit, DENSE))
        for bits, kind in itertools.product(widths, kinds):
            config, way = hf_kbit.KbitConfig(bits=bits, **KINDS[kind]), {"name": kind, "bits": bits}
            if kind != TRELLIS:
                measure_model(folder, config, batches, lengths, modes, partial(emit, way))
                continue
            with tempfile.TemporaryDirectory() as packed:
                pack_one_layer(shape, layers, config, Path(packed))
                measure_model(f"{packed}/all", None, batches, lengths, modes, partial(emit, way))
        for peer, version in peers.items():
            way = {"name": peer, "bits": 4, "version": version}
            try:
                measure_model(folder, PEERS[peer](), batches, lengths, modes, partial(emit, way))
            except Exception as error:
                skipped(peer, " from here on", error)


# --- the plot -------------------------------------------------------------------------------------

OTHERS = {
    "bf16": {"color": "#555555", "label": "bf16"},
    "bitsandbytes": {"color": "#bbbbbb", "label": "bitsandbytes, NF4"},
}
HATCHES = {INT8: "//", TRELLIS: ".."}


def plot(lines, file: str) -> None:
    """Of the shape measured last, the panels below, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    what = lines[-1]
    shown = panels([line for line in lines if (line["shape"], line["layers"]) == (what["shape"], what["layers"])])
    figure, axes = plt.subplots(1, len(shown), figsize=(7 * len(shown), 5), dpi=100, squeeze=False)
    for axis, (title, key, unit, own) in zip(axes[0], shown, strict=True):
        bars(axis, own, key)
        axis.set(title=title, xlabel=key, ylabel=unit)
    figure.suptitle(f"{what['shape']}, {what['layers']} layers, bfloat16, {what['gpu']}, {what['date']}")
    handles, labels = axes[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(file)


def panels(lines) -> list[tuple[str, str, str, list[dict]]]:
    """Of each compiled way of decoding that was timed, and of prefill: a title, the field along the axis, the unit of
    the bars, and the lines."""
    decoding = [
        (f"Decode, {mode}", "batch", "ms per token", [line for line in lines if line.get("mode") == mode])
        for mode in COMPILED
    ]
    prefill = ("Prefill, batch 1", "tokens", "ms", [line for line in lines if line["what"] == "prefill"])
    return [panel for panel in (*decoding, prefill) if panel[-1]]


def bars(axis, lines, key: str) -> None:
    """A group of bars for each value of ``key``, in it a bar for each model."""
    groups = sorted({line[key] for line in lines})
    models = {}
    for line in lines:  # where a file holds several runs, the last one counts
        models.setdefault((line["name"], line["bits"]), {})[line[key]] = line["ms"]
    width = 0.85 / len(models)
    for place, ((name, bits), ms) in enumerate(models.items()):
        middles = [group + (place - (len(models) - 1) / 2) * width for group in range(len(groups))]
        style = OTHERS.get(name) or {"color": COLOURS[bits], "label": f"{name}, {bits} bits"}
        style |= {"hatch": HATCHES[name]} if name in HATCHES else {}
        drawn = axis.bar(middles, [ms.get(group, math.nan) for group in groups], width, **style)
        axis.bar_label(drawn, fmt="%.3g", fontsize=7, rotation=90, padding=2)
    axis.set_xticks(range(len(groups)), groups)
    axis.margins(y=0.12)
    axis.grid(axis="y", alpha=0.3)


# --- the tables -----------------------------------------------------------------------------------


def tables(lines: list[dict]) -> str:
    """In Markdown, one for each shape: a column for each model, with ratios to bf16 in brackets."""
    return "\n".join(
        f"{shape}, {layers} layers\n\n"
        + table([line for line in lines if (line["shape"], line["layers"]) == (shape, layers)])
        for shape, layers in dict.fromkeys((line["shape"], line["layers"]) for line in lines)
    )


def table(lines: list[dict]) -> str:
    labels = {"bf16": "16 bits", "hf_kbit": "{bits} bits", INT8: "{bits} bits, 8-bit inputs"}
    labels[TRELLIS] = "{bits} bits, trellis"
    cells, models = {}, {}
    for line in lines:  # where a file holds several runs, the last one counts
        models[line["name"], line["bits"]] = labels.get(line["name"], line["name"]).format(**line)
        for label, field in labelled(line):
            value = f"{line[field]:#.3g}" if line[field] < 99.5 else f"{line[field]:.0f}"
            ratio = "" if line["name"] == "bf16" else f" ({line[f'{field}_over_bf16']:.2f})"
            cells.setdefault(label, {})[line["name"], line["bits"]] = value + ratio
    rows = [[label, *(own.get(model, "") for model in models)] for label, own in cells.items()]
    return markdown(["", *models.values()], rows)


def labelled(line: dict) -> list[tuple[str, str]]:
    """What the numbers of a line are, and their fields."""
    if line["what"] == "load":
        names = {"loading, s": "seconds", "GPU memory, GB": "resident_GB", "its peak while loading, GB": "peak_GB"}
        return list(names.items())
    if line["what"] == "prefill":
        return [(f"prefill of {line['tokens']} tokens, ms", "ms")]
    if line["what"] == "decode":
        return [(f"{line['mode']}, batch {line['batch']}, ms per token", "ms")]
    return [("a call of a 256 x 256 layer, us of the host", "us")]


# --- command line ---------------------------------------------------------------------------------


def command_line():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE)
    parser.add_argument("--model-layers", type=int, help="fewer are quicker; default: those of the shape")
    parser.add_argument("--bits", type=numbers, default=list(BITS))
    parser.add_argument("--batches", type=numbers, default=[1, 4, 16])
    parser.add_argument("--prefill", type=numbers, default=[128, 512, 2048], help="tokens")
    parser.add_argument("--modes", type=some_of(MODES), default=MODES, help="of decoding")
    parser.add_argument("--inputs", choices=["int8"], help="measure each width with 8-bit inputs as well")
    parser.add_argument("--trellis", action="store_true", help="measure each width with a trellis as well")
    parser.add_argument("--table", action="store_true", help="print tables at the end")
    return parse(parser, PEERS, uses=("plot", "table"))


def run(arguments) -> list[dict]:
    report, lines, dense = report_of_model(arguments), [], {}
    shape, layers = report.context["shape"], report.context["layers"]

    def emit(way, where, measured, **others) -> None:
        first = dense.setdefault(tuple(where.items()), measured)
        ratios = {f"{key}_over_bf16": value / first[key] for key, value in measured.items()}
        entry = {**way, **where, **measured, **ratios, **others}
        report.line(**entry)
        lines.append({**report.context, **entry})

    peers = find_peers(arguments.peers)
    kinds = ["hf_kbit", *([INT8] if arguments.inputs else []), *([TRELLIS] if arguments.trellis else [])]
    where = arguments.batches, arguments.prefill, arguments.modes
    measure(shape, layers, arguments.bits, kinds, *where, peers, emit)
    return lines


@torch.no_grad()
def main() -> None:
    arguments = command_line()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = run_and_plot(arguments, run, plot)
    if arguments.table:
        print(tables(lines))


if __name__ == "__main__":
    main()
