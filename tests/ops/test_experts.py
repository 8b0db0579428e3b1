"""The ops of experts, on every device that there is: products and their gradients against a loop over experts in
float64, the way there and back against what it says of each token."""

import cases
import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

from hf_kbit import reference
from hf_kbit.format import BITS
from hf_kbit.ops import combine_experts, gemm_experts, route_experts

OPS = torch.ops.hf_kbit
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


def packed(experts: int, bits: int, rotated: bool):
    columns = cases.columns(K) if rotated else None
    planes, absmax, codebook = cases.quantized((experts * N, K), bits, columns=columns, rotated=rotated)
    return planes.view(experts, N, -1), absmax.view(experts, N, -1), codebook, columns


@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_product(device, shares, bits, rotated, dtype):
    planes, absmax, codebook, columns = packed(len(shares), bits, rotated)
    matrices = cases.stored(planes, absmax, codebook, signed=rotated)
    matrices = matrices if rotated else matrices[..., :K]
    x, bias = cases.x((TOKENS,), K, dtype), cases.x((len(shares),), N, dtype, seed=2)
    rows = torch.randint(0, TOKENS, (TOKENS,), generator=cases.generator(1)).int()
    for own_bias, own_rows in ((None, None), (bias, rows)):
        arguments = x, planes, absmax, codebook, own_bias, own_rows, offsets(shares), columns
        *arguments, on_device = (None if tensor is None else tensor.to(device) for tensor in arguments)
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
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("in_features", "tokens"), [(72, TOKENS), (70, TOKENS), (72, 200)])
def test_product_behind_a_gate(device, in_features, tokens, rotated, dtype):
    """As of what the gate makes of x, which may be rounded once more on the way."""
    shares = torch.tensor([tokens // 2, 0, tokens - tokens // 2 - 2])
    columns = cases.columns(in_features) if rotated else None
    planes, absmax, codebook = cases.quantized((3 * N, in_features), 3, columns=columns, rotated=rotated)
    planes, absmax = planes.view(3, N, -1), absmax.view(3, N, -1)
    matrices = cases.stored(planes, absmax, codebook, signed=rotated)[..., : None if rotated else in_features]
    x = cases.x((tokens,), 2 * in_features, dtype)
    rows = torch.randint(0, tokens, (tokens,), generator=cases.generator(1)).int()
    on_device = [tensor.to(device) for tensor in (x, planes, absmax, codebook, rows, offsets(shares))]
    x_there, *packed, rows_there, offsets_there = on_device
    columns_there = None if columns is None else columns.to(device)
    found = gemm_experts(x_there, *packed, None, rows_there, offsets_there, N, columns_there, rotated, True).cpu()
    gate, up = x.double().chunk(2, dim=-1)
    inputs = (torch.nn.functional.silu(gate) * up)[rows.long()]
    first, second = slice(0, shares[0]), slice(shares[0], tokens - 2)
    for expert, of_expert in ((0, first), (2, second)):
        cases.assert_product(found[of_expert], inputs[of_expert], matrices[expert].T, None, 5, columns, rotated)
    assert not found[tokens - 2 :].any()


@pytest.mark.parametrize("number", [torch.int64, torch.int32])
@pytest.mark.parametrize(
    ("tokens", "each", "count"),
    [(1, 8, 128), (3, 2, 8), (17, 4, 32), (256, 8, 128), (5000, 8, 128), (33, 3, 1500), (700, 1, 1), (0, 2, 4)],
)
def test_route(device, tokens, each, count, number):
    generator = cases.generator(tokens, each, count)
    experts = torch.randint(-2, count + 3, (tokens, each), generator=generator)  # some are no experts here
    rows, places, ends = (found.cpu() for found in route_experts(experts.to(number).to(device), count))
    assert {rows.dtype, places.dtype, ends.dtype} == {torch.int32}
    assert rows.shape == (tokens * each,) and places.shape == (tokens, each) and ends.shape == (count + 1,)
    known = [int(number) if 0 <= number < count else count for number in experts.flatten()]
    order = sorted(range(tokens * each), key=known.__getitem__)
    assert rows.tolist() == [slot // each for slot in order]
    assert places.flatten()[order].tolist() == list(range(tokens * each))
    assert ends.tolist() == [sum(number < expert for number in known) for expert in range(count + 1)]


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


@pytest.mark.parametrize("rotated", [False, True])
def test_gradients_behind_a_gate(rotated):
    planes, absmax, codebook, columns = packed(3, 3, rotated)
    x = cases.x((4,), 2 * K, torch.float64).requires_grad_()
    for rows in (None, torch.tensor([0, 1, 2, 0, 3, 1], dtype=torch.int32)):
        ends = offsets([2, 0, 1] if rows is None else [2, 0, 3])

        def run(x, rows=rows, ends=ends):
            return gemm_experts(x, planes, absmax, codebook, None, rows, ends, N, columns, rotated, True)

        assert torch.autograd.gradcheck(run, (x,))
        assert torch.autograd.gradgradcheck(run, (x,))


@pytest.mark.parametrize("rotated", [False, True])
def test_gradients(rotated):
    shares = SHARES["some have none"]
    planes, absmax, codebook, columns = packed(len(shares), 3, rotated)
    x = cases.x((4,), K, torch.float64).requires_grad_()
    bias = cases.x((len(shares),), N, torch.float64, seed=2).requires_grad_()
    rows = torch.tensor([0, 1, 2, 0, 3, 1, 1, 2, 3, 0, 2], dtype=torch.int32)

    def run(x, bias):
        return gemm_experts(x, planes, absmax, codebook, bias, rows, offsets(shares), N, columns, rotated)

    assert torch.autograd.gradcheck(run, (x, bias))
    assert torch.autograd.gradgradcheck(run, (x, bias))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_gradient_of_the_reference(device, shares, rotated):
    planes, absmax, codebook, columns = packed(len(shares), 3, rotated)
    grad = cases.x((TOKENS,), N, torch.float64)
    arguments = grad, planes, absmax, codebook, offsets(shares)
    *arguments, on_device = (None if tensor is None else tensor.to(device) for tensor in (*arguments, columns))
    found = reference.gemm_experts_gradient(*arguments, [N, K], on_device, rotated)
    torch.testing.assert_close(found, OPS.gemm_experts_gradient(*arguments, [N, K], on_device, rotated))
    assert found[: sum(shares)].any(1).all() and not found[sum(shares) :].any()


@pytest.mark.parametrize("wrong", ["rows: found", "offsets: found", "offsets: found "])
def test_errors_of_the_reference(wrong):
    planes, absmax, codebook, _ = packed(3, 3, False)
    right = {"rows": None, "offsets": offsets([2, 4, 1])}
    with pytest.raises(ValueError, match=wrong.strip()):
        reference.gemm_experts(
            cases.x((TOKENS,), K), planes, absmax, codebook, None, *(right | WRONG[wrong]).values(), N
        )


def test_rows_of_no_expert_have_no_gradient():
    planes, absmax, codebook, _ = packed(3, 3, False)
    x = cases.x((TOKENS,), K).requires_grad_()
    gemm_experts(x, planes, absmax, codebook, None, None, offsets([2, 4, 1]), N).sum().backward()
    assert x.grad[:7].any(dim=1).all() and not x.grad[7:].any()


def test_opcheck():
    planes, absmax, codebook, columns = packed(3, 4, True)
    x, bias = cases.x((TOKENS,), K).requires_grad_(), cases.x((3,), N).requires_grad_()
    rows = torch.arange(TOKENS, dtype=torch.int32)
    opcheck(OPS.gemm_experts.default, (x, planes, absmax, codebook, bias, rows, offsets([2, 4, 1]), N, columns, True))
    both = cases.x((TOKENS,), 2 * K).requires_grad_()
    gated = both, planes, absmax, codebook, None, None, offsets([2, 4, 1]), N, columns, True, True
    opcheck(OPS.gemm_experts.default, gated)
    opcheck(OPS.route_experts.default, (torch.tensor([[0, 3], [1, 1]]), 3))
    weights = cases.x((2,), 3, seed=1).requires_grad_()
    places = torch.tensor([[0, 3, 4], [1, 2, 5]], dtype=torch.int32)
    opcheck(OPS.combine_experts.default, (cases.x((6,), N).requires_grad_(), places, weights))
    grad = cases.x((TOKENS,), N).requires_grad_()
    opcheck(
        OPS.gemm_experts_gradient.default, (grad, planes, absmax, codebook, offsets([2, 4, 1]), [N, K], columns, True)
    )


def test_forward_mode_is_refused():
    planes, absmax, codebook, _ = packed(1, 3, False)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="gemm_experts: found tangents"):
        x = forward_ad.make_dual(cases.x((2,), K), cases.x((2,), K, seed=1))
        gemm_experts(x, planes, absmax, codebook, None, None, offsets([2]), N)


WRONG = {
    "x: found shape": {"x": torch.zeros(K)},
    "x: found dtype": {"x": torch.zeros(TOKENS, K, dtype=torch.int64)},
    "weight: found shape": {"weight": torch.zeros(N, 9, dtype=torch.int32), "absmax": torch.zeros(N, 3).byte()},
    "absmax: found shape": {"absmax": torch.zeros(4, N, 3).byte()},
    "bias: found shape": {"bias": torch.zeros(N)},
    "bias: found dtype": {"bias": torch.zeros(3, N).double()},
    "rows: found dtype": {"rows": torch.zeros(TOKENS, dtype=torch.int64)},
    "rows: found shape": {"rows": torch.zeros(1, TOKENS, dtype=torch.int32)},
    "rows: found": {"rows": torch.full((TOKENS,), TOKENS, dtype=torch.int32)},
    "offsets: found dtype": {"offsets": torch.zeros(4, dtype=torch.int64)},
    "offsets: found shape": {"offsets": torch.zeros(5, dtype=torch.int32)},
    "offsets: found": {"offsets": torch.tensor([0, 3, 2, 5], dtype=torch.int32)},
    "offsets: found ": {"offsets": torch.tensor([0, 3, 5, TOKENS + 1], dtype=torch.int32)},
}


@pytest.mark.parametrize("message, wrong", WRONG.items(), ids=WRONG)
def test_errors(message, wrong):
    planes, absmax, codebook, _ = packed(3, 3, False)
    right = {"x": cases.x((TOKENS,), K), "weight": planes, "absmax": absmax, "codebook": codebook, "bias": None}
    right |= {"rows": None, "offsets": offsets([2, 4, 1])}
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message.strip()):
        gemm_experts(*(right | wrong).values(), N)


@pytest.mark.parametrize("rows", [None, torch.zeros(0, dtype=torch.int32)], ids=["no tokens", "none picked"])
@pytest.mark.parametrize("wrong", [[1, 0, 0, 0], [0, 0, 0, 1], [0, -1, 0, 0], [-1, 0, 0, 0]], ids=str)
def test_errors_without_rows(wrong, rows):
    """Of the op, of its gradient and of the reference; zeros alone are right."""
    planes, absmax, codebook, _ = packed(3, 3, False)
    x, right = cases.x((0 if rows is None else 4,), K), torch.zeros(4, dtype=torch.int32)
    for run in (gemm_experts, reference.gemm_experts):
        assert run(x, planes, absmax, codebook, None, rows, right, N).shape == (0, N)
        with pytest.raises((ValueError, RuntimeError), match="offsets: found"):
            run(x, planes, absmax, codebook, None, rows, torch.tensor(wrong, dtype=torch.int32), N)
    for run in (OPS.gemm_experts_gradient, reference.gemm_experts_gradient):
        assert run(cases.x((0,), N), planes, absmax, codebook, right, [N, K]).shape == (0, K)
        with pytest.raises((ValueError, RuntimeError), match="offsets: found"):
            run(cases.x((0,), N), planes, absmax, codebook, torch.tensor(wrong, dtype=torch.int32), [N, K])


def test_errors_of_the_way():
    right = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="experts: found dtype"):
        route_experts(right.float(), 4)
    with pytest.raises((TypeError, ValueError, RuntimeError), match="experts: found shape"):
        route_experts(right[0], 4)
    for number in (0, 2**13 + 1, 2**31):  # more than a GPU can count, which would stop with an error of CUDA
        for device in ("cpu", "meta"):
            with pytest.raises(ValueError, match=f"num_experts: found {number}, expected 1 to 8192"):
                route_experts(right.to(device), number)
    assert route_experts(right, 2**13)[2].shape == (2**13 + 1,)
    y, places, weights = torch.zeros(6, 5), right.int(), torch.zeros(2, 3)
    wrong = {
        "y: found dtype": (y.int(), places, weights),
        "y: found shape": (y[0], places, weights),
        "y: found no rows|index is out of bounds": (y[:0, :0], places, weights),
        "places: found dtype": (y, right, weights),
        "places: found shape": (y, places[0], weights),
        "places: found": (y, places + 6, weights),
        "weights: found dtype": (y, places, weights.double()),
        "weights: found shape": (y, places, weights[:1]),
    }
    for message, arguments in wrong.items():
        with pytest.raises((TypeError, ValueError, RuntimeError, IndexError), match=message):
            combine_experts(*arguments)
    planes, absmax, codebook, _ = packed(3, 3, False)
    with pytest.raises((TypeError, ValueError, RuntimeError), match=r"x: found shape .* expected \[tokens, 2 \* in"):
        gemm_experts(torch.zeros(4, K + 1), planes, absmax, codebook, None, None, offsets([1]), N, swiglu=True)
