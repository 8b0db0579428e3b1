"""The product of experts with 8-bit inputs on Hopper: the bits of ``reference.py``, however rows are divided. Other
GPUs have no kernel."""

import functools
import itertools

import cases
import pytest
import torch
from compiled import (
    BITS,
    HALVES,
    NEEDED,
    OPS,
    WAYS,
    Weight,
    assert_replayed,
    assert_same_bits,
    assert_same_on_streams,
    divided,
    is_hopper,
    moved,
    picked_rows,
    random_levels,
)

import hf_kbit
from hf_kbit.format import reference

pytestmark = [
    *NEEDED,
    pytest.mark.skipif(not is_hopper(), reason="no kernel but for Hopper"),
    pytest.mark.usefixtures("always_int8"),
]


class Experts(Weight):
    """Those of a mixture, ``[E, N, K]``, with any levels, and what 1 stands for in their rows."""

    @classmethod
    def random(cls, count, shape, bits, unit=1.0):
        found = super().random((count, *shape), bits, True, True, random_levels(bits) * unit)
        matrices = zip(*found.planes, strict=True)
        how = found.codebook, list(shape)
        found.inverses = torch.stack([reference.int8_inverses(*matrix, *how) for matrix in matrices])
        return found

    def how(self, bias, rows, offsets):
        return self.codebook, bias, rows, offsets, self.shape[0], self.columns

    def multiply(self, x, rows, offsets, bias=None, known=True, tiled=True, swiglu=False):
        packed, inverses = self.tiles if tiled else self.planes, self.inverses if known else None
        return OPS.gemm_experts_int8(x, *packed, *self.how(bias, rows, offsets), inverses, swiglu)

    def expected(self, x, rows, offsets, bias=None):
        return reference.gemm_experts_int8(x, *self.planes, *self.how(bias, rows, offsets), self.inverses)


