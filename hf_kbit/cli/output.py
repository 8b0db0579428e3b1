"""How commands print what they found, and what they say of an error."""

import errno

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MEMORY = ("can't allocate memory", "cannot allocate memory")  # torch's words, and the system's


def line(label: str, text: str) -> None:
    """Prints a row of what a command found; rows that belong to the one before have no label."""
    print(f"{label:<13} {text}", flush=True)


def reason(error: Exception) -> tuple[str, bool]:
    """What to say of an error, and whether it is one that can be expected."""
    import torch
    from safetensors import SafetensorError

    cause = error
    while cause is not None:
        text, code = str(cause), getattr(cause, "errno", None)
        if code in FULL or any(f"(os error {full})" in text for full in FULL):
            full = f"the disk is full, or a file must not be so large ({text})"
            return f"{full}; make room, then give the command again", True
        if isinstance(cause, torch.OutOfMemoryError):
            first = text.partition("\n")[0]
            return f"the GPU's memory is too small ({first}); free some, or compute with --device cpu", True
        short = isinstance(cause, MemoryError) or code == errno.ENOMEM
        if short or any(words in text.lower() for words in MEMORY):
            return f"memory is too small ({text or 'MemoryError'}); free some, or take a machine with more", True
        cause = cause.__cause__
    if isinstance(error, SafetensorError):
        return f"found a damaged safetensors file ({error}), expected a whole one; fetch or write it again", True
    if isinstance(error, ImportError | OSError | TypeError | ValueError):
        return str(error), True
    return (
        f"found an error that is not expected, {type(error).__name__}: {error}. Unless the files that were read are "
        "damaged, it is a bug of hf_kbit: please report the lines above, and what `hf-kbit info` prints"
    ), False
