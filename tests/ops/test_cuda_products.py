"""Products of any kind on a GPU, at the sizes at which its kernels divide their work. What they must give is in
``tests/contract.py``.

Up to 16 tokens one kernel multiplies, beyond, on Hopper, another; on other GPUs, up to 256, a third; before sm_80
none: the weight is decoded first. What counts is not the GPU but the architecture that the code was built for.
"""

import itertools
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import cases
import contract
import pytest
import torch
from compiled import FORMS, NEEDED, assert_replayed, assert_same_on_streams, cuda_arch, is_hopper
from contract import OPS, Call, Weight, arbitrary, assert_same_bits, batch_invariant, on

import hf_kbit
from hf_kbit.format import reference, transforms
from hf_kbit.ops import native

pytestmark = NEEDED
BITS = pytest.mark.parametrize("bits", cases.BITS)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
TRANSFORMS = pytest.mark.parametrize(
    ("scaled", "rotated"), contract.TRANSFORMS, ids=["plain", "columns", "rotated", "both"]
)
TRANSFORMED = pytest.mark.parametrize("transformed", [False, True], ids=["plain", "transformed"])
FEW = 16  # tokens, for which weights are multiplied by their scales in float32; for more, in the dtype of x


def most_fused() -> int:
    """Tokens, beyond which a weight of fewer than 40 million numbers is dequantized."""
    return 0 if cuda_arch() < 800 else 4095 if is_hopper() else 256


needs_int8 = pytest.mark.skipif(cuda_arch() < 800, reason="no kernel before compute capability 8.0")
needs_hopper = pytest.mark.skipif(not is_hopper(), reason="no kernel but for Hopper")
needs_fused = pytest.mark.skipif(not most_fused(), reason="dequantized")


def weight_of(shape, bits, scaled=False, rotated=False, **how) -> Weight:
    return arbitrary(tuple(shape), bits, scaled, rotated, home="cuda", **how)


def x_of(tokens, in_features, dtype, seed=0) -> torch.Tensor:
    return cases.x((tokens,), in_features, dtype, seed).cuda()


def tiles(call: Call) -> Call:
    return call.forms()[1]


def run(call: Call) -> torch.Tensor:
    found = tiles(call).run("cuda")
    return found[0] if len(found) == 1 else torch.cat(found, -1)


def hold_twice(call: Call) -> None:
    """What it must give, and the same again."""
    for found, again in zip(call.hold("cuda"), call.run("cuda"), strict=True):
        assert_same_bits(found, again)


# --- each number of a weight, and of activations --------------------------------------------------


