"""The folder that ``hf-kbit quantize`` makes: all of a model or nothing that looks like one, and nobody else's files.

Until the model is whole, all that is written is in a folder inside, ``UNFINISHED``: ``lock``, held by the process that
works there; ``layers``, what a calibration has finished; ``model``, what is being saved, which becomes ``whole``. Then
the files move out, with ``config.json``, which makes a folder a model, last. If that is interrupted, the next run goes
on with it.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hf_kbit.files.durable import move_out, settle
from hf_kbit.files.finished import remove

UNFINISHED = ".hf-kbit-unfinished"


class Output:
    """A folder for a model, which this process alone writes.

    Attributes:
        layers: the folder for a calibration's finished layers.
        model: the folder to save the model in.
    """

    def __init__(self, folder: Path):
        self.folder, self.unfinished = folder, folder / UNFINISHED
        self.layers, self.model, self._whole = (self.unfinished / name for name in ("layers", "model", "whole"))

    def publish(self) -> None:
        """Moves the saved model out of the unfinished folder, and removes the layers of which it was made."""
        settle(*self.model.rglob("*"), self.model)
        os.replace(self.model, self._whole)
        settle(self.unfinished)
        self.move_out()

    def move_out(self) -> None:
        """Moves a whole model out, or what is left of it, if there is one."""
        if self._whole.is_dir():
            remove(self.layers)
            move_out(self._whole, self.folder, last="config.json")

    def check(self) -> None:
        """Refuses a folder with files that are not of an unfinished run."""
        if not self.folder.is_dir():
            if self.folder.exists() or self.folder.is_symlink():
                raise ValueError(f"{self.folder}: found something else, expected a folder, or a new name")
        elif other := {file.name for file in self.folder.iterdir()} - {UNFINISHED}:
            raise ValueError(
                f"{self.folder}: found files, {min(other)} for one, expected a new folder, an empty one, or that of a "
                "run that was not finished"
            )


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
            output.move_out()
            output.check()
            shutil.rmtree(output.model, ignore_errors=True)
            yield output
        finally:
            shutil.rmtree(output.model, ignore_errors=True)
            with suppress(OSError):  # where layers are left
                output.layers.rmdir()
            if not output.layers.exists():
                lock.unlink(missing_ok=True)
                for empty in (output.unfinished, *([folder] if made else [])):
                    with suppress(OSError):
                        empty.rmdir()
