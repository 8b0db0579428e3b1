"""Patterns for names of modules: regular expressions, and none of them can hang.

A pattern may come with a model that somebody else made, and ``([a-z.]+)+!`` would take ``re`` longer than a life on a
name of forty letters. ``regex``, which Transformers needs too, gives up after a time. But it compiles a group again
for each time that it repeats, so what that comes to is bounded here. And ``(?R)``, which only ``regex`` knows, takes
all memory, so a pattern must be one for ``re`` too. A pattern that is a name is looked up, however many there are.
"""

import re
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache

import regex

MOST_SECONDS = 10.0  # of a CPU, that all patterns may take on all names of a model
MOST_LETTERS = 100_000  # of all regular expressions, as _letters counts: compiled in a second
OVERHEAD = 100  # letters that any pattern takes as long as to compile
MOST_KINDS = 1000  # of names that are looked up; others count as regular expressions
NAME = re.compile(r"(\^?)((?:[\w-]|\\?\.|\\-)+)(\$?)")
# An escape, a set of letters, a comment, a quantifier, or a letter.
TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^]\\])*\]|\(\?#[^)]*\)|\{[\d,]+\}|.", re.DOTALL)
VERBOSE = re.compile(r"\(\?[\w-]*x")


class Patterns:
    """Patterns in an order, and what each of them names.

    A pattern is a regular expression for one or more whole components of a dotted name, or the end of a name. What the
    patterns of other Transformers quantizers match from the start of a name, these match anywhere in it.

    Args:
        patterns: such as ``"down_proj"``, ``"layers.0"`` and ``r"layers\\.[0-3]\\.mlp"``.
        argument: what the patterns are of; errors begin with it.

    Raises:
        ValueError: one is no text, empty or no regular expression, or all of them come to too many letters. From the
            methods: to find it out takes too long.

    >>> patterns = Patterns(["down_proj", r"layers\\.[0-3]", "lm_head"])
    >>> list(patterns.naming("layers.2.mlp.down_proj")), patterns.unused(["layers.2.mlp.down_proj"])
    (['down_proj', 'layers\\\\.[0-3]'], ['lm_head'])
    """

    def __init__(self, patterns: Iterable[str], argument: str = "patterns"):
        self._patterns, self._seconds, letters = list(patterns), MOST_SECONDS, 0
        self._names = _Names()
        self._expressions: dict[int, regex.Pattern] = {}  # by their places in the order
        for place, pattern in enumerate(self._patterns):
            try:
                if not isinstance(pattern, str) or not pattern:
                    raise ValueError("it is empty" if pattern == "" else "it is no text")
                if self._names.add(pattern, place):
                    continue
                letters += _letters(pattern)
                if letters > MOST_LETTERS:
                    raise ValueError(f"what repeats written out, all up to it have over {MOST_LETTERS:,} letters")
                self._expressions[place] = _compiled(pattern)
            except (re.error, regex.error, RecursionError, ValueError) as error:
                expected = f"expected a regular expression ({error})"
                raise ValueError(f"{argument}: found pattern {shown(pattern)}, {expected}") from None

    def naming(self, module_name: str) -> Iterator[str]:
        """The patterns that name a module, or a part of the model that the module is in, in their order."""
        found = self._names.places(module_name)
        for place in sorted(found | self._expressions.keys()):
            if place in found or self._matches(place, module_name):
                yield self._patterns[place]

    def unused(self, module_names: Iterable[str]) -> list[str]:
        """The patterns that name none of the modules."""
        names = list(module_names)
        found = set().union(*map(self._names.places, names))
        others = self._expressions.keys() - found
        found |= {place for place in others if any(self._matches(place, name) for name in names)}
        return [pattern for place, pattern in enumerate(self._patterns) if place not in found]

    def _matches(self, place: int, name: str) -> bool:
        start = time.thread_time()
        try:
            found = self._expressions[place].search(name, timeout=self._seconds) is not None
        except TimeoutError:
            raise ValueError(
                f"{shown(self._patterns[place])}: found that patterns take over {MOST_SECONDS:g} s, up to this one on "
                f"{shown(name)}, expected ones without repetitions of repetitions"
            ) from None
        self._seconds = max(self._seconds - (time.thread_time() - start), 0.0)
        return found


class _Names:
    """The places of patterns that are names, escaped or not, and of all patterns as ends of names."""

    def __init__(self):
        self._ends: dict[int, dict[str, list[int]]] = {}  # by their lengths
        # By their lengths and kinds: whether one begins with ^, whether it ends with $, and where it has a dot without
        # a backslash, which stands for any letter.
        self._by_length: dict[int, dict[tuple[bool, bool, tuple[int, ...]], dict[str, list[int]]]] = {}
        self._kinds = 0

    def add(self, pattern: str, place: int) -> bool:
        """Takes a pattern; False if it is no name, so that its end alone was taken."""
        self._ends.setdefault(len(pattern), {}).setdefault(pattern, []).append(place)
        if not (name := NAME.fullmatch(pattern)):
            return False
        start, escaped, end = name.groups()
        text, bare = escaped.replace("\\", ""), re.sub(r"\\.", "-", escaped)
        dots = tuple(i for i, letter in enumerate(bare) if letter == ".")
        kinds, kind = self._by_length.setdefault(len(text), {}), (bool(start), bool(end), dots)
        if kind not in kinds:
            if self._kinds == MOST_KINDS:
                return False
            self._kinds += 1
        kinds.setdefault(kind, {}).setdefault(text, []).append(place)
        return True

    def places(self, name: str) -> set[int]:
        """Of the patterns that name a module."""
        found = {place for length, ends in self._ends.items() for place in ends.get(name[-length:], ())}
        dots = [i for i, letter in enumerate(name) if letter == "."]
        for start in (0, *(dot + 1 for dot in dots)):
            for stop in (*dots, len(name)):
                for (first, last, any_letter), names in self._by_length.get(stop - start, {}).items():
                    if not (first and start) and not (last and stop < len(name)):
                        letters = list(name[start:stop])
                        for i in any_letter:
                            letters[i] = "."
                        found.update(names.get("".join(letters), ()))
        return found


def matches(module_name: str, pattern: str) -> bool:
    """Whether a pattern names a module, or a part of the model that the module is in (``Patterns``).

    >>> matches("model.layers.0.mlp.down_proj", "down_proj"), matches("model.layers.10.mlp", "model.layers.1")
    (True, False)
    >>> matches("model.vision_tower.layers.3.fc1", "vision_tower"), matches("model.layers.2.mlp", r"layers\\.[0-3]")
    (True, True)
    """
    return any(Patterns([pattern]).naming(module_name))


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


def shown(found: object) -> str:
    """What an error says of something that may be long, for it comes out of a file."""
    text = repr(found)
    return text if len(text) <= 100 else f"{text[:100]}..."


@lru_cache(1024)
def _compiled(pattern: str) -> regex.Pattern:
    re.compile(pattern)  # raises what is none for re
    return regex.compile(rf"(?:^|\.)(?:{pattern})(?:\.|$)")


def _letters(pattern: str) -> int:
    """How many letters a pattern has with what repeats written out, times how deep its groups are in one another.

    What repeats is compiled once for each time that it must be there, and once more if it may go on.
    """
    if VERBOSE.search(pattern):  # then spaces in a count would hide it
        raise ValueError("it has the flag x")
    if len(pattern) > MOST_LETTERS:
        return len(pattern)
    groups, deepest, last = [0], 1, 0  # letters of the groups that are open, and of what a quantifier would repeat
    for token in TOKEN.findall(pattern):
        if token == "(":
            groups.append(0)
            deepest = max(deepest, len(groups) - 1)
        elif token == "+" or token[0] + token[-1] == "{}":
            counts = [int(count) for count in re.findall(r"\d+", token)]
            times = max([1, *counts]) + token.endswith((",}", "+"))
            groups[-1] = min(groups[-1] + last * (times - 1), MOST_LETTERS)
            last = min(last * times, MOST_LETTERS)
        elif token not in "*?":
            last = groups.pop() + 1 if token == ")" and len(groups) > 1 else 1
            groups[-1] += last
    return OVERHEAD + sum(groups) * deepest
