"""Packed layers and adapters of PEFT in one model: which belong together, and what adapters need in 16 bits."""

from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.trainable_tokens import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.utils import logging

from hf_kbit.integrations.peft.expert_adapters import KbitParamWrapper
from hf_kbit.integrations.peft.layer import KbitTunerLayer, is_packed, tuner_class
from hf_kbit.integrations.peft.parameters import KbitLinearWrapper
from hf_kbit.integrations.peft.tokens import KbitTrainableTokens
from hf_kbit.nn.dense import to_dense
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.weight import KbitWeight, is_sharded
from hf_kbit.plan import selection

logger = logging.get_logger("transformers.hf_kbit")

# Our classes in the places of PEFT's, where these are not enough.
_OURS = {ParamWrapper: KbitLinearWrapper, TrainableTokensLayer: KbitTrainableTokens}


def adopt(model: nn.Module, others: tuple[type, ...] = ()) -> None:
    """Has adapters over packed layers merge by requantizing, and tells them what they are called. ``others`` are
    classes of the user's own that are to stay what they are."""
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer) or isinstance(module, others):
            continue
        base, name = module.get_base_layer(), name.replace(".base_layer", "")
        of_experts = isinstance(module, ParamWrapper) and not isinstance(base, KbitWeight)
        if of_experts:
            base, name = getattr(base, module.parameter_name), f"{name}.{module.parameter_name}"
        packed = isinstance(base, KbitWeight) and is_packed(base)
        if packed and not isinstance(module, KbitTunerLayer):
            ours = KbitParamWrapper if of_experts else _OURS.get(type(module))
            module.__class__ = ours or tuner_class(type(module))
        if isinstance(module, KbitTunerLayer):
            module.name = name.removesuffix(".token_adapter")
        if packed and isinstance(module, KbitTrainableTokens):
            module.check()


def decode_heads(model: nn.Module, modules_to_save: list[str]) -> None:
    """Puts 16-bit layers in the places of packed ones outside the base model that are to be trained as a whole."""
    base = selection.base_of(model)
    saved = tuple(
        f"{name}."
        for name, _ in model.named_modules()
        if name.endswith(tuple(modules_to_save)) and not f"{name}.".startswith(base)
    )
    decoded = []
    for name, layer in model.named_modules():
        if isinstance(layer, KbitLinear) and f"{name}.".startswith(saved):
            if not (layer.tied or layer.weight.is_meta or is_sharded(layer.weight)):
                to_dense(layer, layer.dense_dtype)
                decoded.append(name)
    if decoded:
        logger.info("hf_kbit: decoded to 16 bits, to be trained as modules_to_save: %s", ", ".join(decoded))


# --- what is refused ------------------------------------------------------------------------------
