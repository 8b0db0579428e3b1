"""What layers of all kinds of models are given while they are calibrated, against a pass of the whole dense model; or
by which words a model is refused."""

import inspect

import pytest
import torch
from architectures import BY_NAME, small_config
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

import hf_kbit
from hf_kbit.calibration import layerwise, moments, sensitivity, stream
from hf_kbit.calibration.check import check
from hf_kbit.calibration.experts import opened
from hf_kbit.integrations.transformers import selection
from hf_kbit.nn.experts import is_projection

IDS = torch.randint(5, 90, (3, 24), generator=torch.Generator().manual_seed(3))
CPU = torch.device("cpu")
CLASSES = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "multimodal": AutoModelForImageTextToText,
}


def build(task: str, kind: str, changes: dict) -> nn.Module:
    torch.manual_seed(0)
    config = small_config(kind, **changes)
    model = CLASSES[task].from_config(config).float().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            nn.init.normal_(parameter, 0, 0.1)
    return model


def gram(calls: list[torch.Tensor]) -> torch.Tensor:
    """The mean of x @ x.T over rows, whatever their order."""
    x = torch.cat([call.flatten(0, -2).float() for call in calls])
    return x.T @ x / len(x)


@torch.no_grad()
def inputs_of_whole(model, names, ids) -> dict[str, list[torch.Tensor]]:
    found = {name: [] for name in names}
    with stream.hooked({name: model.get_submodule(name) for name in names}, lambda n, x, *_: found[n].append(x)):
        stream.forward_pass(model, ids)
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-3 * expected.norm())


def check_inputs(build_model, ids, batch: int, monkeypatch) -> None:
    """Of the dense layers, which calibration computes too, for the drift of the quantized ones."""
    given, find = {}, moments.moments

    def told(linear, group, runs, *others):
        calls = [moments.given(linear, run_dense, group.once) for _, run_dense in runs]
        again = [moments.given(linear, run_dense, group.once) for _, run_dense in runs]
        for own, same in zip(calls, again, strict=True):
            assert all(torch.equal(x, y) for (x, *_), (y, *_) in zip(own, same, strict=True))
        for name in group.names:
            given[name] = [[x for x, *_ in own] for own in calls]
        return find(linear, group, runs, *others)

    monkeypatch.setattr(moments, "moments", told)
    model, dense = build_model(), build_model()
    hf_kbit.calibrate(model, ids, batch=batch, device="cpu", bits=5)
    assert given
    expected = inputs_of_whole(dense, given, ids)
    for name, batches in given.items():
        turns = len(batches[0])  # a layer that the model calls again is calibrated for the first calls
        assert close(gram([x for own in batches for x in own]), gram(expected[name][:turns])), name
    projections = [n for n in selection.Packable(dense).choose(hf_kbit.KbitConfig()) if is_projection(dense, n)]
    assert len(given) + len(projections) >= len([m for m in model.modules() if isinstance(m, hf_kbit.KbitLinear)])


def check_gradients(model, ids) -> None:
    names = [n for n in selection.Packable(model).choose(hf_kbit.KbitConfig()) if not is_projection(model, n)]
    found, outputs = {}, {}

    def choose(probabilities):
        return probabilities.argmax(-1, keepdim=True)

    def take(name, module, given, gradient):
        found[name] = found.get(name, 0) + gradient.float().square().sum()

    sensitivity.gradients(model, names, ids, CPU, choose, take)
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, y, name=name: (y.retain_grad(), outputs.setdefault(name, []).append(y)) and None
        )
        for name in names
    ]
    logs = stream.forward_pass(model, ids).logits.float().log_softmax(-1)
    logs.gather(-1, choose(logs.detach())).sum().backward()
    for hook in hooks:
        hook.remove()
    for name in names:
        expected = sum(y.grad.square().sum() for y in outputs[name] if y.grad is not None)
        assert close(torch.as_tensor(found.get(name, 0.0)), torch.as_tensor(expected)), name
