"""Creating adapters: what PEFT sees of a packed layer or table while it does, and what is refused."""

import functools

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_kbit.integrations.peft.base import decode_heads
from hf_kbit.integrations.peft.experts import check_config, shown_in_16_bits, tell_of_experts
from hf_kbit.integrations.peft.layer import (
    ADAPTED,
    KbitTunerLayer,
    base_layer_as,
    dense,
    requantize,
    stand_in,
    tuner_class,
)
from hf_kbit.integrations.peft.tokens import name_layers
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.weight import KbitWeight

# Their layers call the base layer, and read its weight only where we hand them a decoded one.
METHODS = ("ADALORA", "BOFT", "IA3", "LOHA", "LOKR", "LORA", "MISS", "OFT", "VERA")
TABLE_METHODS = ("LORA",)

# Initialisations of LoRA that do not look at the weight; for its others, and for DoRA, it is decoded. No other one of
# the METHODS looks at it, however it is initialised: with NaN for a weight PEFT makes the same adapters.
BLIND_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")

# Initialisations of LoRA that need what a quantized layer cannot give: {name: what, and what to do instead}.
IMPOSSIBLE_INITIALISATIONS = {
    "corda": "needs covariances times the 16-bit weight: use 'pissa' or 'eva'",
    "loftq": "needs the weight before it was quantized: keep the default and call "
    "hf_kbit.replace_lora_weights_loftq(model, path_of_the_16_bit_model)",
    "lora_ga": "needs gradients of the weight, and it is frozen: use 'pissa' or 'eva'",
}


