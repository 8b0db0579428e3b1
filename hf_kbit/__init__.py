"""Low-bit weights for Transformers: quantize to 2, 3, 4 or 5 bits while loading, run, fine-tune, save, share.

Importing the package registers the quantization method ``"kbit"`` with Transformers, as soon as the program imports
its models (``transformers.modeling_utils``): that takes seconds and may never be needed.
"""

import sys as _sys
import warnings as _warnings
from importlib import import_module as _import_module
from pkgutil import resolve_name as _resolve_name
from typing import TYPE_CHECKING

from hf_kbit import hooks as _hooks

if TYPE_CHECKING:
    from hf_kbit import codebooks, ops
    from hf_kbit.calibration import calibrate
    from hf_kbit.config import KbitConfig
    from hf_kbit.evaluation import evaluate
    from hf_kbit.generation.fast_generate import fast_generate
    from hf_kbit.integrations.transformers.cards import model_card
    from hf_kbit.memory import bits_for_memory, embedding_bits_for_memory
    from hf_kbit.nn.embedding import KbitEmbedding
    from hf_kbit.nn.linear import KbitLinear
    from hf_kbit.ops import set_batch_invariant
    from hf_kbit.post_training import quantize_model
    from hf_kbit.saving import load_into, save
    from hf_kbit.widths import choose_widths

__version__ = "0.1.0"
__all__ = [
    "KbitConfig",
    "KbitEmbedding",
    "KbitLinear",
    "bits_for_memory",
    "calibrate",
    "choose_widths",
    "codebooks",
    "embedding_bits_for_memory",
    "evaluate",
    "fast_generate",
    "load_into",
    "model_card",
    "ops",
    "quantize_model",
    "save",
    "set_batch_invariant",
]

# Where the public names are, which are imported when they are first asked for.
_HOMES = {
    "KbitConfig": "config",
    "KbitEmbedding": "nn.embedding",
    "KbitLinear": "nn.linear",
    "bits_for_memory": "memory",
    "calibrate": "calibration",
    "choose_widths": "widths",
    "embedding_bits_for_memory": "memory",
    "evaluate": "evaluation",
    "fast_generate": "generation.fast_generate",
    "load_into": "saving",
    "quantize_model": "post_training",
    "model_card": "integrations.transformers.cards",
    "save": "saving",
    "set_batch_invariant": "ops",
    # What needs PEFT, and is no part of __all__ because of that: an import of * works without it.
    "merge_and_unload": "integrations.peft.merge",
    "prepare_model_for_kbit_training": "integrations.peft.prepare",
    "replace_lora_weights_loftq": "integrations.peft.loftq",
}
# Names that go with the next release, and what they are called now.
_RENAMED = {name: f"hf_kbit.ops.{name}" for name in ("dequantize", "embed", "gemm", "quantize", "repack")}
_RENAMED["decode"] = "hf_kbit.fast_generate"


def __getattr__(name: str):
    if name in ("codebooks", "ops"):
        return _import_module(f"hf_kbit.{name}")
    if new := _RENAMED.get(name):
        message = f"hf_kbit.{name} is {new} now; the old name goes with the next release"
        _warnings.warn(message, DeprecationWarning, stacklevel=2)
        return _resolve_name(new)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_module("transformers.modeling_utils")  # first of all, by which the method is registered
    _import_module("hf_kbit.integrations.transformers.quantizer")  # raises what that has only warned of
    globals()[name] = found = getattr(_import_module(f"hf_kbit.{_HOMES[name]}"), name)
    return found


_hooks.after_import("transformers.modeling_utils", _hooks.register)
_hooks.after_import("hf_kbit.generation.fast_generate", _hooks.install_generation)
if "torch" in _sys.modules:
    _import_module("hf_kbit.ops")  # for programs that call torch.ops.hf_kbit
