"""Times quantize, dequantize, repack and gemm beside the memory ceilings, or beside torch, measured in the same run.

    python benchmarks/ops.py [--device cuda|cpu] [--shapes 4096x4096,8192x8192] [--json results.jsonl]

CUDA: replays of a CUDA graph that walks through inputs and outputs of more than 256 MB, so that nothing is in L2. A
line's ceiling is the time of a kernel that only reads (quantize), only writes (dequantize) or copies (repack) as many
bytes as the op reads and writes together. CPU: medians of calls that take turns, gemm with ``F.linear``; the ceiling
is a copy.
"""

import argparse
import json
import statistics
import time
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F

import hf_kbit
from hf_kbit.format import BITS

OPS = torch.ops.hf_kbit
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
COLD_BYTES = 256 << 20  # several times the L2 of any GPU


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Report:
    """Prints a line for each measurement and keeps it for the file of JSON lines."""

    def __init__(self, device: str, file: str | None):
        where = (
            torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"
        )
        self.context = {
            "date": time.strftime("%Y-%m-%d"),
            "device": where,
            "torch": torch.__version__,
            "hf_kbit": hf_kbit.__version__,
        }
        self.file = open(file, "a") if file else None
        print(", ".join(f"{key} {value}" for key, value in self.context.items()))

    def line(self, **entry) -> None:
        print(
            "  ".join(
                f"{key} {value:<9}" if isinstance(value, str) else f"{key} {value:>9.4g}"
                for key, value in entry.items()
            ),
            flush=True,
        )
        if self.file:
            print(json.dumps({**self.context, **entry}), file=self.file, flush=True)


def cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "CPU")


# --- CUDA -----------------------------------------------------------------------------------------


