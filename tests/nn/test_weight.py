"""What layers have in common that hold a packed weight: in whatever form they hold it, they give out and take in the
stored one, as it is at that time."""

import copy
import io
import pickle
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import cases
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import hf_kbit
from hf_kbit import KbitConfig, KbitEmbedding, KbitLinear, quantize_model
from hf_kbit.nn import weight as nn_weight
from hf_kbit.nn.experts import KbitProjection


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
    made.linear = KbitLinear.from_linear(dense[1], bits=3, codebook="int")
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


def test_threads_share_a_model(form):
    """Copying, saving, loading and running it at once, which gives what one after the other gives."""
    made, x = model(0), cases.x((3,), 64)
    expected, outputs = contents(made), (made.linear(x), made.head(x))

    def use(number: int) -> None:
        other = list(WAYS.values())[number % len(WAYS)](made)
        assert_same(contents(other), expected)
        assert_tied(other)
        for layer, output in zip((other.linear, other.head), outputs, strict=True):
            assert torch.equal(layer(x), output)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(16)))
        # Another one makes a state dict while this one makes its own, between two layers that are tied.
        this = threading.current_thread()

        def between(*_):
            if threading.current_thread() is this:
                threads.submit(made.state_dict).result()

        made.head.register_state_dict_pre_hook(between)
        assert_tied(made)


# --- a state dict that lost its metadata ----------------------------------------------------------


def warned(made: nn.Module, state: dict) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        made.load_state_dict(state)
    return [str(warning.message) for warning in found]


def test_a_state_dict_without_metadata_is_warned_of(form):
    """Once, unless it has what the layers have anyway, as where a training goes on."""
    made, other = model(0), model(1)
    (message,) = warned(made, dict(other.state_dict()))
    assert message.startswith("table.weight: found a state dict without metadata, which says how packed words decode")
    assert len(warned(made, dict(model(0).state_dict()))) == 1
    assert warned(made, dict(made.state_dict())) == warned(made, other.state_dict()) == []
    assert warned(made, {"linear.bias": torch.zeros(24)} | dict(made.state_dict())) == []


# --- what a forward says, and mends ---------------------------------------------------------------


def layers() -> list[tuple[nn.Module, tuple]]:
    """One of each kind, and what its forward takes."""
    projection = KbitProjection(2, in_features=64, out_features=8, bits=3)
    projection.load_dense(cases.weight((2, 8, 64)))
    made = [model(0).linear, model(0).table, projection]
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    return list(
        zip(made, [(cases.x((3,), 64),), (torch.tensor([3, 1]),), (cases.x((3,), 64), None, offsets)], strict=True)
    )


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("cast", [torch.float32, torch.bfloat16, torch.float16])
def test_vectors_that_a_loop_has_cast(kind, cast, form):
    """As loops of notebooks do before training: column scales are a vector, and not one of floats."""
    made, inputs = layers()[kind]
    if kind == 0:
        nn.init.zeros_(made.bias)  # which no cast rounds
    everything = nn.ModuleList([made])
    expected, before = made(*inputs), contents(everything)
    uses = {
        "forward": lambda: made(*inputs),
        "dequantize": made.dequantize,
        "state dict": made.state_dict,
        "pickle": lambda: pickle.dumps(made),
        "copy": lambda: copy.deepcopy(made)(*inputs),
    }
    for use in uses.values():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.data = parameter.data.to(cast)
        assert made.weight_columns.dtype == cast
        use()
    made.float()
    assert torch.equal(made(*inputs), expected) and made.weight_columns.dtype == torch.uint8
    assert_same(contents(everything), before)


@pytest.mark.parametrize("kind", range(3))
def test_errors_of_a_forward_name_the_layer(kind):
    made, (x, *others) = layers()[kind]
    wrong = [
        (x.bool(), TypeError, "(x|indices): found dtype (torch.)?bool, expected"),
        (x.to_sparse(), TypeError, "(x|indices): found layout sparse_coo, expected a dense tensor"),
        (x + 50, ValueError, "indices: found 5[13].*, expected 0 to 39")
        if kind == 1
        else (x[:, :33], ValueError, r"x: found shape \[3, 33\], expected \[\*, 64\]"),
    ]
    for name, called in ((None, type(made).__name__), ("blocks.0.proj", "blocks.0.proj")):
        made.qualified_name = name
        for inputs, error, message in wrong:
            with pytest.raises(error, match=f"^{called}: {message}"):
                made(inputs, *others)


def test_a_quantized_model_knows_the_names_of_its_layers():
    made = nn.Sequential(nn.ModuleDict({"up": nn.Linear(64, 64)}), nn.Linear(64, 64))
    quantize_model(made, KbitConfig(bits=3, skip_default_modules=False))
    with pytest.raises(ValueError, match=r"^0.up: x: found shape \[1, 3\]"):
        copy.deepcopy(made)[0]["up"](torch.ones(1, 3))


def test_training_what_was_loaded_under_inference_mode():
    with torch.inference_mode():
        made = KbitLinear.from_linear(nn.Linear(64, 8), bits=3)
    x = cases.x((3,), 64).requires_grad_()
    with torch.no_grad():
        assert made(x).isfinite().all()
    with pytest.raises(ValueError, match="KbitLinear: weight: found one that was made under"):
        made(x)
