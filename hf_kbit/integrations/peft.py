"""Adapters of PEFT on quantized layers: loaded when the program imports PEFT.

PEFT has no registry of quantizers. So three methods of its ``BaseTuner`` are wrapped, and each time its own code gets
an ``nn.Linear`` to work on, in place of the ``KbitLinear``:

- ``inject_adapter``: while an adapter is created, the layer has its decoded weight, so that initialisations that read
  it (PiSSA, OLoRA, DoRA) work, and those that change it have the rest quantized again. Afterwards the adapter stands
  over the ``KbitLinear``, and its class is derived from ``KbitTunerLayer``. Methods not known to work are refused.
- ``merge_adapter`` and ``merge_and_unload``: what requantizing the merged weights changed is reported in one warning.

``KbitTunerLayer.merge`` has PEFT merge into the decoded weight in float32 and quantizes the result with the layer's
bits, levels and way to find scales.

Past 400 lines, many of them documentation: creating and merging share how a ``KbitLinear`` looks to PEFT.
"""

import functools
import sys

import peft
import torch
from packaging.version import Version
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer, check_adapters_to_merge
from torch import nn

from hf_kbit.integrations import selection
from hf_kbit.integrations.merge_report import MergedLayer, one_report, report
from hf_kbit.integrations.transformers import to_dense
from hf_kbit.linear import KbitLinear

if Version(peft.__version__) < Version("0.20"):
    raise ImportError(f"peft: found {peft.__version__}, expected 0.20 or newer beside hf_kbit: pip install -U peft")

# Their layers call the base layer, and read its weight only where we hand them a decoded one.
METHODS = ("ADALORA", "BOFT", "IA3", "LOHA", "LOKR", "LORA", "MISS", "OFT", "VERA")

# Initialisations of LoRA that do not look at the weight; for others it is decoded.
BLIND_INITIALISATIONS = (True, False, "gaussian", "eva", "orthogonal")

# Initialisations of LoRA that need what a quantized layer cannot give: {name: what, and what to do instead}.
IMPOSSIBLE_INITIALISATIONS = {
    "corda": "needs covariances times the 16-bit weight: use 'pissa' or 'eva'",
    "loftq": "needs the weight before it was quantized: keep the default and call "
    "hf_kbit.replace_lora_weights_loftq(model, path_of_the_16_bit_model)",
    "lora_ga": "needs gradients of the weight, and it is frozen: use 'pissa' or 'eva'",
}


# --- layers ---------------------------------------------------------------------------------------


