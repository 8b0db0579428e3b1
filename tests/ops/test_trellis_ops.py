"""What encoded trellises are worth. That every backend makes the reference's bytes is for ``test_contract.py``."""

import pytest
import torch
from contract import gaussian_tiles

from hf_kbit.format.trellis import pack, values, windows
from hf_kbit.ops import decode_trellis, encode_trellis


def found_error(targets: torch.Tensor, bits: int, lead: int) -> float:
    found = values(windows(encode_trellis(targets, bits, lead)[None]), "mul1")[0]
    return (found.double() - targets).square().mean().item()


# Of a million Gaussian weights by the length of the lead, on an H100 (docs/lab/2026-11-28-trellis-encoder.md). Squared
# errors of 128 tiles have a standard deviation of 0.8%.
MEASURED = {2: (0.06825, 0.06870, 0.07036), 3: (0.01755, 0.01764, 0.01802), 4: (0.004615, 0.004632, 0.004711)}


@pytest.mark.parametrize("bits", MEASURED)
def test_errors(bits, device):
    targets = gaussian_tiles(128).to(device)
    found = [found_error(targets, bits, lead) for lead in (128, 64, 16)]
    assert found == pytest.approx(MEASURED[bits], rel=0.03)
    assert found[0] < found[1] < found[2], "a longer lead finds a better joint"


@pytest.mark.parametrize("bits", [5, 6, 7, 8])
def test_each_bit_counts(bits, device):
    """The limit is 4 times less."""
    targets = gaussian_tiles(64).clamp(-2, 2).to(device)
    assert 3 < found_error(targets, bits - 1, 64) / found_error(targets, bits, 64) < 5


@pytest.mark.parametrize("bits", MEASURED)
def test_weights_beside_the_joint_are_like_others(bits, device):
    """With a lead of one weight their errors are twice as large and more."""
    targets = gaussian_tiles(256).to(device)
    beside = [*range(4), *range(252, 256)]
    for lead, least, most in ((128, 0.85, 1.2), (1, 1.7, 9)):
        found = values(windows(encode_trellis(targets, bits, lead)[None]), "mul1")[0]
        errors = (found.double() - targets).square().mean(0)
        assert least < (errors[beside].mean() / errors[8:248].mean()).item() < most


@pytest.mark.parametrize("bits", range(1, 9))
def test_encoding_what_was_decoded(bits, device):
    """A path without error is found again, or one of the same values."""
    own = torch.randint(0, 1 << bits, (4, 256), generator=torch.Generator().manual_seed(bits))
    tiles = pack(own, bits).to(device)
    decoded = values(windows(tiles[None]), "mul1")[0]
    found = values(windows(encode_trellis(decoded.float(), bits, 64)[None]), "mul1")[0]
    assert torch.equal(found, decoded)


def test_compiled(device):
    def both(targets):
        decoded = decode_trellis(encode_trellis(targets, 3, 9).view(1, 4, 48), "mul1", torch.bfloat16)
        return decoded + targets.view(64, 16)

    targets = gaussian_tiles(4).to(device)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(targets), both(targets))
