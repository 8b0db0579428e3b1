"""Column scales and the rotation: what they are by definition, to the last bit, and that they undo each other."""

import cases
import pytest
import torch

from hf_kbit.format import spec as format
from hf_kbit.format import transforms
from hf_kbit.format.transforms import of_input, of_moments, rotate, to_original, to_stored


def matrix(in_features: int) -> torch.Tensor:
    """float64 R of all blocks: the Hadamard matrix by Sylvester's rule, H of 2n from four of n, over its root."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < format.BLOCK_SIZE:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / format.BLOCK_SIZE**0.5] * format.num_blocks(in_features))


def scales(in_features: int) -> torch.Tensor:
    return torch.rand(in_features, generator=cases.generator(in_features)) * 4 + 0.1


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (5, 32), (2, 3, 70), (0, 64), (4, 0), (7, 1500)])
def test_rotate_is_the_product_with_the_hadamard_matrix(shape):
    """Which is its own inverse."""
    width = 32 * format.num_blocks(shape[-1])
    for dtype in (*cases.FLOATS, torch.float64):
        x = cases.x(shape[:-1], shape[-1], dtype)
        padded = torch.nn.functional.pad(x.double(), (0, width - shape[-1]))
        expected = padded @ matrix(shape[-1]) if width else padded
        found = rotate(x)
        assert found.shape == (*shape[:-1], width) and found.is_contiguous()
        assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
        if dtype == torch.float64:
            torch.testing.assert_close(rotate(found), padded, rtol=0, atol=1e-14)


def test_rotate_to_the_last_bit(device, monkeypatch):
    """As docs/format.md says, on every device, of any strides, and whatever the size of a slice."""
    x = cases.weight((40, 70)) * torch.logspace(-20, 20, 40)[:, None]
    padded = torch.nn.functional.pad(x, (0, 26)).view(-1, 32).tolist()
    expected = torch.tensor([cases.format_page()["turn"](block) for block in padded]).view(40, 96)
    for size in (1 << 13, 5):
        monkeypatch.setattr(transforms, "_SLICE_ON_CPU", size)
        for view in (x, x.T.contiguous().T, torch.stack([x, x + 1], dim=-1)[..., 0]):
            on_device, before = view.to(device), view.clone()
            assert torch.equal(rotate(on_device).cpu(), expected)
            assert torch.equal(on_device.cpu(), before)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("in_features", [1, 33, 64, 100])
def test_the_product_stays_what_it_was(in_features, scaled, rotated):
    """``of_input(x) @ to_stored(W).T`` is ``x @ W.T``, and ``to_original`` gives W back."""
    weight, x = cases.x((9,), in_features, seed=1), cases.x((2, 3), in_features, torch.float64)
    columns, width = scales(in_features) if scaled else None, 32 * format.num_blocks(in_features)
    stored = to_stored(weight, columns, rotated)
    assert stored.dtype == torch.float32 and stored.shape == (9, width if rotated else in_features)
    if rotated and in_features > 1:
        assert (stored[:, in_features + 1 :] != 0).all(), "the padding holds numbers"
    torch.testing.assert_close(to_original(stored, columns, rotated, in_features), weight)
    given = of_input(x, columns, rotated)
    assert given.dtype == torch.float64 and of_input(x.half(), columns, rotated).dtype == torch.float32
    torch.testing.assert_close(given @ stored.double().T, x @ weight.double().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_features", [32, 40, 100])
def test_of_moments(in_features):
    """Of the transformed inputs."""
    x, columns = cases.x((200,), in_features, torch.float64), scales(in_features)
    turned = of_input(x, columns, rotated=True)
    second = x.T @ x
    torch.testing.assert_close(of_moments(second.float(), columns).double(), turned.T @ turned, rtol=1e-4, atol=1e-3)
    assert of_moments(second, None) is second
