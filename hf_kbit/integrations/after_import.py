"""Glue to an optional library that is loaded when the program imports that library, and not before."""

import importlib
import sys
from importlib.abc import MetaPathFinder


class _Finder(MetaPathFinder):
    """Finds a library as the other finders do, and has our glue imported as soon as the library is."""

    def __init__(self, library: str, glue: str):
        self.library, self.glue = library, glue

    def find_spec(self, name, path=None, target=None):
        if name != self.library:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                sys.meta_path.remove(self)
                importlib.import_module(self.glue)

            spec.loader.exec_module = exec_module
        return spec


def after_import(library: str, glue: str) -> None:
    """Imports the module ``glue`` after ``library``, now if that is imported already, never if it is not."""
    if sys.modules.get(library) is not None:
        importlib.import_module(glue)
    else:
        sys.meta_path.insert(0, _Finder(library, glue))
