"""Patterns for names of modules: regular expressions, and none of them can hang.

A pattern may come with a model that somebody else made, and ``([a-z.]+)+!`` would take ``re`` longer than a life on a
name of forty letters. ``regex``, which Transformers needs too, gives up after a time.
"""

import math
import re
from functools import cache

import regex

MOST_REPEATED = 10_000  # the product of all counts, as in a{3}: compiling spells them out
MOST_SECONDS = 1.0  # that a pattern may take on one name


@cache
def _compiled(pattern: str) -> regex.Pattern:
    return regex.compile(rf"(?:^|\.)(?:{pattern})(?:\.|$)")


def matches(module_name: str, pattern: str) -> bool:
    """Whether a pattern names a module, or a part of the model that the module is in.

    A pattern is a regular expression for one or more whole components of a dotted name, or the end of a name. What the
    patterns of other Transformers quantizers match from the start of a name, these match anywhere in it.

    Raises:
        ValueError: finding it out takes too long.

    >>> matches("model.layers.0.mlp.down_proj", "down_proj"), matches("model.layers.10.mlp", "model.layers.1")
    (True, False)
    >>> matches("model.vision_tower.layers.3.fc1", "vision_tower"), matches("model.layers.2.mlp", r"layers\\.[0-3]")
    (True, True)
    """
    try:
        found = _compiled(pattern).search(module_name, timeout=MOST_SECONDS)
    except TimeoutError:
        raise ValueError(
            f"{pattern!r}: found a pattern that takes over {MOST_SECONDS:g} s on {module_name}, expected one without "
            "repetitions of repetitions"
        ) from None
    return found is not None or module_name.endswith(pattern)


def exactly(module_name: str) -> str:
    """The pattern for one module, and nothing else: a name as it is stands for what is in a module too, and for other
    names that end in it.

    >>> pattern = exactly("blocks.0")
    >>> pattern
    '^blocks\\\\.0$'
    >>> [matches(name, pattern) for name in ("blocks.0", "blocks.0.proj", "more.blocks.0", "more_blocks.0")]
    [True, False, False, False]
    """
    return f"^{re.escape(module_name)}$"


def check_pattern(pattern: object, name: str) -> None:
    """Raises if ``matches`` does not take a pattern.

    Raises:
        ValueError: it is no text, empty or no regular expression, or repeats too much; the message begins with
            ``name``.

    >>> check_pattern(r"layers\\.(0|1)\\.mlp", "module_bits")
    """
    try:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError("it is empty" if pattern == "" else "it is no text")
        if math.prod(max(int(count), 1) for count in re.findall(r"(?<=[{,])\d+(?=[,}])", pattern)) > MOST_REPEATED:
            raise ValueError(f"it repeats more than {MOST_REPEATED:,} times")
        _compiled(pattern)
    except (regex.error, RecursionError, ValueError) as error:
        shown = pattern if len(repr(pattern)) <= 100 else f"{str(pattern)[:100]}..."
        raise ValueError(f"{name}: found pattern {shown!r}, expected a regular expression ({error})") from None
