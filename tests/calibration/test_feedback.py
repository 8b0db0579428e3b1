"""Error feedback against its definition: least squares solved afresh after every column, in float64."""

import itertools
from itertools import pairwise

import cases
import pytest
import torch
import torch.nn.functional as F

from hf_kbit import codebooks
from hf_kbit.calibration import feedback, launches, weighted
from hf_kbit.format.reference import pack_codes, unpack_codes
from hf_kbit.format.spec import decode_e4m4, encode_e4m4
from hf_kbit.ops import dequantize, quantize


def problem(rows: int, columns: int, tokens: int, seed: int = 0):
    """A weight, and moments of inputs that depend on each other, later ones larger; some columns have none."""
    rng = cases.generator(rows, columns, tokens, seed)
    mix = torch.randn(columns, columns, generator=rng) * torch.rand(columns, generator=rng) ** 2
    inputs = torch.randn(tokens, columns, generator=rng) @ mix * torch.linspace(0.2, 2, columns)
    inputs[:, 3::17] = 0
    return 0.1 * torch.randn(rows, columns, generator=rng), inputs.T @ inputs


def error(planes, absmax, weight, hessian, codebook) -> float:
    """Of the outputs, over all tokens."""
    difference = dequantize(planes, absmax, codebook, weight.shape).double() - weight.double()
    return torch.einsum("nk,kl,nl->", difference, hessian.double(), difference).item()


