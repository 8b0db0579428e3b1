"""Times gemm on tiles beside cuBLAS, the time to read as many bytes, and other libraries, on one CUDA GPU.

    python benchmarks/gemm.py [--quick] [--shapes 4096x4096,8192x8192] [--bits 2,3,4,5] [--tokens 1,16,256]
                              [--dtypes float16,bfloat16] [--peers humming,bitsandbytes] [--json results.jsonl]
    python benchmarks/gemm.py --gradient --tokens 256,4096 [...]
    python benchmarks/gemm.py --rotated [...]
    python benchmarks/gemm.py --from results.jsonl --plot speedup.png
    python benchmarks/gemm.py [...] --against benchmarks/results/gemm-h200-2026-11-23.jsonl

A time is the median of replays of a CUDA graph that walks through weights of more than 256 MB, so that no weight is in
L2; x is the same for all calls, as a layer finds it that was just computed. For each shape, dtype and number of tokens
all sides take turns. The floor is the time of the best of several kernels that only read, given as many bytes as the
packed weight, x and the output have together. Peers run where they are installed: bitsandbytes with NF4 in blocks of
64, Humming (humming-kernels, compiled for each shape before the first measurement) with intN weights, a 16-bit scale
for each 32 and the configuration that its own heuristics choose; humming-fp8 and humming-int8 are the same with inputs
that a kernel of its own rounds to FP8 or int8. --plot needs matplotlib.

--gradient times the gradient of the activations in place of the product, beside cuBLAS alone; its lines say so. With
--rotated weights have column scales and a rotation, of which the lines tell the cost, beside the same weight without:
``plain_us``, measured in turn. Where the GPU has a kernel for 8-bit inputs, lines with ``inputs`` are of
products that ask for them; up to 64 tokens, of trellises up to 16, these are 16-bit inputs' own. Lines with ``weight``
are of trellises.

--against prints what has become slower since the lines of a file were measured, by more than ``NOISE``: of the ratios
of times, each over the median of cuBLAS's ratios, by which the machines differ. If there is any, the exit status is 1.
"""

import argparse
import copy
import importlib.metadata
import itertools
import json
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch
import torch.nn.functional as F
from ops import trellis_of
from timing import (
    Report,
    copies,
    gpu_and_command,
    graph_us,
    in_turns_us,
    name_of,
    parse,
    read,
    read_kernel,
    run_and_plot,
)

import hf_kbit
from hf_kbit.format.spec import BITS
from hf_kbit.ops import native

OPS = torch.ops.hf_kbit
# The linear layers of Llama-3 8B and 70B as N x K, with q, k and v and with gate and up joined.
SHAPES = "4096x4096,6144x4096,28672x4096,4096x14336,8192x8192,10240x8192,57344x8192,8192x28672"
TOKENS = ",".join(str(2**power) for power in range(13))
QUICK = {"shapes": "4096x4096,8192x8192,57344x8192", "tokens": "1,8,16", "dtypes": "float16"}
OUTPUT_BYTES = 4 << 30  # a graph keeps the outputs of all its calls
HUMMING_INPUTS = {"humming": None, "humming-fp8": "float8e4m3", "humming-int8": "int8"}
DISTRIBUTIONS = {**dict.fromkeys(HUMMING_INPUTS, "humming-kernels"), "bitsandbytes": "bitsandbytes"}
GROUP = 32  # weights that share a scale, here and in Humming
NOISE = 0.05  # by which a time may differ from one run to another


# --- measuring ------------------------------------------------------------------------------------


