"""The fused products of 8-bit inputs, on Hopper and on other GPUs, and what they need: the bits of ``reference.py``,
everywhere."""

import warnings

import cases
import pytest
import torch
from compiled import (
    BITS,
    HALVES,
    NEEDED,
    OPS,
    Weight,
    assert_replayed,
    assert_same_bits,
    assert_same_on_streams,
    cuda_arch,
    is_hopper,
    random_levels,
    to,
)

import hf_kbit
from hf_kbit.format import reference

pytestmark = [
    *NEEDED,
    pytest.mark.skipif(cuda_arch() < 800, reason="no kernel before compute capability 8.0"),
    pytest.mark.usefixtures("always_int8"),
]
# Less than a tile, ragged rows and columns; then K in clusters, slabs of the last tiles divided, many row tiles.
SMALL = [(1, 1), (16, 256), (35, 1000), (130, 513), (264, 776)]
LARGE = [(4096, 4096), (3072, 8192), (1280, 8192), (48, 14336), (100_000, 264)]


def multiply(weight: Weight, x, bias=None, inverses=None, tiled=True):
    packed = weight.tiles if tiled else weight.planes
    return OPS.gemm_int8(x, *packed, weight.codebook, bias, weight.shape[0], weight.columns, inverses)


def expected(weight: Weight, x, bias=None, device="cpu"):
    planes, codebook, columns = to(device, *weight.planes), weight.codebook.to(device), weight.columns.to(device)
    x, bias = to(device, x, bias)
    return reference.gemm_int8(x, *planes, codebook, bias, weight.shape[0], columns).cuda()


