"""Tensors of a checkpoint that the model's class leaves out while it loads, and other engines read: most of all layers
that predict further tokens. They have no place in the model, and are read from the files again when it is saved."""

import os
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from hf_kbit.files.checkpoint import TensorHeader, model_files, read_headers
from hf_kbit.integrations.transformers.names import Names
from hf_kbit.integrations.transformers.report import logger

PATTERNS = "_keys_to_ignore_on_load_unexpected"


@dataclass(frozen=True)
class Ignored:
    """Where such a tensor is."""

    name: str
    file: str


def find(model, names: Names, tensors: Mapping[str, TensorHeader]) -> dict[str, Ignored]:
    """Those of a checkpoint, by the names that they are saved by. What is no float can be computed anew, and a part of
    a model, such as the encoder of an encoder-decoder, is to be without the rest."""
    if not _ignores(model):
        return {}
    is_ignored = re.compile("|".join(f"(?:{pattern})" for pattern in getattr(model, PATTERNS))).search
    found, dtypes = {}, set()
    for stored_name, tensor in tensors.items():
        targets, converted = names.targets(stored_name)
        unknown = not any(target in names for target in targets) and any(map(is_ignored, (stored_name, *targets)))
        if unknown and "F" in tensor.dtype:
            dtypes.add(tensor.dtype)
            found[stored_name if converted else targets[0]] = Ignored(stored_name, tensor.file)
    if narrow := dtypes - {"F64", "F32", "F16", "BF16"}:  # with scales, and nobody would know how they belong together
        logger.warning("hf_kbit: %d tensors in %s are not kept, such as %s", len(found), min(narrow), min(found))
        return {}
    return found


def find_for(model) -> dict[str, Ignored]:
    """Those of the checkpoint that a model in memory was loaded from."""
    files = _files_of(model) if _ignores(model) else []
    return find(model, Names(model), read_headers(files)) if files else {}


def read(ignored: Mapping[str, Ignored]) -> dict[str, torch.Tensor]:
    """The tensors themselves, in CPU memory; none of a file that is gone, after a warning."""
    by_file, tensors = defaultdict(dict), {}
    for name, place in ignored.items():
        by_file[place.file][name] = place.name
    for file, names in by_file.items():
        if not os.path.exists(file):
            logger.warning("hf_kbit: %d tensors are not saved, for %s is gone: %s", len(names), file, ", ".join(names))
            continue
        with safe_open(file, framework="pt") as stored:
            # Copies, for the file may be about to be written anew.
            tensors |= {name: stored.get_tensor(own).clone() for name, own in names.items()}
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
