"""What the compiled ops make of their arguments before a kernel sees them."""

import cases
import pytest
import torch
from compiled import OPS, moved, to

from hf_kbit.format import reference


@pytest.mark.parametrize("shape", [(17, 257), (32, 512)], ids=str)
@pytest.mark.parametrize("bits, dtype", [*zip(cases.BITS, [*cases.FLOATS, torch.float32], strict=True)])
def test_numbers_that_start_anywhere(device, bits, dtype, shape):
    """Right on x86 in any case; built with ``-fsanitize=alignment``, it reports where a kernel reads such a number."""
    codebook, weight, packed = cases.codebook(bits), cases.weight(shape, dtype), cases.random_packed(shape, bits)
    tiles, indices = reference.repack(*packed, bits, shape), torch.tensor([[16, 0], [3, 3]])

    def shifted(*tensors):
        return map(moved, to(device, *tensors))

    def assert_same(found, expected):
        assert len(found) == len(expected) and all(map(torch.equal, to("cpu", *found), expected))

    assert_same(OPS.quantize(*shifted(weight, codebook), False), reference.quantize(weight, codebook))
    assert_same(OPS.repack(*shifted(*packed), bits, shape), tiles)
    assert_same(OPS.repack(*shifted(*tiles), bits, shape, True), packed)
    decoded = reference.dequantize(*packed, codebook, shape, dtype)
    for words in (packed, tiles):
        assert_same([OPS.dequantize(*shifted(*words, codebook), shape, dtype)], [decoded])
        for some in (indices, indices.int()):
            assert_same([OPS.embed(*shifted(some, *words, codebook), shape, dtype)], [decoded[indices]])
    if device == "cpu":  # where they start, cuBLAS may add up otherwise
        how, bias = [*packed, codebook], cases.x((), shape[0], dtype)
        for tokens in (1, 3, 40):
            x, grad = cases.x((tokens,), shape[1], dtype), cases.x((tokens,), shape[0], dtype)
            assert_same([OPS.gemm(*shifted(x, *how, bias), shape[0])], [OPS.gemm(x, *how, bias, shape[0])])
            assert_same([OPS.gemm_gradient(*shifted(grad, *how), shape)], [OPS.gemm_gradient(grad, *how, shape)])


@pytest.mark.parametrize("rotated", [False, True])
def test_columns_of_any_strides(device, rotated):
    columns = cases.columns(100)
    *packed, codebook = to(device, *cases.quantized((7, 100), 3, columns=columns, rotated=rotated))
    strided = torch.stack([columns, columns + 1], dim=-1).to(device)[:, 0]
    calls = [lambda own: OPS.dequantize(*packed, codebook, [7, 100], torch.float32, own, rotated)]
    for tokens in (2, 40):
        x = cases.x((tokens,), 100).to(device)
        calls.append(lambda own, x=x: OPS.gemm(x, *packed, codebook, None, 7, own, rotated))
    for call in calls:
        assert torch.equal(call(strided), call(columns.to(device)))
