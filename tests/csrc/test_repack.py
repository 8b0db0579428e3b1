"""The compiled repack gives the tiles of the reference, zeros in the padding too, and comes back without loss."""

import cases
import pytest
import torch

from hf_kbit import reference

SHAPES = [*cases.SHAPES, (33, 1024), (3, 4096), (200, 96), (2, 3, 17, 300)]


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_tiles_and_back(device, shape, bits, poison):
    planes = [tensor.to(device) for tensor in cases.random_packed(shape, bits)]
    expected = reference.repack(*(tensor.cpu() for tensor in planes), bits, list(shape[-2:]))
    poison(device, *(tensor.nbytes for tensor in expected))
    tiles = torch.ops.hf_kbit.repack(*planes, bits, list(shape[-2:]))
    for ours, theirs in zip(tiles, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.is_contiguous()
        assert torch.equal(ours.cpu(), theirs)
    poison(device, *(tensor.nbytes for tensor in planes))
    back = torch.ops.hf_kbit.repack(*tiles, bits, list(shape[-2:]), True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, planes, strict=True))


@pytest.mark.parametrize("bits", cases.BITS)
def test_words_that_start_anywhere(device, bits):
    planes = cases.random_packed((32, 512), bits)
    expected = reference.repack(*planes, bits, [32, 512])
    moved = [torch.cat([t.flatten()[:1], t.flatten()]).to(device)[1:].view(t.shape) for t in planes]
    found = torch.ops.hf_kbit.repack(*moved, bits, [32, 512])
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, expected, strict=True))
