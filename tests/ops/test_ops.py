"""Each op through the dispatcher: results, shapes, gradients, compilation, and what it refuses."""

import cases
import pytest
import torch
import torch._dynamo.testing
from torch.library import opcheck
from torch.utils.flop_counter import FlopCounterMode

import hf_kbit
from hf_kbit import format, reference

OPS = torch.ops.hf_kbit
TRANSFORMS = pytest.mark.parametrize(("scaled", "rotated"), cases.TRANSFORMS, ids=["columns", "rotated", "both"])


# --- quantize, dequantize -----------------------------------------------------------------------------


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", [*cases.SHAPES, (2, 3, 5, 40)])
def test_quantize_and_dequantize(shape, bits):
    weight, codebook = cases.weight(shape), cases.codebook(bits)
    planes, absmax = hf_kbit.ops.quantize(weight, codebook)
    assert planes.shape == (*shape[:-2], *format.weight_shape(*shape[-2:], bits)) and planes.dtype == torch.int32
    assert absmax.shape == (*shape[:-2], *format.absmax_shape(*shape[-2:])) and absmax.dtype == torch.uint8
    decoded = hf_kbit.ops.dequantize(planes, absmax, codebook, shape[-2:])
    assert decoded.shape == shape and decoded.dtype == torch.float32 and decoded.is_contiguous()
    # A level is never further from a weight than half the widest gap, and the scale is off by 1/32 at most, or by half
    # the smallest subnormal.
    largest = torch.nn.functional.pad(weight, (0, -shape[-1] % 32)).unflatten(-1, (-1, 32)).abs().amax(-1)
    bound = largest * ((codebook[1:] - codebook[:-1]).max() / 2 * (1 + 1 / 32) + 1 / 32) + 2.0**-15
    error = (decoded - weight).abs()
    assert (error <= bound.repeat_interleave(32, dim=-1)[..., : shape[-1]]).all()


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_quantize_sees_16_bit_weights_as_float32(dtype):
    weight, codebook = cases.weight((64, 100), dtype), cases.codebook(3)
    expected = hf_kbit.ops.quantize(weight.float(), codebook)
    assert all(map(torch.equal, hf_kbit.ops.quantize(weight, codebook), expected))


@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])
def test_dequantize_rounds_the_float32_product_once(dtype):
    planes, absmax, codebook = cases.quantized((64, 100), 5)
    exact = hf_kbit.ops.dequantize(planes, absmax, codebook, (64, 100))
    assert torch.equal(hf_kbit.ops.dequantize(planes, absmax, codebook, (64, 100), dtype), exact.to(dtype))


@TRANSFORMS
@pytest.mark.parametrize("shape", [(5, 1), (7, 33), (64, 100), (2, 3, 5, 40)], ids=str)
def test_dequantize_gives_the_original_basis(shape, scaled, rotated):
    """Column scales are of all matrices, K wide, as the weight; the bound is that of its blocks as they are stored."""
    columns, weight = cases.columns(shape[-1], scaled), cases.weight(shape)
    planes, absmax, codebook = cases.quantized(shape, 5, columns=columns, rotated=rotated)
    assert absmax.shape == (*shape[:-2], *format.absmax_shape(*shape[-2:]))
    decoded = hf_kbit.ops.dequantize(planes, absmax, codebook, shape[-2:], columns=columns, rotated=rotated)
    assert decoded.shape == shape and decoded.is_contiguous()
    scales = torch.ones(shape[-1]) if columns is None else reference.decode_e4m4(columns)
    error = torch.nn.functional.pad((decoded - weight) / scales, (0, -shape[-1] % 32)).unflatten(-1, (-1, 32))
    step = (codebook[1:] - codebook[:-1]).max() / 2 * (1 + 1 / 32) + codebook.max() / 32
    largest = reference.decode_scales(absmax, rotated).abs() * (1 + 1 / 32)
    as_large_as_can_be = absmax & 127 == 127 if rotated else absmax == 255
    assert as_large_as_can_be.float().mean() < 0.05
    bound = largest * step + codebook.max() * 2.0**-15
    assert (as_large_as_can_be | (error.square().mean(-1).sqrt() <= bound)).all()


def test_quantize_again_is_stable():
    """What was decoded is on the grid; quantizing it again keeps every value whose block keeps its scale."""
    planes, absmax, codebook = cases.quantized((64, 256), 4)
    decoded = hf_kbit.ops.dequantize(planes, absmax, codebook, (64, 256))
    again = hf_kbit.ops.quantize(decoded, codebook)
    same = again[1] == absmax
    assert same.float().mean() > 0.9
    redecoded = hf_kbit.ops.dequantize(*again, codebook, (64, 256)).unflatten(1, (-1, 32))
    assert torch.equal(redecoded[same], decoded.unflatten(1, (-1, 32))[same])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_quantize_refuses_what_is_not_finite(value):
    weight = cases.weight((5, 32))
    weight[3, 7] = value
    with pytest.raises(ValueError, match="weight: found 1 NaN or infinite values, expected finite ones"):
        hf_kbit.ops.quantize(weight, cases.codebook(3))


