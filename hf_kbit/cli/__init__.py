"""The command ``hf-kbit``, a file for each of its commands."""

import typer

from hf_kbit.cli import eval, info, lm_eval, quantize

app = typer.Typer(help="Low-bit weights for Transformers.", no_args_is_help=True, add_completion=False)
app.command("info")(info.command)
app.command("eval")(eval.command)
app.command("quantize")(quantize.command)
app.command(
    "lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)(lm_eval.command)