def _base_layer(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _method(config) -> str:
    return getattr(config.peft_type, "value", config.peft_type)


def _check_method(config, name: str, layer: KbitWeight, parameter_name: str | None) -> None:
    """Refuses what would read packed words as weights."""
    table = isinstance(layer, KbitEmbedding)
    kind, methods = ("KbitEmbedding", TABLE_METHODS) if table else ("KbitLinear", METHODS)
    what = f"{name}: a {kind} of {layer.bits} bits, whose weight is frozen and packed"
    method, init = _method(config), getattr(config, "init_lora_weights", True)
    if method not in methods:
        known = ", ".join(methods)
        raise ValueError(
            f"{what}: found the PEFT method {method}, expected one of {known}. For {method} call model.dequantize() "
            "first, or leave the layer in 16 bits (modules_to_not_convert)"
        )
    if parameter_name is not None:
        raise ValueError(
            f"{what}: found {parameter_name!r} of it in target_parameters; name the layer in target_modules instead"
        )
    if method == "MISS" and config.init_weights == "bat":
        raise ValueError(f"{what}: MiSS with init_weights='bat' reads the weight in every step; use True or 'mini'")
    if getattr(config, "kasa_config", None) is not None:
        raise ValueError(
            f"{what}: KaSA changes the weight for good, also while it runs; use init_lora_weights='pissa'"
        )
    if table and config.use_dora:
        raise ValueError(f"{what}: DoRA reads the whole table in every step; use it without, for the layers alone")
    for impossible, why in IMPOSSIBLE_INITIALISATIONS.items():
        if isinstance(init, str) and init.lower().startswith(impossible):
            raise ValueError(f"{what}: init_lora_weights={init!r} {why}")


def _reads_weight(config) -> bool:
    """Whether creating the adapter takes more of the base layer than its shape, dtype and device."""
    return _method(config) == "LORA" and (config.init_lora_weights not in BLIND_INITIALISATIONS or config.use_dora)


def _has_class_for(config, base: KbitWeight) -> bool:
    """Whether ``config._register_custom_module`` gave a class for packed layers or tables: that gets them as they are.

    A class for ``nn.Linear`` or ``nn.Embedding`` gets what PEFT's own get.
    """
    custom = getattr(config, "_custom_modules", None) or {}
    first = next((key for key in custom if isinstance(base, key)), nn.Linear)
    return issubclass(first, KbitWeight)


def _create_and_replace(create, experts, config, adapter_name, target, target_name, parent, *, current_key, **kwargs):
    """``BaseTuner._create_and_replace``, with a dense layer in place of a packed one while it runs.

    Whatever fails, the layer is what it was. ``experts`` are the projections of packed ones, by their modules.
    """
    base = _base_layer(target)
    if projection := experts.get(base, {}).get(kwargs.get("parameter_name")):
        check_config(config, current_key, projection)
    if not isinstance(base, ADAPTED):
        return create(config, adapter_name, target, target_name, parent, current_key=current_key, **kwargs)
    _check_method(config, current_key, base, kwargs.get("parameter_name"))
    first = target is base  # or the layer has adapters
    if _has_class_for(config, base) if first else not isinstance(target, KbitTunerLayer):
        return create(config, adapter_name, target, target_name, parent, current_key=current_key, **kwargs)
    reads = _reads_weight(config)
    if reads and base.weight.is_meta:
        raise ValueError(
            f"{current_key}.weight: found it offloaded, expected it on a device: the adapter's initialisation reads it"
        )
    if reads and getattr(target, "merged", False):
        raise ValueError(
            f"{current_key}: found {', '.join(target.merged_adapters)} merged, expected the layer as it was: the "
            "adapter's initialisation reads the weight. Call unmerge_adapter() first"
        )
    plain = dense(base) if reads else stand_in(base)
    try:
        if first:
            create(config, adapter_name, plain, target_name, parent, current_key=current_key, **kwargs)
            layer = _over_quantized(getattr(parent, target_name), plain, base, current_key)
        else:
            with base_layer_as(target, plain):
                create(config, adapter_name, target, target_name, parent, current_key=current_key, **kwargs)
            layer = target
            if getattr(parent, target_name) is not target:
                raise ValueError(
                    f"{current_key}: found a {_method(config)} adapter over a {type(target).__name__}, expected "
                    "adapters of one method on a quantized layer"
                )
        if reads:
            with base_layer_as(layer, stand_in(base)):  # its dtype is that of adapters on a model in 16 bits
                layer._move_adapter_to_device_of_base_layer(adapter_name)
            if not torch.equal(plain.weight, base.dequantize(torch.float32)):
                if base.tied:
                    raise ValueError(
                        f"{current_key}.weight: found it tied to a table of embeddings, expected one of its own for "
                        "an adapter that changes it to start with: leave init_lora_weights as it is by default, or "
                        "quantize the model without embedding_bits"
                    )
                requantize(base, plain.weight, f"{current_key}.weight less what {adapter_name} starts with")
    except BaseException:  # an interrupt too must leave no stand-in behind
        setattr(parent, target_name, target)
        if not first:
            target.delete_adapter(adapter_name)
        raise


def _over_quantized(layer: nn.Module, plain: nn.Linear, base: KbitWeight, name: str) -> KbitTunerLayer:
    """The adapter layer that PEFT made over ``plain``, over ``base``."""
    if not isinstance(layer, BaseTunerLayer) or getattr(layer, "base_layer", None) is not plain:
        raise TypeError(
            f"{name}: found a {type(layer).__name__} made for a quantized layer, expected a BaseTunerLayer of PEFT "
            "with that layer as its base_layer"
        )
    layer.base_layer = base
    layer.__class__, layer.name = tuner_class(type(layer)), name
    return layer


def _check_modules_to_save(model: nn.Module, config) -> None:
    for ending in getattr(config, "modules_to_save", None) or ():
        for name, module in model.named_modules():
            if name.endswith(ending) and any(isinstance(_base_layer(part), KbitWeight) for part in module.modules()):
                raise ValueError(
                    f"{name}: found it in modules_to_save, expected what can be trained, and quantized layers "
                    "cannot: leave them in 16 bits (modules_to_not_convert), or name them in target_modules"
                )


def wrap_inject_adapter(inject_adapter):
    """``BaseTuner.inject_adapter`` that has PEFT work on dense layers where there are packed ones, and on
    tensors where there are projections of experts."""

    @functools.wraps(inject_adapter)
    def wrapped(self, model, adapter_name, *args, **kwargs):
        config = self.peft_config[adapter_name]
        decode_heads(model, getattr(config, "modules_to_save", None) or [])
        _check_modules_to_save(model, config)
        by_name = getattr(config, "target_parameters", None)
        with shown_in_16_bits(model) as experts:
            self._create_and_replace = functools.partial(_create_and_replace, self._create_and_replace, experts)
            try:
                result = inject_adapter(self, model, adapter_name, *args, **kwargs)
            finally:
                del self._create_and_replace
        name_layers(model)
        if not by_name:
            tell_of_experts(model, adapter_name)
        return result

    return wrapped


def wrap_adapted_attention(init):
    """Has adaption prompts in float32, as PEFT has them on layers of bitsandbytes: they go with inputs of any dtype,
    also after ``prepare_model_for_kbit_training``. PEFT would take the dtype of ``q_proj.weight``: packed integers."""

    @functools.wraps(init)
    def wrapped(self, model_type, adapter_len, model, target_dtype=torch.float32):
        if any(isinstance(module, KbitLinear) for module in model.modules()):
            target_dtype = torch.float32
        init(self, model_type, adapter_len, model, target_dtype)

    return wrapped
