"""benchmarks/timing.py: sides that take turns, on a clock of its own instead of a GPU."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module = importlib.import_module("timing")
    yield module
    del sys.modules["timing"]


class Graph:
    """Takes ``ms`` a replay, and half a millisecond more with every replay of any graph, as a GPU that gets hot."""

    replays = []

    def __init__(self, ms: float):
        self.ms = ms

    def replay(self) -> None:
        Graph.replays.append(self.ms)


@pytest.fixture
def clock(timing, monkeypatch):
    Graph.replays = []

    def capture(calls):
        return Graph(sum(call() for call in calls)), None

    def replays_ms(graph, count):
        return [graph.ms + 0.5 * (graph.replay() or len(Graph.replays)) for _ in range(count)]

    monkeypatch.setattr(timing, "capture", capture)
    monkeypatch.setattr(timing, "replays_ms", replays_ms)


def one():
    return 1.0


def test_sides_take_turns(timing, clock):
    """So two sides that do the same differ by less than the GPU heats up while one of them is measured."""
    us = timing.in_turns_us({"first": [one, one], "second": [one, one]}, budget_ms=100)
    one_after_the_other = 0.5 * 1e3 * len(Graph.replays) / 2 / 2
    assert 0 < us["second"] - us["first"] < one_after_the_other / 2
    assert Graph.replays.count(2.0) == len(Graph.replays)


def test_microseconds_of_one_call(timing, clock, monkeypatch):
    """A side that fails is told and left out."""
    monkeypatch.setattr(timing, "replays_ms", lambda graph, count: [graph.ms] * count)
    assert timing.in_turns_us({"two": [one, one], "four": [one] * 4}) == {"two": 1000.0, "four": 1000.0}
    assert timing.graph_us([one, one]) == 1000.0

    def broken():
        raise ValueError("no such kernel")

    told = []
    us = timing.in_turns_us({"ours": [one], "peer": [broken]}, failed=lambda *what: told.append(what))
    assert list(us) == ["ours"] and [(name, str(error)) for name, error in told] == [("peer", "no such kernel")]
    with pytest.raises(ValueError, match="no such kernel"):
        timing.graph_us([broken])
