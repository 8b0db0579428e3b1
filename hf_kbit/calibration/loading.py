"""The model of a folder or a name in 16 bits, of the class that was saved: to be calibrated, or decoded from fewer."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GgufConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from hf_kbit.calibration.data import place_of
from hf_kbit.integrations.transformers.fit import saved_class

FP8, GGUF = "fp8", "gguf"  # DeepSeek's blocks of 128 x 128 with a scale; llama.cpp's files


def load(
    name: str | Path,
    *,
    dtype: str = "auto",
    revision: str | None = None,
    trust_remote_code: bool = False,
    **arguments: Any,
) -> PreTrainedModel:
    """The model of a folder or of a name on the Hub, of the class that was saved; arguments are of
    ``from_pretrained``. Weights are mapped from the files: memory takes what is read of them, until it is short. Those
    in FP8 or of a GGUF file are decoded, all of them into memory."""
    given, (name, place) = str(name), place_of(name)
    source = {"revision": revision, "trust_remote_code": trust_remote_code, **place}
    config = AutoConfig.from_pretrained(name, **source)
    try:
        model_class = class_to_load(config)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if place:
        arguments["quantization_config"], dtype = (
            GgufConfig(dequantize=True),
            torch.bfloat16 if dtype == "auto" else dtype,
        )
    elif quantized_by(config) == FP8:
        arguments = {"quantization_config": FineGrainedFP8Config(dequantize=True), **arguments}
    model = model_class.from_pretrained(name, dtype=dtype, **source, **arguments)
    model.name_or_path = given  # by which its tokenizer is found
    return model


def quantized_by(config: PreTrainedConfig) -> str:
    """The method by which a checkpoint is quantized, as its config says; empty for one that is not."""
    found = getattr(config, "quantization_config", None) or {}
    return (found if isinstance(found, dict) else found.to_dict()).get("quant_method", "")


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
