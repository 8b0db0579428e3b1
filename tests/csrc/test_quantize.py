"""The compiled quantize gives the bytes of the reference."""

import itertools

import cases
import pytest
import torch

from hf_kbit.format import reference

SHAPES = [*cases.SHAPES, (2, 3, 5, 40), (33, 1024), (3, 4096), (200, 96)]


def codebooks(bits: int) -> dict[str, torch.Tensor]:
    """Levels that search may get wrong: lopsided, equal, closer than any grid, one away from zero, very large."""
    n, rng = 2**bits, cases.generator(bits, 7)
    crowded = torch.cat([torch.linspace(0.5, 0.5001, n - 1), torch.tensor([-1.0])]).sort().values
    equal = torch.tensor([-1.0] * (n // 2) + [0.25] * (n // 2 - 1) + [1.0])
    return {
        "normal_float": cases.codebook(bits),
        "random": (torch.rand(n, generator=rng) * 2 - 1).sort().values,
        "lopsided": torch.linspace(0.01, 1, n),
        "equal": equal,
        "crowded": crowded,
        "zeros and one": torch.tensor([0.0] * (n - 1) + [1.0]),
        "scaled": cases.codebook(bits) * 2.0**20,
        "negative": torch.linspace(-1, -0.5, n),
    }


def assert_same_bytes(weight, codebook, device):
    """With scales as they come, and searched, with and without signs."""
    for search, signed in itertools.product((False, True), repeat=2):
        expected = reference.quantize(weight, codebook, search, signed)
        found = torch.ops.hf_kbit.quantize(weight.to(device), codebook.to(device), search, signed)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.is_contiguous()
            assert torch.equal(ours.cpu(), theirs), f"{search=} {signed=}"


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_same_bytes(device, shape, bits, dtype, poison):
    weight = cases.weight(shape, dtype)
    poison(device, weight.numel(), weight.numel() // 8)
    assert_same_bytes(weight, cases.codebook(bits), device)


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("name", codebooks(2))
def test_any_codebook(device, bits, name):
    codebook = codebooks(bits)[name]
    assert_same_bytes(cases.weight((64, 256)) * codebook.abs().max(), codebook, device)


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("name", ["normal_float", "random", "equal", "crowded"])
def test_halfway_and_its_neighbours(device, bits, name):
    """Weights on the midpoints of levels and one step beside them, at scales that make r exact and not."""
    codebook = codebooks(bits)[name]
    halfway = (codebook[1:] + codebook[:-1]) / 2
    near = torch.cat([halfway, *(torch.nextafter(halfway, torch.tensor(to)) for to in (-9.0, 9.0))])
    for scale in (1.0, 0.75, 1.0625, 2.0**-9):
        rows = near.repeat(-(-31 * 64 // len(near)))[: 31 * 64].reshape(64, 31) * scale
        largest = torch.full((64, 1), float(codebook.abs().max()) * scale)
        assert_same_bytes(torch.cat([largest, rows], dim=1), codebook, device)


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_extreme_magnitudes(device, bits, dtype):
    """Zeros, subnormals, scales below, at the edges of and above the range of E4M4."""
    powers = torch.exp2(torch.arange(-140.0, 15.0))
    rows = torch.cat([powers, powers * 1.03, powers * 1.97, torch.zeros(1)])[:, None] * cases.x((), 64).clamp(-1, 1)
    assert_same_bytes(rows.clamp(-65504, 65504).to(dtype), cases.codebook(bits), device)


@pytest.mark.parametrize("bits", cases.BITS)
def test_every_scale(device, bits):
    """A block for each of the 256 scales, and for the points where rounding turns to the next."""
    scales = reference.decode_e4m4(torch.arange(256, dtype=torch.uint8))
    between = (scales[1:] + scales[:-1]) / 2
    edges = [torch.nextafter(between, torch.tensor(to)) for to in (0.0, 99.0)]
    absmax = torch.cat([scales, between, *edges])
    assert_same_bytes(absmax[:, None] * torch.linspace(-1, 1, 32), cases.codebook(bits), device)


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_views(device, dtype):
    """Rows that are not contiguous, or transposed."""
    codebook = cases.codebook(3).to(device)
    weight = cases.weight((64, 257), dtype).to(device)
    for view in (weight[:, 1:], weight[:, ::2], weight.T, weight[::3, :128]):
        expected = reference.quantize(view.cpu(), codebook.cpu())
        found = torch.ops.hf_kbit.quantize(view, codebook)
        assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(found, expected, strict=True))
