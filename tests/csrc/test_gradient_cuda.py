"""The gradient of activations on a GPU, for tiles: exact values, all ways to divide it, transforms, graphs, streams.

On Hopper one kernel multiplies by the packed weight up to a number of tokens that depends on the weight; beyond, and
on other GPUs, some columns at a time are decoded first. Results have the same bounds."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import cases
import pytest
import torch
from compiled import (
    BITS,
    FORMS,
    HALVES,
    NEEDED,
    OPS,
    TRANSFORMS,
    Weight,
    assert_near_in_float16,
    assert_replayed,
    assert_same_on_streams,
    is_hopper,
    random_levels,
    rows_with_special_numbers,
)

from hf_kbit.format import reference

pytestmark = NEEDED


@BITS
@HALVES
@pytest.mark.parametrize("shape", [(16, 256), (35, 1000), (130, 513), (400, 136)], ids=str)
def test_one_hot_gradients_read_the_weight(shape, bits, dtype):
    """Every weight by itself: a level in the dtype of the gradient, times its scale, rounded once."""
    if not is_hopper():
        pytest.skip("dequantized: float32 levels, not rounded ones")
    weight = Weight.random(shape, bits, codebook=random_levels(bits))
    rounded = weight.codebook.to(dtype).float()
    expected = reference.dequantize(*weight.planes, rounded, list(shape), torch.float32).to(dtype)
    assert_near_in_float16(weight.gradient(torch.eye(shape[0], dtype=dtype, device="cuda")), expected)


@TRANSFORMS
@BITS
@HALVES
@pytest.mark.parametrize(
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
def test_products(shape, bits, dtype, scaled, rotated, poison):
    """Of a transformed weight the product in the stored basis is rounded to 16 bits, then turned back in float32."""
    weight = Weight.random(shape, bits, scaled, rotated, cases.codebook(bits).cuda() * 2.0**-6)
    transformed = scaled or rotated
    if transformed:
        how = weight.codebook, list(shape), torch.float64, weight.columns, rotated
        exact, stored = OPS.dequantize(*weight.tiles, *how), weight.stored.double().abs()
    for tokens in (1, 7, 60, 256, 300, 1000, 1030):
        grad = cases.x((tokens,), shape[0], dtype).cuda()
        poison("cuda", tokens * shape[1] * 2)
        found = weight.gradient(grad)
        assert torch.equal(found, weight.gradient(grad))
        if not transformed:
            cases.assert_product(found, grad, weight.stored, roundings=2)
            continue
        expected = grad.double() @ exact
        # Weights rounded twice, N + 1 terms in float32, the sum rounded; then 7 operations of float32, rounded once.
        relative = 1.5 * cases.EPS[dtype] + (shape[0] + 8) * cases.EPS[torch.float32]
        bound = grad.double().abs() @ stored * relative
        if rotated:
            blocks = bound.unflatten(-1, (-1, 32))
            bound = (blocks.sum(-1, keepdim=True) * 32**-0.5).expand_as(blocks).flatten(-2)[:, : shape[1]]
        if scaled:
            bound = bound * reference.decode_e4m4(weight.columns).double()
        assert ((found.double() - expected).abs() <= bound + expected.abs() * cases.EPS[dtype] + 1e-30).all()


@FORMS
@HALVES
def test_in_slices(dtype, tiled):
    """Of columns, the last of which are fewer; strided rows, leading dimensions."""
    weight = Weight.random((70_000, 1100), 3)
    grad = cases.x((2, 2100), 70_000, dtype).cuda()[:, ::2] * 2.0**-8
    found = weight.gradient(grad, tiled)
    assert found.shape == (2, 1050, 1100)
    cases.assert_product(found.flatten(0, 1), grad.flatten(0, 1), weight.stored)


@BITS
def test_fused_where_it_is_planned(bits):
    """One kernel, or two where the rows of tiles are divided; nothing of the weight is decoded to memory."""
    if not is_hopper():
        pytest.skip("dequantized")
    for shape, tokens, expected in (
        ((4096, 1024), 100, {"gradient_wgmma_kernel", "add_gradient_parts_kernel"}),
        ((4096, 4096), 1000, {"gradient_wgmma_kernel"} if bits < 5 else {"dequantize_tiles_kernel"}),
        ((4096, 1024), 2560, {"dequantize_tiles_kernel"}),
    ):
        grad = cases.x((tokens,), shape[0], torch.bfloat16).cuda()
        kernels = set(cases.launched(partial(Weight.random(shape, bits).gradient, grad)))
        ours = {"gradient_wgmma_kernel", "add_gradient_parts_kernel", "dequantize_tiles_kernel"}
        assert kernels & ours == expected, kernels


@HALVES
def test_gradients_and_weights_anywhere_in_memory(dtype):
    weight = Weight.random((200, 300), 3)
    grad = cases.x((), 41 * 200 + 1, dtype).cuda()[1:].view(41, 200)
    found = weight.gradient(grad)
    cases.assert_product(found, grad, weight.stored, roundings=2)
    assert torch.equal(weight.moved().gradient(grad), found)


@pytest.mark.parametrize("tokens", [45, 300])
def test_infinity_and_nan_stay_in_their_token(tokens):
    grad = cases.x((tokens,), 320, torch.bfloat16).cuda()
    assert not rows_with_special_numbers(Weight.random((320, 500), 4).gradient, grad).isfinite().any()


@pytest.mark.parametrize("tokens", [20, 300])
def test_threads_that_have_not_used_the_gpu(tokens):
    """As those in which autograd runs: what a launch takes needs no call of the CUDA runtime before it."""
    weight = Weight.random((512, 768), 4)
    inputs = [cases.x((tokens,), columns, torch.bfloat16).cuda() for columns in weight.shape]

    def both():
        return weight.gradient(inputs[0]), weight.multiply(inputs[1])

    expected = both()
    both()  # the allocator keeps the memory of these, so that threads need not ask for any
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(both).result()
        assert all(map(torch.equal, found, expected))
        del found


@pytest.mark.parametrize("tokens", [60, 700])  # of which rows of tiles are divided, and not
def test_graph_replays_and_streams(tokens):
    weight = Weight.random((4096, 5632), 2, scaled=True, rotated=True, codebook=cases.codebook(2).cuda() * 2.0**-6)
    inputs = [cases.x((tokens,), 4096, torch.float16, seed=i).cuda() * 2.0**-6 for i in range(6)]
    assert_replayed(weight.gradient, [(grad,) for grad in inputs])
    assert_same_on_streams(weight.gradient, inputs, turns=10)
