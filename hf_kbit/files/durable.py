"""Files that stay, also if the power fails."""

import errno
import os
import shutil
from pathlib import Path


def settle(*paths: Path) -> None:
    """Waits until files, and names in folders, are on the disk, as far as the file system can say it of a folder."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def move_out(source: Path, target: Path, last: str) -> None:
    """Moves all files of a folder into another and removes the first. The file of the name ``last`` moves once all
    others are there, whenever the power fails; what was interrupted goes on when it is called again."""
    files = [file.relative_to(source) for file in source.rglob("*") if file.is_file()]
    for file in sorted(files, key=lambda file: str(file) == last):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        if str(file) == last:
            settle(*{(target / moved).parent for moved in files})
        os.replace(source / file, target / file)
    settle(target)
    shutil.rmtree(source)
