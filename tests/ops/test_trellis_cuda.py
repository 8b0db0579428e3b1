"""Products by weights that have a trellis on GPUs: all kernels, beside CPUs' bits and decoded weights in float64."""

import itertools

import pytest
import torch
from compiled import NEEDED, assert_replayed, assert_same_on_streams
from torch.nn import functional as F
from trellises import in_whole_numbers, near, operands, weight

from hf_kbit.format.trellis import CODES, TrellisDecoding
from hf_kbit.ops import native
from hf_kbit.ops import trellis as ops
from hf_kbit.weight.tensor import KbitTensor

pytestmark = NEEDED


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", range(1, 9))
def test_few_tokens_give_the_bits_of_a_cpu(bits, dtype):
    """Shapes that leave CTAs, warps and steps with less than a whole one, and K divided among CTAs."""
    for (rows, width), block in (
        ((7 * 32 + 2, 1000), 32),
        ((5 * 64, 4600), 64),
        ((128, 8192), 128),
        ((4224, 256), 128),
    ):
        packed = weight(TrellisDecoding(bits, block=block), rows, width)
        x, bias = torch.randn(16, width).to(dtype), torch.randn(rows).to(dtype)
        x[3] = 0
        exact = in_whole_numbers(x, packed, None).nan_to_num(0)
        on_gpu = packed.moved("cuda")
        for tokens in (1, 3, 4, 5, 8, 9, 16):
            assert torch.equal(F.linear(x[:tokens].cuda(), on_gpu).cpu(), exact[:tokens])
        exact = in_whole_numbers(x[:2], packed, bias)
        assert torch.equal(F.linear(x[:2].cuda(), on_gpu, bias.cuda()).cpu(), exact)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_many_tokens(bits, code, dtype):
    """Shapes that leave tiles with less than a whole one, a single step, K divided among CTAs, several tiles of each;
    a token of zeros, and one with NaN, which stays alone."""
    for (rows, width), block in (((226, 1000), 32), ((320, 90), 64), ((300, 4600), 64), ((4224, 8192), 128)):
        packed = weight(TrellisDecoding(bits, code, block=block), rows, width).moved("cuda")
        x, bias = (torch.randn(size, device="cuda").to(dtype) for size in ((1100, width), (rows,)))
        dense = packed.dequantize(torch.float64)
        x[3] = 0
        exact = x.double() @ dense.T
        for tokens in (1, 9, 17, 33, 100, 255, 257, 1100):
            assert near(F.linear(x[:tokens], packed), exact[:tokens], dtype)
        y = F.linear(x[:40], packed, bias)
        assert near(y, exact[:40] + bias.double(), dtype) and torch.equal(y[3], bias)
        x[7, 5] = float("nan")
        y = F.linear(x[:300], packed)
        assert y[7].isnan().all() and not y[[*range(7), *range(8, 300)]].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_weight_itself(bits, code, dtype):
    """It multiplies more tokens than kernels take, and gradients, of one matrix and of experts."""
    for rows, width in ((300, 391), (130, 260)):
        packed = weight(TrellisDecoding(bits, code, block=128), rows, width).moved("cuda")
        made = torch.ops.hf_kbit.dense_trellis(*(packed.parts[n] for n in packed.files), [rows, width], code, dtype)
        dense = packed.dequantize(torch.float64)
        assert near(made, dense, dtype)
        x = torch.randn(2500, width, device="cuda", dtype=dtype, requires_grad=True)
        y = F.linear(x, packed)
        assert near(y, x.double() @ dense.T, dtype)
        grad = torch.randn_like(y)
        y.backward(grad)
        assert near(x.grad, grad.double() @ dense, dtype)


