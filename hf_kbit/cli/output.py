"""How commands print what they found, and how they end."""

import errno
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import Parameter, signature
from traceback import print_exception
from typing import Annotated

import typer

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MEMORY = ("can't allocate memory", "cannot allocate memory")  # torch's words, and the system's
TRACEBACK = Annotated[
    bool,
    typer.Option("--traceback", help="Show where an error comes from. Default: one line that says what is wrong."),
]
INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C ended


def line(label: str, text: str) -> None:
    """Prints a row of what a command found; rows that belong to the one before have no label."""
    typer.echo(f"{label:<13} {text}")


def in_one_line(name: str, command: Callable[..., None], interrupted: str = "") -> Callable[..., None]:
    """The command, which ends with one line of what is wrong, on stderr, instead of a traceback.

    An error that none of our checks is known to raise keeps its traceback, and the line says that it is a bug. With
    ``--traceback``, an option that each command gets here, all errors keep it.

    Args:
        name: of the command, as the user typed it.
        interrupted: what is to be said of a run that Ctrl-C ended.
    """

    @wraps(command)
    def run(*, traceback: bool, **options):
        try:
            command(**options)
        except KeyboardInterrupt:
            typer.echo(f"hf-kbit {name}: {interrupted or 'interrupted'}", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except typer.Exit:
            raise
        except Exception as error:
            reason, expected = _reason(error)
            if traceback or not expected:
                print_exception(error, file=sys.stderr)
            typer.echo(f"hf-kbit {name}: {reason}", err=True)
            raise typer.Exit(1) from None

    shown = signature(command)
    option = Parameter("traceback", Parameter.KEYWORD_ONLY, default=False, annotation=TRACEBACK)
    run.__signature__ = shown.replace(parameters=[*shown.parameters.values(), option])
    return run


def _reason(error: Exception) -> tuple[str, bool]:
    """What to say of an error, and whether it is one that can be expected."""
    import torch
    from safetensors import SafetensorError

    for cause in _causes(error):
        text = str(cause)
        if getattr(cause, "errno", None) in FULL or any(f"(os error {code})" in text for code in FULL):
            full = f"the disk is full, or a file must not be so large ({text})"
            return f"{full}; make room, then give the command again", True
        if isinstance(cause, torch.OutOfMemoryError):
            first = text.partition("\n")[0]
            return f"the GPU's memory is too small ({first}); free some, or compute with --device cpu", True
        short = isinstance(cause, MemoryError) or getattr(cause, "errno", None) == errno.ENOMEM
        if short or any(words in text.lower() for words in MEMORY):
            return f"memory is too small ({text or 'MemoryError'}); free some, or take a machine with more", True
    if isinstance(error, SafetensorError):
        return f"found a damaged safetensors file ({error}), expected a whole one; fetch or write it again", True
    if isinstance(error, ImportError | OSError | TypeError | ValueError):
        return str(error), True
    return (
        f"found an error that is not expected, {type(error).__name__}: {error}. Unless the files that were read are "
        "damaged, it is a bug of hf_kbit: please report the lines above, and what `hf-kbit info` prints"
    ), False


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