class Floor:
    """Microseconds to read a number of bytes that are not in L2: the best of several grids and blocks."""

    def __init__(self):
        self.read, self.sink, self.cache = read_kernel(), torch.zeros(1, dtype=torch.int32, device="cuda"), {}
        self.ways = [
            {"per_processor": per_processor, "block": block, "warps": warps}
            for per_processor, block, warps in itertools.product((4, 8, 16), (2048, 4096), (4, 8))
        ]

    def us(self, size: int) -> float:
        size = -(-size // 64) * 64  # 16 integers, which lets Triton load 16 bytes at a time
        if size not in self.cache:
            sources = [torch.zeros(size // 4, dtype=torch.int32, device="cuda") for _ in range(copies(size))]
            self.cache[size] = min(
                graph_us([partial(self.read, source, self.sink, **way) for source in sources], budget_ms=2)
                for way in self.ways
            )
        return self.cache[size]


def calls_of(kernels, x, n: int) -> list:
    """As many calls as there are kernels, one for each copy of a weight, fewer where the outputs take too much."""
    return [partial(kernel, x) for kernel in kernels[: max(2, OUTPUT_BYTES // (x.shape[0] * n * x.itemsize))]]


# --- weights: a function of x for each copy -------------------------------------------------------


def dense_kernels(weight, gradient: bool):
    weights = [weight, *(weight.clone() for _ in range(copies(weight.nbytes) - 1))]
    return [partial(torch.matmul, other=w) if gradient else partial(F.linear, weight=w) for w in weights]


def packed_kernels(weight, bits: int, gradient: bool, rotated: bool):
    """Lists of functions by side, and the bytes of one packed weight; one that is rotated has more sides."""
    n, k = weight.shape
    codebook = torch.tensor(hf_kbit.format.codebooks.normal_float(bits), device="cuda")
    words, scales = OPS.repack(*OPS.quantize(weight, codebook, signed=rotated), bits, [n, k])
    columns = torch.randint(144, 209, (k,), device="cuda", dtype=torch.uint8)
    packed = [words, scales, columns]
    size = sum(tensor.nbytes for tensor in (packed if rotated else packed[:2]))
    sets = [packed, *([tensor.clone() for tensor in packed] for _ in range(copies(size) - 1))]

    def call(x, words, scales, columns, rotated):
        transform = (columns, True) if rotated else ()
        if gradient:
            return OPS.gemm_gradient(x, words, scales, codebook, [n, k], *transform)
        return OPS.gemm(x, words, scales, codebook, None, n, *transform)

    def functions(rotated: bool):
        return [lambda x, tensors=tensors: call(x, *tensors, rotated) for tensors in sets]

    sides = {"hf_kbit": functions(rotated)}
    if rotated:
        sides["plain"] = functions(False)
    if rotated and not gradient and native.has_int8("cuda"):
        inverses = OPS.int8_inverses(words, scales, codebook, [n, k])
        sides["int8"] = [
            lambda x, w=w, s=s, c=c: OPS.gemm_int8(x, w, s, codebook, None, n, c, inverses) for w, s, c in sets
        ]
    return sides | trellis_kernels(n, k, bits, gradient), size


def trellis_kernels(n: int, k: int, bits: int, gradient: bool):
    def on_gpu():
        return [value.cuda() if torch.is_tensor(value) else value for value in trellis_of(n, k, bits)]

    sets = [on_gpu() for _ in range(copies(n * k * bits // 8))]
    if gradient:
        return {"trellis": [lambda x, how=how: OPS.gemm_trellis_gradient(x, *how) for how in sets]}
    return {
        "trellis": [lambda x, how=how: OPS.gemm_trellis(x, None, *how) for how in sets],
        "trellis int8": [lambda x, how=how: OPS.gemm_trellis_int8(x, None, *how) for how in sets],
    }


# --- peers ----------------------------------------------------------------------------------------


def bitsandbytes_kernels(weight, bits: int, tokens):
    if bits != 4:
        return None
    import bitsandbytes
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4")

    def another():
        scales = copy.copy(state)
        scales.absmax = state.absmax.clone()
        return packed.clone(), scales

    pairs = [another() for _ in range(copies(packed.nbytes + state.absmax.nbytes))]
    return [lambda x, p=p, s=s: bitsandbytes.matmul_4bit(x, p.t(), quant_state=s) for p, s in pairs]


def humming_tuning(config, tokens) -> str:
    """Of Humming's own choices for ranges of tokens, those needed: it compiles a kernel for each that it is given."""
    from humming.tune import get_heuristics_config

    needed = {1, *tokens}  # it always looks one up for 1
    ranges = get_heuristics_config(config)
    return json.dumps([choice for choice in ranges if any(choice[0] < count <= choice[1] for count in needed)])


def humming_kernels(weight, bits: int, tokens, inputs: str | None):
    from humming.layer import HummingLayer

    n, k = weight.shape
    configs = {"weight_config": {"dtype": f"int{bits}", "group_size": GROUP}}
    configs |= {"input_config": {"dtype": inputs}} if inputs else {}
    layer = HummingLayer(shape_n=n, shape_k=k, torch_dtype=weight.dtype, **configs).cuda()
    layer.load_from_unquantized(weight)
    layer.transform()
    tuning = humming_tuning(layer.humming_config, tokens)
    size = layer.weight.nbytes + layer.weight_scale.nbytes
    layers = [layer, *(copy.deepcopy(layer) for _ in range(copies(size) - 1))]
    return [partial(layer, tuning_config=tuning) for layer in layers]


def humming_compile(shape, bits: int, dtype, inputs: str | None, tokens) -> None:
    """Puts the kernels of one weight into Humming's cache, under the key that calls of its layer have."""
    from humming.dtypes import DataType
    from humming.kernel.humming import HummingKernel
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    config = prepare_layer_config(
        shape_n=shape[0],
        shape_k=shape[1],
        weight_schema=HummingWeightSchema(b_dtype=f"int{bits}", weight_scale_group_size=GROUP),
        input_schema=HummingInputSchema(a_dtype=inputs or DataType.from_torch_dtype(dtype)),
        torch_dtype=dtype,
    )
    HummingKernel.prepare_kernels(config.to_str(), None, humming_tuning(config, tokens))


def humming_compile_all(shapes, widths, dtypes, inputs, tokens) -> None:
    """All at once, as there are several kernels for each weight and each takes seconds of one processor.

    A failure comes up again, and is told, where the kernel is used.
    """
    start = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        whats = itertools.product(shapes, widths, dtypes, inputs)
        wait([pool.submit(humming_compile, *what, tokens) for what in whats])
    print(f"humming: compiled in {time.perf_counter() - start:.0f} s")


PEERS = {name: partial(humming_kernels, inputs=inputs) for name, inputs in HUMMING_INPUTS.items()}
PEERS["bitsandbytes"] = bitsandbytes_kernels


def skipped(peer: str, where: str, error: Exception) -> None:
    reason = next(iter(str(error).strip().splitlines()), "")
    print(f"{peer} skipped{where}: {type(error).__name__}: {reason}", flush=True)


def find_peers(names) -> dict[str, str]:
    """The version of each that can be imported."""
    found = {}
    for name in names:
        try:
            importlib.import_module(DISTRIBUTIONS[name].partition("-")[0])
            found[name] = importlib.metadata.version(DISTRIBUTIONS[name])
        except Exception as error:  # whatever is wrong with a peer, the others are measured
            skipped(name, "", error)
    return found


def peer_kernels(peer: str, weight, bits: int, tokens):
    try:
        return PEERS[peer](weight, bits, tokens)
    except Exception as error:
        skipped(peer, f" at {bits} bits", error)
        return None


# --- the run --------------------------------------------------------------------------------------


def measure(shapes, widths, dtypes, tokens, peers: dict[str, str], gradient: bool, rotated: bool, emit) -> None:
    """Calls ``emit`` with each measurement."""
    floor = Floor()
    if inputs := [HUMMING_INPUTS[peer] for peer in peers if peer in HUMMING_INPUTS]:
        humming_compile_all(shapes, widths, dtypes, inputs, tokens)
    for n, k in shapes:
        source = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        packed = {bits: packed_kernels(source, bits, gradient, rotated) for bits in widths}
        for dtype in dtypes:
            weight = source.to(dtype)
            dense = dense_kernels(weight, gradient)
            others = {(peer, bits): peer_kernels(peer, weight, bits, tokens) for peer in peers for bits in widths}
            others = {key: kernels for key, kernels in others.items() if kernels}
            for count in tokens:
                columns, out_columns = (n, k) if gradient else (k, n)
                x = torch.randn(count, columns, device="cuda", dtype=dtype)
                what = {"shape": f"{n}x{k}", "dtype": name_of(dtype), "tokens": count}
                what |= {"of": "gradient"} if gradient else {}
                what |= {"transform": "rotated"} if rotated else {}
                row(x, out_columns, dense, packed, others, floor, peers, partial(emit, **what))


def row(x, n: int, dense, packed, others, floor: Floor, versions, emit) -> None:
    """All sides of one shape, dtype and number of tokens."""
    moved = x.nbytes + x.shape[0] * n * x.itemsize
    floors = {bits: floor.us(size + moved) for bits, (_, size) in packed.items()}
    sides = {("cublas", None): dense}
    sides |= {(side, bits): kernels for bits, (own, _) in packed.items() for side, kernels in own.items()}
    sides |= others

    def failed(side, error):
        if side not in others:
            raise error
        skipped(side[0], f" at {side[1]} bits, {x.shape[0]} tokens", error)

    us = in_turns_us({side: calls_of(kernels, x, n) for side, kernels in sides.items()}, failed=failed)
    cublas = us.pop(("cublas", None))
    for (side, bits), its_us in us.items():
        result = {"us": its_us, "cublas_us": cublas, "speedup": cublas / its_us}
        if side in ("hf_kbit", "int8"):
            speed = {"TBps": packed[bits][1] / its_us / 1e6, "floor_us": floors[bits]}
            speed["floor_fraction"] = floors[bits] / its_us
            if side == "int8":
                speed = {"inputs": "int8", **speed}
            elif ("plain", bits) in us:
                speed["plain_us"] = us["plain", bits]
            emit(bits=bits, **speed, **result)
        elif side.startswith("trellis"):
            inputs = {"inputs": "int8"} if side == "trellis int8" else {}
            emit(bits=bits, weight="trellis", **inputs, **result)
        elif side != "plain":
            emit(bits=bits, peer=side, version=versions[side], **result)


# --- against an earlier run -----------------------------------------------------------------------


def slower(lines: list[dict], before: list[dict]) -> list[tuple[dict, float]]:
    """Our lines whose times are more than ``NOISE`` above those of ``before``, the worst first, and how many times as
    long they are, as the machine of ``before`` would take.

    Raises:
        ValueError: nothing was measured in both.
    """

    def cells(lines):  # where a file holds several runs, the last one counts
        names = "shape", "dtype", "tokens", "bits", "of", "transform", "inputs", "weight"
        return {tuple(line.get(name) for name in names): line for line in lines if "peer" not in line}

    ours, theirs = cells(lines), cells(before)
    both = [(ours[cell], theirs[cell]) for cell in ours if cell in theirs]
    if not both:
        raise ValueError("--against: found no shape, dtype, width and number of tokens that was measured now as well")
    machine = statistics.median(now["cublas_us"] / then["cublas_us"] for now, then in both)
    ratios = [(now, now["us"] / then["us"] / machine) for now, then in both]
    return sorted([(line, ratio) for line, ratio in ratios if ratio > 1 + NOISE], key=lambda pair: -pair[1])


# --- the plot -------------------------------------------------------------------------------------

PANELS = ("4096x4096", "8192x8192", "57344x8192", "8192x28672")
COLOURS = {2: "#1b9e77", 3: "#d95f02", 4: "#7570b3", 5: "#e7298a"}
STYLES = {
    "hf_kbit": "-",
    "hf_kbit, 8-bit inputs": "-.",
    "hf_kbit, trellis": (0, (3, 1, 1, 1)),
    "hf_kbit, trellis, 8-bit inputs": (0, (3, 1, 1, 1, 1, 1)),
    "humming": "--",
    "humming-fp8": (0, (5, 1, 1, 1)),
    "humming-int8": (0, (8, 2)),
    "bitsandbytes": (0, (1, 1)),
}


def plot(lines, file: str) -> None:
    """Speed-up over cuBLAS against tokens, in the dtype measured first, a panel for each shape of ``PANELS``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    dtype = lines[0]["dtype"]
    measured = dict.fromkeys(line["shape"] for line in lines if line["dtype"] == dtype)
    shapes = [shape for shape in PANELS if shape in measured] or list(measured)[:4]
    columns = min(2, len(shapes))
    rows = -(-len(shapes) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6 * columns, 4 * rows + 1), dpi=100, squeeze=False)
    for shape, axis in itertools.zip_longest(shapes, axes.flat):
        if shape is None:
            axis.remove()
        else:
            panel(axis, shape, [line for line in lines if (line["shape"], line["dtype"]) == (shape, dtype)])
    handles = {line.get_label(): line for axis in figure.axes for line in axis.get_legend_handles_labels()[0]}
    of = " of the gradient" if lines[0].get("of") == "gradient" else ""
    figure.suptitle(f"Speed-up{of} over cuBLAS, {lines[0]['gpu']}, {dtype}, {lines[0]['date']}")
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=max(3, 2 * columns + 1), fontsize=9)
    figure.tight_layout(rect=(0, 0.07 if rows > 1 else 0.15, 1, 1))
    figure.savefig(file)


def panel(axis, shape: str, lines) -> None:
    curves = {}
    for line in lines:  # where a file holds several runs, the last one counts
        kind = (", trellis" if "weight" in line else "") + (", 8-bit inputs" if "inputs" in line else "")
        name = line.get("peer", "hf_kbit" + kind)
        curves.setdefault((name, line["bits"]), {})[line["tokens"]] = line["speedup"]
    for (name, bits), points in sorted(curves.items(), key=lambda item: (list(STYLES).index(item[0][0]), item[0][1])):
        tokens = sorted(points)
        style = {"color": COLOURS[bits], "linestyle": STYLES[name], "marker": "o" if "hf_kbit" in name else None}
        axis.plot(tokens, [points[count] for count in tokens], label=f"{name}, {bits} bits", markersize=4, **style)
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0)
    axis.set_title(f"{shape} (N x K)")
    axis.set_xlabel("tokens")
    axis.set_ylabel("cuBLAS time / time")
    axis.grid(alpha=0.3)


# --- command line ---------------------------------------------------------------------------------


def command_line():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", help=f"NxK,...; default {SHAPES}")
    parser.add_argument("--bits", default=",".join(map(str, BITS)))
    parser.add_argument("--tokens", help=f"default {TOKENS}")
    parser.add_argument("--dtypes", help="default float16,bfloat16")
    parser.add_argument("--gradient", action="store_true", help="of the activations, in place of the product")
    parser.add_argument("--rotated", action="store_true", help="weights with column scales and a rotation")
    parser.add_argument("--against", help="file of JSON lines; print what has become slower since")
    parser.add_argument("--quick", action="store_true", help="defaults are three shapes, 1, 8 and 16 tokens, float16")
    arguments = parse(parser, PEERS, uses=("plot", "against"))
    for name, default in {"shapes": SHAPES, "tokens": TOKENS, "dtypes": "float16,bfloat16"}.items():
        setattr(arguments, name, getattr(arguments, name) or (QUICK if arguments.quick else {}).get(name, default))
    arguments.shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",")]
    arguments.bits = [int(bits) for bits in arguments.bits.split(",")]
    arguments.tokens = [int(count) for count in arguments.tokens.split(",")]
    arguments.dtypes = [getattr(torch, dtype) for dtype in arguments.dtypes.split(",")]
    if arguments.gradient:
        arguments.peers = []
    return arguments


def run(arguments) -> list[dict]:
    report = Report(arguments.json, **gpu_and_command())
    lines = []

    def emit(**entry) -> None:
        report.line(**entry)
        lines.append({**report.context, **entry})

    peers = find_peers(arguments.peers)
    what = arguments.shapes, arguments.bits, arguments.dtypes, arguments.tokens
    measure(*what, peers, arguments.gradient, arguments.rotated, emit)
    return lines


@torch.inference_mode()
def main() -> None:
    arguments = command_line()
    lines = run_and_plot(arguments, run, plot)
    if arguments.against:
        found = slower(lines, read(arguments.against))
        for line, ratio in found:
            names = ("shape", "dtype", "of", "transform", "inputs")
            what = " ".join(str(line[name]) for name in names if name in line)
            print(f"slower: {what}, {line['bits']} bits, {line['tokens']} tokens: {ratio:.2f} times as long")
        print(f"{len(found)} cells slower than in {arguments.against}")
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
