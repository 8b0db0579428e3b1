"""Properties of plans, ``csrc/kernels/*/plan.h``, for every generation of GPUs, compiled for the CPU: all work is
done exactly once, shared memory holds it, and nobody is left without a plan."""

import ctypes
import itertools
import re
from typing import NamedTuple

import cases
import pytest
import torch

# What a plan is asked for by name, with the GPU and the numbers that follow; it answers by printing itself.
WRAPPER = """
#include "kernels/gradient/plan.h"
#include "kernels/few_tokens/experts_plan.h"
#include "kernels/hopper/experts_plan.h"
#include "kernels/inputs/plan.h"
#include "kernels/path.h"
#include "kernels/trellis/few_plan.h"
#include "kernels/trellis/many_plan.h"

using namespace hf_kbit;

static std::string answer(const std::string& of, const Gpu& gpu, const int64_t* n) {
    const WgmmaPlan wgmma{int(n[0]), 1, 1, int(n[1]), int(n[2]), 0, 0, 0};
    const auto number = [](double value) { return "value=" + std::to_string(value); };
    if (of == "path") return number(int(gemm_path(n[0], n[1], n[2], n[3], n[4], n[5], gpu)));
    if (of == "gemm") return to_string(plan_gemm(n[0], n + 5, n[4], n[1], n[2], n[3], gpu));
    if (of == "few_experts") return to_string(plan_few_experts(n[0], n[1], n[2], n[3], n[4], n[5], gpu));
    if (of == "expert_clusters") return number(expert_clusters(n[0], n[1], n[2], n[3], n[4], n[5]));
    if (of == "wgmma") {
        const WgmmaPlan plan = plan_wgmma(n[0], n + 5, n[4], n[1], n[2], n[3], gpu);
        return to_string(plan) + " sums=" + std::to_string(wgmma_partial_sums(plan));
    }
    if (of == "int8") {
        const WgmmaPlan plan = plan_int8(n[0], n + 4, n[3], n[1], n[2], gpu);
        return to_string(plan) + " sums=" + std::to_string(wgmma_partial_sums(plan));
    }
    if (of == "int8_fused") return number(int8_is_fused(n[0], n[1], n[2], gpu));
    if (of == "int8_tokens") return to_string(plan_int8_tokens(n[0], n[1], n[2], n[3], gpu));
    if (of == "int8_joined") return number(int8_is_joined(n[0], n[1], n[2]));
    if (of == "int8_rows_are_copied") return number(int8_rows_are_copied(n[0], n[1], n[2]));
    if (of == "division_begin") return number(divide_wgmma(wgmma, n[3]).begin(n[4]));
    if (of == "division_cta") return number(divide_wgmma(wgmma, n[3]).cta_with(n[4]));
    if (of == "ordered") return number(wgmma_ordered(n[0], n[1], n[2], n[3]));
    if (of == "experts") return to_string(plan_experts(n[0], n[1], n[2], n[3], n[4], n[5], gpu));
    if (of == "experts_int8") return to_string(plan_experts_int8(n[0], n[1], n[2], n[3], n[4], gpu));
    if (of == "experts_fused") return number(experts_are_fused(n[0], n[1], n[2], n[3], gpu));
    if (of == "most_token_tiles") return number(most_token_tiles(n[0], n[1], n[2]));
    if (of == "expected_token_tiles") return number(expected_token_tiles(n[0], n[1], n[2], n[3]));
    if (of == "gradient_fused") return number(gradient_is_fused(n[0], n[1], n[2], n[3], n[4], gpu));
    if (of == "gradient") {
        const GradientPlan plan = plan_gradient(n[0], n[1], n[2], gpu);
        return to_string(plan) + " sums=" + std::to_string(gradient_partial_sums(plan)) +
               " shared_bytes=" + std::to_string(gradient_shared_bytes(n[3]));
    }
    if (of == "few_trellis") {
        const FewTrellisPlan plan = plan_few_trellis(n[0], n[1], {n + 5, n + 5 + n[4]}, n[2], n[3], gpu);
        return to_string(plan) + " sums=" + std::to_string(few_trellis_sums(plan, n[3] / 2)) +
               " counts=" + std::to_string(few_trellis_counts(plan)) + " ctas_at_a_time=" +
               std::to_string(few_trellis_ctas(n[2], few_trellis_groups(n[3])) * gpu.processors);
    }
    if (of == "many_trellis") {
        const ManyTrellisPlan plan = plan_many_trellis(n[0], {n + 5, n + 5 + n[1]}, n[2], n[4], gpu);
        return to_string(plan) + " sums=" + std::to_string(many_trellis_sums(plan, n[2])) +
               " steps=" + std::to_string(many_trellis_steps(n[0], n[4])) +
               " groups=" + std::to_string(many_trellis_groups(plan.token_tile)) +
               " stages=" + std::to_string(many_trellis_stages(n[3], plan.token_tile, n[4])) +
               " shared_bytes=" + std::to_string(many_trellis_shared_bytes(n[3], plan.token_tile, n[4])) +
               " decoded=" + std::to_string(many_trellis_decoded(plan, n[0]));
    }
    if (of == "many_trellis_experts") {
        const ManyTrellisPlan plan = plan_many_trellis_experts(n[0], n[1], n[2], false, gpu);
        return to_string(plan) + " most_tiles=" + std::to_string(most_many_trellis_tiles(plan, n[2], n[1], n[3]));
    }
    const bool int8 = of == "mma_int8";
    if (!int8 && of != "mma") return "";
    const MmaPlan plan = int8 ? plan_mma_int8(n[0], n[1], n[2], gpu) : plan_mma(n[0], n[1], n[2], n[3], gpu);
    return to_string(plan) + " sums=" + std::to_string(int8 ? mma_int8_partial_words(plan) : mma_partial_sums(plan)) +
           " shared_bytes=" + std::to_string(mma_shared_bytes(plan.token_tile, int8 ? 1 : 2));
}
extern "C" void ask(const char* of, const int64_t* gpu, const int64_t* numbers, char* to) {
    const Gpu its{0, int(gpu[0]), int(gpu[1]), int(gpu[2]), int(gpu[3])};
    const std::string text = answer(of, its, numbers);
    text.copy(to, 1000);
    to[text.size()] = 0;
}
"""
DECODE, WGMMA, MMA, DEQUANTIZE = range(4)


