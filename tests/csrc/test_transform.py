"""Compiled ops on weights with column scales, rotated or both: decoded bit for bit, products against float64."""

import cases
import pytest
import torch

from hf_kbit import reference

OPS = torch.ops.hf_kbit
BOTH = pytest.mark.parametrize(("scaled", "rotated"), cases.TRANSFORMS, ids=["columns", "rotated", "both"])
FORMS = pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])


def to(device, *tensors):
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def as_form(packed, bits, shape, tiled):
    return reference.repack(*packed, bits, list(shape[-2:])) if tiled else packed


def assert_gemm(device, x, shape, bits, scaled, rotated, tiled, bias=None):
    columns = cases.columns(shape[1], scaled)
    *packed, codebook = cases.quantized(shape, bits, columns=columns, rotated=rotated)
    stored = cases.stored(*packed, codebook, rotated)[:, : None if rotated else shape[1]]
    inputs = to(device, x, *as_form(packed, bits, shape, tiled), codebook, bias)
    found = OPS.gemm(*inputs, shape[0], *to(device, columns), rotated)
    assert found.dtype == x.dtype and found.shape == (*x.shape[:-1], shape[0]) and found.is_contiguous()
    rounded_levels = tiled and device != "cpu" and x.itemsize == 2
    cases.assert_product(found.cpu(), x, stored.T, bias, 1 + rounded_levels, columns, rotated)


@BOTH
@FORMS
@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", [*cases.SHAPES, (3, 4096), (2, 3, 5, 40)], ids=str)
def test_decoded_to_the_numbers_of_the_reference(device, shape, bits, tiled, scaled, rotated, poison):
    """Of any words, scales and column scales, in the original basis, all roundings included."""
    packed, codebook = cases.random_packed(shape, bits), cases.codebook(bits)
    columns = cases.random_packed((32, 32 * shape[-1]), 2)[1][0] if scaled else None
    on_device = to(device, *as_form(packed, bits, shape, tiled), codebook)
    for dtype in (*cases.FLOATS, torch.float64):
        expected = reference.dequantize(*packed, codebook, list(shape[-2:]), dtype, columns, rotated)
        poison(device, expected.nbytes)
        found = OPS.dequantize(*on_device, list(shape[-2:]), dtype, *to(device, columns), rotated)
        assert found.dtype == dtype and found.is_contiguous()
        assert torch.equal(found.cpu(), expected)


@BOTH
@FORMS
@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("bits", cases.BITS)
def test_products_of_every_number_of_tokens(device, bits, dtype, tiled, scaled, rotated, poison):
    shape = (35, 1000)
    for tokens in (1, 2, 5, 16, 17, 33, 70):
        x, bias = cases.x((tokens,), shape[1], dtype), cases.x((), shape[0], dtype)
        poison(device, tokens * shape[0] * x.itemsize)
        assert_gemm(device, x, shape, bits, scaled, rotated, tiled, bias)


@BOTH
@FORMS
@pytest.mark.parametrize("shape", [*cases.SHAPES, (48, 2048)], ids=str)
def test_products_of_every_shape(device, shape, tiled, scaled, rotated):
    """Where K is no multiple of 32, the last block of a rotated row has numbers beyond it, which count too."""
    for dtype in cases.FLOATS:
        for tokens in (1, 6, 40):
            assert_gemm(device, cases.x((tokens,), shape[1], dtype), shape, 3, scaled, rotated, tiled)


@BOTH
@pytest.mark.parametrize("batch", cases.BATCHES, ids=str)
def test_leading_dimensions_and_strides(device, batch, scaled, rotated):
    for dtype in (torch.float32, torch.bfloat16):
        x = cases.x(batch, 100, dtype)
        assert_gemm(device, x, (7, 100), 3, scaled, rotated, False)
        assert_gemm(device, torch.stack([x, x + 1], dim=-1)[..., 0], (7, 100), 3, scaled, rotated, False)
    many = cases.x((100, 20), 3).permute(2, 1, 0)
    assert_gemm(device, many, (7, 100), 3, scaled, rotated, False)


@BOTH
def test_float64(device, scaled, rotated):
    columns = cases.columns(100, scaled)
    *packed, codebook = cases.quantized((35, 100), 3, columns=columns, rotated=rotated)
    dense = reference.dequantize(*packed, codebook, [35, 100], torch.float64, columns, rotated)
    for tokens in (1, 33):
        x, bias = cases.x((tokens,), 100, torch.float64), cases.x((), 35, torch.float64)
        found = OPS.gemm(*to(device, x, *packed, codebook, bias), 35, *to(device, columns), rotated)
        torch.testing.assert_close(found.cpu(), torch.nn.functional.linear(x, dense, bias))


