"""Forward passes of a model that wait at each of its layers: one for each batch, with all that the model keeps for it.

A pass has a thread of its own, for the model's code is that of any forward pass. Only one thread runs at a time: that
of a pass until it comes to a layer, and otherwise the one that leads all passes.
"""

import contextvars
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

_current: contextvars.ContextVar["Pass | None"] = contextvars.ContextVar("pass", default=None)


class _Ended(BaseException):
    """Ends a pass from the inside; no ``except Exception`` in a model holds it up."""


class Parted(ValueError):
    """Some passes wait at another layer than others."""


class Pass:
    """One forward pass, ``work()``. ``call`` is ``(name, args, kwargs)`` of the layer where it waits, and None before
    it has begun and after its end."""

    def __init__(self, work: Callable[[], Any]):
        self.call: tuple[str, tuple, dict] | None = None
        self._work, self._output, self._error, self._ends = work, None, None, False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._settings, self._threads = _settings(), torch.get_num_threads()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), daemon=True)

    def go_on(self, output: Any = None) -> None:
        """Runs to its next layer or its end, with ``output`` of the layer where it waits; errors are the pass's."""
        self.call, self._output = None, output
        if self._thread.ident is None:
            self._thread.start()
            self._back.acquire()
            torch.set_num_threads(self._threads)  # which it has changed for new threads and some libraries
        else:
            self._turn.release()
            self._back.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, name: str, args: tuple, kwargs: dict) -> Any:
        """Called in the pass, in the place of a layer, whose output it returns."""
        self.call = name, args, kwargs
        self._back.release()
        self._turn.acquire()
        if self._ends:
            raise _Ended
        output, self._output = self._output, None
        return output

    def end(self) -> None:
        """Ends its thread, wherever the pass is."""
        self._ends, self.call = True, None
        if self._thread.ident is not None:
            self._turn.release()
            self._thread.join()

    def _run(self) -> None:
        _current.set(self)
        # Each thread that computes may have others of its own to help it, which would be too many for many passes.
        torch.set_num_threads(1)
        try:
            with ExitStack() as stack:
                for setting in self._settings:
                    stack.enter_context(setting)
                self._work()
        except _Ended:
            pass
        except BaseException as error:  # raised where the pass is led from
            self._error = error
        finally:
            self._back.release()


def current() -> Pass | None:
    """The pass in whose thread this is called."""
    return _current.get()


@contextmanager
def leading(works: Iterable[Callable[[], Any]]) -> Iterator[list[Pass]]:
    """A pass for each, which waits at its first layer; all have ended afterwards."""
    passes, threads = [Pass(work) for work in works], torch.get_num_threads()
    try:
        for each in passes:
            each.go_on()
        yield passes
    finally:
        for each in passes:
            each.end()
        torch.set_num_threads(threads)


def _settings() -> list[AbstractContextManager]:
    """Contexts in which another thread computes as this one does: what torch keeps for each thread."""
    found = [torch.inference_mode(torch.is_inference_mode_enabled()), torch.set_grad_enabled(torch.is_grad_enabled())]
    found.append(torch.get_default_device())
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            found.append(torch.autocast(kind, torch.get_autocast_dtype(kind)))
    if torch.cuda.is_initialized():
        found.append(torch.cuda.stream(torch.cuda.current_stream()))
    return found
