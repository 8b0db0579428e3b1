"""``hf-kbit run``: other programs, where quantized models are known."""

import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

# All that follows the program's name is its own, options too.
SETTINGS = {"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True}


def command(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(help="Name of a program that a Python package installed, such as lm-eval.")
    ],
) -> None:
    """Runs another program, with its own arguments, where quantized models are known.

    The program runs in this process. What it starts as processes of its own does not know quantized models.
    """
    found = entry_points(group="console_scripts", name=program)
    if not found:
        typer.echo(
            f"hf-kbit run: found no program {program!r} that a Python package of this environment installed; install "
            f"the package that has it, as pip install lm_eval for lm-eval",
            err=True,
        )
        raise typer.Exit(1)
    main = next(iter(found)).load()
    sys.argv = [program, *context.args]
    sys.exit(main())
