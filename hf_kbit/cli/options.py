"""Options that several commands have: a dataclass holds them, and each of its fields is an option in the terminal."""

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps


def flat(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer reads it: with the fields of a dataclass in place of each parameter that is one."""
    given = inspect.signature(command).parameters.values()
    groups = {parameter.name: parameter.annotation for parameter in given if is_dataclass(parameter.annotation)}

    @wraps(command)
    def run(**options):
        for name, group in groups.items():
            options[name] = group(**{field.name: options.pop(field.name) for field in fields(group)})
        command(**options)

    shown = []
    for parameter in given:
        group = groups.get(parameter.name)
        shown += inspect.signature(group).parameters.values() if group else [parameter]
    run.__signature__ = inspect.Signature([one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in shown])
    return run
