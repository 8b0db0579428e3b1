"""Column scales and the rotation: what they are by definition, to the last bit, and that they undo each other."""

import cases
import pytest
import torch

from hf_kbit import format, transforms
from hf_kbit.transforms import of_input, of_moments, rotate, to_original, to_stored

SHAPES = [(1, 1), (3, 31), (5, 32), (2, 3, 70), (0, 64), (4, 0), (7, 1500)]


class Single(float):
    """A float32 number of plain Python: every result is rounded to float32."""

    def __add__(self, other):
        return single(float(self) + float(other))

    def __sub__(self, other):
        return single(float(self) - float(other))

    def __mul__(self, other):
        return single(float(self) * single(other))


def single(value: float) -> Single:
    return Single(torch.tensor(value, dtype=torch.float64).float().item())


def matrix(in_features: int) -> torch.Tensor:
    """float64 R of all blocks: the Hadamard matrix by Sylvester's rule, H of 2n from four of n, over its root."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while len(block) < format.BLOCK_SIZE:
        block = torch.cat([torch.cat([block, block], 1), torch.cat([block, -block], 1)])
    return torch.block_diag(*[block / format.BLOCK_SIZE**0.5] * format.num_blocks(in_features))


def scales(in_features: int) -> torch.Tensor:
    return torch.rand(in_features, generator=cases.generator(in_features)) * 4 + 0.1


@pytest.mark.parametrize("dtype", [*cases.FLOATS, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_rotate_is_the_product_with_the_hadamard_matrix(shape, dtype):
    x = cases.x(shape[:-1], shape[-1], dtype)
    width = 32 * format.num_blocks(shape[-1])
    padded = torch.nn.functional.pad(x.double(), (0, width - shape[-1]))
    expected = padded @ matrix(shape[-1]) if width else padded
    found = rotate(x)
    assert found.shape == (*shape[:-1], width) and found.is_contiguous()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), expected, atol=0 if not width else 1e-5, rtol=1e-5)


def test_rotate_to_the_last_bit():
    """What ``format.hadamard`` says of a block, each sum, difference and product rounded to float32."""
    x = cases.weight((40, 70)) * torch.logspace(-20, 20, 40)[:, None]
    padded = torch.nn.functional.pad(x, (0, 26)).view(-1, 32).tolist()
    expected = torch.tensor([format.hadamard([Single(value) for value in block]) for block in padded])
    assert torch.equal(rotate(x).view(-1, 32), expected)


def test_rotate_is_its_own_inverse():
    x = cases.x((50,), 96, torch.float64)
    torch.testing.assert_close(rotate(rotate(x)), x, rtol=0, atol=1e-14)


def test_rotate_leaves_its_argument_alone_whatever_its_strides():
    x = cases.x((64,), 40)
    for view in (x, x.T, x[:, ::2], x[:1].expand(5, -1)):
        before = view.clone()
        assert torch.equal(rotate(view), rotate(before)) and torch.equal(view, before)


def test_the_size_of_a_slice_cannot_be_seen(monkeypatch):
    x = cases.x((9,), 100)
    expected = rotate(x)
    monkeypatch.setattr(transforms, "_SLICE_ON_CPU", 5)
    assert torch.equal(rotate(x), expected)


@pytest.mark.gpu
def test_rotate_is_the_same_on_a_gpu():
    x = cases.weight((300, 1500))
    assert torch.equal(rotate(x.cuda()).cpu(), rotate(x))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("in_features", [1, 33, 64, 100])
def test_the_product_stays_what_it_was(in_features, scaled, rotated):
    """``of_input(x) @ to_stored(W).T`` is ``x @ W.T``, and ``to_original`` gives W back."""
    weight, x = cases.x((9,), in_features, seed=1), cases.x((2, 3), in_features, torch.float64)
    columns = scales(in_features) if scaled else None
    stored = to_stored(weight, columns, rotated)
    assert stored.dtype == torch.float32 and stored.shape == (9, 32 * format.num_blocks(in_features))[:1] + (
        (32 * format.num_blocks(in_features),) if rotated else (in_features,)
    )
    torch.testing.assert_close(to_original(stored, columns, rotated, in_features), weight)
    given = of_input(x, columns, rotated)
    assert given.dtype == torch.float64
    torch.testing.assert_close(given @ stored.double().T, x @ weight.double().T, rtol=1e-5, atol=1e-5)
    assert of_input(x.half(), columns, rotated).dtype == torch.float32


def test_the_padding_of_a_rotated_weight_holds_numbers():
    stored = to_stored(cases.x((4,), 33), None, rotated=True)
    assert (stored[:, 34:] != 0).all()


@pytest.mark.parametrize("in_features", [32, 40, 100])
def test_of_moments(in_features):
    """Of the transformed inputs, with and without dependence between inputs."""
    x, columns = cases.x((200,), in_features, torch.float64), scales(in_features)
    turned = of_input(x, columns, rotated=True)
    second = x.T @ x
    torch.testing.assert_close(of_moments(second.float(), columns).double(), turned.T @ turned, rtol=1e-4, atol=1e-3)
    full = of_moments(torch.diag(second.diagonal()).float(), columns).diagonal()  # as if inputs were independent
    torch.testing.assert_close(of_moments(second.diagonal().float(), columns), full, rtol=1e-4, atol=1e-3)
    assert of_moments(second, None) is second
