import math
from statistics import NormalDist

import cases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_kbit
from hf_kbit import codebooks
from hf_kbit.format import BITS

# float32 levels as hexadecimal, so that neither a change of the derivation nor another machine can move them unseen.
UPPER_HALF = {
    2: [
        "0x1.058c2e0000000p-2",
        "0x1.0000000000000p+0",
    ],
    3: [
        "0x1.88eb640000000p-4",
        "0x1.31858e0000000p-2",
        "0x1.1660260000000p-1",
        "0x1.0000000000000p+0",
    ],
    4: [
        "0x1.46c7640000000p-5",
        "0x1.ee49f00000000p-4",
        "0x1.a329400000000p-3",
        "0x1.2dcf200000000p-2",
        "0x1.94cdda0000000p-2",
        "0x1.078cc00000000p-1",
        "0x1.58ff820000000p-1",
        "0x1.0000000000000p+0",
    ],
    5: [
        "0x1.1d10860000000p-6",
        "0x1.ac7a2c0000000p-5",
        "0x1.668d100000000p-4",
        "0x1.f929d20000000p-4",
        "0x1.4792640000000p-3",
        "0x1.94dd840000000p-3",
        "0x1.e535b20000000p-3",
        "0x1.1cc5d20000000p-2",
        "0x1.498dac0000000p-2",
        "0x1.79cbe40000000p-2",
        "0x1.aebd000000000p-2",
        "0x1.ea4f2a0000000p-2",
        "0x1.17e9a60000000p-1",
        "0x1.42eed00000000p-1",
        "0x1.7ea9a40000000p-1",
        "0x1.0000000000000p+0",
    ],
}


@pytest.mark.parametrize("bits", BITS)
def test_normal_float_by_numerical_integration(bits):
    """The levels against means over the bins that a fine sum gives, not against the formula they are made by."""
    bins, normal = 2**bits, NormalDist()
    points = 20000
    means = []
    for i in range(bins):
        quantiles = [normal.inv_cdf((i + (j + 0.5) / points) / bins) for j in range(points)]
        means.append(sum(quantiles) / points)
    expected = [mean / means[-1] for mean in means]
    assert codebooks.normal_float(bits) == pytest.approx(expected, abs=2e-4)


@pytest.mark.parametrize("bits", BITS)
def test_normal_float_is_canonical_and_symmetric(bits):
    levels = codebooks.normal_float(bits)
    assert levels == codebooks.canonical(levels, bits)
    assert [-level for level in reversed(levels)] == list(levels)
    assert len(set(levels)) == 2**bits and levels[-1] == 1.0
    assert torch.tensor(levels).double().tolist() == list(levels), "float32 must hold every level"


@pytest.mark.parametrize(
    ("name", "bits"), [(name, bits) for name in codebooks.NAMED for bits in BITS if name != "fp4" or bits == 4]
)
def test_named_codebooks_are_canonical(name, bits):
    levels = codebooks.named(name, bits)
    assert len(levels) == 2**bits and levels == codebooks.canonical(levels, bits)
    assert levels == codebooks.resolve(name, bits)


def squared_error(levels, search: bool, signed: bool = False) -> float:
    """Of Gaussian weights, over their variance."""
    weight = torch.randn(1024, 2048, generator=torch.Generator().manual_seed(7))
    codebook = torch.tensor(levels) * (64 if signed else 1)  # scales with signs end below 2**-3
    decoded = cases.stored(*hf_kbit.ops.quantize(weight, codebook, search, signed), codebook, signed)
    return float((decoded - weight).square().mean() / weight.square().mean())


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.1055), (3, 0.0258), (4, 0.0060), (5, 0.00145)])
def test_optimal_levels_with_searched_scales(bits, bound):
    """The bounds are just above what was reached; NF4 in blocks of 64 has 0.0084 (with 4.5 bits a weight)."""
    levels = codebooks.optimal(bits)
    error = squared_error(levels, search=True)
    assert error < bound
    assert error < squared_error(levels, search=False)
    for name in ("normal_float", "int"):
        assert error < squared_error(codebooks.named(name, bits), search=True)
    assert [-level for level in reversed(levels)] == list(levels)


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.0985), (3, 0.0237), (4, 0.0056), (5, 0.0014)])
def test_optimal_levels_for_scales_with_signs(bits, bound):
    levels = codebooks.optimal(bits, signed=True)
    assert levels == codebooks.canonical(levels, bits) == codebooks.resolve("optimal", bits, signed=True)
    assert levels == tuple(sorted(set(levels))) and levels[-1] == 1.0 and -1.0 < levels[0] < -0.6
    error = squared_error(levels, True, signed=True)
    assert error < bound and error < 0.965 * squared_error(codebooks.optimal(bits), search=True)
    assert error < squared_error(codebooks.optimal(bits), True, signed=True)


def test_optimal_levels_cannot_be_bettered_by_one_of_them():
    levels = list(codebooks.optimal(3))
    best = squared_error(levels, search=True)
    for i in range(4, 7):
        for step in (-0.02, 0.02):
            moved = [*levels]
            moved[i], moved[7 - i] = levels[i] + step, levels[7 - i] - step
            assert squared_error(moved, search=True) > best


def test_int_and_fp4():
    assert codebooks.integer(3) == (-1.0, -0.75, -0.5, -0.25, 0.0, 0.25, 0.5, 0.75)
    assert [round(level * 6, 6) for level in codebooks.fp4()[8:]] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    with pytest.raises(ValueError, match="found 'fp4' for 3 bits, expected 4 bits"):
        codebooks.named("fp4", 3)


def test_normal_float_is_pinned():
    for bits, expected in UPPER_HALF.items():
        assert [level.hex() for level in codebooks.normal_float(bits)[2 ** (bits - 1) :]] == expected


@given(st.sampled_from(BITS), st.data())
def test_canonical(bits, data):
    floats = st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda value: value == 0 or abs(value) > 2.0**-100)
    table = data.draw(st.lists(floats, min_size=2**bits, max_size=2**bits).filter(any))
    levels = codebooks.canonical(table, bits)
    assert list(levels) == sorted(levels) and max(map(abs, levels)) == 1.0
    assert codebooks.canonical(levels, bits) == levels
    assert codebooks.canonical(list(reversed(table)), bits) == levels
    largest = max(map(abs, table))
    assert list(levels) == pytest.approx([value / largest for value in sorted(table)], rel=1e-6, abs=1e-37)


def test_canonical_takes_tensors_and_equal_levels():
    fp4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    levels = codebooks.canonical(torch.tensor(fp4 + [-value for value in fp4]), 4)
    assert levels.count(0.0) == 2 and levels[0] == -1.0 and levels[-2] == pytest.approx(4 / 6)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([1, 2, 3], "found 3 levels, expected 2\\*\\*bits = 4"),
        ([0, 0, 0, 0], "found only zeros"),
        ([0, 1, 2, math.nan], "expected finite"),
        ([0, 1, 2, math.inf], "expected finite"),
        ([0, 1, 2, 1e39], "expected finite"),
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
