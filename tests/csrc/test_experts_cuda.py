"""Products of rows with the experts that have them, on a GPU: every way to divide rows and work, transforms, graphs.

Tiles and 16-bit activations take one kernel, for few rows of each expert or, on Hopper, for many; everything else
takes a grouped product of torch, or those of one weight, one expert after the other. Results have the same bounds."""

import functools
import itertools

import cases
import pytest
import torch
from compiled import (
    BITS,
    FORMS,
    HALVES,
    NEEDED,
    OPS,
    TRANSFORMS,
    WAYS,
    Weight,
    assert_replayed,
    divided,
    is_hopper,
    picked_rows,
    rows_with_special_numbers,
)

import hf_kbit
from hf_kbit.format import reference

pytestmark = NEEDED
ALL_DTYPES = pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])


class Experts(Weight):
    """Those of a mixture, ``[E, N, K]``."""

    @classmethod
    def random(cls, count, shape, bits, scaled=False, rotated=False):
        return super().random((count, *shape), bits, scaled, rotated, cases.codebook(bits).cuda() * 2.0**-6)

    def multiply(self, x, rows, offsets, bias=None, tiled=True, swiglu=False):
        packed, how = self.tiles if tiled else self.planes, (self.columns, self.rotated, swiglu)
        return OPS.gemm_experts(x, *packed, self.codebook, bias, rows, offsets, self.shape[0], *how)

    def gradient(self, grad, offsets, tiled=True):
        packed, how = self.tiles if tiled else self.planes, (list(self.shape), self.columns, self.rotated)
        return OPS.gemm_experts_gradient(grad, *packed, self.codebook, offsets, *how)

    def check(self, found, x, rows, offsets, bias=None):
        """Each expert's rows against float64; zeros behind them."""
        picked = x if rows is None else x[rows.long()]
        assert found.dtype == x.dtype and found.shape == (len(picked), self.shape[0]) and found.is_contiguous()
        ends, how = offsets.tolist(), (self.columns, self.rotated)
        for expert, (first, end) in enumerate(itertools.pairwise(ends)):
            if first < end:
                dense, added = self.stored[expert].T, None if bias is None else bias[expert]
                cases.assert_product(found[first:end], picked[first:end], dense, added, 2, *how)
        assert not found[ends[-1] :].any()


