"""Averages of models over training leave packed weights alone."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from hf_kbit import KbitLinear

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
WAYS = {
    "mean": {},
    "mean, all at once": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "moving": {"avg_fn": get_ema_avg_fn(0.5)},
    "moving, all at once": {"multi_avg_fn": get_ema_multi_avg_fn(0.5)},
    "with buffers": {"use_buffers": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_packed_weights_are_copied_and_others_averaged(way, device):
    model = nn.Sequential(KbitLinear.from_linear(nn.Linear(64, 64), bits=3), nn.Linear(64, 8)).to(device)
    before = copy.deepcopy(model)
    averaged = AveragedModel(model, **WAYS[way])
    averaged.update_parameters(model)
    with torch.no_grad():
        model[0].bias += 1.0
        model[1].weight += 1.0
    for _ in range(3):
        averaged.update_parameters(model)
    assert torch.equal(averaged.module[0].dequantize(), before[0].dequantize())
    for found, old, new in (
        (averaged.module[1].weight, before[1].weight, model[1].weight),
        (averaged.module[0].bias, before[0].bias, model[0].bias),
    ):
        assert ((old < found) & (found < new)).all()
    assert list(averaged.module.state_dict()) == list(model.state_dict()) == list(before.state_dict())
    assert averaged(X.to(device)).isfinite().all()
