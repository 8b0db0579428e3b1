"""Adapters of PEFT on quantized layers: loaded when the program imports PEFT.

PEFT takes a packed weight for a dense one, and so its own classes work on packed layers. What they cannot do is in
methods of PEFT that are wrapped (``hooks/table.py`` lists them). Adapters get a class that is derived from their own
and from ``KbitTunerLayer``, for each class of PEFT merges in a way of its own, and none by requantizing.
"""

from importlib import import_module

import peft  # noqa: F401  first of all: its import may set the hooks, which are in the files of this folder

# Names of this package, and the files that they are in.
_HOMES = {"KbitTunerLayer": "layer", "merge_and_unload": "merge", "prepare_model_for_kbit_training": "prepare"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
