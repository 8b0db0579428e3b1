"""Patterns for names of modules: regular expressions that cannot hang.

``re`` goes back and tries again, which takes ``([a-z.]+)+!`` longer than a life on a name of forty letters, and a
pattern may come with a model that somebody else made. So here a pattern is followed through a name for all places at
once: each part of it turns the set of places where it may begin into the set of those where it may end. No set has
more places than the name has letters, so the time is at most the length of the pattern times that of the name squared.
"""

import re
from collections.abc import Callable
from functools import cache
from itertools import repeat

MAX_DEPTH = 20  # of brackets within brackets

_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?[:=!])?|.", re.DOTALL)
_REPETITION = re.compile(r"(?:(?P<sign>[*+?])|\{(?=[\d,])(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\})(?P<lazy>\??)")
_CHOICE = re.compile(r"[(|*+?{]")  # without any of these ``re`` has nothing to try again, and it is quicker
_PLACES = ("^", "$", r"\A", r"\b", r"\B", r"\Z")  # what matches a place, not a letter
_LETTERS = (r"\d", r"\D", r"\s", r"\S", r"\w", r"\W")

Places = frozenset[int]
Part = Callable[[str, Places], Places]


def matches(module_name: str, pattern: str) -> bool:
    """Whether a pattern names a module, or a part of the model that the module is in.

    A pattern is a regular expression for one or more whole components of a dotted name, or the end of a name. What the
    patterns of other Transformers quantizers match from the start of a name, these match anywhere in it.

    >>> matches("model.layers.0.mlp.down_proj", "down_proj"), matches("model.layers.10.mlp", "model.layers.1")
    (True, False)
    >>> matches("model.vision_tower.layers.3.fc1", "vision_tower"), matches("model.layers.2.mlp", r"layers\\.[0-3]")
    (True, True)
    """
    if not _CHOICE.search(pattern):
        return re.search(rf"(^|\.)(?:{pattern})(\.|$)", module_name) is not None or module_name.endswith(pattern)
    components = frozenset({0, *(place + 1 for place, letter in enumerate(module_name) if letter == ".")})
    ends = _compiled(pattern)(module_name, components)
    return any(module_name[end : end + 1] in ("", ".") for end in ends) or module_name.endswith(pattern)


def check_pattern(pattern: object, name: str) -> None:
    """Raises if ``matches`` does not take a pattern.

    Raises:
        ValueError: it is no text, empty, no regular expression, or one of those that have no place here: with a
            backreference, a flag, a look behind, a named or atomic group; the message begins with ``name``.

    >>> check_pattern(r"layers\\.(0|1)\\.mlp", "module_bits")
    """
    try:
        if not isinstance(pattern, str) or not pattern:
            raise ValueError("neither text nor empty" if isinstance(pattern, str) else "no text")
        re.compile(f"(?:{pattern})")
        _compiled(pattern)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        shown = pattern if len(repr(pattern)) <= 100 else f"{str(pattern)[:100]}..."
        raise ValueError(f"{name}: found pattern {shown!r}, expected a regular expression ({error})") from None


@cache
def _compiled(pattern: str) -> Part:
    parser = _Parser(pattern)
    part = parser.alternatives(0)
    if parser.at < len(pattern):
        raise ValueError("unbalanced brackets")
    return part


class _Parser:
    """Reads a pattern that ``re`` has taken, from ``at`` on."""

    def __init__(self, pattern: str):
        self.pattern, self.at = pattern, 0

    def alternatives(self, depth: int) -> Part:
        if depth > MAX_DEPTH:
            raise ValueError(f"more than {MAX_DEPTH} brackets within each other")
        branches = [self.sequence(depth)]
        while self.pattern.startswith("|", self.at):
            self.at += 1
            branches.append(self.sequence(depth))
        return lambda text, begins: frozenset().union(*(branch(text, begins) for branch in branches))

    def sequence(self, depth: int) -> Part:
        parts = []
        while self.at < len(self.pattern) and self.pattern[self.at] not in "|)":
            parts.append(self.repeated(self.single(depth)))

        def follow(text: str, places: Places) -> Places:
            for part in parts:
                if not places:
                    break
                places = part(text, places)
            return places

        return follow

    def single(self, depth: int) -> Part:
        token = _TOKEN.match(self.pattern, self.at).group()
        self.at += len(token)
        if token.startswith("("):
            return self.group(token, depth)
        if token.startswith("\\") and token[1].isalnum() and token not in (*_PLACES, *_LETTERS):
            raise ValueError(f"{token} is not supported")
        match = re.compile(token).match
        if token in _PLACES:
            return lambda text, begins: frozenset(place for place in begins if match(text, place))
        return lambda text, begins: frozenset(place + 1 for place in begins if match(text, place))

    def group(self, opening: str, depth: int) -> Part:
        if self.pattern.startswith("?", self.at):
            raise ValueError(f"{self.pattern[self.at - 1 : self.at + 2]} is not supported")
        inner = self.alternatives(depth + 1)
        self.at += 1  # the closing bracket
        if opening == "(?=":
            return lambda text, begins: frozenset(place for place in begins if inner(text, frozenset({place})))
        if opening == "(?!":
            return lambda text, begins: frozenset(place for place in begins if not inner(text, frozenset({place})))
        return inner

    def repeated(self, part: Part) -> Part:
        found = _REPETITION.match(self.pattern, self.at)
        if found is None:
            return part
        self.at = found.end()
        if self.pattern.startswith("+", self.at):
            raise ValueError("a repetition that gives nothing back is not supported")
        if found["sign"]:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[found["sign"]]
        else:
            least = int(found["least"] or 0)
            most = int(found["most"]) if found["most"] else None if found["comma"] else least

        def follow(text: str, places: Places) -> Places:
            for _ in range(least):
                before, places = places, part(text, places)
                if places == before:
                    break
            reached = newest = places
            for _ in repeat(None) if most is None else range(most - least):
                newest = part(text, newest) - reached
                if not newest:
                    break
                reached |= newest
            return reached

        return follow
