"""Named codebooks, against what they are by definition and what they are good for; canonical ones, of any table.

The golden files pin ``normal_float``, and ``optimal`` for scales with signs.
"""

import math
from statistics import NormalDist

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_kbit
from hf_kbit import codebooks
from hf_kbit.format.spec import BITS


@pytest.mark.parametrize("bits", BITS)
def test_named_codebooks_are_canonical(bits):
    """But for integers, whose least has no counterpart, those for scales without signs are symmetric."""
    for name in codebooks.NAMED:
        if name == "fp4" and bits != 4:
            continue
        levels = codebooks.named(name, bits)
        assert len(levels) == 2**bits and levels == codebooks.canonical(levels, bits) == codebooks.resolve(name, bits)
        assert name == "int" or [-level for level in reversed(levels)] == list(levels)
        assert torch.tensor(levels).double().tolist() == list(levels), "float32 must hold every level"


@pytest.mark.parametrize("bits", BITS)
def test_normal_float_by_numerical_integration(bits):
    """The levels against means over the bins that a fine sum gives, not against the formula they are made by."""
    bins, normal, points = 2**bits, NormalDist(), 5000
    means = []
    for i in range(bins):
        quantiles = [normal.inv_cdf((i + (j + 0.5) / points) / bins) for j in range(points)]
        means.append(sum(quantiles) / points)
    expected = [mean / means[-1] for mean in means]
    assert codebooks.normal_float(bits) == pytest.approx(expected, abs=4e-4)


def test_int_and_fp4():
    assert codebooks.integer(3) == (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)
    assert [round(level * 6, 6) for level in codebooks.fp4()[8:]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    with pytest.raises(ValueError, match="found 'fp4' for 3 bits, expected 4 bits"):
        codebooks.named("fp4", 3)


# --- optimal --------------------------------------------------------------------------------------


def squared_error(levels, search: bool, signed: bool = False) -> float:
    """Of Gaussian weights, over their variance."""
    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(7))
    codebook = torch.tensor(levels) * (64 if signed else 1)  # scales with signs end below 2**-3
    decoded = cases.stored(*hf_kbit.ops.quantize(weight, codebook, search, signed), codebook, signed)
    return float((decoded - weight).square().mean() / weight.square().mean())


@pytest.mark.parametrize(
    ("bits", "bound", "with_signs"),
    [(2, 0.1055, 0.0985), (3, 0.0258, 0.0237), (4, 0.0060, 0.0056), (5, 0.00145, 0.0014)],
)
def test_optimal_levels(bits, bound, with_signs):
    """The bounds are just above what was reached; NF4 in blocks of 64 has 0.0084 (with 4.5 bits a weight)."""
    levels = codebooks.optimal(bits)
    error = squared_error(levels, search=True)
    assert error < bound and error < squared_error(levels, search=False)
    for name in ("normal_float", "int"):
        assert error < squared_error(codebooks.named(name, bits), search=True)
    signed = codebooks.optimal(bits, signed=True)
    assert signed == codebooks.canonical(signed, bits) == codebooks.resolve("optimal", bits, signed=True)
    assert signed[-1] == 1.0 and -1.0 < signed[0] < -0.6
    smaller = squared_error(signed, search=True, signed=True)
    assert smaller < with_signs and smaller < 0.965 * error
    assert smaller < squared_error(levels, search=True, signed=True)


def test_optimal_levels_cannot_be_bettered_by_one_of_them():
    levels = list(codebooks.optimal(3))
    best = squared_error(levels, search=True)
    for i in range(4, 7):
        for step in (-0.02, 0.02):
            moved = [*levels]
            moved[i], moved[7 - i] = levels[i] + step, levels[7 - i] - step
            assert squared_error(moved, search=True) > best


# --- any table ------------------------------------------------------------------------------------


@given(st.sampled_from(BITS), st.data())
def test_canonical(bits, data):
    floats = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda value: value == 0 or abs(value) > 2.0**-100)
    table = data.draw(st.lists(floats, min_size=2**bits, max_size=2**bits).filter(any))
    levels = codebooks.canonical(table, bits)
    assert list(levels) == sorted(levels) and max(map(abs, levels)) == 1.0
    assert codebooks.canonical(levels, bits) == codebooks.canonical(torch.tensor(table).flip(0), bits) == levels
    largest = max(map(abs, table))
    assert list(levels) == pytest.approx([value / largest for value in sorted(table)], rel=1e-6, abs=1e-37)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1, 2, 3], "found 3 levels, expected 2\\*\\*bits = 4"),
        ([0, 0, 0, 0], "found only zeros"),
        ([0, 1, 2, math.nan], "expected finite"),
        ([0, 1, 2, math.inf], "expected finite"),
        ([0, 1, 2, 1e39], "expected finite"),
        ("0123", "codebook: found '0123', expected a table of numbers"),
        ([0, 1, 2, None], "expected a table of numbers"),
    ],
)
def test_canonical_refuses(table, message):
    with pytest.raises(ValueError, match=message):
        codebooks.canonical(table, 2)


def test_named_refuses():
    with pytest.raises(
        ValueError, match=r"codebook: found 'nf', expected one of \['fp4', 'int', 'normal_float', 'optimal'\]"
    ):
        codebooks.named("nf", 4)
    with pytest.raises(ValueError, match="found 7 levels"):
        codebooks.bits_of(7)
