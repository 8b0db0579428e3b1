"""A library that may be imported later."""

import importlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from importlib.abc import MetaPathFinder

_sought: ContextVar[str | None] = ContextVar("the library for which a finder of ours asks the others", default=None)


class _Finder(MetaPathFinder):
    """Finds a library as the other finders do, and calls ``then`` each time it has been imported or reloaded.

    It is never taken out of ``sys.meta_path``: another thread may be going through that list. It need not be in there
    itself: another tool may have taken it out, to ask it on its own.
    """

    def __init__(self, library: str, then: Callable[[], None]):
        self.library, self.then = library, then

    def find_spec(self, name, path=None, target=None):
        if name != self.library or _sought.get() == name:
            return None
        token = _sought.set(name)
        try:
            found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
            spec = next(filter(None, found), None)
        finally:
            _sought.reset(token)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.then()  # still under the lock of this import: no thread gets the library without hooks

            spec.loader.exec_module = exec_module
        return spec


def after_import(library: str, then: Callable[[], None]) -> None:
    """Calls ``then`` after each import of ``library``, and now if there was one; ``then`` may find its work done."""
    sys.meta_path.insert(0, _Finder(library, then))  # first of all, for another thread may be about to import it
    if sys.modules.get(library) is not None:
        importlib.import_module(library)  # waits where another thread is importing it
        then()
