"""Runs every CUDA kernel once at odd sizes, for NVIDIA's compute-sanitizer:

    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/csrc/sanitize.py [BITS ...]
    done

Widths that are named run alone, so that several processes can share the work.

Of gemm_wgmma_kernel and experts_wgmma_kernel racecheck reports the slabs, and of gradient_wgmma_kernel the weights,
without reason: a warp's lanes read them, then, behind a __syncwarp, of which no instruction is left for the tool to
see, lane 0 tells the barrier that those who bring the next ones wait for. With every lane telling it for itself, an
experiment, the report of the gradient's weights is gone. That of the slabs stays: bulk copies bring them, asked for by
another warp, and only of those that the reading warp asks for, as gemm_kernel's, the tool sees what they wait for.

Inputs are made on the CPU and outputs are compared there: torch's own kernels take no part.
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

from hf_kbit import reference

OPS = torch.ops.hf_kbit
# The last one makes every warp of an H200 go round its loop more than once.
SHAPES = [(1, 1), (7, 33), (17, 257), (33, 320), (48, 1024), (3400, 1056)]
# With as many tokens divided along K among the CTAs of clusters on an H200, and more row tiles than warps; of the last
# one the CTAs divide the slabs of the last tiles.
DIVIDED = [((3072, 2048), 5), ((30_000, 264), 16), ((3072, 2048), 60), ((4096, 1024), 120), ((512, 512), 250)]
DIVIDED += [((1280, 8192), 250)]


def same(found, expected) -> None:
    found, expected = (value if isinstance(value, tuple) else (value,) for value in (found, expected))
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, expected, strict=True))


def product(planes, shape, bits, codebook, x) -> None:
    tiles = reference.repack(*planes, bits, list(shape))
    on_gpu = [tensor.cuda() for tensor in (x, *tiles, codebook)]
    dense = reference.dequantize(*planes, codebook, list(shape), torch.float32)
    roundings = 1 if len(x) <= 16 else 2
    cases.assert_product(OPS.gemm(*on_gpu, None, shape[0]).cpu(), x, dense.T, roundings=roundings)
    columns, stored = cases.columns(shape[1]), cases.stored(*planes, codebook, signed=True)
    found = OPS.gemm(*on_gpu, None, shape[0], columns.cuda(), True)
    cases.assert_product(found.cpu(), x, stored.T, None, roundings, columns, True)
    if shape[0] % 8 == 0:  # others are copied by torch first
        grad = cases.x((len(x),), shape[0], x.dtype, seed=1) * 2.0**-6
        found = OPS.gemm_gradient(grad.cuda(), *on_gpu[1:], list(shape))
        cases.assert_product(found.cpu(), grad, dense, roundings=2)
        found = OPS.gemm_gradient(grad.cuda(), *on_gpu[1:], list(shape), columns.cuda(), True).cpu()
        turned = reference.dequantize(*planes, codebook, list(shape), torch.float32, columns, True)
        expected = grad.float() @ turned
        assert (found - expected).abs().max() <= 2e-2 * expected.abs().max()


def group() -> None:
    """Several weights of 4 bits in one launch, each with its own transform."""
    rows, columns, codebook = [40, 700, 17], 520, cases.codebook(4)
    planes = [cases.random_packed((part, columns), 4) for part in rows]
    tiles = [reference.repack(*packed, 4, [part, columns]) for packed, part in zip(planes, rows, strict=True)]
    words, scales = ([tensor.cuda() for tensor in column] for column in zip(*tiles, strict=True))
    of_columns = [None, cases.columns(columns), cases.columns(columns, seed=1)]
    on_gpu = [None, *(tensor.cuda() for tensor in of_columns[1:])]
    for x in (cases.x((tokens,), columns, torch.bfloat16) for tokens in (1, 16)):
        rest = [codebook.cuda()] * 3, [None] * 3, rows, on_gpu, [0, 0, 1]
        products = OPS.gemm_group(x.cuda(), words, scales, *rest)
        for found, packed, its_columns in zip(products, planes, of_columns, strict=True):
            rotated = its_columns is of_columns[2]
            stored = cases.stored(*packed, codebook, rotated)[:, : None if rotated else columns]
            cases.assert_product(found.cpu(), x, stored.T, columns=its_columns, rotated=rotated)


# Experts, shape, rows: a row by itself, some of each expert together; then one tile for each, groups that meet after
# each of several tiles, several tiles of tokens.
EXPERTS = [
    (8, (100, 328), 3),
    (130, (48, 520), 300),
    (16, (48, 520), 300),
    (3, (3072, 1024), 40),
    (2, (300, 768), 900),
]


def experts(bits: int) -> None:
    """Some rows are nobody's; each is one of ten."""
    codebook = cases.codebook(bits) * 2.0**-6
    for (count, shape, rows), dtype in itertools.product(EXPERTS, (torch.float16, torch.bfloat16)):
        planes = cases.random_packed((count, *shape), bits)
        tiles = reference.repack(*planes, bits, list(shape))
        x, bias, columns = cases.x((10,), shape[1], dtype), cases.x((count,), shape[0], dtype), cases.columns(shape[1])
        index = torch.randint(0, 10, (rows,), generator=cases.generator(rows)).int()
        offsets = torch.arange(count + 1).mul(rows - 1).div(count, rounding_mode="floor").int()
        on_gpu = [tensor.cuda() for tensor in (x, *tiles, codebook, bias, index, offsets)]
        found = OPS.gemm_experts(*on_gpu, shape[0], columns.cuda(), True).cpu()
        stored = cases.stored(*planes, codebook, signed=True)
        for expert, (first, end) in enumerate(itertools.pairwise(offsets.tolist())):
            inputs = x[index[first:end].long()]
            cases.assert_product(found[first:end], inputs, stored[expert].T, bias[expert], 2, columns, True)
        assert not found[rows - 1 :].any()
        both = cases.x((10,), 2 * shape[1], dtype)
        gate, up = both.float().chunk(2, dim=-1)
        on_gpu[0] = (torch.nn.functional.silu(gate) * up).to(dtype).cuda()
        expected = OPS.gemm_experts(*on_gpu, shape[0], columns.cuda(), True).cpu().float()
        found = OPS.gemm_experts(both.cuda(), *on_gpu[1:], shape[0], columns.cuda(), True, True).cpu().float()
        assert (found - expected).abs().max() <= 8 * cases.EPS[dtype] * expected.abs().max()


