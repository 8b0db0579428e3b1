"""Whether a checkpoint fits a model of Transformers, checked before a byte of it is loaded.

Transformers replaces what a checkpoint lacks by random numbers and reports it in a log. A quantized checkpoint is
refused instead, with every tensor at fault named.
"""

import copy
import os
import re
from collections import defaultdict
from collections.abc import Iterable

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightTransform, dot_natural_key

from hf_kbit.checkpoint import (
    PACKED_SUFFIXES,
    WEIGHT_SUFFIX,
    StoredTensor,
    brief,
    compare_packed,
    packed_modules,
    read_headers,
    refuse,
)
from hf_kbit.config import KbitConfig
from hf_kbit.format import ABSMAX_SUFFIX
from hf_kbit.integrations.transformers.names import Names
from hf_kbit.nn.weight import packed_layers


def read_unpacked(files: Iterable[str]) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint that is to be quantized, as far as it is of safetensors files.

    Raises:
        ValueError: it is quantized already, its config without levels.
    """
    tensors = read_headers(file for file in files if str(file).endswith(".safetensors"))
    if packed := [name for name in tensors if name.endswith(WEIGHT_SUFFIX + ABSMAX_SUFFIX)]:
        raise ValueError(
            f"levels: found none in quantization_config of config.json, expected those of the packed tensors in the "
            f"checkpoint, such as {brief(packed[0])}"
        )
    return tensors


def check_present(names: Names, model, weights: list[str], tensors: list[str]) -> None:
    """Refuses a checkpoint without some of the weights that have to be in it: of experts Transformers would look for a
    place for random numbers, and say of a projection that it is no tensor; and several processes would each draw
    random numbers of their own."""
    if tensors and weights:
        found = {target for name in tensors for target in names.targets(name)[0]}
        found |= _tied_to(found, model)
        refuse([f"{name}: not in the checkpoint" for name in weights if name not in found])


def check_apart(names: Names, weights: list[str], tensors: list[str], mxfp4: list[str]) -> None:
    """Refuses what processes cannot share: of a checkpoint they read whole what is to be quantized, and their parts of
    the rest, so no tensor may hold both; and of MXFP4, which is to become 16 bits, no rule knows the parts."""
    problems = []
    for name in tensors:
        targets = [target for target in names.targets(name)[0] if target in names]
        left = [target for target in targets if target not in weights]
        if left and len(left) < len(targets):
            problems.append(f"{left[0]}: found it left in 16 bits, expected it quantized as what is in {name} with it")
        elif left and name in mxfp4:
            problems.append(f"{name}: found it left in 16 bits, expected it quantized, for it is in MXFP4")
    refuse(problems, "several processes cannot share the checkpoint")


def saved_class(architectures: list[str] | None) -> type[PreTrainedModel] | None:
    """The class that ``architectures`` in a config.json names; None if it names none that Transformers has.

    Raises:
        ValueError: it is no list of names.
    """
    named = isinstance(architectures, list) and all(isinstance(name, str) for name in architectures)
    if architectures is not None and not named:
        found = brief(repr(architectures))
        raise ValueError(f"architectures: found {found} in config.json, expected a list of names of classes")
    found = getattr(transformers, architectures[0], None) if architectures else None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def saved_model(model: PreTrainedModel, file: str, mapped: bool):
    """The model that was saved, on the meta device, as ``config.json`` beside ``file`` describes it.

    It is ``model`` itself if that is of the same class and nothing of its config was changed by the caller of
    ``from_pretrained``. It is None if it is not known: the class is not in Transformers, has another configuration, of
    which the model's may be a part, or is another one, to whose names the caller has mapped those of the checkpoint.
    """
    folder, kind = os.path.dirname(file), type(model.config)
    beside = os.path.exists(os.path.join(folder, "config.json"))
    content = PreTrainedConfig.get_config_dict(folder)[0] if beside else model.config.to_dict()
    architectures = content.get("architectures")
    cls = saved_class(architectures)
    if content.get("model_type", model.config.model_type) != model.config.model_type:
        return None
    same = not architectures or architectures[0] == type(model).__name__
    if same:
        cls = type(model)  # which Transformers itself may not have
    elif cls is None or mapped or not isinstance(model.config, cls.config_class or ()):
        return None
    config = kind.from_pretrained(folder) if beside else copy.deepcopy(model.config)
    if same and _described(config) == _described(model.config):
        return model
    with torch.device("meta"):
        return cls(config)


def config_beside(files: Iterable[str] | None) -> KbitConfig | None:
    """What ``config.json`` beside a checkpoint says of its quantization; None if it is not of ours."""
    folder = os.path.dirname(next(iter(files), "")) if files else ""
    if not os.path.exists(os.path.join(folder, "config.json")):
        return None
    found = PreTrainedConfig.get_config_dict(folder)[0].get("quantization_config")
    if not isinstance(found, dict) or found.get("quant_method") != "kbit" or not found.get("levels"):
        return None
    return KbitConfig.from_dict(found)


def _described(config: PreTrainedConfig) -> dict:
    """What of a config decides which tensors there are."""
    return {name: value for name, value in config.to_dict().items() if name not in ("dtype", "quantization_config")}


def packed_in(names: Names, tensors: dict[str, StoredTensor]) -> dict[str, str]:
    """``{module name in the model: its name in the checkpoint}`` of all that is packed there."""
    return {names.module(name + WEIGHT_SUFFIX): name for name in sorted(packed_modules(tensors), key=dot_natural_key)}


def check_tensors(
    model,
    conversions: list[WeightTransform] | None,
    tensors: dict[str, StoredTensor],
    packed: dict[str, str],
    whole: bool,
) -> None:
    """Compares the checkpoint with a model whose packed layers have been replaced.

    Args:
        conversions: see ``Names``.
        tensors: what the checkpoint holds.
        packed: the result of ``packed_in``.
        whole: whether it is the model that was saved: the checkpoint must hold all that it has, and nothing else, in
            its shapes. Of another one only what is packed must fit, if the model has it, and must not go astray.

    Raises:
        ValueError: a tensor has another shape or dtype, is missing or left over; the message names all there are.
    """
    names, expected, ignored = Names(model, conversions), model.state_dict(), _ignored(model)
    layers = packed_layers(model)
    problems, found = [], set()
    for module_name, stored_name in packed.items():
        found.update(module_name + suffix for suffix in PACKED_SUFFIXES)
        if module_name in layers:
            problems += compare_packed(stored_name, tensors, layers[module_name])
        elif whole or module_name in expected or module_name + WEIGHT_SUFFIX in expected:
            left = [stored_name + suffix for suffix in PACKED_SUFFIXES if stored_name + suffix in tensors]
            problems += [f"{name}: left over, the model has no such quantized layer" for name in left]

    pairs = {stored + suffix for stored in packed.values() for suffix in PACKED_SUFFIXES}
    for stored_name in sorted(tensors.keys() - pairs, key=dot_natural_key):
        stored = tensors[stored_name]
        targets, converted = names.targets(stored_name)
        found.update(targets)
        for target in targets:
            if target not in expected:
                if whole and not ignored(target) and not ignored(stored_name):
                    problems.append(f"{stored_name}: left over, the model has no such tensor")
            elif not converted and not stored.can_become(expected[target], whole):
                dtype, shape = str(expected[target].dtype).removeprefix("torch."), list(expected[target].shape)
                problems.append(f"{stored_name}: found {stored}, expected {dtype} {shape}")

    found |= _tied_to(found, model)
    absent = [name for name in expected if name not in found and not ignored(name)]
    if whole:
        problems += [f"{name}: missing, expected shape {list(expected[name].shape)}" for name in absent]
    else:
        problems += _astray(model, packed, layers, absent)
    refuse(problems, f"the quantized checkpoint does not fit the model ({type(model).__name__})")


def _astray(model, packed: dict[str, str], layers: Iterable[str], absent: list[str]) -> list[str]:
    """Packed layers that the model has not, though it lacks one of the same name but for what stands in front: no two
    layers, but one whose name nobody has mapped. Or all of them, if the model has none."""
    left, problems, remedy = packed.keys() - set(layers), [], "key_mapping of from_pretrained can map names"
    lacks = {name.removesuffix(WEIGHT_SUFFIX): name for name in absent}
    lacks |= {name.removeprefix(f"{model.base_model_prefix}."): full for name, full in lacks.items()}
    inner = {end: full for name, full in lacks.items() for end in _ends(name)}
    for name in sorted(left, key=dot_natural_key):
        if (twin := inner.get(name) or next((lacks[end] for end in _ends(name) if end in lacks), None)) is not None:
            problems.append(f"{packed[name]}.weight: found no place for it, expected that of {twin}; {remedy}")
    if not problems and left == packed.keys():
        first = min(left, key=dot_natural_key)
        problems.append(f"{packed[first]}.weight: found no place for it, nor for any other packed one; {remedy}")
    return problems


def _ends(name: str) -> list[str]:
    """The name, and what is left of it without its first parts."""
    parts = name.split(".")
    return [".".join(parts[first:]) for first in range(len(parts))]


def _tied_to(found: set[str], model) -> set[str]:
    """Names of tensors that are tied to one that was found: one name of a group is stored for all."""
    groups = defaultdict(set)
    for name, source in model.all_tied_weights_keys.items():
        groups[source] |= {name, source}
    return set().union(*(group for group in groups.values() if group & found))


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
