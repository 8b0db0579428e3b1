"""The fused CUDA gemm, for tiles: exact values, any codebook, graphs, streams, compilation.

Up to 16 tokens it is one kernel, beyond, on Hopper, another; on other GPUs, up to 256, a third; before sm_80 none.
What counts is not the GPU but the architecture that the code was built for."""

from dataclasses import replace

import cases
import pytest
import torch
from compiled import (
    BITS,
    BOTH,
    FORMS,
    HALVES,
    NEEDED,
    OPS,
    Weight,
    assert_near_in_float16,
    assert_replayed,
    assert_same_on_streams,
    cuda_arch,
    is_hopper,
    random_levels,
    rows_with_special_numbers,
    to,
)

import hf_kbit
from hf_kbit.format import reference, transforms

pytestmark = NEEDED
TRANSFORMED = pytest.mark.parametrize("transformed", [False, True], ids=["plain", "transformed"])
FEW = 16  # tokens, for which weights are multiplied by their scales in float32; for more, in the dtype of x


def most_fused() -> int:
    """Tokens, beyond which a weight of fewer than 40 million numbers is dequantized."""
    return 0 if cuda_arch() < 800 else 4095 if is_hopper() else 256


def roundings(tokens: int) -> int:
    """Of a weight: of its level, and for many tokens, or where it is dequantized, of its product with the scale."""
    return 1 if tokens <= FEW else 2


@BITS
@HALVES
@pytest.mark.parametrize("shape", [(16, 256), (35, 1000), (130, 513)], ids=str)
@pytest.mark.parametrize("tokens", [FEW, 50, 300])
def test_one_hot_tokens_read_the_weight(shape, bits, dtype, tokens):
    """Every weight by itself: a level in the dtype of x, times its scale, rounded once. Nothing else is added."""
    if tokens > most_fused():
        pytest.skip("dequantized: float32 levels, not rounded ones")
    weight = Weight.random(shape, bits, codebook=random_levels(bits))
    rounded = weight.codebook.to(dtype).float()
    expected = reference.dequantize(*weight.planes, rounded, list(shape), torch.float32).to(dtype)
    for start in range(0, shape[1], tokens):
        x = torch.zeros(tokens, shape[1], dtype=dtype, device="cuda")  # as many tokens in the last turn too
        x[: shape[1] - start, start:].fill_diagonal_(1)
        columns = expected[:, start : start + tokens]
        found = weight.multiply(x).T
        ours, others = found.split([columns.shape[1], tokens - columns.shape[1]], dim=1)
        assert not others.any()
        if tokens <= FEW:
            assert torch.equal(ours, columns)
        else:
            assert_near_in_float16(ours, columns)


@BITS
@HALVES
@pytest.mark.parametrize("exponent", [0, -12, 20, "spread"])
def test_any_codebook(bits, dtype, exponent):
    """Levels beyond what float16 holds, below its normal numbers, and of very different size."""
    if not most_fused() and dtype is torch.float16 and exponent != 0:
        pytest.skip("dequantized: float16 does not hold such weights")
    codebook = random_levels(bits)
    if exponent == "spread":
        codebook, exponent = codebook * torch.linspace(-9, 9, 2**bits, device="cuda").exp2(), 0
    weight = Weight.random((200, 1111), bits, codebook=codebook * 2.0**exponent)
    for tokens in (1, 4, 16, 40, 250):
        x = (cases.x((tokens,), 1111).cuda() * 2.0 ** (-exponent - 6)).to(dtype)
        weight.check(weight.multiply(x), x, None, roundings(tokens))


@BITS
@HALVES
@pytest.mark.parametrize(
    "shape",
    [
        (4096, 4096),
        (3072, 8192),  # divided along K among clusters
        (1280, 8192),  # the last tiles divided among all CTAs
        (48, 14336),
        (100_000, 264),  # many row tiles for each CTA
        (600_000, 40),  # more than one wave of CTAs
        (1, 70_000),
    ],
    ids=str,
)
@TRANSFORMED
def test_every_way_to_divide_the_work(shape, bits, dtype, transformed, poison):
    weight, bias = Weight.random(shape, bits, transformed, transformed), cases.x((), shape[0], dtype).cuda()
    for tokens in (1, 2, 3, 5, 8, 11, 16, 17, 33, 100, 129, 300, 1030):
        if tokens > (100 if shape[0] > 50_000 else 300 if transformed else 1030):
            continue  # outputs of gigabytes; transformed weights of few rows are decoded first
        x = cases.x((tokens,), shape[1], dtype).cuda() * 2.0**-6
        poison("cuda", tokens * shape[0] * 2, weight.stored.shape[1] * tokens * 2)
        weight.check(weight.multiply(x, bias), x, bias, roundings(tokens))


