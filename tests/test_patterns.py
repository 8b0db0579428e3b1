"""Patterns mean what they mean to ``re``, and none of them takes long."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kbit import patterns
from hf_kbit.patterns import check_pattern, matches

NAMES = st.text("ab.1_", max_size=12)
ATOMS = st.sampled_from(
    ["a", "b", "1", "_", ".", r"\.", r"\d", r"\w", r"\W", "[ab]", "[^a]", "[]a]", "^", "$", r"\b", "{}"]
)
REPETITIONS = ["", "", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "{0}", "{,}"]


def groups(inner):
    alternatives = st.lists(st.lists(inner, max_size=3).map("".join), min_size=1, max_size=3).map("|".join)
    opened = st.tuples(st.sampled_from(["(", "(?:", "(?=", "(?!"]), alternatives).map(
        lambda parts: "".join(parts) + ")"
    )
    return st.tuples(opened | inner, st.sampled_from(REPETITIONS)).map("".join)


PATTERNS = st.lists(st.recursive(ATOMS, groups, max_leaves=8), min_size=1, max_size=4).map("".join)


@given(name=NAMES, pattern=PATTERNS)
@settings(max_examples=200, deadline=None)
def test_a_pattern_means_what_it_means_to_re(name, pattern):
    try:
        expected = re.search(rf"(^|\.)(?:{pattern})(\.|$)", name) is not None or name.endswith(pattern)
    except re.error:
        return
    check_pattern(pattern, "pattern")
    assert matches(name, pattern) == expected


@pytest.mark.parametrize("name, pattern", [("q_projq", r"(q)_proj\1"), ("layers.0.Q_proj", "(?i)q_proj")])
def test_references_and_flags_are_those_of_the_pattern(name, pattern):
    check_pattern(pattern, "pattern")
    assert matches(name, pattern) and not matches("k_proj", pattern)


NAME = "model.language_model.layers.31.self_attention.query_key_value"


@pytest.mark.parametrize(
    "pattern",
    [
        r"([a-z0-9_.]+)+!",
        "(.*)*x",
        "(.|.)*x",
        "(a?){40}" + "a" * 40,
        ".*" * 30 + "!",
        ".?" * 40 + "!",
        "(.|.)" * 30 + "!",
        r"((\w+\.?)*)*!",
        r"((\w|\.)+)+!",
    ],
)
def test_no_pattern_takes_long(pattern, monkeypatch):
    monkeypatch.setattr(patterns, "MOST_SECONDS", 0.2)
    check_pattern(pattern, "module_bits")
    start = time.perf_counter()
    try:
        assert not matches(NAME, pattern)
    except ValueError as error:
        assert f"found a pattern that takes over 0.2 s on {NAME}" in str(error)
    assert time.perf_counter() - start < 1.0


def test_a_pattern_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(patterns, "MOST_SECONDS", 1e-6)
    with pytest.raises(ValueError, match=r"'\(a\|b\|ab\)\*c': found a pattern that takes over 1e-06 s on "):
        matches("ab" * 200_000, "(a|b|ab)*c")


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (3, "no text"),
        (None, "no text"),
        ("", "empty"),
        ("(a", "missing"),
        ("a)", "unbalanced|missing|expected"),
        ("[", "unterminated"),
        ("a{99999999999}", "it repeats more than"),
        ("(" * 3000 + ")" * 3000, "brackets|recursion"),
        (r"(q)_proj\2", "invalid group reference"),
        ("((.{1000}){1000}){1000}", "it repeats more than 10,000 times"),
        ("(?:){4000000000}", "it repeats more than"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, why):
    with pytest.raises(
        ValueError, match=rf"^module_bits: found pattern (?s:.)*, expected a regular expression \(.*({why})"
    ):
        check_pattern(pattern, "module_bits")
