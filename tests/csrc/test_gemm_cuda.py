"""The fused CUDA gemm, for tiles and 1 to 16 tokens: exact values, any codebook, graphs, streams, compilation."""

import cases
import pytest
import torch

import hf_kbit
from hf_kbit import _native, reference

OPS = torch.ops.hf_kbit
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _native.library("cuda").loaded, reason=f"CUDA library: {_native.library('cuda').missing}"),
]
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
MOST_TOKENS = 16


def random_tiles(shape, bits):
    """Tiles and the planes that they were made from, on the GPU: all codes, all 256 scales."""
    planes = [tensor.cuda() for tensor in cases.random_packed(shape, bits)]
    return OPS.repack(*planes, bits, list(shape)), planes


def random_levels(bits):
    """A codebook that no quantizer would make: not symmetric, no level is zero or one."""
    return torch.randn(2**bits, generator=cases.generator(bits)).sort().values.cuda()


@pytest.mark.parametrize("bits", cases.BITS)
@HALVES
@pytest.mark.parametrize("shape", [(16, 256), (35, 1000), (130, 513)], ids=str)
def test_one_hot_tokens_read_the_weight(shape, bits, dtype):
    """Every weight by itself: a level in the dtype of x, times its scale, rounded once. Nothing else is added."""
    tiles, planes = random_tiles(shape, bits)
    codebook = random_levels(bits)
    rounded = codebook.to(dtype).float()
    expected = reference.dequantize(*planes, rounded, list(shape), torch.float32).to(dtype)
    for start in range(0, shape[1], MOST_TOKENS):
        x = torch.eye(shape[1], dtype=dtype, device="cuda")[start : start + MOST_TOKENS]
        assert torch.equal(OPS.gemm(x, *tiles, codebook, None, shape[0]).T, expected[:, start : start + MOST_TOKENS])


@pytest.mark.parametrize("bits", cases.BITS)
@HALVES
@pytest.mark.parametrize("exponent", [0, -12, 20, "spread"])
def test_any_codebook(bits, dtype, exponent):
    """Levels beyond what float16 holds, below its normal numbers, and of very different size."""
    shape = (200, 1111)
    tiles, planes = random_tiles(shape, bits)
    codebook = random_levels(bits)
    if exponent == "spread":
        codebook, exponent = codebook * torch.linspace(-9, 9, 2**bits, device="cuda").exp2(), 0
    codebook = codebook * 2.0**exponent
    dense = reference.dequantize(*planes, codebook, list(shape), torch.float32)
    for tokens in (1, 4, 16):
        x = (cases.x((tokens,), shape[1]).cuda() * 2.0 ** (-exponent - 6)).to(dtype)
        cases.assert_product(OPS.gemm(x, *tiles, codebook, None, shape[0]), x, dense.T)


@pytest.mark.parametrize("bits", cases.BITS)
@HALVES
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 4096),
        (3072, 8192),  # divided along K among clusters
        (48, 14336),
        (100_000, 264),  # many row tiles for each CTA
        (600_000, 40),  # more than one wave of CTAs
        (1, 70_000),
    ],
    ids=str,
)
def test_every_way_to_divide_the_work(shape, bits, dtype, poison):
    tiles, planes = random_tiles(shape, bits)
    codebook, bias = cases.codebook(bits).cuda(), cases.x((), shape[0], dtype).cuda()
    dense = reference.dequantize(*planes, codebook, list(shape), torch.float32)
    for tokens in (1, 3, 8, 11, 16):
        x = cases.x((tokens,), shape[1], dtype).cuda() * 2.0**-6
        poison("cuda", tokens * shape[0] * 2)
        cases.assert_product(OPS.gemm(x, *tiles, codebook, bias, shape[0]), x, dense.T, bias)


@HALVES
def test_activations_and_bias_anywhere_in_memory(dtype):
    """Views that start at odd addresses, strided rows, leading dimensions, a length that is no multiple of eight."""
    for columns in (264, 259):
        shape = (50, columns)
        tiles, planes = random_tiles(shape, 4)
        codebook, bias = cases.codebook(4).cuda(), cases.x((), 101, dtype).cuda()[1::2]
        dense = reference.dequantize(*planes, codebook, list(shape), torch.float32)
        memory = cases.x((40,), columns + 3, dtype).cuda().flatten()
        for x in (
            memory[1 : 1 + 6 * columns].view(6, columns),
            memory[: 12 * columns].view(12, columns)[::2],
            memory[: 6 * columns].view(columns, 6).T,
            memory[: 6 * columns].view(2, 1, 3, columns),
        ):
            found = OPS.gemm(x, *tiles, codebook, bias, 50)
            assert found.shape == (*x.shape[:-1], 50) and found.is_contiguous()
            cases.assert_product(found.view(6, 50), x.reshape(6, columns), dense.T, bias)


