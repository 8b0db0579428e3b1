"""Patterns mean what they mean to ``re``, and none of them takes long."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kbit import KbitConfig
from hf_kbit.plan import patterns
from hf_kbit.plan.config import Chooser
from hf_kbit.plan.patterns import Patterns, exactly

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


TOO_LONG = "what repeats written out"  # with it a pattern is refused that would take long to compile
PATTERNS = st.lists(st.recursive(ATOMS, groups, max_leaves=8), min_size=1, max_size=4).map("".join)


def matches(name: str, pattern: str) -> bool:
    return any(Patterns([pattern]).naming(name))


def named(name: str, pattern: str) -> bool:
    """What a pattern means, by ``re``; in a name a dot is a dot."""
    searched = re.sub(r"(?<!\\)\.", r"\.", pattern) if patterns.NAME.fullmatch(pattern) else pattern
    return re.search(rf"(?:^|\.)(?:{searched})(?:\.|$)", name) is not None or name.endswith(pattern)


@given(name=NAMES, pattern=PATTERNS | st.text(r"ab.1_^$\-", min_size=1, max_size=6))
@settings(max_examples=400, deadline=None)
def test_a_pattern_means_what_it_means_to_re(name, pattern):
    try:
        expected = named(name, pattern)
    except re.error:
        return
    try:
        assert matches(name, pattern) == expected
    except ValueError as error:
        assert TOO_LONG in str(error)


@given(names=st.lists(NAMES, max_size=4), many=st.lists(PATTERNS | NAMES.filter(bool), max_size=6, unique=True))
@settings(max_examples=200, deadline=None)
def test_patterns_together_are_what_each_is_alone(names, many):
    """Whether they are looked up or searched for, and in their order."""
    try:
        found = Patterns(many)
    except ValueError as error:
        assert TOO_LONG in str(error) or any(re.error is type(found) for found in map(error_of, many))
        return
    for name in names:
        assert list(found.naming(name)) == [pattern for pattern in many if named(name, pattern)]
    unused = [pattern for pattern in many if not any(named(name, pattern) for name in names)]
    assert found.unused(names) == unused


def error_of(pattern: str) -> Exception | None:
    try:
        named("", pattern)
    except re.error as error:
        return error


@pytest.mark.parametrize("name, pattern", [("q_projq", r"(q)_proj\1"), ("layers.0.Q_proj", "(?i:q_proj)")])
def test_references_and_flags_are_those_of_the_pattern(name, pattern):
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
    start = time.process_time()
    try:
        assert not matches(NAME, pattern)
    except ValueError as error:
        assert f"found that patterns take over 0.2 s, up to this one on '{NAME}'" in str(error)
    assert time.process_time() - start < 1.0


def test_a_pattern_that_takes_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(patterns, "MOST_SECONDS", 1e-6)
    found = r"'\(a\|b\|ab\)\*c': found that patterns take over 1e-06 s, up to this one on '(ab){49}a\.\.\., expected"
    with pytest.raises(ValueError, match=found):
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
        ("a{99999999999}", "over 100,000 letters"),
        ("(" * 3000 + ")" * 3000, "over 100,000 letters"),
        (r"(q)_proj\2", "invalid group reference"),
        ("((.{1000}){1000}){1000}", "over 100,000 letters"),
        ("(?:){4000000000}", "over 100,000 letters"),
        ("(?:" * 24 + "a" + ")+" * 24, "over 100,000 letters"),
        ("(?:" * 24 + "a" + "){1,}" * 24, "over 100,000 letters"),
        ("(?ix)(?:a{ 3000 }){ 3000 }", "the flag x"),
        ("(?:a{3000})(?#){3000}", "a comment"),
        ("(?R)(?R)+", "unknown extension"),
        ("|".join(f"layers.{i}" for i in range(100_000)), "over 100,000 letters"),
        ("a" * 1_000_000 + "?", "over 100,000 letters"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern, why):
    with pytest.raises(
        ValueError, match=rf"^module_bits: found pattern (?s:.)*, expected a regular expression \(.*({why})"
    ):
        Patterns([pattern], "module_bits")


MANY = 20_000
MODULES = [f"model.layers.{i}.mlp.experts.{j}.w{k}" for i in range(16) for j in range(16) for k in (1, 2, 3)]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (lambda i: exactly(f"model.layers.{i}.q_proj"), MANY),
        (lambda i: f"model.layers.{i}.q_proj", MANY),
        (lambda i: rf"layers\.{i}\.q_proj", MANY),
        (lambda i: rf"layers\.\d\.{i}", "over 100,000 letters"),
        (lambda i: "".join("a."[i >> place & 1] for place in range(len(MODULES[0]))), MANY),
        (lambda i: f"({'a' * (i % 60)})+{i}", "over 100,000 letters"),
    ],
)
def test_many_patterns_hold_nobody_up(pattern, found):
    """As a config.json may have them: they are read and used, or refused, in seconds."""
    many = [pattern(i) for i in range(MANY)]
    start = time.process_time()
    try:
        config = KbitConfig.from_dict({"module_bits": dict.fromkeys(many, 3), "modules_to_not_convert": MODULES})
        chooser = Chooser(config)
        assert {chooser.choose(name) for name in MODULES} == {(None, False)}
        assert len(chooser.widths.unused(MODULES)) == found
    except ValueError as error:
        assert str(found) in str(error) and len(str(error)) < 1000
    assert time.process_time() - start < 4.0


def test_the_time_is_for_all_patterns_and_names(monkeypatch):
    """Not for each pair of them, which could be a million seconds."""
    monkeypatch.setattr(patterns, "MOST_SECONDS", 0.2)
    slow = "(?:.|.){12}^"
    start = time.process_time()
    assert not matches(MODULES[0], slow)
    one = time.process_time() - start
    assert one < 0.1, "this one alone is quick enough"
    chooser = Chooser(KbitConfig(module_bits={f"{slow}{i}": 3 for i in range(100)}))
    start = time.process_time()
    with pytest.raises(ValueError, match="found that patterns take over"):
        chooser.widths.unused(MODULES)
    assert time.process_time() - start < 2.0
