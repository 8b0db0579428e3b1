"""The ops of experts, on every device that there is: products and their gradients against a loop over experts in
float64, the way there and back against what it says of each token."""

import cases
import pytest
import torch
from compiled import OPS, to
from torch.autograd import forward_ad

from hf_kbit.format import reference
from hf_kbit.format.spec import BITS
from hf_kbit.ops import combine_experts, gemm_experts, route_experts

N, K, TOKENS = 36, 70, 11
COMBINED = [(1, 8, 64), (9, 2, 36), (300, 4, 35), (64, 6, 1000), (5, 1, 1)]  # tokens, experts of each, columns
SHARES = {  # rows of each expert; what is left of TOKENS, if anything, is no expert's
    "some have none": [3, 0, 5, 0, 3],
    "one has all": [0, 0, 11, 0],
    "one expert": [11],
    "the last ones are elsewhere": [2, 4, 1],
    "all are elsewhere": [0, 0],
    "more experts than rows": [1, 0] * 9 + [2, 0, 0],
}


def offsets(shares) -> torch.Tensor:
    return torch.tensor([0, *shares]).cumsum(0).int()


def packed(experts: int, bits: int, rotated: bool, rows: int = N, in_features: int = K):
    columns = cases.columns(in_features) if rotated else None
    planes, absmax, codebook = cases.quantized((experts * rows, in_features), bits, columns=columns, rotated=rotated)
    return planes.view(experts, rows, -1), absmax.view(experts, rows, -1), codebook, columns


@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("case, shares", [*enumerate(SHARES.values())], ids=SHARES)
def test_product(device, case, shares, rotated, dtype):
    planes, absmax, codebook, columns = packed(len(shares), BITS[case % 4], rotated)
    matrices = cases.stored(planes, absmax, codebook, signed=rotated)
    matrices = matrices if rotated else matrices[..., :K]
    x, bias = cases.x((TOKENS,), K, dtype), cases.x((len(shares),), N, dtype, seed=2)
    rows = torch.randint(0, TOKENS, (TOKENS,), generator=cases.generator(1)).int()
    for own_bias, own_rows in ((None, None), (bias, rows)):
        arguments = x, planes, absmax, codebook, own_bias, own_rows, offsets(shares), columns
        *arguments, on_device = to(device, *arguments)
        for product in (gemm_experts, reference.gemm_experts):
            found = product(*arguments, N, on_device, rotated).cpu()
            assert found.dtype == dtype and found.shape == (TOKENS, N)
            inputs, first = x if own_rows is None else x[own_rows.long()], 0
            for expert, share in enumerate(shares):
                of_expert, first = slice(first, first + share), first + share
                dense, added = matrices[expert].T, None if own_bias is None else own_bias[expert]
                cases.assert_product(found[of_expert], inputs[of_expert], dense, added, 2, columns, rotated)
            assert not found[first:].any()


