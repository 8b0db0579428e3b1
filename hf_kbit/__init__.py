"""Low-bit weights for Transformers: quantize to 2, 3, 4 or 5 bits while loading, run, fine-tune, save, share.

Importing the package registers the quantization method ``"kbit"`` with Transformers.
"""

from importlib import import_module as _import_module

from hf_kbit import codebooks
from hf_kbit.calibration import calibrate
from hf_kbit.config import KbitConfig
from hf_kbit.evaluation import evaluate
from hf_kbit.in_memory import quantize_model
from hf_kbit.integrations import hooks as _hooks
from hf_kbit.integrations.transformers import quantizer as _quantizer  # noqa: F401  registers itself
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.ops import dequantize, embed, gemm, quantize, repack, set_batch_invariant
from hf_kbit.saving import load_into, save
from hf_kbit.widths import bits_for_memory, choose_widths, embedding_bits_for_memory

__version__ = "0.1.0.dev0"
__all__ = [
    "KbitConfig",
    "KbitEmbedding",
    "KbitLinear",
    "bits_for_memory",
    "calibrate",
    "choose_widths",
    "codebooks",
    "dequantize",
    "embed",
    "embedding_bits_for_memory",
    "evaluate",
    "gemm",
    "load_into",
    "quantize",
    "quantize_model",
    "repack",
    "save",
    "set_batch_invariant",
]

# What needs PEFT, and is no part of __all__ because of that: an import of * works without it.
_WITH_PEFT = {
    "merge_and_unload": "merge",
    "prepare_model_for_kbit_training": "prepare",
    "replace_lora_weights_loftq": "loftq",
}

_hooks.install_always()
_hooks.after_import("peft", _hooks.install_peft)  # not imported here: that takes seconds


def __getattr__(name: str):
    if name in _WITH_PEFT:
        return getattr(_import_module(f"hf_kbit.integrations.peft.{_WITH_PEFT[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
