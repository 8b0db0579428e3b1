"""The quantizer that Transformers calls, and what it needs of Transformers."""

import transformers  # noqa: F401  what is checked next

from hf_kbit import hooks

hooks.require("torch", hooks.TORCH_NAMES)
hooks.require("transformers", hooks.TRANSFORMERS_NAMES)


def __getattr__(name: str):
    if name != "KbitHfQuantizer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer

    return KbitHfQuantizer
