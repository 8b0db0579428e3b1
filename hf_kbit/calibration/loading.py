"""The model of a folder or a name, to be calibrated, of the class that was saved."""

from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_kbit.integrations.transformers.fit import saved_class


def load(
    name: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **arguments: Any,
) -> PreTrainedModel:
    """The model of a folder or of a name on the Hub, of the class that was saved; arguments are of
    ``from_pretrained``. Weights are mapped from the files: memory takes what is read of them, until it is short."""
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = AutoConfig.from_pretrained(name, **source)
    try:
        model_class = class_to_load(config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return model_class.from_pretrained(name, dtype=dtype, **source, **arguments)


def class_to_load(config: PreTrainedConfig) -> type:
    """The class that a config says was saved, or the Auto class that finds it: for a class that came as code with the
    model the one that its ``auto_map`` names, for one that Transformers does not have that of causal language
    models."""
    found, name = saved_class(config.architectures), (config.architectures or [""])[0]
    for auto_class, place in (getattr(config, "auto_map", None) or {}).items():
        if name and str(place).endswith(f".{name}"):
            return getattr(transformers, auto_class)
    if not name or not hasattr(transformers, name):
        return AutoModelForCausalLM
    if found is None or found.config_class is None:
        raise ValueError(f"architectures: found {name!r}, expected the name of a model class")
    if not isinstance(config, found.config_class):
        raise ValueError(f"architectures: found {name}, expected a model class for a {type(config).__name__}")
    return found
