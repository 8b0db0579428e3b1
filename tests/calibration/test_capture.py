"""What is added up of each layer's inputs, against a forward pass of the whole model for each layer."""

import copy

import pytest
import torch
from architectures import ARCHITECTURES
from torch import nn

import hf_kbit
from hf_kbit.calibration import capture, weighted
from hf_kbit.calibration.layerwise import METHODS

READS_TOKENS = [
    row
    for row in ARCHITECTURES
    if row.name not in ("vit", "swinv2", "swin2sr", "whisper", "llava", "wav2vec2", "hubert", "clip")
]
IDS = torch.randint(5, 90, (5, 9), generator=torch.Generator().manual_seed(3))


class Recorder:
    """A solver that keeps what it is given, in the order of the calls."""

    def __init__(self, diagonal: bool):
        self.DIAGONAL, self.moments = diagonal, []

    def solve(self, weight, moments, codebook):
        self.moments.append(moments.clone())
        return weighted.solve(weight, torch.ones(weight.shape[1]), codebook)


@torch.no_grad()
def moments_by_whole_passes(dense, quantized, units, ids) -> list[torch.Tensor]:
    """For each unit, in the order of use, a pass of one sequence at a time, with the units before it quantized."""
    order, found = [], []
    hooks = [dense.get_submodule(u).register_forward_pre_hook(lambda *_, u=u: order.append(u)) for u in units]
    capture.forward_pass(dense, ids)
    for hook in hooks:
        hook.remove()
    for names in map(units.get, dict.fromkeys(order)):
        sums = {}

        def add(layer, args, sums=sums):
            rows = args[0].flatten(0, -2)
            sums[layer] = sums.get(layer, 0) + rows.T @ rows

        layers = [dense.get_submodule(name) for name in names]
        hooks = [layer.register_forward_pre_hook(add) for layer in layers]
        for sequence in ids:
            capture.forward_pass(dense, sequence[None])
        for hook in hooks:
            hook.remove()
        found += [sums[layer] for layer in layers]
        for name in names:
            hf_kbit.integrations.transformers.selection.replace_modules(dense, {name: quantized.get_submodule(name)})
    return found


@pytest.mark.parametrize("row", READS_TOKENS, ids=str)
@pytest.mark.parametrize(("batch", "diagonal", "length"), [(1, True, 9), (2, False, 5), (8, False, 9)])
def test_moments(row, batch, diagonal, length, monkeypatch):
    """In parts of one sequence, in unequal ones, with as many sequences as tokens, and all at once."""
    model, ids = row.build(), IDS[:, :length]
    dense = copy.deepcopy(model).eval()
    solver = Recorder(diagonal)
    monkeypatch.setitem(METHODS, "recorder", solver)
    hf_kbit.calibrate(model, ids, method="recorder", batch=batch, device="cpu", bits=4)
    names = [name for name, layer in model.named_modules() if isinstance(layer, hf_kbit.KbitLinear)]
    units = capture.units(dense, list(hf_kbit.integrations.transformers.selection.choose(dense, hf_kbit.KbitConfig())))
    assert sorted(names) == sorted(name for unit in units.values() for name in unit)
    expected = moments_by_whole_passes(dense, model, units, ids)
    assert len(solver.moments) == len(expected) == len(names)
    for sums, found in zip(expected, solver.moments, strict=True):
        torch.testing.assert_close(found, sums.diagonal() if diagonal else sums, rtol=1e-3, atol=1e-4 * sums.max())


def test_units_are_the_outermost_elements_of_lists():
    inner = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})
    model = nn.ModuleDict({"layers": nn.ModuleList([inner, nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    assert capture.units(model, names) == {
        "layers.0": ["layers.0.experts.0", "layers.0.experts.1"],
        "layers.1": ["layers.1"],
        "head": ["head"],
    }


def test_a_forward_of_an_instance_is_put_back():
    """Such as accelerate's, which moves inputs first."""
    row = next(row for row in ARCHITECTURES if row.name == "llama")
    model, calls = row.build(), []
    first, second = model.model.layers[:2]
    forward = first.forward

    def own(*args, **kwargs):
        calls.append(1)
        return forward(*args, **kwargs)

    first.forward = own
    hf_kbit.calibrate(model, IDS, batch=5, method="weighted")
    assert first.forward is own and len(calls) == 3  # the check, the sums, the outputs
    assert "forward" not in vars(second)


@pytest.mark.parametrize("diagonal", [True, False])
def test_layers_that_are_called_by_keyword(diagonal):
    linear, x = nn.Linear(6, 3), torch.randn(2, 5, 6)
    with capture.moments({"positional": linear}, diagonal) as expected:
        linear(x)
    with capture.moments({"keyword": linear}, diagonal) as found:
        linear(input=x)
    assert torch.equal(found["keyword"], expected["positional"])


def test_the_pass_ends_after_the_last_layer():
    """Logits of all the data would take more memory than the model; those of the check are few."""
    model = next(row for row in ARCHITECTURES if row.name == "llama").build()
    seen = []
    model.lm_head.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    hf_kbit.calibrate(model, IDS, batch=5, method="weighted")
    assert seen == [2]


def test_a_layer_without_anything_to_quantize_takes_parts_too():
    model = next(row for row in ARCHITECTURES if row.name == "llama").build()
    seen = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: seen.append(len(args[0])), prepend=True)
    model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    hf_kbit.calibrate(model, IDS, batch=2, method="weighted", modules_to_not_convert=["layers.0"])
    assert seen == [2, 2, 2, 5, 2, 2, 2, 2, 1, 1]
