"""The compiled dequantize gives the numbers of the reference, from planes and from tiles."""

import cases
import pytest
import torch

from hf_kbit import reference

SHAPES = [*cases.SHAPES, (33, 1024), (3, 4096), (200, 96), (16, 40), (40, 24)]
DTYPES = [*cases.FLOATS, torch.float64]


@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 3, 5, 40)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_numbers(device, shape, bits, dtype, tiled, poison):
    packed, codebook = cases.random_packed(shape, bits), cases.codebook(bits)
    expected = reference.dequantize(*packed, codebook, list(shape[-2:]), dtype)
    words = reference.repack(*packed, bits, list(shape[-2:])) if tiled else packed
    on_device = [tensor.to(device) for tensor in (*words, codebook)]
    poison(device, expected.nbytes)
    found = torch.ops.hf_kbit.dequantize(*on_device, list(shape[-2:]), dtype)
    assert found.dtype == dtype and found.is_contiguous()
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("bits", cases.BITS)
def test_overflow_in_float16_is_infinite(device, bits):
    packed, codebook = cases.random_packed((16, 256), bits), cases.codebook(bits) * 2.0**14
    expected = reference.dequantize(*packed, codebook, [16, 256], torch.float16)
    assert expected.isinf().any()
    found = torch.ops.hf_kbit.dequantize(*(t.to(device) for t in (*packed, codebook)), [16, 256], torch.float16)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("nan", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001])
@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_levels_stay_nan(device, dtype, bits, nan):
    """Whatever its bits are: rounded to bfloat16 like a number, a NaN may carry over into zero."""
    packed, codebook = cases.random_packed((3, 45), bits), cases.codebook(bits)
    codebook.view(torch.int32)[1] = nan - (nan >> 31 << 32)
    expected = reference.dequantize(*packed, codebook, [3, 45], dtype)
    assert expected.isnan().any()
    found = torch.ops.hf_kbit.dequantize(*(t.to(device) for t in (*packed, codebook)), [3, 45], dtype)
    assert torch.allclose(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
@pytest.mark.parametrize("bits", cases.BITS)
def test_words_that_start_anywhere(device, bits, tiled):
    """Contiguous, but not aligned to the 16 bytes that a GPU reads at once."""
    packed, codebook = cases.random_packed((32, 512), bits), cases.codebook(bits)
    expected = reference.dequantize(*packed, codebook, [32, 512], torch.float32)
    if tiled:
        packed = reference.repack(*packed, bits, [32, 512])
    moved = [torch.cat([t.flatten()[:1], t.flatten()]).to(device)[1:].view(t.shape) for t in packed]
    assert all(tensor.is_contiguous() and tensor.data_ptr() % 16 for tensor in moved)
    found = torch.ops.hf_kbit.dequantize(*moved, codebook.to(device), [32, 512], torch.float32)
    assert torch.equal(found.cpu(), expected)
