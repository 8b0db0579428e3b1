"""Tensors of a checkpoint that the model's class leaves out while it loads, and other engines read: most of all layers
that predict further tokens. They have no place in the model, and are read from the files again when it is saved;
``further.py`` packs some of them then."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from hf_kbit.files.checkpoint import WEIGHT_SUFFIX, TensorHeader, model_files, read_headers, read_some
from hf_kbit.format.kinds import NAMES
from hf_kbit.integrations.transformers.names import Names
from hf_kbit.integrations.transformers.report import logger

PATTERNS = "_keys_to_ignore_on_load_unexpected"


@dataclass(frozen=True)
class Ignored:
    """Where such tensors are.

    Attributes:
        places: ``{name that it is saved by: (name in the checkpoint, header)}``.
        packed: ``{name of a layer: its name in the checkpoint}`` of those that are packed there.
    """

    places: Mapping[str, tuple[str, TensorHeader]] = field(default_factory=dict)
    packed: Mapping[str, str] = field(default_factory=dict)


def find(model, names: Names, tensors: Mapping[str, TensorHeader], packed: Mapping[str, str] | None = None) -> Ignored:
    """Those of a checkpoint with these ``packed`` layers (``fit.packed_in``). What else is no float can be computed
    anew, and a part of a model, such as the encoder of an encoder-decoder, is to be without the rest."""
    if not _ignores(model):
        return Ignored()
    is_ignored = re.compile("|".join(f"(?:{pattern})" for pattern in getattr(model, PATTERNS))).search
    found, dtypes, layers = {}, set(), {}
    parts = {f"{own}.{part}": (name, part) for name, own in (packed or {}).items() for part in NAMES}
    for stored_name, tensor in tensors.items():
        name, part = parts.get(stored_name, ("", ""))
        if name in names or f"{name}{WEIGHT_SUFFIX}" in names:  # a layer of the model
            continue
        targets, converted = names.targets(stored_name)
        unknown = not any(target in names for target in targets) and any(map(is_ignored, (stored_name, *targets)))
        if unknown and name:
            layers[name] = packed[name]
            found[f"{name}.{part}"] = stored_name, tensor
        elif unknown and "F" in tensor.dtype:
            dtypes.add(tensor.dtype)
            found[stored_name if converted else targets[0]] = stored_name, tensor
    if narrow := dtypes - {"F64", "F32", "F16", "BF16"}:  # with scales, and nobody would know how they belong together
        logger.warning("hf_kbit: %d tensors in %s are not kept, such as %s", len(found), min(narrow), min(found))
        return Ignored()
    return Ignored(found, layers)


def find_for(model) -> Ignored:
    """Those of the checkpoint that a model in memory was loaded from."""
    files = _files_of(model) if _ignores(model) else []
    return find(model, Names(model), read_headers(files)) if files else Ignored()


def read(ignored: Ignored) -> dict[str, torch.Tensor]:
    """The tensors themselves, in CPU memory; a warning names those that are there no longer."""
    by_file, tensors = defaultdict(dict), {}
    for name, (stored_name, header) in ignored.places.items():
        by_file[header.file][name] = stored_name, header
    for file, places in by_file.items():
        headers = read_headers([file]) if os.path.exists(file) else {}
        there = {name: own for name, (own, header) in places.items() if headers.get(own) == header}
        if gone := places.keys() - there.keys():
            lost = "hf_kbit: %d tensors are not saved, for %s has them no longer: %s"
            logger.warning(lost, len(gone), file, ", ".join(sorted(gone)))
        found = read_some(dict.fromkeys(there.values(), file), there.values())
        # Copies, for the file may be about to be written anew.
        tensors |= {name: tensor.clone() for name, tensor in zip(there, found, strict=True)}
    return tensors


def _ignores(model) -> bool:
    saved = getattr(model.config, "architectures", None)
    return isinstance(saved, list) and type(model).__name__ in saved and bool(getattr(model, PATTERNS, None))


def _files_of(model) -> list[str]:
    """Of the folder, or of the name on the Hub as far as it is in the cache; none of a model that has neither."""
    if os.path.isdir(model.name_or_path):
        files = model_files(Path(model.name_or_path))
        return files if all(map(os.path.exists, files)) else []
    how = {"local_files_only": True, "revision": getattr(model.config, "_commit_hash", None)}
    for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME) if model.name_or_path else ():
        try:
            return model_files(Path(cached_file(model.name_or_path, name, **how)).parent)
        except OSError:
            continue
    return []