def solve_by_definition(weight, hessian, codebook, signed):
    """One row: codes ``[K]`` and bytes ``[B]``, by loops over blocks, scales and columns."""
    levels, columns = codebook.double(), len(weight)
    blocks = -(-columns // 32)
    weight = F.pad(weight.double(), (0, blocks * 32 - columns))
    hessian = F.pad(hessian.double(), (0, len(weight) - columns, 0, len(weight) - columns))
    moments = hessian.diagonal().clone()
    hessian += 0.1 * moments[:columns].mean() * torch.eye(len(weight), dtype=torch.float64)
    codes, bytes_ = torch.zeros(len(weight), dtype=torch.uint8), torch.zeros(blocks, dtype=torch.uint8)
    left = set(range(len(weight)))

    def rank(columns):  # descending moments, the first first
        return sorted(columns, key=lambda j: -moments[j])

    for block in sorted(range(blocks), key=lambda b: -moments[32 * b : 32 * b + 32].sum()):
        own = weight[32 * block : 32 * block + 32]
        most, below, above = (127, 13, 9) if signed else (255, 16, 6)
        negative = signed and bool(-own.min() > own.max())  # level 1 is the last one
        first = min(encode_e4m4(own.abs().max().item()), most)
        tried = []
        for byte in range(max(first - below, 1), min(first + above, most) + 1):
            scale = -decode_e4m4(byte) if negative else decode_e4m4(byte)
            current, mine, loss, remaining = weight.clone(), {}, 0.0, set(left)
            for j in rank(range(32 * block, 32 * block + 32)):
                mine[j] = int((current[j] / scale - levels).abs().argmin())
                wrong = current[j] - levels[mine[j]] * scale
                inverse = torch.linalg.inv(hessian[sorted(remaining)][:, sorted(remaining)])
                at = sorted(remaining).index(j)
                loss += float(wrong**2 / inverse[at, at]) if j < columns else 0.0
                remaining.remove(j)
                if remaining:
                    rest = sorted(remaining)
                    current[rest] += wrong * torch.linalg.solve(hessian[rest][:, rest], hessian[rest, j])
            tried.append((loss, byte + 128 * negative, mine, current, remaining))
        _, bytes_[block], mine, weight, left = min(tried, key=lambda one: one[0])
        for j, code in mine.items():
            codes[j] = code
    return codes, bytes_


@pytest.mark.parametrize(("columns", "bits", "signed"), [(32, 3, False), (70, 2, False), (70, 3, True)])
def test_is_what_the_definition_gives(columns, bits, signed, monkeypatch):
    """Before sweeps."""
    monkeypatch.setattr(feedback, "SWEEPS", 0)
    weight, hessian = problem(2, columns, tokens=200)
    weight = weight / -4  # as scales with signs end below 2**-3; and some are negative
    codebook = torch.tensor(codebooks.optimal(bits, signed))
    assert columns == 32 or hessian.diagonal()[:32].sum() < hessian.diagonal()[32:64].sum()  # the second block first
    planes, absmax = feedback.solve(weight, hessian, codebook, signed)
    codes = unpack_codes(planes, bits).flatten(1)
    assert (absmax > 127).any() == signed
    for row in range(2):
        expected_codes, expected_bytes = solve_by_definition(weight[row], hessian, codebook, signed)
        assert absmax[row].tolist() == expected_bytes.tolist()
        assert codes[row, :columns].tolist() == expected_codes[:columns].tolist()


@pytest.mark.parametrize("tokens", [20, 2000])  # fewer than columns: a Hessian without an inverse
@pytest.mark.parametrize("columns", [33, 200])
@pytest.mark.parametrize("bits", cases.BITS)
def test_never_worse_than_rounding(bits, columns, tokens):
    codebook = torch.tensor(codebooks.optimal(bits))
    for seed in range(3):
        weight, hessian = problem(24, columns, tokens, seed)
        found, plain, scales = (
            error(*planes, weight, hessian, codebook)
            for planes in (
                feedback.solve(weight, hessian, codebook),
                quantize(weight, codebook, True),
                weighted.solve(weight, hessian.diagonal(), codebook),
            )
        )
        assert found < min(plain, scales), "0.02 to 0.65 of the smaller when it was written"


def damped_error(planes, absmax, weight, hessian, codebook, signed) -> torch.Tensor:
    """Of each row, with the damping: what sweeps lower."""
    difference = cases.stored(planes, absmax, codebook, signed)[:, : weight.shape[1]].double() - weight.double()
    hessian = hessian.double() + 0.1 * hessian.diagonal().mean().item() * torch.eye(len(hessian))
    return torch.einsum("nk,kl,nl->n", difference, hessian, difference)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("columns", [64, 70])
@pytest.mark.parametrize("bits", [2, 3])
def test_sweeps_end_where_no_code_and_no_scale_is_better_alone(bits, columns, signed, monkeypatch):
    weight, hessian = problem(6, columns, tokens=300)
    weight, codebook = weight / 4, torch.tensor(codebooks.optimal(bits, signed))
    errors = []
    for sweeps in (0, 1, 3, 40):
        monkeypatch.setattr(feedback, "SWEEPS", sweeps)
        planes, absmax = feedback.solve(weight, hessian, codebook, signed)
        errors.append(damped_error(planes, absmax, weight, hessian, codebook, signed))
    assert all((after <= before * 1.0001).all() for before, after in pairwise(errors))
    assert errors[3].sum() < 0.995 * errors[0].sum()
    codes = unpack_codes(planes, bits)
    for block, j in itertools.product(range(codes.shape[1]), range(32)):
        for code in range(2**bits) if 32 * block + j < columns else ():
            other = codes.clone()
            other[:, block, j] = code
            found = damped_error(pack_codes(other, bits), absmax, weight, hessian, codebook, signed)
            assert (found >= errors[-1] * 0.9999).all()
    for block, byte in itertools.product(range(codes.shape[1]), range(1, 128)):
        other = absmax.clone()
        other[:, block] = byte + (absmax[:, block] & 128)
        found = damped_error(planes, other, weight, hessian, codebook, signed)
        assert (found >= errors[-1] * 0.9999).all()


@pytest.mark.gpu
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", cases.BITS)
def test_a_graph_does_what_its_kernels_do(bits, signed, monkeypatch):
    weight, hessian = (tensor.cuda() for tensor in problem(50, 200, tokens=300))
    codebook = torch.tensor(codebooks.optimal(bits, signed), device="cuda")
    found = feedback.solve(weight / 4, hessian, codebook, signed)
    monkeypatch.delitem(launches.RECORDERS, "cuda")
    assert all(map(torch.equal, found, feedback.solve(weight / 4, hessian, codebook, signed)))


@pytest.mark.parametrize("bits", cases.BITS)
def test_without_correlation_there_is_nothing_to_feed_back(bits, monkeypatch):
    """Nor to change afterwards, but to scales that are out of the search's reach."""
    monkeypatch.setattr(feedback, "SWEEPS", 0)
    moments = torch.rand(100, generator=cases.generator(bits)) + 0.1
    weight, codebook = problem(16, 100, 1)[0], torch.tensor(codebooks.optimal(bits))
    expected = weighted.solve(weight, moments + 0.1 * moments.mean(), codebook)
    found = feedback.solve(weight, moments.diag(), codebook)
    assert all(map(torch.equal, found, expected))
    monkeypatch.undo()
    planes, absmax = feedback.solve(weight, moments.diag(), codebook)
    same = absmax == expected[1]
    assert same.float().mean() > 0.95
    assert torch.equal(unpack_codes(planes, bits)[same], unpack_codes(expected[0], bits)[same])


def test_without_inputs_it_is_the_plain_search():
    weight, codebook = problem(16, 100, 1)[0], torch.tensor(codebooks.optimal(3))
    expected = quantize(weight, codebook, True)
    assert all(map(torch.equal, feedback.solve(weight, torch.zeros(100, 100), codebook), expected))
    weight, hessian = problem(2, 64, 100)
    assert not feedback.solve(0 * weight, hessian, codebook)[1].any(), "zeros have no scale"


def test_float64_where_float32_has_too_few_digits():
    """A singular matrix that float32 holds exactly, and a damping that is lost when float32 adds it."""
    inputs = torch.randint(-8, 9, (40, 64), generator=cases.generator(5)).float()
    hessian, damping = inputs.T @ inputs, torch.tensor(1e-5)
    assert torch.linalg.cholesky_ex(hessian + damping * torch.eye(64)).info
    root = feedback.inverse_root(hessian, damping).double()
    expected = torch.linalg.inv(hessian.double() + damping * torch.eye(64))
    assert (root.T @ root - expected).norm() < 1e-5 * expected.norm()


def test_a_matrix_that_is_no_sum_of_squares_is_refused():
    with pytest.raises(ValueError, match="hessian: found a matrix that is not positive semidefinite"):
        feedback.solve(torch.ones(2, 32), torch.eye(32) - 0.5, torch.tensor(codebooks.optimal(2)))


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("method", [feedback, weighted], ids=lambda module: module.__name__.rpartition(".")[2])
def test_signs_make_the_error_smaller(method, bits):
    """With the levels that are made for them."""
    rng = cases.generator(bits)
    inputs = torch.randn(800, 200, generator=rng) @ torch.randn(200, 200, generator=rng).tril()
    weight, hessian = torch.randn(64, 200, generator=rng) / 64, inputs.T @ inputs
    moments = hessian.diagonal().contiguous() if method.DIAGONAL else hessian
    errors = []
    for signed in (False, True):
        codebook = torch.tensor(codebooks.optimal(bits, signed))
        planes, absmax = method.solve(weight, moments, codebook, signed)
        assert (absmax > 127).any() == signed
        difference = cases.stored(planes, absmax, codebook, signed)[:, :200].double() - weight
        whole = moments.diag() if method.DIAGONAL else moments
        errors.append(torch.einsum("nk,kl,nl->", difference, whole.double(), difference).item())
    assert errors[1] < 0.985 * errors[0], "0.89 to 0.98 of it when it was written"
