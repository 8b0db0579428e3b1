"""What a calibration has finished, on disk: a run that was killed goes on from there."""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_kbit.durable import settle
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.packed import Decoding, Packed
from hf_kbit.tensor import PACKED

RUN = "run.json"
PART = ".part"  # ends the name of a file that is being written
TUNING = "tuning."  # in the place of a layer's name, none of which ends so


class Finished:
    """A folder with a file for each finished layer of the model, all of one run.

    Args:
        folder: made where it is missing.
        digest: of all that the run's result depends on (``digest``).

    Raises:
        ValueError: the folder holds what a run with another digest has finished, or is no folder of a run.
    """

    def __init__(self, folder: Path, digest: str):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / RUN
        if record.exists():
            if self._recorded(record) != digest:
                raise ValueError(
                    f"{folder}: found what a run with another model, data, device or setting has finished, expected "
                    "this run's; take the same arguments to go on with it, or remove the folder"
                )
        elif any(file.suffix != PART for file in folder.iterdir()):
            raise ValueError(f"{folder}: found other files, expected an empty folder, or that of a killed run")
        else:
            _write(record, lambda file: file.write_text(json.dumps({"digest": digest})))

    def save(self, unit: str, layers: dict[str, KbitWeight]) -> None:
        """Keeps the quantized layers, by their names, of one layer of the model."""
        tensors = {f"{name}.{key}": x for name, layer in layers.items() for key, x in layer.packed.items()}
        self._save(unit, tensors, {name: layer.decoding.to_dict() for name, layer in layers.items()})

    def load(self, unit: str, layers: dict[str, KbitWeight], device: torch.device) -> bool:
        """Fills the layers with what was saved, on ``device``; False if nothing was.

        Raises:
            ValueError: the file is damaged, or holds other layers; the message names it.
        """
        remedy = "this file, and its layers are calibrated again"
        if (found := self._load(unit, remedy)) is None:
            return False
        tensors, described = found
        if {name for name in tensors if name.endswith(".weight")} != {f"{name}.weight" for name in layers}:
            self._refuse(unit, f"it holds other layers, {min(tensors, default='none')} for one", remedy)
        for name, layer in layers.items():
            decoding = Decoding.from_dict(described[name], layer.bits, f"{self._file(unit)}: {name}")
            stored = (tensors.get(f"{name}.{own}") for own in PACKED)
            planes, absmax, *columns = (tensor.to(device) for tensor in stored if tensor is not None)
            layer.load(Packed(planes, absmax, decoding, *columns))
        return True

    def save_state(self, tensors: dict[str, torch.Tensor], place: tuple[float, ...]) -> None:
        """Keeps where tuning is: tensors by name, and a few numbers."""
        self._save(TUNING, tensors, place)

    def load_state(self, tensors: dict[str, torch.Tensor]) -> tuple[float, ...] | None:
        """Fills the tensors with what was kept, and returns the numbers; None if nothing was.

        Raises:
            ValueError: the file is damaged; the message names it.
        """
        remedy = "it, and tuning starts anew"
        if (found := self._load(TUNING, remedy)) is None:
            return None
        if found[0].keys() != tensors.keys():
            self._refuse(TUNING, "it holds other tensors", remedy)
        for name, tensor in tensors.items():
            tensor.copy_(found[0][name])
        return tuple(found[1])

    def _save(self, unit: str, tensors: dict[str, torch.Tensor], others: object) -> None:
        """Keeps tensors by name, and what JSON holds."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        text = json.dumps(others)
        metadata = {"others": text, "digest": digest(sorted(tensors.items()), text)}
        _write(self._file(unit), lambda file: save_file(tensors, file, metadata))

    def _load(self, unit: str, remedy: str) -> tuple[dict[str, torch.Tensor], Any] | None:
        """What ``_save`` has kept, byte for byte, or None if there is nothing."""
        if not self._file(unit).exists():
            return None
        try:
            with safe_open(self._file(unit), "pt") as stored:
                metadata, tensors = stored.metadata() or {}, {name: stored.get_tensor(name) for name in stored.keys()}
        except (OSError, SafetensorError) as error:
            self._refuse(unit, str(error), remedy)
        if digest(sorted(tensors.items()), metadata.get("others")) != metadata.get("digest"):
            self._refuse(unit, "its tensors are not those that were written", remedy)
        return tensors, json.loads(metadata["others"])

    def _refuse(self, unit: str, problem: str, remedy: str) -> NoReturn:
        file = self._file(unit)
        raise ValueError(f"{file}: found it damaged ({problem}), expected what this run has written; remove {remedy}")

    @staticmethod
    def _recorded(record: Path) -> str:
        """The digest of the run that a folder is of."""
        try:
            found = json.loads(record.read_text())["digest"]
            if not isinstance(found, str):
                raise TypeError(f"digest: found {found!r}, expected text")
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(
                f"{record}: found it damaged ({type(error).__name__}: {error}), expected the record of a run; remove "
                f"the folder {record.parent} to start anew"
            ) from error
        return found

    def _file(self, unit: str) -> Path:
        return self.folder / f"{unit}.safetensors"


def _write(file: Path, write) -> None:
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
    """SHA-256 of named tensors with their dtypes and shapes, and of the ``repr`` of others.

    >>> digest([("w", torch.zeros(2))], 3) == digest([("w", torch.zeros(2))], 3) != digest([("w", torch.ones(2))], 3)
    True
    """
    found = hashlib.sha256(repr(others).encode())
    for name, tensor in tensors:
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().flatten().contiguous().view(torch.uint8).numpy())
    return found.hexdigest()
