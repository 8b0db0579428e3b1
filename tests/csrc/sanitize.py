"""Runs every CUDA kernel once at odd sizes, for NVIDIA's compute-sanitizer:

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/csrc/sanitize.py [BITS ...]
    done

Widths that are named run alone, so that several processes can share the work.

Of gemm_wgmma_kernel, gemm_int8_kernel, experts_wgmma_kernel and experts_int8_kernel racecheck reports the slabs, and
of gradient_wgmma_kernel the weights, without reason: a warp's lanes read them, then, behind a __syncwarp, of which no
instruction is left for the tool to see, lane 0 tells the barrier that those who bring the next ones wait for. With
every lane telling it for itself, an experiment, the report of the gradient's weights is gone. That of the slabs stays:
bulk copies bring them, asked for by another warp, and only of those that the reading warp asks for, as gemm_kernel's,
the tool sees what they wait for.

Inputs are made on the CPU, and results are copied there, so that initcheck sees what no kernel wrote: torch's own
kernels take no part. Whether results are right, the tests say.
"""

import itertools
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # before torch is imported: every tensor an allocation of its own, whose ends are watched
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import cases
from compiled import cuda_arch
from torch.utils._pytree import tree_map_only

import hf_kbit
from hf_kbit.format import reference, trellis

OPS = torch.ops.hf_kbit
HALVES = torch.float16, torch.bfloat16
# The last one makes every warp of an H200 go round its loop more than once.
SHAPES = [(1, 1), (7, 33), (17, 257), (33, 320), (48, 1024), (3400, 1056)]
# With as many tokens divided along K among the CTAs of clusters on an H200, and more row tiles than warps; of the last
# one the CTAs divide the slabs of the last tiles.
DIVIDED = [((3072, 2048), 5), ((30_000, 264), 16), ((3072, 2048), 60), ((4096, 1024), 120), ((512, 512), 250)]
DIVIDED += [((1280, 8192), 250)]
# Rows of the weights of one launch, columns, rotated, tokens: the last ones are divided so that CTAs have slabs of
# several weights.
GROUPS = [([40, 700, 17], 520, 1, (1, 16, 60)), ([40, 2000, 16], 5888, 0, (250,))]
# Experts, shape, rows: a row by itself, some of each expert together; then one tile for each, groups that meet after
# each of several tiles, several tiles of tokens.
EXPERTS = [(8, (100, 328), 3), (130, (48, 520), 300), (16, (48, 520), 300), (3, (3072, 1024), 40)]
EXPERTS += [(2, (300, 768), 900)]


def run(op, *arguments):
    on_gpu = tree_map_only(torch.Tensor, torch.Tensor.cuda, arguments)
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, op(*on_gpu))


def forms(shape, bits: int) -> list[tuple]:
    """Planes and tiles of any weight, each with its codebook."""
    planes, codebook = cases.random_packed(shape, bits), cases.codebook(bits)
    return [(*words, codebook) for words in (planes, reference.repack(*planes, bits, list(shape[-2:])))]


def whole_weights(shape, bits: int) -> None:
    for dtype in cases.FLOATS:
        for search, signed in itertools.product((False, True), repeat=2):
            run(OPS.quantize, cases.weight(shape, dtype), cases.codebook(bits), search, signed)
    crowded = torch.cat([torch.linspace(0.5, 0.5001, 2**bits - 1), torch.tensor([-1.0])]).sort().values
    run(OPS.quantize, cases.weight(shape), crowded)
    some = torch.arange(0, 2 * shape[0], 3) % shape[0]
    for inverse, packed in enumerate(forms(shape, bits)):
        run(OPS.repack, *packed[:2], bits, list(shape), bool(inverse))
        run(OPS.int8_inverses, *packed, list(shape))
        for dtype in (*cases.FLOATS, torch.float64):
            for transform in ((), (cases.columns(shape[1]), True)):
                how = *packed, list(shape), dtype, *transform
                run(OPS.dequantize, *how)
                run(OPS.embed, some, *how)
                run(OPS.embed, some.int(), *how)


def products(shape, bits: int, tokens: int, dtype: torch.dtype) -> None:
    _, tiles = forms(shape, bits)
    for transform in ((), (cases.columns(shape[1]), True)):
        run(OPS.gemm, cases.x((tokens,), shape[1], dtype), *tiles, None, shape[0], *transform)
        if transform and cuda_arch() >= 800:
            hf_kbit.set_batch_invariant(True)  # or few tokens would keep 16-bit inputs
            run(OPS.gemm_int8, cases.x((tokens,), shape[1], dtype), *tiles, None, shape[0], transform[0])
            hf_kbit.set_batch_invariant(False)
        if shape[0] % 8 == 0:  # others are copied by torch first
            run(OPS.gemm_gradient, cases.x((tokens,), shape[0], dtype), *tiles, list(shape), *transform)


def group() -> None:
    """Several weights of 4 bits in one launch, each with its own transform."""
    for rows, columns, rotated, all_tokens in GROUPS:
        weights = [forms((part, columns), 4)[1] for part in rows]
        words, scales, codebooks = map(list, zip(*weights, strict=True))
        transforms = [None, cases.columns(columns), cases.columns(columns, seed=1)], [rotated] * 3
        for tokens in all_tokens:
            x = cases.x((tokens,), columns, torch.bfloat16)
            run(OPS.gemm_group, x, words, scales, codebooks, [None] * 3, rows, *transforms, [None] * 3)
            if cuda_arch() >= 800:
                own, of_each = [cases.columns(columns, seed=seed) for seed in (0, 0, 1)], []
                for weight, part in zip(weights, rows, strict=True):
                    of_each.append(run(OPS.int8_inverses, *weight, [part, columns]))
                hf_kbit.set_batch_invariant(True)
                run(OPS.gemm_group, x, words, scales, codebooks, [None] * 3, rows, own, [1] * 3, of_each)
                hf_kbit.set_batch_invariant(False)


