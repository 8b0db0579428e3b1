"""Quantizing layers of a model that is in memory."""

import sys
from collections.abc import Iterable

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_kbit import dynamic_range
from hf_kbit.integrations.transformers.selection import Plan

SHOWN_AFTER = 3  # seconds, the bar


@torch.no_grad()
def quantize_layers(plan: Plan, names: Iterable[str], device: torch.device | str | None = None) -> None:
    """Quantizes layers of a plan, without data, on ``device`` or on a GPU where there is one; each ends where it was.
    What would lose rows stays as it is (``Outcome.lost``)."""
    for name in tqdm(names, desc="quantizing", unit="layer", delay=SHOWN_AFTER):
        weight = plan.sites[name].weight
        packed = _quantized(plan, name, device or ("cuda" if torch.cuda.is_available() else weight.device))
        if packed.lost:
            plan.outcome.lost[name] = packed.lost
        else:
            plan.put(name, packed)


@torch.no_grad()
def leave_lost(plan: Plan, device: torch.device | str) -> None:
    """Takes out of a plan what quantizing without data leaves in 16 bits (``Outcome.lost``)."""
    for name in plan.decodings:
        if dynamic_range.is_wide(plan.sites[name].turned(plan.sites[name].weight.to(device))):
            if lost := _quantized(plan, name, device).lost:
                plan.outcome.lost[name] = lost


def _quantized(plan: Plan, name: str, device: torch.device | str):
    site = plan.sites[name]
    weight, levels = site.turned(site.weight.to(device)), plan.decodings[name].levels
    return plan.recipe(name).quantize(weight, levels, f"{name}.weight")


def keep_adapters(model: nn.Module) -> None:
    """Has adapters of PEFT work on layers that were quantized under them."""
    if "peft" in sys.modules:
        from hf_kbit.integrations.peft.base import adopt

        adopt(model)
