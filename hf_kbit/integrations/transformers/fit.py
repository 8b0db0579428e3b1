"""Whether a checkpoint fits a model of Transformers, checked before a byte of it is loaded.

Transformers replaces what a checkpoint lacks by random numbers and reports it in a log. For the model that was saved a
quantized checkpoint is refused instead, with every tensor at fault named; for another one what does not fit of packed
layers.
"""

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from hf_kbit.files.checkpoint import (
    PACKED_SUFFIXES,
    WEIGHT_SUFFIX,
    TensorHeader,
    compare_packed,
    packed_modules,
    read_headers,
)
from hf_kbit.format.errors import brief, refuse
from hf_kbit.format.kinds import KINDS
from hf_kbit.integrations.transformers.names import Names
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.plan.config import KbitConfig
from hf_kbit.weight.tensor import HOW


def read_unpacked(files: Iterable[str]) -> dict[str, TensorHeader]:
    """All tensors of a checkpoint that is to be quantized, as far as it is of safetensors files.

    Raises:
        ValueError: it is quantized already, its config without levels.
    """
    tensors = read_headers(file for file in files if str(file).endswith(".safetensors"))
    if packed := [name for name in tensors if name.endswith(tuple(f".{kind.marks}" for kind in KINDS))]:
        raise ValueError(
            f"levels: found none in quantization_config of config.json, expected those of the packed tensors in the "
            f"checkpoint, such as {brief(packed[0])}"
        )
    return tensors


def check_present(model, weights: list[str], targets: Mapping[str, list[str]]) -> None:
    """Refuses a checkpoint without some of the weights that have to be in it: of experts Transformers would look for a
    place for random numbers, and say of a projection that it is no tensor; and several processes would each draw
    random numbers of their own. ``targets``: where in the model each tensor of the checkpoint goes."""
    if targets and weights:
        found = set().union(*targets.values())
        found |= _tied_to(found, model)
        refuse([f"{name}: not in the checkpoint" for name in weights if name not in found])


def check_apart(weights: list[str], targets: Mapping[str, list[str]], mxfp4: list[str]) -> None:
    """Refuses what processes cannot share: of a checkpoint they read whole what is to be quantized, and their parts of
    the rest, so no tensor may hold both; and of MXFP4, which is to become 16 bits, no rule knows the parts."""
    problems = []
    for name, goes_to in targets.items():
        left = [target for target in goes_to if target not in weights]
        if left and len(left) < len(goes_to):
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


def is_saved(model: PreTrainedModel, files: list[str]) -> bool:
    """Whether ``config.json`` beside a checkpoint is of the model: of its class, and its config as it is."""
    config, kind = model.config, type(model).__name__
    content = _content_beside(files) or config.to_dict()
    if content.get("model_type") != config.model_type or content.get("architectures") not in (None, [], [kind]):
        return False
    return _described(type(config).from_dict(content).to_dict()) == _described(config.to_dict())


def _described(entries: dict) -> dict:
    """What of a config decides which tensors there are, and maybe more."""
    others = ("_name_or_path", "dtype", "quantization_config")
    return {k: _described(v) if isinstance(v, dict) else v for k, v in entries.items() if k not in others}


def config_beside(files: list[str] | None) -> KbitConfig | None:
    """What ``config.json`` beside a checkpoint says of its quantization; None if it is not of ours."""
    found = _content_beside(files or ()).get("quantization_config")
    ours = isinstance(found, dict) and found.get("quant_method") == "kbit"
    return KbitConfig.from_dict(found) if ours and (found.get("levels") or found.get("code")) else None


def _content_beside(files: Iterable[str]) -> dict:
    folder = os.path.dirname(next(iter(files), ""))
    beside = folder and os.path.exists(os.path.join(folder, "config.json"))
    return PreTrainedConfig.get_config_dict(folder)[0] if beside else {}


def packed_in(names: Names, tensors: dict[str, TensorHeader]) -> dict[str, str]:
    """``{module name in the model: its name in the checkpoint}`` of all that is packed there."""
    return {names.module(name + WEIGHT_SUFFIX): name for name in sorted(packed_modules(tensors), key=dot_natural_key)}


def check_tensors(
    model,
    layers: Mapping[str, KbitWeight],
    names: Names,
    tensors: dict[str, TensorHeader],
    packed: dict[str, str],
    whole: bool,
) -> None:
    """Compares the headers of a checkpoint with a model whose packed layers have been replaced.

    Args:
        layers: those packed layers.
        packed: the result of ``packed_in``.
        whole: whether it is the model that was saved (``is_saved``): the checkpoint must hold all that it has, and
            nothing else, in its shapes. Of another one only what is packed must fit, and must not go astray.

    Raises:
        ValueError: lists what is missing, left over, or of another dtype or shape.
    """
    expected, ignored = model.state_dict(), _ignored(model)
    problems, found = [], {module_name + suffix for module_name in packed for suffix in PACKED_SUFFIXES}
    for module_name, stored_name in packed.items():
        if module_name in layers:
            problems += compare_packed(stored_name, tensors, layers[module_name].shape, layers[module_name].decoding)
        elif whole or module_name in expected or module_name + WEIGHT_SUFFIX in expected:
            left = [stored_name + suffix for suffix in PACKED_SUFFIXES if stored_name + suffix in tensors]
            problems += [f"{name}: left over, the model has no such quantized layer" for name in left]

    suffixes = (*PACKED_SUFFIXES, f".{HOW}")  # the last is compared when it is read
    compared = {stored_name + suffix for stored_name in packed.values() for suffix in suffixes}
    for stored_name in sorted(tensors.keys() - compared, key=dot_natural_key):
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
        problems += _astray(model, layers, {name: packed[name] for name in packed.keys() - layers.keys()}, absent)
    refuse(problems, f"the quantized checkpoint does not fit the model ({type(model).__name__})")


def _astray(model, layers: Mapping[str, KbitWeight], left: dict[str, str], absent: list[str]) -> list[str]:
    """Packed layers that the model has not, though it lacks one of the same name but for what stands in front: no two
    layers, but one whose name nobody has mapped. Or all of them, if the model has none."""
    problems, remedy = [], "key_mapping of from_pretrained can map names"
    base = f"{model.base_model_prefix}."
    lacks = {f".{name.removeprefix(base).removesuffix(WEIGHT_SUFFIX)}": name for name in absent}
    for name in sorted(left, key=dot_natural_key):
        twins = (full for end, full in lacks.items() if f".{name}".endswith(end) or end.endswith(f".{name}"))
        if (twin := next(twins, None)) is not None:
            problems.append(f"{left[name]}.weight: found no place for it, expected that of {twin}; {remedy}")
    if left and not problems and not layers:
        first = min(left, key=dot_natural_key)
        problems.append(f"{left[first]}.weight: found no place for it, nor for any other packed one; {remedy}")
    return problems


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
