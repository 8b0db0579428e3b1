"""What needs no GPU is compiled from csrc and called; ``tests/ops`` compares ops with ``hf_kbit.format.reference``."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "csrc"
COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)


@pytest.fixture(scope="module")
def compile_for_cpu(tmp_path_factory):
    """C++ that includes headers of csrc, as a loaded library: for functions that need no GPU."""
    if not COMPILER:
        pytest.skip("no C++ compiler is installed")
    if not (SOURCE / "kernels").is_dir():
        pytest.skip("the source tree is not there")

    def compiled(text: str) -> ctypes.CDLL:
        folder = tmp_path_factory.mktemp("csrc")
        (folder / "library.cpp").write_text(text)
        flags = ["-std=c++17", "-shared", "-fPIC", f"-I{SOURCE}", "-Wall", "-Wextra", "-Werror"]
        command = [COMPILER, *flags, "-o", folder / "library.so", folder / "library.cpp"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 0, ran.stderr
        return ctypes.CDLL(str(folder / "library.so"))

    return compiled