GROUPS = pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ((4096, 1024, 1024), 4096),
        ((14336, 14336), 4096),
        ((35, 3, 2000, 16), 1111),
        ((40, 2000, 16), 5888),  # at 250 tokens CTAs have slabs of one weight, then of the next
        ((300, 90_000), 264),  # and whole tiles
    ],
    ids=str,
)


def group_of(rows, columns: int, bits: int, scaled: str = "none", rotated: str = "none") -> list[Weight]:
    """Weights with different levels; "all" or "some" of them, every other one, with columns of their own, rotated."""

    def has(i, which):
        return which == "all" or (which == "some" and i % 2 == 1)

    group = []
    for i, part in enumerate(rows):
        levels = random_levels(bits) * 2.0**i
        weight = Weight.random((part, columns), bits, rotated=has(i, rotated), codebook=levels)
        group.append(replace(weight, columns=cases.columns(columns, seed=i).cuda() if has(i, scaled) else None))
    return group


def multiply_all(x, weights, biases) -> list[torch.Tensor]:
    each = [
        (*weight.tiles, weight.codebook, bias, weight.shape[0], weight.columns, int(weight.rotated), None)
        for weight, bias in zip(weights, biases, strict=True)
    ]
    return OPS.gemm_group(x, *map(list, zip(*each, strict=True)))


@BITS
@HALVES
@GROUPS
@pytest.mark.parametrize(("scaled", "rotated"), [("none", "none"), ("some", "none"), ("some", "all"), ("all", "some")])
def test_group_gives_what_each_gives_alone(rows, columns, scaled, rotated, bits, dtype, poison):
    weights = group_of(rows, columns, bits, scaled, rotated)
    biases = [cases.x((), part, dtype).cuda() if i % 2 else None for i, part in enumerate(rows)]
    for tokens in (1, 6, 16, 17, 40, 64, 130, 250, 600):
        if tokens > (130 if max(rows) > 50_000 else 600):
            continue
        x = cases.x((tokens,), columns, dtype).cuda() * 2.0**-6
        poison("cuda", *(tokens * part * 2 for part in rows))
        for product, weight, bias in zip(multiply_all(x, weights, biases), weights, biases, strict=True):
            weight.check(product, x, bias, roundings(tokens))


@HALVES
@pytest.mark.parametrize("columns", [264, 259])
def test_tensors_anywhere_in_memory(columns, dtype):
    """Views that start at odd addresses, strided rows, leading dimensions, a length that is no multiple of eight, and
    words and scales where 16-byte loads may not start."""
    weight, bias = Weight.random((50, columns), 4), cases.x((), 101, dtype).cuda()[1::2]
    memory = cases.x((40,), columns + 3, dtype).cuda().flatten()
    for x in (
        memory[1 : 1 + 36 * columns].view(36, columns),
        memory[: 36 * columns].view(columns, 36).T,
        memory[1 : 1 + 6 * columns].view(6, columns),
        memory[: 12 * columns].view(12, columns)[::2],
        memory[: 6 * columns].view(columns, 6).T,
        memory[: 6 * columns].view(2, 1, 3, columns),
    ):
        found = weight.multiply(x, bias)
        assert found.shape == (*x.shape[:-1], 50) and found.is_contiguous()
        rows = x.reshape(-1, columns)
        weight.check(found.view(-1, 50), rows, bias, roundings(len(rows)))
        assert torch.equal(weight.moved().multiply(x, bias), found)


@pytest.mark.parametrize("tokens", [5, 45])
def test_infinity_and_nan_stay_in_their_token(tokens):
    weight = Weight.random((64, 512), 4, codebook=random_levels(4))
    weight.tiles[1].clamp_(min=1)  # zero times infinity is NaN, which is right, but not what is looked for here
    rows = rows_with_special_numbers(weight.multiply, cases.x((tokens,), 512, torch.bfloat16).cuda())
    assert not rows.isfinite().any()


