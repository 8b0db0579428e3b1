"""The command ``hf-kbit``, a file for each of its commands.

What takes seconds to import is imported by the commands that need it, when they run: ``--help`` is there at once.
"""

import sys
from argparse import ArgumentParser
from inspect import getdoc
from traceback import print_exception

import hf_kbit
from hf_kbit.cli import bench, chat, eval, export, info, quantize, run
from hf_kbit.cli.output import reason

COMMANDS = {
    **{"quantize": quantize, "chat": chat, "bench": bench, "eval": eval, "run": run},
    **{"export": export, "info": info},
}
ABOUT = (
    "Language models in 2 to 5 bits: quantize them, talk to them, measure them. For example: hf-kbit quantize "
    "Qwen/Qwen3-0.6B qwen3-4bit, then hf-kbit chat qwen3-4bit"
)
INTERRUPTED = 130  # what a shell expects of a command that Ctrl-C ended


def parser() -> ArgumentParser:
    """Of the command line. A command's module has ``add_options`` and ``command``, which takes what was parsed."""
    found = ArgumentParser("hf-kbit", description=ABOUT, allow_abbrev=False)
    found.add_argument(
        "--version", action="version", version=hf_kbit.__version__, help="Print the version of hf_kbit and end."
    )
    commands = found.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, module in COMMANDS.items():
        about = getdoc(module.command)
        own = commands.add_parser(name, help=about.partition("\n")[0], description=about, allow_abbrev=False)
        module.add_options(own)
        if module is not run:
            own.add_argument(
                "--traceback",
                action="store_true",
                help="Show where an error comes from. Default: one line that says what is wrong.",
            )
        own.set_defaults(command=module.command, name=name)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns the exit code. An error is one line of what is wrong, on stderr; one that none of our
    checks is known to raise keeps its traceback, and the line says that it is a bug.
    """
    given = parser().parse_args((sys.argv[1:] if arguments is None else arguments) or ["--help"])
    if given.command is run.command:
        return run.command(given)  # whose errors are those of another program
    try:
        given.command(given)
        return 0
    except KeyboardInterrupt:
        print(f"hf-kbit {given.name}: {getattr(given, 'interrupted', 'interrupted')}", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        said, expected = reason(error)
        if given.traceback or not expected:
            print_exception(error)
        print(f"hf-kbit {given.name}: {said}", file=sys.stderr)
        return 1
