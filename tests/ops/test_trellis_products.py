"""Products by weights that have a trellis, beside their decoded weights in float64, with their gradients."""

import functools

import pytest
import torch
from torch.nn import functional as F

import hf_kbit
from hf_kbit.format.trellis import CODES, TrellisDecoding, decode
from hf_kbit.ops import trellis as ops
from hf_kbit.weight.tensor import KbitTensor, Packed

OPS = torch.ops.hf_kbit
SETTINGS = {
    "all of a block": (TrellisDecoding(3), 128, 256),
    "padded": (TrellisDecoding(2, "mcg", block=64), 100, 72),
    "one bit": (TrellisDecoding(1, "3inst", block=32), 64, 96),
    "eight bits": (TrellisDecoding(8), 256, 128),
}
TOLERANCES = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float64: 1e-13}


def weight(decoding: TrellisDecoding, *shape: int) -> KbitTensor:
    """Random codes, with scales as weights of some hundredths have."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, (dtype, size) in decoding.layout(shape).items():
        if dtype == torch.int16:
            tensors[name] = torch.randint(-(2**15), 2**15, size, generator=generator).short()
        else:
            tensors[name] = (torch.randn(size, generator=generator) * (0.05 if name == "suh" else 1)).half()
    return KbitTensor.of(Packed(tensors, decoding), shape, torch.float32)


def operands(packed: KbitTensor) -> tuple:
    return packed.words, packed.suh, packed.svh, list(packed.matrix), packed.decoding.code, packed.decoding.block


def near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - exact).norm() < TOLERANCES[dtype] * exact.norm())


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SETTINGS)
def test_product_and_gradients(name, dtype, device):
    decoding, rows, width = SETTINGS[name]
    packed = weight(decoding, rows, width).moved(device)
    dense, generator = packed.dequantize(torch.float64), torch.Generator().manual_seed(1)
    x, bias, grad = (
        torch.randn(size, generator=generator).to(device, dtype) for size in ((2, 5, width), (rows,), (2, 5, rows))
    )
    x.requires_grad_(), bias.requires_grad_()
    y = F.linear(x, packed, bias)
    y.backward(grad)
    assert y.dtype == dtype and y.is_contiguous()
    assert near(y, x.double() @ dense.T + bias.double(), dtype)
    assert near(x.grad, grad.double() @ dense, dtype)
    assert near(bias.grad, grad.double().sum((0, 1)), dtype)


@pytest.mark.parametrize("name", SETTINGS)
def test_dequantizing_is_what_the_format_says(name):
    decoding, rows, width = SETTINGS[name]
    packed = weight(decoding, rows, width)
    exact = packed.dequantize(torch.float64)
    assert near(packed.dequantize(torch.float32), exact, torch.float32) and exact.shape == (rows, width)
    if decoding.block == 128:
        tensors = packed.file_tensors() | ({} if decoding.code == "3inst" else {decoding.code: None})
        assert near(decode(tensors, torch.float64), exact, torch.float64)


def test_what_is_large_stays_in_the_range_of_float16():
    """Between the rotations sums of thousands of products would not."""
    packed = weight(TrellisDecoding(2), 128, 4096)
    packed.svh.fill_(2.0**-12)
    x = torch.full((1, 4096), 40000.0, dtype=torch.float16)
    y = F.linear(x, packed)
    assert y.isfinite().all() and near(y, x.double() @ packed.dequantize(torch.float64).T, torch.float16)


def test_gradients_of_gradients():
    packed, x = weight(*SETTINGS["padded"]), torch.randn(3, 72, dtype=torch.float64, requires_grad=True)
    product = functools.partial(F.linear, weight=packed)
    assert torch.autograd.gradcheck(product, (x,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(product, (x,))


def of_experts(stacked: int) -> tuple:
    """Experts, of which one gets no rows, and rows of none."""
    packed = weight(TrellisDecoding(3, block=64, stacked=stacked), 4, 128, 64)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 0], dtype=torch.int32)
    return packed, rows, torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("stacked", [1, 2])
def test_experts(stacked, swiglu, device):
    packed, rows, offsets = (each.to(device) for each in of_experts(stacked))
    x = torch.randn(9, 128 if swiglu else 64, device=device, requires_grad=True)
    bias = torch.randn(4, 128, device=device, requires_grad=True)
    y = ops.experts_product(x, bias, rows, offsets, *operands(packed), swiglu)
    gate = F.silu(x[:, :64]) * x[:, 64:] if swiglu else x
    dense, expected = packed.dequantize(), torch.zeros_like(y)
    for expert in range(4):
        own = slice(*offsets[expert : expert + 2].tolist())
        expected[own] = gate[rows[own].long()] @ dense[expert].T + bias[expert]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(y)
    found, wanted = (torch.autograd.grad(each, (x, bias), grad) for each in (y, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["gemm_trellis", "gemm_trellis_gradient", "dequantize_trellis", "gemm_experts_trellis"])
def test_ops_are_ops(op):
    packed = weight(*SETTINGS["padded"])
    x = torch.randn(3, 72, requires_grad=True)
    experts, rows, offsets = of_experts(2)
    calls = {
        "gemm_trellis": (x, torch.randn(100, requires_grad=True), *operands(packed)),
        "gemm_trellis_gradient": (torch.randn(3, 100, requires_grad=True), *operands(packed)),
        "dequantize_trellis": (*operands(packed), torch.bfloat16),
        "gemm_experts_trellis": (
            torch.randn(9, 64, requires_grad=True),
            None,
            rows,
            offsets,
            *operands(experts),
            False,
        ),
    }
    torch.library.opcheck(getattr(OPS, op), calls[op])


def test_batches_that_must_not_count_are_refused():
    packed = weight(*SETTINGS["padded"])
    hf_kbit.set_batch_invariant(True)
    try:
        with pytest.raises(ValueError, match="set_batch_invariant: found a weight that has a trellis"):
            F.linear(torch.randn(1, 72), packed)
    finally:
        hf_kbit.set_batch_invariant(False)


# --- the weight as one value ----------------------------------------------------------------------


@pytest.mark.parametrize("code", CODES)
def test_parts_are_parts_and_come_together(code):
    packed = weight(TrellisDecoding(2, code), 256, 384)
    dense = packed.dequantize()
    for dim in (0, 1):
        parts = packed.split(128, dim)
        assert {type(part) for part in parts} == {type(packed)}
        torch.testing.assert_close(torch.cat([part.dequantize() for part in parts], dim), dense, rtol=0, atol=1e-6)
        assert torch.equal(torch.cat(parts, dim).dequantize(), dense)
    assert torch.equal(packed.of_floats(packed.as_floats()).dequantize(), dense)
    with pytest.raises(ValueError, match="found 64 rows of a weight that is rotated in blocks of 128"):
        packed.split(64)[0].dequantize()
    with pytest.raises(ValueError, match=r"cut at \[0, 40\], expected .* multiples of 16"):
        packed.split(40)


def test_rows_of_stacked_matrices():
    packed, *_ = of_experts(2)
    dense = packed.dequantize()
    first, second = packed.split(64, 1)
    assert torch.equal(first.dequantize(), dense[:, :64]) and torch.equal(second.dequantize(), dense[:, 64:])
    assert torch.equal(torch.cat([first, second], 1).dequantize(), dense)
    assert torch.equal(packed[2].dequantize(), dense[2]) and torch.equal(packed[1:3].dequantize(), dense[1:3])
