"""The quantizer that Transformers calls, and what it needs of Transformers."""

import transformers  # noqa: F401  what is checked next

from hf_kbit.hooks import setting, table

setting.require("torch", table.TORCH_NAMES)
setting.require("transformers", table.TRANSFORMERS_NAMES)


def __getattr__(name: str):
    if name != "KbitHfQuantizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer

    return KbitHfQuantizer