def graph_us(calls, replays: int = 20) -> float:
    """Microseconds of one call: ``calls`` are captured in a graph, each with inputs of its own, their outputs kept."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    del kept
    return statistics.median(times)


def read_kernel():
    import triton
    import triton.language as tl

    @triton.jit
    def read(source, sink, size, BLOCK: tl.constexpr):
        total = tl.zeros((BLOCK,), dtype=tl.int32)
        for part in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
            places = part + tl.arange(0, BLOCK)
            total ^= tl.load(source + places, mask=places < size, other=0)
        if tl.sum(total) == 0x12345678:  # keeps the loads; never true but by chance
            tl.store(sink, 1)

    programs = torch.cuda.get_device_properties(0).multi_processor_count * 8

    def run(source, sink):
        read[(programs,)](source, sink, source.numel(), BLOCK=2048, num_warps=8)

    return run


class Ceilings:
    """Microseconds to read, write or copy a number of bytes that lie in memory, not in L2."""

    def __init__(self):
        self.read, self.sink, self.cache = read_kernel(), torch.zeros(1, dtype=torch.int32, device="cuda"), {}

    def us(self, kind: str, size: int) -> float:
        size = -(-size // 64) * 64
        if (kind, size) not in self.cache:
            moved = size // 2 if kind == "copy" else size  # a copy reads and writes
            sources = [torch.zeros(moved // 4, dtype=torch.int32, device="cuda") for _ in range(copies(size))]
            call = {"read": lambda s: self.read(s, self.sink), "write": torch.Tensor.zero_, "copy": torch.clone}[kind]
            self.cache[kind, size] = graph_us([partial(call, source) for source in sources])
        return self.cache[kind, size]


def copies(size: int) -> int:
    return max(2, -(-COLD_BYTES // size))


def on_cuda(shapes, report: Report) -> None:
    ceilings = Ceilings()

    def measure(op, kind, make, call, **what):
        first = make()
        outputs = call(first)
        size = sum(t.nbytes for t in (*first, *(outputs if isinstance(outputs, tuple) else (outputs,))))
        inputs = [first] + [make() for _ in range(copies(size) - 1)]
        us = graph_us([partial(call, item) for item in inputs])
        ceiling = ceilings.us(kind, size)
        report.line(
            op=op, **what, us=us, GBps=size / us / 1e3, ceiling=kind, ceiling_us=ceiling, fraction=ceiling / us
        )

    for n, k in shapes:
        shape = f"{n}x{k}"
        for bits in BITS:
            codebook = torch.tensor(hf_kbit.codebooks.normal_float(bits), device="cuda")

            def planes(bits=bits, codebook=codebook, n=n, k=k):
                return tuple(OPS.quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), codebook))

            def tiles(bits=bits, planes=planes, n=n, k=k):
                return tuple(OPS.repack(*planes(), bits, [n, k]))

            for dtype in FLOATS:
                what = {"shape": shape, "bits": bits, "dtype": name_of(dtype)}
                dense = partial(torch.randn, n, k, device="cuda", dtype=dtype)
                measure("quantize", "read", lambda d=dense: (d(),), lambda w: OPS.quantize(*w, codebook), **what)
                for form, make in (("planes", planes), ("tiles", tiles)):
                    measure(
                        f"dequantize {form}",
                        "write",
                        make,
                        lambda p, t=dtype: OPS.dequantize(*p, codebook, [n, k], t),
                        **what,
                    )
            what = {"shape": shape, "bits": bits, "dtype": "-"}
            measure("repack", "copy", planes, lambda p: OPS.repack(*p, bits, [n, k]), **what)
            measure("repack inverse", "copy", tiles, lambda p: OPS.repack(*p, bits, [n, k], True), **what)


# --- CPU ------------------------------------------------------------------------------------------


def medians_ms(calls: dict, rounds: int) -> dict[str, float]:
    """Median milliseconds of each call; the calls take turns, so that a busy machine slows all alike."""
    times = {name: [] for name in calls}
    for round in range(rounds + 2):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round >= 2:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def on_cpu(shapes, report: Report) -> None:
    for n, k in shapes:
        shape, weights = f"{n}x{k}", n * k
        source = torch.randn(n, k)
        copy_ms = medians_ms({"copy": lambda: source.clone()}, 7)["copy"]
        packed, codebooks = {}, {}
        for bits in BITS:
            codebooks[bits] = torch.tensor(hf_kbit.codebooks.normal_float(bits))
            packed[bits] = OPS.quantize(source, codebooks[bits])
            for dtype in FLOATS:
                dense = source.to(dtype)
                calls = {
                    "quantize": lambda: OPS.quantize(dense, codebooks[bits]),
                    "dequantize planes": lambda: OPS.dequantize(*packed[bits], codebooks[bits], [n, k], dtype),
                }
                stored = sum(tensor.nbytes for tensor in packed[bits])
                for op, ms in medians_ms(calls, 7).items():
                    size = dense.nbytes + stored
                    floor = copy_ms * size / (2 * source.nbytes)
                    what = {"op": op, "shape": shape, "bits": bits, "dtype": name_of(dtype)}
                    speed = {"us": ms * 1e3, "GBps": size / ms / 1e6, "Mweights_s": weights / ms / 1e3}
                    report.line(**what, **speed, ceiling="copy", ceiling_us=floor * 1e3, fraction=floor / ms)
        for dtype in FLOATS:
            for tokens in (1, 4, 8, 16, 32, 64, 256, 512):
                # Several copies of each weight, walked through in turn: a model's layers do not stay in the cache.
                x = torch.randn(tokens, k).to(dtype)
                dense = cycle([source.to(dtype).clone() for _ in range(2)])
                rotating = {bits: cycle([[t.clone() for t in packed[bits]] for _ in range(4)]) for bits in BITS}
                calls = {"torch": lambda: F.linear(x, next(dense))}
                for bits in BITS:
                    calls[bits] = lambda bits=bits: OPS.gemm(x, *next(rotating[bits]), codebooks[bits], None, n)
                ms = medians_ms(calls, 5 if tokens > 32 else 15)
                for bits in BITS:
                    what = {"op": "gemm", "shape": shape, "bits": bits, "dtype": name_of(dtype), "tokens": tokens}
                    size = sum(tensor.nbytes for tensor in packed[bits]) + x.nbytes + tokens * n * x.itemsize
                    floor = copy_ms * size / (2 * source.nbytes)
                    speed = {"us": ms[bits] * 1e3, "GBps": size / ms[bits] / 1e6}
                    speed |= {"ceiling": "copy", "ceiling_us": floor * 1e3, "fraction": floor / ms[bits]}
                    report.line(**what, **speed, torch_us=ms["torch"] * 1e3, over_torch=ms[bits] / ms["torch"])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=None, help="NxK,...; default 4096x4096, on a GPU 8192x8192 too")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", default=None, help="file to append a JSON line for each measurement to")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    default = "4096x4096,8192x8192" if arguments.device == "cuda" else "4096x4096"
    shapes = [tuple(map(int, shape.split("x"))) for shape in (arguments.shapes or default).split(",")]
    report = Report(arguments.device, arguments.json)
    (on_cuda if arguments.device == "cuda" else on_cpu)(shapes, report)


if __name__ == "__main__":
    main()
