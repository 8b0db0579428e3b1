"""Gradients of products with packed weights, first and second ones, backward and forward; and what products cost."""

import cases
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from hf_kbit import reference
from hf_kbit.ops import dequantize, gemm, quantize, repack

OPS = torch.ops.hf_kbit


@pytest.mark.parametrize("form", ["planes", "tiles"])
@pytest.mark.parametrize(("scaled", "rotated"), [(False, False), *cases.TRANSFORMS], ids=str)
def test_gradients(scaled, rotated, form):
    """First and second ones, backward and forward."""
    for bits in cases.BITS if not scaled and not rotated else (3,):
        shape, columns = (2, 33), cases.columns(33, scaled)
        *words, codebook = cases.quantized(shape, bits, columns=columns, rotated=rotated)
        words = words if form == "planes" else repack(*words, bits, shape)
        x = cases.x((2,), shape[1], torch.float64).requires_grad_()
        bias = cases.x((), shape[0], torch.float64).requires_grad_()

        def run(x, bias, packed=(*words, codebook), how=(columns, rotated)):
            return gemm(x, *packed, bias, 2, *how)

        assert torch.autograd.gradcheck(run, (x, bias), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(run, (x, bias), check_fwd_over_rev=True)
        (found,) = torch.autograd.grad(run(x, bias).sum(), x)
        dense = dequantize(*words, codebook, shape, torch.float64, columns, rotated)
        torch.testing.assert_close(found, dense.sum(0).expand_as(x))


@pytest.mark.parametrize("form", ["planes", "tiles"])
def test_gradient_of_a_large_layer_in_slices(form):
    """256 columns at a time, the last ones fewer; and the gradient of that gradient."""
    shape, bits = (40_000, 700), 3
    planes, codebook = cases.random_packed(shape, bits), cases.codebook(bits)
    words = planes if form == "planes" else repack(*planes, bits, shape)
    dense = dequantize(*planes, codebook, shape, torch.float64)
    grad = cases.x((2, 3), shape[0], torch.float64).requires_grad_()
    x = cases.x((2, 3), shape[1], torch.float64).requires_grad_()
    (found,) = torch.autograd.grad(gemm(x, *words, codebook, out_features=shape[0]), x, grad, create_graph=True)
    torch.testing.assert_close(found, grad @ dense)
    (second,) = torch.autograd.grad(found.sum(), grad)
    torch.testing.assert_close(second, dense.sum(1).expand_as(grad))


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_gradients_equal_those_of_a_dense_layer(dtype):
    packed = cases.quantized((64, 100), 4)
    inputs = [cases.x((2, 5), 100, dtype), cases.x((), 64, dtype)]
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in inputs] for _ in range(2))
    grad = cases.x((2, 5), 64, dtype, seed=1)
    gemm(ours[0], *packed, ours[1]).backward(grad)
    F.linear(theirs[0], dequantize(*packed, (64, 100), dtype), theirs[1]).backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])
def test_products_can_be_changed_in_place(dtype, device):
    """As a residual or an adapter is added; a view that an op made could not."""
    packed = [tensor.to(device) for tensor in cases.quantized((48, 300), 3)]
    for batch in ((), (3,), (2, 3), (40,), (2, 30)):
        x = cases.x(batch, 300, dtype).to(device).requires_grad_()
        for bias in (None, cases.x((), 48, dtype).to(device).requires_grad_()):
            y = gemm(x, *packed, bias)
            y += 1
            y.sum().backward()
            assert x.grad is not None
            for without in (OPS.gemm_inference, reference.gemm):
                assert not without(x.detach(), *packed, bias, 48)._is_view()


def test_only_the_gradients_needed_are_computed():
    packed = cases.quantized((7, 33), 3)
    x, bias = cases.x((4,), 33), cases.x((), 7).requires_grad_()
    gemm(x, *packed, bias).sum().backward()
    assert x.grad is None and torch.equal(bias.grad, torch.full((7,), 4.0))
    assert not gemm(x, *packed).requires_grad


def test_backward_keeps_no_dense_weight():
    packed = cases.quantized((130, 64), 2)
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with keep:
        gemm(cases.x((4,), 64).requires_grad_(), *packed)
    assert [(tensor.dtype, tensor.shape) for tensor in saved] == [(tensor.dtype, tensor.shape) for tensor in packed]


def test_operations_are_counted_as_of_linear_layers():
    x, weight, codebook = torch.randn(2, 7, 100, requires_grad=True), torch.randn(64, 100), cases.codebook(3)
    packed = (*quantize(weight, codebook), codebook)
    of_two = [[tensor] * 2 for tensor in packed]

    def count(run) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return counter.get_total_flops()

    product = 2 * 14 * 100 * 64
    assert count(lambda: F.linear(x, weight).sum().backward()) == 2 * product
    assert count(lambda: gemm(x, *packed).sum().backward()) == 2 * product
    assert count(lambda: gemm(x, *packed, columns=cases.columns(100), rotated=True).sum().backward()) == 2 * product
    assert count(lambda: gemm(x.detach(), *packed)) == product
    group = *of_two, [None] * 2, [64, 64], [None] * 2, [0, 0]
    assert count(lambda: OPS.gemm_group(x.detach(), *group)) == 2 * product
    experts, ends = (*(tensor[None] for tensor in packed[:2]), codebook, None), torch.tensor([0, 7]).int()
    tokens, both = x[0], torch.cat([x[0], x[0]], dim=1)
    assert count(lambda: OPS.gemm_experts(tokens, *experts, None, ends, 64).sum().backward()) == product
    assert count(lambda: OPS.gemm_experts(tokens.detach(), *experts, torch.arange(14).int() % 7, ends, 64)) == product
    for how, named in (((None, False, True), {}), ((), {"swiglu": True})):
        arguments = both.detach(), *experts, None, ends, 64, *how
        assert count(lambda a=arguments, named=named: OPS.gemm_experts(*a, **named)) == product / 2
