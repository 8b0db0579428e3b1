"""Creating adapters over packed layers: what changes the weight as it starts, and what is refused."""

import functools

import torch
from peft import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_kbit.integrations.peft.base import adopt, decode_heads
from hf_kbit.integrations.peft.expert_adapters import check_config, shown_in_16_bits, tell_of_experts
from hf_kbit.integrations.peft.layer import no_weight, requantize, showing
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.weight import KbitWeight, is_sharded

# Initialisations of LoRA that take what they start with from the weight.
CHANGING_INITIALISATIONS = ("corda", "olora", "pissa")

# Initialisations of LoRA that need what a quantized layer cannot give: {name: what, and what to do instead}.
IMPOSSIBLE_INITIALISATIONS = {
    "loftq": "needs the weight before it was quantized: keep the default and call "
    "hf_kbit.replace_lora_weights_loftq(model, path_of_the_16_bit_model)",
    "lora_ga": "needs gradients of the weight, and it is frozen: use 'pissa' or 'eva'",
}


def wrap_inject_adapter(inject_adapter):
    """``BaseTuner.inject_adapter``, to which the projections of experts are tensors."""

    @functools.wraps(inject_adapter)
    def wrapped(self, model, adapter_name, *args, **kwargs):
        config = self.peft_config[adapter_name]
        by_name = getattr(config, "target_parameters", None)
        decode_heads(model, getattr(config, "modules_to_save", None) or [])
        _check_modules_to_save(model, config)
        try:
            with shown_in_16_bits(model) as experts:
                self._create_and_replace = functools.partial(_create_and_replace, self._create_and_replace, experts)
                result = inject_adapter(self, model, adapter_name, *args, **kwargs)
        finally:
            del self._create_and_replace
            custom = getattr(config, "_custom_modules", None) or {}  # by config._register_custom_module
            adopt(model, tuple(made for key, made in custom.items() if issubclass(key, KbitWeight)))
        if not by_name:
            tell_of_experts(model, adapter_name)
        return result

    return wrapped


def _create_and_replace(create, experts, config, adapter_name, target, target_name, parent, *, current_key, **kwargs):
    """``BaseTuner._create_and_replace``, which leaves the layer what it was if it fails.

    ``experts`` are the projections of packed ones, by their modules.
    """
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    parameter_name = kwargs.get("parameter_name")
    if projection := experts.get(base, {}).get(parameter_name):
        check_config(config, current_key, projection)

    def run() -> nn.Module:
        create(config, adapter_name, target, target_name, parent, current_key=current_key, **kwargs)
        return getattr(parent, target_name)

    if not isinstance(base, KbitWeight):
        return run()
    _check_method(config, current_key, base, target, parameter_name)
    changes = _starts_with(config, CHANGING_INITIALISATIONS)
    # Of a shard PEFT would take the sizes, and Transformers those of the whole for the same adapter.
    of_all = is_sharded(base.weight) and not changes
    try:
        if of_all or (base.weight.is_meta and not no_weight(base).is_meta):
            _create_without_weight(base, run, f"{current_key}.weight", adapter_name)
        elif changes:
            _change(base, run, f"{current_key}.weight", adapter_name)
        else:
            run()
    except BaseException as error:  # an interrupt too leaves no half of an adapter behind
        setattr(parent, target_name, target)
        if target is not base:
            target.delete_adapter(adapter_name)
        if isinstance(error, TypeError | ValueError) and current_key not in str(error):
            raise ValueError(f"{current_key}: {_method(config)} over a {type(base).__name__}: {error}") from error
        raise


def _create_without_weight(base: KbitWeight, run, name: str, adapter_name: str) -> None:
    """Creates an adapter where the layer computes, whose weight is not there."""
    try:
        with showing(base, no_weight(base)):
            layer = run()
        made = (tensor for own, tensor in layer.named_parameters() if adapter_name in own.split("."))
        reads = any(tensor.isnan().any() for tensor in made if not tensor.is_meta)
    except torch.linalg.LinAlgError:
        reads = True
    if reads:
        found = "sharded, expected all of it" if is_sharded(base.weight) else "offloaded, expected it on a device"
        raise ValueError(f"{name}: found it {found}: the adapter's initialisation reads it")


def _change(base: KbitWeight, run, name: str, adapter_name: str) -> None:
    """Creates an adapter that takes what it starts with from the weight, of which the rest is quantized again."""
    decoded = base.dequantize(torch.float32)
    with showing(base, decoded.clone()):
        layer = run()
        rest = base.weight.data
    layer._move_adapter_to_device_of_base_layer(adapter_name)
    if torch.equal(rest, decoded):
        return
    if base.tied:
        raise ValueError(
            f"{name}: found it tied to a table of embeddings, expected one of its own for an adapter that changes it "
            "to start with: leave init_lora_weights as it is by default, or quantize the model without embedding_bits"
        )
    requantize(base, rest, f"{name} less what {adapter_name} starts with")


# --- adapters that are there ----------------------------------------------------------------------


def _method(config) -> str:
    return getattr(config.peft_type, "value", config.peft_type)


def _starts_with(config, initialisations) -> str | None:
    """Which of some initialisations of LoRA an adapter has."""
    init = getattr(config, "init_lora_weights", None)
    found = (name for name in initialisations if isinstance(init, str) and init.lower().startswith(name))
    return next(found, None)


def _check_method(config, name: str, base: KbitWeight, target: nn.Module, parameter_name: str | None) -> None:
    """Refuses what would train or change the packed weight."""
    what = f"{name}: a {type(base).__name__} of {base.bits} bits, whose weight is frozen"
    if parameter_name is not None and not _takes_by_name(base):
        raise ValueError(
            f"{what}: found {parameter_name!r} of it in target_parameters; name the layer in target_modules instead"
        )
    if target is not base and not isinstance(target, PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type].tuner_layer_cls):
        raise ValueError(
            f"{name}: found a {_method(config)} adapter over a {type(target).__name__}, expected adapters of one "
            "method on a quantized layer"
        )
    if getattr(config, "kasa_config", None) is not None:
        raise ValueError(
            f"{what}: KaSA changes the weight for good, also while it runs; use init_lora_weights='pissa'"
        )
    if impossible := _starts_with(config, IMPOSSIBLE_INITIALISATIONS):
        why = IMPOSSIBLE_INITIALISATIONS[impossible]
        raise ValueError(f"{what}: init_lora_weights={config.init_lora_weights!r} {why}")
    reads = _starts_with(config, CHANGING_INITIALISATIONS) or getattr(config, "use_dora", False)
    if reads and getattr(target, "merged", False):
        raise ValueError(
            f"{name}: found {', '.join(target.merged_adapters)} merged, expected the layer as it was: the adapter's "
            "initialisation reads the weight. Call unmerge_adapter() first"
        )


def _takes_by_name(base: KbitWeight) -> bool:
    """Whether PEFT's adapter of the parameter has the sizes of one beside the layer: not of a table, nor of a Conv1D,
    nor of a shard."""
    return isinstance(base, KbitLinear) and not base.transposed and not is_sharded(base.weight)


def _check_modules_to_save(model: nn.Module, config) -> None:
    for ending in getattr(config, "modules_to_save", None) or ():
        for name, module in model.named_modules():
            if name.endswith(ending) and any(isinstance(part, KbitWeight) for part in module.modules()):
                raise ValueError(
                    f"{name}: found it in modules_to_save, expected what can be trained, and quantized layers "
                    "cannot: leave them in 16 bits (modules_to_not_convert), or name them in target_modules"
                )
