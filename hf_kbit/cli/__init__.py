"""The command ``hf-kbit``, a file for each of its commands.

What takes seconds to import is imported by the commands that need it, when they run: ``--help`` is there at once.
"""

from typing import Annotated

import typer

import hf_kbit
from hf_kbit.cli import bench, chat, eval, info, quantize, run
from hf_kbit.cli.options import flat
from hf_kbit.cli.output import in_one_line

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(hf_kbit.__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version of hf_kbit and end.")
    ] = False,
) -> None:
    """Language models in 2 to 5 bits: quantize them, talk to them, measure them.

    For example: hf-kbit quantize Qwen/Qwen3-0.6B qwen3-4bit, then hf-kbit chat qwen3-4bit
    """


app.command("quantize")(in_one_line("quantize", flat(quantize.command), quantize.INTERRUPTED))
app.command("chat")(in_one_line("chat", flat(chat.command)))
app.command("bench")(in_one_line("bench", flat(bench.command)))
app.command("eval")(in_one_line("eval", flat(eval.command)))
app.command("run", context_settings=run.SETTINGS)(run.command)
app.command("info")(in_one_line("info", info.command))
