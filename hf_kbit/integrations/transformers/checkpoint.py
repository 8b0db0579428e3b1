"""What a quantized checkpoint holds, checked before a byte of it is loaded.

Transformers replaces what a checkpoint lacks by random numbers and reports it in a log. A quantized checkpoint is
refused instead, with every tensor at fault named. Only headers are read here.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hf_kbit.format import ABSMAX_SUFFIX, absmax_shape, weight_shape
from hf_kbit.nn.linear import KbitLinear

WEIGHT_SUFFIX = ".weight"
PACKED_SUFFIXES = (WEIGHT_SUFFIX, WEIGHT_SUFFIX + ABSMAX_SUFFIX)
MAX_NAMED = 20  # problems spelled out in one error


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a safetensors header describes it; ``dtype`` is safetensors' name, such as ``I32``."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self):
        return f"{self.dtype} {list(self.shape)}"

    def can_become(self, tensor: torch.Tensor) -> bool:
        """Whether loading it into ``tensor`` keeps its meaning: same shape, and a float if that is one."""
        return self.shape == tuple(tensor.shape) and ("F" in self.dtype) == tensor.is_floating_point()


def read_headers(files: Iterable[str]) -> dict[str, StoredTensor]:
    """All tensors of safetensors files, by name.

    Raises:
        ValueError: a file is no safetensors file, or is damaged or cut short; the message names the file and, where
            the header survived, the first tensor that is not all there.
    """
    tensors = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: found another format, expected safetensors, the only one of a kbit checkpoint")
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():
                    entry = stored.get_slice(name)
                    tensors[name] = StoredTensor(entry.get_dtype(), tuple(entry.get_shape()))
        except SafetensorError as error:
            raise ValueError(f"{file}: damaged or cut short{_first_cut(file)} ({error})") from None
    return tensors


def _first_cut(file: str) -> str:
    """Says which tensor the end of a damaged file runs through, if its header can still be read."""
    size = os.path.getsize(file)
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, size)))
        header.pop("__metadata__", None)
        ends = sorted((8 + length + entry["data_offsets"][1], name) for name, entry in header.items())
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return ""
    return next((f" at tensor {name}: found {size} bytes, expected {end}" for end, name in ends if end > size), "")


class Names:
    """How Transformers maps the names in a checkpoint to those of a model's tensors."""

    def __init__(self, model):
        transforms = get_model_conversion_mapping(model)
        self._renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
        self._converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
        self._by_pattern = {source: c for c in self._converters for source in c.source_patterns}
        self._prefix = model.base_model_prefix
        self._state_dict = model.state_dict()

    def targets(self, stored_name: str) -> tuple[list[str], bool]:
        """Names in the model that a stored tensor goes to, and whether it is converted, not only renamed."""
        name, pattern = self._rename(stored_name, self._renamings, self._converters)
        if name not in self._state_dict and stored_name in self._state_dict:
            return [stored_name], False
        if pattern is None:
            return [name], False
        first, *others = self._by_pattern[pattern].target_patterns
        return [name, *(name.replace(first, other) for other in others)], True

    def module(self, stored_weight: str) -> str:
        """Name in the model of the module whose packed ``weight`` has that name; packed tensors are only renamed."""
        return self._rename(stored_weight, self._renamings, [])[0].removesuffix(WEIGHT_SUFFIX)

    def _rename(self, name, renamings, converters):
        return rename_source_key(name, renamings, converters, self._prefix, self._state_dict)


def stored_names(model, modules: Iterable[str]) -> dict[str, str]:
    """``{module name: its name in a checkpoint that model.save_pretrained writes}``."""
    tensors = {f"{name}{WEIGHT_SUFFIX}": model.get_submodule(name).weight.detach() for name in modules}
    stored = {id(tensor): name for name, tensor in revert_weight_conversion(model, tensors).items()}
    return {
        name.removesuffix(WEIGHT_SUFFIX): stored[id(tensor)].removesuffix(WEIGHT_SUFFIX)
        for name, tensor in tensors.items()
    }


def saved_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """The class that a config says was saved, or the Auto class that finds it: for a class that came as code with the
    model the one that its ``auto_map`` names, for one that Transformers does not have that of causal language models.

    Raises:
        ValueError: ``architectures`` is no list of names, or names what is no model for such a config.
    """
    named = config.architectures or [""]
    if not isinstance(named, list | tuple) or not isinstance(named[0], str):
        raise ValueError(f"architectures: found {named!r}, expected a list with the name of a model class")
    name = named[0]
    for auto_class, place in (getattr(config, "auto_map", None) or {}).items():
        if name and str(place).endswith(f".{name}"):
            return getattr(transformers, auto_class)
    if not name or not hasattr(transformers, name):
        return AutoModelForCausalLM
    found = getattr(transformers, name)
    if not (isinstance(found, type) and issubclass(found, PreTrainedModel) and found.config_class is not None):
        raise ValueError(f"architectures: found {name!r}, expected the name of a model class")
    if not isinstance(config, found.config_class):
        raise ValueError(f"architectures: found {name}, expected a model class for a {type(config).__name__}")
    return found


