"""The folder that ``hf-kbit quantize`` makes: all of a model or nothing that looks like one, and nobody else's files.

Until the model is whole, all that is written is in a folder inside, ``UNFINISHED``: ``lock``, held by the process that
works there; ``layers``, what a calibration has finished; ``model``, what is being saved. Then the files move out, with
``config.json``, which makes a folder a model, last; ``moving.json`` names them, should that be interrupted. What a
run that was killed after that has left is removed by the next one, which refuses the folder.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_kbit.calibration.resume import remove
from hf_kbit.durable import settle

UNFINISHED = ".hf-kbit-unfinished"
LAST = "config.json"


class Output:
    """A folder for a model, which this process alone writes.

    Attributes:
        layers: the folder for a calibration's finished layers.
        model: the folder to save the model in; it has the name of the whole, which goes into the model's card.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.unfinished = folder / UNFINISHED
        self.layers = self.unfinished / "layers"
        self._models, self._moving = self.unfinished / "model", self.unfinished / "moving.json"
        self.model = self._models / folder.resolve().name

    def publish(self) -> None:
        """Moves the saved model out of the unfinished folder, and removes the layers of which it was made."""
        files = sorted((file.relative_to(self.model) for file in self.model.rglob("*") if file.is_file()), key=str)
        files.sort(key=lambda file: str(file) == LAST)
        self._moving.write_text(json.dumps([str(file) for file in files]))
        settle(*(self.model / file for file in files), self._moving)
        for file in files:
            (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
            if str(file) == LAST:
                settle(*{(self.folder / moved).parent for moved in files})
            os.replace(self.model / file, self.folder / file)
        settle(self.folder)
        remove(self.layers)
        self._moving.unlink()

    def check(self) -> None:
        """Refuses a folder with files that are not of an unfinished run."""
        if not self.folder.is_dir():
            if self.folder.exists() or self.folder.is_symlink():
                raise ValueError(f"{self.folder}: found something else, expected a folder, or a new name")
            return
        ours = {UNFINISHED, *(Path(file).parts[0] for file in self._half_moved())}
        if other := {file.name for file in self.folder.iterdir()} - ours:
            raise ValueError(
                f"{self.folder}: found files, {min(other)} for one, expected a new folder, an empty one, or that of a "
                "run that was not finished"
            )

    def _half_moved(self) -> list[str]:
        """Files in the folder that a run had begun to move out when it was killed; none if all were."""
        with suppress(FileNotFoundError, ValueError, TypeError):
            names = json.loads(self._moving.read_text())
            if not self._all_moved():
                return [name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts]
        return []

    def _all_moved(self) -> bool:
        """Whether a run that was killed had moved all files out, so that the folder has a whole model."""
        return self._moving.exists() and (self.folder / LAST).exists() and not any(self._models.glob(f"*/{LAST}"))

    def clean(self) -> None:
        """Removes what a run has left that is of no use: of a save that was not finished, or of one that was."""
        if self._all_moved():
            remove(self.layers)
        for file in self._half_moved():
            (self.folder / file).unlink(missing_ok=True)
        self._moving.unlink(missing_ok=True)
        shutil.rmtree(self._models, ignore_errors=True)


@contextmanager
def claim(folder: Path) -> Iterator[Output]:
    """The folder, which no other process writes while this is open; it is made where it is missing. What a calibration
    has finished stays when it is left by an error; without such, nothing is left.

    Raises:
        ValueError: the folder has other files, or another process writes it.
    """
    output = Output(folder)
    if not output.unfinished.is_dir():
        output.check()  # before there is something of ours in it
    made = not folder.exists()
    output.unfinished.mkdir(parents=True, exist_ok=True)
    lock = output.unfinished / "lock"
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however it ends
            free = os.path.samestat(os.fstat(held.fileno()), lock.stat())  # not removed since by who had it before
        except (BlockingIOError, FileNotFoundError):
            free = False
        if not free:
            raise ValueError(f"{folder}: found another process that writes there, expected none; wait until it ends")
        try:
            output.check()
            output.clean()
            yield output
        finally:
            output.clean()
            with suppress(OSError):  # where layers are left
                output.layers.rmdir()
            if not output.layers.exists():
                lock.unlink(missing_ok=True)
                for empty in (output.unfinished, *([folder] if made else [])):
                    with suppress(OSError):
                        empty.rmdir()
