"""Times quantize, dequantize, embed, repack and gemm beside the memory ceilings, or torch, measured in the same run.

    python benchmarks/ops.py [--device cuda|cpu] [--shapes 4096x4096,8192x8192] [--json results.jsonl]

CUDA: replays of a CUDA graph that walks through inputs and outputs of more than 256 MB, so that nothing is in L2. A
line's ceiling is the time of a kernel that only reads (quantize), only writes (dequantize, embed) or copies (repack)
as many bytes as the op reads and writes together. CPU: medians of calls that take turns; the ceiling is a copy. Beside
gemm, gemm_int8 and gemm_trellis, on a CPU, stands ``F.linear``, beside embed ``F.embedding``, of a weight or table in
the dtype of the result.
"""

import argparse
import statistics
import time
from functools import partial
from itertools import cycle

import torch
import torch.nn.functional as F
from timing import Report, copies, graph_us, name_of, read_kernel

import hf_kbit
from hf_kbit.format.spec import BITS
from hf_kbit.format.trellis import TrellisDecoding, block_of

OPS = torch.ops.hf_kbit
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Look-ups: tokens, and rows of a table that no cache holds.
LOOK_UPS = {"cuda": (16 * 2048, 1 << 17), "cpu": (2048, 1 << 15)}


def cpu_name() -> str:
    with open("/proc/cpuinfo") as info:
        return next((line.split(":")[1].strip() for line in info if line.startswith("model name")), "CPU")


def describe(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"


# --- CUDA -----------------------------------------------------------------------------------------


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
            codebook = torch.tensor(hf_kbit.format.codebooks.normal_float(bits), device="cuda")

            def planes(bits=bits, codebook=codebook, n=n, k=k):
                return tuple(OPS.quantize(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), codebook))

            def tiles(bits=bits, planes=planes, n=n, k=k):
                return tuple(OPS.repack(*planes(), bits, [n, k]))

            for dtype in FLOATS:
                what = {"shape": shape, "bits": bits, "dtype": name_of(dtype)}
                dense = partial(torch.randn, n, k, device="cuda", dtype=dtype)
                for op, search in (("quantize", False), ("quantize searched", True)):
                    quantize = partial(OPS.quantize, codebook=codebook, search=search)
                    measure(op, "read", lambda d=dense: (d(),), lambda w, q=quantize: q(*w), **what)
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
    for k in sorted({k for _, k in shapes}):
        look_ups_on_cuda(k, report, ceilings)


