"""Patterns for names of modules: regular expressions, none of which can hang.

A pattern may come with a model that somebody else made. ``re`` would search a name of forty letters for
``([a-z.]+)+!`` longer than a life; ``regex`` gives up after a time. But it compiles a group again for each repetition,
which ``_letters`` bounds, and ``(?R)``, which ``re`` does not know, takes all memory. A pattern that is a name is
looked up, however many there are.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

import regex

from hf_kbit.format.errors import shown

MOST_SECONDS = 10.0  # of a CPU, that all patterns may take on all names of a model
MOST_LETTERS = 100_000  # of all regular expressions, as _letters counts: compiled in a second
OVERHEAD = 100  # letters that any pattern takes as long as to compile
NAME = re.compile(r"(\^?)((?:[\w-]|\\?\.|\\-)+)(\$?)")
REPETITION = re.compile(r"(\)?)(\+|\{[\d,]*\})")
HIDING = re.compile(r"\(\?(#|[\w-]*x)")  # a comment, or the flag x: they may stand between a group and its repetition


class Patterns:
    """Patterns in an order, and what each of them names.

    A pattern is a regular expression for one or more whole components of a dotted name, or the end of a name. In a
    pattern that is a name a dot is a dot.

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
        # Places in the order of all patterns, as ends of names; of those that are names, with what they are bound to:
        # the start of a name, the end of it; and of the others.
        self._ends: dict[str, list[int]] = defaultdict(list)
        self._names: dict[str, list[tuple[int, bool, bool]]] = defaultdict(list)
        self._expressions: dict[int, regex.Pattern] = {}
        for place, pattern in enumerate(self._patterns):
            try:
                if not isinstance(pattern, str) or not pattern:
                    raise ValueError("it is empty" if pattern == "" else "it is no text")
                self._ends[pattern].append(place)
                if name := NAME.fullmatch(pattern):
                    start, text, end = name.groups()
                    self._names[text.replace("\\", "")].append((place, bool(start), bool(end)))
                    continue
                letters += _letters(pattern)
                if letters > MOST_LETTERS:
                    raise ValueError(f"what repeats written out, all up to it have over {MOST_LETTERS:,} letters")
                self._expressions[place] = _compiled(pattern)
            except (re.error, regex.error, RecursionError, ValueError) as error:
                expected = f"expected a regular expression ({error})"
                raise ValueError(f"{argument}: found pattern {shown(pattern)}, {expected}") from None

        self._lengths = set(map(len, self._ends))

    def naming(self, module_name: str) -> Iterator[str]:
        """The patterns that name a module, or a part of the model that the module is in, in their order."""
        found = self._looked_up(module_name)
        for place in sorted(found | self._expressions.keys()):
            if place in found or self._matches(place, module_name):
                yield self._patterns[place]

    def unused(self, module_names: Iterable[str]) -> list[str]:
        """The patterns that name none of the modules."""
        names = list(module_names)
        found = set().union(*map(self._looked_up, names))
        others = self._expressions.keys() - found
        found |= {place for place in others if any(self._matches(place, name) for name in names)}
        return [pattern for place, pattern in enumerate(self._patterns) if place not in found]

    def _looked_up(self, name: str) -> set[int]:
        """The places of patterns that name a module without a search."""
        found = {place for length in self._lengths for place in self._ends.get(name[-length:], ())}
        dots = [i for i, letter in enumerate(name) if letter == "."]
        for start in (0, *(dot + 1 for dot in dots)):
            for stop in (*dots, len(name)):
                for place, from_start, to_end in self._names.get(name[start:stop], ()):
                    if not (from_start and start) and not (to_end and stop < len(name)):
                        found.add(place)
        return found

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


def exactly(module_name: str) -> str:
    """The pattern for one module, and nothing else: a name as it is stands for what is in a module too, and for other
    names that end in it.

    >>> pattern = exactly("blocks.0")
    >>> pattern
    '^blocks\\\\.0$'
    >>> [name for name in ("blocks.0", "blocks.0.proj", "more.blocks.0") if any(Patterns([pattern]).naming(name))]
    ['blocks.0']
    """
    return f"^{re.escape(module_name)}$"


@lru_cache(1024)
def _compiled(pattern: str) -> regex.Pattern:
    re.compile(pattern)  # raises what is none for re
    return regex.compile(rf"(?:^|\.)(?:{pattern})(?:\.|$)")


def _letters(pattern: str) -> int:
    """At least as many letters as ``regex`` compiles: with what repeats written out, for each group that is open."""
    if HIDING.search(pattern):
        raise ValueError("it has a comment or the flag x")
    letters, times = len(pattern), 1
    for group, repetition in REPETITION.findall(pattern):
        count = 1 + max([1, *map(int, re.findall(r"\d+", repetition))])
        letters, times = (letters, min(times * count, MOST_LETTERS)) if group else (letters + count, times)
    return OVERHEAD + letters * times * max(pattern.count("("), 1)
