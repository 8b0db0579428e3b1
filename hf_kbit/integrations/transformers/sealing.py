"""The digests in the files of a checkpoint, which tell whether files, and the ``config.json`` beside them, are of one
save.

A file gets them in two steps, for all files have to be there before what they hold together is known: ``unsealed`` is
what they are saved with, ``seal`` completes it. A save that was killed in between leaves files that are not sealed.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hf_kbit.config import KbitConfig
from hf_kbit.integrations.transformers.checkpoint import refuse

DIGEST = "kbit_digest"  # KbitConfig.digest of the config.json saved with the file
TENSORS = "kbit_tensors"  # tensors_digest of all files of the save
NOT_SEALED = "0" * 64
SAMPLE = 1024  # bytes, of the beginning and of the end of a tensor: both are read from the disk anyhow

SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.safetensors$)")
METADATA = re.compile(rb'.{8}\{"__metadata__":(\{[^{}]*\})', re.DOTALL)
HEAD = 1024  # bytes of a file that have its metadata, if hf_kbit has saved it


def unsealed(config: KbitConfig) -> dict[str, str]:
    """Metadata for each file of a save with this ``quantization_config``, to be completed by ``seal``."""
    return {DIGEST: config.digest(), TENSORS: NOT_SEALED}


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
    """SHA-256 over the names, dtypes, shapes and samples of all tensors in safetensors files, in order of names; as
    docs/format.md has it, and the same however they are spread over files."""
    found = {}
    for file in files:
        with open(file, "rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            begin = stream.tell()
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                found[name] = _line(name, entry) + _sample(stream, *(begin + at for at in entry["data_offsets"]))
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(found[name])
    return digest.hexdigest()


def _line(name: str, entry: dict[str, Any]) -> bytes:
    return " ".join(["tensor", name, entry["dtype"], *map(str, entry["shape"])]).encode() + b"\n"


def _sample(stream, start: int, end: int) -> bytes:
    stream.seek(start)
    first = stream.read(min(SAMPLE, end - start))
    stream.seek(max(start + len(first), end - SAMPLE))
    return first + stream.read(end - stream.tell())


def check_digest(files: Iterable[str], config: KbitConfig) -> None:
    """Compares the digests in each file with what the config beside it says of decoding, and with the tensors of all.
    Files of old have the first alone, or none.

    Raises:
        ValueError: a file has another one, or only some have the first: config and files are not of the same save.
    """
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as stored:
            found[file] = stored.metadata() or {}
    if any(DIGEST in metadata for metadata in found.values()):
        expected = config.digest()
        others = [f"{file}: found {DIGEST} {m.get(DIGEST)}" for file, m in found.items() if m.get(DIGEST) != expected]
        refuse(others, f"expected tensors saved with this config, of {DIGEST} {expected}; was a save cut short?")
    sealed = {file: m[TENSORS] for file, m in found.items() if m.get(TENSORS, NOT_SEALED) != NOT_SEALED}
    if sealed:
        expected = tensors_digest(found)
        others = [f"{file}: found {TENSORS} {digest}" for file, digest in sealed.items() if digest != expected]
        refuse(
            others,
            f"expected files of one save, as it left them, of {TENSORS} {expected}; was a save cut short, or a tensor "
            "changed? Save the model again",
        )
