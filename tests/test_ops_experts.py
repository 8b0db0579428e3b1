"""``gemm_experts`` and its gradient against a loop over experts in float64, on every device that there is."""

import cases
import pytest
import torch
from torch.autograd import forward_ad
from torch.library import opcheck

from hf_kbit import reference
from hf_kbit.format import BITS
from hf_kbit.ops import gemm_experts

OPS = torch.ops.hf_kbit
N, K, TOKENS = 36, 70, 11
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
