"""Products of 8-bit inputs of several weights of one input: the bits of each alone, in as few launches as there may
be."""

from dataclasses import replace

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
)

import hf_kbit
from hf_kbit.format import reference

pytestmark = [*NEEDED, pytest.mark.skipif(cuda_arch() < 800, reason="no kernel before compute capability 8.0")]
# Rows of the weights, and columns: q, k and v, whose tiles CTAs divide; gate and up, of more tiles than an H200 has
# processors; ragged ones; more than a launch takes, the smallest that there are.
GROUPS = [
    ((1536, 256, 256), 1536),
    ((2048, 512, 512), 4096),
    ((9000, 8500), 776),
    ((40, 1700, 16, 700), 513),
    ((35, 7, 130, 1, 513), 1000),
]
SHARED = pytest.mark.parametrize("shared", ["all", "some", "none"])


def group_of(rows, columns: int, bits, shared: str = "none") -> list[Weight]:
    """Weights with different levels; "all" of them have their column scales in common, "some", two each, or "none".
    bits: of all, or of each."""
    scales, weights = [cases.columns(columns, seed=i).cuda() for i in range(len(rows))], []
    for i, part in enumerate(rows):
        width = bits if isinstance(bits, int) else bits[i]
        weight = Weight.random((part, columns), width, True, True, random_levels(width) * 2.0**-i)
        weights.append(replace(weight, columns=scales[{"all": 0, "some": i // 2, "none": i}[shared]]))
    return weights


def inverses_of(weights) -> list[torch.Tensor]:
    return [OPS.int8_inverses(*weight.tiles, weight.codebook, list(weight.shape)) for weight in weights]


def multiply_all(x, weights, inverses, biases=None) -> list[torch.Tensor]:
    each = [
        (*weight.tiles, weight.codebook, bias, weight.shape[0], weight.columns, 1, its)
        for weight, its, bias in zip(weights, inverses, biases or [None] * len(weights), strict=True)
    ]
    return OPS.gemm_group(x, *map(list, zip(*each, strict=True)))


def multiply(x, weight, inverses, bias=None) -> torch.Tensor:
    return OPS.gemm_int8(x, *weight.tiles, weight.codebook, bias, weight.shape[0], weight.columns, inverses)


def expected(x, weight, bias=None) -> torch.Tensor:
    return reference.gemm_int8(x, *weight.planes, weight.codebook, bias, weight.shape[0], weight.columns)


def check(x, weights, biases, poison) -> None:
    inverses = inverses_of(weights)
    alone = [multiply(x, *each) for each in zip(weights, inverses, biases, strict=True)]
    poison("cuda", *(len(x) * weight.shape[0] * 2 for weight in weights))
    found = multiply_all(x, weights, inverses, biases)
    for number, (ours, one, weight, bias) in enumerate(zip(found, alone, weights, biases, strict=True)):
        assert_same_bits(ours, one, (len(x), number))
        assert_same_bits(ours, expected(x, weight, bias), (len(x), number))


@BITS
@HALVES
@SHARED
@pytest.mark.parametrize(("rows", "columns"), GROUPS)
def test_bits_of_each_alone(rows, columns, shared, dtype, bits, poison):
    weights = group_of(rows, columns, bits, shared)
    biases = [cases.x((), part, dtype, seed=i).cuda() if i % 2 else None for i, part in enumerate(rows)]
    for tokens in (65, 128, 513, 2048):
        check(cases.x((tokens,), columns, dtype).cuda() * 2.0**-6, weights, biases, poison)


@SHARED
@pytest.mark.parametrize("bits", [(4, 4, 3), (2, 5, 5), (4, 3, 4, 4, 4, 4, 2)], ids=str)
def test_weights_of_different_bits(bits, shared, poison):
    rows = [300 + 40 * i for i in range(len(bits))]
    weights = group_of(rows, 1000, bits, shared)
    for tokens in (70, 300):
        check(cases.x((tokens,), 1000, torch.bfloat16).cuda(), weights, [None] * len(rows), poison)


def test_leading_dimensions_and_strides():
    weights = group_of((64, 40), 300, 4)
    inverses, x = inverses_of(weights), cases.x((2, 50), 300, torch.bfloat16).cuda()
    strided = x.expand(2, *x.shape).transpose(0, -1).contiguous().transpose(0, -1)[0]
    for its in (x, strided):
        for found, weight in zip(multiply_all(its, weights, inverses), weights, strict=True):
            assert_same_bits(found, expected(x, weight))
    assert [found.shape for found in multiply_all(x[:, :0], weights, inverses)] == [(2, 0, 64), (2, 0, 40)]


def test_some_with_16_bit_inputs():
    """Those without inverses, and planes."""
    first, second, third = group_of((256, 64, 130), 512, 4)
    inverses, x = inverses_of((first, second, third)), cases.x((100,), 512, torch.float16).cuda()
    found = multiply_all(x, (first, second, third), (inverses[0], None, inverses[2]))
    for ours, weight in zip(found[::2], (first, third), strict=True):
        assert_same_bits(ours, expected(x, weight))
    assert torch.equal(found[1], second.multiply(x))
    found = multiply_all(x, (first, replace(second, tiles=second.planes)), inverses[:2])
    assert_same_bits(found[0], expected(x, first))
    assert torch.equal(found[1], second.multiply(x, None, False))


def test_launches_and_allocations():
    """x is made int8 once for all, in one launch for up to four column scales; on Hopper up to four weights of one
    width that follow each other are one launch."""
    cells = [((256, 64, 64), 4, 1), ((300, 300), 2, 1), ((64,) * 5, 3, 2)]
    cells += [((64,) * 3, (3, 4, 4), 2), ((64,) * 3, (4, 3, 4), 3)]
    for rows, bits, on_hopper in cells:
        for shared in ("all", "none"):
            weights = group_of(rows, 512, bits, shared)
            inverses = inverses_of(weights)
            for tokens in (65, 300):
                x = cases.x((tokens,), 512, torch.bfloat16).cuda()
                run = lambda x=x, both=(weights, inverses): multiply_all(x, *both)  # noqa: E731
                found = cases.launched(run)
                found.pop("add_parts_kernel", 0)
                products = {"gemm_int8_kernel": on_hopper} if is_hopper() else {"gemm_mma_kernel": len(rows)}
                made = 2 if len(rows) > 4 and shared == "none" else 1
                assert found == products | {"tokens_to_int8_kernel": made}, (rows, bits, shared, tokens)
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
                run()
                assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 1 + len(rows)
    few = cases.x((64,), 512, torch.bfloat16).cuda()
    weights = group_of((256, 64, 64), 512, 4)
    found = cases.launched(lambda: multiply_all(few, weights, inverses_of(weights)))
    assert "tokens_to_int8_kernel" not in found and found["gemm_wgmma_kernel"] == is_hopper()


@pytest.mark.parametrize(("rows", "columns"), [*GROUPS[:2], GROUPS[3]])
@pytest.mark.usefixtures("always_int8")
def test_batch_invariant(rows, columns):
    """Any number of tokens has 8-bit inputs then."""
    weights = group_of(rows, columns, 4, "some")
    inverses, x = inverses_of(weights), cases.x((300,), columns, torch.float16).cuda()
    alone = [expected(x, weight) for weight in weights]
    for tokens in (1, 16, 20, 64, 70, 300):
        for found, whole in zip(multiply_all(x[:tokens], weights, inverses), alone, strict=True):
            assert_same_bits(found, whole[:tokens], tokens)


@pytest.mark.parametrize("tokens", [65, 250])
def test_graph_replays_read_new_activations(tokens):
    """Each group reads what a kernel just before it, which it may overlap with, has written; also a second launch of
    products, of another width."""
    groups = [group_of((3072, 512, 3072), 3072, bits) for bits in ((4, 4, 4), (3, 3, 2))]
    groups = [[replace(weight, codebook=weight.codebook * 2.0**-9) for weight in group] for group in groups]
    inverses = [inverses_of(group) for group in groups]

    def all_groups(x):
        for weights, its in list(zip(groups, inverses, strict=True)) * 2:
            first, second, x = multiply_all(x, weights, its)
        return first, second, x

    inputs = [(cases.x((tokens,), 3072, torch.bfloat16, seed=seed).cuda(),) for seed in range(4)]
    assert all(found.isfinite().all() and found.any() for found in all_groups(*inputs[0]))
    assert_replayed(all_groups, inputs)


@pytest.mark.parametrize(("rows", "columns"), GROUPS[:4])
def test_streams_share_nothing(rows, columns):
    weights = group_of(rows, columns, 4)
    inverses = inverses_of(weights)
    for tokens in (65, 120, 250):
        inputs = [cases.x((tokens,), columns, torch.float16, seed=i).cuda() for i in range(4)]
        assert_same_on_streams(lambda x: torch.cat(multiply_all(x, weights, inverses), -1), inputs, turns=5)


@torch.no_grad()
def test_compiled_layers_are_one_launch():
    """Of a few tokens 16-bit inputs, in one launch as well."""
    linears = [torch.nn.Linear(512, rows, dtype=torch.bfloat16) for rows in (256, 64, 64)]
    layers = [hf_kbit.KbitLinear.from_linear(linear, 4).cuda().eval() for linear in linears]
    for layer in layers:
        layer.take_inputs("int8")
    run = torch.compile(lambda x: [layer(x) for layer in layers], fullgraph=True, dynamic=False)
    for tokens in (8, 100):
        x = cases.x((tokens,), 512, torch.bfloat16).cuda()
        found = cases.launched(lambda x=x: run(x))
        if is_hopper():
            assert found["gemm_int8_kernel" if tokens > 64 else "gemm_kernel"] == 1
        assert found["tokens_to_int8_kernel"] == (tokens > 64)
        for ours, layer in zip(run(x), layers, strict=True):
            torch.testing.assert_close(ours, layer(x))