def assert_near_in_float16(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for numbers that are rounded first with more range: twice, where float16 loses digits."""
    few_digits = (expected.abs() < 2.0**-14) & (expected.dtype == torch.float16)
    assert ((found - expected).abs() <= 2.0**-24)[few_digits].all()
    assert torch.equal(torch.where(few_digits, expected, found), expected)


def with_rounded_levels(weight: Weight, dtype) -> torch.Tensor:
    """A level in the dtype of x, times its scale, rounded once."""
    levels = weight.codebook.to(dtype).float()
    return reference.dequantize(*weight.planes, levels, [*weight.shape], torch.float32).to(dtype)


@BITS
@HALVES
@pytest.mark.parametrize("shape", [(16, 256), (35, 1000), (130, 513)], ids=str)
@pytest.mark.parametrize("tokens", [FEW, 50, 300])
def test_one_hot_tokens_read_the_weight(shape, bits, dtype, tokens):
    """Every number by itself. Nothing else is added."""
    if tokens > most_fused():
        pytest.skip("dequantized: float32 levels, not rounded ones")
    weight = weight_of(shape, bits, kind="random")
    expected = with_rounded_levels(weight, dtype)
    for start in range(0, shape[1], tokens):
        x = torch.zeros(tokens, shape[1], dtype=dtype, device="cuda")  # as many tokens in the last turn too
        x[: shape[1] - start, start:].fill_diagonal_(1)
        columns = expected[:, start : start + tokens]
        found = run(contract.gemm(x=x, weight=weight, biased=False)).T
        ours, others = found.split([columns.shape[1], tokens - columns.shape[1]], dim=1)
        assert not others.any()
        if tokens <= FEW:
            assert torch.equal(ours, columns)
        else:
            assert_near_in_float16(ours, columns)


@BITS
@HALVES
@needs_hopper
@pytest.mark.parametrize("shape", [(16, 256), (35, 1000), (130, 513), (400, 136)], ids=str)
def test_one_hot_gradients_read_the_weight(shape, bits, dtype):
    weight = weight_of(shape, bits, kind="random")
    grad = torch.eye(shape[0], dtype=dtype, device="cuda")
    assert_near_in_float16(run(contract.gemm_gradient(grad=grad, weight=weight)), with_rounded_levels(weight, dtype))


@BITS
@HALVES
@pytest.mark.parametrize("exponent", [0, -12, 20, "spread"])
def test_any_codebook(bits, dtype, exponent):
    """Levels beyond what float16 holds, below its normal numbers, and of very different size."""
    if not most_fused() and dtype is torch.float16 and exponent != 0:
        pytest.skip("dequantized: float16 does not hold such weights")
    weight = weight_of((200, 1111), bits, kind="random")
    spread, unit = exponent == "spread", 0 if exponent == "spread" else exponent
    factors = torch.linspace(-9, 9, 2**bits, device="cuda").exp2() if spread else 2.0**unit
    weight = replace(weight, codebook=weight.codebook * factors)
    for tokens in (1, 4, 16, 40, 250):
        x = (cases.x((tokens,), 1111).cuda() * 2.0 ** (-unit - 6)).to(dtype)
        tiles(contract.gemm(x=x, weight=weight, biased=False)).hold("cuda")


def identity(columns: torch.Tensor, bits: int) -> Weight:
    """Of each row a single one, in these columns."""
    rows, blocks = len(columns), int(columns.max()) // 32 + 1
    planes = torch.zeros(rows, blocks * bits, dtype=torch.int64)
    planes[torch.arange(rows), columns // 32 * bits] = 1 << columns % 32
    absmax = torch.full((rows, blocks), 7 << 4, dtype=torch.uint8)  # 2**-4, with signs or without
    return Weight((rows, 32 * blocks), on("cuda", (planes.int(), absmax)), 16 * torch.arange(2.0**bits).cuda())


@TRANSFORMS
@HALVES
@BITS
@needs_fused
@pytest.mark.parametrize("in_features", [100, 4096, 14336])
def test_activations_are_transformed_to_the_last_bit(in_features, bits, dtype, scaled, rotated):
    """As the reference does in float32, and rounded once: in the CTAs of one product, or by a kernel before."""
    last = -(-in_features // 32) * 32 - 1 if rotated else in_features - 1
    chosen = torch.linspace(0, last, 300).long()
    weight, columns = identity(chosen, bits), cases.columns(in_features, scaled)
    scales = None if columns is None else reference.decode_e4m4(columns)
    how = weight.codebook, None, 300, on("cuda", columns), rotated
    for tokens in (1, 2, 5, 8, 9, 16, 17, 100):
        x = cases.x((tokens,), in_features, dtype)
        expected = transforms.of_input(x, scales, rotated)[:, chosen].to(dtype)
        assert torch.equal(OPS.gemm(x.cuda(), *weight.tiles, *how).cpu(), expected), tokens


# --- every way to divide the work -----------------------------------------------------------------


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
def test_gemm(shape, bits, dtype, transformed):
    weight = weight_of(shape, bits, transformed, transformed)
    for tokens in (1, 2, 3, 5, 8, 11, 16, 17, 33, 100, 129, 300, 1030):
        if tokens > (100 if shape[0] > 50_000 else 300 if transformed else 1030):
            continue  # outputs of gigabytes; transformed weights of few rows are decoded first
        x = x_of(tokens, shape[1], dtype) * 2.0**-6
        hold_twice(tiles(contract.gemm(x=x, weight=weight, roundings=1 if tokens <= FEW else 2)))


@TRANSFORMS
@BITS
@HALVES
@pytest.mark.parametrize(
    "shape",
    # Fewer rows than a piece of 64; the last row tile, slab or block not full; CTAs that divide the rows of tiles;
    # more tiles than processors; tiles of 1000 tokens that fill an H200, so that the kernel takes them.
    [(16, 256), (35, 1000), (130, 300), (520, 8), (1000, 1096), (5000, 1100), (3072, 8192), (70_000, 264)]
    + [(48, 14336), (200, 4090)],
    ids=str,
)
def test_gradient(shape, bits, dtype, scaled, rotated):
    """On Hopper by one kernel up to a number of tokens that depends on the weight; beyond, and on other GPUs, some
    columns at a time are decoded first."""
    weight = weight_of(shape, bits, scaled, rotated, unit=2.0**-6)
    for tokens in (1, 7, 60, 256, 300, 1000, 1030):
        hold_twice(tiles(contract.gemm_gradient(grad=x_of(tokens, shape[0], dtype), weight=weight)))


SOME, MANY = (1, 2, 16, 17, 31, 64, 100, 128, 200, 256, 300), (17, 33, 64, 100, 128, 250, 500, 1000)
# Of up to a warp to a whole CTA, too long for shared memory, and of more blocks than a CTA has threads.
WIDTHS = [8, 24, 40, 1024, 1032, 4096, 4100, 8224, 16384, 16392, 32768, 32776, 40_000, 133_120]


@needs_int8
@BITS
@pytest.mark.parametrize(
    ("shape", "all_tokens"),
    [
        # Less than a tile, ragged rows and columns.
        *[(shape, SOME) for shape in [(1, 1), (16, 256), (35, 1000), (130, 513), (264, 776)]],
        # K in clusters, slabs of the last tiles divided, many row tiles.
        *[(shape, MANY) for shape in [(4096, 4096), (3072, 8192), (1280, 8192)]],
        *[(shape, MANY) for shape in [(48, 14336), (100_000, 264)]],
        *[((16, width), (17, 18)) for width in WIDTHS],
        # Tokens that warps take in turns: the next one is copied only when all have read the last one.
        *[((16, width), (count,)) for width, count in [(40, 9000), (768, 9000), (2048, 5000), (4104, 3000)]],
        *[((16, width), (count,)) for width, count in [(14336, 1000), (28672, 500)]],
    ],
    ids=str,
)
def test_gemm_int8(shape, all_tokens, bits):
    """What a token has that is not finite stays there."""
    weight = weight_of(shape, bits, True, True)
    for tokens, dtype in itertools.product(all_tokens, (torch.float16, torch.bfloat16)):
        x = contract.int8_x((tokens,), shape[1], dtype)
        for first in range(700, tokens - 10, 700):
            x[first : first + 10] = x[:10]
        known = dtype == torch.float16
        hold_twice(tiles(contract.gemm_int8(x=x.cuda(), weight=weight, biased=known, known=known)))


# Rows of the weights, and columns: q, k and v, whose tiles CTAs divide; gate and up, of more tiles than an H200 has
# processors; ragged ones; CTAs have slabs of one weight, then of the next, or whole tiles; more than a launch takes.
GROUPS = [((4096, 1024, 1024), 4096), ((14336, 14336), 4096), ((35, 3, 2000, 16), 1111), ((40, 2000, 16), 5888)]
GROUPS += [((300, 90_000), 264)]
INT8_GROUPS = [((1536, 256, 256), 1536), ((2048, 512, 512), 4096), ((9000, 8500), 776), ((40, 1700, 16, 700), 513)]
INT8_GROUPS += [((35, 7, 130, 1, 513), 1000)]


def chosen(i: int, which: str) -> bool:
    return which == "all" or (which == "some" and i % 2 == 1)


def group_of(rows, columns: int, bits: int, scaled="none", rotated="none") -> list[Weight]:
    """Weights with different levels; "all" or "some" of them, every other one, with columns of their own, rotated."""
    group = []
    for i, part in enumerate(rows):
        weight = weight_of((part, columns), bits, rotated=chosen(i, rotated), kind="random", unit=2.0**i)
        own = cases.columns(columns, seed=i).cuda() if chosen(i, scaled) else None
        group.append(replace(weight, columns=own))
    return group


def int8_group_of(rows, columns: int, bits, shared: str = "none") -> list[Weight]:
    """ "all" of them have their column scales in common, "some", two each, or "none". bits: of all, or of each."""
    group, scales = [], [cases.columns(columns, seed=seed).cuda() for seed in range(len(rows))]
    for i, part in enumerate(rows):
        width = bits if isinstance(bits, int) else bits[i]
        weight = weight_of((part, columns), width, rotated=True, kind="random", unit=2.0**-i)
        group.append(replace(weight, columns=scales[{"all": 0, "some": i // 2, "none": i}[shared]]))
    return group


@BITS
@HALVES
@pytest.mark.parametrize(("rows", "columns"), GROUPS, ids=str)
@pytest.mark.parametrize(("scaled", "rotated"), [("none", "none"), ("some", "none"), ("some", "all"), ("all", "some")])
def test_group(rows, columns, scaled, rotated, bits, dtype):
    weights = group_of(rows, columns, bits, scaled, rotated)
    for tokens in (1, 6, 16, 17, 40, 64, 130, 250, 600):
        if tokens <= (130 if max(rows) > 50_000 else 600):
            x = x_of(tokens, columns, dtype) * 2.0**-6
            hold_twice(tiles(contract.gemm_group(weights, x=x, roundings=1 if tokens <= FEW else 2)))


@needs_int8
@HALVES
@pytest.mark.parametrize("shared", ["all", "some", "none"])
@pytest.mark.parametrize(
    ("rows", "columns", "bits"),
    [(*group, bits) for group, bits in itertools.product(INT8_GROUPS, cases.BITS)]
    + [
        ([300 + 40 * i for i in range(len(bits))], 1000, bits)
        for bits in ((4, 4, 3), (2, 5, 5), (4, 3, 4, 4, 4, 4, 2))
    ],
    ids=str,
)
def test_group_of_8_bit_inputs(rows, columns, bits, shared, dtype):
    weights = int8_group_of(rows, columns, bits, shared)
    for tokens in (65, 128, 300, 513, 2048):
        x = contract.int8_x((tokens,), columns, dtype).cuda() * 2.0**-6
        hold_twice(tiles(contract.gemm_group(weights, x=x, int8=(True,))))


@needs_int8
@pytest.mark.parametrize(("shape", "tokens"), [((48, 520), 700), ((32, 14336), 300), ((32, 40_000), 70)], ids=str)
def test_group_of_many_column_scales(shape, tokens):
    """x becomes int8 for each of them, up to four at a time."""
    weights = int8_group_of((shape[0],) * 5, shape[1], 4)
    weights[4] = replace(weights[4], columns=weights[0].columns)
    x = contract.int8_x((tokens,), shape[1], torch.float16).cuda()
    hold_twice(tiles(contract.gemm_group(weights, x=x, int8=(True,))))


WAYS = ("even", "random", "one", "short")


def divided(count, rows, how) -> torch.Tensor:
    """Offsets of experts: rows divided evenly, at random (some experts have none), all to one, or some to nobody."""
    if how == "even":
        inner = torch.arange(1, count) * rows // count
    elif how == "one":
        inner = torch.tensor([0] * (count // 2) + [rows] * (count - 1 - count // 2))
    else:
        inner = torch.randint(0, rows + 1, (count - 1,), generator=cases.generator(count, rows)).sort().values
    offsets = torch.tensor([0, *inner.tolist(), rows])
    return (offsets * 2 // 3 if how == "short" else offsets).int().cuda()


def picked_rows(tokens, rows, seed=0) -> torch.Tensor:
    return torch.randint(0, tokens, (rows,), generator=cases.generator(tokens, rows, seed)).int().cuda()


def experts_of(count, shape, bits, scaled=False, rotated=False) -> Weight:
    return weight_of((count, *shape), bits, scaled, rotated, unit=2.0**-6)


def calls_of_experts(make, weight: Weight, rows, how, dtype, swiglu=False, tokens=None):
    """x as it is, without a bias, and rows picked from it, with one."""
    count, out_features, in_features = weight.shape
    offsets, bias = divided(count, rows, how), cases.x((count,), out_features, dtype).cuda()
    tokens = tokens or max(1, rows // 8)
    for x, index, its in ((rows, None, None), (tokens, picked_rows(tokens, rows), bias)):
        x = x_of(x, in_features * (1 + swiglu), dtype)
        given = {"x": x, "rows": index, "offsets": offsets, "bias": its}
        yield make(weight=weight, dtype=dtype, swiglu=swiglu, **given)


EXPERTS = [  # experts, their shape, and the most rows
    (1, (35, 1000), 3000),
    (3, (100, 328), 3000),
    (8, (1000, 2880), 3000),
    (130, (100, 328), 3000),  # more experts than processors
    (16, (1536, 2048), 3000),
    (128, (256, 768), 3000),  # three slabs, which two groups divide unevenly
    (4, (4096, 3584), 300),  # groups meet after each of several tiles
    (2, (16, 14336), 100),
    (1024, (16, 256), 3000),
    (5, (7, 33), 100),
]
# Of tiles of 128 tokens, whose rows are multiplied in steps of 32, at both ends of each step.
STEPS = [1, 31, 32, 33, 64, 65, 0, 96, 97, 127, 128, 129, 160, 161, 225, 256, 257, 300]


@BITS
@HALVES
@pytest.mark.parametrize(("count", "shape", "most"), EXPERTS, ids=str)
def test_experts(count, shape, most, bits, dtype):
    """Tiles and 16-bit activations take one kernel, for few rows of each expert or, on Hopper, for many; everything
    else takes a grouped product of torch, or those of one weight, one expert after the other."""
    weight = experts_of(count, shape, bits)
    for rows, how in itertools.product((1, 2, 8, 31, 128, 300, 1030, 3000), WAYS):
        if rows <= most:
            *_, picked = calls_of_experts(contract.gemm_experts, weight, rows, how, dtype)
            hold_twice(tiles(picked))


@needs_hopper
@BITS
@HALVES
@pytest.mark.parametrize(("count", "shape", "most"), [e for e in EXPERTS if e[0] not in (16, 1024)], ids=str)
def test_experts_of_8_bit_inputs(count, shape, most, bits, dtype):
    weight = weight_of((count, *shape), bits, True, True, kind="random")
    for rows, how in itertools.product((1, 9, 31, 128, 300, 1030, 3000), WAYS):
        if rows <= most:
            for call in calls_of_experts(contract.gemm_experts_int8, weight, rows, how, dtype):
                hold_twice(tiles(call))


@BITS
@HALVES
@pytest.mark.parametrize("op", ["gemm_experts", pytest.param("gemm_experts_int8", marks=needs_hopper)])
def test_every_number_of_rows_in_a_tile(op, bits, dtype):
    int8 = op == "gemm_experts_int8"
    weight = weight_of((len(STEPS), 300, 1100), bits, int8, int8)
    given = {
        "x": x_of(sum(STEPS), 1100, dtype),
        "offsets": torch.tensor([0, *itertools.accumulate(STEPS)]).int().cuda(),
    }
    hold_twice(tiles(getattr(contract, op)(weight=weight, dtype=dtype, shares=STEPS, **given)))


@BITS
@HALVES
@TRANSFORMS
def test_experts_transform(bits, dtype, scaled, rotated):
    """And behind a gate, near what is made of torch's gate, whose roundings may differ; also of halves that are no
    pieces of eight."""
    for count, shape in ((3, (100, 328)), (130, (48, 104)), (8, (512, 2880)), (2, (64, 9000)), (3, (40, 36))):
        weight = experts_of(count, shape, bits, scaled, rotated)
        for rows, how in ((1, "even"), (8, "random"), (64, "random"), (700, "short")):
            for call in calls_of_experts(contract.gemm_experts, weight, rows, how, dtype, tokens=rows):
                tiles(call).hold("cuda")
            for call in calls_of_experts(contract.gemm_experts, weight, rows, how, dtype, True, rows):
                found, (gate, up) = run(call), call.arguments["x"].float().chunk(2, dim=-1)
                gated = (torch.nn.functional.silu(gate) * up).to(dtype)
                expected = run(replace(call, arguments=call.arguments | {"x": gated, "swiglu": False}))
                largest = expected.abs().amax(dim=1, keepdim=True).float()
                assert ((found.float() - expected.float()).abs() <= 8 * cases.EPS[dtype] * largest).all()


@needs_hopper
@HALVES
@pytest.mark.parametrize("swiglu", [False, True], ids=["x", "behind a gate"])
@pytest.mark.parametrize("in_features", [8, 36, 40, 104, 513, 768, 2048, 2880, 14336, 32_776, 40_000])
def test_tokens_that_several_rows_pick(in_features, swiglu, dtype):
    """Rows that are made one by one, and that are copied; indices that name no token mean the nearest one."""
    weight, rows = weight_of((3, 40, in_features), 4 - swiglu, True, True), 700
    offsets, bias = divided(3, rows, "random"), cases.x((3,), 40, dtype).cuda()
    for tokens in (1, 20, 75, 200, 201, 300, 602, 1000):
        x = contract.int8_x((tokens,), in_features, dtype)
        if swiglu:
            x = contract.exactly_gated(torch.cat([x, x], dim=-1))
        index = picked_rows(tokens, rows)
        given = {"x": x.cuda(), "offsets": offsets, "bias": bias}
        call = tiles(contract.gemm_experts_int8(weight=weight, dtype=dtype, swiglu=swiglu, rows=index, **given))
        hold_twice(call)
        spoilt = index.clone()
        spoilt[::50], spoilt[1::70] = -7, tokens
        nearest = replace(call, arguments=call.arguments | {"rows": spoilt.clamp(0, tokens - 1)})
        found = run(replace(call, arguments=call.arguments | {"rows": spoilt}))
        assert_same_bits(found, run(nearest))


@needs_hopper
@HALVES
def test_8_bit_inputs_behind_torchs_gate(dtype):
    """Near, as roundings may differ."""
    weight = weight_of((3, 40, 768), 3, True, True)
    for call in calls_of_experts(contract.gemm_experts_int8, weight, 700, "random", dtype, True, 100):
        gate, up = call.arguments["x"].float().chunk(2, dim=-1)
        gated = (torch.nn.functional.silu(gate) * up).to(dtype)
        near = run(replace(call, arguments=call.arguments | {"x": gated, "swiglu": False})).float()
        assert ((run(call).float() - near).abs() <= 0.1 * near.abs().amax(dim=1, keepdim=True)).all()


@FORMS
@pytest.mark.parametrize("op", ["gemm_experts", pytest.param("gemm_experts_int8", marks=needs_hopper)])
def test_offsets_and_rows_that_are_not_there(op, tiled):
    """Results are of no use, but what has its rows right is right, and no kernel reads or writes elsewhere."""
    if op == "gemm_experts_int8" and not tiled:
        pytest.skip("no kernel")
    weight = weight_of((4, 100, 328), 4, True, True)
    given = {"x": x_of(5, 328, torch.float16), "rows": picked_rows(5, 40), "offsets": divided(4, 40, "even")}
    call = getattr(contract, op)(weight=weight, **given, bias=None).forms()[tiled]
    (expected,) = call.run("cuda")
    for ends in ([0, 10, 2**31 - 1, -(2**31), 40], [7, -5, 3, 1000, 10**9], [2**31 - 1] * 5, [-(2**31)] * 5):
        offsets = torch.tensor(ends, dtype=torch.int32, device="cuda")
        replace(call, arguments=call.arguments | {"offsets": offsets}).run("cuda")
    spoilt = given["rows"].clone()
    spoilt[11], spoilt[30] = -1, 2**31 - 1
    (found,) = replace(call, arguments=call.arguments | {"rows": spoilt}).run("cuda")
    others = torch.tensor([row not in (11, 30) for row in range(40)], device="cuda")
    assert torch.equal(found[others], expected[others])
    (nearest,) = replace(call, arguments=call.arguments | {"rows": spoilt.clamp(0, 4)}).run("cuda")
    assert torch.equal(found, nearest)


# --- graphs, streams, threads ---------------------------------------------------------------------


def layer(call: Call, form: int = 1):
    """A function of other inputs: x, and of experts rows and offsets too."""
    arguments = call.forms()[form].arguments
    first = next(iter(arguments))

    def multiply(x, rows=None, offsets=None):
        own = {first: x} | ({} if offsets is None else {"rows": rows, "offsets": offsets})
        own = {name: value for name, value in own.items() if name in arguments}
        with batch_invariant(native.batch_invariant or call.int8):
            return getattr(OPS, call.op)(*(arguments | own).values())

    return multiply


@TRANSFORMED
@pytest.mark.parametrize("tokens", [1, 5, 8, 16, 17, 60, 250])
@pytest.mark.parametrize("op", ["gemm", pytest.param("gemm_int8", marks=needs_int8)])
def test_graph_replays_read_new_activations(op, tokens, transformed):
    """Each layer reads what a kernel just before it, which it may overlap with, has written."""
    layers, transformed = [], transformed or op == "gemm_int8"
    for shape, bits in (((3072, 8192), 3), ((8192, 3072), 4)):
        weight = weight_of(shape, bits, transformed, transformed, unit=2.0**-9)
        layers.append(
            layer(getattr(contract, op)(x=x_of(tokens, shape[1], torch.bfloat16), weight=weight, biased=False))
        )

    def all_layers(x):
        for multiply in layers * 2:
            x = multiply(x)
        return x

    inputs = [(x_of(tokens, 8192, torch.bfloat16, seed),) for seed in range(4)]
    assert all_layers(*inputs[0]).isfinite().all()
    assert_replayed(all_layers, inputs)


@needs_int8
@pytest.mark.parametrize("tokens", [65, 250])
def test_graph_replays_of_groups(tokens):
    """Also a second launch of products, of another width."""
    groups = []
    for bits in ((4, 4, 4), (3, 3, 2)):
        weights = [
            replace(one, codebook=one.codebook * 2.0**-9) for one in int8_group_of((3072, 512, 3072), 3072, bits)
        ]
        groups.append(
            layer(contract.gemm_group(weights, x=x_of(tokens, 3072, torch.bfloat16), int8=(True,), biased=(False,)))
        )

    def all_groups(x):
        for multiply in groups * 2:
            *others, x = multiply(x)
        return *others, x

    inputs = [(x_of(tokens, 3072, torch.bfloat16, seed),) for seed in range(4)]
    assert all(found.isfinite().all() and found.any() for found in all_groups(*inputs[0]))
    assert_replayed(all_groups, inputs)


def inputs_of_experts(rows, in_features, dtype) -> list[tuple[torch.Tensor, ...]]:
    """x, rows and offsets, of 16 experts."""
    given = [(x_of(50, in_features, dtype, seed), picked_rows(50, rows, seed)) for seed in range(len(WAYS))]
    return [(*its, divided(16, rows, how)) for its, how in zip(given, WAYS, strict=True)]


@HALVES
@pytest.mark.parametrize("rows", [8, 128, 1500])
@pytest.mark.parametrize(("tiled", "shape"), [(True, (1536, 2048)), (True, (300, 328)), (False, (100, 328))], ids=str)
def test_graph_replays_read_new_offsets(rows, tiled, shape, dtype):
    """And new rows and activations: nothing is read on the host."""
    weight = experts_of(16, shape, 4, True, True)
    multiply = layer(contract.gemm_experts(weight=weight), tiled)
    gradient = layer(contract.gemm_experts_gradient(weight=weight), tiled)

    def both(x, index, offsets):
        y = multiply(x, index, offsets)
        return y, gradient(y, None, offsets)

    inputs = inputs_of_experts(rows, shape[1], dtype)
    assert_replayed(both, inputs)
    for x, index, offsets in inputs:
        call = contract.gemm_experts(weight=weight, x=x, rows=index, offsets=offsets, bias=None)
        call.forms()[tiled].hold("cuda")


@needs_hopper
@HALVES
@pytest.mark.parametrize("rows", [8, 128, 1500])
def test_graph_replays_of_experts_of_8_bit_inputs(rows, dtype):
    """Each product waits for the one before."""
    layers = [
        layer(contract.gemm_experts_int8(weight=weight_of((16, *shape), bits, True, True, unit=2.0**-9)))
        for shape, bits in (((1536, 2048), 4), ((2048, 1536), 3))
    ]

    def both(x, index, offsets):
        return layers[1](layers[0](x, index, offsets), None, offsets)

    inputs = [
        (x_of(50, 2048, dtype, seed), picked_rows(50, rows, seed), divided(16, rows, how))
        for seed, how in enumerate(WAYS)
    ]
    assert both(*inputs[0]).isfinite().all()
    assert_replayed(both, inputs)


def on_streams(make, columns: int, all_tokens, count=4, turns=5) -> None:
    for tokens in all_tokens:
        inputs = [x_of(tokens, columns, torch.float16, i) * 2.0**-6 for i in range(count)]
        multiply = layer(make(inputs[0]))
        joined = lambda x, multiply=multiply: torch.cat(contract.as_list(multiply(x)), -1)  # noqa: E731
        assert_same_on_streams(joined, inputs, turns)


@BITS
@pytest.mark.parametrize("shape", [(4096, 4096), (3072, 8192)], ids=str)
@TRANSFORMED
def test_gemm_on_streams_at_once_and_again(shape, bits, transformed):
    """The weight stays in L2, so that copies into the ring arrive as early as they can."""
    weight = weight_of(shape, bits, transformed, transformed)
    tokens = 1, 8, 9, 16, 17, 50, 128, 520
    on_streams(lambda x: contract.gemm(x=x, weight=weight, biased=False), shape[1], tokens, 8, 20)


@pytest.mark.parametrize("tokens", [60, 700])  # of which rows of tiles are divided, and not
def test_gradients_in_graphs_and_on_streams(tokens):
    weight = weight_of((4096, 5632), 2, True, True, unit=2.0**-6)
    on_streams(lambda grad: contract.gemm_gradient(grad=grad, weight=weight), 4096, [tokens], 6, 10)
    inputs = [x_of(tokens, 4096, torch.float16, i) * 2.0**-6 for i in range(6)]
    assert_replayed(layer(contract.gemm_gradient(grad=inputs[0], weight=weight)), [(grad,) for grad in inputs])


@BITS
@pytest.mark.parametrize(("rows", "columns"), GROUPS, ids=str)
@pytest.mark.parametrize("scaled", ["none", "all"])
def test_groups_on_streams(rows, columns, scaled, bits):
    weights = group_of(rows, columns, bits, scaled)
    on_streams(lambda x: contract.gemm_group(weights, x=x, biased=(False,)), columns, (16, 40, 250))


@needs_int8
@pytest.mark.parametrize("shape", [(1280, 8192), (3072, 8192), (100, 1000)], ids=str)
def test_8_bit_inputs_on_streams(shape):
    weight = weight_of(shape, 4, True, True)
    on_streams(lambda x: contract.gemm_int8(x=x, weight=weight, biased=False), shape[1], (17, 120, 250))


@needs_int8
@pytest.mark.parametrize(("rows", "columns"), INT8_GROUPS[:4], ids=str)
def test_groups_of_8_bit_inputs_on_streams(rows, columns):
    weights = int8_group_of(rows, columns, 4)
    on_streams(lambda x: contract.gemm_group(weights, x=x, int8=(True,), biased=(False,)), columns, (65, 120, 250))


@needs_hopper
def test_experts_of_8_bit_inputs_on_streams():
    weight, offsets = weight_of((16, 512, 2048), 4, True, True), divided(16, 300, "random")
    how = {"weight": weight, "offsets": offsets, "rows": None, "bias": None, "dtype": torch.float16}
    on_streams(lambda x: contract.gemm_experts_int8(x=x, **how), 2048, [300])


@pytest.mark.parametrize("tokens", [20, 300])
def test_threads_that_have_not_used_the_gpu(tokens):
    """As those in which autograd runs: what a launch takes needs no call of the CUDA runtime before it."""
    weight, inputs = weight_of((512, 768), 4), [x_of(tokens, columns, torch.bfloat16) for columns in (512, 768)]
    calls = contract.gemm_gradient(grad=inputs[0], weight=weight), contract.gemm(x=inputs[1], weight=weight)
    layers = [layer(call) for call in calls]

    def both():
        return [multiply(x) for multiply, x in zip(layers, inputs, strict=True)]

    expected = both()
    both()  # the allocator keeps the memory of these, so that threads need not ask for any
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(both).result()
        assert all(map(torch.equal, found, expected))
        del found


# --- batches --------------------------------------------------------------------------------------


@needs_hopper
@BITS
@HALVES
@pytest.mark.parametrize("op", ["gemm_experts", "gemm_experts_int8"])
def test_experts_give_the_same_bits_in_every_batch(op, bits, dtype):
    """On other GPUs they are products of one weight, which have a test of their own."""
    weight = weight_of((4, 1000, 2880), bits, True, op.endswith("int8"), unit=2.0**-6)
    x, ends = x_of(600, 2880, dtype), torch.tensor([0, 150, 300, 450, 600], device="cuda").int()

    def multiply(index, offsets):
        given = {"x": x, "rows": index, "offsets": offsets.int(), "bias": None}
        return run(getattr(contract, op)(weight=weight, dtype=dtype, **given))

    with batch_invariant():
        whole = multiply(None, divided(4, 600, "even"))
        for rows in ([0], [599], [3, 149], [0, 150, 300, 450], range(100, 260), range(0, 600, 2)):
            index = torch.tensor(list(rows), dtype=torch.int32, device="cuda")
            assert torch.equal(multiply(index, torch.searchsorted(index, ends)), whole[index.long()])


@needs_int8
@pytest.mark.parametrize(("rows", "columns"), [*INT8_GROUPS[:2], INT8_GROUPS[3]], ids=str)
def test_groups_of_any_number_of_tokens_have_8_bit_inputs(rows, columns):
    """Where products are batch-invariant, as ``Call.run`` has them."""
    weights, x = int8_group_of(rows, columns, 4, "some"), x_of(300, columns, torch.float16)
    for tokens in (1, 16, 20, 64, 70, 300):
        tiles(contract.gemm_group(weights, x=x[:tokens], int8=(True,))).hold("cuda")


@needs_int8
@BITS
@HALVES
def test_few_tokens_keep_16_bit_inputs(bits, dtype):
    """Alone, and beside another weight, whose inputs are never rounded; so do planes and float32."""
    weight = weight_of((130, 513), bits, True, True, kind="random")
    for tokens in (0, 1, 17, 64, 65, 200):
        x = x_of(tokens, 513, dtype)
        rounded, plain = tiles(contract.gemm_int8(x=x, weight=weight)), tiles(contract.gemm(x=x, weight=weight))
        exact, *_ = plain.run("cuda")
        wanted = rounded.run("cuda")[0] if tokens > 64 else exact
        assert_same_bits(OPS.gemm_int8(*rounded.arguments.values()), wanted)
        both = tiles(contract.gemm_group([weight, weight], x=x, int8=(True, False), biased=(True,)))
        for found, its in zip(OPS.gemm_group(*both.arguments.values()), (wanted, exact), strict=True):
            torch.testing.assert_close(found, its)  # together they may divide the work in another way
    for x, form in ((x_of(70, 513, torch.float32), 1), (x_of(70, 513, dtype), 0)):
        calls = [make(x=x, weight=weight).forms()[form].arguments for make in (contract.gemm_int8, contract.gemm)]
        assert torch.equal(OPS.gemm_int8(*calls[0].values()), OPS.gemm(*calls[1].values()))


@needs_hopper
@pytest.mark.parametrize("swiglu", [False, True])
def test_few_rows_of_experts_keep_16_bit_inputs(swiglu):
    weight = weight_of((2, 100, 328), 4, True, True)
    cells = [(64, torch.float16, 1), (65, torch.float16, 1)]
    cells += [] if swiglu else [(70, torch.float32, 1), (70, torch.float16, 0)]
    for rows, dtype, form in cells:
        given = {"x": x_of(rows, 328 * (1 + swiglu), dtype), "offsets": divided(2, rows, "even"), "swiglu": swiglu}
        makes = contract.gemm_experts_int8, contract.gemm_experts
        calls = [make(weight=weight, dtype=dtype, **given).forms()[form].arguments for make in makes]
        found, exact = OPS.gemm_experts_int8(*calls[0].values()), OPS.gemm_experts(*calls[1].values())
        assert torch.equal(found, exact) == (rows != 65)


# --- launches and memory --------------------------------------------------------------------------


def launches(call: Call) -> dict[str, int]:
    arguments = tiles(call).arguments
    return cases.launched(lambda: getattr(OPS, call.op)(*arguments.values()))


def kernels_of(launched) -> set[str]:
    return {name for name in launched if name.endswith("_kernel")}


@needs_fused
@pytest.mark.parametrize("transformed", [False, True])
def test_launches_of_groups(transformed):
    """One for up to four weights of one width, where there are up to 16 tokens or on Hopper, else one for each. One
    more before them makes what becomes of x for up to four of them: of transformed weights from two tokens on, and on
    Hopper from 17 on."""
    hopper = is_hopper()
    few, many = "gemm_kernel", "gemm_wgmma_kernel" if hopper else "gemm_mma_kernel"
    # Tokens, widths, the kernel and how often; of a shape for which mma.sync does not divide K and add up the parts.
    cells = [(16, "4444", few, 1), (16, "4", few, 1), (1, "4444", few, 1), (1, "34", few, 2), (32, "4", many, 1)]
    cells += [] if transformed else [(16, "44444", few, 5)]
    if hopper:
        cells += [(32, "44", many, 1), (300, "4444", many, 1), (32, "44444", many, 2), (32, "344", many, 2)]
        cells += [(32, "434", many, 3)]
    for tokens, widths, kernel, count in cells:
        weights = [weight_of((256, 512), int(width), rotated=transformed, unit=2.0**-6) for width in widths]
        if transformed:
            weights = [replace(one, columns=cases.columns(512, seed=i).cuda()) for i, one in enumerate(weights)]
        call = contract.gemm_group(weights, x=x_of(tokens, 512, torch.bfloat16))
        before = -(-len(widths) // 4) * (tokens > 1) if transformed else int(hopper and tokens > 16)
        expected = {kernel: count} | ({"transform_kernel": before} if before else {})
        assert launches(call) == expected, (tokens, widths)
        tiles(call).hold("cuda")
    assert OPS.gemm_group(x_of(1, 512, torch.bfloat16), [], [], [], [], [], [], [], []) == []


@needs_hopper
@BITS
def test_launches_of_gradients(bits):
    """One kernel, or two where the rows of tiles are divided; nothing of the weight is decoded to memory."""
    both = {"gradient_wgmma_kernel", "add_gradient_parts_kernel"}
    for shape, tokens, expected in (
        ((4096, 1024), 100, both),
        ((4096, 4096), 1000, {"gradient_wgmma_kernel"} if bits < 5 else {"dequantize_tiles_kernel"}),
        ((4096, 1024), 2560, {"dequantize_tiles_kernel"}),
    ):
        found = launches(
            contract.gemm_gradient(grad=x_of(tokens, shape[0], torch.bfloat16), weight=weight_of(shape, bits))
        )
        assert {*found} & {*both, "dequantize_tiles_kernel"} == expected, found


@BITS
@HALVES
def test_launches_of_experts(bits, dtype):
    """A row for each of some experts is one; more are picked and transformed before. With a gate too."""
    weight, ways = (
        weight_of((8, 300, 328), bits, True),
        [(2, {"gemm_kernel"}), (40, {"transform_kernel", "gemm_kernel"})],
    )
    if is_hopper():
        ways.append((300, {"transform_kernel", "experts_wgmma_kernel"}))
    for (rows, expected), swiglu in itertools.product(ways, (False, True)):
        given = {"x": x_of(4, 328 * (1 + swiglu), dtype), "rows": picked_rows(4, rows), "bias": None}
        call = contract.gemm_experts(weight=weight, swiglu=swiglu, offsets=divided(8, rows, "even"), **given)
        assert kernels_of(launches(call)) == expected
    ids, y = torch.randint(0, 8, (16, 4)).cuda(), x_of(64, 100, dtype)
    assert kernels_of(cases.launched(lambda: OPS.route_experts(ids, 8))) == {"route_kernel"}
    _, places, _ = OPS.route_experts(ids, 8)
    weights = x_of(16, 4, torch.float32)
    assert kernels_of(cases.launched(lambda: OPS.combine_experts(y, places, weights))) == {"combine_kernel"}


def allocations(call) -> int:
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call()
    return torch.cuda.memory_stats()["allocation.all.allocated"] - before


@needs_int8
def test_launches_and_allocations_of_8_bit_inputs():
    """x is made int8 once for all, in one launch for up to four column scales; on Hopper up to four weights of one
    width that follow each other are one launch."""
    product = "gemm_int8_kernel" if is_hopper() else "gemm_mma_kernel"
    cells = [((256, 64, 64), 4, 1), ((300, 300), 2, 1), ((64,) * 5, 3, 2)]
    cells += [((64,) * 3, (3, 4, 4), 2), ((64,) * 3, (4, 3, 4), 3)]
    calls = []  # each with how often there are products on Hopper, weights, and launches for x
    for (rows, bits, on_hopper), shared, tokens in itertools.product(cells, ("all", "none"), (65, 300)):
        x, made = x_of(tokens, 512, torch.bfloat16), 2 if len(rows) > 4 and shared == "none" else 1
        group = int8_group_of(rows, 512, bits, shared)
        calls.append((contract.gemm_group(group, x=x, int8=(True,), biased=(False,)), on_hopper, len(rows), made))
    for tokens in (17, 250):
        x, weight = x_of(tokens, 8192, torch.bfloat16), weight_of((1280, 8192), 4, True, True)
        calls.append((contract.gemm_int8(x=x, weight=weight, biased=False), 1, 1, 1))
    for call, on_hopper, count, made in calls:
        with batch_invariant():
            found = launches(call)
            assert found.pop("add_parts_kernel", 0) == 0 or not is_hopper()
            assert found == {product: on_hopper if is_hopper() else count, "tokens_to_int8_kernel": made}, str(call)
            arguments = tiles(call).arguments
            op = getattr(OPS, call.op)
            assert allocations(lambda op=op, its=arguments: op(*its.values())) == 1 + count
    few = contract.gemm_group(int8_group_of((256, 64, 64), 512, 4), x=x_of(64, 512, torch.bfloat16), int8=(True,))
    found = launches(few)
    assert "tokens_to_int8_kernel" not in found and found.get("gemm_wgmma_kernel", 0) == is_hopper()


@needs_hopper
def test_launches_and_allocations_of_experts_of_8_bit_inputs():
    weight = weight_of((8, 300, 328), 4, True, True)
    for rows, copied in ((2, False), (300, True)):
        given = {"x": x_of(4, 656, torch.bfloat16), "rows": picked_rows(4, rows), "bias": None}
        call = contract.gemm_experts_int8(weight=weight, swiglu=True, offsets=divided(8, rows, "even"), **given)
        arguments, copies = tiles(call).arguments, {"copy_int8_tokens_kernel": 1} if copied else {}
        with batch_invariant():
            assert launches(call) == {"experts_int8_kernel": 1, "tokens_to_int8_kernel": 1, **copies}
            assert allocations(lambda its=arguments: OPS.gemm_experts_int8(*its.values())) == 2


@torch.no_grad()
@needs_int8
def test_compiled_layers_are_one_launch():
    """Of a few tokens 16-bit inputs, in one launch as well."""
    linears = [torch.nn.Linear(512, rows, dtype=torch.bfloat16) for rows in (256, 64, 64)]
    layers = [hf_kbit.KbitLinear.from_linear(linear, 4).cuda().eval() for linear in linears]
    for one in layers:
        one.take_inputs("int8")
    compiled = torch.compile(lambda x: [one(x) for one in layers], fullgraph=True, dynamic=False)
    for tokens in (8, 100):
        x = x_of(tokens, 512, torch.bfloat16)
        found = cases.launched(lambda x=x: compiled(x))
        if is_hopper():
            assert found["gemm_int8_kernel" if tokens > 64 else "gemm_kernel"] == 1
        assert found["tokens_to_int8_kernel"] == (tokens > 64)
        for ours, one in zip(compiled(x), layers, strict=True):
            torch.testing.assert_close(ours, one(x))


@FORMS
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tokens_by_decoded_slices(dtype, biased, tiled):
    """Several slices of rows, the last of which is not full; leading dimensions, strided rows."""
    x = cases.x((2, 4200), 4100, dtype).cuda()[:, ::2]
    call = contract.gemm(x=x, weight=weight_of((7000, 4100), 5), biased=biased, roundings=1)
    (found,) = call.forms()[tiled].hold("cuda")
    assert found.shape == (2, 2100, 7000)


@FORMS
@HALVES
def test_gradients_in_slices(dtype, tiled):
    """Of columns, the last of which are fewer; strided rows, leading dimensions."""
    grad = cases.x((2, 2100), 70_000, dtype).cuda()[:, ::2] * 2.0**-8
    (found,) = contract.gemm_gradient(grad=grad, weight=weight_of((70_000, 1100), 3)).forms()[tiled].hold("cuda")
    assert found.shape == (2, 1050, 1100)


@pytest.mark.parametrize("tokens", [20, 300, 4096])
def test_memory_of_a_large_layer(tokens):
    """Beside inputs and outputs: forward, while kernels decode as they multiply, nothing or x in another order and the
    sums of parts of tiles, 18 MiB; else, and backward, at most 64 MiB of the 448 that the weight has in 16 bits."""
    shape, codebook = (28672, 8192), cases.codebook(4).cuda()
    words = [
        one.repeat(shape[0] // 16, shape[1] // 256, *[1] * (one.dim() - 2)) for one in weight_of((16, 256), 4).tiles
    ]
    x = x_of(tokens, shape[1], torch.bfloat16).requires_grad_()
    grad = x_of(tokens, shape[0], torch.bfloat16)
    OPS.gemm(x, *words, codebook, None, shape[0]).backward(grad)  # cuBLAS takes its workspace
    x.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = OPS.gemm(x, *words, codebook, None, shape[0])
    most = x.nbytes + (18 << 20) if is_hopper() else 64 << 20
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + most
    torch.cuda.reset_peak_memory_stats()
    y.backward(grad)
    assert torch.cuda.max_memory_allocated() - before <= y.nbytes + x.nbytes + (64 << 20)
