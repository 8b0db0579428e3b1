"""Files that stay, also if the power fails."""

import errno
import os
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