def gathered_and_gated(y: torch.Tensor, x: torch.Tensor, offsets: torch.Tensor, packed: KbitTensor) -> None:
    """y again, with x in another order, and x with a gate beside what it makes of it."""
    order = torch.randperm(len(x), device=x.device)
    again = ops.experts_product(x[order], None, order.argsort().int(), offsets, *operands(packed), False)
    assert torch.equal(again, y)
    gate = torch.randn_like(x)
    hidden = (F.silu(gate.float()) * x.float()).to(x.dtype)
    wanted = ops.experts_product(hidden, None, None, offsets, *operands(packed), False)
    found = ops.experts_product(torch.cat([gate, x], -1), None, None, offsets, *operands(packed), True)
    assert near(found, wanted.double(), x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stacked", [1, 2])
@pytest.mark.parametrize("bits", range(1, 9))
def test_few_rows_of_experts(bits, stacked, dtype):
    """Each has the bits of a product by the weight of its expert alone; those of none are zeros."""
    packed = weight(TrellisDecoding(bits, block=64, stacked=stacked), 14, stacked * 200, 330).moved("cuda")
    x, offsets = torch.randn(7, 330, device="cuda").to(dtype), torch.tensor([0, 2, 2, 3] + 11 * [6], device="cuda")
    y = ops.experts_product(x, None, None, offsets, *operands(packed), False)
    gathered_and_gated(y, x, offsets, packed)
    for row, expert in enumerate((0, 0, 2, 3, 3, 3)):
        one = packed.matrix_at(expert)
        parts = [one._one(part) for part in range(stacked)] if stacked > 1 else [one]
        assert torch.equal(y[row], torch.cat([F.linear(x[row], part)[:200] for part in parts]))
    assert not y[6].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bits", range(1, 9))
def test_8_bit_inputs(bits, dtype):
    """Of weights and inputs as they are rounded, which is off by what rounding takes, and no more."""
    if native.cuda_arch(torch.device("cuda")) < 900:
        pytest.skip("no kernel of 8-bit inputs")
    for (rows, width), block in (
        ((7 * 32 + 2, 1000), 32),
        ((5 * 64, 4600), 64),
        ((4224, 256), 128),
        ((128, 8192), 128),
    ):
        packed = weight(TrellisDecoding(bits, block=block), rows, width).moved("cuda")
        exact, bias = packed.dequantize(torch.float64), torch.randn(rows, device="cuda").to(dtype)
        x = torch.randn(8300, width, device="cuda").to(dtype)
        x[:, :5] *= 3
        x[3] = 0
        of_whole = ops.product_int8(x, bias, *operands(packed))  # of a weight that is decoded first
        for tokens in (17, 33, 70, 129, 300, 1500, 8300):
            y = ops.product_int8(x[:tokens], bias, *operands(packed))
            if width == 256:  # no CTAs divide K, and sums are whole numbers
                assert torch.equal(y, of_whole[:tokens])
            wanted = x[:tokens].double() @ exact.T + bias.double()
            error = (y.double() - wanted).norm() / wanted.norm()
            assert 1e-3 < error < 2e-2 and torch.equal(y[3], bias)
        few = ops.product_int8(x[:16], bias, *operands(packed))
        assert torch.equal(few, ops.product(x[:16], bias, *operands(packed)))
        x[1, 7] = float("nan")
        y = ops.product_int8(x[:40], bias, *operands(packed))
        assert not y[1].isfinite().any() and y[2:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stacked", [1, 2])
@pytest.mark.parametrize("bits", range(1, 9))
def test_many_rows_of_experts(bits, stacked, dtype):
    """Experts without rows, with part of a tile and with several, rows of none, tiles of all sizes."""
    code = list(CODES)[bits % 3]
    packed = weight(TrellisDecoding(bits, code, block=64, stacked=stacked), 5, 200 * stacked, 330).moved("cuda")
    exact = packed.dequantize(torch.float64)
    for sizes in ((0, 1, 40, 2, 3), (64, 33, 100, 0, 0), (0, 0, 0, 0, 700), (130, 600, 0, 257, 90)):
        offsets = torch.tensor([0, *sizes], device="cuda").cumsum(0).int()
        x = torch.randn(sum(sizes) + 7, 330, device="cuda").to(dtype)
        y = ops.experts_product(x, None, None, offsets, *operands(packed), False)
        for expert, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
            assert near(y[start:stop], x[start:stop].double() @ exact[expert].T, dtype) or start == stop
        assert not y[sum(sizes) :].any()
        gathered_and_gated(y, x, offsets, packed)
        rounded = ops.experts_product_int8(x, None, None, offsets, *operands(packed), False)
        assert (rounded - y).norm() < 0.02 * y.norm() and not rounded[sum(sizes) :].any()


# --- streams, graphs, devices ---------------------------------------------------------------------

WAYS = {  # tokens, or rows of eight experts, of each way to multiply
    "few": (4, ops.product),
    "few of mcg": (4, ops.product),
    "many": (40, ops.product),
    "many, K divided": (20, ops.product),
    "decoded first": (2500, ops.product),
    "8 bits": (40, ops.product_int8),
    "8 bits, decoded first": (5000, ops.product_int8),
    "several, few": (3, ops.products),
    "several, many": (70, ops.products),
    "few rows of experts": (3, ops.experts_product),
    "many rows of experts": (90, ops.experts_product),
    "many rows of experts, 8 bits": (90, ops.experts_product_int8),
    "gradient": (40, torch.ops.hf_kbit.gemm_trellis_gradient),
}
EVERY_WAY = pytest.mark.parametrize("way", WAYS)


def product_of(way: str, device: str = "cuda:0"):
    """A function of x alone, and some inputs that it takes."""
    tokens, multiply = WAYS[way]
    code, width = "mcg" if "mcg" in way else "mul1", 8192 if "divided" in way else 512
    experts = (8,) if "experts" in way else ()
    packed = weight(TrellisDecoding(3, code), *experts, 256, width).moved(device)
    how = operands(packed)
    inputs = [torch.randn(tokens, 256 if way == "gradient" else width, device=device).bfloat16() for _ in range(4)]
    if experts:
        offsets = torch.arange(9, device=device, dtype=torch.int32) * tokens // 8
        return lambda x: multiply(x, None, None, offsets, *how, False), inputs
    if way == "gradient":
        return lambda grad: multiply(grad, *how), inputs
    if "several" in way:
        return lambda x: torch.cat(multiply(x, 3 * [None], 3 * [how], False), 1), inputs
    return lambda x: multiply(x, None, *how), inputs


@EVERY_WAY
def test_a_graph_reads_inputs_anew(way):
    run, inputs = product_of(way)
    assert_replayed(run, [(x,) for x in inputs])


@EVERY_WAY
def test_streams_share_nothing(way):
    run, inputs = product_of(way)
    assert_same_on_streams(run, inputs, 20)


@EVERY_WAY
def test_runs_on_the_current_stream(way):
    """Its inputs are written by the same stream, late: a kernel on another stream would read them too early."""
    run, (x, *_) = product_of(way)
    expected, late, busy = run(x), torch.zeros_like(x), torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            busy = busy @ busy * 1e-4
        found = run(late.copy_(x))
    torch.cuda.synchronize()
    assert torch.equal(found, expected)


@EVERY_WAY
def test_no_memory_is_held(way):
    run, (x, *_) = product_of(way)
    run(x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    found = run(x)
    assert torch.cuda.memory_allocated() - before == -(-found.nbytes // 512) * 512


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EVERY_WAY
def test_a_device_that_is_not_the_current_one(way):
    assert torch.cuda.current_device() == 0
    run, (x, *_) = product_of(way)
    there, _ = product_of(way, "cuda:1")
    found = there(x.to("cuda:1"))
    assert found.device.index == 1 and torch.equal(found.to("cuda:0"), run(x))
    assert torch.cuda.current_device() == 0