# --- embed --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", [hf_kbit.ops.embed, reference.embed], ids=["op", "reference"])
@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
@pytest.mark.parametrize("bits", cases.BITS)
def test_embed_gives_rows_of_the_decoded_table(bits, tiled, op, monkeypatch):
    monkeypatch.setattr(reference, "QUANTIZE_SLICE", 1 << 16)  # the reference's slices, of a few rows
    for shape in [*cases.SHAPES, (37, 90)]:
        for scaled, rotated in ((False, False), *cases.TRANSFORMS):
            columns = cases.columns(shape[1], scaled)
            *packed, codebook = cases.quantized(shape, bits, columns=columns, rotated=rotated)
            decoded = hf_kbit.ops.dequantize(*packed, codebook, shape, torch.bfloat16, columns, rotated)
            words = hf_kbit.ops.repack(*packed, bits, shape) if tiled else packed
            indices = torch.randint(0, shape[0], (3, 35), generator=cases.generator(*shape))
            for some in (indices, indices.T, indices[0, 0].int(), indices[:0], indices[:, ::2].int()):
                found = op(some, *words, codebook, shape, torch.bfloat16, columns, rotated)
                assert torch.equal(found, decoded[some.long()]) and found.is_contiguous()


@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
def test_embed_decodes_only_the_rows_asked_for(tiled, monkeypatch):
    """Of tiles their sixteen rows; a table is larger than any result of its look-ups."""
    planes, absmax, codebook = cases.quantized((700, 64), 3)
    words = hf_kbit.ops.repack(planes, absmax, 3, (700, 64)) if tiled else (planes, absmax)
    decoded = []
    for name in ("repack", "dequantize"):
        whole = getattr(reference, name)
        monkeypatch.setattr(
            reference,
            name,
            lambda *args, whole=whole, **named: decoded.append(args[0].numel()) or whole(*args, **named),
        )
    reference.embed(torch.tensor([5, 699, 5]), *words, codebook, [700, 64], torch.float32)
    assert decoded and max(decoded) <= 3 * 16 * 3 * 8  # slabs of 256 columns have 8 blocks of 3 words


def test_rows_have_no_gradient_but_may_get_one():
    """As PEFT has it, so that gradients reach adapters behind checkpoints; and they are changed in place."""
    planes, absmax, codebook = cases.quantized((7, 33), 3)
    rows = hf_kbit.ops.embed(torch.tensor([[2, 5]]), planes, absmax, codebook, (7, 33))
    assert not rows.requires_grad and not rows._is_view()
    rows.requires_grad_()
    (rows * 2).sum().backward()
    assert torch.equal(rows.grad, torch.full((1, 2, 33), 2.0))
    with torch.no_grad():
        rows += 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
@pytest.mark.parametrize("op", [hf_kbit.ops.embed, reference.embed], ids=["op", "reference"])
def test_embed_refuses_an_index_that_is_no_row(op, tiled, dtype):
    """From 7 to 15 there is padding in the tile."""
    planes, absmax, codebook = cases.quantized((7, 33), 3)
    words = hf_kbit.ops.repack(planes, absmax, 3, (7, 33)) if tiled else (planes, absmax)
    for index in (-1, 7, 16, 2**31 - 1):
        with pytest.raises(ValueError, match=f"indices: found .*{index}.*, expected 0 to 6"):
            op(torch.tensor([[0, index]], dtype=dtype), *words, codebook, (7, 33), torch.float32)


# --- repack -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", cases.SHAPES)
def test_repack_and_back(shape, bits):
    planes, absmax, codebook = cases.quantized(shape, bits)
    tiles = hf_kbit.ops.repack(planes, absmax, bits, shape)
    assert all(tensor.is_contiguous() for tensor in tiles)
    back = hf_kbit.ops.repack(*tiles, bits, shape, inverse=True)
    assert torch.equal(back[0], planes) and torch.equal(back[1], absmax)
    assert torch.equal(
        hf_kbit.ops.dequantize(*tiles, codebook, shape), hf_kbit.ops.dequantize(planes, absmax, codebook, shape)
    )


