"""Which CUDA gemm runs and how it divides its work: ``csrc/kernels/gemm_plan.h``, compiled for the CPU."""

import ctypes
import itertools
import time
from typing import NamedTuple

import cases
import pytest
import torch

TILE_ROWS, SLAB_COLUMNS = 16, 256
MOST_PARTS = 4
TOKENS = range(1, 17)
LLAMA = [
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
    (8192, 8192),
    (10240, 8192),
    (57344, 8192),
    (8192, 28672),
]
SHAPES = [*LLAMA, (1, 1), (16, 256), (35, 1000), (256000, 2048), (16, 131072), (3072, 8192), (2176, 4096)]


class Gpu(NamedTuple):
    processors: int
    shared_limit: int
    arch: int


H200 = Gpu(132, 232448, 900)
GPUS = {
    "H200": H200,
    "A100": Gpu(108, 166912, 800),
    "4090": Gpu(128, 101376, 890),
    "one processor": Gpu(1, 101376, 1200),
    "B200": Gpu(148, 232448, 1000),
    "RTX PRO 6000": Gpu(188, 101376, 1200),
    "a seventh of an H200": Gpu(16, 232448, 900),
}


class Plan(ctypes.Structure):
    """``GemmPlan``, in its order; the wrapper refuses to compile when the header's has other fields."""

    _fields_ = [(name, ctypes.c_int) for name in ("warps", "k_warps", "split", "tiles")]
    _fields_ += [("of_parts", ctypes.c_int * MOST_PARTS)]
    _fields_ += [(name, ctypes.c_int) for name in ("shared_bytes", "transforms")]

    @property
    def clusters(self) -> int:
        return sum(self.of_parts)

    def values(self) -> dict:
        values = {name: getattr(self, name) for name, _ in self._fields_}
        return values | {"of_parts": [*self.of_parts], "clusters": self.clusters}


class WgmmaPlan(ctypes.Structure):
    """``WgmmaPlan``, likewise."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in ("token_tile", "groups", "split", "clusters", "divided", "x_stages", "ring_stages", "shared_bytes")
    ]

    def values(self) -> dict:
        return {name: getattr(self, name) for name, _ in self._fields_}


class GradientPlan(ctypes.Structure):
    """``GradientPlan``, likewise."""

    _fields_ = [(name, ctypes.c_int) for name in ("tiles", "parts", "pieces")]

    def values(self) -> dict:
        return {name: getattr(self, name) for name, _ in self._fields_}


class MmaPlan(ctypes.Structure):
    """``MmaPlan``, likewise."""

    _fields_ = [(name, ctypes.c_int) for name in ("token_tile", "tiles", "split")]

    def values(self) -> dict:
        return {name: getattr(self, name) for name, _ in self._fields_}


WRAPPER = """
#include "kernels/gemm_plan.h"