def test_words_anywhere_in_memory():
    """Loaded tensors may start where 16-byte loads may not."""
    shape = (40, 300)
    (words, scales), _ = random_tiles(shape, 3)
    x, codebook = cases.x((3,), 300, torch.float16).cuda(), cases.codebook(3).cuda()
    expected = OPS.gemm(x, words, scales, codebook, None, 40)
    shifted_words = torch.cat([words.new_zeros(1), words.flatten()])[1:].view(words.shape)
    shifted_scales = torch.cat([scales.new_zeros(3), scales.flatten()])[3:].view(scales.shape)
    assert torch.equal(OPS.gemm(x, shifted_words, shifted_scales, codebook, None, 40), expected)


@pytest.mark.parametrize("special", [float("inf"), float("nan")])
def test_infinity_and_nan_stay_in_their_token(special):
    shape = (64, 512)
    tiles, _ = random_tiles(shape, 4)
    tiles[1].clamp_(min=1)  # zero times infinity is NaN, which is right, but not what is looked for here
    codebook = random_levels(4)
    x = cases.x((5,), 512, torch.bfloat16).cuda()
    expected = OPS.gemm(x, *tiles, codebook, None, 64)
    x[2, 100] = special
    found = OPS.gemm(x, *tiles, codebook, None, 64)
    others = [0, 1, 3, 4]
    assert torch.equal(found[others], expected[others])
    assert not found[2].isfinite().any()


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
@pytest.mark.parametrize("shape", [(4096, 4096), (3072, 8192)], ids=str)
def test_streams_at_once_and_again(shape, tokens, bits):
    """Nothing is shared between calls: eight streams of them give what each gives alone, to the last bit. The weight
    stays in L2, so that copies into the ring arrive as early as they can."""
    tiles, _ = random_tiles(shape, bits)
    codebook = cases.codebook(bits).cuda()
    inputs = [cases.x((tokens,), shape[1], torch.float16, seed=i).cuda() for i in range(8)]
    expected = [OPS.gemm(x, *tiles, codebook, None, shape[0]) for x in inputs]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in inputs]
    found = [[] for _ in inputs]
    for _ in range(20):
        for x, stream, outputs in zip(inputs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(OPS.gemm(x, *tiles, codebook, None, shape[0]))
    torch.cuda.synchronize()
    for outputs, alone in zip(found, expected, strict=True):
        assert all(torch.equal(output, alone) for output in outputs)


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_graph_replays_read_new_activations(tokens):
    """Two layers, the second of which reads what the first has just written."""
    (up, _), (down, _) = random_tiles((3072, 8192), 3), random_tiles((64, 3072), 2)
    up_codebook, down_codebook = cases.codebook(3).cuda(), cases.codebook(2).cuda()

    def layers(x):
        return OPS.gemm(OPS.gemm(x, *up, up_codebook, None, 3072), *down, down_codebook, None, 64)

    x = cases.x((tokens,), 8192, torch.bfloat16).cuda()
    expected = layers(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layers(x)
    graph.replay()
    assert torch.equal(y, expected)
    for seed in (1, 2, 3):
        x.copy_(cases.x((tokens,), 8192, torch.bfloat16, seed=seed))
        graph.replay()
        assert torch.equal(y, layers(x))


@pytest.mark.parametrize("bits", cases.BITS)
def test_compiles_without_a_graph_break(bits):
    shape = (48, 320)
    tiles, planes = random_tiles(shape, bits)
    codebook = cases.codebook(bits).cuda()
    dense = reference.dequantize(*planes, codebook, list(shape), torch.float32)

    @torch.compile(fullgraph=True, dynamic=True)
    def twice(x):
        return hf_kbit.gemm(x, *tiles, codebook, out_features=48) * 2

    for tokens in (2, 5, 16, 17):
        x = cases.x((tokens,), 320, torch.float16).cuda()
        cases.assert_product(twice(x) / 2, x, dense.T)


def test_gradient_of_the_activations():
    shape = (130, 300)
    tiles, planes = random_tiles(shape, 4)
    codebook = cases.codebook(4).cuda()
    x = cases.x((7,), 300, torch.bfloat16).cuda().requires_grad_()
    grad = cases.x((7,), 130, torch.bfloat16).cuda()
    OPS.gemm(x, *tiles, codebook, None, 130).backward(grad)
    cases.assert_product(x.grad, grad, reference.dequantize(*planes, codebook, list(shape), torch.float32))


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_layer_is_one_kernel(tokens):
    layer = hf_kbit.KbitLinear.from_linear(torch.nn.Linear(512, 256, dtype=torch.bfloat16), bits=4).cuda()
    x = cases.x((tokens,), 512, torch.bfloat16).cuda()
    layer(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer(x)
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if event.self_device_time_total > 0]
    assert len(kernels) == 1 and "gemm_kernel" in kernels[0], kernels
