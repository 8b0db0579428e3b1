"""``hf-kbit run``: other programs, where quantized models are known."""

import os
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated

import typer

# All that follows the program's name is its own, options too.
SETTINGS = {"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True}
CHILDREN = str(Path(__file__).parent / "children")  # has what the program's own processes import


def command(
    context: typer.Context,
    program: Annotated[
        str, typer.Argument(help="Name of a program that a Python package installed, such as lm-eval.")
    ],
) -> None:
    """Run another program, such as lm-eval or trl, so that it can load quantized models.

    All that follows the program's name is passed on to it. Python processes that it starts know quantized models too.
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
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILDREN, os.environ.get("PYTHONPATH")]))
    sys.exit(main())
