"""Low-bit weights for Transformers: quantize to 2, 3, 4 or 5 bits while loading, run, fine-tune, save, share.

Importing the package registers the quantization method ``"kbit"`` with Transformers, as soon as the program imports
its models (``transformers.modeling_utils``): that takes seconds and may never be needed.
"""

import sys as _sys
import warnings as _warnings
from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from hf_kbit.hooks import setting as _setting
from hf_kbit.hooks import table as _table
from hf_kbit.hooks.importing import after_import as _after_import

if TYPE_CHECKING:  # names that are imported as themselves are public
    from hf_kbit import ops as ops
    from hf_kbit.calibration import calibrate as calibrate
    from hf_kbit.calibration.evaluation import evaluate as evaluate
    from hf_kbit.calibration.post_training import quantize_model as quantize_model
    from hf_kbit.calibration.widths import choose_widths as choose_widths
    from hf_kbit.files.saving import load_into as load_into
    from hf_kbit.files.saving import save as save
    from hf_kbit.format import codebooks as codebooks
    from hf_kbit.generation.fast_generate import fast_generate as fast_generate
    from hf_kbit.integrations.transformers.cards import model_card as model_card
    from hf_kbit.integrations.transformers.inputs import set_inputs as set_inputs
    from hf_kbit.nn.embedding import KbitEmbedding as KbitEmbedding
    from hf_kbit.nn.linear import KbitLinear as KbitLinear
    from hf_kbit.ops import set_batch_invariant as set_batch_invariant
    from hf_kbit.plan.config import KbitConfig as KbitConfig
    from hf_kbit.plan.memory import bits_for_memory as bits_for_memory
    from hf_kbit.plan.memory import embedding_bits_for_memory as embedding_bits_for_memory

__version__ = "0.1.0"

# Where the public names are, which are imported when they are first asked for.
_HOMES = {
    "KbitConfig": "plan.config",
    "KbitEmbedding": "nn.embedding",
    "KbitLinear": "nn.linear",
    "bits_for_memory": "plan.memory",
    "calibrate": "calibration",
    "choose_widths": "calibration.widths",
    "embedding_bits_for_memory": "plan.memory",
    "evaluate": "calibration.evaluation",
    "fast_generate": "generation.fast_generate",
    "load_into": "files.saving",
    "model_card": "integrations.transformers.cards",
    "quantize_model": "calibration.post_training",
    "save": "files.saving",
    "set_batch_invariant": "ops",
    "set_inputs": "integrations.transformers.inputs",
}
__all__ = ["codebooks", "ops", *_HOMES]
_HOMES |= {  # which need PEFT: an import of * works without it
    "merge_and_unload": "integrations.peft.merge",
    "prepare_model_for_kbit_training": "integrations.peft.prepare",
    "replace_lora_weights_loftq": "integrations.peft.loftq",
}


def __getattr__(name: str):
    if name in ("codebooks", "ops"):
        return _import_module("hf_kbit.format.codebooks" if name == "codebooks" else "hf_kbit.ops")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _import_module("transformers.modeling_utils")  # first of all, by which the method is registered
    _import_module("hf_kbit.integrations.transformers.quantizer")  # raises what that has only warned of
    globals()[name] = found = getattr(_import_module(f"hf_kbit.{_HOMES[name]}"), name)
    return found


def _register() -> None:
    """Makes Transformers know the method, by its registry. Where that fails, it stays as it is: the program may well
    use it for models that are not quantized."""
    try:
        quantizer = _import_module("hf_kbit.integrations.transformers.quantizer").KbitHfQuantizer  # registers itself
        quantizer.on_loading = staticmethod(lambda: _import_module("hf_kbit.calibration.on_loading"))
        _setting.install("transformers", _table.REGISTRATION_HOOKS)
    except Exception as error:  # whatever our files say of this Transformers, importing it goes on
        _warnings.warn(f"hf_kbit: models can be neither quantized nor loaded: {error}", RuntimeWarning, stacklevel=2)


_after_import("transformers.modeling_utils", _register)
_after_import("hf_kbit.generation.fast_generate", _setting.install_generation)
if "torch" in _sys.modules:
    _import_module("hf_kbit.ops")  # for programs that call torch.ops.hf_kbit
