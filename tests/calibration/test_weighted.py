"""Weighted scales against a loop over all of them in float64."""

import cases
import pytest
import torch
import torch.nn.functional as F

from hf_kbit import KbitLinear, codebooks
from hf_kbit.calibration import rounding, weighted
from hf_kbit.calibration.moments import Moments
from hf_kbit.format import reference
from hf_kbit.format.spec import decode_e4m4, encode_e4m4
from hf_kbit.format.transforms import to_stored
from hf_kbit.ops import quantize
from hf_kbit.weight.balance import balance_for


def problem(shape):
    rng = cases.generator(*shape)
    return torch.randn(shape, generator=rng), torch.rand(shape[1], generator=rng) ** 8 * 1000


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", [(4, 64), (3, 41)])
def test_scale_has_the_least_weighted_error(shape, bits, signed):
    weight, moments = problem(shape)
    weight = weight / 64  # as scales with signs end below 2**-3
    codebook = torch.tensor(codebooks.optimal(bits, signed))
    planes, absmax = weighted.solve(weight, moments, codebook, signed)
    assert (absmax > 127).any() == signed
    codes = reference.unpack_codes(planes, bits).flatten(1)
    for row in range(shape[0]):
        for block in range(-(-shape[1] // 32)):
            own = slice(32 * block, min(32 * block + 32, shape[1]))
            values, importance = weight[row, own].double(), moments[own].double()
            first, errors = encode_e4m4(values.abs().max().item()), {}
            if signed and -values.min() > values.max():
                values, absmax[row, block] = -values, absmax[row, block] - 128
            for byte in range(first - 13, min(first + 10, 128)) if signed else range(first - 16, first + 7):
                ratios = values / decode_e4m4(byte)
                nearest = (ratios[:, None] - codebook.double()).abs().argmin(1)
                differences = (ratios - codebook.double()[nearest]) * decode_e4m4(byte)
                errors[byte] = (float((differences.square() * importance).sum()), nearest.tolist())
            byte = absmax[row, block].item()
            assert errors[byte][0] <= min(errors.values())[0] * (1 + 1e-5)
            assert codes[row, own].tolist() == errors[byte][1]


def test_equal_moments_change_nothing():
    for signed in (False, True):
        weight, codebook = problem((8, 100))[0] / 32, torch.tensor(codebooks.optimal(3, signed))
        expected = quantize(weight, codebook, True, signed)
        for moments in (torch.full((100,), 1e-9), torch.full((100,), 1e9), torch.zeros(100)):
            assert all(map(torch.equal, weighted.solve(weight, moments, codebook, signed), expected))


@pytest.mark.parametrize("bits", cases.BITS)
def test_of_a_rotated_weight_column_scales_are_all(bits):
    """There each input of a block has the mean moment of the block, which a search does not see; without a transform
    each has its own, which it does."""
    weight, moments = problem((64, 104))
    columns = reference.decode_e4m4(balance_for(weight, moments))
    blocks = F.pad(moments * columns.square(), (0, 24)).view(-1, 32)
    stored = to_stored(weight, columns, rotated=True) / 32
    codebook = torch.tensor(codebooks.optimal(bits, True))
    searched = weighted.solve(stored, blocks.mean(1).repeat_interleave(32), codebook, True)
    assert all(map(torch.equal, searched, quantize(stored, codebook, True, True)))
    dense = torch.nn.Linear(104, 64, bias=False)
    dense.weight.data = weight
    for transform in ("rotated", "none"):
        layer = KbitLinear(104, 64, bias=False, bits=bits, transform=transform)
        rounding.round_linear("x", layer, dense, Moments(moments, None), weighted)
        expected = layer.quantize(weight, columns=balance_for(weight, moments))
        alike = torch.equal(layer.packed["weight_absmax"], expected.tensors["weight_absmax"])
        assert alike == (transform == "rotated")