static void write(const hf_kbit::GemmPlan& plan, int* to) {
    static_assert(sizeof(hf_kbit::GemmPlan) == 10 * sizeof(int) && hf_kbit::kGemmParts == 4, "as Plan has it");
    to[0] = plan.warps, to[1] = plan.k_warps, to[2] = plan.split, to[3] = plan.tiles;
    for (int i = 0; i < hf_kbit::kGemmParts; ++i) to[4 + i] = plan.clusters[i];
    to[8] = plan.shared_bytes, to[9] = plan.transforms;
}
extern "C" void plan(int tokens, const int64_t* row_tiles, int parts, int64_t in_features, int bits, int transformed,
                     int processors, int shared_limit, int arch, int* to) {
    write(hf_kbit::plan_gemm(tokens, row_tiles, parts, in_features, bits, transformed, processors, shared_limit, arch),
          to);
}
extern "C" void few_experts_plan(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features, int bits,
                                 int batch_invariant, int processors, int shared_limit, int arch, int shared_reserved,
                                 int* to) {
    const auto plan = hf_kbit::plan_few_experts(rows, experts, out_features, in_features, bits, batch_invariant,
                                                processors, shared_limit, arch, shared_reserved);
    write(plan.gemm, to);
    to[10] = plan.rows, to[11] = plan.least_clusters, to[12] = plan.waves, to[13] = plan.clusters;
}
extern "C" int expert_clusters(int parts, int row_tiles, int slabs, int processors, int least, int waves) {
    return hf_kbit::expert_clusters(parts, row_tiles, slabs, processors, least, waves);
}
extern "C" int shared_bytes(int bits, int warps, int k_warps, int tokens, int row_tiles) {
    return hf_kbit::gemm_shared_bytes(bits, warps, k_warps, tokens, row_tiles);
}
extern "C" int ring_stages(int bits, int warps, int tokens) { return hf_kbit::ring_stages(bits, warps, tokens); }
extern "C" void wgmma_plan(int64_t tokens, int64_t out_features, int64_t in_features, int bits, int batch_invariant,
                          int processors, int shared_limit, hf_kbit::WgmmaPlan* to) {
    static_assert(sizeof(hf_kbit::WgmmaPlan) == 8 * sizeof(int), "test_gemm_plan.py knows eight fields");
    *to = hf_kbit::plan_wgmma(tokens, out_features, in_features, bits, batch_invariant, processors, shared_limit);
}
extern "C" void wgmma_division(const hf_kbit::WgmmaPlan* plan, int slabs, int* begins, int* ctas) {
    const auto division = hf_kbit::divide_wgmma(*plan, slabs);
    for (int cta = 0; cta <= plan->clusters; ++cta) begins[cta] = division.begin(cta);
    for (int slab = 0; slab < plan->divided * slabs; ++slab) ctas[slab] = division.cta_with(slab);
}
extern "C" int64_t wgmma_partial_bytes(const hf_kbit::WgmmaPlan* plan) {
    return 4 * (hf_kbit::wgmma_partial_sums(*plan) + hf_kbit::wgmma_partial_flags(*plan));
}
extern "C" int wgmma_ordered(int bits, int token_tile, int transformed, int batch_invariant) {
    return hf_kbit::wgmma_ordered(bits, token_tile, transformed, batch_invariant);
}
extern "C" void experts_plan(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features, int bits,
                            int batch_invariant, int processors, int shared_limit, hf_kbit::WgmmaPlan* to) {
    *to = hf_kbit::plan_experts(rows, experts, out_features, in_features, bits, batch_invariant, processors,
                                shared_limit);
}
extern "C" int64_t most_token_tiles(int64_t rows, int64_t experts, int token_tile) {
    return hf_kbit::most_token_tiles(rows, experts, token_tile);
}
extern "C" double expected_token_tiles(int64_t rows, int64_t experts, int token_tile, int beyond) {
    return hf_kbit::expected_token_tiles(rows, experts, token_tile, beyond);
}
extern "C" int experts_are_fused(int64_t rows, int64_t experts, int64_t out_features, int64_t in_features, int arch,
                                 int shared_reserved) {
    return hf_kbit::experts_are_fused(rows, experts, out_features, in_features, arch, shared_reserved);
}
extern "C" void gradient_plan(int64_t tokens, int64_t out_features, int64_t in_features, int processors,
                              hf_kbit::GradientPlan* to) {
    static_assert(sizeof(hf_kbit::GradientPlan) == 3 * sizeof(int), "test_gemm_plan.py knows three fields");
    *to = hf_kbit::plan_gradient(tokens, out_features, in_features, processors);
}
extern "C" int gradient_is_fused(int64_t tokens, int64_t out_features, int64_t in_features, int bits, int transformed,
                                 int processors, int arch, int shared_reserved) {
    return hf_kbit::gradient_is_fused(tokens, out_features, in_features, bits, transformed, processors, arch,
                                      shared_reserved);
}
extern "C" int gradient_shared_bytes(int bits) { return hf_kbit::gradient_shared_bytes(bits); }
extern "C" int64_t gradient_partial_sums(const hf_kbit::GradientPlan* plan) {
    return hf_kbit::gradient_partial_sums(*plan);
}
extern "C" void mma_plan(int64_t tokens, int64_t out_features, int64_t in_features, int batch_invariant,
                         int processors, int* to) {
    static_assert(sizeof(hf_kbit::MmaPlan) == 3 * sizeof(int), "test_gemm_plan.py knows three fields");
    const auto plan = hf_kbit::plan_mma(tokens, out_features, in_features, batch_invariant, processors);
    to[0] = plan.token_tile, to[1] = plan.tiles, to[2] = plan.split;
}
extern "C" int mma_shared_bytes(int token_tile) { return hf_kbit::mma_shared_bytes(token_tile); }
extern "C" int64_t mma_partial_sums(const int* plan) {
    return hf_kbit::mma_partial_sums({plan[0], plan[1], plan[2]});
}
extern "C" int path(int64_t tokens, int64_t out_features, int64_t in_features, int bits, int transformed,
                    int batch_invariant, int arch, int shared_reserved) {
    return static_cast<int>(hf_kbit::gemm_path(tokens, out_features, in_features, bits, transformed, batch_invariant,
                                               arch, shared_reserved));
}
extern "C" int log2_ceil(int64_t n) { return hf_kbit::log2_ceil(n); }
"""


@pytest.fixture(scope="module")
def library(compile_for_cpu):
    loaded = compile_for_cpu(WRAPPER)
    loaded.plan.argtypes = [ctypes.c_int, ctypes.POINTER(ctypes.c_int64), ctypes.c_int, ctypes.c_int64]
    loaded.plan.argtypes += [*[ctypes.c_int] * 5, ctypes.POINTER(Plan)]
    loaded.plan.restype = None
    loaded.wgmma_plan.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_int] * 4, ctypes.POINTER(WgmmaPlan)]
    loaded.wgmma_plan.restype = loaded.wgmma_division.restype = None
    loaded.wgmma_division.argtypes = [ctypes.POINTER(WgmmaPlan), ctypes.c_int, *[ctypes.POINTER(ctypes.c_int)] * 2]
    loaded.wgmma_partial_bytes.argtypes, loaded.wgmma_partial_bytes.restype = (
        [ctypes.POINTER(WgmmaPlan)],
        ctypes.c_int64,
    )
    loaded.experts_plan.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_int] * 4, ctypes.POINTER(WgmmaPlan)]
    loaded.experts_plan.restype = None
    loaded.most_token_tiles.argtypes = [*[ctypes.c_int64] * 2, ctypes.c_int]
    loaded.most_token_tiles.restype = ctypes.c_int64
    loaded.expected_token_tiles.argtypes = [*[ctypes.c_int64] * 2, *[ctypes.c_int] * 2]
    loaded.expected_token_tiles.restype = ctypes.c_double
    loaded.few_experts_plan.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_int] * 6, ctypes.POINTER(FewExpertsPlan)]
    loaded.few_experts_plan.restype = None
    loaded.experts_are_fused.argtypes = [*[ctypes.c_int64] * 4, *[ctypes.c_int] * 2]
    loaded.gradient_plan.argtypes = [*[ctypes.c_int64] * 3, ctypes.c_int, ctypes.POINTER(GradientPlan)]
    loaded.gradient_plan.restype = None
    loaded.gradient_is_fused.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_int] * 5]
    loaded.gradient_partial_sums.argtypes = [ctypes.POINTER(GradientPlan)]
    loaded.gradient_partial_sums.restype = ctypes.c_int64
    loaded.mma_plan.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_int] * 2, ctypes.POINTER(MmaPlan)]
    loaded.mma_plan.restype = None
    loaded.mma_partial_sums.argtypes, loaded.mma_partial_sums.restype = [ctypes.POINTER(MmaPlan)], ctypes.c_int64
    loaded.path.argtypes = [*[ctypes.c_int64] * 3, *[ctypes.c_int] * 5]
    loaded.log2_ceil.argtypes = [ctypes.c_int64]
    return loaded


@pytest.fixture(scope="module")
def plan_gemm(library):
    def call(tokens, shape, bits, gpu, transformed=False) -> Plan:
        """``shape`` of one part, or with the rows of several: ``((rows, rows), columns)``."""
        rows, columns = shape
        parts = rows if isinstance(rows, tuple) else (rows,)
        tiles = [ceil_div(rows, TILE_ROWS) for rows in parts]
        found = Plan()
        of_parts = (ctypes.c_int64 * len(tiles))(*tiles)
        library.plan(tokens, of_parts, len(tiles), columns, bits, transformed, *gpu, found)
        return found

    return call


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_tiles(shape) -> int:
    return ceil_div(shape[0], TILE_ROWS)


def slabs(shape) -> int:
    return ceil_div(shape[1], SLAB_COLUMNS)


def all_cases():
    return [(tokens, shape, bits) for shape in SHAPES for bits in cases.BITS for tokens in TOKENS]


def powers_of_two(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def splits(shape, gpu) -> range:
    return range(1, 3 if gpu.arch >= 900 and slabs(shape) > 1 and gpu.processors > 1 else 2)


@pytest.fixture(params=GPUS.values(), ids=GPUS)
def gpu(request):
    return request.param


@pytest.fixture
def plans(plan_gemm, gpu):
    """Of every case: tokens, shape, bits, its plan, and what to say of it."""
    found = {case: plan_gemm(*case, gpu) for case in all_cases()}
    return [(*case, plan, f"{case}: {plan.values()}") for case, plan in found.items()]


def test_plans_are_valid(plans, library, gpu):
    for tokens, shape, bits, plan, told in plans:
        assert plan.warps == (16 if gpu.arch == 900 else 8), told
        assert plan.k_warps in powers_of_two(plan.warps), told
        assert plan.split in splits(shape, gpu), told
        assert plan.k_warps <= ceil_div(slabs(shape), plan.split), told
        assert 1 <= plan.clusters <= row_tiles(shape), told
        most_tiles = ceil_div(row_tiles(shape), plan.clusters)
        assert plan.tiles == most_tiles and [*plan.of_parts] == [plan.clusters, 0, 0, 0], told
        assert plan.shared_bytes == library.shared_bytes(bits, plan.warps, plan.k_warps, tokens, most_tiles), told
        assert plan.shared_bytes <= gpu.shared_limit, told
        assert not plan.transforms, told


def test_plans_that_transform_have_room_for_it(plan_gemm, library, gpu):
    """Counted from gemm.cu: 16-bit activations of a CTA's slabs, four octets of a thread. Else a kernel before does
    it, and the plan is that of a plain weight."""
    for tokens, shape, bits in all_cases():
        plan = plan_gemm(tokens, shape, bits, gpu, True)
        told = f"{tokens} {shape} {bits}: {plan.values()}"
        if not plan.transforms:
            assert plan.values() == plan_gemm(tokens, shape, bits, gpu).values(), told
            continue
        columns = ceil_div(slabs(shape), plan.split) * SLAB_COLUMNS
        assert tokens == 1 and columns <= 4 * 8 * 32 * plan.warps, told
        sums = library.shared_bytes(bits, plan.warps, plan.k_warps, tokens, plan.tiles)
        assert plan.shared_bytes == sums + 2 * columns <= gpu.shared_limit, told
        assert plan.tiles == ceil_div(row_tiles(shape), plan.clusters), told


@pytest.mark.parametrize("bits", cases.BITS)
def test_who_transforms_on_an_h200(plan_gemm, bits):
    """At one token each CTA by itself, which costs no launch; where that is many octets for every thread, a kernel
    before."""
    for shape in LLAMA:
        assert plan_gemm(1, shape, bits, H200, True).transforms == (shape[1] < 28672), shape
        for tokens in (2, 16):
            assert not plan_gemm(tokens, shape, bits, H200, True).transforms, (tokens, shape)


def test_columns_that_no_cta_has_room_for(plan_gemm):
    """Nor does the plan, at every call, try all numbers of row tiles for one that would leave it room."""
    shape = (10**8, 70_000)
    start = time.perf_counter()
    found = plan_gemm(1, shape, 5, H200, True).values()
    assert time.perf_counter() - start < 0.1
    assert found == plan_gemm(1, shape, 5, H200).values()


def waves(plan, gpu) -> int:
    return ceil_div(plan.clusters, gpu.processors // plan.split)


def warp_slabs(shape, plan_warps, k_warps, split, tiles) -> int:
    """What the slowest warp of a CTA goes through."""
    return ceil_div(ceil_div(slabs(shape), split), k_warps) * ceil_div(tiles, plan_warps // k_warps)


def test_no_more_waves_than_the_sums_need(plans, library, gpu):
    """A CTA for each processor, or the smallest multiple of it whose sums fit."""
    for tokens, shape, bits, plan, told in plans:
        at_once = gpu.processors // plan.split
        assert plan.clusters == min(at_once * waves(plan, gpu), row_tiles(shape)), told
        if waves(plan, gpu) > 1:
            tiles = ceil_div(row_tiles(shape), at_once * (waves(plan, gpu) - 1))
            assert library.shared_bytes(bits, plan.warps, plan.k_warps, tokens, tiles) > gpu.shared_limit, told


def test_one_wave_where_its_sums_fit(plans, library, gpu):
    """Several waves only where no division of the warps has room for the sums of one, or where those that have keep
    their slowest warp busy for longer: 8192 x 28672 on an RTX PRO 6000, three row tiles a processor for two warps."""
    for tokens, shape, bits, plan, told in plans:
        if waves(plan, gpu) == 1:
            continue
        tiles = ceil_div(row_tiles(shape), plan.clusters)
        ours = waves(plan, gpu) * warp_slabs(shape, plan.warps, plan.k_warps, plan.split, tiles)
        for split in splits(shape, gpu):
            tiles = ceil_div(row_tiles(shape), min(gpu.processors // split, row_tiles(shape)))
            for k_warps in powers_of_two(min(plan.warps, ceil_div(slabs(shape), split))):
                fits = library.shared_bytes(bits, plan.warps, k_warps, tokens, tiles) <= gpu.shared_limit
                theirs = warp_slabs(shape, plan.warps, k_warps, split, tiles)
                assert not fits or ours < theirs, f"{told}; one wave fits with {split=}, {k_warps=}"


def test_one_wave_and_several_are_among_the_cases(plan_gemm):
    """Or the tests of waves say nothing."""
    several = {name: [waves(plan_gemm(*case, gpu), gpu) > 1 for case in all_cases()] for name, gpu in GPUS.items()}
    assert not any(all(cases) for cases in several.values())
    assert all(any(several[name]) for name in ("H200", "A100", "4090", "RTX PRO 6000"))


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", LLAMA, ids=str)
def test_processors_of_an_h200_are_busy(plan_gemm, shape, bits):
    """The slowest CTA decides; what a processor does without a CTA counts as nothing done. 256 row tiles on 132
    processors are 1.03 times the mean at best, and the other shapes are no worse."""
    plan = plan_gemm(1, shape, bits, H200)
    busiest = ceil_div(row_tiles(shape), plan.clusters) * ceil_div(slabs(shape), plan.split)
    mean = row_tiles(shape) * slabs(shape) / H200.processors
    assert busiest <= 1.06 * mean, plan.values()


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("warps", [8, 16])
def test_shared_memory_holds_what_the_kernel_puts_there(library, warps, bits):
    """Counted from gemm.cu: a table that bytes (5 bits: pairs) of codes index, slabs with a barrier each, sums."""
    if bits < 5:
        table = 256 * 256
    else:
        table = 1024 * 4 * (32 if warps == 16 else 16)
    slab = 16 * 256 * bits // 8 + 16 * 8
    for tokens in TOKENS:
        stages = library.ring_stages(bits, warps, tokens)
        assert stages >= 1
        for k_warps in powers_of_two(warps):
            for tiles in (1, 2, 3, 7, 28, 133):
                sums = k_warps * tiles * 16 * tokens * 4
                needed = 1024 + table + warps * stages * (slab + 8) + 4 + sums
                found = library.shared_bytes(bits, warps, k_warps, tokens, tiles)
                assert found >= needed, (tokens, k_warps, tiles)
                assert found % 16 == 0, (tokens, k_warps, tiles)


def test_no_plan_where_not_even_one_row_tile_fits(plan_gemm):
    assert plan_gemm(1, (4096, 4096), 4, Gpu(40, 48 << 10, 750)).warps == 0


# Rows of each part: q, k and v of Llama-3-8B, its gate and up, of very different size, fewer than clusters.
PARTS = [(4096, 1024, 1024), (14336, 14336), (16, 200_000, 3000, 16), (40, 17), (256_000, 1), (1,) * 4]


@pytest.mark.parametrize("rows", PARTS, ids=str)
def test_parts_share_the_clusters(plan_gemm, library, gpu, rows):
    """Every row tile is somebody's, no share is larger than the plan says, and none could be smaller."""
    tiles = [ceil_div(part, TILE_ROWS) for part in rows]
    for tokens, columns, bits in itertools.product((1, 5, 16), (200, 4096, 14336), cases.BITS):
        plan = plan_gemm(tokens, (rows, columns), bits, gpu)
        told = f"{tokens} {columns} {bits}: {plan.values()}"
        shares = [ceil_div(*pair) for pair in zip(tiles, plan.of_parts, strict=False)]
        assert all(1 <= clusters <= part for clusters, part in zip(plan.of_parts, tiles, strict=False)), told
        assert not any(plan.of_parts[len(rows) :]), told
        assert max(shares) == plan.tiles, told
        smaller = plan.tiles - 1
        assert smaller == 0 or sum(ceil_div(part, smaller) for part in tiles) > plan.clusters, told
        if plan.clusters > len(rows):
            at_once = gpu.processors // plan.split
            assert plan.clusters == sum(tiles) or plan.clusters % at_once == 0, told
        assert plan.shared_bytes == library.shared_bytes(bits, plan.warps, plan.k_warps, tokens, plan.tiles), told
        assert plan.shared_bytes <= gpu.shared_limit, told


