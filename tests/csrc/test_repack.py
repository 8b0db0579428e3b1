"""The compiled repack gives the tiles of the reference, zeros in the padding too, and comes back without loss."""

import cases
import pytest
import torch
from compiled import OPS, to

from hf_kbit.format import reference


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", [*cases.SHAPES, (33, 1024), (3, 4096), (200, 96), (2, 3, 17, 300)], ids=str)
def test_same_tiles_and_back(device, shape, bits, poison):
    planes, matrix = cases.random_packed(shape, bits), list(shape[-2:])
    expected = reference.repack(*planes, bits, matrix)
    poison(device, *(tensor.nbytes for tensor in expected))
    tiles = OPS.repack(*to(device, *planes), bits, matrix)
    for ours, theirs in zip(tiles, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.is_contiguous()
        assert torch.equal(ours.cpu(), theirs)
    poison(device, *(tensor.nbytes for tensor in planes))
    back = OPS.repack(*tiles, bits, matrix, True)
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(back, planes, strict=True))