class Gpu(NamedTuple):
    processors: int
    shared_limit: int
    reserved: int
    arch: int


H200 = Gpu(132, 227 << 10, 1024, 900)
GPUS = {
    "H200": H200,
    "a seventh of an H200": Gpu(16, 227 << 10, 1024, 900),
    "A100": Gpu(108, 163 << 10, 1024, 800),
    "4090": Gpu(128, 99 << 10, 1024, 890),
    "B200": Gpu(148, 227 << 10, 1024, 1000),
    "RTX PRO 6000": Gpu(188, 99 << 10, 1024, 1200),
    "one processor": Gpu(1, 99 << 10, 1024, 1200),
}
HOPPER = [GPUS["H200"], GPUS["a seventh of an H200"]]
LLAMA = [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (57344, 8192), (8192, 28672)]
SHAPES = [*LLAMA, (1, 1), (35, 1000), (256000, 2048), (16, 131072), (3072, 8192), (2176, 4096)]
MANY = (17, 33, 64, 100, 128, 200, 256, 300, 1000, 1024, 4096, 100_000)
# Rows of parts of one launch: q, k and v, gate and up, of very different size.
PARTS = [(4096, 1024, 1024), (14336, 14336), (16, 200_000, 3000, 16), (256_000, 1), (1,) * 4]
WEIGHTS = [((n,), k) for n, k in SHAPES] + [(rows, k) for rows in PARTS for k in (1000, 4096, 14336)]
# Experts, how many of them a token has, and their weights: Qwen3-30B-A3B, Mixtral-8x7B, odd ones.
EXPERTS = [
    (128, 8, (1536, 2048)),
    (8, 2, (28672, 4096)),
    (8, 2, (4096, 14336)),
    (1, 1, (35, 1000)),
    (1024, 3, (100, 328)),
]


class Fields(dict):
    __getattr__ = dict.__getitem__


def fields_of(text):
    fields = re.findall(r"(\w+)=(-?[\d.]+)", text)
    return Fields({name: float(value) if "." in value else int(value) for name, value in fields})


@pytest.fixture(scope="module")
def ask(compile_for_cpu):
    library = compile_for_cpu(WRAPPER)

    def call(of, gpu, *numbers):
        text = ctypes.create_string_buffer(1001)
        of_gpu, of_call = ((ctypes.c_int64 * 16)(*map(int, values)) for values in (gpu, numbers))
        library.ask(of.encode(), of_gpu, of_call, text)
        found = fields_of(text.value.decode())
        return found if list(found) != ["value"] else found.value

    return call


@pytest.fixture(params=GPUS.values(), ids=GPUS)
def gpu(request):
    return request.param