class KbitTunerLayer:
    """Put before PEFT's class of a layer whose base layer is a ``KbitLinear``: merges by requantizing.

    ``name`` is that in the model; ``merge_dtype`` other than None has ``merge`` leave a dense layer of it. While
    adapters are merged, ``unmerged`` keeps what was there before, to restore the very same bytes: that takes the
    memory of the packed weight a second time.
    """

    name: str
    merge_dtype: torch.dtype | None = None
    unmerged: tuple[KbitLinear] | tuple[()] = ()  # a tuple, for nn.Module would register the layer

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds adapters to the weight, and quantizes it again; takes some float32 copies of the weight meanwhile.

        Args:
            safe_merge: has PEFT look for NaN; a weight that is not finite is refused without it too.
            adapter_names: None for the active ones.

        Raises:
            ValueError: a merged weight holds NaN or infinity. The layer is then what it was before.
        """
        base = self.base_layer
        if not isinstance(base, KbitLinear):  # PEFT's code, at work on the decoded weight, calls back
            return super().merge(safe_merge=safe_merge, adapter_names=adapter_names)
        adapter_names = check_adapters_to_merge(self, adapter_names)
        if not adapter_names and self.merge_dtype is None:
            return
        # All of them anew on what was there before any: rounded once, not once for each.
        merged, (original,) = self.merged_adapters, self.unmerged or (_twin(base),)
        if original.weight.device != base.weight.device:  # the model was moved meanwhile
            original.to(base.weight.device)
        exact, measured = _dense(original), None
        self.base_layer, self.merged_adapters = exact, []
        try:
            super().merge(safe_merge=safe_merge, adapter_names=merged + adapter_names)
            if self.merge_dtype is not None:
                self.base_layer = to_dense(base, self.merge_dtype, exact)
                if not self.base_layer.weight.isfinite().all():
                    raise ValueError(
                        f"{self._what()}: found NaN or infinite values, expected finite ones in {self.merge_dtype}"
                    )
            else:
                self.base_layer = base
                if self.merged_adapters != merged:  # this layer has at least one of the adapters
                    measured = self._take(original, exact)
        except Exception:
            self.base_layer, self.merged_adapters = base, merged
            raise
        if measured is not None:
            report(measured)

    def _take(self, original: KbitLinear, exact: nn.Linear) -> MergedLayer:
        """Quantizes the merged layer, and measures what that changed."""
        base, before = self.base_layer, original.dequantize(torch.float32)
        if torch.equal(before, exact.weight):
            _restore(base, original)
        else:
            _requantize(base, exact.weight, self._what())
        if base.bias is not None:
            base.bias = nn.Parameter(exact.bias.data.to(base.bias.dtype), base.bias.requires_grad)
        self.unmerged = (original,)
        return MergedLayer.measure(self.name, before, exact.weight, base)

    def _what(self) -> str:
        return f"{self.name}.weight with {', '.join(self.merged_adapters)} merged"

    def unmerge(self) -> None:
        """Restores the weight from before ``merge``, byte for byte.

        Raises:
            ValueError: the weight is offloaded; ``unmerge_adapter()`` of the model brings it in.
        """
        base = self.base_layer
        if not isinstance(base, KbitLinear) or not self.unmerged:
            return super().unmerge()
        if base.weight.is_meta:
            raise ValueError(
                f"{self.name}.weight: found it offloaded, expected it on a device to unmerge: call unmerge_adapter() "
                "of the model before disabling adapters"
            )
        _restore(base, self.unmerged[0])
        self.merged_adapters, self.unmerged = [], ()

    def get_delta_weight(self, *args, **kwargs):
        """What an adapter adds to the weight; PEFT looks at the shape of the base layer's for it."""
        base = self.base_layer
        if not isinstance(base, KbitLinear):
            return super().get_delta_weight(*args, **kwargs)
        self.base_layer = _stand_in(base)
        try:
            return super().get_delta_weight(*args, **kwargs)
        finally:
            self.base_layer = base

    def _cast_input_dtype(self, x, dtype):
        """PEFT's cast to the adapter's float32, but where autocast would undo it in the next product."""
        if x is not None and torch.is_autocast_enabled(x.device.type):
            if x.dtype == torch.get_autocast_dtype(x.device.type):
                return x
        return super()._cast_input_dtype(x, dtype)

    def __reduce_ex__(self, protocol):
        return _new_tuner_layer, (type(self).__mro__[2],), self.__dict__


@functools.cache
def _tuner_class(plain: type[BaseTunerLayer]) -> type[KbitTunerLayer]:
    method = plain.__module__.split(".")[-2].capitalize()
    # No slots, that is nothing in memory that the plain class has not: so Python lets an object change to this class.
    return type(f"Kbit{method}{plain.__name__}", (KbitTunerLayer, plain), {"__module__": __name__, "__slots__": ()})


def _new_tuner_layer(plain: type[BaseTunerLayer]) -> KbitTunerLayer:
    """An empty one, for copies and pickles: the derived classes are in no module, where pickle would look."""
    layer_class = _tuner_class(plain)
    return layer_class.__new__(layer_class)


# --- a KbitLinear as PEFT sees it -----------------------------------------------------------------


def _linear(layer: KbitLinear, weight: torch.Tensor) -> nn.Linear:
    """An ``nn.Linear`` with a weight of the layer's size, frozen, and a copy of its bias."""
    linear = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta").train(layer.training)
    # By the dictionary, for PEFT's low_cpu_mem_usage turns every parameter that is set into a meta tensor.
    linear._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        linear._parameters["bias"] = nn.Parameter(layer.bias.data.to(weight.dtype, copy=True), requires_grad=False)
    return linear


def _dense(layer: KbitLinear) -> nn.Linear:
    """The decoded layer, in float32."""
    return _linear(layer, layer.dequantize(torch.float32))


def _stand_in(layer: KbitLinear) -> nn.Linear:
    """Shape, dtype and device of the decoded layer without its memory: NaN, so that no reading goes unnoticed."""
    dtype = getattr(layer, "dense_dtype", torch.float32)
    nan = torch.full((), torch.nan, dtype=dtype, device=layer.weight.device)
    return _linear(layer, nan.expand(layer.out_features, layer.in_features))


def _twin(layer: KbitLinear) -> KbitLinear:
    """Another layer with the same tensors, to keep them when the layer gets others."""
    twin = KbitLinear.__new__(KbitLinear)
    own = {"_parameters": dict(layer._parameters), "_buffers": dict(layer._buffers)}
    twin.__dict__.update(layer.__dict__ | own)
    return twin


