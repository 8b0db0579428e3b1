"""Passes that wait at layers: one at a time, as if each ran in the thread that leads them, and none is left over."""

import threading
from contextvars import ContextVar
from functools import partial

import pytest
import torch

from hf_kbit.calibration import passes

VALUE = ContextVar("value", default=0)


def work(found: list, number: int) -> None:
    for layer in ("a", "b"):
        found.append((number, layer, passes.current().wait(layer, (number,), {})))
    found.append((number, "end"))


def alive() -> int:
    return sum(type(thread) is threading.Thread for thread in threading.enumerate())  # not tqdm's


def test_each_goes_on_with_what_it_is_given():
    found, before = [], alive()
    with passes.leading(partial(work, found, number) for number in range(3)) as led:
        assert [each.call for each in led] == [("a", (number,), {}) for number in range(3)]
        led[1].go_on("x")
        assert found == [(1, "a", "x")] and [each.call[0] for each in led] == ["a", "b", "a"]
        led[1].go_on("y")
        assert found[1:] == [(1, "b", "y"), (1, "end")] and led[1].call is None
        assert passes.current() is None
    assert len(found) == 3 and alive() == before, "those that wait end there"


def test_a_thread_computes_as_the_one_that_leads():
    """But for the number of threads that help it: each would have as many of its own."""
    found, threads = {}, torch.get_num_threads()

    def look():
        found.update(
            grad=torch.is_grad_enabled(),
            autocast=(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            device=torch.empty(0).device.type,
            inference=torch.is_inference_mode_enabled(),
            value=VALUE.get(),
            threads=torch.get_num_threads(),
        )

    token = VALUE.set(7)
    try:
        torch.set_num_threads(2)
        with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"), passes.leading([look]):
            assert torch.get_num_threads() == 2
        assert found.pop("autocast") == (True, torch.float16)
        assert found == {"grad": False, "device": "meta", "inference": False, "value": 7, "threads": 1}
        with torch.inference_mode(), passes.leading([look]):
            pass
        assert found["inference"] and not found["grad"] and found["device"] == "cpu"
        with passes.leading([look]):
            pass
        assert found["grad"] and not found["autocast"][0]
    finally:
        VALUE.reset(token)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_after_an_error_no_thread_is_left(error):
    """In the model's code, or in that of the one who leads."""
    before = alive()

    def broken():
        passes.current().wait("a", (), {})
        raise error("in the model")

    with pytest.raises(error, match="in the model"):
        with passes.leading([partial(work, [], 0), broken]) as led:
            led[1].go_on()
    with pytest.raises(error, match="outside"), passes.leading([partial(work, [], 0), broken]):
        raise error("outside")
    assert alive() == before


def test_code_that_catches_exceptions_ends_too():
    before = alive()

    def stubborn():
        while True:
            try:
                passes.current().wait("a", (), {})
            except Exception:
                continue

    with passes.leading([stubborn]):
        pass
    assert alive() == before