# Measured on one H200 on 2026-11-21, CUDA 13.0: the fastest of all plans for the shape.
FASTEST = [
    ((1, (4096, 4096), 4), {"k_warps": 16, "split": 1, "clusters": 132}),
    ((1, (8192, 8192), 2), {"k_warps": 16, "split": 1, "clusters": 132}),
    ((8, (57344, 8192), 2), {"k_warps": 4, "split": 1}),
    ((1, (3072, 8192), 4), {"split": 2}),
]


@pytest.mark.parametrize(("case", "expected"), FASTEST, ids=[str(case) for case, _ in FASTEST])
def test_fastest_plan_of_an_h200(plan_gemm, case, expected):
    found = plan_gemm(*case, H200).values()
    assert {name: found[name] for name in expected} == expected


def test_same_arguments_same_plan(plan_gemm):
    def plans():
        return {(name, *case): plan_gemm(*case, gpu).values() for name, gpu in GPUS.items() for case in all_cases()}

    first = plans()
    for case in reversed(all_cases()):  # another order: nothing is kept from one call to the next
        for name, gpu in GPUS.items():
            assert plan_gemm(*case, gpu).values() == first[(name, *case)], case


# --- more than 16 tokens --------------------------------------------------------------------------

DECODE, WGMMA, MMA, DEQUANTIZE = range(4)
WGMMA_TOKENS = (17, 32, 33, 48, 64, 65, 100, 128, 129, 200, 256, 300, 512, 1000, 1024, 4096, 100_000)
WGMMA_CASES = list(itertools.product(WGMMA_TOKENS, SHAPES, cases.BITS))


