"""The public functions on plain tensors: quantized weights decode near, and all of them compile."""

import cases
import contract
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from hf_kbit.format import spec as format
from hf_kbit.ops import dequantize, embed, gemm, gemm_int8, quantize, repack


@pytest.mark.parametrize("bits", cases.BITS)
def test_decoded_weights_are_near(bits):
    for shape in [*cases.SHAPES, (2, 3, 5, 40)]:
        weight, codebook = cases.weight(shape), cases.codebook(bits)
        planes, absmax = quantize(weight, codebook)
        assert planes.shape == (*shape[:-2], *format.weight_shape(*shape[-2:], bits)) and planes.dtype == torch.int32
        assert absmax.shape == (*shape[:-2], *format.absmax_shape(*shape[-2:])) and absmax.dtype == torch.uint8
        decoded = dequantize(planes, absmax, codebook, shape[-2:])
        assert decoded.shape == shape and decoded.dtype == torch.float32 and decoded.is_contiguous()
        # A level is never further from a weight than half the widest gap, and the scale is off by 1/32 at most, or by
        # half the smallest subnormal.
        largest = F.pad(weight, (0, -shape[-1] % 32)).unflatten(-1, (-1, 32)).abs().amax(-1)
        bound = largest * ((codebook[1:] - codebook[:-1]).max() / 2 * (1 + 1 / 32) + 1 / 32) + 2.0**-15
        error = (decoded - weight).abs()
        assert (error <= bound.repeat_interleave(32, dim=-1)[..., : shape[-1]]).all()
        for dtype in (*cases.FLOATS, torch.float64):  # rounded once; and seen as float32
            assert torch.equal(dequantize(planes, absmax, codebook, shape[-2:], dtype), decoded.to(dtype))
            if dtype != torch.float64:
                expected = quantize(weight.to(dtype).float(), codebook)
                assert all(map(torch.equal, quantize(weight.to(dtype), codebook), expected))


def test_quantize_again_is_stable():
    """What was decoded is on the grid; quantizing it again keeps every value whose block keeps its scale."""
    planes, absmax, codebook = cases.quantized((64, 256), 4)
    decoded = dequantize(planes, absmax, codebook, (64, 256))
    again = quantize(decoded, codebook)
    same = again[1] == absmax
    assert same.float().mean() > 0.9
    redecoded = dequantize(*again, codebook, (64, 256)).unflatten(1, (-1, 32))
    assert torch.equal(redecoded[same], decoded.unflatten(1, (-1, 32))[same])


def test_compile_fullgraph():
    columns = cases.columns(70)

    def run(x, weight, codebook, bias):
        planes, absmax = quantize(weight, codebook, signed=True)
        dense = dequantize(*repack(planes, absmax, 3, weight.shape), codebook, weight.shape, rotated=True)
        product = gemm(x, planes, absmax, codebook, bias, columns=columns, rotated=True)
        rounded = gemm_int8(x.detach(), planes, absmax, codebook, bias, 17, columns)
        return product + F.linear(x, dense) + gemm(x, planes, absmax, codebook) + rounded

    inputs = cases.x((2, 3), 70).requires_grad_(), cases.weight((17, 70)), cases.codebook(3), cases.x((), 17)
    found, expected = torch.compile(run, fullgraph=True)(*inputs), run(*inputs)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(y.sum(), inputs[0])[0] for y in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("op", [gemm, embed])
def test_compiled_once_for_any_number_of_tokens(op, device):
    """Of tiles, as layers have them on a GPU."""
    words = contract.on(device, [*contract.gemm(4, shape=(17, 70)).forms()[1].arguments.values()][1:4])
    counter = torch._dynamo.testing.CompileCounter()

    def run(tokens):
        if op is embed:
            return embed(tokens, *words, (17, 70))
        return gemm(tokens[:, None].expand(-1, 70).half(), *words, out_features=17)

    compiled = torch.compile(run, backend=counter, dynamic=True, fullgraph=True)
    for count in (5, 3, 9, 70):  # no size of the weight, which would be taken for the same
        tokens = torch.arange(count, device=device) % 17
        torch.testing.assert_close(compiled(tokens), run(tokens))
    assert counter.frame_count == 1
