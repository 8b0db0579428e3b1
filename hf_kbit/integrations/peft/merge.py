"""Merging adapters into quantized weights."""

import functools

import torch
from torch import nn

from hf_kbit.integrations.peft.layer import KbitTunerLayer
from hf_kbit.integrations.peft.merge_report import one_report
from hf_kbit.nn import dense


def report_once(method):
    """A method of ``BaseTuner`` that merges, with one warning for all layers; before any, what cannot is refused."""

    @functools.wraps(method)
    def wrapped(self, *args, **kwargs):
        for layer in self.modules():
            if isinstance(layer, KbitTunerLayer):
                layer.refuse_merge()
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
        dense.dequantize(base, dtype)
    return base
