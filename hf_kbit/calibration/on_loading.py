"""Calibrating while a model loads: ``KbitConfig(calibrate=...)``.

The checkpoint is mapped into CPU memory in 16 bits, so that memory takes what is read of it; layers are calibrated one
after another and packed, and the packed model goes where ``device_map`` says.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import CustomDtype, get_balanced_memory
from torch import nn

from hf_kbit.calibration.data import Text, text_of, tokenizer_of
from hf_kbit.calibration.post_training import quantize_model
from hf_kbit.calibration.solving import Solving
from hf_kbit.integrations.transformers import parallel
from hf_kbit.integrations.transformers.offload import keep_tables
from hf_kbit.integrations.transformers.report import logger
from hf_kbit.nn.weight import packed_layers
from hf_kbit.plan.config import KbitConfig
from hf_kbit.plan.selection import Packable

BALANCED = ("auto", "balanced", "balanced_low_0")


def prepare(model: nn.Module, config: KbitConfig, device_map, mxfp4: list[str]) -> Text:
    """What a model is to read. Refuses what cannot be calibrated; the model is on the meta device, and nothing was
    loaded.

    Raises:
        TypeError, ValueError: as ``hf_kbit.calibrate``.
        MemoryError: there is no room to tune the whole model.
    """
    instead = "load the model without calibrate, or calibrate and save it first (hf-kbit quantize), then load that"
    if parallel.is_shared(model.config):
        raise ValueError(f"calibrate: found a model that processes share, expected one process: {instead}")
    if mxfp4:
        raise ValueError(f"calibrate: found {mxfp4[0]} in MXFP4, expected a checkpoint in 16 or 32 bits: {instead}")
    solving, packable = _solving(config), Packable(model)
    solving.check(config)
    sites = [packable.sites[name] for name in packable.choose(config)]
    word = _word(config)
    text = Text(None if word else config.calibrate)
    solving.check_model(model, sites, config, text, _device(device_map))
    if text.needs_tokenizer:
        source = {"revision": getattr(model.config, "_commit_hash", None)}
        text = replace(text, tokenizer=tokenizer_of(model.name_or_path, **source))
        if word != "own":  # which goes without one
            text.tokenizer_for(model)
            text_of(text.data)  # is there, and is a text
    return text


def run(model: nn.Module, config: KbitConfig, text: Text, device_map) -> None:
    """Calibrates a model that was loaded in 16 bits, and puts it where ``device_map`` says."""
    settings = {each.name: getattr(of, each.name) for of in (_solving(config), text) for each in fields(of)}
    how = {"device": _device(device_map), "report": partial(logger.info, "hf_kbit: %s %s")}
    quantize_model(model, config.without_calibration(), calibrate=True, **how, **settings)
    _place(model, device_map, config.embedding_device == "cpu")


def _solving(config: KbitConfig) -> Solving:
    method = "weighted" if _word(config) == "weighted" else "feedback"
    return Solving(method=method, tune=config.tune, resume=config.resume)


def _word(config: KbitConfig) -> str:
    """What stands for a text that calibration finds itself; empty for data."""
    return config.calibrate if isinstance(config.calibrate, str) else ""


def _device(device_map) -> torch.device:
    """Where layers are calibrated: where the model is to be, on the first of several GPUs; else on a GPU if any."""
    places = device_map.values() if isinstance(device_map, Mapping) else ()
    devices = [torch.empty(0, device=place).device for place in places if place != "disk"]
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    if not devices:
        return torch.empty(0, device=usual).device
    return next((device for device in devices if device.type != "cpu"), devices[0])


def _place(model: nn.Module, device_map, asked: bool) -> None:
    if device_map is None:
        return
    if isinstance(device_map, str):
        sizes = {
            f"{name}.weight": CustomDtype.INT4 if layer.bits <= 4 else torch.int8
            for name, layer in packed_layers(model).items()
        }
        how = {"no_split_module_classes": list(model._no_split_modules or ()), "special_dtypes": sizes}
        memory = get_balanced_memory(model, low_zero=device_map == "balanced_low_0", **how)
        device_map = infer_auto_device_map(model, max_memory=memory if device_map in BALANCED else None, **how)
    if len(set(device_map.values())) == 1:
        model.to(next(iter(device_map.values())))
    else:
        dispatch_model(model, device_map, skip_keys=model._skip_keys_device_placement)
    model.hf_device_map = dict(device_map)  # not the caller's, for tables may leave it
    keep_tables(model, asked)
