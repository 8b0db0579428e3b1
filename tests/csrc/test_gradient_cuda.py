"""The gradient of activations on a GPU, for tiles: exact values, all ways to divide it, transforms, graphs, streams.

On Hopper one kernel multiplies by the packed weight up to a number of tokens that depends on the weight; beyond, and
on other GPUs, some columns at a time are decoded first. Results have the same bounds."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cases
import pytest
import torch

from hf_kbit import reference
from hf_kbit.ops import native

OPS = torch.ops.hf_kbit
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not native.library("cuda").loaded, reason=f"CUDA library: {native.library('cuda').missing}"),
]
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
SHAPES = pytest.mark.parametrize(
    "shape",
    # Fewer rows than a piece of 64; the last row tile, slab or block not full; CTAs that divide the rows of tiles;
    # more tiles than processors; tiles of 1000 tokens that fill an H200, so that the kernel takes them.
    [
        (16, 256),
        (35, 1000),
        (130, 300),
        (520, 8),
        (1000, 1096),
        (5000, 1100),
        (3072, 8192),
        (70_000, 264),
        (48, 14336),
        (200, 4090),
    ],
    ids=str,
)


def is_hopper() -> bool:
    return native.cuda_arch() == 900


@pytest.fixture(autouse=True)
def sums_in_float32(monkeypatch):
    """Where cuBLAS multiplies, it adds up in float32."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)


@pytest.mark.parametrize("bits", cases.BITS)
@HALVES
@pytest.mark.parametrize("shape", [(16, 256), (35, 1000), (130, 513), (400, 136)], ids=str)
def test_one_hot_gradients_read_the_weight(shape, bits, dtype):
    """Every weight by itself: a level in the dtype of the gradient, times its scale, rounded once."""
    if not is_hopper():
        pytest.skip("dequantized: float32 levels, not rounded ones")
    tiles, planes = cases.tiles_on_gpu(shape, bits)
    codebook = torch.randn(2**bits, generator=cases.generator(bits)).sort().values.cuda()
    expected = reference.dequantize(*planes, codebook.to(dtype).float(), list(shape), torch.float32).to(dtype)
    found = OPS.gemm_gradient(torch.eye(shape[0], dtype=dtype, device="cuda"), *tiles, codebook, list(shape))
    if dtype is torch.float16:  # rounded before, with more range: twice where float16 loses digits
        few_digits = expected.abs() < 2.0**-14
        assert ((found - expected).abs() <= 2.0**-24)[few_digits].all()
        found = torch.where(few_digits, expected, found)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("bits", cases.BITS)
@HALVES
@SHAPES
def test_products(shape, bits, dtype, poison):
    tiles, planes = cases.tiles_on_gpu(shape, bits)
    codebook = cases.codebook(bits).cuda() * 2.0**-6
    dense = reference.dequantize(*planes, codebook, list(shape), torch.float32)
    for tokens in (1, 7, 60, 256, 300, 1000, 1030):
        grad = cases.x((tokens,), shape[0], dtype).cuda()
        poison("cuda", tokens * shape[1] * 2)
        found = OPS.gemm_gradient(grad, *tiles, codebook, list(shape))
        cases.assert_product(found, grad, dense, roundings=2)
        assert torch.equal(found, OPS.gemm_gradient(grad, *tiles, codebook, list(shape)))