@BITS
@HALVES
@pytest.mark.parametrize(
    ("count", "shape", "most"),
    [
        (1, (35, 1000), 3000),
        (3, (100, 328), 3000),
        (8, (264, 2880), 1030),
        (130, (100, 328), 3000),  # more experts than processors
        (128, (256, 768), 3000),  # three slabs, which two groups divide unevenly
        (4, (2048, 3584), 300),  # groups meet after each of several tiles
        (2, (16, 14336), 100),
        (5, (7, 33), 100),
    ],
    ids=str,
)
def test_bits_of_the_reference(count, shape, most, bits, dtype, poison):
    experts, bias = Experts.random(count, shape, bits), cases.x((count,), shape[0], dtype).cuda()
    for rows, how in itertools.product((1, 9, 31, 128, 300, 1030, 3000), WAYS):
        if rows > most:
            continue
        offsets, index = divided(count, rows, how), picked_rows(max(1, rows // 8), rows)
        for tokens, picked, its_bias in ((max(1, rows // 8), index, bias), (rows, None, None)):
            x = cases.x((tokens,), shape[1], dtype).cuda()
            poison("cuda", rows * shape[0] * 2)
            found = experts.multiply(x, picked, offsets, its_bias)
            assert_same_bits(found, experts.expected(x, picked, offsets, its_bias), (rows, how))


@BITS
@HALVES
def test_every_number_of_rows_in_a_tile(bits, dtype, poison):
    """Of tiles of 128 tokens, whose rows are multiplied in steps of 32, at both ends of each step."""
    shares = [1, 31, 32, 33, 64, 65, 0, 96, 97, 127, 128, 129, 160, 161, 225, 256, 257, 300]
    experts = Experts.random(len(shares), (300, 1100), bits)
    offsets = torch.tensor([0, *itertools.accumulate(shares)]).int().cuda()
    x = cases.x((sum(shares),), 1100, dtype).cuda()
    poison("cuda", len(x) * 300 * 2)
    assert_same_bits(experts.multiply(x, None, offsets), experts.expected(x, None, offsets))


@BITS
def test_what_a_caller_may_leave_out_or_lay_elsewhere(bits):
    """Inverses, also of rows that tiles pad; addresses and strides."""
    experts, offsets = Experts.random(5, (100, 328), bits), divided(5, 60, "random")
    x = cases.x((60,), 328, torch.bfloat16).cuda()
    wanted = experts.expected(x, None, offsets)
    assert_same_bits(experts.multiply(x, None, offsets, known=False), wanted)
    its = experts.moved()
    its.inverses = experts.inverses.T.contiguous().T
    for elsewhere in (x.T.contiguous().T, moved(x)):
        assert_same_bits(its.multiply(elsewhere, None, offsets), wanted)


@HALVES
def test_special_numbers_stay_in_their_row(dtype):
    experts, offsets = Experts.random(6, (320, 513), 4), divided(6, 50, "random")
    x, bias = cases.x((50,), 513, dtype).cuda(), cases.x((6,), 320, dtype).cuda()
    x[3, 7], x[4, 8], x[5, 512], x[6] = float("nan"), float("inf"), -float("inf"), 0
    found = experts.multiply(x, None, offsets, bias)
    assert_same_bits(found, experts.expected(x, None, offsets, bias))
    assert found[3:6].isnan().all() and found[6:].isfinite().all()


@HALVES
@pytest.mark.parametrize("in_features", [8, 40, 513, 2048, 14336, 40_000])
def test_tokens_that_several_rows_pick(in_features, dtype):
    """Rows that are made one by one, and that are copied; indices that name no token mean the nearest one."""
    experts, rows = Experts.random(3, (32, in_features), 4), 602
    offsets, bias = divided(3, rows, "random"), cases.x((3,), 32, dtype).cuda()
    for tokens in (1, 20, 75, 200, 201, 300, 602, 1000):
        x, index = cases.x((tokens,), in_features, dtype).cuda(), picked_rows(tokens, rows)
        if tokens > 10:
            x[3, -1], x[4, 0], x[5], x[6] = float("nan"), float("inf"), 0, x[6] * 2.0**-12
        spoilt = index.clone()
        spoilt[::50], spoilt[1::70] = -7, tokens
        for its in (index, spoilt):
            wanted = experts.expected(x, its.clamp(0, tokens - 1), offsets, bias)
            assert_same_bits(experts.multiply(x, its, offsets, bias), wanted, tokens)


def exactly_gated(x):
    """Halves that a gate makes x again, in any arithmetic, or zeros: silu of 32 or more is that number."""
    gate = torch.tensor([32, 64, 128, 0, 256], dtype=x.dtype, device=x.device)[torch.arange(x.numel()) % 5].view_as(x)
    up = torch.where(gate == 0, x, x / gate)
    return torch.cat([gate, up], dim=-1), gate * up


@HALVES
@pytest.mark.parametrize("in_features", [8, 36, 104, 768, 2880, 14336, 32_776, 40_000])
def test_behind_a_gate(in_features, dtype):
    """The bits of what the gate makes; near those of torch's gate, whose roundings may differ."""
    experts, rows = Experts.random(3, (40, in_features), 3), 700
    offsets, bias = divided(3, rows, "random"), cases.x((3,), 40, dtype).cuda()
    for tokens, index in ((rows, None), (100, picked_rows(100, rows)), (400, picked_rows(400, rows))):
        x = cases.x((tokens,), in_features, dtype).cuda()
        x[3, -1], x[4, 0], x[5], x[6] = float("nan"), float("inf"), 0, x[6] * 2.0**-3
        both, gated = exactly_gated(x)
        wanted = experts.expected(gated, index, offsets, bias)
        assert_same_bits(experts.multiply(both, index, offsets, bias, swiglu=True), wanted, tokens)
        both = cases.x((tokens,), 2 * in_features, dtype).cuda()
        gate, up = both.float().chunk(2, dim=-1)
        found = experts.multiply(both, index, offsets, swiglu=True).float()
        near = experts.multiply((torch.nn.functional.silu(gate) * up).to(dtype), index, offsets).float()
        assert ((found - near).abs() <= 0.1 * near.abs().amax(dim=1, keepdim=True)).all()


@HALVES
def test_same_bits_in_every_batch(dtype):
    experts, x = Experts.random(4, (300, 2880), 4), cases.x((600,), 2880, dtype).cuda()
    whole = experts.multiply(x, None, divided(4, 600, "even"))
    for rows in ([0], [599], [3, 149], [0, 150, 300, 450], range(100, 260), range(0, 600, 2)):
        index = torch.tensor(list(rows), dtype=torch.int32, device="cuda")
        offsets = torch.searchsorted(index, torch.tensor([0, 150, 300, 450, 600], device="cuda").int())
        assert torch.equal(experts.multiply(x, index, offsets.int()), whole[index.long()])


def test_what_no_kernel_multiplies_keeps_16_bit_inputs():
    """Planes, and float32."""
    hf_kbit.set_batch_invariant(False)
    experts, offsets = Experts.random(1, (4096, 328), 4), divided(1, 70, "even")
    x = cases.x((70,), 328).cuda()
    for its, packed in ((x, experts.tiles), (x.half(), experts.planes)):
        how = *packed, *experts.how(None, None, offsets)
        assert torch.equal(OPS.gemm_experts_int8(its, *how, experts.inverses), OPS.gemm_experts(its, *how, True))


def test_offsets_and_rows_that_are_not_there():
    """Results are of no use, but what has its rows right is right, and no kernel reads or writes elsewhere."""
    experts = Experts.random(4, (100, 328), 4)
    x, index, even = cases.x((5,), 328, torch.float16).cuda(), picked_rows(5, 40), divided(4, 40, "even")
    for ends in ([0, 10, 2**31 - 1, -(2**31), 40], [7, -5, 3, 1000, 10**9], [2**31 - 1] * 5, [-(2**31)] * 5):
        experts.multiply(x, index, torch.tensor(ends, dtype=torch.int32, device="cuda"))
    spoilt = index.clone()
    spoilt[11], spoilt[30] = -1, 2**31 - 1
    assert_same_bits(experts.multiply(x, spoilt, even), experts.multiply(x, spoilt.clamp(0, 4), even))


def test_where_16_bit_inputs_are_kept():
    """Few rows of each expert."""
    hf_kbit.set_batch_invariant(False)
    experts = Experts.random(2, (100, 328), 4)
    for rows, swiglu in itertools.product((64, 65), (False, True)):
        how = *experts.tiles, *experts.how(None, None, divided(2, rows, "even"))
        x = cases.x((rows,), 328 * (1 + swiglu), torch.float16).cuda()
        exact = OPS.gemm_experts(x, *how, True, swiglu)
        found = OPS.gemm_experts_int8(x, *how, experts.inverses, swiglu)
        assert torch.equal(found, exact) == (rows == 64)


def test_no_rows():
    experts, offsets = Experts.random(3, (100, 328), 4), torch.zeros(4, dtype=torch.int32, device="cuda")
    x = cases.x((5,), 328, torch.float16).cuda()
    assert experts.multiply(x, picked_rows(5, 0), offsets).shape == (0, 100)
    assert not experts.multiply(x, picked_rows(5, 40), offsets).any()


def test_launches_and_allocations():
    experts = Experts.random(8, (300, 328), 4)
    for rows, copied in ((2, False), (300, True)):
        index, offsets, x = picked_rows(4, rows), divided(8, rows, "even"), cases.x((4,), 656, torch.bfloat16).cuda()
        call = functools.partial(experts.multiply, x, index, offsets, swiglu=True)
        copies = {"copy_int8_tokens_kernel": 1} if copied else {}
        assert cases.launched(call) == {"experts_int8_kernel": 1, "tokens_to_int8_kernel": 1, **copies}
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        call()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] - before == 2


@HALVES
@pytest.mark.parametrize("rows", [8, 128, 1500])
def test_graph_replays_read_new_offsets(rows, dtype):
    """And new rows and activations: nothing is read on the host, and each product waits for the one before."""
    up, down = (Experts.random(16, shape, bits, 2.0**-9) for shape, bits in (((1536, 2048), 4), ((2048, 1536), 3)))

    def both(x, index, offsets):
        return down.multiply(up.multiply(x, index, offsets), None, offsets)

    inputs = [
        (cases.x((50,), 2048, dtype, seed=seed).cuda(), picked_rows(50, rows, seed), divided(16, rows, how))
        for seed, how in enumerate(WAYS)
    ]
    assert both(*inputs[0]).isfinite().all()
    assert_replayed(both, inputs)


def test_streams_share_nothing():
    experts, offsets = Experts.random(16, (512, 2048), 4), divided(16, 300, "random")
    inputs = [cases.x((300,), 2048, torch.float16, seed=i).cuda() for i in range(4)]
    assert_same_on_streams(lambda x: experts.multiply(x, None, offsets), inputs, turns=5)