def way_to_experts() -> None:
    """And back: few numbers, some, more than are put in order in shared memory."""
    for tokens, count in ((5, 8), (700, 130), (40_000, 8)):
        ids = torch.randint(-1, count + 1, (tokens, 2), generator=cases.generator(tokens))
        way = reference.route_experts(ids, count)
        same(OPS.route_experts(ids.cuda(), count), way)
        y, weights = cases.x((2 * tokens,), 35), cases.x((tokens,), 2, seed=1)
        found = OPS.combine_experts(y.cuda(), way[1].cuda(), weights.cuda()).cpu()
        torch.testing.assert_close(found, reference.combine_experts(y, way[1], weights))


def main() -> None:
    widths = [int(bits) for bits in sys.argv[1:]] or cases.BITS
    for shape in SHAPES:
        for bits in widths:
            codebook = cases.codebook(bits)
            for dtype in cases.FLOATS:
                weight = cases.weight(shape, dtype)
                for search, signed in itertools.product((False, True), repeat=2):
                    found = OPS.quantize(weight.cuda(), codebook.cuda(), search, signed)
                    same(found, reference.quantize(weight, codebook, search, signed))
            crowded = torch.cat([torch.linspace(0.5, 0.5001, 2**bits - 1), torch.tensor([-1.0])]).sort().values
            same(OPS.quantize(weight.cuda(), crowded.cuda()), reference.quantize(weight, crowded))
            planes = cases.random_packed(shape, bits)
            tiles = reference.repack(*planes, bits, list(shape))
            same(OPS.repack(*(t.cuda() for t in planes), bits, list(shape)), tiles)
            same(OPS.repack(*(t.cuda() for t in tiles), bits, list(shape), True), planes)
            some = torch.arange(0, 2 * shape[0], 3) % shape[0]
            for dtype in (*cases.FLOATS, torch.float64):
                expected = reference.dequantize(*planes, codebook, list(shape), dtype)
                of_columns = cases.columns(shape[1])
                turned = reference.dequantize(*planes, codebook, list(shape), dtype, of_columns, True)
                for packed in (planes, tiles):
                    on_gpu = [tensor.cuda() for tensor in (*packed, codebook)]
                    same(OPS.dequantize(*on_gpu, list(shape), dtype), expected)
                    same(OPS.dequantize(*on_gpu, list(shape), dtype, of_columns.cuda(), True), turned)
                    for indices in (some, some.int()):
                        found = OPS.embed(indices.cuda(), *on_gpu, list(shape), dtype)
                        same(found, expected[some])
                        found = OPS.embed(indices.cuda(), *on_gpu, list(shape), dtype, of_columns.cuda(), True)
                        same(found, turned[some])
            columns = shape[1] // 8 * 8  # for others torch copies x first
            if columns > 0:
                packed = reference.quantize(weight[:, :columns], codebook)
                for dtype, tokens in itertools.product((torch.float16, torch.bfloat16), (1, 2, 8, 16, 17, 300)):
                    product(packed, (shape[0], columns), bits, codebook, cases.x((tokens,), columns, dtype))
    for bits, (shape, tokens) in itertools.product(widths, DIVIDED):
        planes = cases.random_packed(shape, bits)
        product(planes, shape, bits, cases.codebook(bits), cases.x((tokens,), shape[1], torch.float16) * 2.0**-6)
    for bits in widths:
        experts(bits)
    if 4 in widths:
        group()
        way_to_experts()
    print("all kernels ran, with the reference's results")


if __name__ == "__main__":
    main()