def look_ups_on_cuda(k: int, report: Report, ceilings: Ceilings) -> None:
    tokens, rows = LOOK_UPS["cuda"]
    indices = [torch.randperm(rows, device="cuda")[:tokens] for _ in range(4)]
    for dtype in (torch.float32, torch.bfloat16):
        dense = torch.randn(rows, k, device="cuda", dtype=dtype)
        torch_us = graph_us([partial(F.embedding, some, dense) for some in indices])
        for bits in BITS:
            codebook = torch.tensor(hf_kbit.format.codebooks.normal_float(bits), device="cuda")
            planes = OPS.quantize(dense, codebook)
            for form, packed in (("planes", planes), ("tiles", OPS.repack(*planes, bits, [rows, k]))):
                us = graph_us([partial(OPS.embed, some, *packed, codebook, [rows, k], dtype) for some in indices])
                # Tiles hold two rows together.
                stored = sum(t.nbytes for t in packed) * tokens // rows * (2 if form == "tiles" else 1)
                size = indices[0].nbytes + stored + tokens * k * dtype.itemsize
                ceiling = ceilings.us("write", size)
                what = {"op": f"embed {form}", "shape": f"{rows}x{k}", "bits": bits, "dtype": name_of(dtype)}
                speed = {"tokens": tokens, "us": us, "GBps": size / us / 1e3, "ceiling": "write"}
                speed |= {"ceiling_us": ceiling, "fraction": ceiling / us}
                report.line(**what, **speed, torch_us=torch_us, over_torch=us / torch_us)


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
        packed, codebooks, columns = {}, {}, torch.full((k,), 176, dtype=torch.uint8)  # those of gemm_int8
        for bits in BITS:
            codebooks[bits] = torch.tensor(hf_kbit.format.codebooks.normal_float(bits))
            packed[bits] = OPS.quantize(source, codebooks[bits])
            for dtype in FLOATS:
                dense = source.to(dtype)
                calls = {
                    "quantize": lambda: OPS.quantize(dense, codebooks[bits]),
                    "quantize searched": lambda: OPS.quantize(dense, codebooks[bits], True),
                    "dequantize planes": lambda: OPS.dequantize(*packed[bits], codebooks[bits], [n, k], dtype),
                }
                stored = sum(tensor.nbytes for tensor in packed[bits])
                for op, ms in medians_ms(calls, 7).items():
                    size = dense.nbytes + stored
                    floor = copy_ms * size / (2 * source.nbytes)
                    what = {"op": op, "shape": shape, "bits": bits, "dtype": name_of(dtype)}
                    speed = {"us": ms * 1e3, "GBps": size / ms / 1e6, "Mweights_s": weights / ms / 1e3}
                    report.line(**what, **speed, ceiling="copy", ceiling_us=floor * 1e3, fraction=floor / ms)
        look_ups_on_cpu(k, report, copy_ms / (2 * source.nbytes))
        for dtype in FLOATS:
            for tokens in (1, 4, 8, 16, 32, 64, 256, 512):
                # Several copies of each weight, walked through in turn: a model's layers do not stay in the cache.
                x = torch.randn(tokens, k).to(dtype)
                dense = cycle([source.to(dtype).clone() for _ in range(2)])
                rotating = {bits: cycle([[t.clone() for t in packed[bits]] for _ in range(4)]) for bits in BITS}
                trellises = {bits: cycle([trellis_of(n, k, bits) for _ in range(4)]) for bits in BITS}
                calls = {"torch": lambda: F.linear(x, next(dense))}
                for bits in BITS:
                    weight = partial(lambda bits: (*next(rotating[bits]), codebooks[bits], None, n), bits)
                    inverses = OPS.int8_inverses(*packed[bits], codebooks[bits], [n, k])
                    calls["gemm", bits] = lambda w=weight: OPS.gemm(x, *w())
                    calls["gemm_int8", bits] = lambda w=weight, i=inverses: OPS.gemm_int8(x, *w(), columns, i)
                    calls["gemm_trellis", bits] = lambda t=trellises[bits]: OPS.gemm_trellis(x, None, *next(t))
                ms = medians_ms(calls, 5 if tokens > 32 else 15)
                for op, bits in list(calls)[1:]:
                    what = {"op": op, "shape": shape, "bits": bits, "dtype": name_of(dtype), "tokens": tokens}
                    read = packed[bits] if op != "gemm_trellis" else next(trellises[bits])[:3]
                    size = sum(tensor.nbytes for tensor in read) + x.nbytes + tokens * n * x.itemsize
                    floor = copy_ms * size / (2 * source.nbytes)
                    own = ms[op, bits]
                    speed = {"us": own * 1e3, "GBps": size / own / 1e6}
                    speed |= {"ceiling": "copy", "ceiling_us": floor * 1e3, "fraction": floor / own}
                    report.line(**what, **speed, torch_us=ms["torch"] * 1e3, over_torch=own / ms["torch"])


def trellis_of(n: int, k: int, bits: int) -> tuple:
    """Operands of ``gemm_trellis``, with random tiles as files have them."""
    decoding = TrellisDecoding(bits, block=block_of(n, k))
    (_, tiles), (_, inputs), (_, outputs) = decoding.layout((n, k)).values()
    words = torch.randint(-(2**15), 2**15, tiles, dtype=torch.int16).transpose(0, 1)
    return words, torch.ones(inputs).half(), torch.ones(outputs).half(), [n, k], decoding.code, decoding.block


def look_ups_on_cpu(k: int, report: Report, copy_ms_of_a_byte: float) -> None:
    tokens, rows = LOOK_UPS["cpu"]
    indices = torch.randperm(rows)[:tokens]
    for dtype in FLOATS:
        dense = torch.randn(rows, k).to(dtype)
        for bits in BITS:
            codebook = torch.tensor(hf_kbit.format.codebooks.normal_float(bits))
            packed = OPS.quantize(dense, codebook)
            calls = {
                "embed planes": lambda: OPS.embed(indices, *packed, codebook, [rows, k], dtype),
                "torch": lambda: F.embedding(indices, dense),
            }
            ms = medians_ms(calls, 7)
            us, torch_us = ms["embed planes"] * 1e3, ms["torch"] * 1e3
            size = indices.nbytes + sum(t.nbytes for t in packed) * tokens // rows + tokens * k * dtype.itemsize
            floor = copy_ms_of_a_byte * size * 1e3
            what = {"op": "embed planes", "shape": f"{rows}x{k}", "bits": bits, "dtype": name_of(dtype)}
            speed = {"tokens": tokens, "us": us, "GBps": size / us / 1e3, "ceiling": "copy"}
            speed |= {"ceiling_us": floor, "fraction": floor / us}
            report.line(**what, **speed, torch_us=torch_us, over_torch=us / torch_us)


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
    report = Report(arguments.json, device=describe(arguments.device))
    (on_cuda if arguments.device == "cuda" else on_cpu)(shapes, report)


if __name__ == "__main__":
    main()
