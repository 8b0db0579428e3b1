"""Tests trellis_many_tokens.cu beside float64 on real and random weights, then times it beside cuBLAS in bfloat16.

    python docs/lab/sketches/trellis_many_tokens.py libmany.so [tests/data/exl3/numbers.safetensors]

Needs a GPU of compute capability 9.0. Times are medians of CUDA graphs that walk through 400 MB of weights, sides in
turns; `layer` is the kernel that makes x' and the product with its output transform.
"""

import ctypes
import math
import os
import statistics
import sys
import time
from itertools import pairwise

import torch

from hf_kbit.format.trellis import INPUT, OUTPUT

SCALE, N = 1774 / 262144, 8192
MEAN = 0.5 - (1329 / 128 / SCALE - 1534)
LIBRARY = ctypes.CDLL(os.path.abspath(sys.argv[1]))
HALF, INT8, INT16, DECODED = "float16", "int8", "int16", "int8, decoded first"
BUDGET = float(os.environ.get("BUDGET", 150))
BITS = [int(b) for b in os.environ.get("BITS", "4,2,3").split(",")]
BEGAN = time.time()


def pointer(tensor):
    return ctypes.c_void_p(tensor.data_ptr())


def stream():
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


def random_trellis(k, n, bits):
    words = torch.randint(-(2**31), 2**31 - 1, (k // 16, n // 16, 8 * bits), dtype=torch.int32, device="cuda")
    return words.view(torch.int16)


def repacked(trellis):
    """int32 [n / 128, k / 256, 8, K, 32, 4]: lane 4 g + t has of tile 4 i + t of 16 rows the K words of g, g + 8."""
    rows, columns, halves = trellis.shape
    # The file swaps halves of words, so little-endian int32 is the stream, highest bit first.
    words = trellis.contiguous().view(torch.int32)
    words = words.view(rows // 16, 4, 4, columns // 8, 8, 8, halves // 16)  # slab, i, t, column, of 8, g, word
    return words.permute(3, 0, 4, 6, 5, 2, 1).contiguous()


def sums_of_bytes(trellis):
    """int64 [k, n]: s of each weight."""
    device = trellis.device
    window = exl3_windows(trellis)
    x = (window * 0x83DCD12D) & 0xFFFFFFFF
    s = sum(x >> shift & 255 for shift in (0, 8, 16, 24))
    tiles = torch.empty(*trellis.shape[:2], 16, 16, dtype=torch.int64, device=device)
    tiles[..., INPUT.to(device), OUTPUT.to(device)] = s
    return tiles.transpose(1, 2).flatten(2).flatten(0, 1)


def exl3_windows(trellis):
    bits, device = trellis.shape[-1] // 16, trellis.device
    halves = (trellis.int() & 0xFFFF).unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    end = (torch.arange(256, device=device) + 1) * bits
    last, left = (end + 15) // 16 - 1, -end % 16
    both = halves[..., (last - 1) % halves.shape[-1]].long() << 16 | halves[..., last].long()
    return both >> left & 0xFFFF


def hadamard(x):
    h = torch.ones(1, 1, dtype=torch.float64, device=x.device)
    for _ in range(7):
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (x.double().unflatten(-1, (-1, 128)) @ h / math.sqrt(128)).flatten(-2)


def columns_in_order(kind):
    """Of each place within 64 the column that `prepare` puts there."""
    place = torch.empty(64, dtype=torch.long)
    for t in range(4):
        for c in range(16):
            m, h, e = c % 8 // 2, c // 8, c % 2
            at = {HALF: 16 * m + 8 * h + 2 * t + e, DECODED: 16 * t + 4 * m + 2 * h + e}
            place[at.get(kind, 16 * m + 4 * t + 2 * h + e)] = 16 * t + c
    return place


class Inputs:
    def __init__(self, tokens, k, kind, n=N):
        self.kind, self.tokens, self.k = kind, tokens, k
        self.int8 = {HALF: 0, INT16: 2}.get(kind, 1)
        columns = tokens * (2 if kind == INT16 else 1)
        self.of = torch.full((columns, k), 77, dtype=torch.int8 if self.int8 else torch.float16, device="cuda")
        self.scales = torch.full((tokens + 1,), float("nan"), device="cuda")
        self.sums = torch.zeros(tokens + 1, dtype=torch.int32, device="cuda")
        self.partial = torch.empty(132 * 256 * 256, dtype=torch.int32, device="cuda")
        self.ready = torch.zeros(132 * 16, dtype=torch.int32, device="cuda")
        self.weights = torch.full((n, k), 77, dtype=torch.int8, device="cuda") if kind == DECODED else None

    def make(self, x, suh):
        code = LIBRARY.many_tokens_prepare(
            pointer(x), pointer(suh), pointer(self.of), pointer(self.scales), pointer(self.sums), self.tokens, self.k,
            self.int8, int(self.kind == DECODED), pointer(self.ready), self.ready.numel(), stream())  # fmt: skip
        assert code == 0, code

    def product(self, words, svh, y, bits, tile, decode=True):
        """tile: of tokens; of decoded weights blocks of a cluster, and 10 more for two slices."""
        common = [pointer(self.of), pointer(self.scales), pointer(self.sums), pointer(svh), pointer(y)]
        common += [pointer(self.partial), pointer(self.ready), self.tokens, self.k, y.shape[1], bits]
        as_float = int(y.dtype == torch.float32)
        if self.kind == DECODED:
            code = LIBRARY.many_tokens_decoded(
                pointer(words) if decode else None,
                pointer(self.weights),
                *common,
                1 + tile // 10,
                tile % 10,
                as_float,
                stream(),
            )
        else:
            code = LIBRARY.many_tokens_run(pointer(words), *common, self.int8, tile, as_float, stream())
        assert code == 0, code

    def seen(self):
        order = columns_in_order(self.kind).to("cuda")
        back = torch.empty(self.of.shape, dtype=torch.float64, device="cuda")
        back.view(len(self.of), -1, 64)[..., order] = self.of.double().view(len(self.of), -1, 64)
        if self.kind == INT16:
            back = back[0::2] * 256 + back[1::2]
        return back * self.scales[:-1].double()[:, None]


def dense(words, suh, svh, out, bits):
    code = LIBRARY.many_tokens_dense(
        pointer(words), pointer(suh), pointer(svh), pointer(out), out.shape[1], out.shape[0], bits, stream()
    )
    assert code == 0, code


def off(y, reference):
    return float((y.double() - reference).norm() / reference.norm())


def check(trellis, name, cases):
    k, n, bits = trellis.shape[0] * 16, trellis.shape[1] * 16, trellis.shape[2] // 16
    s = sums_of_bytes(trellis)
    stored = ((1024 + s).float() * SCALE - 1329 / 128).half().double()  # EXL3's values
    as_int8 = (((s - 509) >> 2).double() * 4 + MEAN) * SCALE
    words, good, worst = repacked(trellis), True, {}
    for kind, tokens, tile in cases:
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        suh, svh = (torch.randn(size, device="cuda").half() for size in (k, n))
        inputs, int8 = Inputs(tokens, k, kind, n), kind != HALF
        inputs.make(x, suh)
        turned = hadamard(x.double() * suh.double())
        y = torch.full((tokens + 1, n), float("nan"), device="cuda")
        inputs.product(words, svh, y[:tokens], bits, tile)
        short = torch.full((tokens, n), float("nan"), device="cuda", dtype=torch.bfloat16)
        inputs.make(x, suh)
        inputs.product(words, svh, short, bits, tile)
        torch.cuda.synchronize()
        own = off(y[:tokens], hadamard(inputs.seen() @ (as_int8 if int8 else stored)) * svh.double())
        true = off(y[:tokens], hadamard(turned @ stored) * svh.double())
        of_x = off(inputs.seen(), turned)
        right = (
            own < (4e-4 if tile >= 256 or kind == DECODED else 2e-6 if int8 else 2e-5)
            and true < (2e-2 if int8 else 1e-3)
            and bool(y[tokens].isnan().all())
        )
        right = right and off(short, y[:tokens].double()) < 3e-3
        good &= right
        key = kind + (f" {tile}" if tile >= 256 else "")
        worst[key] = [max(a, b) for a, b in zip(worst.get(key, (0, 0, 0)), (own, true, of_x), strict=True)]
        if not right:
            print("WRONG", name, bits, kind, tokens, tile, f"own {own:.1e} true {true:.1e} x {of_x:.1e}", flush=True)
    suh, svh = (torch.randn(size, device="cuda").half() for size in (k, n))
    out = torch.full((n, k), float("nan"), device="cuda").bfloat16()
    dense(words, suh, svh, out, bits)
    exact = hadamard(hadamard(stored.T).mT).mT * svh.double()[:, None] * suh.double()
    true = off(out, exact)
    good &= true < 3e-3
    worst["dense"] = [0, true, 0]
    text = ", ".join(f"{key}: own {a:.1e}, EXL3 {b:.1e}, x {c:.1e}" for key, (a, b, c) in worst.items())
    print(f"{name} {k} x {n}, {bits} bits: {text}", flush=True)
    return good


def of_file(path, bits):
    """Real tensors of exllamav3, code mul1, one after another until there are 6144 in_features."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = [key[:-8] for key in file.keys() if key.endswith(".trellis")]
        found = [file.get_tensor(name + ".trellis") for name in names if name + ".mul1" in file.keys()]
    found = [tensor for tensor in found if tensor.shape[2] == 16 * bits]
    if not found:
        return None
    widest = max(tensor.shape[1] for tensor in found)
    one = torch.cat([tensor for tensor in found if tensor.shape[1] == widest])
    return one.repeat(math.ceil(384 / one.shape[0]), 1, 1)[:384].cuda()


def graph_of(calls):
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def times(sides, budget_ms=60, rounds=3):
    """Median microseconds a call of several lists of calls, which take turns."""
    graphs = {name: (graph_of(calls), len(calls)) for name, calls in sides.items()}
    found, count = {name: [] for name in sides}, {}

    def replay(graph, number):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(number + 1)]
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        events[-1].synchronize()
        return [a.elapsed_time(b) for a, b in pairwise(events)]

    for name, (graph, _) in graphs.items():
        graph.replay()
        count[name] = max(2, min(30, math.ceil(budget_ms / replay(graph, 1)[0] / rounds)))
    for _ in range(rounds):
        for name, (graph, _) in graphs.items():
            found[name] += replay(graph, count[name])
    return {name: statistics.median(found[name]) * 1e3 / graphs[name][1] for name in sides}


def bench(tokens, bits):
    """cuBLAS in bfloat16, and of both kinds of inputs each tile: the product alone, and with the kernel before it."""
    sides = {"cublas": [lambda w=w: torch.nn.functional.linear(X[:tokens], w) for w in DENSE]}
    y = torch.empty(tokens, N, device="cuda", dtype=torch.bfloat16)
    keep, svh = [], torch.ones(N, device="cuda").half()
    for kind in (HALF, INT8, INT16, DECODED):
        if (kind == DECODED and tokens < 1024) or (kind == INT16 and tokens > 64):
            continue
        inputs = Inputs(tokens, N, kind)
        inputs.make(X[:tokens], svh)
        keep.append(inputs)
        name = {HALF: "half", INT8: "int8", INT16: "int16", DECODED: "dec"}[kind]
        sides[f"{name} x"] = [lambda i=inputs: i.make(X[:tokens], svh)] * 4
        columns = 2 * tokens if kind == INT16 else tokens
        tiles = [1, 2] if kind == DECODED else [min(256, max(16, 1 << (columns - 1).bit_length()))]
        tiles += [512] if kind == INT8 and tokens >= 512 else []
        for tile in tiles:

            def layer(w, i=inputs, tile=tile):
                i.make(X[:tokens], svh)
                i.product(w, svh, y, bits, tile)

            sides[f"{name} layer {tile}"] = [lambda w=w, layer=layer: layer(w) for w in PACKED[bits]]
            if kind == DECODED and bits == BITS[0] and tile < 10:

                def alone(w, i=inputs, tile=tile):
                    i.ready.zero_()
                    i.product(w, svh, y, bits, tile, False)

                sides[f"{name} product {tile}"] = [lambda alone=alone: alone(None)] * 4
    if tokens >= 2048:
        out = torch.empty(N, N, device="cuda", dtype=torch.bfloat16)

        def first(w):
            dense(w, svh, svh, out, bits)
            torch.nn.functional.linear(X[:tokens], out)

        sides["dense"] = [lambda w=w: dense(w, svh, svh, out, bits) for w in PACKED[bits]]
        sides["dense layer"] = [lambda w=w: first(w) for w in PACKED[bits]]
    found = times(sides)
    base = found["cublas"]
    text = ", ".join(
        f"{name} {us:.1f}" + (f" ({base / us:.2f})" if "layer" in name else "") for name, us in found.items()
    )
    print(f"{tokens} tokens, {bits} bits: {text}", flush=True)


if __name__ == "__main__":
    print(torch.cuda.get_device_name(0), torch.__version__, torch.version.cuda, flush=True)
    torch.manual_seed(1)
    every = [(kind, tokens, tile) for kind in (HALF, INT8) for tokens, tile in
             ((17, 32), (32, 32), (50, 64), (100, 128), (300, 128), (256, 256), (700, 256))]  # fmt: skip
    every += [(DECODED, 256, 1), (DECODED, 900, 1), (HALF, 16, 16), (INT8, 11, 16), (INT16, 8, 16), (INT16, 16, 32)]
    every += [(INT16, 33, 64), (INT16, 150, 128)]
    large = [(kind, tokens, tile) for kind in (HALF, INT8) for tokens, tile in ((300, 256), (100, 128), (512, 256))]
    large += [(INT8, tokens, 512) for tokens in (256, 512, 1024, 1100)]
    large += [(HALF, 16, 16), (INT8, 16, 16), (INT16, 16, 32), (INT16, 5, 16)]
    large += [(DECODED, tokens, cluster) for cluster in (1, 2, 11, 12) for tokens in (256, 1100)]
    if "ONCE" in os.environ:  # for a profiler: "kind tokens tile", and others behind commas
        for case in os.environ["ONCE"].split(","):
            kind, tokens, tile = (int(number) for number in case.split())
            trellis, ones = random_trellis(N, N, BITS[0]), torch.ones(N, device="cuda").half()
            inputs, y = (
                Inputs(tokens, N, (HALF, INT8, DECODED)[kind]),
                torch.empty(tokens, N, device="cuda").bfloat16(),
            )
            inputs.make(torch.randn(tokens, N, device="cuda").bfloat16(), ones)
            inputs.product(repacked(trellis), ones, y, BITS[0], tile)
        torch.cuda.synchronize()
        sys.exit()
    good = True
    for bits in BITS:
        if len(sys.argv) > 2 and (real := of_file(sys.argv[2], bits)) is not None:
            good &= check(real, "real", every)
        good &= check(random_trellis(2048, 384, bits), "random", every)
        good &= check(
            random_trellis(4096, 512, bits),
            "random",
            [(INT8, 700, 512), (DECODED, 700, 2), (DECODED, 700, 11), *every[-2:]],
        )
        good &= check(random_trellis(N, N, bits), "random", large)
        print(f"{time.time() - BEGAN:.0f} s", flush=True)
    print("ALL RIGHT" if good else "SOMETHING IS WRONG", flush=True)
    X = torch.randn(4096, N, device="cuda").bfloat16()
    DENSE = [torch.randn(N, N, device="cuda").bfloat16() for _ in range(3)]
    PACKED = {b: [repacked(random_trellis(N, N, b)) for _ in range(8)] for b in BITS}
    for tokens in [int(t) for t in os.environ.get("TOKENS", "256,1024,4096,128,64,32,512,2048").split(",")]:
        for bits in BITS:
            if time.time() - BEGAN < BUDGET:
                bench(tokens, bits)
    print(f"{time.time() - BEGAN:.0f} s")
