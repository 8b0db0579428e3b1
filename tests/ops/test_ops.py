"""The public functions on plain tensors: their numbers, shapes and strides, on CPUs, GPUs and when compiled."""

import cases
import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

from hf_kbit.format import reference
from hf_kbit.format import spec as format
from hf_kbit.ops import dequantize, embed, gemm, gemm_int8, quantize, repack, set_batch_invariant

TRANSFORMS = [(False, False), *cases.TRANSFORMS]
BOTH = pytest.mark.parametrize("form", ["planes", "tiles"])


def packed(shape, bits: int, form: str = "planes", scaled: bool = False, rotated: bool = False):
    """words, scales and codebook of ``cases.weight(shape)`` in a form, and how it was transformed."""
    columns = cases.columns(shape[-1], scaled)
    *words, codebook = cases.quantized(shape, bits, columns=columns, rotated=rotated)
    words = repack(*words, bits, shape[-2:]) if form == "tiles" else words
    return (*words, codebook), {"columns": columns, "rotated": rotated}


# --- quantize, dequantize -------------------------------------------------------------------------


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
        for dtype in (*cases.FLOATS, torch.float64):  # rounded once
            assert torch.equal(dequantize(planes, absmax, codebook, shape[-2:], dtype), decoded.to(dtype))
        for dtype in cases.FLOATS:  # seen as float32
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


def test_quantize_refuses_what_is_no_weight():
    for value in (float("nan"), float("inf"), float("-inf")):
        weight = cases.weight((5, 32))
        weight[3, 7] = value
        with pytest.raises(ValueError, match="weight: found 1 NaN or infinite values, expected finite ones"):
            quantize(weight, cases.codebook(3))
    with pytest.raises(TypeError, match=r"weight: found Linear, expected a tensor\. A model is quantized by"):
        quantize(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="codebook: found none, expected float32 levels"):
        quantize(weight)


# --- embed ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("bits", cases.BITS)
def test_reference_of_embed_gives_rows_of_the_decoded_table(bits, form):
    for shape in [*cases.SHAPES, (37, 90)]:
        for transform in TRANSFORMS:
            words, how = packed(shape, bits, form, *transform)
            decoded = dequantize(*words, shape, torch.bfloat16, **how)
            indices = torch.randint(0, shape[0], (3, 35), generator=cases.generator(*shape))
            for some in (indices, indices.T, indices[0, 0].int(), indices[:0], indices[:, ::2].int()):
                found = reference.embed(some, *words, shape, torch.bfloat16, **how)
                assert torch.equal(found, decoded[some.long()]) and found.is_contiguous() and not found._is_view()


def test_rows_have_no_gradient_but_may_get_one():
    """As PEFT has it, so that gradients reach adapters behind checkpoints; and they are changed in place."""
    words, _ = packed((7, 33), 3)
    rows = embed(torch.tensor([[2, 5]]), *words, (7, 33))
    assert not rows.requires_grad and not rows._is_view()
    rows.requires_grad_()
    (rows * 2).sum().backward()
    assert torch.equal(rows.grad, torch.full((1, 2, 33), 2.0))
    with torch.no_grad():
        rows += 1


@BOTH
def test_reference_of_embed_refuses_an_index_that_is_no_row(form):
    """From 7 to 15 there is padding in the tile."""
    words, _ = packed((7, 33), 3, form)
    for index in (-1, 7, 16, 2**31 - 1):
        for dtype in (torch.int64, torch.int32):
            with pytest.raises(ValueError, match=f"indices: found .*{index}.*, expected 0 to 6"):
                reference.embed(torch.tensor([[0, index]], dtype=dtype), *words, (7, 33), torch.float32)


# --- gemm -----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_gemm_against_float64(dtype, form):
    for shape in cases.SHAPES:
        for bits in cases.BITS:
            words, _ = packed(shape, bits, form)
            x, bias = cases.x((4,), shape[1], dtype), cases.x((), shape[0], dtype)
            for found in (gemm(x, *words, bias, shape[0]), reference.gemm(x, *words, bias, shape[0])):
                assert found.dtype == dtype and found.is_contiguous()
                cases.assert_product(found, x, dequantize(*words, shape).T, bias)


def test_gemm_takes_any_leading_dimensions():
    """And gives gradients of them; words may have strides."""
    (planes, absmax, codebook), _ = packed((7, 33), 3)
    strided = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in (planes, absmax)]
    dense = dequantize(planes, absmax, codebook, (7, 33))
    for batch in cases.BATCHES:
        x = cases.x(batch, 33).requires_grad_()
        found = gemm(x, planes, absmax, codebook)
        assert found.shape == (*batch, 7) and torch.equal(gemm(x, *strided, codebook), found)
        torch.testing.assert_close(found.reshape(-1, 7), F.linear(x.reshape(-1, 33), dense))
        found.sum().backward()
        torch.testing.assert_close(x.grad, dense.sum(0).expand_as(x))


# --- gemm_int8 ------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("bits", cases.BITS)
def test_8_bit_inputs_give_the_same_bits(bits, form):
    """Of planes and tiles, of any strides, in any batch. GPUs: tests/csrc/test_int8_cuda.py."""
    words, how = packed((64, 300), bits, form, True, True)
    bias, columns = cases.x((), 64), how["columns"]
    for batch in cases.BATCHES:
        x = cases.x(batch, 300)
        expected = reference.gemm_int8(x, *words, bias, 64, columns)
        strided = x.expand(2, *x.shape).transpose(0, -1).contiguous().transpose(0, -1)[0]
        found = gemm_int8(strided, *words, bias, 64, columns)
        assert found.shape == (*batch, 64) and found.is_contiguous() and torch.equal(found, expected)
        assert not found._is_view()
    rows = cases.x((2, 3), 300)
    set_batch_invariant(True)
    try:
        one = gemm_int8(rows[0, 1], *words, bias, 64, columns)
    finally:
        set_batch_invariant(False)
    assert torch.equal(one, gemm_int8(rows, *words, bias, 64, columns)[0, 1])


# --- compiled -------------------------------------------------------------------------------------


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
def test_compiled_once_for_any_number_of_tokens(op):
    words, _ = packed((17, 70), 4)
    counter = torch._dynamo.testing.CompileCounter()

    def run(tokens):
        return gemm(tokens[:, None].expand(-1, 70).float(), *words) if op is gemm else embed(tokens, *words, (17, 70))

    compiled = torch.compile(run, backend=counter, dynamic=True, fullgraph=True)
    for count in (2, 3, 9, 70):
        tokens = torch.arange(count) % 17
        torch.testing.assert_close(compiled(tokens), run(tokens))
    assert counter.frame_count == 1