@pytest.mark.parametrize(("scaled", "rotated"), cases.TRANSFORMS, ids=["columns", "rotated", "both"])
@pytest.mark.parametrize("bits", cases.BITS)
@HALVES
@SHAPES
def test_products_of_transformed_weights(shape, bits, dtype, scaled, rotated, poison):
    """The product in the stored basis is rounded to 16 bits, then turned back in float32."""
    columns = cases.columns(shape[1]).cuda() if scaled else None
    padded = (shape[0], -(-shape[1] // 32) * 32) if rotated else shape
    tiles, planes = cases.tiles_on_gpu(padded, bits)
    codebook = cases.codebook(bits).cuda() * 2.0**-6
    stored = cases.stored(*planes, codebook, rotated)[:, : padded[1]].double().abs()
    exact = OPS.dequantize(*tiles, codebook, list(shape), torch.float64, columns, rotated)
    for tokens in (1, 60, 300, 1000, 1030):
        grad = cases.x((tokens,), shape[0], dtype).cuda()
        poison("cuda", tokens * shape[1] * 2)
        found = OPS.gemm_gradient(grad, *tiles, codebook, list(shape), columns, rotated)
        expected = grad.double() @ exact
        # Weights rounded twice, N + 1 terms in float32, the sum rounded; then 7 operations of float32, rounded once.
        relative = 1.5 * cases.EPS[dtype] + (shape[0] + 8) * cases.EPS[torch.float32]
        bound = grad.double().abs() @ stored * relative
        if rotated:
            blocks = bound.unflatten(-1, (-1, 32))
            bound = (blocks.sum(-1, keepdim=True) * 32**-0.5).expand_as(blocks).flatten(-2)[:, : shape[1]]
        if scaled:
            bound = bound * reference.decode_e4m4(columns).double()
        assert ((found.double() - expected).abs() <= bound + expected.abs() * cases.EPS[dtype] + 1e-30).all()


@pytest.mark.parametrize("bits", cases.BITS)
def test_fused_where_it_is_planned(bits):
    """One kernel, or two where the rows of tiles are divided; nothing of the weight is decoded to memory."""
    if not is_hopper():
        pytest.skip("dequantized")
    for shape, tokens, expected in (
        ((4096, 1024), 100, {"gradient_wgmma_kernel", "add_gradient_parts_kernel"}),
        ((4096, 4096), 1000, {"gradient_wgmma_kernel"} if bits < 5 else {"dequantize_tiles_kernel"}),
        ((4096, 1024), 2560, {"dequantize_tiles_kernel"}),
    ):
        tiles, _ = cases.tiles_on_gpu(shape, bits)
        codebook = cases.codebook(bits).cuda()
        grad = cases.x((tokens,), shape[0], torch.bfloat16).cuda()
        kernels = set(cases.launched(partial(OPS.gemm_gradient, grad, *tiles, codebook, list(shape))))
        ours = {"gradient_wgmma_kernel", "add_gradient_parts_kernel", "dequantize_tiles_kernel"}
        assert kernels & ours == expected, kernels


@HALVES
def test_gradients_and_weights_anywhere_in_memory(dtype):
    shape = (200, 300)
    tiles, planes = cases.tiles_on_gpu(shape, 3)
    codebook = cases.codebook(3).cuda()
    dense = reference.dequantize(*planes, codebook, list(shape), torch.float32)
    flat = cases.x((), 41 * 200 + 1, dtype).cuda()
    grad = flat[1:].view(41, 200)
    cases.assert_product(OPS.gemm_gradient(grad, *tiles, codebook, list(shape)), grad, dense, roundings=2)
    moved = [torch.cat([part.flatten()[:1], part.flatten()])[1:].view(part.shape) for part in tiles]
    found = OPS.gemm_gradient(grad, *moved, codebook, list(shape))
    assert torch.equal(found, OPS.gemm_gradient(grad, *tiles, codebook, list(shape)))


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
@pytest.mark.parametrize("tokens", [45, 300])
def test_infinity_and_nan_stay_in_their_token(special, tokens):
    shape = (320, 500)
    tiles, _ = cases.tiles_on_gpu(shape, 4)
    codebook = cases.codebook(4).cuda()
    grad = cases.x((tokens,), shape[0], torch.bfloat16).cuda()
    expected = OPS.gemm_gradient(grad, *tiles, codebook, list(shape))
    spoilt = grad.clone()
    spoilt[3, 100] = special
    found = OPS.gemm_gradient(spoilt, *tiles, codebook, list(shape))
    others = torch.arange(tokens, device="cuda") != 3
    assert torch.equal(found[others], expected[others]) and not found[3].isfinite().any()


@pytest.mark.parametrize("tokens", [20, 300])
def test_threads_that_have_not_used_the_gpu(tokens):
    """As those in which autograd runs: what a launch takes needs no call of the CUDA runtime before it."""
    tiles, _ = cases.tiles_on_gpu((512, 768), 4)
    codebook = cases.codebook(4).cuda()
    inputs = [cases.x((tokens,), columns, torch.bfloat16).cuda() for columns in (512, 768)]

    def both():
        return OPS.gemm_gradient(inputs[0], *tiles, codebook, [512, 768]), OPS.gemm(
            inputs[1], *tiles, codebook, None, 512
        )

    expected = both()
    both()  # the allocator keeps the memory of these, so that threads need not ask for any
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(both).result()
        assert all(torch.equal(ours, alone) for ours, alone in zip(found, expected, strict=True))
        del found


@pytest.mark.parametrize("tokens", [60, 700])  # of which rows of tiles are divided, and not
def test_graph_replays_and_streams(tokens):
    shape, columns = (4096, 5632), cases.columns(5632).cuda()
    tiles, _ = cases.tiles_on_gpu(shape, 2)
    codebook = cases.codebook(2).cuda() * 2.0**-6
    inputs = [cases.x((tokens,), shape[0], torch.float16, seed=i).cuda() * 2.0**-6 for i in range(6)]

    def run(grad):
        return OPS.gemm_gradient(grad, *tiles, codebook, list(shape), columns, True)

    expected = [run(grad) for grad in inputs]
    held = inputs[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(held)
    for grad, alone in zip(inputs, expected, strict=True):
        held.copy_(grad)
        graph.replay()
        assert torch.equal(found, alone)
    streams, outputs = [torch.cuda.Stream() for _ in inputs], [[] for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(10):
        for grad, stream, kept in zip(inputs, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                kept.append(run(grad))
    torch.cuda.synchronize()
    for kept, alone in zip(outputs, expected, strict=True):
        assert all(torch.equal(output, alone) for output in kept)