@pytest.fixture
def plan_wgmma(library):
    def call(tokens, shape, bits, gpu=H200, batch_invariant=False) -> WgmmaPlan:
        found = WgmmaPlan()
        library.wgmma_plan(tokens, *shape, bits, batch_invariant, gpu.processors, gpu.shared_limit, found)
        return found

    return call


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize(("shape", "most"), [((4096, 4096), 4095), ((4096, 14336), 8191)], ids=str)
def test_paths(library, bits, shape, most):
    """``most`` as measured on one H200 on 2026-11-23: with more tokens decoded slices and cuBLAS are as fast."""
    for gpu in GPUS.values():
        path, most_of_gpu = (WGMMA, most) if gpu.arch == 900 else (MMA, 256)
        for tokens, expected in [
            (0, DEQUANTIZE),
            *[(few, DECODE) for few in TOKENS if few <= 11 or shape == (4096, 4096)],
            *[(some, path) for some in (17, 32, 33, 64, 255, 256, most_of_gpu)],
            *[(many, DEQUANTIZE) for many in (most_of_gpu + 1, 10**6)],
        ]:
            for transformed in (False, True):
                found = library.path(tokens, *shape, bits, transformed, False, gpu.arch, 1024)
                assert found == expected, (tokens, gpu, transformed)


@pytest.mark.parametrize("bits", cases.BITS)
def test_few_tokens_of_large_weights(library, bits):
    """As measured on one H200 on 2026-11-23; other GPUs have no kernel that it is faster by."""
    large, small = (4096, 14336), (6144, 4096)
    fewest = {2: (13, 12), 3: (16, 13), 4: (16, 13), 5: (13, 12)}[bits]
    for transformed, tokens in itertools.product((False, True), TOKENS):
        expected = WGMMA if tokens >= fewest[transformed] else DECODE
        assert library.path(tokens, *large, bits, transformed, False, 900, 1024) == expected
        for shape, arch in ((small, 900), (small, 800), (large, 800), (large, 1000)):
            assert library.path(tokens, *shape, bits, transformed, False, arch, 1024) == DECODE


@pytest.mark.parametrize("bits", cases.BITS)
def test_many_tokens_of_few_features(library, bits):
    """As measured on one H100 on 2026-11-26: a weight of few rows is decoded for less than x is transformed."""
    for tokens, out_features, transformed in itertools.product((1023, 1024, 4095), (16, 1536, 1537), (False, True)):
        decoded = transformed and tokens > 1023 and out_features <= 1536
        found = library.path(tokens, out_features, 4096, bits, transformed, False, 900, 1024)
        assert found == (DEQUANTIZE if decoded else WGMMA), (tokens, out_features, transformed)
    assert library.path(4095, 1024, 4096, bits, True, True, 900, 1024) == WGMMA  # batch-invariant


@pytest.mark.parametrize("tokens", [1, 16, 17, 200])
def test_no_fused_path_before_sm_80(library, tokens):
    assert library.path(tokens, 4096, 4096, 4, False, False, 750, 0) == DEQUANTIZE
    assert library.path(tokens, 4096, 4096, 4, False, False, 800, 1024) != DEQUANTIZE