@BITS
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 50, 128, 520])
@pytest.mark.parametrize("shape", [(4096, 4096), (3072, 8192)], ids=str)
@TRANSFORMED
def test_streams_at_once_and_again(shape, tokens, bits, transformed):
    """The weight stays in L2, so that copies into the ring arrive as early as they can."""
    weight = Weight.random(shape, bits, transformed, transformed)
    inputs = [cases.x((tokens,), shape[1], torch.float16, seed=i).cuda() for i in range(8)]
    assert_same_on_streams(weight.multiply, inputs, turns=20)


@BITS
@GROUPS
@pytest.mark.parametrize("scaled", ["none", "all"])
def test_groups_on_streams_at_once_and_again(rows, columns, scaled, bits):
    weights = group_of(rows, columns, bits, scaled)
    for tokens in (16, 40, 250):
        inputs = [cases.x((tokens,), columns, torch.float16, seed=i).cuda() * 2.0**-6 for i in range(4)]
        assert_same_on_streams(lambda x: torch.cat(multiply_all(x, weights, [None] * len(rows)), -1), inputs, turns=5)


@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 60])
@TRANSFORMED
def test_graph_replays_read_new_activations(tokens, transformed):
    """Each layer reads what a kernel just before it, which it may overlap with, has written."""
    layers = [
        Weight.random(shape, bits, transformed, transformed, cases.codebook(bits).cuda() * 2.0**-9)
        for shape, bits in (((3072, 8192), 3), ((8192, 3072), 4))
    ]

    def all_layers(x):
        for layer in layers * 2:
            x = layer.multiply(x)
        return x

    inputs = [(cases.x((tokens,), 8192, torch.bfloat16, seed=seed).cuda(),) for seed in range(4)]
    assert all_layers(*inputs[0]).isfinite().all()
    assert_replayed(all_layers, inputs)


