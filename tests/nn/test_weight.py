"""What layers have in common that hold a packed weight: their errors name them."""

import copy
import gc
import sys
import weakref

import cases
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

from hf_kbit import KbitConfig, KbitEmbedding, KbitLinear, quantize_model
from hf_kbit.nn.experts import KbitProjection


def layers() -> list[tuple[nn.Module, tuple]]:
    """One of each kind, and what its forward takes."""
    projection = KbitProjection(2, in_features=64, out_features=8, bits=3)
    projection.load_dense(cases.weight((2, 8, 64)))
    made = [KbitLinear(64, 24), KbitEmbedding(40, 64), projection]
    offsets = torch.tensor([0, 1, 3], dtype=torch.int32)
    return list(
        zip(made, [(cases.x((3,), 64),), (torch.tensor([3, 1]),), (cases.x((3,), 64), None, offsets)], strict=True)
    )


@pytest.mark.parametrize("kind", range(3))
def test_errors_of_a_forward_name_the_layer(kind):
    made, (x, *others) = layers()[kind]
    wrong = [
        (x.bool(), (TypeError, ValueError), "(x|indices): found dtype (torch.)?bool, expected"),
        (x.to_sparse(), ValueError, "(x|indices): found layout sparse_coo, expected a dense tensor"),
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


@pytest.mark.parametrize("kind", range(3))
def test_copies_for_several_gpus_are_refused(kind, monkeypatch):
    """By ``nn.DataParallel``, whose own copying of tensors needs GPUs."""
    copies = sys.modules[nn.parallel.replicate.__module__]
    monkeypatch.setattr(copies, "_broadcast_coalesced_reshape", lambda tensors, devices, detach: [tensors] * 2)
    copies.replicate(nn.Linear(3, 3), [0, 1])
    with pytest.raises(ValueError, match=r"nn.DataParallel: found several GPUs .*expected a process for each GPU"):
        copies.replicate(nn.Sequential(layers()[kind][0]), [0, 1])


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("fails", ["weight", "bias"])
def test_a_move_that_fails_leaves_the_weight(kind, fails):
    made, inputs = layers()[kind]
    before = made(*inputs)

    def move(tensor):
        if (tensor.dim() > 1) == (fails == "weight"):
            raise MemoryError
        return tensor

    if fails == "weight" or kind == 0:  # the others have no bias
        with pytest.raises(MemoryError):
            made._apply(move)
    assert torch.equal(made(*inputs), before) and next(iter(made.state_dict())) == "weight"


@pytest.mark.parametrize("kind", range(3))
def test_a_dense_weight_in_its_place_is_refused(kind):
    """By the layer's name; the layer is as it was, for compiled code too."""
    made, inputs = layers()[kind]
    made.qualified_name = "blocks.0.proj"
    dense, expected = torch.ones(made.weight.shape), made(*inputs)
    compiled = torch.compile(made, backend="eager")
    compiled(*inputs)
    for value in (nn.Parameter(dense), None):
        with pytest.raises(TypeError, match=r"^blocks\.0\.proj\.weight: found a dense one .*, expected a packed one"):
            made.weight = value
    assert torch.equal(made(*inputs), expected) and torch.equal(compiled(*inputs), expected)


def dense_result(kind: int, weight: torch.Tensor, inputs: tuple) -> torch.Tensor:
    """Of a layer of that kind with a dense weight."""
    if kind == 1:
        return F.embedding(inputs[0], weight)
    if kind == 0:
        return F.linear(inputs[0], weight, torch.zeros(len(weight)))
    x, _, (_, middle, _) = inputs
    return torch.cat([x[:middle] @ weight[0].T, x[middle:] @ weight[1].T])


@pytest.mark.parametrize("kind", range(3))
def test_a_dense_weight_put_past_the_layer_is_computed_with(kind):
    """Never with the one before: by functions of torch, straight into its parameters, by pruning, by weight norm."""
    made, inputs = layers()[kind]
    made.load_dense(torch.randn(made.weight.shape))
    before, dense = made(*inputs), torch.randn(made.weight.shape)
    given = torch.func.functional_call(made, {"weight": dense}, inputs)
    torch.testing.assert_close(given, dense_result(kind, dense, inputs))
    assert torch.equal(made(*inputs), before)
    norm, cut = copy.deepcopy(made), copy.deepcopy(made)
    nn.utils.parametrizations.weight_norm(norm)
    prune.l1_unstructured(cut, "weight", 0.5)
    compiled = torch.compile(made, backend="eager")
    compiled(*inputs)
    made._parameters["weight"] = nn.Parameter(dense)
    for layer in (norm, cut, made):
        torch.testing.assert_close(layer(*inputs), dense_result(kind, layer.weight, inputs))
        assert "bits=None" in repr(layer) and layer.to(torch.float32) is layer
        with pytest.raises(ValueError, match=r"weight: found a dense one .*, expected a packed one"):
            layer.dequantize()
    made.float()
    torch.testing.assert_close(compiled(*inputs), dense_result(kind, made.weight, inputs))


def test_layers_that_are_tied_have_one_copy_in_a_state_dict(form):
    """In whatever form the weight is, also where it is copied; and nothing keeps what was copied."""
    model = nn.ModuleDict({"a": nn.Embedding(96, 64), "b": nn.Linear(64, 96, bias=False)})
    model["b"].weight = model["a"].weight
    quantize_model(model, bits=4, embedding_bits=5)
    state = model.state_dict()
    for name in ("weight", "weight_absmax", "weight_columns", "weight_decoding"):
        assert state[f"a.{name}"].data_ptr() == state[f"b.{name}"].data_ptr()
    words = model["a"].weight.words
    kept = [weakref.ref(words), weakref.ref(state["a.weight"])]
    del state, words
    model["a"].weight.replace(KbitLinear.from_linear(nn.Linear(64, 96), bits=3).weight)
    gc.collect()
    assert kept[0]() is None and kept[1]() is None
