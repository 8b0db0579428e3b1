"""What a quantized checkpoint holds, checked before a byte of it is loaded.

Transformers replaces what a checkpoint lacks by random numbers and reports it in a log. A quantized checkpoint is
refused instead, with every tensor at fault named. Only headers are read here.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from hf_kbit.format import ABSMAX_SUFFIX, absmax_shape, weight_shape

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


def read_headers(files: Iterable[str]) -> dict[str, StoredTensor]:
    """All tensors of safetensors files, by name.

    Raises:
        ValueError: a file is no safetensors file or is cut short; the message names the file and, where the header
            survived, the first tensor that is not all there.
    """
    tensors = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise ValueError(f"{file}: found another format, expected safetensors, the only one of a kbit checkpoint")
        size = os.path.getsize(file)
        try:
            with open(file, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                if length > size:
                    raise ValueError("header longer than the file")
                header = json.loads(stream.read(length))
        except ValueError as error:
            raise ValueError(f"{file}: the safetensors header is damaged or cut short ({error})") from None
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if 8 + length + entry["data_offsets"][1] > size:
                raise ValueError(
                    f"{file}: cut short at tensor {name}: found a file of {size} bytes, expected at least "
                    f"{8 + length + entry['data_offsets'][1]}"
                )
            tensors[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]))
    return tensors


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


def check_tensors(model, tensors: dict[str, StoredTensor], packed: dict[str, str], whole: bool) -> None:
    """Compares the checkpoint with the model after its layers have been replaced.

    Args:
        tensors: what the checkpoint holds.
        packed: the result of ``packed_modules``.
        whole: the checkpoint is of this very class, so nothing may be missing or left over. Otherwise a model takes
            what it needs: a base model leaves the head, a model with a new head makes it.

    Raises:
        ValueError: tensors are missing, left over, or have another shape or dtype; the message names them.
    """
    names, expected = Names(model), model.state_dict()
    ignored = _ignored(model)
    problems, found = [], set()
    for module_name, stored_name in packed.items():
        for suffix in PACKED_SUFFIXES:
            found.add(module_name + suffix)
            if module_name + suffix not in expected:
                if whole and not ignored(module_name + suffix):
                    problems.append(f"{stored_name + suffix}: left over, the model has no such quantized layer")
            else:
                problems += _compare_packed(stored_name + suffix, tensors[stored_name + suffix], model, module_name)
    pairs = {stored + suffix for stored in packed.values() for suffix in PACKED_SUFFIXES}
    for stored_name in sorted(tensors.keys() - pairs, key=dot_natural_key):
        targets, converted = names.targets(stored_name)
        found.update(targets)
        for target in targets:
            if target not in expected:
                if whole and not ignored(target) and not ignored(stored_name):
                    problems.append(f"{stored_name}: left over, the model has no such tensor")
            elif not converted and tuple(expected[target].shape) != tensors[stored_name].shape:
                shape = list(expected[target].shape)
                problems.append(f"{stored_name}: found {tensors[stored_name]}, expected shape {shape}")
    if whole:
        tied = set(model.all_tied_weights_keys) | set(model.all_tied_weights_keys.values())
        missing = [name for name in expected if name not in found and name not in tied and not ignored(name)]
        problems += [f"{name}: missing, expected shape {list(expected[name].shape)}" for name in missing]
    refuse(problems)


def _compare_packed(stored_name: str, stored: StoredTensor, model, module_name: str) -> list[str]:
    layer = model.get_submodule(module_name)
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


def refuse(problems: list[str]) -> None:
    """Raises a ValueError that lists the problems, if there are any."""
    if problems:
        more = [f"... and {len(problems) - MAX_NAMED} more"] if len(problems) > MAX_NAMED else []
        lines = "\n  ".join(problems[:MAX_NAMED] + more)
        raise ValueError(f"the quantized checkpoint does not fit the model:\n  {lines}")
