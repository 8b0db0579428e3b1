"""``hf-kbit run``: other programs, where quantized models are known."""

import os
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from importlib.metadata import entry_points
from pathlib import Path

CHILDREN = str(Path(__file__).parent / "children")  # has what the program's own processes import


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("program", help="Name of a program that a Python package installed, such as lm-eval.")
    parser.add_argument("arguments", nargs=REMAINDER, help="What the program is given, options too.")


def command(given: Namespace) -> int:
    """Run another program, such as lm-eval or trl, so that it can load quantized models.

    All that follows the program's name is passed on to it. Python processes that it starts know quantized models too.
    """
    found = entry_points(group="console_scripts", name=given.program)
    if not found:
        print(
            f"hf-kbit run: found no program {given.program!r} that a Python package of this environment installed; "
            "install the package that has it, as pip install lm_eval for lm-eval",
            file=sys.stderr,
        )
        return 1
    main = next(iter(found)).load()
    sys.argv = [given.program, *given.arguments]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILDREN, os.environ.get("PYTHONPATH")]))
    return main()