def test_repack_keeps_leading_dimensions():
    planes, absmax, codebook = cases.quantized((4, 17, 40), 3)
    tiles = hf_kbit.ops.repack(planes, absmax, 3, (17, 40))
    for expert in range(4):
        single = hf_kbit.ops.repack(planes[expert], absmax[expert], 3, (17, 40))
        assert torch.equal(tiles[0][expert], single[0]) and torch.equal(tiles[1][expert], single[1])
    back = hf_kbit.ops.repack(*tiles, 3, (17, 40), inverse=True)
    assert torch.equal(back[0], planes) and torch.equal(back[1], absmax)
    assert hf_kbit.ops.dequantize(*tiles, codebook, (17, 40)).shape == (4, 17, 40)


# --- gemm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", cases.SHAPES)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_gemm_against_float64(shape, bits, dtype, tiled):
    planes, absmax, codebook = cases.quantized(shape, bits)
    x, bias = cases.x((4,), shape[1], dtype), cases.x((), shape[0], dtype)
    weight = (planes, absmax) if not tiled else hf_kbit.ops.repack(planes, absmax, bits, shape)
    found = hf_kbit.ops.gemm(x, *weight, codebook, bias, out_features=shape[0])
    assert found.dtype == dtype and found.is_contiguous()
    dense = hf_kbit.ops.dequantize(planes, absmax, codebook, shape)
    cases.assert_product(found, x, dense.T, bias)


@pytest.mark.parametrize("batch", cases.BATCHES)
def test_gemm_takes_any_leading_dimensions(batch):
    planes, absmax, codebook = cases.quantized((7, 33), 3)
    x = cases.x(batch, 33).requires_grad_()
    found = hf_kbit.ops.gemm(x, planes, absmax, codebook)
    assert found.shape == (*batch, 7)
    flat = torch.nn.functional.linear(x.reshape(-1, 33), hf_kbit.ops.dequantize(planes, absmax, codebook, (7, 33)))
    torch.testing.assert_close(found.reshape(-1, 7), flat)
    found.sum().backward()
    assert x.grad.shape == x.shape


def test_gemm_takes_any_strides():
    planes, absmax, codebook = cases.quantized((7, 33), 3)
    x = cases.x((2, 3, 4), 33)
    expected = hf_kbit.ops.gemm(x, planes, absmax, codebook)
    transposed = x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)
    assert not transposed.is_contiguous()
    torch.testing.assert_close(hf_kbit.ops.gemm(transposed, planes, absmax, codebook), expected)
    every_other = torch.stack([x, x + 1], dim=-1).flatten(-2)[..., ::2]
    torch.testing.assert_close(hf_kbit.ops.gemm(every_other, planes, absmax, codebook), expected)
    strided = [torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in (planes, absmax)]
    assert torch.equal(hf_kbit.ops.gemm(x, *strided, codebook), expected)


# --- autograd -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
@pytest.mark.parametrize("bits", cases.BITS)
def test_gemm_gradients(bits, tiled):
    shape = (6, 35)
    planes, absmax, codebook = cases.quantized(shape, bits)
    weight = (planes, absmax) if not tiled else hf_kbit.ops.repack(planes, absmax, bits, shape)
    x = cases.x((2, 3), shape[1], torch.float64).requires_grad_()
    bias = cases.x((), shape[0], torch.float64).requires_grad_()

    def run(x, bias):
        return hf_kbit.ops.gemm(x, *weight, codebook, bias, out_features=shape[0])

    assert torch.autograd.gradcheck(run, (x, bias))
    assert torch.autograd.gradgradcheck(run, (x, bias))