@pytest.mark.parametrize("tokens", [1, 17])
def test_no_fused_path_where_the_driver_keeps_more_shared_memory_than_kernels_leave_it(library, tokens):
    """They would trap, which ends the process's CUDA context."""
    for gpu in GPUS.values():
        assert library.path(tokens, 4096, 4096, 4, False, False, gpu.arch, 0) != DEQUANTIZE
        assert library.path(tokens, 4096, 4096, 4, False, False, gpu.arch, 1025) == DEQUANTIZE


@pytest.mark.parametrize("tokens", [1, 16, 17, 200])
def test_no_fused_path_beyond_32_bits(library, tokens):
    """Sizes at which an index of a kernel would not fit any more, and those just below."""
    sizes = {
        (16, 2**27): True,
        (16, 2**27 + 1): False,
        (2**27, 256): True,
        (2**27 + 1, 256): False,
        (2**24, 2**18): True,  # 2**30 slabs
        (2**24, 2**18 + 1): False,
        (16, 143_165_577): False,
        (2**62, 2**62): False,
    }
    for gpu in GPUS.values():
        for shape, fits in sizes.items():
            assert (library.path(tokens, *shape, 4, False, False, gpu.arch, 1024) != DEQUANTIZE) == fits, (shape, gpu)


def test_log2(library):
    assert [library.log2_ceil(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 2**40)] == [0, 1, 2, 2, 3, 3, 4, 4, 40]


def wgmma_rows(plan) -> int:
    """Of a tile: 16 for each of a group's warps, of 8 or 16 in all."""
    return (8 if plan.token_tile == 256 else 16) * 16 // plan.groups


def wgmma_tiles(tokens, shape, plan) -> int:
    return ceil_div(shape[0], wgmma_rows(plan)) * ceil_div(tokens, plan.token_tile)


