"""The files of a quantized model: read, checked before a byte of them is loaded, and sealed.

A seal says of a file which tensors, and which config, were saved with it. All files of a save are written first, with
``unsealed``; ``seal`` then completes them. A save that was killed in between has files without a seal.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from hf_kbit.format.decoding import COLUMNS, WORDS, Decoding
from hf_kbit.format.errors import brief, refuse
from hf_kbit.format.kinds import KINDS, NAMES
from hf_kbit.format.model import ModelFormat

WEIGHT_SUFFIX = ".weight"
PACKED_SUFFIXES = tuple(f".{name}" for name in NAMES)
DTYPES = {torch.int32: "I32", torch.uint8: "U8", torch.int16: "I16", torch.float16: "F16"}  # in safetensors' words

DIGEST = "kbit_digest"  # ModelFormat.digest of the config saved with the file
TENSORS = "kbit_tensors"  # tensors_digest of all files of the save
NOT_SEALED = "0" * 64
SAMPLE = 1024  # bytes, of the beginning and of the end of a tensor: both are read from the disk anyhow
SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")
METADATA = re.compile(rb'.{8}\{"__metadata__":(\{[^{}]*\})', re.DOTALL)
HEAD = 1024  # bytes of a file that have its metadata, if hf_kbit has saved it


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorHeader:
    """A tensor as a safetensors header describes it; ``dtype`` is safetensors' name, such as ``I32``."""

    dtype: str
    shape: tuple[int, ...]
    file: str = field(default="", compare=False)

    def __str__(self):
        return f"{self.dtype} {list(self.shape)}"

    def can_become(self, tensor: torch.Tensor, shapes: bool = True) -> bool:
        """Whether loading it into ``tensor`` keeps its meaning: same shape (if asked), and a float if that is one."""
        same_shape = self.shape == tuple(tensor.shape)
        return (same_shape or not shapes) and ("F" in self.dtype) == tensor.is_floating_point()