@TRANSFORMS
@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
def test_gradients_of_transformed_weights(scaled, rotated, tiled):
    """First and second ones, backward and forward."""
    shape, columns = (2, 33), cases.columns(33, scaled)
    planes, absmax, codebook = cases.quantized(shape, 3, columns=columns, rotated=rotated)
    weight = (planes, absmax) if not tiled else hf_kbit.ops.repack(planes, absmax, 3, shape)
    x = cases.x((2,), shape[1], torch.float64).requires_grad_()
    bias = cases.x((), shape[0], torch.float64).requires_grad_()

    def run(x, bias):
        return hf_kbit.ops.gemm(x, *weight, codebook, bias, shape[0], columns, rotated)

    assert torch.autograd.gradcheck(run, (x, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, bias), check_fwd_over_rev=True)
    (found,) = torch.autograd.grad(run(x, bias).sum(), x)
    dense = hf_kbit.ops.dequantize(*weight, codebook, shape, torch.float64, columns, rotated)
    torch.testing.assert_close(found, dense.sum(0).expand_as(x))


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
def test_gradient_of_a_large_layer_in_slices(bits, tiled):
    """256 columns at a time, the last ones fewer; and the gradient of that gradient."""
    shape = (40_000, 700)
    planes, codebook = cases.random_packed(shape, bits), cases.codebook(bits)
    weight = OPS.repack(*planes, bits, list(shape)) if tiled else planes
    dense = hf_kbit.ops.dequantize(*planes, codebook, shape, torch.float64)
    grad = cases.x((2, 3), shape[0], torch.float64).requires_grad_()
    x = cases.x((2, 3), shape[1], torch.float64).requires_grad_()
    y = hf_kbit.ops.gemm(x, *weight, codebook, out_features=shape[0])
    (found,) = torch.autograd.grad(y, x, grad, create_graph=True)
    torch.testing.assert_close(found, grad @ dense)
    (second,) = torch.autograd.grad(found.sum(), grad)
    torch.testing.assert_close(second, dense.sum(1).expand_as(grad))


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_gemm_gradients_equal_those_of_a_dense_layer(dtype):
    planes, absmax, codebook = cases.quantized((64, 100), 4)
    dense = hf_kbit.ops.dequantize(planes, absmax, codebook, (64, 100), dtype)
    inputs = [cases.x((2, 5), 100, dtype), cases.x((), 64, dtype)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    grad = cases.x((2, 5), 64, dtype, seed=1)
    hf_kbit.ops.gemm(ours[0], planes, absmax, codebook, ours[1]).backward(grad)
    torch.nn.functional.linear(theirs[0], dense, theirs[1]).backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (40,), (2, 30)], ids=str)
@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])
def test_products_can_be_changed_in_place(dtype, batch, biased, device):
    """As a residual or an adapter is added; a view that an op made could not."""
    packed = [tensor.to(device) for tensor in cases.quantized((48, 300), 3)]
    x = cases.x(batch, 300, dtype).to(device).requires_grad_()
    bias = cases.x((), 48, dtype).to(device).requires_grad_() if biased else None
    y = hf_kbit.ops.gemm(x, *packed, bias)
    y += 1
    y.sum().backward()
    assert x.grad is not None
    for without in (OPS.gemm_inference, reference.gemm):
        assert not without(x.detach(), *packed, bias, 48)._is_view()


def test_gemm_computes_only_the_gradients_needed():
    planes, absmax, codebook = cases.quantized((7, 33), 3)
    x, bias = cases.x((4,), 33), cases.x((), 7).requires_grad_()
    hf_kbit.ops.gemm(x, planes, absmax, codebook, bias).sum().backward()
    assert x.grad is None and torch.equal(bias.grad, torch.full((7,), 4.0))
    assert not hf_kbit.ops.gemm(x, planes, absmax, codebook).requires_grad


def test_backward_keeps_no_dense_weight():
    planes, absmax, codebook = cases.quantized((130, 64), 2)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        hf_kbit.ops.gemm(cases.x((4,), 64).requires_grad_(), planes, absmax, codebook)
    assert [(tensor.dtype, tensor.shape) for tensor in saved] == [
        (tensor.dtype, tensor.shape) for tensor in (planes, absmax, codebook)
    ]


# --- registration -------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", cases.BITS)
def test_opcheck(bits):
    shape = (17, 70)
    planes, absmax, codebook = cases.quantized(shape, bits)
    tiles = hf_kbit.ops.repack(planes, absmax, bits, shape)
    x, bias = cases.x((2, 3), 70).requires_grad_(), cases.x((), 17).requires_grad_()
    opcheck(OPS.quantize.default, (cases.weight(shape), codebook))
    opcheck(OPS.quantize.default, (cases.weight((2, *shape), torch.bfloat16), codebook))
    for words in ((planes, absmax), tiles):
        opcheck(OPS.dequantize.default, (*words, codebook, list(shape), torch.float16))
        opcheck(OPS.embed.default, (torch.tensor([[3, 16]]), *words, codebook, list(shape), torch.bfloat16))
        opcheck(OPS.gemm.default, (x, *words, codebook, bias, 17))
        opcheck(OPS.gemm.default, (x.detach().half(), *words, codebook, None, 17))
        opcheck(OPS.gemm_gradient.default, (cases.x((2, 3), 17).requires_grad_(), *words, codebook, list(shape)))
        group = [words[0]] * 2, [words[1]] * 2, [codebook] * 2, [bias.detach(), None], [17, 17], [None] * 2, [0, 0]
        opcheck(OPS.gemm_group.default, (x.detach(), *group))
    opcheck(OPS.repack.default, (planes, absmax, bits, list(shape)))
    opcheck(OPS.repack.default, (*tiles, bits, list(shape), True))


