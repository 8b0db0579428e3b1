"""Column scales that balance a weight: their definition, and all that must not change them."""

import math

import cases
import pytest
import torch

from hf_kbit.format.reference import decode_e4m4 as decode
from hf_kbit.format.spec import decode_e4m4, encode_e4m4
from hf_kbit.format.transforms import to_stored
from hf_kbit.weight import balance as module
from hf_kbit.weight.balance import LARGEST, SMALLEST, balance


def by_definition(weight: torch.Tensor) -> list[float]:
    """``m**2.25`` in floats of Python, unrounded: m the mean over rows of ``sqrt|w|`` over its mean in the row. And
    times the power of two that brings the square of the mean of all ``sqrt|w|`` next to 2**-5, from 2**-4 to 2**3."""
    rows = [[math.sqrt(abs(value)) for value in row] for row in weight.tolist()]
    means = [math.fsum(row) / len(row) for row in rows]
    columns = [
        math.fsum(row[k] / mean for row, mean in zip(rows, means, strict=True) if mean) / len(rows)
        for k in range(weight.shape[1])
    ]
    power = round(math.log2(32 * (math.fsum(means) / len(means)) ** 2)) if any(means) else 0
    scales = [m**2.25 * 2.0 ** min(max(power, -4), 3) for m in columns]
    return [min(max(scale, SMALLEST), LARGEST) if scale else 1.0 for scale in scales]


def uneven(shape, seed: int = 0) -> torch.Tensor:
    """Weights whose rows and columns are of very different size."""
    sizes = torch.exp2(torch.randn(shape[1], generator=cases.generator(*shape, seed, 1)))
    return cases.weight(shape, seed=seed) * sizes


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (7, 33), (64, 100), (300, 5)])
def test_the_definition(shape, dtype):
    weight = uneven(shape).to(dtype)
    weight[:, -7:-6] = 0.0
    weight[2:4] = 0.0
    before = weight.clone()
    found = balance(weight)
    assert found.dtype == torch.uint8 and found.shape == (shape[1],) and torch.equal(weight, before)
    # A byte off where the unrounded scale is near the middle of two: roots and ratios are rounded to whole numbers.
    for byte, expected in zip(found.tolist(), by_definition(weight), strict=True):
        assert encode_e4m4(expected * (1 - 2e-4)) <= byte <= encode_e4m4(expected * (1 + 2e-4))


SIZES = {0.0: 1.0, 1.0: 8.0, 1e-3: 1.0, 3e-4: 0.25, 1e-9: 2.0**-4, 1e-40: 2.0**-4, 1e35: 8.0}


@pytest.mark.parametrize(("size", "scale"), SIZES.items())
def test_columns_alike_have_one_scale(size, scale):
    signs = torch.randn(16, 70, generator=cases.generator(1)).sign()
    assert balance(signs * size * torch.logspace(-3, 3, 16)[:, None]).tolist() == [encode_e4m4(scale)] * 70


@pytest.mark.parametrize("power", [-4, -3, -2, -1, 1, 2, 3])
def test_columns_take_up_a_power_of_two(power):
    """So what is stored, and with it the scales of blocks, is the same."""
    weight = torch.randn(300, 70, generator=cases.generator(5)) * 0.046
    expected = balance(weight)
    assert 0.9 < decode(expected).mean() < 1.1
    found = balance(weight * 2.0**power)
    assert torch.equal(decode(found), decode(expected) * 2.0**power)
    stored = [to_stored(w, decode(c), True) for w, c in ((weight * 2.0**power, found), (weight, expected))]
    assert torch.equal(*stored)


@pytest.mark.parametrize("outlier", [1e3, 1e30])
def test_one_huge_weight_decides_on_its_row_alone(outlier):
    """The weights beside it are then too small to count in their row; all other rows are what they were."""
    weight = torch.randn(512, 64, generator=cases.generator(2))
    before = decode(balance(weight))
    weight[3, 5] = outlier
    after = decode(balance(weight))
    others = torch.arange(64) != 5
    if outlier == 1e3:  # 1e30 leaves of the others less than half a step of their roots
        assert ((after / before - 1).abs()[others] < 0.07).all(), "a step of E4M4"
        assert 1.1 < after[5] / before[5] < 1.6, "(1 + 64 / 512) ** 2.25 at most"
    assert after.isfinite().all() and (after >= SMALLEST).all() and (after <= LARGEST).all()


def test_scales_end_where_e4m4_is_no_longer_exact_to_a_sixteenth():
    weight = torch.cat([torch.full((4, 1), 1e6), torch.full((4, 99), 1.0), torch.full((4, 1), 1e-6)], dim=1)
    found = balance(weight)
    assert decode_e4m4(found[0].item()) == LARGEST and decode_e4m4(found[-1].item()) == SMALLEST


def test_what_cannot_be_seen(monkeypatch):
    """The order of rows, the size of slices, the number of threads, and powers of four times the weight: not in a bit
    of the scales before they become bytes."""
    monkeypatch.setattr(module, "encode_e4m4", lambda scale: scale)
    weight = uneven((300, 70))
    expected = balance(weight)
    assert torch.equal(balance(weight[torch.randperm(300, generator=cases.generator(4))]), expected)
    assert torch.equal(balance(weight.T.contiguous().T), expected)
    for power in (-40, -2, 2, 60):  # by which scales grow, as far as they do
        found = balance(weight * 2.0**power)
        growth = (found / expected).median()
        assert growth.frexp().mantissa == 0.5
        assert torch.equal(found, (expected * growth).clamp(SMALLEST, LARGEST))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(balance(weight), expected)
    finally:
        torch.set_num_threads(threads)
    for size in (1, 70 * 7 + 3, 1 << 30):
        monkeypatch.setattr(module, "_SLICE_ON_CPU", size)
        assert torch.equal(balance(weight), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(7, 33), (3000, 1500)])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_same_bytes_on_a_gpu(shape, dtype):
    weight = uneven(shape).to(dtype)
    assert torch.equal(balance(weight.cuda()).cpu(), balance(weight))
