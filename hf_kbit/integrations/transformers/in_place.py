"""Quantizing layers of a model that is in memory, in their place."""

import sys
from collections.abc import Mapping

import torch
from torch import nn
from tqdm.auto import tqdm

from hf_kbit import dynamic_range
from hf_kbit.integrations.transformers import selection
from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer

SHOWN_AFTER = 3  # seconds, the bar


@torch.no_grad()
def quantize_layers(
    model: nn.Module,
    packable: selection.Packable,
    chosen: Mapping[str, int],
    quantizer: KbitHfQuantizer,
    device: torch.device | str | None,
) -> None:
    """Puts quantized layers of these widths in the place of those in the model, of which ``packable`` is, and of what
    is tied to them. Each is quantized on ``device``, or on a GPU where there is one, and ends where it was. What would
    lose rows stays as it is (``quantizer.lost``)."""
    tables = packable.tables_in(chosen)
    for name, bits in tqdm(chosen.items(), desc="quantizing", unit="layer", delay=SHOWN_AFTER):
        layer = quantizer.new_layer(model, name, bits)
        layer.balances &= name not in tables
        weight = selection.dense_weight(model, name)
        moved = weight.to(device or ("cuda" if torch.cuda.is_available() else weight.device))
        packed = layer.quantize(moved.mT if layer.transposed else moved, f"{name}.weight")
        if packed.lost:
            quantizer.lost[name] = packed.lost
            continue
        layer.load(packed)
        selection.replace_modules(model, {name: layer.to(weight.device)})
        tie(model, packable, quantizer, name)


def keep_adapters(model: nn.Module) -> None:
    """Has adapters of PEFT work on layers that were quantized under them."""
    if "peft" in sys.modules:
        from hf_kbit.integrations.peft.base import adopt

        adopt(model)


@torch.no_grad()
def leave_lost(
    model: nn.Module, chosen: Mapping[str, int], quantizer: KbitHfQuantizer, device: torch.device | str
) -> dict[str, int]:
    """Those of ``chosen`` that quantizing without data does not leave in 16 bits (``quantizer.lost``)."""
    for name, bits in chosen.items():
        layer, weight = quantizer.new_layer(model, name, bits), selection.dense_weight(model, name).to(device)
        weight = weight.mT if layer.transposed else weight
        if dynamic_range.is_wide(weight) and (lost := layer.quantize(weight, f"{name}.weight").lost):
            quantizer.lost[name] = lost
    return {name: bits for name, bits in chosen.items() if name not in quantizer.lost}


def tie(model: nn.Module, packable: selection.Packable, quantizer: KbitHfQuantizer, quantized: str) -> None:
    """Puts layers with the weight of that which is ``quantized`` in the place of all that it was tied to."""
    first, layer = packable.ties.get(quantized, quantized), model.get_submodule(quantized)
    for name in (first, *(name for name, stored in packable.ties.items() if stored == first)):
        if name != quantized:
            other = quantizer.new_layer(model, name, layer.bits)
            other.tie_to(layer)
            selection.replace_modules(model, {name: other})