def test_opcheck_of_transformed_weights():
    shape, columns = (17, 70), cases.columns(70)
    planes, absmax, codebook = cases.quantized(shape, 3, columns=columns, rotated=True)
    x, bias = cases.x((2, 3), 70).requires_grad_(), cases.x((), 17).requires_grad_()
    grad, transform = cases.x((2, 3), 17).requires_grad_(), (columns, True)
    for words in ((planes, absmax), hf_kbit.ops.repack(planes, absmax, 3, shape)):
        opcheck(OPS.dequantize.default, (*words, codebook, list(shape), torch.float16, *transform))
        indices = torch.tensor([3, 16, 3], dtype=torch.int32)
        opcheck(OPS.embed.default, (indices, *words, codebook, list(shape), torch.float32, *transform))
        opcheck(OPS.gemm.default, (x, *words, codebook, bias, 17, *transform))
        opcheck(OPS.gemm_gradient.default, (grad, *words, codebook, list(shape), *transform))
        group = [words[0]] * 2, [words[1]] * 2, [codebook] * 2, [None] * 2, [17] * 2, [None, columns], [0, 1]
        opcheck(OPS.gemm_group.default, (x.detach(), *group))


def test_compile_fullgraph():
    def run(x, weight, codebook, bias):
        planes, absmax = hf_kbit.ops.quantize(weight, codebook)
        tiles = hf_kbit.ops.repack(planes, absmax, 3, weight.shape)
        dense = hf_kbit.ops.dequantize(*tiles, codebook, weight.shape)
        return hf_kbit.ops.gemm(x, planes, absmax, codebook, bias) + torch.nn.functional.linear(x, dense)

    inputs = cases.x((2, 3), 70).requires_grad_(), cases.weight((17, 70)), cases.codebook(3), cases.x((), 17)
    compiled = torch.compile(run, fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), run(*inputs))
    compiled(*inputs).sum().backward()
    found, inputs[0].grad = inputs[0].grad, None
    run(*inputs).sum().backward()
    torch.testing.assert_close(found, inputs[0].grad)


@TRANSFORMS
def test_compile_fullgraph_of_transformed_weights(scaled, rotated):
    columns = cases.columns(70, scaled)
    packed = cases.quantized((17, 70), 3, columns=columns, rotated=rotated)

    def run(x):
        dense = hf_kbit.ops.dequantize(*packed, (17, 70), columns=columns, rotated=rotated)
        return hf_kbit.ops.gemm(x, *packed, columns=columns, rotated=rotated) * torch.nn.functional.linear(x, dense)

    x = cases.x((2, 3), 70).requires_grad_()
    (expected,) = torch.autograd.grad(run(x).sum(), x)
    found = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(found, run(x))
    torch.testing.assert_close(torch.autograd.grad(found.sum(), x)[0], expected)


def test_compile_dynamic_batch():
    planes, absmax, codebook = cases.quantized((17, 70), 4)
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda x: hf_kbit.ops.gemm(x, planes, absmax, codebook) * 2, backend=counter, dynamic=True
    )
    for tokens in (2, 3, 9, 70):
        x = cases.x((tokens,), 70)
        torch.testing.assert_close(compiled(x), hf_kbit.ops.gemm(x, planes, absmax, codebook) * 2)
    assert counter.frame_count == 1


