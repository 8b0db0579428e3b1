"""``python -m hf_kbit.cli``."""

from hf_kbit.cli import app

app()