def with_special_numbers(x):
    """Tokens 3 to 10, in place: NaN, infinity, zeros, few bits, tiny and huge ones."""
    x[3, -1], x[4, 0], x[5, x.shape[1] // 2], x[6] = float("nan"), float("inf"), -float("inf"), 0
    x[7] *= 2.0**-12
    if x.dtype == torch.bfloat16:
        x[8] *= 2.0**-110
        x[9] *= 2.0**-98
        x[10] *= 2.0**125
    return x


@BITS
@HALVES
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_bits_of_the_reference(shape, bits, dtype, poison):
    weight = Weight.random(shape, bits, True, True, random_levels(bits))
    for tokens in (1, 2, 16, 17, 31, 64, 100, 128, 200, 256, 300):
        x, bias = cases.x((tokens,), shape[1], dtype).cuda(), cases.x((), shape[0], dtype).cuda()
        for its_bias in (None, bias):
            poison("cuda", tokens * shape[0] * 2)
            assert_same_bits(multiply(weight, x, its_bias), expected(weight, x, its_bias), tokens)


@BITS
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_bits_of_large_weights(shape, bits, poison):
    weight = Weight.random(shape, bits, True, True)
    inverses = OPS.int8_inverses(*weight.tiles, weight.codebook, list(shape))
    for tokens in (17, 33, 64, 100, 128, 250, 500, 1000):
        x = cases.x((tokens,), shape[1], torch.bfloat16).cuda()
        poison("cuda", tokens * shape[0] * 2)
        assert_same_bits(multiply(weight, x, None, inverses), expected(weight, x, None, "cuda"), tokens)


@BITS
@pytest.mark.parametrize("exponent", [-120, -60, -12, 20, 100, "spread", "zeros"])
def test_any_codebook(bits, exponent):
    codebook = random_levels(bits)
    if exponent == "spread":
        codebook = codebook * torch.linspace(-20, 20, 2**bits, device="cuda").exp2()
    else:
        codebook = codebook * (0 if exponent == "zeros" else 2.0**exponent)
    weight = Weight.random((100, 300), bits, True, True, codebook)
    for x in (cases.x((40,), 300, torch.bfloat16).cuda(), cases.x((40,), 300, torch.bfloat16).cuda() * 2.0**-90):
        assert_same_bits(multiply(weight, x), expected(weight, x))


@BITS
def test_rows_of_zeros_and_of_small_scales(bits):
    planes = cases.random_packed((48, 300), bits)
    planes[1][3], planes[1][4], planes[1][5, 1:] = 0, planes[1][4] & 0x87, 0
    tiles = reference.repack(*planes, bits, [48, 300])
    columns, codebook = cases.columns(300).cuda(), random_levels(bits)
    weight = Weight((48, 300), to("cuda", *planes), to("cuda", *tiles), codebook, columns, True)
    x, bias = cases.x((40,), 300, torch.float16).cuda(), cases.x((), 48, torch.float16).cuda()
    assert_same_bits(multiply(weight, x, bias), expected(weight, x, bias))


@BITS
@pytest.mark.parametrize("shape", [*SMALL, (4096, 4096)], ids=str)
def test_inverses(shape, bits):
    for codebook in (cases.codebook(bits).cuda(), random_levels(bits) * 2.0**-30):
        weight = Weight.random(shape, bits, True, True, codebook)
        wanted = reference.int8_inverses(*to("cpu", *weight.planes), codebook.cpu(), list(shape)).cuda()
        for packed in (weight.tiles, weight.planes, weight.moved().tiles):
            assert torch.equal(OPS.int8_inverses(*packed, codebook, list(shape)), wanted)


@HALVES
def test_special_numbers(dtype):
    """Of a token with NaN or infinity all is NaN; tokens of zeros, and of less than 2**-100, become the bias; numbers
    that overflow when they are transformed are infinite as in the reference."""
    weight, x = Weight.random((130, 513), 4, True, True), with_special_numbers(cases.x((40,), 513, dtype).cuda())
    bias = cases.x((), 130, dtype).cuda()
    found = multiply(weight, x, bias)
    assert_same_bits(found, expected(weight, x, bias))
    assert found[3:6].isnan().all() and torch.equal(found[6], bias)


WIDTHS = [8, 24, 40, 1024, 1032, 4096, 4100, 8224, 16384, 16392, 32768, 32776, 40_000, 133_120]


@HALVES
@pytest.mark.parametrize("in_features", WIDTHS)
def test_tokens_of_any_width(in_features, dtype):
    """Of one warp to a whole CTA, too long for shared memory, and of more blocks than a CTA has threads."""
    weight = Weight.random((16, in_features), 3, True, True)
    for tokens in (17, 18):
        x = with_special_numbers(cases.x((tokens,), in_features, dtype).cuda())
        assert_same_bits(multiply(weight, x), expected(weight, x, None, "cuda"))


@pytest.mark.parametrize(
    ("in_features", "tokens"), [(40, 9000), (768, 9000), (2048, 5000), (4104, 3000), (14336, 1000), (28672, 500)]
)
def test_tokens_that_warps_take_in_turns(in_features, tokens):
    """What one has that is not finite stays there, and the next one is copied only when all have read the last one."""
    weight = Weight.random((16, in_features), 4, True, True)
    inverses = OPS.int8_inverses(*weight.tiles, weight.codebook, list(weight.shape))
    x = cases.x((tokens,), in_features, torch.bfloat16).cuda()
    x *= torch.linspace(-20, 20, tokens, device="cuda").exp2().bfloat16()[:, None]
    for first in range(0, tokens - 10, 700):
        with_special_numbers(x[first:])
    wanted = expected(weight, x, None, "cuda")
    for _ in range(5):
        assert_same_bits(multiply(weight, x, None, inverses), wanted)


def test_groups_whose_columns_differ():
    """x becomes int8 for each of them, up to four at a time."""
    for shape, tokens in (((48, 520), 700), ((32, 14336), 300), ((32, 40_000), 70)):
        weights = [Weight.random(shape, 4, True, True) for _ in range(5)]
        for i, weight in enumerate(weights):
            weight.columns = cases.columns(shape[1], seed=i % 4).cuda()
        x = with_special_numbers(cases.x((tokens,), shape[1], torch.float16).cuda())
        inverses = [OPS.int8_inverses(*weight.tiles, weight.codebook, list(shape)) for weight in weights]
        words, scales = map(list, zip(*(weight.tiles for weight in weights), strict=True))
        how = [weight.codebook for weight in weights], [None] * 5, [shape[0]] * 5
        found = OPS.gemm_group(x, words, scales, *how, [weight.columns for weight in weights], [1] * 5, inverses)
        for weight, its in zip(weights, found, strict=True):
            assert_same_bits(its, expected(weight, x, None, "cuda"))


def test_leading_dimensions_and_strides():
    weight, x = Weight.random((64, 300), 4, True, True), cases.x((2, 30), 300, torch.bfloat16).cuda()
    wanted = expected(weight, x)
    strided = x.expand(2, *x.shape).transpose(0, -1).contiguous().transpose(0, -1)[0]
    for its in (x, strided):
        assert_same_bits(multiply(weight, its), wanted)
    assert_same_bits(multiply(weight.moved(), x), wanted)
    assert multiply(weight, x[:, :0]).shape == (2, 0, 64)


def test_what_no_kernel_multiplies_keeps_16_bit_inputs():
    """Planes, and float32."""
    hf_kbit.set_batch_invariant(False)
    weight, x = Weight.random((64, 300), 4, True, True), cases.x((70,), 300).cuda()
    for its, packed in ((x, weight.tiles), (x.half(), weight.planes)):
        how = *packed, weight.codebook, None, 64, weight.columns
        assert torch.equal(OPS.gemm_int8(its, *how), OPS.gemm(its, *how, True))


@BITS
@HALVES
def test_few_tokens_keep_16_bit_inputs(bits, dtype):
    """Alone, and beside another weight, whose inputs are never rounded."""
    hf_kbit.set_batch_invariant(False)
    weight, bias = Weight.random((130, 513), bits, True, True), cases.x((), 130, dtype).cuda()
    inverses = OPS.int8_inverses(*weight.tiles, weight.codebook, list(weight.shape))
    both = [[part] * 2 for part in (*weight.tiles, weight.codebook, bias, 130, weight.columns, 1)]
    for tokens in (0, 1, 17, 64, 65, 200):
        x = cases.x((tokens,), 513, dtype).cuda()
        exact = OPS.gemm(x, *weight.tiles, weight.codebook, bias, 130, weight.columns, True)
        rounded = expected(weight, x, bias) if tokens > 64 else exact
        assert_same_bits(multiply(weight, x, bias, inverses), rounded, tokens)
        for found, wanted in zip(OPS.gemm_group(x, *both, [inverses, None]), (rounded, exact), strict=True):
            torch.testing.assert_close(found, wanted)  # together they may divide the work in another way


def test_launches_and_allocations():
    weight = Weight.random((1280, 8192), 4, True, True)
    inverses = OPS.int8_inverses(*weight.tiles, weight.codebook, list(weight.shape))
    for tokens in (17, 250):
        x = cases.x((tokens,), 8192, torch.bfloat16).cuda()
        found = cases.launched(lambda x=x: multiply(weight, x, None, inverses))
        assert found.pop("add_parts_kernel", 0) <= (not is_hopper())
        assert found == {"gemm_int8_kernel" if is_hopper() else "gemm_mma_kernel": 1, "tokens_to_int8_kernel": 1}
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            multiply(weight, x, None, inverses)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2


@pytest.mark.parametrize("tokens", [1, 17, 60, 250])
def test_graph_replays_read_new_activations(tokens):
    """Each layer reads what a kernel just before it, which it may overlap with, has written."""
    layers = [
        Weight.random(shape, bits, True, True, cases.codebook(bits).cuda() * 2.0**-9)
        for shape, bits in (((3072, 8192), 3), ((8192, 3072), 4))
    ]
    inverses = [OPS.int8_inverses(*layer.tiles, layer.codebook, list(layer.shape)) for layer in layers]

    def all_layers(x):
        for layer, its in list(zip(layers, inverses, strict=True)) * 2:
            x = multiply(layer, x, None, its)
        return x

    inputs = [(cases.x((tokens,), 8192, torch.bfloat16, seed=seed).cuda(),) for seed in range(4)]
    assert all_layers(*inputs[0]).isfinite().all()
    assert_replayed(all_layers, inputs)


@pytest.mark.parametrize("shape", [(1280, 8192), (3072, 8192), (100, 1000)], ids=str)
def test_streams_share_nothing(shape):
    weight = Weight.random(shape, 4, True, True)
    inverses = OPS.int8_inverses(*weight.tiles, weight.codebook, list(shape))
    for tokens in (17, 120, 250):
        inputs = [cases.x((tokens,), shape[1], torch.float16, seed=i).cuda() for i in range(4)]
        assert_same_on_streams(lambda x: multiply(weight, x, None, inverses), inputs, turns=5)
