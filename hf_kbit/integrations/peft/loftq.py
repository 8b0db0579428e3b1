"""LoftQ for quantized layers: LoRA starts at the quantization error. Loaded on demand, for it needs PEFT."""

from collections.abc import Callable
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from hf_kbit.files.checkpoint import TensorHeader, model_files, read_headers
from hf_kbit.integrations.peft.layer import KbitTunerLayer
from hf_kbit.nn.linear import KbitLinear


def replace_lora_weights_loftq(
    peft_model: nn.Module,
    model_path: str | Path | None = None,
    adapter_name: str = "default",
    callback: Callable[[nn.Module, str], bool] | None = None,
) -> None:
    """Starts LoRA at the quantization error: ``scaling * B @ A`` becomes the best approximation of it of that rank.

    PEFT has a function of that name for bitsandbytes. The quantized weights stay as they are, so the adapter fits the
    quantized model that was saved. Adapters on the experts of mixtures stay as they are too.

    Args:
        peft_model: ``PeftModel`` with LoRA on quantized layers.
        model_path: the 16-bit model, in safetensors: a folder as ``save_pretrained`` writes it, a file, or a name on
            the Hub; None for the one that the base model was loaded from. Weights are read one at a time.
        adapter_name: of which adapter.
        callback: called with the model and the name of a layer after each; False takes that one back.

    Raises:
        ValueError: a weight is not there or has another shape, or no layer is a quantized one with that adapter.

    Source: LoftQ (arXiv:2310.08659), one step, without changing the quantized weight.

    >>> import tempfile
    >>> import hf_kbit
    >>> from peft import LoraConfig, get_peft_model
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    >>> folder = tempfile.mkdtemp()
    >>> LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape)).save_pretrained(folder)
    >>> model = LlamaForCausalLM.from_pretrained(folder, quantization_config=hf_kbit.KbitConfig(bits=3))
    >>> model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    >>> replace_lora_weights_loftq(model)
    """
    layers = [
        module
        for module in peft_model.modules()
        if isinstance(module, KbitTunerLayer)
        and isinstance(module.quantized, KbitLinear)
        and adapter_name in getattr(module, "lora_A", ())
    ]
    if not layers:
        raise ValueError(f"{adapter_name}: found no quantized layer with LoRA of that name")
    base = peft_model.get_base_model()
    path = Path(model_path or base.name_or_path)
    if not path.exists():
        path = Path(snapshot_download(str(path), allow_patterns=["*.safetensors", SAFE_WEIGHTS_INDEX_NAME]))
    stored = read_headers([path] if path.is_file() else model_files(path))
    for layer in layers:
        original = _original_weight(layer, f"{base.base_model_prefix}.", stored)
        error = original - layer.base_layer.dequantize(torch.float32)
        u, s, v = torch.linalg.svd(error, full_matrices=False)
        rank = layer.r[adapter_name]
        root = (s[:rank] / layer.scaling[adapter_name]).sqrt()
        weights = layer.lora_A[adapter_name].weight, layer.lora_B[adapter_name].weight
        before = [weight.data for weight in weights]
        for weight, factor in zip(weights, (root[:, None] * v[:rank], u[:, :rank] * root), strict=True):
            weight.data = torch.zeros_like(weight)  # a rank above that of the weight leaves some of it
            weight.data[: factor.shape[0], : factor.shape[1]] = factor
        if callback is not None and not callback(peft_model, layer.name):
            for weight, data in zip(weights, before, strict=True):
                weight.data = data


def _original_weight(layer: KbitTunerLayer, prefix: str, stored: dict[str, TensorHeader]) -> torch.Tensor:
    """The 16-bit weight of a layer, float32 ``[N, K]`` on the layer's device."""
    kbit, shape = layer.base_layer, [layer.base_layer.out_features, layer.base_layer.in_features]
    # A checkpoint of the model without its head, or with one, differs by the prefix.
    names = (f"{name}.weight" for name in (layer.name, layer.name.removeprefix(prefix), prefix + layer.name))
    if (name := next((name for name in names if name in stored), None)) is None:
        raise ValueError(f"{layer.name}.weight: not in the checkpoint, expected shape {shape}")
    with safe_open(stored[name].file, framework="pt") as tensors:
        weight = tensors.get_tensor(name)
    weight = weight.T if kbit.transposed else weight
    if not weight.is_floating_point() or list(weight.shape) != shape:
        raise ValueError(
            f"{layer.name}.weight: found {weight.dtype} {list(weight.shape)}, expected floats {shape} of the model "
            "before it was quantized"
        )
    return weight.to(kbit.weight.device, torch.float32)
