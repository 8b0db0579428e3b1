"""How commands print what they found, and how they end."""

from typing import NoReturn

import typer


def line(label: str, text: str) -> None:
    """Prints a row of what a command found; rows that belong to the one before have no label."""
    typer.echo(f"{label:<13} {text}")


def fail(command: str, reason: object) -> NoReturn:
    """Ends the command with its one line of what is wrong."""
    typer.echo(f"hf-kbit {command}: {reason}", err=True)
    raise typer.Exit(1) from None
