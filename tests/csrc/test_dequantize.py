"""The compiled dequantize gives the numbers of the reference: of planes, of tiles, and in the original basis."""

import cases
import pytest
import torch
from compiled import FORMS, OPS, TRANSFORMS, to

from hf_kbit.format import reference

SHAPES = [*cases.SHAPES, (33, 1024), (3, 4096), (200, 96), (16, 40), (40, 24), (2, 3, 5, 40)]
DTYPES = [*cases.FLOATS, torch.float64]


@TRANSFORMS
@FORMS
@pytest.mark.parametrize("bits", cases.BITS)
def test_same_numbers(device, bits, tiled, scaled, rotated, poison):
    """Of any words, scales and column scales, all roundings included."""
    for shape in SHAPES:
        packed, codebook, matrix = cases.random_packed(shape, bits), cases.codebook(bits), list(shape[-2:])
        columns = cases.random_packed((32, 32 * shape[-1]), 2)[1][0] if scaled else None
        words = reference.repack(*packed, bits, matrix) if tiled else packed
        on_device = to(device, *words, codebook)
        for dtype in DTYPES:
            expected = reference.dequantize(*packed, codebook, matrix, dtype, columns, rotated)
            poison(device, expected.nbytes)
            found = OPS.dequantize(*on_device, matrix, dtype, *to(device, columns), rotated)
            assert found.dtype == dtype and found.is_contiguous()
            assert torch.equal(found.cpu(), expected), (shape, dtype)


@pytest.mark.parametrize("bits", cases.BITS)
def test_overflow_in_float16_is_infinite(device, bits):
    packed, codebook = cases.random_packed((16, 256), bits), cases.codebook(bits) * 2.0**14
    expected = reference.dequantize(*packed, codebook, [16, 256], torch.float16)
    assert expected.isinf().any()
    assert torch.equal(OPS.dequantize(*to(device, *packed, codebook), [16, 256], torch.float16).cpu(), expected)


@pytest.mark.parametrize("nan", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
@pytest.mark.parametrize("bits", cases.BITS)
def test_nan_levels_stay_nan(device, bits, nan):
    """Whatever its bits are: rounded to bfloat16 like a number, a NaN may carry over into zero."""
    packed, codebook = cases.random_packed((3, 45), bits), cases.codebook(bits)
    codebook.view(torch.int32)[1] = nan - (nan >> 31 << 32)
    for dtype in DTYPES:
        expected = reference.dequantize(*packed, codebook, [3, 45], dtype)
        assert expected.isnan().any()
        found = OPS.dequantize(*to(device, *packed, codebook), [3, 45], dtype)
        assert torch.allclose(found.cpu(), expected, rtol=0, atol=0, equal_nan=True), dtype
