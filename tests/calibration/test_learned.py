"""Learned scales: gradients against finite differences, results against where they start and against all scales."""

import cases
import pytest
import torch

from hf_kbit import codebooks
from hf_kbit.calibration import learned, weighted
from hf_kbit.format import decode_e4m4
from hf_kbit.ops import dequantize, quantize
from hf_kbit.reference import signs_of


def problem(rows: int, columns: int, device: str, seed: int = 0):
    """A weight, and moments of inputs that depend on each other; some columns have none."""
    rng = cases.generator(rows, columns, seed)
    mix = torch.randn(columns, columns, generator=rng) * torch.rand(columns, generator=rng) ** 2
    inputs = torch.randn(500, columns, generator=rng) @ mix
    inputs[:, 3::17] = 0
    return (0.1 * torch.randn(rows, columns, generator=rng)).to(device), (inputs.T @ inputs).to(device)


def levels(bits: int, device: str, signed: bool = False) -> torch.Tensor:
    return torch.tensor(codebooks.optimal(bits, signed), device=device)


def errors(planes, weight, hessian, codebook) -> torch.Tensor:
    """Of the outputs over all tokens, float64 ``[N]``."""
    difference = dequantize(*planes, codebook, weight.shape).double() - weight.double()
    return torch.einsum("nk,kl,nl->n", difference, hessian.double(), difference)


@pytest.mark.parametrize("rows_at_once", [5, 100])
@pytest.mark.parametrize("columns", [33, 200])
@pytest.mark.parametrize("bits", cases.BITS)
def test_no_row_is_worse_than_at_the_start(bits, columns, rows_at_once, device, monkeypatch):
    monkeypatch.setattr(learned, "QUANTIZE_SLICE", rows_at_once * columns)
    weight, hessian = problem(24, columns, device)
    codebook = levels(bits, device)
    found = errors(learned.solve(weight, hessian, codebook), weight, hessian, codebook)
    start = errors(weighted.solve(weight, hessian.diagonal(), codebook), weight, hessian, codebook)
    assert (found <= start * (1 + 1e-4)).all()
    assert found.sum() < 0.998 * start.sum(), "0.86 to 0.99 of it when it was written"


@pytest.mark.parametrize("columns", [20, 32])
@pytest.mark.parametrize("bits", cases.BITS)
def test_one_block_against_all_scales(bits, columns, device):
    weight, hessian = problem(200, columns, device)
    codebook, tried = levels(bits, device), []
    for byte in range(1, 256):
        decoded = codebook.double()[(weight[..., None] / decode_e4m4(byte) - codebook).abs().argmin(-1)]
        difference = decoded * decode_e4m4(byte) - weight.double()
        tried.append(torch.einsum("nk,kl,nl->n", difference, hessian.double(), difference))
    least = torch.stack(tried).amin(0)
    found, start = (
        errors(planes, weight, hessian, codebook) / least - 1
        for planes in (
            learned.solve(weight, hessian, codebook),
            weighted.solve(weight, hessian.diagonal(), codebook),
        )
    )
    assert found.min() > -1e-4, "no scale is better than the best"
    assert found.mean() < 0.8 * start.mean(), "0.13 to 0.66 of it, 0.04 to 0.14, when it was written"


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", cases.BITS)
def test_gradient(bits, signed, device):
    """Against differences in float64 of the error in which rounding adds a constant to each ratio."""
    weight, hessian = problem(6, 96, device)
    codebook, blocks = levels(bits, device, signed), weight.unflatten(1, (-1, 32))
    signs = signs_of(blocks, codebook) if signed else torch.ones_like(blocks[..., 0])
    assert (signs < 0).any() == signed
    blocks = blocks * signs[..., None]
    absmax = quantize(weight, codebook, False)[1] - 9  # so that some weights are outside the levels
    scale = torch.tensor([[decode_e4m4(byte) for byte in row] for row in absmax.tolist()], device=device).double()
    ratios = blocks.double() / scale[..., None]
    nearest = codebook.double()[(ratios[..., None] - codebook).abs().argmin(-1)]
    outside = (ratios < codebook[0]) | (ratios > codebook[-1])
    assert outside.any() and not outside.all()

    def error(scale):
        straight = blocks.double() / scale[..., None] + (nearest - ratios)
        difference = (torch.where(outside, nearest, straight) * scale[..., None] - blocks) * signs[..., None]
        return torch.einsum("nk,kl,nl->n", difference.flatten(1), hessian.double(), difference.flatten(1))

    found, gradient = learned._error(blocks, signs, absmax, hessian, codebook)
    torch.testing.assert_close(found.double(), error(scale), rtol=1e-4, atol=0)
    expected, step = torch.empty_like(scale), 1e-3  # by magnitudes
    for block in range(3):
        moved = torch.zeros_like(scale)
        moved[:, block] = step
        expected[:, block] = (error(scale + moved) - error(scale - moved)) / (2 * step)
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("factor", [2.0**-50, 2.0**40])
def test_the_unit_of_the_moments_changes_nothing(factor, device):
    weight, hessian = problem(16, 100, device)
    found, other = (learned.solve(weight, hessian * unit, levels(2, device)) for unit in (1, factor))
    assert all(map(torch.equal, found, other))


def test_without_inputs_it_is_the_plain_search(device):
    weight, codebook = problem(16, 100, device)[0], levels(3, device)
    found = learned.solve(weight, torch.zeros(100, 100, device=device), codebook)
    assert all(map(torch.equal, found, quantize(weight, codebook, True)))


def test_zeros_have_no_scale(device):
    weight, hessian = problem(16, 100, device)
    weight[3], weight[:, 32:64] = 0, 0
    _, absmax = learned.solve(weight, hessian, levels(2, device))
    assert torch.equal(absmax == 0, torch.nn.functional.pad(weight, (0, 28)).unflatten(1, (-1, 32)).amax(-1) == 0)