@torch.no_grad()
@pytest.mark.parametrize("transform", ["none", "rotated"])
def test_launches(transform):
    """One for up to four weights of one width, where there are up to 16 tokens or on Hopper, else one for each. One
    more before them makes what becomes of x for up to four of them: of transformed weights from two tokens on, and on
    Hopper from 17 on."""
    if not most_fused():
        pytest.skip("dequantized: a kernel, then cuBLAS's")
    linears = [torch.nn.Linear(512, 256, dtype=torch.bfloat16) for _ in range(5)]
    four = [hf_kbit.KbitLinear.from_linear(linear, 4, transform=transform).cuda() for linear in linears]
    three = hf_kbit.KbitLinear.from_linear(linears[0], 3, transform=transform).cuda()
    names = ("words", "absmax", "codebook")
    plain, hopper = transform == "none", is_hopper()
    few, many = "gemm_kernel", "gemm_wgmma_kernel" if hopper else "gemm_mma_kernel"
    cells = [(16, four[:4], few, 1), (16, four[:1], few, 1), (1, four[:4], few, 1), (1, [three, four[0]], few, 2)]
    cells += [(16, four, few, 5)] if plain else []
    cells += [(32, four[:1], many, 1)]  # of a shape for which mma.sync does not divide K and add up the parts
    if hopper:
        cells += [(32, four[:2], many, 1), (300, four[:4], many, 1), (32, four, many, 2)]
        cells += [(32, [three, *four[:2]], many, 2), (32, [four[0], three, four[1]], many, 3)]
    for tokens, layers, kernel, count in cells:
        x = cases.x((tokens,), 512, torch.bfloat16).cuda()
        of_each = [[layer.parts[name] for layer in layers] for name in names]
        of_each += [
            [layer.bias for layer in layers],
            [256] * len(layers),
            [layer.parts["columns"] for layer in layers],
        ]
        of_each += [[int(columns is not None) for columns in of_each[-1]], [None] * len(layers)]
        found = cases.launched(lambda x=x, of_each=of_each: OPS.gemm_group(x, *of_each))
        reordered = hopper and tokens > 16  # all want the same of x; transforms differ
        before = int(reordered) if plain else -(-len(layers) // 4) * (tokens > 1)
        assert found == {kernel: count} | ({"transform_kernel": before} if before else {}), (tokens, len(layers))
        for ours, layer in zip(OPS.gemm_group(x, *of_each), layers, strict=True):
            torch.testing.assert_close(ours, layer(x))
    assert OPS.gemm_group(x, [], [], [], [], [], [], [], []) == []


def test_compiles_without_a_graph_break():
    weight = Weight.random((48, 320), 3)

    @torch.compile(fullgraph=True, dynamic=True)
    def twice(x):
        return hf_kbit.ops.gemm(x, *weight.tiles, weight.codebook, out_features=48) * 2

    for tokens in (2, 5, 16, 17, 40):
        x = cases.x((tokens,), 320, torch.float16).cuda()
        weight.check(twice(x) / 2, x, None, roundings(tokens))


@pytest.mark.parametrize("tokens", [20, 300, 4096])
def test_memory_of_a_large_layer(tokens):
    """Beside inputs and outputs: forward, while kernels decode as they multiply, nothing or x in another order and the
    sums of parts of tiles, 18 MiB; else, and backward, at most 64 MiB of the 448 that the weight has in 16 bits."""
    shape = (28672, 8192)
    tiles, _ = cases.tiles_on_gpu((16, 256), 4)
    tiles = [tensor.repeat(shape[0] // 16, shape[1] // 256, *[1] * (tensor.dim() - 2)) for tensor in tiles]
    codebook = cases.codebook(4).cuda()
    x = cases.x((tokens,), shape[1], torch.bfloat16).cuda().requires_grad_()
    grad = cases.x((tokens,), shape[0], torch.bfloat16).cuda()
    OPS.gemm(x, *tiles, codebook, None, shape[0]).backward(grad)  # cuBLAS takes its workspace
    x.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = OPS.gemm(x, *tiles, codebook, None, shape[0])
    most = x.nbytes + (18 << 20) if is_hopper() else 64 << 20
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + most
    torch.cuda.reset_peak_memory_stats()
    y.backward(grad)
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + x.nbytes + (64 << 20)


@FORMS
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens_by_decoded_slices(dtype, biased, tiled):
    """Several slices of rows, the last of which is not full; leading dimensions, strided rows."""
    weight, bias = Weight.random((7000, 4100), 5), cases.x((), 7000, dtype).cuda() if biased else None
    x = cases.x((2, 4200), 4100, dtype).cuda()[:, ::2]
    found = weight.multiply(x, bias, tiled)
    assert found.shape == (2, 2100, 7000) and found.is_contiguous()
    weight.check(found.flatten(0, 1), x.flatten(0, 1), bias)


# --- weights with column scales and a rotation ------------------------------------------------------


def identity(columns, bits: int):
    """Tiles of a weight each of whose rows has a single one, in these columns, and its codebook."""
    rows, blocks = len(columns), int(columns.max()) // 32 + 1
    planes = torch.zeros(rows, blocks * bits, dtype=torch.int64)
    planes[torch.arange(rows), columns // 32 * bits] = 1 << columns % 32
    absmax = torch.full((rows, blocks), 7 << 4, dtype=torch.uint8)  # 2**-4, with signs or without
    tiles = OPS.repack(planes.int().cuda(), absmax.cuda(), bits, [rows, 32 * blocks])
    return tiles, 16 * torch.arange(2.0**bits).cuda()


@BOTH
@HALVES
@BITS
@pytest.mark.parametrize("in_features", [100, 4096, 14336])
def test_activations_are_transformed_to_the_last_bit(in_features, bits, dtype, scaled, rotated):
    """As the reference does in float32, and rounded once: in the CTAs of one product, or by a kernel before."""
    if not most_fused():
        pytest.skip("dequantized: activations stay what they are")
    last = -(-in_features // 32) * 32 - 1 if rotated else in_features - 1
    chosen = torch.linspace(0, last, 300).long()
    tiles, codebook = identity(chosen, bits)
    columns = cases.columns(in_features, scaled)
    scales = None if columns is None else reference.decode_e4m4(columns)
    (on_gpu,) = to("cuda", columns)
    for tokens in (1, 2, 5, 8, 9, 16, 17, 100):
        x = cases.x((tokens,), in_features, dtype)
        expected = transforms.of_input(x, scales, rotated)[:, chosen].to(dtype)
        found = OPS.gemm(x.cuda(), *tiles, codebook, None, 300, on_gpu, rotated)
        assert torch.equal(found.cpu(), expected), tokens
