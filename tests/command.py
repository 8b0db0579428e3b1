"""Runs the command ``hf-kbit`` in this process."""

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from unittest.mock import patch

from hf_kbit import cli


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed."""

    code: int
    stdout: str
    stderr: str


def hf_kbit_command(*arguments: object, said: str = "") -> Ended:
    """Runs it with these arguments, and ``said`` on its standard input."""
    with redirect_stdout(StringIO()) as stdout, redirect_stderr(StringIO()) as stderr:
        with patch("sys.stdin", StringIO(said)):
            try:
                code = cli.main([str(argument) for argument in arguments])
            except SystemExit as end:  # of argparse
                code = end.code
    return Ended(code, stdout.getvalue(), stderr.getvalue())


def succeed(*arguments: object, said: str = "") -> Ended:
    """The same, of a command that must end without an error."""
    ended = hf_kbit_command(*arguments, said=said)
    assert ended.code == 0, ended.stdout + ended.stderr
    return ended


def refuse(*arguments: object) -> str:
    """What a command says on stderr that must end with an error that can be expected."""
    ended = hf_kbit_command(*arguments)
    assert ended.code in (1, 2) and "Traceback" not in ended.stderr, ended.stderr
    assert f"hf-kbit {arguments[0]}: " in ended.stderr
    return ended.stderr
