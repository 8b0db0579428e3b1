"""What the scales of a layer can hold beside its largest weight."""

import pytest
import torch

from hf_kbit import codebooks
from hf_kbit.format.reference import MAGNITUDE, decode_scales, unpack_codes
from hf_kbit.format.spec import BITS
from hf_kbit.weight.dynamic_range import HELD, is_wide, lost_rows
from hf_kbit.weight.packing import quantize_weight

STEP = 2.0**-14  # the smallest scale, as ops read it


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_a_row_whose_largest_scale_is_three_of_the_smallest_is_held(bits, signed):
    """Its squared error is at most twice what its width explains, measured; with one or two it may be far above."""
    weight = torch.randn(1000, 256, generator=torch.Generator().manual_seed(bits))
    codebook = codebooks.scaled(codebooks.optimal(bits, signed=signed), 0, "cpu")

    def errors(size: float) -> tuple[torch.Tensor, torch.Tensor]:
        planes, absmax = torch.ops.hf_kbit.quantize(weight * size, codebook, True, signed)
        levels = codebook[unpack_codes(planes, bits).int()]
        decoded = (levels * decode_scales(absmax, signed)[..., None]).flatten(-2) / size
        return absmax, (decoded - weight).square().sum(1) / weight.square().sum(1)

    usual = errors(0.01)[1].mean()
    for size in (0.3, 0.5, 1.0, 1.5, 2.0):
        absmax, error = errors(size * STEP)
        steps = (absmax & MAGNITUDE).amax(1)
        held = steps >= HELD
        assert not held.any() or error[held].mean() < 2 * usual
        assert size > 0.3 or bits < 4 or error[~held].mean() > 4 * usual
        found = lost_rows(weight * size * STEP, absmax, signed, coarse=True)
        few = int((steps < HELD).sum())
        assert found.startswith(f"{few:,} of 1,000 rows") if few else not found


def test_rows_that_are_zero_or_dead_are_not_lost():
    weight = torch.ones(8, 70)
    weight[1], weight[2], weight[3] = 0, 1e-4, 1e-7
    absmax = torch.full((8, 3), 176, dtype=torch.uint8)
    absmax[1:4] = 0
    assert lost_rows(weight, absmax, False) == "1 of 8 rows"
    assert lost_rows(weight, absmax | 128, True) == "1 of 8 rows", "the signs of scales do not count"
    assert not lost_rows(torch.zeros(8, 70), torch.zeros_like(absmax), True)
    turned, columns = torch.ones(8, 70), torch.full((8, 3), 176, dtype=torch.uint8)
    turned[:, 32:64], columns[:, 1] = 1e-4, 2
    assert lost_rows(turned, columns, False, coarse=True) == "1 of 3 blocks of 32 columns"
    assert not lost_rows(turned, columns, False), "coarse is not lost"
    columns[:4, 1] = 0
    assert lost_rows(turned, columns, False) == "1 of 3 blocks of 32 columns", (
        "where half of its scales are zero it is"
    )
    turned[5, 40], columns[5, 1] = 1, 176  # one row's weights there are held
    assert not lost_rows(turned, columns, False)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 3e-5, 1e-5, 3e-6])
def test_what_is_not_wide_is_held_without_a_transform(size):
    weight = torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0))
    weight[1, 7] *= size
    packed = quantize_weight(weight, codebooks.optimal(4), True)
    assert not packed.lost or is_wide(weight)
    assert is_wide(weight) == (size < 1e-4)