def experts(bits: int) -> None:
    """Some rows are nobody's; each is one of ten."""
    for (count, shape, rows), dtype in itertools.product(EXPERTS, HALVES):
        _, tiles = forms((count, *shape), bits)
        index = torch.randint(0, 10, (rows,), generator=cases.generator(rows)).int()
        offsets = torch.arange(count + 1).mul(rows - 1).div(count, rounding_mode="floor").int()
        how = *tiles, cases.x((count,), shape[0], dtype), index, offsets, shape[0], cases.columns(shape[1])
        for swiglu in (False, True):
            run(OPS.gemm_experts, cases.x((10,), shape[1] * (1 + swiglu), dtype), *how, True, swiglu)
        if cuda_arch() == 900:
            hf_kbit.set_batch_invariant(True)
            for swiglu in (False, True):
                run(OPS.gemm_experts_int8, cases.x((10,), shape[1] * (1 + swiglu), dtype), *how, None, swiglu)
            hf_kbit.set_batch_invariant(False)


def way_to_experts() -> None:
    """And back: few numbers, some, more than are put in order in shared memory."""
    for tokens, count in ((5, 8), (700, 130), (40_000, 8)):
        ids = torch.randint(-1, count + 1, (tokens, 2), generator=cases.generator(tokens))
        _, places, _ = run(OPS.route_experts, ids, count)
        run(OPS.combine_experts, cases.x((2 * tokens,), 35), places, cases.x((tokens,), 2, seed=1))


def trellises() -> None:
    """More tiles than there are CTAs; sides of part of a CTA's tiles, and of several CTAs."""
    for bits, code in itertools.product(trellis.BITS, trellis.CODES):
        for dtype, tiles in itertools.product(cases.FLOATS, ((1, 1), (9, 17), (2, 17, 3))):
            words = torch.randint(-(2**15), 2**15, (*tiles, 16 * bits)).to(torch.int16)
            run(OPS.decode_trellis, words, code, dtype)
        run(OPS.encode_trellis, torch.randn(3, 256), bits, 3)
    run(OPS.encode_trellis, torch.randn(300, 256), 8, 1)
    for bits, ((rows, width), block) in itertools.product(trellis.BITS, (((226, 1000), 32), ((300, 900), 128))):
        how, shape = trellis_operands((3, rows, width), bits, block), [rows, width]
        for tokens, dtype in itertools.product((1, 7, 16, 17, 70, 300, 3000), HALVES):
            x, bias = torch.randn(tokens, width).to(dtype), torch.randn(rows).to(dtype)
            parts = x, [bias, None, bias], *map(list, how), 3 * [rows]
            if tokens <= 16:
                run(OPS.gemm_trellis_few, *parts, block)
            # Of 3,000 tokens, which are only for 8 bits, weights are decoded first.
            for code, int8 in (*((code, False) for code in trellis.CODES), ("mul1", True)):
                if tokens > 16 and (int8 or tokens < 3000):
                    run(OPS.gemm_trellis_many, *parts, code, block, int8)
        stacked, offsets = [each[:, None] for each in how], torch.tensor([0, 2, 2, 4], dtype=torch.int32)
        picked = torch.tensor([0, 0, 2, 1, 3], dtype=torch.int32)
        for kind, swiglu in itertools.product(("few", "many", "int8"), (False, True)):
            own = torch.randn(5, width * (1 + swiglu)).to(dtype)
            for its_rows in (None, picked):
                run(OPS.gemm_trellis_experts, own, its_rows, offsets, *stacked, shape, "mul1", block, swiglu, kind)
        ends = torch.tensor([-7, 90, 2, 80], dtype=torch.int32)  # that nobody should give
        picked = torch.tensor([-1, 99, 2, 1, 3], dtype=torch.int32)
        for kind in ("few", "many", "int8"):
            run(OPS.gemm_trellis_experts, x[:5], picked, ends, *stacked, shape, "mul1", block, False, kind)
        for code in trellis.CODES if block == 128 else ():
            run(OPS.dense_trellis, *how, shape, code, dtype)


def trellis_operands(shape: tuple, bits: int, block: int) -> list[torch.Tensor]:
    layout = trellis.TrellisDecoding(bits, block=block).layout(shape).values()
    (_, tiles), (_, inputs), (_, outputs) = layout
    words = torch.randint(-(2**15), 2**15, tiles).short().transpose(-3, -2)
    return [words, torch.randn(inputs).half(), torch.randn(outputs).half()]


def main() -> None:
    widths = [int(bits) for bits in sys.argv[1:]] or cases.BITS
    for bits in widths:
        for shape in SHAPES:
            whole_weights(shape, bits)
            if columns := shape[1] // 8 * 8:  # for others torch copies x first
                for tokens, dtype in itertools.product((1, 2, 8, 16, 17, 300), HALVES):
                    products((shape[0], columns), bits, tokens, dtype)
        for shape, tokens in DIVIDED:
            products(shape, bits, tokens, torch.float16)
        experts(bits)
    if 4 in widths:
        group()
        way_to_experts()
        trellises()
    print("all kernels ran")


if __name__ == "__main__":
    main()
