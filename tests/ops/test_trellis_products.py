"""Products by weights that have a trellis, beside their decoded weights in float64, with their gradients."""

import functools
import itertools

import pytest
import torch
from contract import REFUSALS
from torch.nn import functional as F
from trellises import TOLERANCES, in_whole_numbers, near, of_experts, operands, weight

import hf_kbit
from hf_kbit.format.trellis import CODES, TrellisDecoding, decode
from hf_kbit.ops import native
from hf_kbit.ops import trellis as ops

OPS = torch.ops.hf_kbit
SETTINGS = {
    "all of a block": (TrellisDecoding(3), 128, 256),
    "padded": (TrellisDecoding(2, "mcg", block=64), 100, 72),
    "one bit": (TrellisDecoding(1, "3inst", block=32), 64, 96),
    "eight bits": (TrellisDecoding(8), 256, 128),
}


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


# --- kernels of CPUs ------------------------------------------------------------------------------

# Around those at which some way, of some instruction set, ends.
TOKENS = 1, 2, 3, 4, 5, 7, 16, 17, 32, 33, 256, 257
needs_library = pytest.mark.skipif(not native.library("cpu").loaded, reason="no compiled library for CPUs")


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
def test_any_number_of_tokens_on_a_cpu(code, dtype):
    packed, generator = weight(TrellisDecoding(3, code, block=64), 200, 1090), torch.Generator().manual_seed(1)
    dense = packed.dequantize(torch.float64)
    x, bias = (torch.randn(size, generator=generator).to(dtype) for size in ((max(TOKENS), 1090), (200,)))
    exact = x.double() @ dense.T + bias.double()
    for tokens in TOKENS:
        y = F.linear(x[:tokens], packed, bias)
        assert near(y, exact[:tokens], dtype), tokens
        assert max(near(row, its, dtype) for row, its in zip(y, exact, strict=False)), "a row beside others"


@needs_library
def test_a_weight_of_several_slices():
    packed, x = weight(TrellisDecoding(2), 2304, 2048), torch.randn(33, 2048)
    exact = x.double() @ packed.dequantize(torch.float64).T
    assert near(F.linear(x, packed), exact, torch.float32)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", range(1, 9))
def test_few_tokens_give_the_same_bits_on_every_cpu(bits, dtype):
    """Also where sums of 32 bits would overflow, and wherever the tiles lie in memory."""
    block = (32, 64, 128)[bits % 3]
    packed = weight(TrellisDecoding(bits, block=block), 5 * block + 2, 4600)
    x, bias = torch.randn(4, 4600).to(dtype), torch.randn(5 * block + 2).to(dtype)
    x[1] = 0
    x[2] = 0  # but for what makes all inputs the largest
    x[2, ::block] = 1 / packed.suh[:4600:block].to(dtype)
    for its in (None, bias):
        exact = in_whole_numbers(x, packed, its)
        exact[1] = 0 if its is None else its
        assert torch.equal(F.linear(x, packed, its), exact)
    for tokens in (1, 2, 3):
        assert torch.equal(F.linear(x[:tokens], packed), in_whole_numbers(x, packed, None)[:tokens].nan_to_num(0))
    around = torch.zeros(packed.words.numel() + 3, dtype=torch.int16)
    for start, words in ((0, packed.words), (1, packed.words), (2, packed.words.transpose(0, 1))):
        moved = around[start : start + words.numel()].view(words.shape).copy_(words)
        moved = moved if moved.shape == packed.words.shape else moved.transpose(0, 1)
        assert torch.equal(F.linear(x, packed.like(words=moved), bias), F.linear(x, packed, bias))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("code", CODES)
def test_no_tokens(code, dtype, device):
    packed = weight(TrellisDecoding(3, code, block=64), 100, 200).moved(device)
    for size in ((0,), (2, 0)):
        x = torch.empty(*size, 200, device=device, dtype=dtype)
        assert F.linear(x, packed).shape == ops.product_int8(x, None, *operands(packed)).shape == (*size, 100)
        assert [y.shape for y in ops.products(x, 2 * [None], 2 * [operands(packed)], False)] == 2 * [(*size, 100)]
    experts, _, _ = (each.to(device) for each in of_experts(1))
    offsets = torch.zeros(5, dtype=torch.int32, device=device)
    x = torch.empty(0, 64, device=device, dtype=dtype)
    assert ops.experts_product(x, None, None, offsets, *operands(experts), False).shape == (0, 128)
    rows = torch.randn(3, 64, device=device).to(dtype)
    assert not ops.experts_product(rows, None, None, offsets, *operands(experts), False).any()


