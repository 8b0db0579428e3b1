"""The compiled products and their gradients against float64, for every number of tokens at which their path changes,
with weights as they are, with column scales, rotated or both."""

import functools

import cases
import pytest
import torch
from compiled import FORMS, OPS, TRANSFORMS, to

from hf_kbit import codebooks
from hf_kbit.format import reference

TOKENS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 70, 256, 257]


@functools.cache
def weight(shape, bits, scaled=False, rotated=False, tiled=False, seed=0):
    """Words, scales, codebook and column scales of a weight in a form, and it itself as it is stored."""
    columns = cases.columns(shape[1], scaled, seed)
    *packed, codebook = cases.quantized(shape, bits, columns=columns, rotated=rotated)
    stored = cases.stored(*packed, codebook, rotated)[:, : None if rotated else shape[1]]
    packed = reference.repack(*packed, bits, list(shape)) if tiled else packed
    return (*packed, codebook, columns), stored


def assert_gemm(device, x, shape, bits, scaled=False, rotated=False, tiled=False, bias=None):
    (*packed, columns), stored = weight(shape, bits, scaled, rotated, tiled)
    found = OPS.gemm(*to(device, x, *packed, bias), shape[0], *to(device, columns), rotated)
    assert found.dtype == x.dtype and found.shape == (*x.shape[:-1], shape[0]) and found.is_contiguous()
    transformed, many = scaled or rotated, x.numel() > 16 * shape[1]
    rounded_levels = tiled and device != "cpu" and x.itemsize == 2 and (transformed or many)
    cases.assert_product(found.cpu(), x, stored.T, bias, 1 + rounded_levels, columns, rotated)


@TRANSFORMS
@FORMS
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("bits", cases.BITS)
def test_every_number_of_tokens(device, bits, dtype, tiled, scaled, rotated, poison):
    shape = (35, 1000)
    for tokens in (1, 2, 5, 16, 17, 33, 70) if scaled or rotated else TOKENS:
        x, bias = cases.x((tokens,), shape[1], dtype), cases.x((), shape[0], dtype)
        poison(device, tokens * shape[0] * x.itemsize)
        assert_gemm(device, x, shape, bits, scaled, rotated, tiled, bias)


@TRANSFORMS
@FORMS
@pytest.mark.parametrize("shape", [*cases.SHAPES, (48, 2048), (3, 4096 + 40)], ids=str)
def test_every_shape(device, shape, tiled, scaled, rotated):
    """Where K is no multiple of 32, the last block of a rotated row has numbers beyond it, which count too."""
    for bits in (3,) if scaled or rotated else cases.BITS:
        for dtype in cases.FLOATS:
            for tokens in (1, 6, 16, 40):
                assert_gemm(device, cases.x((tokens,), shape[1], dtype), shape, bits, scaled, rotated, tiled)


@TRANSFORMS
@pytest.mark.parametrize("batch", cases.BATCHES, ids=str)
def test_leading_dimensions_and_strides(device, batch, scaled, rotated):
    for dtype in (torch.float32, torch.bfloat16):
        x = cases.x(batch, 100, dtype)
        assert_gemm(device, x, (7, 100), 3, scaled, rotated)
        assert_gemm(device, torch.stack([x, x + 1], dim=-1)[..., 0], (7, 100), 3, scaled, rotated)
    assert_gemm(device, cases.x((100, 20), 3).permute(2, 1, 0), (7, 100), 3, scaled, rotated)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("other", [None, 0, 7, 15, 16, 31], ids="{}".format)
def test_levels_that_are_not_antisymmetric(device, other, tokens):
    """At 5 bits a CPU takes half as many look-ups where the upper levels are the lower ones with the other sign."""
    packed, x = cases.random_packed((35, 520), 5), cases.x((tokens,), 520)
    codebook = torch.tensor(codebooks.optimal(5, signed=True)) if other is None else cases.codebook(5)
    if other is not None:
        codebook[other] *= 0.75
    found = OPS.gemm(*to(device, x, *packed, codebook, None), 35)
    cases.assert_product(found.cpu(), x, cases.stored(*packed, codebook, False)[:, :520].T)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@FORMS
@pytest.mark.parametrize("kind", ["tiny", "large", "heavy tails", "zeros", "one-hot"])
def test_kinds_of_input(device, kind, dtype, tiled):
    for tokens in (1, 5, 16, 40):
        x = cases.x((tokens,), 512)
        if kind == "one-hot":
            x = torch.eye(512)[torch.randint(512, (tokens,), generator=cases.generator(tokens))]
        kinds = {"tiny": x * 1e-3, "large": x * 1e3, "heavy tails": x / (x[:, :1].abs() + 1e-3), "zeros": x * 0}
        assert_gemm(device, kinds.get(kind, x).to(dtype), (64, 512), 4, tiled=tiled)


@TRANSFORMS
def test_float64(device, scaled, rotated):
    (*packed, columns), _ = weight((35, 100), 3, scaled, rotated)
    dense = reference.dequantize(*packed, [35, 100], torch.float64, columns, rotated)
    for tokens in (1, 33):
        x, bias = cases.x((tokens,), 100, torch.float64), cases.x((), 35, torch.float64)
        found = OPS.gemm(*to(device, x, *packed, bias), 35, *to(device, columns), rotated)
        torch.testing.assert_close(found.cpu(), torch.nn.functional.linear(x, dense, bias))


@pytest.mark.parametrize("tokens", [1, 40])
def test_large_layer_in_slices(device, tokens):
    """More weights than one slice of the CPU path holds."""
    assert_gemm(device, cases.x((tokens,), 4096), (1100, 4096), 2, bias=cases.x((), 1100))


@pytest.mark.parametrize("tokens", [1, 16, 40])
@FORMS
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_same_result_every_time(device, tokens, tiled, dtype):
    (*packed, _), _ = weight((300, 1000), 3, tiled=tiled)
    arguments = *to(device, cases.x((tokens,), 1000, dtype), *packed, None), 300
    first = OPS.gemm(*arguments)
    assert all(torch.equal(first, OPS.gemm(*arguments)) for _ in range(5))


@TRANSFORMS
@FORMS
@pytest.mark.parametrize("shape", [(7, 33), (20_000, 300)], ids=str)
def test_gradients(device, shape, tiled, scaled, rotated):
    """Of a large layer in slices of 256 columns, each with its own scales; the last one ends within a block."""
    columns, codebook, packed = cases.columns(shape[1], scaled), cases.codebook(3), cases.random_packed(shape, 3)
    grad = cases.x((2,), shape[0], torch.float64)
    expected = grad @ reference.dequantize(*packed, codebook, list(shape), torch.float64, columns, rotated)
    words = reference.repack(*packed, 3, list(shape)) if tiled else packed
    found = OPS.gemm_gradient(*to(device, grad, *words, codebook), list(shape), *to(device, columns), rotated)
    torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("tokens", [3, 40])
@FORMS
def test_products_of_one_input_each_with_its_own_transform(device, tokens, tiled):
    x, products = cases.x((tokens,), 100, torch.bfloat16).to(device), []
    for rows, how in zip((48, 17, 33, 16), [(False, False), *cases.TRANSFORMS], strict=True):
        (*packed, columns), _ = weight((rows, 100), 3, *how, tiled, seed=rows)
        products.append([*to(device, *packed), None, rows, *to(device, columns), how[1]])
    *of_each, rotated = map(list, zip(*products, strict=True))
    found = OPS.gemm_group(x, *of_each, list(map(int, rotated)), [None] * 4)
    for ours, product in zip(found, products, strict=True):
        assert torch.equal(ours, OPS.gemm(x, *product))
