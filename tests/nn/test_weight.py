"""What layers have in common that hold a packed weight: in whatever form they hold it, they give out and take in the
stored one, as it is at that time."""

import copy
import io
import pickle

import cases
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hf_kbit
from hf_kbit import KbitEmbedding, KbitLinear
from hf_kbit.nn import weight as nn_weight


@pytest.fixture(params=["planes", "tiles"])
def form(request, monkeypatch) -> str:
    """What the kernels of a device read, of a CPU too."""
    if request.param == "tiles":
        monkeypatch.setattr(nn_weight, "reads_tiles", lambda device: device.type == "cpu")
    return request.param


def model(seed: int) -> nn.Module:
    """A head that is tied to a table, and a linear layer with levels of its own."""
    dense = nn.Embedding(40, 64), nn.Linear(64, 24)
    with torch.no_grad():
        for number, layer in enumerate(dense):
            layer.weight.copy_(cases.weight(tuple(layer.weight.shape), seed=seed + number) * 10.0**seed)
    made = nn.Module()
    made.table, made.head = KbitEmbedding.from_embedding(dense[0], bits=3), KbitLinear(64, 40, bits=3)
    made.head.tie_to(made.table)
    made.linear = KbitLinear.from_linear(dense[1], bits=3, codebook="layer")
    return made


def contents(made: nn.Module) -> dict[str, torch.Tensor]:
    """What the model computes with, and what a state dict has of it."""
    weights = {f"{name} decoded": layer.dequantize().clone() for name, layer in made.named_children()}
    return weights | {name: tensor.clone() for name, tensor in made.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]):
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


def assert_tied(made: nn.Module):
    assert all(made.head.packed[name] is tensor for name, tensor in made.table.packed.items())
    state = made.state_dict()
    assert all(state[f"head.{name}"].data_ptr() == state[f"table.{name}"].data_ptr() for name in made.table.packed)


def through_torch_save(made: nn.Module) -> nn.Module:
    torch.save(made, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_dict(made: nn.Module) -> nn.Module:
    other = model(5)
    other.load_state_dict(made.state_dict())
    return other


WAYS = {
    "state dict": through_state_dict,
    "copy": lambda made: copy.copy(made),
    "deepcopy": lambda made: copy.deepcopy(made),
    "pickle": lambda made: pickle.loads(pickle.dumps(made)),
    "torch.save": through_torch_save,
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_given_out_is_what_is_there(way, form, tmp_path):
    """Also while somebody still has what was given out before, and whatever they did to it."""
    made, new = model(0), model(1)
    assert made.head.is_tiled == (form == "tiles")
    held = made.state_dict(), copy.copy(made.linear), [layer.__getstate__() for layer in made.children()]
    made.load_state_dict(new.state_dict())
    expected = contents(new)
    assert_same(contents(made), expected)
    held = *held, made.state_dict()
    if form == "tiles":  # planes are the memory of the layer itself, as with any module of torch
        for layer in ("table", "head", "linear"):
            held[-1][f"{layer}.weight"].zero_()
    other = WAYS[way](made)
    assert_same(contents(other), expected)
    assert_tied(other)
    assert other.head.is_tiled == made.head.is_tiled
    for saved in (made, new):
        hf_kbit.save(saved, tmp_path / str(saved is made))
    assert len({(folder / "kbit.safetensors").read_bytes() for folder in tmp_path.iterdir()}) == 1


def test_one_state_dict_serves_many_layers(form):
    """Assigned or copied, tensors or parameters: whoever made it finds it as it was."""
    made = model(1)
    expected = contents(made)
    for keep in (False, True):
        state = made.state_dict(keep_vars=keep)
        before = {name: tensor.detach().clone() for name, tensor in state.items()}
        for assign in (True, True, False):
            other = model(2)
            assert not any(other.load_state_dict(state, assign=assign))
            assert_same(contents(other), expected)
        assert_same(state, before)
    assert_same(contents(made), expected)


def test_averages_follow_a_model_that_got_other_weights(form):
    made = model(0)
    averaged = AveragedModel(made)
    averaged.update_parameters(made)
    held = averaged.module.state_dict()
    made.load_state_dict(model(1).state_dict())
    averaged.update_parameters(made)
    found, expected = contents(averaged.module), contents(made)
    assert_same(found | {"linear.bias": expected["linear.bias"]}, expected)
    assert_tied(averaged.module)
    assert form == "planes" or not torch.equal(held["linear.weight"], expected["linear.weight"])
