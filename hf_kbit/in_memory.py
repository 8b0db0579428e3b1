"""``quantize_model``: quantizes a model that is in memory already, of Transformers or of anybody."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hf_kbit import mixing
from hf_kbit.config import KbitConfig, config_or
from hf_kbit.integrations.transformers import selection
from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer
from hf_kbit.nn.experts import is_projection
from hf_kbit.nn.weight import KbitWeight

SHOWN_AFTER = 3  # seconds, the bar
# Where a module keeps hooks and how they want to be called.
HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
)


@dataclass(frozen=True)
class Quantized:
    """What ``quantize_model`` did.

    Attributes:
        bits: ``{name: width}`` of the layers, tables and projections of experts that it quantized; of a table and what
            is tied to it one name.
        left: ``{name: why}`` of those that it left: ``"asked for"`` by the config, or a reason of its own: ``"head"``,
            ``"router"``, ``"table"`` of embeddings, ``"small"`` table, ``"read"`` by the model's code instead of
            called, ``"tied"`` to a table that is left, or ``"fixed"``, tied to another tensor or kept in float32.
        bytes_before: of all parameters and buffers.
        bytes_after: of the same, quantized.
    """

    bits: Mapping[str, int]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int


@torch.no_grad()
def quantize_model(
    model: nn.Module, config: KbitConfig | None = None, *, device: torch.device | str | None = None, **arguments: Any
) -> Quantized:
    """Quantizes the linear layers of a model in place, one after another, and the experts of mixtures; tables of
    embeddings too if ``embedding_bits`` says so.

    Any ``nn.Module`` will do: a model of Transformers becomes what ``from_pretrained`` with the config would have
    loaded, is saved by ``save_pretrained`` to the same bytes, and trains with adapters. Another module runs, and its
    ``state_dict`` loads into one that was quantized likewise. A bar shows on stderr if it takes more than seconds.

    Args:
        model: weights float32, float16 or bfloat16, on any devices, and they stay there.
        config: what to quantize, as for loading.
        device: where a weight is while it is quantized. Default: a GPU where there is one, else where it is.
        arguments: of ``KbitConfig``, such as ``bits=3``, instead of ``config``.

    Returns:
        What was done.

    Raises:
        TypeError: ``config`` is no ``KbitConfig`` or stands beside arguments of one, an argument is unknown, or a
            weight has another dtype.
        ValueError: an argument is out of range, the model is quantized already, there is no layer to quantize, or a
            weight is NaN, infinite, or not in memory. In all these cases the model is as it was.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> quantize_model(model, bits=3).bits
    {'0': 3, '2': 3, '4': 3}
    >>> model[0]
    KbitLinear(in_features=64, out_features=64, bias=True, bits=3)
    """
    quantizer = KbitHfQuantizer(config_or(config, arguments), pre_quantized=False)
    config = quantizer.quantization_config
    chosen = _choose(model, config)
    before, reasons, tied = _bytes(model), selection.skips(model), selection.ties(model)
    if config.embedding_bits is None:
        reasons = dict.fromkeys(selection.tables(model), "table") | reasons
    left = {
        name: reasons.get(name, "asked for")
        for name in selection.packable(model)
        if name not in chosen and tied.get(name) not in chosen
    }
    if config.bits % 1:  # a mean
        widths = mixing.by_rule(model, [name for name, bits in chosen.items() if bits % 1], config.bits)
        quantizer.quantization_config = mixing.config_of(config, widths)
        chosen |= widths
    quantize_layers(model, chosen, quantizer, device)
    if isinstance(model, PreTrainedModel):
        quantizer.adopt(model, chosen)
    return Quantized(chosen, left, before, _bytes(model))


def quantize_layers(
    model: nn.Module, chosen: Mapping[str, int], quantizer: KbitHfQuantizer, device: torch.device | str | None
) -> None:
    """Puts quantized layers of these widths in the place of those in the model, and of what is tied to them."""
    tied, tables = selection.ties(model), selection.table_widths(model, chosen)
    for name, bits in tqdm(chosen.items(), desc="quantizing", unit="layer", delay=SHOWN_AFTER):
        layer = quantizer.new_layer(model, name, bits)
        layer.balances = name not in tables
        _quantize(model, name, layer, device)
    for name, first in tied.items():
        if first in chosen:
            layer, dense = quantizer.new_layer(model, name, chosen[first]), model.get_submodule(name)
            layer.tie_to(model.get_submodule(first))
            _put(model, name, layer, dense)


def _choose(model: nn.Module, config: KbitConfig) -> dict[str, int]:
    """``{name: bits}`` of what is to be quantized, of a model that can be."""
    if quantized := next((name for name, module in model.named_modules() if isinstance(module, KbitWeight)), None):
        raise ValueError(f"{quantized}: found it quantized already, expected a model in 16 or 32 bits")
    if selection.is_linear(model):
        raise ValueError("model: found one linear layer, expected a module that has some; see KbitLinear.from_linear")
    chosen = selection.choose(model, config)
    if not chosen:
        raise ValueError(f"model: found no linear layer to quantize in {type(model).__name__}")
    for name in chosen:
        weight = selection.dense_weight(model, name)
        if weight.is_meta or hasattr(selection.holder(model, name), "_hf_hook"):
            found = "found it on the meta device, or placed by accelerate, expected it in memory"
            raise ValueError(f"{name}.weight: {found}")
        if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(f"{name}.weight: found {weight.dtype}, expected float32, float16 or bfloat16")
        if not weight.isfinite().all():
            raise ValueError(f"{name}.weight: found NaN or infinite values, expected finite ones")
    return chosen


def _quantize(model: nn.Module, name: str, layer: KbitWeight, device: torch.device | str | None) -> None:
    dense, weight = selection.holder(model, name), selection.dense_weight(model, name)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else weight.device
    moved = weight.to(device)
    layer.load_dense(moved.mT if layer.transposed else moved, f"{name}.weight")
    _put(model, name, layer.to(weight.device), dense)


def _put(model: nn.Module, name: str, layer: KbitWeight, dense: nn.Module) -> None:
    layer.train(dense.training)
    if not is_projection(model, name):
        for hooks in HOOKS:  # that somebody put on it
            setattr(layer, hooks, getattr(dense, hooks))
    selection.replace_modules(model, {name: layer})


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