def _restore(layer: KbitLinear, twin: KbitLinear) -> None:
    """Gives the layer the tensors of its twin, where and in the form that the layer's are."""
    tiled, device = layer.is_tiled, layer.weight.device
    twin.to(device)
    layer._parameters.update(twin._parameters)
    layer.set_codebook(twin.levels, twin.exponent, device)
    layer.to_tiles() if tiled else layer.to_planes()


def _requantize(layer: KbitLinear, weight: torch.Tensor, name: str) -> None:
    """Quantizes another weight into the layer, in the form in which its own is: one that is offloaded has planes."""
    tiled = layer.is_tiled
    layer.load_dense(weight.data, name)
    if not tiled:
        layer.to_planes()


# --- creating adapters ----------------------------------------------------------------------------


def _base_layer(module: nn.Module) -> nn.Module:
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module


def _check_method(config, name: str, layer: KbitLinear, parameter_name: str | None) -> None:
    """Refuses what would read packed words as weights."""
    what = f"{name}: a KbitLinear of {layer.bits} bits, whose weight is frozen and packed"
    method, init = getattr(config.peft_type, "value", config.peft_type), getattr(config, "init_lora_weights", True)
    if method not in METHODS:
        known = ", ".join(METHODS)
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
    for impossible, why in IMPOSSIBLE_INITIALISATIONS.items():
        if isinstance(init, str) and init.lower().startswith(impossible):
            raise ValueError(f"{what}: init_lora_weights={init!r} {why}")


def _reads_weight(config) -> bool:
    """Whether creating the adapter takes more of the base layer than its shape."""
    return getattr(config, "init_lora_weights", None) not in BLIND_INITIALISATIONS or config.use_dora


def _create_and_replace(create, config, adapter_name, target, target_name, parent, *, current_key, **kwargs):
    """``BaseTuner._create_and_replace``, with an ``nn.Linear`` in place of the ``KbitLinear`` while it runs."""
    base = _base_layer(target)
    if not isinstance(base, KbitLinear):
        return create(config, adapter_name, target, target_name, parent, current_key=current_key, **kwargs)
    _check_method(config, current_key, base, kwargs.get("parameter_name"))
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
    linear = _dense(base) if reads else _stand_in(base)
    further = isinstance(target, KbitTunerLayer)  # adapter on a layer that has some
    if further:
        target.base_layer = linear
    try:
        create(
            config, adapter_name, target if further else linear, target_name, parent, current_key=current_key, **kwargs
        )
        if further and getattr(parent, target_name) is not target:
            setattr(parent, target_name, target)
            raise ValueError(
                f"{current_key}: found a {config.peft_type.value} adapter over a {type(target).__name__}, expected "
                "adapters of one method on a quantized layer"
            )
        if reads and not torch.equal(linear.weight, base.dequantize(torch.float32)):
            _requantize(base, linear.weight, f"{current_key}.weight less what {adapter_name} starts with")
    finally:
        layer = getattr(parent, target_name)
        if isinstance(layer, BaseTunerLayer):
            layer.base_layer = base
            if not further:
                layer.__class__, layer.name = _tuner_class(type(layer)), current_key


def _check_modules_to_save(model: nn.Module, config) -> None:
    for ending in getattr(config, "modules_to_save", None) or ():
        for name, module in model.named_modules():
            if name.endswith(ending) and any(isinstance(_base_layer(part), KbitLinear) for part in module.modules()):
                raise ValueError(
                    f"{name}: found it in modules_to_save, expected what can be trained, and quantized layers "
                    "cannot: leave them in 16 bits (modules_to_not_convert), or name them in target_modules"
                )


def _wrap_inject_adapter(inject_adapter):
    @functools.wraps(inject_adapter)
    def wrapped(self, model, adapter_name, *args, **kwargs):
        _check_modules_to_save(model, self.peft_config[adapter_name])
        self._create_and_replace = functools.partial(_create_and_replace, self._create_and_replace)
        try:
            return inject_adapter(self, model, adapter_name, *args, **kwargs)
        finally:
            del self._create_and_replace

    return wrapped


# --- merging --------------------------------------------------------------------------------------


def _wrap_merging(method):
    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        with one_report():
            return method(self, *args, **kwargs)

    return wrapped


