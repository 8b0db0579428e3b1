"""Processes of their own, and killing one at a file that it touches, for tests of what is then on the disk."""

import itertools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

TOUCHES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir")


def in_a_child(act: Callable[[], object]) -> int:
    """Runs it in a process of its own; the exit code."""
    process = multiprocessing.get_context("fork").Process(target=act)
    process.start()
    process.join(timeout=60)
    return process.exitcode


def killed(step: int, folder: Path, act: Callable[[], object]) -> bool:
    """Runs it in a process that is killed before it touches a file in the folder for the ``step``-th time; whether it
    touched so many."""

    def act_until_killed():
        touched = itertools.count(1)

        def touch(event, arguments):
            if event in TOUCHES and str(folder) in str(arguments[0]) and next(touched) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(touch)
        act()

    code = in_a_child(act_until_killed)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def killed_everywhere(parent: Path, make: Callable[[Path], object], act: Callable[[Path], object]) -> Iterator[Path]:
    """Folders, each made by ``make``, in which ``act`` was killed one file later."""
    for step in itertools.count(1):
        make(folder := parent / str(step))
        if not killed(step, folder, lambda folder=folder: act(folder)):
            return
        yield folder
