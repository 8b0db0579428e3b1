"""Patterns mean what they mean to ``re``, and none of them takes long."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        check_pattern(pattern, "pattern")
    except re.error:
        return
    except ValueError as error:
        assert "gives nothing back" in str(error)  # "a*+"
        return
    assert matches(name, pattern) == expected


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
        "(?:){4000000000}",
        "((.{1000}){1000}){1000}",
    ],
)
def test_no_pattern_takes_long(pattern):
    check_pattern(pattern, "module_bits")
    start = time.perf_counter()
    assert not matches(NAME, pattern) or pattern.startswith("(?:)")
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        (3, "no text"),
        (None, "no text"),
        ("", "empty"),
        ("(a", "unterminated|missing"),
        ("a)", "unbalanced"),
        ("[", "unterminated"),
        ("a{99999999999}", "repetition|large|int"),
        ("(" * 3000 + ")" * 3000, "brackets|recursion"),
        ("(" * 21 + ")" * 21, "more than 20 brackets"),
        (r"(q)_proj\1", "invalid group reference|not supported"),
        (r"(q)(k)\2", "not supported"),
        ("(?i)q_proj", "global flags|not supported"),
        ("(?i:q)_proj", "not supported"),
        ("(?P<x>q)", "not supported"),
        ("(?<=q)_proj", "not supported"),
        (r"\x41", "not supported"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, why):
    with pytest.raises(
        ValueError, match=rf"^module_bits: found pattern (?s:.)*, expected a regular expression \(.*({why})"
    ):
        check_pattern(pattern, "module_bits")
