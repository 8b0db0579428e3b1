"""``hf-kbit lm-eval``: lm-eval's own command, where quantized models are known."""

import sys

import typer

from hf_kbit.cli.output import fail


def command(context: typer.Context) -> None:
    """Runs lm-eval's own command, with its own arguments, where quantized models are known."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        fail("lm-eval", f"found no package lm_eval, expected it: pip install lm_eval ({error})")
    sys.argv = ["lm-eval", *context.args]
    cli_evaluate()