def test_other_columns_than_the_weight_has_are_refused(device):
    """Also where they would be as many when padded."""
    packed = weight(TrellisDecoding(3, block=64), 100, 200).moved(device)
    for dtype, multiply in itertools.product((torch.float64, torch.bfloat16), (ops.product, ops.product_int8)):
        for tokens, width in itertools.product((1, 40), (190, 250)):
            with pytest.raises((ValueError, RuntimeError), match="x: found shape"):
                multiply(torch.randn(tokens, width, device=device).to(dtype), None, *operands(packed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
def test_several_weights_of_one_input(code, dtype, device):
    """Rows that end within blocks, more weights than a launch takes, other widths. In whole numbers, and on a CPU,
    each has the bits that it has by itself."""
    for block, width in ((32, 100), (128, 4600)):
        rows = (200, 16, 330, 129, 257)
        packed = [weight(TrellisDecoding(3, code, block=block), count, width).moved(device) for count in rows]
        wide = weight(TrellisDecoding(4, code, block=block), 64, width).moved(device)
        biases = [None if i % 2 else torch.randn(count, device=device).to(dtype) for i, count in enumerate(rows)]
        dense = [each.dequantize(torch.float64).T for each in packed]
        for tokens in (1, 5, 16, 40, 300, 8200):
            if device == "cpu" and tokens > 40:
                continue
            x = torch.randn(tokens, width, device=device).to(dtype)
            alone = [F.linear(x, own, bias) for own, bias in zip(packed, biases, strict=True)]
            exact = [x.double() @ own + (0 if bias is None else bias) for own, bias in zip(dense, biases, strict=True)]
            whole = device == "cpu" or (code == "mul1" and tokens <= 16)
            for count in (1, 3, 5):
                weights = list(map(operands, packed[:count]))
                found = ops.products(x, biases[:count], weights, False)
                assert len(found) == count and all(near(y, e, dtype) for y, e in zip(found, exact, strict=False))
                assert not whole or all(map(torch.equal, found, alone))
                rounded = ops.products(x, biases[:count], weights, True)
                assert all((y - z).norm() < 0.02 * z.norm() for y, z in zip(rounded, found, strict=True))
            found = ops.products(x[:, None], [None, None], [operands(packed[1]), operands(wide)], False)
            assert torch.equal(found[0][:, 0], alone[1]) and torch.equal(found[1][:, 0], F.linear(x, wide))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_few_tokens_lose(dtype):
    """Beside what rounding the result to 16 bits does, next to nothing."""
    packed = weight(TrellisDecoding(4), 512, 2048)
    x = torch.randn(4, 2048).to(dtype)
    exact = x.double() @ packed.dequantize(torch.float64).T
    found, rounded = F.linear(x, packed).double(), exact.to(dtype).double()
    least = (rounded - exact).norm() / exact.norm()
    assert (found - exact).norm() / exact.norm() < (least**2 + 4e-4**2) ** 0.5


@needs_library
def test_inputs_that_are_no_numbers_stay_so_alone():
    packed, x = weight(TrellisDecoding(3), 128, 256), torch.randn(3, 256).bfloat16()
    expected = F.linear(x, packed)
    x[1, 5] = torch.inf
    y = F.linear(x, packed)
    assert not y[1].isfinite().any() and torch.equal(y[::2], expected[::2])


@needs_library
@pytest.mark.parametrize(
    "place, value, message",
    [
        (0, torch.ones(2, 73), r"x: found shape \[2, 73\], expected \[\*, 72\]"),
        (1, torch.ones(99), r"bias: found shape \[99\], expected \[100\]"),
        (1, torch.ones(100).half(), "bias: found dtype float16, expected float32"),
        (2, torch.ones(8, 8, 33, dtype=torch.int16), r"words: found shape \[8, 8, 33\], expected"),
        (2, torch.ones(8, 8, 32), "words: found dtype float32, expected int16"),
        (3, torch.ones(127).half(), r"suh: found shape \[127\], expected \[128\], a multiple of 64 and at least 72"),
        (4, torch.ones(128), "svh: found dtype float32, expected float16"),
        (5, [129, 72], r"svh: found shape \[128\], expected \[128\], .* at least 129"),
        (6, "mul2", "code: found mul2, expected 3inst, mcg or mul1"),
        (7, 0, "block: found 0, expected 32, 64 or 128"),
        (7, 128, None),
    ],
)
def test_what_no_kernel_may_read_is_refused(place, value, message):
    arguments = [torch.ones(2, 72), torch.ones(100), *operands(weight(*SETTINGS["padded"]))]
    arguments[place] = value
    if message is None:
        assert OPS.gemm_trellis(*arguments).shape == (2, 100)
    else:
        with pytest.raises(REFUSALS, match=message):
            OPS.gemm_trellis(*arguments)


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


@pytest.mark.parametrize(
    "op",
    [
        "gemm_trellis",
        "gemm_trellis_inference",
        "gemm_trellis_int8",
        "gemm_trellis_gradient",
        "gemm_trellis_group",
        "dequantize_trellis",
        "gemm_experts_trellis",
    ],
)
def test_ops_are_ops(op):
    packed = weight(*SETTINGS["padded"])
    x = torch.randn(3, 72, requires_grad=True)
    experts, rows, offsets = of_experts(2)
    calls = {
        "gemm_trellis": (x, torch.randn(100, requires_grad=True), *operands(packed)),
        "gemm_trellis_inference": (x.detach(), torch.randn(100), *operands(packed)),
        "gemm_trellis_group": (x.detach(), [None], *([each] for each in operands(packed)[:3]), [100], "mcg", 64, True),
        "gemm_trellis_int8": (x.detach(), None, *operands(packed)),
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


@pytest.fixture
def batch_invariant():
    hf_kbit.set_batch_invariant(True)
    yield
    hf_kbit.set_batch_invariant(False)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
def test_a_token_has_its_bits_in_any_batch(code, dtype, device, batch_invariant):
    packed = weight(TrellisDecoding(3, code, block=64), 200, 1090).moved(device)
    x, bias = torch.randn(600, 1090, device=device).to(dtype), torch.randn(200, device=device).to(dtype)
    if device != "cpu" and (code != "mul1" or dtype == torch.float32):
        with pytest.raises(REFUSALS, match=r"set_batch_invariant: found a product of \S+ on cuda by 1090 columns"):
            F.linear(x, packed)
        return
    alone = torch.cat([F.linear(row[None], packed, bias) for row in x[:40]])
    for tokens in (2, 3, 16, 17, 33, 300, 600):
        assert torch.equal(F.linear(x[:tokens], packed, bias)[:40], alone[:tokens])
    assert near(F.linear(x, packed, bias), x.double() @ packed.dequantize(torch.float64).T + bias.double(), dtype)


@needs_library
@pytest.mark.parametrize("stacked", [1, 2])
def test_a_row_of_experts_has_its_bits_in_any_batch(stacked, device, batch_invariant):
    packed, rows, offsets = (each.to(device) for each in of_experts(stacked))
    x = torch.randn(9, 64, device=device).bfloat16()
    y = ops.experts_product(x, None, rows, offsets, *operands(packed), False)
    for row, expert in ((1, 0), (4, 2), (8, 3)):
        alone = offsets.clone()
        alone[: expert + 1], alone[expert + 1 :] = 0, 1
        assert torch.equal(ops.experts_product(x, None, rows[row, None], alone, *operands(packed), False)[0], y[row])


def test_what_counts_in_a_batch_is_refused(batch_invariant):
    found = r"in float64|of torch\.float64 on cpu by 72 columns of a trellis"  # with the library, and without
    with pytest.raises(REFUSALS, match=rf"^set_batch_invariant: found a product ({found}).*, expected"):
        F.linear(torch.randn(1, 72).double(), weight(*SETTINGS["padded"]))


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


def test_where_kernels_are(monkeypatch):
    """On GPUs of compute capability 8.0 and newer with the library, for inputs in 16 bits."""
    for arch, dtype, device, has in (
        (900, torch.bfloat16, "cuda:1", True),
        (800, torch.float16, "cuda", True),
        (750, torch.float16, "cuda", False),
        (0, torch.bfloat16, "cuda", False),
        (900, torch.float32, "cuda", False),
        (900, torch.bfloat16, "cpu", False),
    ):
        monkeypatch.setattr(native, "cuda_arch", lambda device, arch=arch: arch)
        assert ops.has_kernels(torch.device(device), dtype) == has