def ceil_div(a, b):
    return -(-a // b)


def sizes(shape):
    return ceil_div(shape[0], 16), ceil_div(shape[1], 256)  # row tiles, slabs


# --- which kernel ---------------------------------------------------------------------------------


def test_each_number_of_tokens_has_a_kernel_that_the_gpu_runs(ask, gpu):
    """In one order as tokens become more; the one for many alone where products are batch-invariant."""
    many = WGMMA if gpu.arch == 900 else MMA
    for shape, bits, transformed in itertools.product(SHAPES, cases.BITS, (False, True)):
        told = shape, bits, transformed
        paths = [ask("path", gpu, n, *shape, bits, transformed, False) for n in (1, 8, 11, 12, 13, 15, 16, *MANY)]
        assert [path for path, _ in itertools.groupby(paths)] == [DECODE, many, DEQUANTIZE], told
        assert {ask("path", gpu, n, *shape, bits, transformed, True) for n in (1, 16, *MANY)} == {many}, told
        assert ask("path", gpu, 0, *shape, bits, transformed, False) == DEQUANTIZE, told


def test_no_fused_kernel_where_it_would_not_run(ask, gpu):
    """Before sm_80; where the driver keeps more shared memory than kernels leave it; beyond indices of 32 bits."""
    sizes = {(2**27, 256): True, (2**24, 2**18): True, (16, 2**27): True, (2**27 + 1, 256): False}
    sizes |= {(16, 2**27 + 1): False, (2**24, 2**18 + 1): False, (2**62, 2**62): False}
    worse = gpu._replace(reserved=1025), gpu._replace(arch=750)
    for tokens, (shape, fits) in itertools.product((1, 17), sizes.items()):
        for its, runs in [(gpu, fits), *((other, False) for other in worse)]:
            told = tokens, shape, its
            assert (ask("path", its, tokens, *shape, 4, False, False) != DEQUANTIZE) == runs, told
            assert ask("few_experts", its, 1, 8, *shape, 4, False).warps > 0 or not runs or shape[1] > 2**14, told
            assert not (ask("few_experts", its, 1, 8, *shape, 4, False).warps and not runs), told
            hopper = runs and its.arch == 900
            assert ask("gradient_fused", its, tokens, *shape, 4, False) == hopper, told
            assert ask("experts_fused", its, tokens, 8, *shape) == hopper, told
    assert not ask("experts_fused", gpu, 8, 1025, 35, 1000)
    if gpu.arch == 900:  # 2**30 tiles at most, were every expert to have all rows
        assert ask("experts_fused", gpu, 2**19, 1024, 2048, 256)
        assert not ask("experts_fused", gpu, 2**19 + 1, 1024, 2048, 256)


# Measured on one H200 with CUDA 13.0, 2026-11-21 to 2026-11-23 (paths of few features: an H100, 2026-11-26). Paths:
# tokens, N, K, bits, transformed, batch-invariant; 0 few_tokens, 1 hopper, 3 decoded first.
MEASURED = """
path 16 4096 4096 4 1 0: value=0
path 12 4096 14336 2 0 0: value=0
path 13 4096 14336 2 0 0: value=1
path 12 4096 14336 5 1 0: value=1
path 15 4096 14336 3 0 0: value=0
path 16 4096 14336 3 0 0: value=1
path 12 4096 14336 4 1 0: value=0
path 13 4096 14336 4 1 0: value=1
path 4095 4096 4096 4 0 0: value=1
path 4096 4096 4096 4 0 0: value=3
path 8191 4096 14336 4 0 0: value=1
path 8192 4096 14336 4 0 0: value=3
path 1023 1536 4096 4 1 0: value=1
path 1024 1536 4096 4 1 0: value=3
path 1024 1537 4096 4 1 0: value=1
path 1024 1536 4096 4 0 0: value=1
gradient_fused 2048 8192 8192 2 0: value=1
gradient_fused 1024 8192 8192 3 0: value=1
gradient_fused 2048 8192 8192 3 0: value=0
gradient_fused 2048 8192 8192 3 1: value=1
gradient_fused 1024 8192 8192 5 0: value=0
gradient_fused 1024 4096 14336 4 0: value=0
gemm 1 4096 4 0 1 256: k_warps=16 split=1 clusters0=132
gemm 8 8192 2 0 1 3584: k_warps=4 split=1
gemm 1 8192 4 0 1 192: split=2
gemm 1 14336 4 1 1 256: transforms=1
gemm 1 28672 4 1 1 512: transforms=0
wgmma 32 8192 4 0 1 8192: token_tile=32 groups=4 split=1
wgmma 64 8192 4 0 1 8192: token_tile=64 groups=2 split=2
wgmma 128 4096 4 0 1 28672: token_tile=128 groups=1 split=1
wgmma 128 8192 2 0 1 8192: token_tile=128 groups=2 split=2
wgmma 256 8192 5 0 1 8192: token_tile=256 groups=1 split=2
wgmma 1024 8192 4 0 1 57344: token_tile=256 groups=1 split=1
experts 1024 128 1536 2048 4 0: token_tile=16 groups=1
experts 16384 128 1536 2048 4 0: token_tile=128 groups=1
experts 128 8 28672 4096 4 0: token_tile=32 groups=1
few_experts 64 128 1536 2048 4 0: rows=1
few_experts 128 128 1536 2048 4 0: rows=8
few_experts 1024 128 1536 2048 4 0: rows=0
few_experts 2 8 28672 4096 4 0: rows=1
few_experts 8 8 28672 4096 4 0: rows=8
gradient 128 4096 4096: parts=4
gradient 512 4096 4096: parts=2
gradient 256 4096 14336: parts=1
mma 32 8192 8192 0: token_tile=32 split=4
mma 256 8192 8192 0: token_tile=64 split=1
mma 128 4096 14336 0: token_tile=64 split=4
"""


@pytest.mark.parametrize("line", MEASURED.strip().splitlines())
def test_the_fastest_on_an_h200(ask, line):
    (name, *numbers), expected = line.partition(":")[0].split(), fields_of(line)
    found = ask(name, H200, *map(int, numbers))
    assert {name: found[name] if isinstance(found, dict) else found for name in expected} == expected


# --- up to 16 tokens ------------------------------------------------------------------------------


def shared_of_few(bits, warps, plan, tokens, columns):
    """Counted from few_tokens/gemm.cu: a table that bytes (5 bits: pairs) of codes index, a slab and a barrier for
    each warp at least, sums; 16-bit activations that a CTA transforms."""
    table = 256 * 256 if bits < 5 else 1024 * 4 * (32 if warps == 16 else 16)
    sums = plan.k_warps * plan.tiles * 16 * tokens * 4
    return 1024 + table + warps * (16 * 32 * bits + 16 * 8 + 8) + 4 + sums + 2 * columns * plan.transforms


@pytest.mark.parametrize("rows", [*{shape[:1] for shape in SHAPES}, *PARTS], ids=str)
def test_few_tokens(ask, gpu, rows):
    """Each part's row tiles are divided evenly, the largest share has room, no warp is without a slab of its own."""
    columns = (1, 1000, 4096, 14336, 131072) if len(rows) > 1 else {k for n, k in SHAPES if n == rows[0]}
    for k, bits, tokens, transformed in itertools.product(columns, cases.BITS, (1, 2, 5, 8, 9, 16), (False, True)):
        tiles, slabs = [ceil_div(part, 16) for part in rows], ceil_div(k, 256)
        plan = ask("gemm", gpu, tokens, k, bits, transformed, len(rows), *tiles)
        told = f"{tokens} tokens, {rows}, {k}, {bits} bits: {plan}"
        clusters, unused = [plan[f"clusters{i}"] for i in range(len(rows))], range(len(rows), 4)
        assert plan.warps == (16 if gpu.arch == 900 else 8) and plan.k_warps in (1, 2, 4, 8, plan.warps), told
        assert plan.split == 1 or (plan.split == 2 and gpu.arch >= 900), told
        of_cta = ceil_div(slabs, plan.split)
        assert plan.k_warps <= of_cta, told
        assert all(1 <= n <= part for n, part in zip(clusters, tiles, strict=True)), told
        assert not any(plan[f"clusters{i}"] for i in unused), told
        assert max(map(ceil_div, tiles, clusters)) == plan.tiles, told
        # As few clusters as have such shares, or whole waves of them: nobody's share could be smaller.
        waves = sum(clusters) / (gpu.processors // plan.split)
        assert sum(clusters) in (sum(tiles), len(rows)) or waves == int(waves), told
        assert plan.tiles == 1 or sum(ceil_div(part, plan.tiles - 1) for part in tiles) > sum(clusters), told
        assert shared_of_few(bits, plan.warps, plan, tokens, of_cta * 256) <= plan.shared_bytes, told
        assert plan.shared_bytes <= gpu.shared_limit and plan.shared_bytes % 16 == 0, told
        assert not plan.transforms or (transformed and tokens == 1 and of_cta * 256 <= 4 * 8 * 32 * plan.warps), told


def test_few_tokens_keep_an_h200_busy(ask):
    """The slowest CTA decides: 256 row tiles on 132 processors are 1.03 times the mean at best."""
    for shape, bits in itertools.product(LLAMA, cases.BITS):
        tiles, slabs = sizes(shape)
        plan = ask("gemm", H200, 1, shape[1], bits, False, 1, tiles)
        assert plan.tiles * ceil_div(slabs, plan.split) <= 1.06 * tiles * slabs / 132, (shape, plan)


def test_no_plan_where_not_even_one_row_tile_fits(ask):
    assert ask("gemm", Gpu(40, 48 << 10, 0, 800), 1, 4096, 4, False, 1, 256).warps == 0


# --- more tokens ----------------------------------------------------------------------------------


def rows_of_group(plan):
    return (8 if plan.token_tile == 256 else 16) * 16 // plan.groups


def shared_of_wgmma(bits, plan):
    """Counted from hopper/gemm_wgmma.cuh: table; x, slabs, two barriers for each; what groups send each other."""
    warps, parties = rows_of_group(plan) * plan.groups // 16, plan.groups * plan.split
    x = plan.groups * plan.x_stages * (plan.token_tile * (128 if plan.token_tile <= 32 else 64) * 2 + 16)
    weights = warps * plan.ring_stages * (16 * 32 * bits + 16 * 8 + 16)
    owned = ceil_div(plan.token_tile, min(parties, plan.token_tile // 8))
    return 1024 + 65536, x + weights, plan.groups * (parties - 1) * owned * rows_of_group(plan) * 4


def wgmma_tiles(plan, tokens, rows):
    return sum(ceil_div(part, rows_of_group(plan)) for part in rows) * ceil_div(tokens, plan.token_tile)


@pytest.mark.parametrize("gpu", HOPPER, ids=["H200", "a seventh"])
@pytest.mark.parametrize("invariant", [False, True])
def test_wgmma(ask, gpu, invariant):
    divided = 0
    for tokens, (rows, columns), bits in itertools.product(MANY, WEIGHTS, cases.BITS):
        plan, slabs = ask("wgmma", gpu, tokens, columns, bits, invariant, len(rows), *rows), ceil_div(columns, 256)
        told = f"{tokens} tokens, {rows}, {columns}, {bits} bits: {plan}"
        assert plan.token_tile in (16, 32, 64, 128, 256) and plan.groups in (1, 2, 4) and plan.split in (1, 2), told
        assert plan.groups * plan.split <= slabs and (plan.groups == 1 or plan.token_tile < 256), told
        tiles = wgmma_tiles(plan, tokens, rows)
        table, stages, sent = shared_of_wgmma(bits, plan)
        assert plan.shared_bytes == table + max(stages, sent) <= gpu.shared_limit, told
        assert plan.x_stages >= 2 and plan.ring_stages >= 1, told
        if invariant:  # through K in one order
            assert (plan.groups, plan.split, plan.divided) == (1, 1, 0), told
            assert all(ask("ordered", gpu, bits, plan.token_tile, transformed, True) for transformed in (0, 1)), told
        if not plan.divided:
            assert plan.clusters == min(tiles, gpu.processors // plan.split) and plan.sums == 0, told
            assert plan.groups * plan.split == 1 or plan.clusters == tiles, told
            continue
        divided += 1
        assert plan.groups == plan.split == 1 and plan.clusters == min(gpu.processors, tiles * slabs), told
        assert plan.divided < plan.clusters and (tiles - plan.divided) % plan.clusters == 0, told
        assert plan.sums == plan.clusters * rows_of_group(plan) * plan.token_tile <= 18 << 18, told
    assert bool(divided) != invariant


@pytest.mark.parametrize("gpu", HOPPER, ids=["H200", "a seventh"])
def test_int8(ask, gpu):
    """Plans as those of 16-bit inputs: stages have as many bytes."""
    for tokens, (rows, columns), bits in itertools.product((1, 16, *MANY), WEIGHTS, cases.BITS):
        plan, slabs = ask("int8", gpu, tokens, columns, bits, len(rows), *rows), ceil_div(columns, 256)
        told = f"{tokens} tokens, {rows}, {columns}, {bits} bits: {plan}"
        assert plan.groups * plan.split <= slabs and (plan.groups == 1 or plan.token_tile < 256), told
        tiles = wgmma_tiles(plan, tokens, rows)
        table, stages, sent = shared_of_wgmma(bits, plan)
        assert plan.shared_bytes == table + max(stages, sent) <= gpu.shared_limit, told
        assert plan.x_stages >= 2 and plan.ring_stages >= 1, told
        if plan.divided:
            assert plan.groups == plan.split == 1 and plan.clusters == min(gpu.processors, tiles * slabs), told
            assert plan.divided < plan.clusters and (tiles - plan.divided) % plan.clusters == 0, told
        else:
            assert plan.clusters == min(tiles, gpu.processors // plan.split) and plan.sums == 0, told
            assert plan.groups * plan.split == 1 or plan.clusters == tiles, told


def test_where_8_bit_inputs_are_fused(ask, gpu):
    for tokens, shape in itertools.product((1, 17, 100_000), SHAPES):
        assert ask("int8_fused", gpu, tokens, *shape) == (gpu.arch >= 800), (tokens, shape)
    assert not ask("int8_fused", gpu, 0, 4096, 4096)
    assert not ask("int8_fused", gpu, 17, 2**27 + 1, 256)
    assert not ask("int8_fused", gpu, 2**31 - 1, 4096, 4096)
    assert not ask("int8_fused", gpu, 2**27, 64 * 33, 4096)  # four of which 32 bits do not count
    assert not ask("int8_fused", gpu._replace(reserved=1025), 17, 4096, 4096)


def test_int8_tokens(ask, gpu):
    """Groups are as wide as rows, and what a processor has room for is at work."""
    widths = (8, 768, 1024, 1032, 2048, 4104, 5120, 8192, 11008, 14336, 16384, 28672, 32768, 32776, 133_120)
    for tokens, width, swiglu, count in itertools.product((1, 17, 300, 100_000), widths, (0, 1), (1, 3, 4)):
        plan = ask("int8_tokens", gpu, tokens, width, swiglu, count)
        told = f"{tokens} tokens of {width}, {swiglu}, {count} weights: {plan}"
        warps = ceil_div(width, 1024)
        row = 4096 * warps + 2048 * (1 + swiglu) * warps + 256  # scales and x
        assert (plan.groups > 0) == (warps <= 32 and row <= gpu.shared_limit), told
        if plan.groups == 0:
            continue
        assert plan.threads in (256, 512, 1024) and plan.group_warps == warps, told
        assert plan.groups * warps <= plan.threads // 32 and (warps == 1 or plan.groups <= 16), told
        assert plan.shared_bytes == row + (plan.groups - 1) * 2048 * (1 + swiglu) * warps <= gpu.shared_limit, told
        assert plan.resident * plan.threads <= 1024, told
        assert plan.resident * (plan.shared_bytes + gpu.reserved) <= gpu.shared_limit + gpu.reserved, told
        assert plan.ctas == min(tokens, max(1, gpu.processors * plan.resident // count)), told
        if gpu.shared_limit == 227 << 10:  # bytes under way
            least = 40 << 10 if width >= 2048 else 0
            assert plan.resident * plan.groups * width * 2 * (1 + swiglu) >= least, told


def test_rows_of_experts_are_copied_where_they_pick_tokens_often(ask):
    for rows, tokens, swiglu, copied in (
        (300, 100, 0, False),
        (301, 100, 0, True),
        (166, 100, 1, False),
        (167, 100, 1, True),
        (5, 100, 0, False),
    ):
        assert ask("int8_rows_are_copied", H200, rows, tokens, swiglu) == copied


def test_large_weights_of_many_tokens_have_a_launch_of_their_own(ask):
    for tokens, rows, columns, joined in ((128, 14336, 4096, 1), (129, 14336, 4096, 0), (4096, 8960, 1536, 1)):
        assert ask("int8_joined", H200, tokens, rows, columns) == joined


@pytest.mark.parametrize(
    ("clusters", "divided", "slabs"), [(132, 7, 32), (132, 131, 4), (16, 3, 5), (5, 1, 56), (132, 1, 132)]
)
def test_every_slab_of_divided_tiles_is_one_ctas(ask, clusters, divided, slabs):
    """Evenly, and of two tiles at most, of which a CTA leaves at most one to another."""
    plan = (256, clusters, divided, slabs)
    begins = [ask("division_begin", H200, *plan, cta) for cta in range(clusters + 1)]
    shares = [int(end - begin) for begin, end in itertools.pairwise(begins)]
    assert (begins[0], begins[-1]) == (0, divided * slabs) and max(shares) - min(shares) <= 1
    assert max(shares) <= slabs
    owners = [ask("division_cta", H200, *plan, slab) for slab in range(divided * slabs)]
    assert owners == [cta for cta, share in enumerate(shares) for _ in range(share)]


def test_wgmma_tiles_fill_an_h200(ask):
    """What a processor does without a tile, or with tokens that are not there, counts as nothing done."""
    for (tokens, least), shape in itertools.product([(32, 0.7), (64, 0.7), (256, 0.7), (4096, 0.9)], LLAMA):
        plan, slabs = ask("wgmma", H200, tokens, shape[1], 4, False, 1, shape[0]), sizes(shape)[1]
        tiles = wgmma_tiles(plan, tokens, shape[:1])
        rounds = ceil_div(tiles - plan.divided, plan.clusters) / plan.split
        rounds += ceil_div(plan.divided * slabs, plan.clusters) / slabs
        assert shape[0] * tokens >= least * rounds * 132 * rows_of_group(plan) * plan.token_tile, (tokens, shape, plan)


def test_several_weights_are_planned_as_one(ask):
    """Of whole row tiles: q, k and v have the plan of one weight with the rows of all."""
    for tokens, bits, rows in itertools.product(MANY, cases.BITS, PARTS[:2]):
        for how in (("wgmma", H200, tokens, 4096, bits, False), ("int8", H200, tokens, 4096, bits)):
            found, one = (ask(*how, len(n), *n) for n in (rows, (sum(rows),)))
            assert found == one, (how, rows)


def test_mma(ask, gpu):
    for tokens, shape, invariant in itertools.product((17, 32, 33, 100, 256), SHAPES, (False, True)):
        plan = ask("mma", gpu, tokens, *shape, invariant)
        told = f"{tokens} tokens, {shape}: {plan}"
        assert plan.token_tile in (32, 64), told
        assert plan.tiles == ceil_div(shape[0], 256) * ceil_div(tokens, plan.token_tile), told
        assert 1 <= plan.split <= (1 if invariant else sizes(shape)[1]), told
        assert plan.split == 1 or plan.tiles * plan.split <= gpu.processors, told
        assert plan.sums == (plan.split > 1) * plan.tiles * plan.split * 256 * plan.token_tile <= 16 << 20, told
        assert plan.shared_bytes == 1024 + 65536 + 4 * 64 * plan.token_tile * 2 <= gpu.shared_limit, told


def test_mma_int8(ask, gpu):
    """Tiles of up to 96 tokens, or 64, of a byte for each column; parts have a word for their unit."""
    for tokens, shape in itertools.product((1, 16, *MANY), SHAPES):
        plan = ask("mma_int8", gpu, tokens, *shape)
        told = f"{tokens} tokens, {shape}: {plan}"
        assert plan.token_tile in ((32, 64, 96) if gpu.arch < 1000 else (32, 64)), told
        assert plan.tiles == ceil_div(shape[0], 256) * ceil_div(tokens, plan.token_tile), told
        assert 1 <= plan.split <= sizes(shape)[1], told
        assert plan.split == 1 or plan.tiles * plan.split <= gpu.processors, told
        assert plan.sums == (plan.split > 1) * (plan.tiles * plan.split * 256 * plan.token_tile + 1), told
        assert plan.shared_bytes == 1024 + 65536 + 4 * 64 * plan.token_tile <= gpu.shared_limit, told


@pytest.mark.parametrize("gpu", HOPPER, ids=["H200", "a seventh"])
def test_gradient(ask, gpu):
    """Every row tile is one part's, four to a piece, and no part is empty; parts of divided tiles run at a time."""
    for tokens, shape, bits in itertools.product((1, 200, 256, 257, 1000, 2048), SHAPES, cases.BITS):
        plan, tiles = ask("gradient", gpu, tokens, *shape, bits), sizes(shape)[0]
        told = f"{tokens} tokens, {shape}: {plan}"
        assert plan.tiles == ceil_div(tokens, 256) * ceil_div(shape[1], 128) and plan.pieces % 2 == 0, told
        assert 4 * plan.pieces * (plan.parts - 1) < tiles <= 4 * plan.pieces * plan.parts, told
        assert plan.parts == 1 or plan.tiles * plan.parts <= gpu.processors, told
        assert plan.sums == (plan.parts > 1) * plan.tiles * plan.parts * 256 * 128, told
        # Counted from gradient_wgmma.cu: table; x, words in runs of 512 bytes, scales, barriers; what warps exchange.
        stage = 256 * 64 * 2 + 4 * 512 * ceil_div(bits, 2) + 4 * 64 + 4 * 8
        exchanged = 8 * 256 * (2 if bits == 5 else 4)
        assert plan.shared_bytes == 1024 + 65536 + 4 * stage + exchanged <= gpu.shared_limit, told


# --- experts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", HOPPER, ids=["H200", "a seventh"])
@pytest.mark.parametrize(("name", "invariant"), [("experts", False), ("experts", True), ("experts_int8", False)])
def test_experts(ask, gpu, name, invariant):
    """Groups never have fewer slabs than one each, or one would not come to where they meet."""
    for (experts, each, shape), tokens, bits in itertools.product(EXPERTS, (1, 5, 100, 2048, 100_000), cases.BITS):
        plan = ask(name, gpu, tokens * each, experts, *shape, bits, invariant)
        told = f"{tokens} tokens, {experts} experts, {shape}, {bits} bits: {plan}"
        assert plan.groups in ((1,) if invariant else (1, 2, 4)) and plan.groups <= sizes(shape)[1], told
        assert (plan.split, plan.divided) == (1, 0) and (plan.groups == 1 or plan.token_tile < 256), told
        most = ask("most_token_tiles", gpu, tokens * each, experts, plan.token_tile)
        assert plan.clusters == min(gpu.processors, most * ceil_div(shape[0], rows_of_group(plan))), told
        of_experts = ceil_div((experts + 1) * 8, 16) * 16
        assert plan.shared_bytes == sum(shared_of_wgmma(bits, plan)) + of_experts <= gpu.shared_limit, told
        assert plan.x_stages >= 2 and plan.ring_stages >= 1, told


def test_few_rows_of_experts(ask, gpu):
    """However many parts there turn out to be, there are CTAs for all of them, with room for their sums."""
    few = [(1, 8), (8, 128), (32, 8), (72, 128), (128, 128), (1000, 1024)]
    for (rows, experts), (_, _, shape), bits in itertools.product(few, EXPERTS, cases.BITS):
        plan, (tiles, slabs) = ask("few_experts", gpu, rows, experts, *shape, bits, False), sizes(shape)
        told = f"{rows} rows, {experts} experts, {shape}, {bits} bits: {plan}"
        if plan.warps == 0:  # more rows than are few, or more columns than the threads of a CTA transform
            assert (gpu.arch == 900 and rows >= 8 * experts) or (plan.rows == 1 and slabs > 4 * 8), told
            continue
        assert plan.rows == (1 if plan.transforms else 8) and plan.shared_bytes <= gpu.shared_limit, told
        assert plan.least_clusters >= ceil_div(tiles, plan.tiles), told
        most = rows if plan.rows == 1 else int(ask("most_token_tiles", gpu, rows, experts, 8))
        assert most * plan.least_clusters <= plan.all_clusters, told
        for parts in {*range(1, min(most, 40)), *range(40, most, 7), most} if plan.rows == 8 else ():
            numbers = tiles, slabs, gpu.processors // plan.split, plan.least_clusters, plan.waves
            clusters = ask("expert_clusters", gpu, parts, *numbers)
            assert plan.least_clusters <= clusters <= max(tiles, plan.least_clusters), (told, parts)
            assert parts * clusters <= plan.all_clusters, (told, parts)
    assert ask("few_experts", gpu, 1, 8, 4096, 4096, 4, True).warps == 0  # batch-invariant
    # 72 parts, which would leave 60 processors idle, have a third of two turns each.
    assert [ask("expert_clusters", gpu, parts, 96, 8, 132, 1, 8) for parts in (1, 8, 72)] == [96, 16, 3]


def test_most_tiles_of_tokens(ask):
    """Of all ways to divide few rows among experts."""
    for rows, experts, token_tile in itertools.product((1, 2, 5, 9), (1, 2, 4), (1, 2, 4)):
        ways = (way for way in itertools.product(range(rows + 1), repeat=experts) if sum(way) == rows)
        most = max(sum(ceil_div(its_rows, token_tile) for its_rows in way) for way in ways)
        assert ask("most_token_tiles", H200, rows, experts, token_tile) == most, (rows, experts, token_tile)


@pytest.mark.parametrize(("rows", "experts"), [(8, 128), (512, 128), (2048, 128), (40, 8), (3000, 8)])
@pytest.mark.parametrize(("token_tile", "beyond"), [(16, 0), (64, 0), (256, 0), (128, 32), (128, 96)])
def test_tiles_of_tokens_in_the_mean(ask, rows, experts, token_tile, beyond):
    """Near what comes out of rows that have experts at random; those with more than so many rows too."""
    owners = torch.randint(0, experts, (200, rows), generator=cases.generator(rows, experts))
    shares = torch.nn.functional.one_hot(owners, experts).sum(1)
    tiles = shares.sub(beyond).clamp(min=0).add(token_tile - 1).div(token_tile, rounding_mode="floor")
    mean = tiles.sum(1).double().mean().item()
    found = ask("expected_token_tiles", H200, rows, experts, token_tile, beyond)
    assert abs(found - mean) < 0.1 * mean + 0.001 * experts


@pytest.mark.parametrize("shape", SHAPES)
def test_few_tokens_by_a_trellis(ask, gpu, shape):
    """CTAs divide K, none is without a step, nor more at work at a time than a rounded number of each owner's."""
    down, across = (ceil_div(size, 128) * 8 for size in shape)
    steps, owners = ceil_div(across, 4), ceil_div(down, 4)
    for (rows, tokens), bits in itertools.product(
        [(1, tokens) for tokens in (1, 4, 5, 8, 9, 16)] + [(8, 1), (500, 1)], range(1, 9)
    ):
        plan = ask("few_trellis", gpu, rows, across, bits, 2 * tokens, 1, down)
        assert (plan.split - 1) * plan.steps_of_split < steps <= plan.split * plan.steps_of_split
        assert plan.ctas == plan.split * owners
        assert plan.split == 1 or rows * plan.ctas <= 1.5 * plan.ctas_at_a_time
        assert plan.shared_bytes <= gpu.shared_limit
        assert (plan.sums, plan.counts) == (plan.split * 2 * tokens * 16 * down, ceil_div(down, 8))


def test_several_trellises_are_planned_as_one(ask):
    """Each has whole blocks of 128 rows, but the last one what it needs."""
    for bits, tokens in itertools.product((2, 8), (1, 16)):
        several = ask("few_trellis", H200, 1, 512, bits, 2 * tokens, 3, 13, 1, 10)
        assert several == ask("few_trellis", H200, 1, 512, bits, 2 * tokens, 1, 16 + 8 + 10)


@pytest.mark.parametrize("gpu", HOPPER)
@pytest.mark.parametrize("shape", SHAPES)
def test_many_tokens_by_a_trellis(ask, gpu, shape):
    """Tiles cover all rows and tokens, and no group of a part of K is without a step."""
    down, across = (ceil_div(size, 128) * 8 for size in shape)
    for tokens, bits, int8 in itertools.product(MANY, range(1, 9), (False, True)):
        if tokens > 1024 and not int8:
            continue
        plan = ask("many_trellis", gpu, across, 1, tokens, bits, int8, down)
        assert plan.row_tiles == down // 8
        assert (plan.token_tiles - 1) * plan.token_tile < tokens <= plan.token_tiles * plan.token_tile
        assert plan.ctas == min(gpu.processors, plan.row_tiles * plan.token_tiles * plan.split)
        if plan.decodes:
            assert int8 and plan.split == 1 and plan.token_tile == 256 and plan.sums == 0
            assert plan.decoded == down * across * 256
            continue
        assert plan.split == 1 or plan.steps // plan.split >= plan.groups
        assert plan.sums == plan.split * tokens * plan.row_tiles * 128 and plan.decoded == 0
        # Of 128 tokens a stage is free as soon as it has been multiplied.
        assert plan.stages >= (2 if int8 and plan.token_tile == 128 else 3) and plan.shared_bytes <= gpu.shared_limit


def test_several_trellises_of_many_tokens_are_planned_as_one(ask):
    """Each has whole tiles of 128 rows."""
    for tokens, int8 in itertools.product((17, 200, 1024), (False, True)):
        several = ask("many_trellis", H200, 512, 3, tokens, 4, int8, 13, 1, 10)
        assert several == ask("many_trellis", H200, 512, 1, tokens, 4, int8, 16 + 8 + 16)


def test_large_trellises_are_decoded_once_for_very_many_tokens_of_8_bits(ask):
    decodes = [ask("many_trellis", H200, 512, 1, tokens, 4, True, 512).decodes for tokens in (256, 512, 2048, 8192)]
    assert decodes == [0, 0, 1, 1]


@pytest.mark.parametrize("weights", [1, 2])
@pytest.mark.parametrize(("rows", "experts"), [(1, 128), (70, 128), (700, 128), (5000, 128), (3, 8), (40_000, 8)])
def test_rows_of_experts_by_a_trellis(ask, rows, experts, weights):
    """There is room for all tiles, and one holds more than an expert has in the mean, up to the largest."""
    plan = ask("many_trellis_experts", H200, 96, rows, experts, weights)
    assert plan.token_tile == 256 or 1.5 * rows <= plan.token_tile * experts
    assert plan.token_tile == 32 or plan.token_tile / 2 * experts < 1.5 * rows
    owners = torch.randint(0, experts, (50, rows), generator=cases.generator(rows, experts))
    shares = torch.nn.functional.one_hot(owners, experts).sum(1)
    tiles = shares.add(plan.token_tile - 1).div(plan.token_tile, rounding_mode="floor").sum(1) * weights
    assert tiles.max() <= plan.most_tiles
