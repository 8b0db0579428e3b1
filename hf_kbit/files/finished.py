"""What a run has finished of a model, on disk: one that was killed goes on from there."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_kbit.files.durable import settle

RUN = "run.json"
PART = ".part"  # ends the name of a file that is being written


class Finished:
    """A folder with a file for each finished part of a model, all of one run, which has the ``digest`` of all that its
    result depends on. A folder of another run is refused, and one of something else."""

    def __init__(self, folder: Path, digest: str):
        self.folder, self.digest = folder, digest
        folder.mkdir(parents=True, exist_ok=True)
        record, text = folder / RUN, json.dumps({"digest": digest})
        if record.exists():
            if record.read_bytes() != text.encode():
                raise ValueError(
                    f"{folder}: found what a run with another model, data, device or setting has finished, or a "
                    f"damaged {RUN}, expected this run's; take the same arguments to go on with it, or remove the "
                    "folder"
                )
        elif any(file.suffix != PART for file in folder.iterdir()):
            raise ValueError(f"{folder}: found other files, expected an empty folder, or that of a killed run")
        else:
            _write(record, lambda file: file.write_text(text))

    def save(self, name: str, tensors: dict[str, torch.Tensor], others: Any) -> None:
        """Keeps tensors by name, and what JSON holds."""
        tensors = {own: tensor.detach().cpu().contiguous() for own, tensor in tensors.items()}
        text = json.dumps(others)
        metadata = {"others": text, "digest": self._digest(name, tensors, text)}
        _write(self._file(name), lambda file: save_file(tensors, file, metadata))

    def load(self, name: str) -> tuple[dict[str, torch.Tensor], Any] | None:
        """What ``save`` has kept, mapped from its file, or None if there is nothing; a ValueError names a file that is
        damaged."""
        file = self._file(name)
        if not file.exists():
            return None
        try:
            with safe_open(file, "pt") as stored:
                metadata, tensors = stored.metadata() or {}, {own: stored.get_tensor(own) for own in stored.keys()}
            problem = "its tensors are not those that were written"
        except (OSError, SafetensorError) as error:
            metadata, tensors, problem = {}, {}, str(error)
        if self._digest(name, tensors, metadata.get("others")) != metadata.get("digest"):
            raise ValueError(
                f"{file}: found it damaged ({problem}), expected what this run has written; remove this file, and "
                "what it is of is quantized again"
            )
        return tensors, json.loads(metadata["others"])

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _digest(self, name: str, tensors: dict[str, torch.Tensor], text: str | None) -> str:
        return digest(sorted(tensors.items()), self.digest, name, text)


def _write(file: Path, write: Callable[[Path], object]) -> None:
    """All of the file or nothing, whenever the process is killed or the power fails."""
    unfinished = file.with_name(file.name + PART)
    write(unfinished)
    settle(unfinished)
    os.replace(unfinished, file)


def remove(folder: Path) -> None:
    """Removes what a run has written into its folder, and the folder, if nothing else is in it."""
    if (folder / RUN).is_file():
        for file in (*folder.glob("*.safetensors"), *folder.glob(f"*{PART}"), folder / RUN):
            file.unlink()
        with suppress(OSError):
            folder.rmdir()


def digest(tensors: Iterable[tuple[str, torch.Tensor]], *others: object) -> str:
    """SHA-256 of named tensors with their dtypes and shapes, and of the ``repr`` of others."""
    found = hashlib.sha256(repr(others).encode())
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()