def assert_gradient(device, shape, tiled, scaled, rotated):
    columns, codebook = cases.columns(shape[1], scaled), cases.codebook(3)
    packed = cases.random_packed(shape, 3)
    grad = cases.x((2,), shape[0], torch.float64)
    expected = grad @ reference.dequantize(*packed, codebook, list(shape), torch.float64, columns, rotated)
    inputs = to(device, grad, *as_form(packed, 3, shape, tiled), codebook)
    found = OPS.gemm_gradient(*inputs, list(shape), *to(device, columns), rotated)
    torch.testing.assert_close(found.cpu(), expected)


@BOTH
@FORMS
def test_gradients(device, tiled, scaled, rotated):
    assert_gradient(device, (7, 33), tiled, scaled, rotated)


@FORMS
def test_gradients_of_a_large_layer(device, tiled):
    """In slices of 256 columns, each with its own scales; the last one ends within a block."""
    assert_gradient(device, (20_000, 300), tiled, scaled=True, rotated=True)


@pytest.mark.parametrize("tokens", [3, 40])
@FORMS
def test_products_of_one_input_each_with_its_own_transform(device, tokens, tiled):
    x, products = cases.x((tokens,), 100, torch.bfloat16).to(device), []
    for rows, (scaled, rotated) in zip((48, 17, 33, 16), [(False, False), *cases.TRANSFORMS], strict=True):
        columns = cases.columns(100, scaled, seed=rows)
        *packed, codebook = cases.quantized((rows, 100), 3, columns=columns, rotated=rotated)
        packed = as_form(packed, 3, (rows, 100), tiled)
        products.append([*to(device, *packed, codebook), None, rows, *to(device, columns), rotated])
    *of_each, rotated = map(list, zip(*products, strict=True))
    found = OPS.gemm_group(x, *of_each, list(map(int, rotated)))
    for ours, product in zip(found, products, strict=True):
        assert torch.equal(ours, OPS.gemm(x, *product))


@pytest.mark.parametrize("rotated", [False, True])
def test_columns_of_any_strides(device, rotated):
    columns = cases.columns(100)
    *packed, codebook = to(device, *cases.quantized((7, 100), 3, columns=columns, rotated=rotated))
    strided = torch.stack([columns, columns + 1], dim=-1).to(device)[:, 0]
    columns = columns.to(device)
    for x in (cases.x((2,), 100).to(device), cases.x((40,), 100).to(device)):
        found, expected = (OPS.gemm(x, *packed, codebook, None, 7, c, rotated) for c in (strided, columns))
        assert torch.equal(found, expected)
    found, expected = (
        OPS.dequantize(*packed, codebook, [7, 100], torch.float32, c, rotated) for c in (strided, columns)
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("message", "change"),
    {
        "columns: found dtype float32, expected uint8": lambda columns: columns.float(),
        r"columns: found shape \[99\], expected \[100\]": lambda columns: columns[1:],
        r"columns: found shape \[128\], expected \[100\]": lambda columns: columns.repeat(2)[:128],
        r"columns: found shape \[1, 100\], expected \[100\]": lambda columns: columns[None],
    }.items(),
)
def test_refuses(device, message, change, rotated):
    *packed, codebook = to(device, *cases.quantized((35, 100), 3))
    columns, x = change(cases.columns(100)).to(device), cases.x((2,), 100).to(device)
    calls = [
        lambda: OPS.dequantize(*packed, codebook, [35, 100], torch.float32, columns, rotated),
        lambda: OPS.gemm(x, *packed, codebook, None, 35, columns, rotated),
        lambda: OPS.gemm_gradient(cases.x((2,), 35).to(device), *packed, codebook, [35, 100], columns, rotated),
        lambda: OPS.gemm_group(x, *([t] for t in (*packed, codebook)), [None], [35], [columns], [int(rotated)]),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("missing", [0, 1])
def test_refuses_lists_of_other_lengths(device, missing):
    *packed, codebook = to(device, *cases.quantized((35, 100), 3))
    lists = [[None], [0]]
    lists[missing] = []
    with pytest.raises(ValueError, match="weights: found 1, expected as many of each argument but x"):
        OPS.gemm_group(cases.x((2,), 100).to(device), *([t] for t in (*packed, codebook)), [None], [35], *lists)