@pytest.mark.parametrize("gpu", [H200, GPUS["a seventh of an H200"]], ids=["H200", "a seventh"])
def test_wgmma_plans_are_valid(plan_wgmma, gpu):
    for tokens, shape, bits in WGMMA_CASES:
        plan = plan_wgmma(tokens, shape, bits, gpu)
        told = f"{tokens} tokens, {shape}, {bits} bits: {plan.values()}"
        assert plan.token_tile in (16, 32, 64, 128, 256), told
        assert plan.groups in (1, 2, 4) and plan.split in (1, 2), told
        assert plan.groups * plan.split <= slabs(shape), told
        assert plan.groups == 1 or plan.token_tile < 256, told
        tiles = wgmma_tiles(tokens, shape, plan)
        if plan.divided:
            assert plan.groups == plan.split == 1, told
            assert plan.clusters == min(gpu.processors, tiles * slabs(shape)), told
            assert plan.divided < plan.clusters and (tiles - plan.divided) % plan.clusters == 0, told
        else:
            assert plan.clusters == min(tiles, gpu.processors // plan.split), told
            assert plan.groups * plan.split == 1 or plan.clusters == tiles, told
        assert plan.x_stages >= 2 and plan.ring_stages >= 1, told
        assert plan.shared_bytes <= gpu.shared_limit, told


def test_wgmma_shared_memory_holds_what_the_kernel_puts_there(plan_wgmma):
    """Counted from gemm_wgmma.cuh: a table of 64 KB, x, slabs, two barriers for each; or, after them, others' sums."""
    for tokens, shape, bits in WGMMA_CASES:
        plan = plan_wgmma(tokens, shape, bits)
        warps = wgmma_rows(plan) * plan.groups // 16
        columns = 128 if plan.token_tile <= 32 else 64
        x = plan.groups * plan.x_stages * (plan.token_tile * columns * 2 + 16)
        weights = warps * plan.ring_stages * (16 * 256 * bits // 8 + 16 * 8 + 16)
        parties = plan.groups * plan.split
        owned = ceil_div(plan.token_tile, min(parties, plan.token_tile // 8))
        sums = plan.groups * (parties - 1) * owned * wgmma_rows(plan) * 4
        assert plan.shared_bytes == 1024 + 65536 + max(x + weights, sums), plan.values()


def wgmma_division(library, plan, shape) -> tuple[list[int], list[int]]:
    """Of the slabs of the divided tiles, where each CTA's begin, and who has each."""
    begins, ctas = (ctypes.c_int * (plan.clusters + 1))(), (ctypes.c_int * (plan.divided * slabs(shape)))()
    library.wgmma_division(plan, slabs(shape), begins, ctas)
    return [*begins], [*ctas]


def test_every_slab_of_the_divided_tiles_is_one_ctas(plan_wgmma, library):
    """Evenly; and no CTA has slabs of more than two tiles, of which it leaves at most one to another."""
    divided = 0
    for tokens, shape, bits in WGMMA_CASES:
        plan = plan_wgmma(tokens, shape, bits)
        if plan.divided == 0:
            continue
        divided += 1
        begins, ctas = wgmma_division(library, plan, shape)
        assert begins[0] == 0 and begins[-1] == plan.divided * slabs(shape)
        shares = [end - begin for begin, end in itertools.pairwise(begins)]
        assert max(shares) - min(shares) <= 1 and max(shares) <= slabs(shape)
        assert ctas == [cta for cta, share in enumerate(shares) for _ in range(share)]
        for begin, end in itertools.pairwise(begins):
            assert begin == end or (end - 1) // slabs(shape) - begin // slabs(shape) <= 1
    assert divided > len(WGMMA_CASES) // 10


def test_memory_of_parts_of_tiles(plan_wgmma, library):
    """Counted from gemm_wgmma.cuh: the sums of a tile and a word for each warp, for every CTA; none where none is
    divided."""
    for tokens, shape, bits in WGMMA_CASES:
        plan = plan_wgmma(tokens, shape, bits)
        of_cta = wgmma_rows(plan) * plan.token_tile + wgmma_rows(plan) // 16
        expected = 4 * plan.clusters * of_cta if plan.divided else 0
        assert library.wgmma_partial_bytes(plan) == expected <= 18 << 20, (tokens, shape, plan.values())


def test_wgmma_tiles_fill_an_h200(plan_wgmma):
    """What a processor does without a tile, or with tokens that are not there, counts as nothing done."""
    for (tokens, least), shape in itertools.product([(32, 0.7), (64, 0.7), (256, 0.7), (4096, 0.9)], LLAMA):
        plan = plan_wgmma(tokens, shape, 4)
        whole = wgmma_tiles(tokens, shape, plan) - plan.divided
        # Parties divide a tile's columns, so that a processor has 1 / split of a tile.
        rounds = ceil_div(whole, plan.clusters) / plan.split
        if plan.divided:
            rounds += ceil_div(plan.divided * slabs(shape), plan.clusters) / slabs(shape)
        spent = rounds * H200.processors * wgmma_rows(plan) * plan.token_tile
        assert shape[0] * tokens >= least * spent, (tokens, shape, plan.values())


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_batch_invariant_plans_go_through_k_in_one_order(library, plan_wgmma, plan_mma, gpu):
    """By one kernel, in one CTA for each tile, with columns in one order, whatever the number of tokens."""
    for tokens, shape in itertools.product((1, 2, 16, 17, 64, 300, 5000, 100_000), SHAPES):
        path = library.path(tokens, *shape, 4, False, True, gpu.arch, 1024)
        assert path == (WGMMA if gpu.arch == 900 else MMA)
        if path == MMA:
            assert plan_mma(tokens, shape, gpu, True).split == 1
            continue
        for bits in cases.BITS:
            plan = plan_wgmma(tokens, shape, bits, gpu, True)
            assert (plan.groups, plan.split, plan.divided) == (1, 1, 0)
            assert all(library.wgmma_ordered(bits, plan.token_tile, transformed, True) for transformed in (0, 1))


def test_who_reorders_columns(library):
    """Not for tiles of 256 tokens of a weight without transform, whose warps exchange codes but for 5 bits."""
    for bits, token_tile, transformed in itertools.product(cases.BITS, (16, 32, 64, 128, 256), (False, True)):
        expected = transformed or bits == 5 or token_tile < 256
        assert library.wgmma_ordered(bits, token_tile, transformed, False) == expected


# Measured on one H200 on 2026-11-21, CUDA 13.0: the fastest of all plans for the shape.
FASTEST_WGMMA = [
    ((32, (8192, 8192), 4), {"token_tile": 32, "groups": 4, "split": 1}),
    ((64, (8192, 8192), 4), {"token_tile": 64, "groups": 2, "split": 2}),
    ((128, (8192, 8192), 2), {"token_tile": 128, "groups": 2, "split": 2}),
    ((256, (8192, 8192), 5), {"token_tile": 256, "groups": 1, "split": 2}),
    ((128, (28672, 4096), 4), {"token_tile": 128, "groups": 1, "split": 1}),
    ((1024, (57344, 8192), 4), {"token_tile": 256, "groups": 1, "split": 1}),
]


@pytest.mark.parametrize(("case", "expected"), FASTEST_WGMMA, ids=[str(case) for case, _ in FASTEST_WGMMA])
def test_fastest_wgmma_plan_of_an_h200(plan_wgmma, case, expected):
    found = plan_wgmma(*case).values()
    assert {name: found[name] for name in expected} == expected


# --- experts, on Hopper ---------------------------------------------------------------------------

# Experts, of which a token has so many, and their weights: Qwen3-30B-A3B, Mixtral-8x7B, odd ones.
QWEN_GATE_UP, QWEN_DOWN = (128, 8, (1536, 2048)), (128, 8, (2048, 768))
MIXTRAL_GATE_UP, MIXTRAL_DOWN = (8, 2, (28672, 4096)), (8, 2, (4096, 14336))
EXPERTS = [QWEN_GATE_UP, QWEN_DOWN, MIXTRAL_GATE_UP, MIXTRAL_DOWN, (1, 1, (35, 1000)), (1024, 3, (100, 328))]
EXPERT_CASES = [
    (tokens * each, experts, shape, bits)
    for experts, each, shape in EXPERTS
    for tokens in (1, 2, 5, 16, 100, 256, 2048, 100_000)
    for bits in cases.BITS
]


@pytest.fixture
def plan_experts(library):
    def call(rows, experts, shape, bits, gpu=H200, batch_invariant=False) -> WgmmaPlan:
        found = WgmmaPlan()
        library.experts_plan(rows, experts, *shape, bits, batch_invariant, gpu.processors, gpu.shared_limit, found)
        return found

    return call


@pytest.mark.parametrize("gpu", [H200, GPUS["a seventh of an H200"]], ids=["H200", "a seventh"])
def test_plans_of_experts_are_valid(plan_experts, library, gpu):
    """Groups never have fewer slabs than one each, or one would not come to where they meet."""
    for rows, experts, shape, bits in EXPERT_CASES:
        plan = plan_experts(rows, experts, shape, bits, gpu)
        told = f"{rows} rows, {experts} experts, {shape}, {bits} bits: {plan.values()}"
        assert plan.token_tile in (16, 32, 64, 128, 256), told
        assert plan.groups in (1, 2, 4) and plan.groups <= slabs(shape), told
        assert plan.groups == 1 or plan.token_tile < 256, told
        assert (plan.split, plan.divided) == (1, 0), told
        tiles = library.most_token_tiles(rows, experts, plan.token_tile) * ceil_div(shape[0], wgmma_rows(plan))
        assert plan.clusters == min(tiles, gpu.processors), told
        assert plan.x_stages >= 2 and plan.ring_stages >= 1, told
        assert plan.shared_bytes <= gpu.shared_limit, told
        assert plan_experts(rows, experts, shape, bits, gpu, batch_invariant=True).groups == 1, told


def test_experts_shared_memory_holds_what_the_kernel_puts_there(plan_experts):
    """As for one weight, but others' sums have their own place, behind eight bytes for each expert and the end."""
    for rows, experts, shape, bits in EXPERT_CASES:
        plan = plan_experts(rows, experts, shape, bits)
        columns = 128 if plan.token_tile <= 32 else 64
        x = plan.groups * plan.x_stages * (plan.token_tile * columns * 2 + 16)
        warps = wgmma_rows(plan) * plan.groups // 16
        weights = warps * plan.ring_stages * (16 * 256 * bits // 8 + 16 * 8 + 16)
        owned = ceil_div(plan.token_tile, min(plan.groups, plan.token_tile // 8))
        sums = plan.groups * (plan.groups - 1) * owned * wgmma_rows(plan) * 4
        table = ceil_div((experts + 1) * 8, 16) * 16
        assert plan.shared_bytes == 1024 + 65536 + x + weights + table + sums, plan.values()


def test_most_tiles_of_tokens(library):
    """Of all ways to divide few rows among experts; as many as there can be, no more."""
    for rows, experts, token_tile in itertools.product((1, 2, 5, 9), (1, 2, 4), (1, 2, 4)):
        ways = (way for way in itertools.product(range(rows + 1), repeat=experts) if sum(way) == rows)
        most = max(sum(ceil_div(its_rows, token_tile) for its_rows in way) for way in ways)
        assert library.most_token_tiles(rows, experts, token_tile) == most, (rows, experts, token_tile)


@pytest.mark.parametrize(("rows", "experts"), [(8, 128), (128, 128), (512, 128), (2048, 128), (40, 8), (3000, 8)])
@pytest.mark.parametrize(("token_tile", "beyond"), [(16, 0), (64, 0), (256, 0), (128, 32), (128, 96)])
def test_tiles_of_tokens_in_the_mean(library, rows, experts, token_tile, beyond):
    """Near what comes out of rows that have experts at random; those with more than so many rows too."""
    owners = torch.randint(0, experts, (200, rows), generator=cases.generator(rows, experts))
    shares = torch.nn.functional.one_hot(owners, experts).sum(1)
    tiles = shares.sub(beyond).clamp(min=0).add(token_tile - 1).div(token_tile, rounding_mode="floor")
    mean = tiles.sum(1).double().mean().item()
    assert abs(library.expected_token_tiles(rows, experts, token_tile, beyond) - mean) < 0.1 * mean + 0.001 * experts


class FewExpertsPlan(ctypes.Structure):
    _fields_ = [("gemm", Plan)]
    _fields_ += [(name, ctypes.c_int) for name in ("rows", "least_clusters", "waves", "clusters")]

    def values(self) -> dict:
        own = {name: getattr(self, name) for name in ("rows", "least_clusters", "waves", "clusters")}
        return self.gemm.values() | own


def few_experts_plan(library, rows, experts, shape, bits=4, gpu=H200, batch_invariant=False, reserved=1024):
    found = FewExpertsPlan()
    sizes = gpu.processors, gpu.shared_limit, gpu.arch, reserved
    library.few_experts_plan(rows, experts, *shape, bits, batch_invariant, *sizes, found)
    return found


FEW = [(1, 8), (4, 32), (8, 128), (32, 8), (72, 128), (128, 128), (1000, 128), (1000, 1024)]


@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_plans_of_few_rows_of_experts(library, gpu):
    """However many parts there turn out to be, there are CTAs for all of them, with room for their sums."""
    for (rows, experts), (_, _, shape), bits in itertools.product(FEW, EXPERTS, cases.BITS):
        plan = few_experts_plan(library, rows, experts, shape, bits, gpu)
        told = f"{rows} rows, {experts} experts, {shape}, {bits} bits: {plan.values()}"
        tiles = ceil_div(shape[0], 16)
        if plan.gemm.warps == 0:  # more columns than the threads of a CTA transform, or than small shared memory holds
            assert plan.rows == 1 and slabs(shape) > (64 if gpu.arch == 900 else 32), told
            continue
        assert plan.gemm.transforms == (plan.rows == 1) and plan.rows in (1, 8), told
        assert plan.gemm.warps == (16 if gpu.arch // 100 == 9 else 8), told
        assert plan.gemm.shared_bytes <= gpu.shared_limit, told
        assert plan.least_clusters >= ceil_div(tiles, plan.gemm.tiles), told
        if plan.rows == 1:
            assert rows * plan.least_clusters <= plan.clusters, told
            continue
        processors = gpu.processors // plan.gemm.split
        most = library.most_token_tiles(rows, experts, 8)
        for parts in {1, min(2, most), min(7, most), ceil_div(rows, 8), most}:
            arguments = parts, tiles, slabs(shape), processors, plan.least_clusters, plan.waves
            clusters = library.expert_clusters(*arguments)
            assert plan.least_clusters <= clusters <= max(tiles, plan.least_clusters), (told, parts)
            assert parts * clusters <= plan.clusters, (told, parts)


def test_which_rows_of_experts_are_few(library):
    def rows_of_parts(*arguments, **settings) -> int:
        plan = few_experts_plan(library, *arguments, **settings)
        return plan.rows if plan.gemm.warps else 0

    for shape in ((28672, 4096), (4096, 14336)):
        expected = {0: 0, 1: 1, 2: 1, 8: 8, 63: 8, 64: 0}
        assert {rows: rows_of_parts(rows, 8, shape) for rows in expected} == expected
        assert rows_of_parts(10_000, 8, shape, gpu=GPUS["A100"]) == 8
        assert rows_of_parts(1, 8, shape, batch_invariant=True) == rows_of_parts(1, 8, shape, reserved=1025) == 0
    expected = {8: 1, 32: 1, 64: 1, 128: 8, 512: 8, 1024: 0}
    assert {rows: rows_of_parts(rows, 128, (1536, 2048)) for rows in expected} == expected
    assert rows_of_parts(1, 8, (2**27 + 1, 256)) == rows_of_parts(1, 1025, (256, 256)) == 0


@pytest.mark.parametrize(
    ("parts", "clusters"),
    [(1, 96), (8, 16), (66, 2), (72, 3), (82, 3), (128, 1), (140, 4)],
)
def test_parts_share_the_processors(library, parts, clusters):
    """One has all of them, eight an eighth each; 72, which would leave 60 idle, each a third of two turns."""
    assert library.expert_clusters(parts, 96, 8, 132, 1, 8) == clusters


def test_which_experts_are_fused(library):
    def fused(rows, experts, shape, arch=900, reserved=1024):
        return bool(library.experts_are_fused(rows, experts, *shape, arch, reserved))

    for experts, each, shape in EXPERTS:
        assert all(fused(tokens * each, experts, shape) for tokens in (1, 16, 2048, 100_000))
        assert not fused(0, experts, shape)
        assert not fused(8, experts, shape, arch=800) and not fused(8, experts, shape, arch=1000)
        assert not fused(8, experts, shape, reserved=1025)
    assert not fused(8, 1025, (35, 1000)) and not fused(8, 1, (2**27 + 1, 256))
    # More tiles than 2**30, were every expert to have all rows.
    assert fused(16 * 2**15, 1024, (64 * 2**5, 256)) and not fused(16 * 2**15 + 1, 1024, (64 * 2**5, 256))


# Not measured.
CHOICES = [
    (QWEN_GATE_UP, {128: (16, 1), 256: (32, 1), 2048: (128, 1)}),
    (QWEN_DOWN, {128: (16, 1), 256: (32, 1), 2048: (128, 1)}),
    (MIXTRAL_GATE_UP, {64: (32, 1), 256: (128, 1), 2048: (128, 1)}),
    (MIXTRAL_DOWN, {64: (32, 1), 256: (128, 1), 2048: (128, 1)}),
]


@pytest.mark.parametrize(("experts", "expected"), CHOICES, ids=["Qwen gate up", "down", "Mixtral gate up", "down"])
def test_plans_of_experts_of_an_h200(plan_experts, experts, expected):
    count, each, shape = experts
    plans = {tokens: plan_experts(tokens * each, count, shape, 4) for tokens in expected}
    assert {tokens: (plan.token_tile, plan.groups) for tokens, plan in plans.items()} == expected


# --- more tokens, on other GPUs -------------------------------------------------------------------

MMA_CASES = list(itertools.product((17, 32, 33, 64, 65, 100, 128, 200, 256), SHAPES))


@pytest.fixture
def plan_gradient(library):
    def call(tokens, shape, gpu=H200) -> GradientPlan:
        found = GradientPlan()
        library.gradient_plan(tokens, *shape, gpu.processors, found)
        return found

    return call


@pytest.mark.parametrize("gpu", [H200, GPUS["a seventh of an H200"]], ids=["H200", "a seventh"])
def test_gradient_plans_are_valid(plan_gradient, library, gpu):
    """Every row tile is somebody's, four of them to a piece; no part is without one; where tiles are divided all parts
    are at work at a time, and their memory is bounded."""
    for tokens, shape in itertools.product((1, 200, 256, 257, 1000, 2048), SHAPES):
        plan = plan_gradient(tokens, shape, gpu)
        told = f"{tokens} tokens, {shape}: {plan.values()}"
        assert plan.tiles == ceil_div(tokens, 256) * ceil_div(shape[1], 128), told
        assert plan.pieces % 2 == 0 and plan.parts >= 1, told
        assert 4 * plan.pieces * (plan.parts - 1) < row_tiles(shape) <= 4 * plan.pieces * plan.parts, told
        assert plan.parts == 1 or plan.tiles * plan.parts <= gpu.processors, told
        expected = plan.tiles * plan.parts * 256 * 128 if plan.parts > 1 else 0
        assert library.gradient_partial_sums(plan) == expected, told


@pytest.mark.parametrize("bits", cases.BITS)
def test_gradient_shared_memory_holds_what_the_kernel_puts_there(library, bits):
    """Counted from gradient_wgmma.cu: a table of 64 KB; four times 256 tokens of 64 columns, words of four row tiles
    in pieces of 512 bytes, scales of two of a slab's tiles, four barriers; what warps exchange."""
    words = 4 * 512 * {2: 1, 3: 2, 4: 2, 5: 3}[bits]
    exchanged = 8 * 256 * (2 if bits == 5 else 4)
    total = 1024 + 65536 + 4 * (256 * 64 * 2 + words + 4 * 64 + 4 * 8) + exchanged
    assert library.gradient_shared_bytes(bits) == total <= H200.shared_limit


# Measured on one H200 on 2026-11-23, CUDA 13.0: the fastest of up to eight divisions, 4 bits.
FASTEST_GRADIENT = [
    ((128, (4096, 4096)), 4),
    ((256, (28672, 4096)), 4),
    ((512, (4096, 4096)), 2),
    ((1024, (4096, 4096)), 1),
    ((256, (57344, 8192)), 2),
    ((256, (4096, 14336)), 1),
]


@pytest.mark.parametrize(("case", "parts"), FASTEST_GRADIENT, ids=[str(case) for case, _ in FASTEST_GRADIENT])
def test_fastest_gradient_plan_of_an_h200(plan_gradient, case, parts):
    assert plan_gradient(*case).parts == parts


def test_which_gradients_are_fused(library):
    """As measured on one H200 on 2026-11-23; of 4096 x 14336 and 1024 tokens 3.4 tiles are every processor's."""

    def fused(tokens, shape, bits, transformed, arch=900, reserved=1024) -> bool:
        return bool(library.gradient_is_fused(tokens, *shape, bits, transformed, 132, arch, reserved))

    wide, square = (4096, 14336), (8192, 8192)
    for bits, transformed in itertools.product(cases.BITS, (False, True)):
        most = min(2048, {2: 2048, 3: 1024, 4: 1024, 5: 512}[bits] * (1 + transformed))
        for tokens in (1, 16, 300, 512, 1024, 2048, 4096):
            told = f"{bits} bits, {tokens} tokens, {transformed=}"
            assert fused(tokens, square, bits, transformed) == (tokens <= most), told
            assert fused(tokens, wide, bits, transformed) == (tokens <= most and tokens != 1024), told
            assert not fused(tokens, square, bits, transformed, arch=800), told
            assert not fused(tokens, square, bits, transformed, reserved=1025), told
        assert not fused(0, square, bits, transformed)
        assert not fused(16, (2**27 + 1, 256), bits, transformed)


@pytest.fixture
def plan_mma(library):
    def call(tokens, shape, gpu, batch_invariant=False) -> MmaPlan:
        found = MmaPlan()
        library.mma_plan(tokens, *shape, batch_invariant, gpu.processors, found)
        return found

    return call


def test_mma_plans_are_valid(plan_mma, library, gpu):
    """All rows and tokens are somebody's; no part of a tile is without a slab, nor divided where one wave is full."""
    for tokens, shape in MMA_CASES:
        plan = plan_mma(tokens, shape, gpu)
        told = f"{tokens} tokens, {shape}: {plan.values()}"
        assert plan.token_tile in (32, 64), told
        assert plan.tiles == ceil_div(shape[0], 256) * ceil_div(tokens, plan.token_tile), told
        assert 1 <= plan.split <= slabs(shape), told
        assert plan.split == 1 or plan.tiles * plan.split <= gpu.processors, told
        parts = plan.tiles * plan.split if plan.split > 1 else 0
        assert library.mma_partial_sums(plan) == parts * 256 * plan.token_tile, told
        assert library.mma_shared_bytes(plan.token_tile) <= gpu.shared_limit, told


@pytest.mark.parametrize("token_tile", [32, 64])
def test_mma_shared_memory_holds_what_the_kernel_puts_there(library, token_tile):
    """Counted from gemm_mma.cu: a table of 64 KB, four times 64 columns of x."""
    assert library.mma_shared_bytes(token_tile) == 1024 + 65536 + 4 * 64 * token_tile * 2


def test_memory_of_parts_stays_below_64_mib(plan_mma, library, gpu):
    assert max(library.mma_partial_sums(plan_mma(*case, gpu)) for case in MMA_CASES) * 4 <= 64 << 20


# Measured on one H200 that was made to take this path, on 2026-11-21, CUDA 13.0: the fastest of all plans.
FASTEST_MMA = [
    ((32, (8192, 8192)), {"token_tile": 32, "split": 4}),
    ((64, (8192, 8192)), {"token_tile": 64, "split": 4}),
    ((256, (8192, 8192)), {"token_tile": 64, "split": 1}),
    ((128, (4096, 14336)), {"token_tile": 64, "split": 4}),
    ((32, (28672, 4096)), {"token_tile": 32, "split": 1}),
]


@pytest.mark.parametrize(("case", "expected"), FASTEST_MMA, ids=[str(case) for case, _ in FASTEST_MMA])
def test_fastest_mma_plan_of_an_h200(plan_mma, case, expected):
    found = plan_mma(*case, H200).values()
    assert {name: found[name] for name in expected} == expected