def merge_and_unload(
    model: nn.Module,
    dequantize: bool = False,
    dtype: torch.dtype | None = None,
    progressbar: bool = False,
    safe_merge: bool = False,
    adapter_names: list[str] | None = None,
) -> nn.Module:
    """Merges adapters into a quantized model and takes them off, as ``model.merge_and_unload()`` does, or exactly.

    Requantizing the merged weights rounds them, and adapters that change them little are mostly lost; PEFT's own
    method, which this function calls, warns with figures. With ``dequantize`` the merged weights, and all others, are
    left in 16 bits: a plain model, without this package, of the size it had before it was quantized.

    Args:
        model: ``PeftModel``.
        dequantize: into ``dtype`` rather than into the bits of each layer.
        dtype: of the model that ``dequantize`` gives; None for that of its config.
        progressbar: whether to show one.
        safe_merge: as in PEFT's ``merge_and_unload``; NaN is refused without it too.
        adapter_names: which to merge; None for the active ones.

    Returns:
        The base model; use it in place of ``model``.

    Raises:
        ValueError: a merged weight holds NaN or infinity, or ``dtype`` is given without ``dequantize``.

    >>> import hf_kbit
    >>> from peft import LoraConfig, get_peft_model
    >>> model = nn.Sequential(hf_kbit.KbitLinear.from_linear(nn.Linear(64, 64), bits=3))
    >>> model = get_peft_model(model, LoraConfig(target_modules=["0"], init_lora_weights=False))
    >>> merge_and_unload(model, dequantize=True)
    Sequential(
      (0): Linear(in_features=64, out_features=64, bias=True)
    )
    """
    if not dequantize and dtype is not None:
        raise ValueError(f"dtype: found {dtype}, expected None without dequantize=True")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model.model
    if dequantize:
        dtype = dtype or getattr(getattr(base, "config", None), "dtype", None) or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    layers = [module for module in model.modules() if isinstance(module, KbitTunerLayer)]
    try:
        for layer in layers:
            layer.merge_dtype = dtype
        base = model.merge_and_unload(progressbar=progressbar, safe_merge=safe_merge, adapter_names=adapter_names)
    finally:
        for layer in layers:
            layer.merge_dtype = None
    if dequantize and getattr(base, "hf_quantizer", None) is not None:
        return base.dequantize(dtype)
    if dequantize:
        rest = {name: layer for name, layer in base.named_modules() if isinstance(layer, KbitLinear)}
        for name, layer in rest.items():
            selection.replace_modules(base, {name: to_dense(layer, dtype)})
    return base


# --- before and after ------------------------------------------------------------------------------

_peft_prepare = peft.prepare_model_for_kbit_training


@functools.wraps(_peft_prepare, assigned=())  # its signature, our docstring
def prepare_model_for_kbit_training(model, *args, **kwargs):
    """PEFT's function of that name, with what it does for bitsandbytes done for ``KbitLinear`` too.

    The base model is frozen, what is in 16 bits (norms, embeddings, the head, biases) is cast to float32, gradient
    checkpointing is switched on, and inputs require gradients; what is packed stays as it is. PEFT's own name is this
    function once both packages are imported.

    It takes what PEFT's takes: ``model``, of Transformers, before it gets adapters; ``use_gradient_checkpointing``,
    True by default; ``gradient_checkpointing_kwargs`` of ``torch.utils.checkpoint.checkpoint``, such as
    ``use_reentrant``. It returns the same model.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape)).to(torch.bfloat16)
    >>> model.model.layers[0].mlp.up_proj = KbitLinear.from_linear(model.model.layers[0].mlp.up_proj, bits=4)
    >>> model = prepare_model_for_kbit_training(model)
    >>> block = model.model.layers[0]
    >>> block.gradient_checkpointing, block.input_layernorm.weight.dtype, block.mlp.up_proj.weight.dtype
    (True, torch.float32, torch.int32)
    """
    if not any(isinstance(module, KbitLinear) for module in model.modules()):
        return _peft_prepare(model, *args, **kwargs)
    # For the time of this call only: other libraries take the flag for a reason to import bitsandbytes.
    model.is_loaded_in_4bit = True
    try:
        return _peft_prepare(model, *args, **kwargs)
    finally:
        del model.is_loaded_in_4bit


# --- hooking in -----------------------------------------------------------------------------------


def _replace_everywhere(old, new) -> None:
    """Puts a function in place of another in every module that has it by name: ``from peft import ...`` copies it."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old and module is not sys.modules[__name__]:
                setattr(module, name, new)


BaseTuner.inject_adapter = _wrap_inject_adapter(BaseTuner.inject_adapter)
BaseTuner.merge_adapter = _wrap_merging(BaseTuner.merge_adapter)
BaseTuner.merge_and_unload = _wrap_merging(BaseTuner.merge_and_unload)
_replace_everywhere(_peft_prepare, prepare_model_for_kbit_training)