def test_compile_embed_of_any_number_of_tokens():
    packed = cases.quantized((17, 70), 4)
    counter = torch._dynamo.testing.CompileCounter()

    def run(tokens):
        return hf_kbit.ops.embed(tokens, *packed, (17, 70), torch.bfloat16) * 2

    compiled = torch.compile(run, backend=counter, dynamic=True, fullgraph=True)
    for count in (2, 3, 9, 70):
        tokens = torch.arange(count)[None] % 17
        assert torch.equal(compiled(tokens), run(tokens))
    assert counter.frame_count == 1
    on_meta = [tensor.to("meta") for tensor in (tokens, *packed)]
    rows = hf_kbit.ops.embed(*on_meta, (17, 70), torch.bfloat16)
    assert rows.shape == (1, 70, 70) and rows.dtype == torch.bfloat16 and rows.is_meta


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", [*cases.SHAPES, (2, 3, 5, 40)])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_gpu_gives_the_bytes_of_the_cpu(shape, bits, dtype):
    weight, codebook = cases.weight(shape, dtype), cases.codebook(bits)
    packed = hf_kbit.ops.quantize(weight, codebook)
    on_gpu = hf_kbit.ops.quantize(weight.cuda(), codebook.cuda())
    assert all(map(torch.equal, (tensor.cpu() for tensor in on_gpu), packed))
    tiles = hf_kbit.ops.repack(*packed, bits, shape[-2:])
    on_gpu_tiles = hf_kbit.ops.repack(*on_gpu, bits, shape[-2:])
    assert all(map(torch.equal, (tensor.cpu() for tensor in on_gpu_tiles), tiles))
    if len(shape) == 2:
        indices = torch.tensor([[shape[0] - 1, 0, shape[0] // 2]])
        for words in (on_gpu, on_gpu_tiles):
            rows = hf_kbit.ops.embed(indices.cuda(), *words, codebook.cuda(), shape, dtype)
            assert torch.equal(rows.cpu(), hf_kbit.ops.embed(indices, *packed, codebook, shape, dtype))
    for words in (on_gpu, on_gpu_tiles):
        decoded = hf_kbit.ops.dequantize(*words, codebook.cuda(), shape[-2:], dtype)
        assert torch.equal(decoded.cpu(), hf_kbit.ops.dequantize(*packed, codebook, shape[-2:], dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_gpu_gemm_and_gradients(bits, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    shape = (130, 300)
    planes, absmax, codebook = (tensor.cuda() for tensor in cases.quantized(shape, bits))
    x, bias, grad = (cases.x(*case, dtype).cuda() for case in (((2, 5), 300), ((), 130), ((2, 5), 130)))
    inputs = x.requires_grad_(), bias.requires_grad_()
    found = hf_kbit.ops.gemm(inputs[0], planes, absmax, codebook, inputs[1])
    found.backward(grad)
    dense = hf_kbit.ops.dequantize(planes, absmax, codebook, shape)
    cases.assert_product(found, x.detach(), dense.T, bias.detach())
    cases.assert_product(inputs[0].grad, grad, dense)
    torch.testing.assert_close(inputs[1].grad, grad.sum((0, 1)))


@pytest.mark.gpu
def test_gpu_opcheck_and_compile():
    planes, absmax, codebook = (tensor.cuda() for tensor in cases.quantized((17, 70), 3))
    x = cases.x((2, 3), 70).cuda().requires_grad_()
    opcheck(OPS.quantize.default, (cases.weight((17, 70)).cuda(), codebook))
    opcheck(OPS.dequantize.default, (planes, absmax, codebook, [17, 70], torch.float16))
    opcheck(OPS.embed.default, (torch.tensor([3, 16]).cuda(), planes, absmax, codebook, [17, 70], torch.float16))
    opcheck(OPS.gemm.default, (x, planes, absmax, codebook, None, 17))
    compiled = torch.compile(lambda x: hf_kbit.ops.gemm(x, planes, absmax, codebook) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x), hf_kbit.ops.gemm(x, planes, absmax, codebook) * 2)


@pytest.mark.gpu
def test_gpu_graph_capture():
    planes, absmax, codebook = (tensor.cuda() for tensor in cases.quantized((17, 70), 3))
    x = cases.x((4,), 70).cuda()
    hf_kbit.ops.gemm(x, planes, absmax, codebook)  # tables are made at the first call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = hf_kbit.ops.gemm(x, planes, absmax, codebook)
    x.copy_(cases.x((4,), 70, seed=1))
    graph.replay()
    torch.testing.assert_close(found, hf_kbit.ops.gemm(x, planes, absmax, codebook))


@pytest.mark.gpu
def test_devices_must_agree():
    with pytest.raises(ValueError, match="weight: found on cpu, expected on cuda:0 like x"):
        hf_kbit.ops.gemm(X.cuda(), PLANES, ABSMAX, CODEBOOK)


# --- what is refused ----------------------------------------------------------------------------------

PLANES, ABSMAX, CODEBOOK = cases.quantized((7, 33), 3)
X, BIAS, COLUMNS = cases.x((2,), 33), cases.x((), 7), cases.columns(33)
INDICES = torch.tensor([2, 5])
REFUSED = {
    "quantize: dtype": (
        lambda: hf_kbit.ops.quantize(torch.ones(2, 2, dtype=torch.int32), CODEBOOK),
        TypeError,
        "weight: found dtype int32, expected float32 or float16 or bfloat16",
    ),
    "quantize: float64": (
        lambda: hf_kbit.ops.quantize(torch.ones(2, 2).double(), CODEBOOK),
        TypeError,
        "found dtype float64",
    ),
    "quantize: one dimension": (
        lambda: hf_kbit.ops.quantize(torch.ones(32), CODEBOOK),
        ValueError,
        r"weight: found shape \[32\]",
    ),
    "quantize: empty": (
        lambda: hf_kbit.ops.quantize(torch.ones(0, 32), CODEBOOK),
        ValueError,
        r"weight: found shape \[0, 32\]",
    ),
    "codebook: size": (
        lambda: hf_kbit.ops.quantize(torch.ones(2, 2), CODEBOOK[:7]),
        ValueError,
        "codebook: found 7 levels",
    ),
    "codebook: dtype": (
        lambda: hf_kbit.ops.quantize(torch.ones(2, 2), CODEBOOK.half()),
        TypeError,
        "codebook: found dtype float16, expected float32",
    ),
    "codebook: shape": (
        lambda: hf_kbit.ops.quantize(torch.ones(2, 2), CODEBOOK[None]),
        ValueError,
        r"codebook: found shape \[1, 8\], expected one dimension",
    ),
    "devices": (
        lambda: hf_kbit.ops.quantize(torch.ones(2, 2, device="meta"), CODEBOOK),
        ValueError,
        "codebook: found on cpu, expected on meta like weight",
    ),
    "dequantize: weight dtype": (
        lambda: hf_kbit.ops.dequantize(PLANES.long(), ABSMAX, CODEBOOK, (7, 33)),
        TypeError,
        "weight: found dtype int64, expected int32",
    ),
    "dequantize: absmax dtype": (
        lambda: hf_kbit.ops.dequantize(PLANES, ABSMAX.float(), CODEBOOK, (7, 33)),
        TypeError,
        "absmax: found dtype float32, expected uint8",
    ),
    "dequantize: shape": (
        lambda: hf_kbit.ops.dequantize(PLANES, ABSMAX, CODEBOOK, (7, 65)),
        ValueError,
        r"weight: found shape \[7, 6\], expected \[7, 9\] for the planes of a \[7, 65\] weight in 3 bits",
    ),
    "dequantize: other bits": (
        lambda: hf_kbit.ops.dequantize(PLANES, ABSMAX, cases.codebook(4), (7, 33)),
        ValueError,
        "in 4 bits",
    ),
    "dequantize: integer result": (
        lambda: hf_kbit.ops.dequantize(PLANES, ABSMAX, CODEBOOK, (7, 33), torch.int32),
        TypeError,
        "dtype: found torch.int32",
    ),
    "dequantize: zero": (
        lambda: hf_kbit.ops.dequantize(PLANES, ABSMAX, CODEBOOK, (0, 33)),
        ValueError,
        r"shape: found \[0, 33\]",
    ),
    "dequantize: columns' dtype": (
        lambda: hf_kbit.ops.dequantize(PLANES, ABSMAX, CODEBOOK, (7, 33), columns=COLUMNS.float()),
        TypeError,
        "columns: found dtype float32, expected uint8",
    ),
    "dequantize: columns of the padded row": (
        lambda: hf_kbit.ops.dequantize(PLANES, ABSMAX, CODEBOOK, (7, 33), columns=cases.columns(64), rotated=True),
        ValueError,
        r"columns: found shape \[64\], expected \[33\]",
    ),
    "dequantize: columns of each matrix": (
        lambda: hf_kbit.ops.dequantize(PLANES[None], ABSMAX[None], CODEBOOK, (7, 33), columns=COLUMNS[None]),
        ValueError,
        r"columns: found shape \[1, 33\], expected \[33\]",
    ),
    "dequantize: columns' device": (
        lambda: hf_kbit.ops.dequantize(PLANES, ABSMAX, CODEBOOK, (7, 33), columns=COLUMNS.to("meta")),
        ValueError,
        "columns: found on meta, expected on cpu like weight",
    ),
    "embed: indices' dtype": (
        lambda: hf_kbit.ops.embed(torch.ones(2), PLANES, ABSMAX, CODEBOOK, (7, 33)),
        TypeError,
        "indices: found dtype float32, expected int64 or int32",
    ),
    "embed: several tables, of a fake": (
        lambda: OPS.embed(
            *(tensor.to("meta") for tensor in (INDICES, PLANES[None], ABSMAX[None], CODEBOOK)), [7, 33], torch.float16
        ),
        ValueError,
        r"weight: found shape \[1, 7, 6\], expected one table, without leading dimensions",
    ),
    "embed: several tables": (
        lambda: OPS.embed(INDICES, PLANES[None], ABSMAX[None], CODEBOOK, [7, 33], torch.float16),
        ValueError,
        r"weight: found shape \[1, 7, 6\], expected one table, without leading dimensions",
    ),
    "embed: shape": (
        lambda: hf_kbit.ops.embed(INDICES, PLANES, ABSMAX, CODEBOOK, (7, 65)),
        ValueError,
        r"weight: found shape \[7, 6\], expected \[7, 9\]",
    ),
    "embed: integer rows": (
        lambda: hf_kbit.ops.embed(INDICES, PLANES, ABSMAX, CODEBOOK, (7, 33), torch.int32),
        TypeError,
        "dtype: found torch.int32",
    ),
    "embed: columns' shape": (
        lambda: hf_kbit.ops.embed(INDICES, PLANES, ABSMAX, CODEBOOK, (7, 33), columns=COLUMNS[1:]),
        ValueError,
        r"columns: found shape \[32\], expected \[33\]",
    ),
    "embed: indices' device": (
        lambda: hf_kbit.ops.embed(INDICES.to("meta"), PLANES, ABSMAX, CODEBOOK, (7, 33)),
        ValueError,
        "weight: found on cpu, expected on meta like indices",
    ),
    "gemm: columns' shape": (
        lambda: hf_kbit.ops.gemm(X, PLANES, ABSMAX, CODEBOOK, columns=COLUMNS[:32]),
        ValueError,
        r"columns: found shape \[32\], expected \[33\]",
    ),
    "gemm: columns' device, by the op": (
        lambda: OPS.gemm_inference(X, PLANES, ABSMAX, CODEBOOK, None, 7, COLUMNS.to("meta"), True),
        ValueError,
        "columns: found on meta, expected on cpu like weight",
    ),
    "gemm_gradient: columns' shape, of a fake": (
        lambda: OPS.gemm_gradient(
            *(tensor.to("meta") for tensor in (cases.x((2,), 7), PLANES, ABSMAX, CODEBOOK)),
            [7, 33],
            COLUMNS[1:].to("meta"),
        ),
        ValueError,
        r"columns: found shape \[32\], expected \[33\]",
    ),
    "repack: bits": (lambda: hf_kbit.ops.repack(PLANES, ABSMAX, 6, (7, 33)), ValueError, "bits: found 6"),
    "repack: planes for tiles": (
        lambda: hf_kbit.ops.repack(PLANES, ABSMAX, 3, (7, 33), inverse=True),
        ValueError,
        "weight: found shape .* for the tiles",
    ),
    "gemm: integer x": (
        lambda: hf_kbit.ops.gemm(X.int(), PLANES, ABSMAX, CODEBOOK),
        TypeError,
        "x: found dtype int32",
    ),
    "gemm: scalar x": (
        lambda: hf_kbit.ops.gemm(torch.tensor(1.0), PLANES, ABSMAX, CODEBOOK),
        ValueError,
        "x: found a scalar",
    ),
    "gemm: in_features": (
        lambda: hf_kbit.ops.gemm(X[:, :32], PLANES, ABSMAX, CODEBOOK),
        ValueError,
        r"a \[7, 32\] weight",
    ),
    "gemm: bias shape": (
        lambda: hf_kbit.ops.gemm(X, PLANES, ABSMAX, CODEBOOK, BIAS[:3]),
        ValueError,
        r"bias: found shape \[3\], expected \[7\]",
    ),
    "gemm: bias dtype": (
        lambda: hf_kbit.ops.gemm(X, PLANES, ABSMAX, CODEBOOK, BIAS.half()),
        TypeError,
        "bias: found dtype float16, expected float32",
    ),
    "gemm: absmax of another layer": (
        lambda: hf_kbit.ops.gemm(X, PLANES, ABSMAX[:5], CODEBOOK),
        ValueError,
        r"absmax: found shape \[5, 2\], expected \[7, 2\]",
    ),
    "gemm: device": (
        lambda: hf_kbit.ops.gemm(X.to("meta"), PLANES, ABSMAX, CODEBOOK),
        ValueError,
        "weight: found on cpu, expected on meta like x",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    call, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call()


def test_operations_are_counted_as_of_linear_layers():
    x, weight, codebook = torch.randn(2, 7, 100, requires_grad=True), torch.randn(64, 100), cases.codebook(3)
    packed = (*hf_kbit.ops.quantize(weight, codebook), codebook)
    with FlopCounterMode(display=False) as dense:
        torch.nn.functional.linear(x, weight).sum().backward()
    with FlopCounterMode(display=False) as quantized:
        hf_kbit.ops.gemm(x, *packed).sum().backward()
    assert quantized.get_total_flops() == dense.get_total_flops() == 2 * (2 * 14 * 100 * 64)
    with FlopCounterMode(display=False) as inference:
        hf_kbit.ops.gemm(x.detach(), *packed)
        OPS.gemm_group(x.detach(), *([tensor] * 2 for tensor in packed), [None] * 2, [64, 64], [None] * 2, [0, 0])
    assert inference.get_total_flops() == 3 * (2 * 14 * 100 * 64)
    with FlopCounterMode(display=False) as transformed:  # no operation for what x goes through
        hf_kbit.ops.gemm(x, *packed, columns=cases.columns(100), rotated=True).sum().backward()
    assert transformed.get_total_flops() == dense.get_total_flops()
