"""What layers have in common that hold a packed weight: their errors name them."""

import copy
import sys

import cases
import pytest
import torch
from torch import nn

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
