"""What every Python process imports that a program of ``hf-kbit run`` starts: by it they know quantized models.

Python imports the first ``sitecustomize`` of its path when it starts. This folder is put there, in ``PYTHONPATH``, and
gives way to the environment's own, if it has one.
"""

import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

sys.path[:] = [entry for entry in sys.path if entry != str(Path(__file__).parent)]
ours = sys.modules.pop(__name__)
with suppress(ModuleNotFoundError):
    import_module("sitecustomize")
sys.modules.setdefault(__name__, ours)

if find_spec("hf_kbit"):  # the process may be of another Python
    import hf_kbit  # noqa: F401  by which they know them
