"""Gradients of products with packed weights, first and second ones, backward and forward; and what products cost."""

import cases
import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from hf_kbit.format import reference
from hf_kbit.ops import dequantize, gemm, quantize, repack

OPS = torch.ops.hf_kbit


@pytest.mark.parametrize("form", ["planes", "tiles"])
@pytest.mark.parametrize(("scaled", "rotated"), [(False, False), *cases.TRANSFORMS], ids=str)
def test_gradients(scaled, rotated, form):
    """First and second ones, backward and forward."""
    shape, columns = (2, 33), cases.columns(33, scaled)
    *words, codebook = cases.quantized(shape, 3, columns=columns, rotated=rotated)
    words = words if form == "planes" else repack(*words, 3, shape)
    x = cases.x((2,), shape[1], torch.float64).requires_grad_()
    bias = cases.x((), shape[0], torch.float64).requires_grad_()

    def run(x, bias):
        return gemm(x, *words, codebook, bias, 2, columns, rotated)

    assert torch.autograd.gradcheck(run, (x, bias), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, bias), check_fwd_over_rev=True)


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
    assert count(lambda: OPS.gemm_int8(x.detach(), *packed, None, 64, cases.columns(100))) == product
    group = *of_two, [None] * 2, [64, 64], [None] * 2, [0, 0], [None] * 2
    assert count(lambda: OPS.gemm_group(x.detach(), *group)) == 2 * product
    experts, ends = (*(tensor[None] for tensor in packed[:2]), codebook, None), torch.tensor([0, 7]).int()
    tokens, both = x[0], torch.cat([x[0], x[0]], dim=1)
    assert count(lambda: OPS.gemm_experts(tokens, *experts, None, ends, 64).sum().backward()) == product
    assert count(lambda: OPS.gemm_experts(tokens.detach(), *experts, torch.arange(14).int() % 7, ends, 64)) == product
    rounded = *experts, None, ends, 64, cases.columns(100)
    assert count(lambda: OPS.gemm_experts_int8(tokens.detach(), *rounded)) == product // 2
    for how, named in (((None, False, True), {}), ((), {"swiglu": True})):
        arguments = both.detach(), *experts, None, ends, 64, *how
        assert count(lambda a=arguments, named=named: OPS.gemm_experts(*a, **named)) == product / 2