def packed_modules(model, tensors: dict[str, StoredTensor]) -> dict[str, str]:
    """``{module name in the model: its name in the checkpoint}`` for every packed pair.

    Raises:
        ValueError: half of a pair is missing.
    """
    names, modules, problems = Names(model), {}, []
    for name in sorted(tensors, key=dot_natural_key):
        if name.endswith(WEIGHT_SUFFIX + ABSMAX_SUFFIX):
            weight = name.removesuffix(ABSMAX_SUFFIX)
            if weight in tensors:
                modules[names.module(weight)] = weight.removesuffix(WEIGHT_SUFFIX)
            else:
                problems.append(f"{weight}: missing, expected beside {name}")
        elif name.endswith(WEIGHT_SUFFIX) and tensors[name].dtype == "I32" and name + ABSMAX_SUFFIX not in tensors:
            problems.append(f"{name + ABSMAX_SUFFIX}: missing, expected beside {name}, which is {tensors[name]}")
    refuse(problems)
    return modules


def check_tensors(
    model, tensors: dict[str, StoredTensor], packed: dict[str, str], missing: bool, left_over: bool
) -> None:
    """Compares the checkpoint with a model whose packed layers have been replaced.

    Args:
        tensors: what the checkpoint holds.
        packed: the result of ``packed_modules``.
        missing: whether the checkpoint must hold everything that the model has.
        left_over: whether the model must have everything that the checkpoint holds.

    Raises:
        ValueError: a tensor has another shape or dtype, is missing or left over; the message names all there are.
    """
    names, expected, ignored = Names(model), model.state_dict(), _ignored(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, KbitLinear)}
    problems, found = [], set()
    for module_name, stored_name in packed.items():
        found.update(module_name + suffix for suffix in PACKED_SUFFIXES)
        if module_name in layers:
            for suffix in PACKED_SUFFIXES:
                problems += _compare_packed(stored_name + suffix, tensors[stored_name + suffix], layers[module_name])
        elif left_over or module_name + WEIGHT_SUFFIX in expected:
            problems += [
                f"{stored_name + suffix}: left over, the model has no such quantized layer"
                for suffix in PACKED_SUFFIXES
            ]

    pairs = {stored + suffix for stored in packed.values() for suffix in PACKED_SUFFIXES}
    for stored_name in sorted(tensors.keys() - pairs, key=dot_natural_key):
        stored = tensors[stored_name]
        targets, converted = names.targets(stored_name)
        found.update(targets)
        for target in targets:
            if target not in expected:
                if left_over and not ignored(target) and not ignored(stored_name):
                    problems.append(f"{stored_name}: left over, the model has no such tensor")
            elif not converted and not stored.can_become(expected[target]):
                dtype, shape = str(expected[target].dtype).removeprefix("torch."), list(expected[target].shape)
                problems.append(f"{stored_name}: found {stored}, expected {dtype} {shape}")

    if missing:
        found |= _tied_to(found, model)
        absent = [name for name in expected if name not in found and not ignored(name)]
        problems += [f"{name}: missing, expected shape {list(expected[name].shape)}" for name in absent]
    refuse(problems)


def _tied_to(found: set[str], model) -> set[str]:
    """Names of tensors that are tied to one that was found: one name of a group is stored for all."""
    groups = defaultdict(set)
    for name, source in model.all_tied_weights_keys.items():
        groups[source] |= {name, source}
    return set().union(*(group for group in groups.values() if group & found))


def _compare_packed(stored_name: str, stored: StoredTensor, layer: KbitLinear) -> list[str]:
    if stored_name.endswith(ABSMAX_SUFFIX):
        expected = StoredTensor("U8", absmax_shape(layer.out_features, layer.in_features))
    else:
        expected = StoredTensor("I32", weight_shape(layer.out_features, layer.in_features, layer.bits))
    if stored == expected:
        return []
    return [
        f"{stored_name}: found {stored}, expected {expected} for a [{layer.out_features}, {layer.in_features}] weight "
        f"in {layer.bits} bits"
    ]


def _ignored(model):
    """Whether the model's class says that a tensor may be missing or left over."""
    patterns = {
        r"rotary_emb\.inv_freq",
        r"(^|\.)position_ids$",
        *(model._keys_to_ignore_on_load_missing or ()),
        *(model._keys_to_ignore_on_load_unexpected or ()),
        *(model._keys_to_ignore_on_save or ()),
    }
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns)).search


def refuse(problems: list[str], what: str = "the quantized checkpoint does not fit the model") -> None:
    """Raises a ValueError that lists the problems, if there are any."""
    if problems:
        more = [f"... and {len(problems) - MAX_NAMED} more"] if len(problems) > MAX_NAMED else []
        lines = "\n  ".join(problems[:MAX_NAMED] + more)
        raise ValueError(f"{what}:\n  {lines}")
