"""Adapters of PEFT on quantized layers: loaded when the program imports PEFT.

PEFT has no registry of quantizers. So methods of its ``BaseTuner`` are wrapped (``hooks.py`` lists them), and each
time its own code gets an ``nn.Linear`` or ``nn.Embedding`` to work on, in place of the packed layer:

- ``inject_adapter``: while an adapter is created, the layer has its decoded weight, so that initialisations that read
  it (PiSSA, OLoRA, DoRA) work, and those that change it have the rest quantized again. Afterwards the adapter stands
  over the packed layer, and its class is derived from ``KbitTunerLayer``. Methods not known to work are refused.
  Experts of mixtures are shown to PEFT as tensors, and its adapters on these become ``KbitParamWrapper``.
- ``TrainableTokensLayer.update_layer``: rows to train start from the decoded table (``tokens.py``).
- ``merge_adapter`` and ``merge_and_unload``: what requantizing the merged weights changed is reported in one warning.

``KbitTunerLayer.merge`` has PEFT merge into the decoded weight in float32 and quantizes the result with the layer's
bits, levels and way to find scales.
"""

from importlib import import_module

import peft  # noqa: F401  first of all: its import installs the hooks, which are in the files of this folder

# Names of this package, and the files that they are in.
_HOMES = {"KbitTunerLayer": "layer", "merge_and_unload": "merge", "prepare_model_for_kbit_training": "prepare"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
