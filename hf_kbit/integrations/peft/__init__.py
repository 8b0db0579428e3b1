"""Adapters of PEFT on quantized layers: loaded when the program imports PEFT.

PEFT takes a packed weight for a dense one, and so its own classes work on packed layers. What they cannot do is here,
in methods of PEFT that are wrapped (``hooks.py`` lists them):

- ``inject_adapter``: initialisations that change the weight (PiSSA, OLoRA) have the rest quantized again, and what
  would train it is refused. Afterwards the class of each adapter over a packed weight is one derived from its own and
  from ``KbitTunerLayer``, which merges by requantizing and unmerges to the same bytes. Experts of mixtures are shown
  to PEFT as tensors, and its adapters on these become ``KbitParamWrapper``.
- ``merge_adapter`` and ``merge_and_unload``: what requantizing changed is reported in one warning.
- ``save_pretrained``: packed tables are left out, and shards are gathered.
- ``prepare_model_for_kbit_training``: checkpointing is switched on for quantized models too.
"""

from importlib import import_module

import peft  # noqa: F401  first of all: its import may set the hooks, which are in the files of this folder

# Names of this package, and the files that they are in.
_HOMES = {"KbitTunerLayer": "layer", "merge_and_unload": "merge", "prepare_model_for_kbit_training": "prepare"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
