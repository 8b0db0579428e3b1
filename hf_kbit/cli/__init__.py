"""The command ``hf-kbit``, a file for each of its commands."""

from typing import Annotated

import typer

import hf_kbit
from hf_kbit.cli import eval, info, quantize, run
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version of hf_kbit.")
    ] = False,
) -> None:
    """Low-bit weights for Transformers."""


app.command("info")(in_one_line("info", info.command))
app.command("eval")(in_one_line("eval", eval.command))
app.command("quantize")(in_one_line("quantize", quantize.command, quantize.INTERRUPTED))
app.command("run", context_settings=run.SETTINGS)(run.command)