@BITS
@HALVES
@pytest.mark.parametrize(
    ("count", "shape", "most"),
    [
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
    ],
    ids=str,
)
def test_every_way_to_divide_rows_and_work(count, shape, most, bits, dtype, poison):
    experts, bias = Experts.random(count, shape, bits), cases.x((count,), shape[0], dtype).cuda()
    for rows in (1, 2, 8, 31, 128, 300, 1030, 3000):
        if rows > most:
            continue
        tokens = max(1, rows // 8)
        for how in WAYS:
            offsets, index = divided(count, rows, how), picked_rows(tokens, rows)
            x = cases.x((tokens,), shape[1], dtype).cuda()
            poison("cuda", rows * shape[0] * 2)
            found = experts.multiply(x, index, offsets, bias)
            experts.check(found, x, index, offsets, bias)
            assert torch.equal(found, experts.multiply(x, index, offsets, bias))


@BITS
@HALVES
def test_every_number_of_rows_in_a_tile(bits, dtype, poison):
    """Of tiles of 128 tokens, whose rows are multiplied in steps of 32, at both ends of each step."""
    shares = [1, 31, 32, 33, 64, 65, 0, 96, 97, 127, 128, 129, 160, 161, 225, 256, 257, 300]
    experts = Experts.random(len(shares), (300, 1100), bits)
    offsets = torch.tensor([0, *itertools.accumulate(shares)]).int().cuda()
    x = cases.x((sum(shares),), 1100, dtype).cuda()
    poison("cuda", len(x) * 300 * 2)
    experts.check(experts.multiply(x, None, offsets), x, None, offsets)


def ways_to_multiply(rows, how, count, columns, bias, dtype):
    """x, rows, offsets and bias: x as it is with a bias, and rows picked from it without."""
    offsets, x = divided(count, rows, how), cases.x((rows,), columns, dtype).cuda()
    return (x, None, offsets, bias), (x, picked_rows(rows, rows), offsets, None)


@BITS
@HALVES
@TRANSFORMS
def test_transforms(bits, dtype, scaled, rotated, poison):
    for count, shape in ((3, (100, 328)), (130, (48, 100)), (8, (512, 2880))):
        experts, bias = Experts.random(count, shape, bits, scaled, rotated), cases.x((count,), shape[0], dtype).cuda()
        for rows, how in ((1, "even"), (64, "random"), (700, "short")):
            for arguments in ways_to_multiply(rows, how, count, shape[1], bias, dtype):
                poison("cuda", rows * shape[0] * 2)
                experts.check(experts.multiply(*arguments), *arguments)


@BITS
@HALVES
@TRANSFORMS
def test_behind_a_gate(bits, dtype, scaled, rotated, poison):
    """Near what is made of torch's gate, whose roundings may differ; also of halves that are no pieces of eight."""
    for count, shape in ((3, (100, 328)), (130, (48, 104)), (8, (512, 2880)), (2, (64, 9000)), (3, (40, 36))):
        experts, bias = Experts.random(count, shape, bits, scaled, rotated), cases.x((count,), shape[0], dtype).cuda()
        for rows, how in ((1, "even"), (8, "random"), (64, "random"), (700, "short")):
            for x, *others in ways_to_multiply(rows, how, count, 2 * shape[1], bias, dtype):
                poison("cuda", rows * shape[0] * 2)
                found = experts.multiply(x, *others, swiglu=True)
                gate, up = x.float().chunk(2, dim=-1)
                expected = experts.multiply((torch.nn.functional.silu(gate) * up).to(dtype), *others)
                largest = expected.abs().amax(dim=1, keepdim=True).float()
                assert ((found.float() - expected.float()).abs() <= 8 * cases.EPS[dtype] * largest).all()


@BITS
@FORMS
@ALL_DTYPES
def test_other_weights_and_activations(bits, dtype, tiled):
    for transformed in (False, True):
        experts = Experts.random(5, (100, 328), bits, transformed, transformed)
        bias = cases.x((5,), 100, dtype).cuda()
        for rows, how in ((1, "even"), (40, "short"), (300, "random")):
            for arguments in ways_to_multiply(rows, how, 5, 328, bias, dtype):
                experts.check(experts.multiply(*arguments, tiled), *arguments)


@TRANSFORMS
@FORMS
@ALL_DTYPES
def test_gradients(dtype, tiled, scaled, rotated):
    """Of each expert's rows those of its weight alone, whose own tests have the bounds."""
    experts = Experts.random(5, (100, 328), 4, scaled, rotated)
    dense = OPS.dequantize(*experts.tiles, experts.codebook, [100, 328], torch.float64, experts.columns, rotated)
    for rows, how in ((1, "even"), (40, "short"), (300, "random")):
        offsets = divided(5, rows, how)
        grad = cases.x((rows,), 100, dtype).cuda()
        found = experts.gradient(grad, offsets, tiled)
        assert found.dtype == dtype and found.shape == (rows, 328) and found.is_contiguous()
        ends = offsets.tolist()
        for weight, (first, end) in zip(dense, itertools.pairwise(ends), strict=True):
            expected = grad[first:end].double() @ weight
            tolerance = 4 * cases.EPS[dtype] if dtype.itemsize == 2 else 1e-5
            assert first == end or (found[first:end] - expected).abs().max() <= tolerance * expected.abs().max()
        assert not found[ends[-1] :].any()


@HALVES
@pytest.mark.parametrize("rows", [8, 128, 1500])
@pytest.mark.parametrize(("tiled", "shape"), [(True, (1536, 2048)), (True, (300, 328)), (False, (100, 328))], ids=str)
def test_graph_replays_read_new_offsets(rows, tiled, shape, dtype):
    """And new rows and activations: nothing is read on the host."""
    experts = Experts.random(16, shape, 4, scaled=True, rotated=True)

    def both(x, index, offsets):
        y = experts.multiply(x, index, offsets, None, tiled)
        return y, experts.gradient(y, offsets, tiled)

    inputs = [
        (cases.x((50,), shape[1], dtype, seed=seed).cuda(), picked_rows(50, rows, seed), divided(16, rows, how))
        for seed, how in enumerate(WAYS)
    ]
    assert_replayed(both, inputs)
    for given in inputs:
        experts.check(both(*given)[0], *given)


def kernels_of(call) -> set[str]:
    return {name for name in cases.launched(call) if name.endswith("_kernel")}


@BITS
@HALVES
def test_launches(bits, dtype):
    """A row for each of some experts is one; more are picked and transformed before. With a gate too."""
    experts = Experts.random(8, (300, 328), bits, scaled=True)
    ways = [(2, {"gemm_kernel"}), (40, {"transform_kernel", "gemm_kernel"})]
    if is_hopper():
        ways.append((300, {"transform_kernel", "experts_wgmma_kernel"}))
    for rows, expected in ways:
        index, offsets = picked_rows(4, rows), divided(8, rows, "even")
        for columns, swiglu in ((328, False), (656, True)):
            x = cases.x((4,), columns, dtype).cuda()
            call = functools.partial(experts.multiply, x, index, offsets, swiglu=swiglu)
            assert kernels_of(call) == expected
    ids, y = torch.randint(0, 8, (16, 4)).cuda(), cases.x((64,), 100, dtype).cuda()
    assert kernels_of(lambda: OPS.route_experts(ids, 8)) == {"route_kernel"}
    _, places, _ = OPS.route_experts(ids, 8)
    weights = cases.x((16,), 4, torch.float32).cuda()
    assert kernels_of(lambda: OPS.combine_experts(y, places, weights)) == {"combine_kernel"}


@pytest.mark.parametrize("count", [1, 128, 257, 1024, 3000, 8192])
def test_route_of_many(count):
    """As the reference has it, to the number."""
    for tokens, each in ((1, 1), (16, 8), (129, 1), (40, 8), (9000, 8), (100_000, 2)):
        ids = torch.randint(-1, count + 1, (tokens, each), generator=cases.generator(tokens, count)).cuda()
        assert all(map(torch.equal, OPS.route_experts(ids, count), reference.route_experts(ids, count)))


@FORMS
def test_offsets_and_rows_that_are_not_there(tiled):
    """Results are of no use, but what has its rows right is right, and no kernel reads or writes elsewhere."""
    experts = Experts.random(4, (100, 328), 4)
    x, index = cases.x((5,), 328, torch.float16).cuda(), picked_rows(5, 40)
    expected = experts.multiply(x, index, divided(4, 40, "even"), None, tiled)
    for ends in ([0, 10, 2**31 - 1, -(2**31), 40], [7, -5, 3, 1000, 10**9], [2**31 - 1] * 5, [-(2**31)] * 5):
        experts.multiply(x, index, torch.tensor(ends, dtype=torch.int32, device="cuda"), None, tiled)
    spoilt = index.clone()
    spoilt[11], spoilt[30] = -1, 2**31 - 1
    found = experts.multiply(x, spoilt, divided(4, 40, "even"), None, tiled)
    others = torch.tensor([row not in (11, 30) for row in range(40)], device="cuda")
    assert torch.equal(found[others], expected[others])
    assert torch.equal(found, experts.multiply(x, spoilt.clamp(0, 4), divided(4, 40, "even"), None, tiled))


@HALVES
def test_infinity_and_nan_stay_in_their_row(dtype):
    experts, offsets = Experts.random(6, (320, 500), 4), divided(6, 50, "random")
    x = cases.x((50,), 500, dtype).cuda()
    assert not rows_with_special_numbers(lambda x: experts.multiply(x, None, offsets), x).isfinite().all(1).any()


@BITS
@HALVES
def test_weights_and_activations_anywhere_in_memory(bits, dtype):
    experts, offsets = Experts.random(3, (100, 328), bits), divided(3, 20, "random")
    x = cases.x((), 20 * 328 + 1, dtype).cuda()[1:].view(20, 328)
    expected = experts.multiply(x.clone(), None, offsets)
    assert torch.equal(experts.moved().multiply(x, None, offsets), expected)
    assert torch.equal(experts.multiply(x.T.contiguous().T, None, offsets), expected)


@BITS
@HALVES
def test_same_bits_in_every_batch(bits, dtype):
    if not is_hopper():
        pytest.skip("the products of one weight, which have a test of their own")
    hf_kbit.set_batch_invariant(True)
    try:
        experts = Experts.random(4, (1000, 2880), bits, scaled=True)
        x = cases.x((600,), 2880, dtype).cuda()
        whole = experts.multiply(x, None, divided(4, 600, "even"))
        for rows in ([0], [599], [3, 149], [0, 150, 300, 450], range(100, 260), range(0, 600, 2)):
            index = torch.tensor(list(rows), dtype=torch.int32, device="cuda")
            offsets = torch.searchsorted(index, torch.tensor([0, 150, 300, 450, 600], device="cuda").int())
            assert torch.equal(experts.multiply(x, index, offsets.int()), whole[index.long()])
    finally:
        hf_kbit.set_batch_invariant(False)


def test_no_rows():
    experts = Experts.random(3, (100, 328), 4)
    offsets = torch.zeros(4, dtype=torch.int32, device="cuda")
    for x, index in ((cases.x((5,), 328, torch.float16).cuda(), picked_rows(5, 0)), (cases.x((0,), 328).cuda(), None)):
        assert experts.multiply(x, index, offsets).shape == (0, 100)
    assert experts.gradient(cases.x((0,), 100, torch.float16).cuda(), offsets).shape == (0, 328)
    x = cases.x((5,), 328, torch.float16).cuda()
    assert not experts.multiply(x, picked_rows(5, 40), offsets).any()