def model_files(folder: Path) -> list[str]:
    """The files of a model that ``save_pretrained`` wrote, among others that may be in the folder."""
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if not index.exists():
        return [str(folder / SAFE_WEIGHTS_NAME)]
    return [str(folder / name) for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def read_headers(files: Iterable[str | os.PathLike]) -> dict[str, TensorHeader]:
    """All tensors of safetensors files, by name; a ValueError names a file that is none, that is damaged, with the
    first tensor that is not all there, or that holds a tensor which another one holds."""
    tensors = {}
    for file in map(str, files):
        if not file.endswith(".safetensors"):
            raise ValueError(f"{file}: found another format, expected safetensors, the only one of a kbit checkpoint")
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():
                    if name in tensors:
                        both = f"{tensors[name].file} and in {file}"
                        raise ValueError(f"{brief(name)}: found in {both}, expected it in one")
                    entry = stored.get_slice(name)
                    tensors[name] = TensorHeader(entry.get_dtype(), tuple(entry.get_shape()), file)
        except SafetensorError as error:
            raise ValueError(f"{file}: damaged or cut short{_first_cut(file)} ({brief(str(error))})") from None
    return tensors


def _first_cut(file: str | os.PathLike) -> str:
    """Says which tensor the end of a damaged file runs through, if its header can still be read."""
    size = os.path.getsize(file)
    try:
        with open(file, "rb") as stream:
            header, begin = _header(stream)
        ends = sorted((begin + entry["data_offsets"][1], name) for name, entry in header.items())
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return ""
    cut = ((name, end) for end, name in ends if end > size)
    return next((f" at tensor {brief(name)}: found {size} bytes, expected {end}" for name, end in cut), "")


def _header(stream) -> tuple[dict[str, Any], int]:
    """The entries of a file's tensors, and where its data begins."""
    length = int.from_bytes(stream.read(8), "little")
    header = json.loads(stream.read(min(length, os.fstat(stream.fileno()).st_size)))
    header.pop("__metadata__", None)
    return header, 8 + length


def read(files: Iterable[str | os.PathLike]) -> dict[str, torch.Tensor]:
    """All tensors, mapped from the files: memory takes what is read of them."""
    tensors = {}
    for file in files:
        with safe_open(file, "pt") as stored:
            tensors |= {name: stored.get_tensor(name) for name in stored.keys()}
    return tensors


def read_some(files: Mapping[str, str], names: Iterable[str]) -> list[torch.Tensor]:
    """Some tensors; ``files`` has the file of each."""
    found = []
    for name in names:
        with safe_open(files[name], "pt") as stored:
            found.append(stored.get_tensor(name))
    return found


def read_columns(files: Mapping[str, str], packed: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Column scales of packed modules, by the names of their weights in the model."""
    found = {}
    for name, stored_name in packed.items():
        columns = f"{stored_name}.{COLUMNS}"
        if columns in files:
            with safe_open(files[columns], framework="pt") as stored:
                found[name + WEIGHT_SUFFIX] = stored.get_tensor(columns)
    return found


# --- checking -------------------------------------------------------------------------------------


def packed_modules(tensors: Mapping[str, TensorHeader]) -> list[str]:
    """Names of the modules of which there are packed tensors; a ValueError names what is missing beside others."""
    modules, problems = {}, []
    for name in sorted(tensors):
        module, _, own = name.rpartition(".")
        if kind := next((each for each in KINDS if own in each.names), None):
            main, marks = f"{module}.{kind.names[0]}", f"{module}.{kind.marks}"
            if main in tensors and marks in tensors:
                modules[module] = None
            elif own != WORDS or tensors[name].dtype == "I32":
                absent = main if marks in tensors else marks
                problems.append(f"{absent}: missing, expected beside {name}, which is {tensors[name]}")
    refuse(problems)
    return list(modules)


def compare_packed(
    name: str, tensors: Mapping[str, TensorHeader], shape: tuple[int, ...], decoding: Decoding
) -> list[str]:
    """What is wrong with the packed tensors of the layer that has this name in the checkpoint, for a weight of this
    shape that is to decode so."""
    expected = {own: TensorHeader(DTYPES[dtype], size) for own, (dtype, size) in decoding.layout(shape).items()}
    of_what = f"for a {[*shape]} weight in {decoding.bits} bits, {decoding.described}"
    return [
        f"{name}.{own}: found {tensors.get(f'{name}.{own}', 'none')}, expected {expected.get(own, 'none')} {of_what}"
        for own in decoding.names
        if tensors.get(f"{name}.{own}") != expected.get(own)
    ]


def check_save(files: Iterable[str | os.PathLike], stored: ModelFormat, packed: Iterable[str]) -> None:
    """Refuses a config that speaks of other modules than are packed, and files that were not all saved together and
    with this config. Files of older versions have a digest of the config alone, or none."""
    unknown = stored.layers.keys() - set(packed)
    refuse([f"{name}: in layers of the quantization config, not in the checkpoint" for name in sorted(unknown)])
    metadata = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            metadata[file] = opened.metadata() or {}
    if any(DIGEST in found for found in metadata.values()):
        why = "was a save cut short, or bits, transform, levels or layers of quantization_config changed?"
        _compare(DIGEST, metadata, stored.digest(), "tensors saved with this config", why)
    sealed = {file: found for file, found in metadata.items() if found.get(TENSORS, NOT_SEALED) != NOT_SEALED}
    if sealed:
        why = "was a save cut short, or a tensor changed? Of which no digest tells: save or download the model again"
        _compare(TENSORS, sealed, tensors_digest(metadata), "files of one save, as it left them", why)


def _compare(key: str, metadata: Mapping[Any, Mapping[str, str]], expected: str, what: str, why: str) -> None:
    others = [f"{file}: found {key} {m.get(key)}" for file, m in metadata.items() if m.get(key) != expected]
    refuse(others, f"expected {what}, of {key} {expected}; {why}")


# --- sealing --------------------------------------------------------------------------------------


def unsealed(stored: ModelFormat) -> dict[str, str]:
    """Metadata for each file of a save, to be completed by ``seal``."""
    return {DIGEST: stored.digest(), TENSORS: NOT_SEALED}


def seal(directory: str | os.PathLike) -> None:
    """Completes the metadata of all files that were just saved with ``unsealed``, and puts it in order: the same model
    shall give the same bytes, and safetensors leaves the order to chance. Other files stay as they are."""
    saves = defaultdict(dict)
    for path in sorted(Path(directory).glob("*.safetensors")):
        with path.open("rb") as stream:
            found = METADATA.match(stream.read(HEAD))
        if found and DIGEST.encode() in found[1]:
            saves[SHARD.sub("", path.name)][path] = found
    for files in saves.values():
        entries = {path: json.loads(found[1]) for path, found in files.items()}
        not_sealed = any(metadata.get(TENSORS) == NOT_SEALED for metadata in entries.values())
        digest = {TENSORS: tensors_digest(files)} if not_sealed else {}
        for path, metadata in entries.items():
            text = json.dumps(dict(sorted((metadata | digest).items())), separators=(",", ":")).encode()
            if len(text) == len(files[path][1]):  # as of all that hf_kbit has saved
                with path.open("r+b") as stream:
                    stream.seek(files[path].start(1))
                    stream.write(text)


def tensors_digest(files: Iterable[str | os.PathLike]) -> str:
    """SHA-256 over the names, dtypes, shapes and samples of all tensors, in order of names, as docs/format.md defines
    it; the same however the tensors are spread over files."""
    found = {}
    for file in files:
        with open(file, "rb") as stream:
            header, begin = _header(stream)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                line = " ".join(["tensor", name, entry["dtype"], *map(str, entry["shape"])])
                start, end = (begin + at for at in entry["data_offsets"])
                found[name] = f"{line}\n".encode(), *_samples(stream, start, end)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(b"".join(found[name]))
    return digest.hexdigest()


def _samples(stream, start: int, end: int) -> Iterator[bytes]:
    stream.seek(start)
    first = stream.read(min(SAMPLE, end - start))
    stream.seek(max(start + len(first), end - SAMPLE))
    yield first
    yield stream.read(end - stream.tell())
