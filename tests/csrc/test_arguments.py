"""What the compiled ops make of their arguments before a kernel sees them."""

import cases
import pytest
import torch

from hf_kbit import reference

OPS = torch.ops.hf_kbit


def shifted(tensor):
    """The same numbers where none is at a multiple of its size, as in a file that is mapped into memory."""
    data = bytearray(b"?") + tensor.contiguous().view(torch.uint8).numpy().tobytes()
    moved = torch.frombuffer(data, dtype=tensor.dtype, offset=1).view(tensor.shape)
    assert tensor.element_size() == 1 or moved.data_ptr() % tensor.element_size()
    return moved


@pytest.mark.parametrize("bits, dtype", [*zip(cases.BITS, [*cases.FLOATS, torch.float32], strict=True)])
def test_numbers_that_start_at_any_byte(bits, dtype):
    """Right on x86 in any case; built with ``-fsanitize=alignment``, it reports where a kernel reads such a number."""
    codebook, shape = cases.codebook(bits), [17, 257]
    weight, packed = cases.weight(shape, dtype), cases.random_packed(shape, bits)
    tiles = reference.repack(*packed, bits, shape)
    moved, moved_tiles, levels = [*map(shifted, packed)], [*map(shifted, tiles)], shifted(codebook)

    def assert_same(found, expected):
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))

    assert_same(OPS.quantize(shifted(weight), levels, False), reference.quantize(weight, codebook))
    assert_same(OPS.repack(*moved, bits, shape), tiles)
    assert_same(OPS.repack(*moved_tiles, bits, shape, True), packed)
    decoded = reference.dequantize(*packed, codebook, shape, dtype)
    assert_same([OPS.dequantize(*moved, levels, shape, dtype)], [decoded])
    assert_same([OPS.dequantize(*moved_tiles, levels, shape, dtype)], [decoded])
    indices = torch.tensor([[16, 0], [3, 3]])
    assert_same([OPS.embed(shifted(indices), *moved, levels, shape, dtype)], [decoded[indices]])
    assert_same([OPS.embed(shifted(indices.int()), *moved_tiles, levels, shape, dtype)], [decoded[indices]])
    bias = cases.x((), 17, dtype)
    for batch in ((1,), (3,), (40,)):
        x = cases.x(batch, 257, dtype)
        assert_same(
            [OPS.gemm(shifted(x), *moved, levels, shifted(bias), 17)], [OPS.gemm(x, *packed, codebook, bias, 17)]
        )
        grad = cases.x(batch, 17, dtype)
        assert_same(
            [OPS.gemm_gradient(shifted(grad), *moved, levels, shape)],
            [OPS.gemm_gradient(grad, *packed, codebook, shape)],
        )
