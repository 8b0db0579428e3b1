"""Quantizing under adapters that are there already, and 16-bit heads where an adapter trains them as a whole."""

from collections.abc import Iterator

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers.utils import logging

from hf_kbit.integrations.peft.layer import ADAPTED, KbitTunerLayer, tuner_class
from hf_kbit.integrations.transformers import selection
from hf_kbit.integrations.transformers.dense import to_dense
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.weight import is_sharded

logger = logging.get_logger("transformers.hf_kbit")
# Packages of PEFT whose layers call the base layer, and leave its weight alone while they do.
PACKAGES = tuple(f"peft.tuners.{name}." for name in ("adalora", "ia3", "loha", "lokr", "lora", "vera"))


def of_adapters(model: nn.Module) -> Iterator[str]:
    """What the names of layers begin with that stay in 16 bits, for they are adapters, or adapters need them so."""
    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            yield f"{name}."
        elif isinstance(module, BaseTunerLayer):
            packable = isinstance(module.get_base_layer(), nn.Linear | nn.Embedding) and _calls_base(module)
            yield from (f"{name}.{part}." for part in module._modules if part != "base_layer" or not packable)


def _calls_base(layer: BaseTunerLayer) -> bool:
    variants = getattr(layer, "lora_variant", None)
    return type(layer).__module__.startswith(PACKAGES) and not layer.merged and not variants


def adopt(model: nn.Module) -> None:
    """Has adapters work on base layers that were quantized under them as if they had been made over these."""
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and isinstance(module.base_layer, ADAPTED):
            if not isinstance(module, KbitTunerLayer):
                module.__class__, module.name = tuner_class(type(module)), name


def decode_heads(model: nn.Module, modules_to_save: list[str]) -> None:
    """Puts 16-bit layers in the places of packed ones outside the base model that are to be trained as a whole.

    Args:
        model: the one that gets an adapter.
        modules_to_save: ends of names, of layers or of what they are in.
    """
    saved = [name for name, _ in model.named_modules() if name.endswith(tuple(modules_to_save))]
    base, new = selection.base_of(model), {}
    for name, layer in model.named_modules():
        outside = not name.startswith(base) and any(f"{name}.".startswith(f"{part}.") for part in saved)
        if outside and isinstance(layer, KbitLinear):
            if not (layer.tied or layer.weight.is_meta or is_sharded(layer.weight)):
                new[name] = to_dense(layer, layer.dense_dtype)
    selection.replace_modules(model, new)
    if new:
        logger.info("hf_kbit: decoded to 16 bits, to be trained as modules_to_save: %s", ", ".join(new))
