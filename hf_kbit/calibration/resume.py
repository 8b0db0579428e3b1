"""What a calibration has finished, on disk: a run that was killed goes on from there."""

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_kbit.durable import settle
from hf_kbit.nn.packed import Decoding, Packed
from hf_kbit.nn.weight import KbitWeight
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
        tensors, described = {}, {}
        for name, layer in layers.items():
            tensors |= {f"{name}.{own}": part.cpu() for own, part in layer.packed.items()}
            described[name] = layer.decoding.to_dict()
        metadata = {"layers": json.dumps(described)}
        metadata["digest"] = digest(sorted(tensors.items()), metadata["layers"])
        _write(self._file(unit), lambda file: save_file(tensors, file, metadata))

    def load(self, unit: str, layers: dict[str, KbitWeight], device: torch.device) -> bool:
        """Fills the layers with what was saved, on ``device``; False if nothing was.

        Raises:
            ValueError: the file is damaged, or holds other layers; the message names it.
        """
        if not self._file(unit).exists():
            return False
        self._check(unit, layers)
        with safe_open(self._file(unit), "pt", device=str(device)) as stored:
            described = json.loads(stored.metadata()["layers"])
            for name, layer in layers.items():
                decoding = Decoding.from_dict(described[name], layer.bits, f"{self._file(unit)}: {name}")
                names = [f"{name}.{own}" for own in PACKED]
                planes, absmax, *columns = (stored.get_tensor(own) for own in names if own in stored.keys())
                layer.load(Packed(planes, absmax, decoding, *columns))
        return True

    def save_state(self, tensors: dict[str, torch.Tensor], place: tuple[float, ...]) -> None:
        """Keeps where tuning is: tensors by name, and a few numbers."""
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        metadata = {"place": json.dumps(place)}
        metadata["digest"] = digest(sorted(tensors.items()), metadata["place"])
        _write(self._file(TUNING), lambda file: save_file(tensors, file, metadata))

    def load_state(self, tensors: dict[str, torch.Tensor]) -> tuple[float, ...] | None:
        """Fills the tensors with what was kept, and returns the numbers; None if nothing was.

        Raises:
            ValueError: the file is damaged; the message names it.
        """
        file = self._file(TUNING)
        if not file.exists():
            return None
        try:
            with safe_open(file, "pt") as stored:
                metadata, found = stored.metadata() or {}, {name: stored.get_tensor(name) for name in stored.keys()}
            whole = digest(sorted(found.items()), metadata.get("place")) == metadata.get("digest")
        except (OSError, SafetensorError):
            whole = False
        if not whole or found.keys() != tensors.keys():
            raise ValueError(
                f"{file}: found it damaged, expected what this run has written; remove it, and tuning starts anew"
            )
        for name, tensor in tensors.items():
            tensor.copy_(found[name])
        return tuple(json.loads(metadata["place"]))

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

    def _check(self, unit: str, layers: Iterable[str]) -> None:
        """Refuses the file of a unit if it is not, byte for byte, what was written for these layers."""
        file, expected = self._file(unit), {f"{name}.weight" for name in layers}
        try:
            with safe_open(file, "pt") as stored:
                metadata, tensors = stored.metadata() or {}, {name: stored.get_tensor(name) for name in stored.keys()}
        except (OSError, SafetensorError) as error:
            problem = str(error)
        else:
            whole = digest(sorted(tensors.items()), metadata.get("layers")) == metadata.get("digest")
            problem = "its tensors are not those that were written" if not whole else ""
            if not problem and {name for name in tensors if name.endswith(".weight")} != expected:
                problem = f"it holds other layers, {min(tensors, default='none')} for one"
        if problem:
            raise ValueError(
                f"{file}: found it damaged ({problem}), expected what this run has written; remove this file, and its "
                "layers are calibrated again"
            )

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