@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])
@pytest.mark.parametrize(
    ("in_features", "tokens", "rotated"), [(72, TOKENS, True), (70, TOKENS, False), (72, 200, True)]
)
def test_product_behind_a_gate(device, in_features, tokens, rotated, dtype):
    """As of what the gate makes of x, which may be rounded once more on the way."""
    shares = torch.tensor([tokens // 2, 0, tokens - tokens // 2 - 2])
    planes, absmax, codebook, columns = packed(3, 3, rotated, in_features=in_features)
    matrices = cases.stored(planes, absmax, codebook, signed=rotated)[..., : None if rotated else in_features]
    x = cases.x((tokens,), 2 * in_features, dtype)
    rows = torch.randint(0, tokens, (tokens,), generator=cases.generator(1)).int()
    arguments = to(device, x, planes, absmax, codebook, None, rows, offsets(shares))
    found = gemm_experts(*arguments, N, *to(device, columns), rotated, True).cpu()
    gate, up = x.double().chunk(2, dim=-1)
    inputs = (torch.nn.functional.silu(gate) * up)[rows.long()]
    first, second = slice(0, shares[0]), slice(shares[0], tokens - 2)
    for expert, of_expert in ((0, first), (2, second)):
        cases.assert_product(found[of_expert], inputs[of_expert], matrices[expert].T, None, 5, columns, rotated)
    assert not found[tokens - 2 :].any()


@pytest.mark.parametrize(
    ("tokens", "each", "count"),
    [(1, 8, 128), (17, 4, 32), (256, 8, 128), (5000, 8, 128), (33, 3, 1500), (700, 1, 1), (0, 2, 4), (2, 3, 2**13)],
)
def test_route(device, tokens, each, count):
    generator = cases.generator(tokens, each, count)
    experts = torch.randint(-2, count + 3, (tokens, each), generator=generator)  # some are no experts here
    known = experts.where((experts >= 0) & (experts < count), count).flatten()
    order = sorted(range(tokens * each), key=known.tolist().__getitem__)
    for dtype in (torch.int64, torch.int32):
        rows, places, ends = (found.cpu() for found in route_experts(experts.to(dtype).to(device), count))
        assert {rows.dtype, places.dtype, ends.dtype} == {torch.int32} and places.shape == (tokens, each)
        assert rows.tolist() == [slot // each for slot in order]
        assert places.flatten()[order].tolist() == list(range(tokens * each))
        assert ends.tolist() == [0, *known.bincount(minlength=count + 1)[:count].cumsum(0).tolist()]


@pytest.mark.parametrize("wide", [False, True], ids=["weights alike", "weights in float32"])
@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])
@pytest.mark.parametrize(("tokens", "each", "columns"), COMBINED)
def test_combine(device, tokens, each, columns, dtype, wide):
    y = cases.x((tokens * each,), columns, dtype)
    weights = cases.x((tokens,), each, torch.float32 if wide else dtype, seed=1)
    places = torch.randperm(tokens * each, generator=cases.generator(3)).int().view(tokens, each)
    found = combine_experts(y.to(device), places.to(device), weights.to(device)).cpu()
    terms = y.double()[places.long()] * weights.double()[..., None]
    rounding = terms.abs().sum(1) * each * cases.EPS[torch.float64 if dtype == torch.float64 else torch.float32]
    assert found.dtype == dtype and found.shape == (tokens, columns)
    assert ((found - terms.sum(1)).abs() <= rounding + terms.sum(1).abs() * cases.EPS[dtype]).all()


def test_gradients_of_combining():
    y = cases.x((6,), 5, torch.float64).requires_grad_()
    weights = cases.x((3,), 2, torch.float64, seed=1).requires_grad_()
    places = torch.tensor([[4, 0], [1, 5], [3, 2]], dtype=torch.int32)
    assert torch.autograd.gradcheck(combine_experts, (y, places, weights))
    assert torch.autograd.gradgradcheck(combine_experts, (y, places, weights))


@pytest.mark.parametrize("swiglu", [False, True], ids=["x", "behind a gate"])
@pytest.mark.parametrize("rotated", [False, True])
def test_gradients(rotated, swiglu):
    """With rows of no expert, rows picked twice and an expert without any."""
    planes, absmax, codebook, columns = packed(3, 3, rotated, 3, 33)
    x = cases.x((4,), 33 * (1 + swiglu), torch.float64).requires_grad_()
    bias = cases.x((3,), 3, torch.float64, seed=2).requires_grad_()
    for rows in (None, torch.tensor([0, 1, 2, 0, 3, 1], dtype=torch.int32)):
        ends = offsets([2, 0, 1] if rows is None else [2, 0, 3])

        def run(x, bias, rows=rows, ends=ends):
            return gemm_experts(x, planes, absmax, codebook, bias, rows, ends, 3, columns, rotated, swiglu)

        assert torch.autograd.gradcheck(run, (x, bias))
        assert torch.autograd.gradgradcheck(run, (x, bias))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_gradient_of_the_reference(device, shares, rotated):
    planes, absmax, codebook, columns = packed(len(shares), 3, rotated)
    grad = cases.x((TOKENS,), N, torch.float64)
    *arguments, on_device = to(device, grad, planes, absmax, codebook, offsets(shares), columns)
    found = reference.gemm_experts_gradient(*arguments, [N, K], on_device, rotated)
    torch.testing.assert_close(found, OPS.gemm_experts_gradient(*arguments, [N, K], on_device, rotated))
    assert found[: sum(shares)].any(1).all() and not found[sum(shares) :].any()


def test_rows_of_no_expert_have_no_gradient():
    planes, absmax, codebook, _ = packed(3, 3, False)
    x = cases.x((TOKENS,), K).requires_grad_()
    gemm_experts(x, planes, absmax, codebook, None, None, offsets([2, 4, 1]), N).sum().backward()
    assert x.grad[:7].any(dim=1).all() and not x.grad[7:].any()


def test_forward_mode_is_refused():
    planes, absmax, codebook, _ = packed(1, 3, False)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="gemm_experts: found tangents"):
        x = forward_ad.make_dual(cases.x((2,), K), cases.x((2,), K, seed=1))
        gemm_experts(x, planes, absmax, codebook, None, None, offsets([2]), N)


def refused(run, *arguments, match: str, **named):
    """What only a look at the numbers tells: of the library, and as the reference says it."""
    with pytest.raises((ValueError, IndexError, RuntimeError), match=match):
        run(*arguments, **named)


@pytest.mark.parametrize("run", [gemm_experts, reference.gemm_experts], ids=["op", "reference"])
def test_numbers_that_are_no_rows_are_refused(run):
    x, (planes, absmax, codebook, _) = cases.x((TOKENS,), K), packed(3, 3, False)
    weights = planes, absmax, codebook, None
    right, none = offsets([2, 4, 1]), torch.zeros(4, dtype=torch.int32)
    for row in (-1, TOKENS):
        refused(run, x, *weights, torch.full((TOKENS,), row).int(), right, N, match="rows: found")
    for wrong in ([0, 3, 2, 5], [0, 3, 5, TOKENS + 1], [1, 3, 5, 6]):
        refused(run, x, *weights, None, torch.tensor(wrong).int(), N, match="offsets: found")
    gradient = OPS.gemm_experts_gradient if run is gemm_experts else reference.gemm_experts_gradient
    for empty, rows in ((x[:0], None), (x, none[:0])):  # zeros alone are right where there is no row
        assert run(empty, *weights, rows, none, N).shape == (0, N)
        assert gradient(empty.new_empty(0, N), *weights[:3], none, [N, K]).shape == (0, K)
        for wrong in ([1, 0, 0, 0], [0, 0, 0, 1], [0, -1, 0, 0], [-1, 0, 0, 0]):
            ends = torch.tensor(wrong).int()
            refused(run, empty, *weights, rows, ends, N, match="offsets: found")
            refused(gradient, empty.new_empty(0, N), *weights[:3], ends, [N, K], match="offsets: found")


def test_places_that_are_no_rows_are_refused():
    y, places, weights = torch.zeros(6, 5), torch.zeros(2, 3).int(), torch.zeros(2, 3)
    refused(combine_experts, y, places + 6, weights, match="places: found|out of (range|bounds)")
    refused(combine_experts, y[:0, :0], places, weights, match="y: found no rows|out of bounds")
