"""Compiled kernels are compared with ``hf_kbit.reference``, on a CPU and, marked ``gpu``, on a GPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from hf_kbit.ops import native

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


@pytest.fixture
def device(device):
    library = native.library(device)
    if not library.loaded:
        pytest.skip(f"no compiled kernels for {device}: {library.missing}")
    return device


@pytest.fixture(autouse=True)
def sums_in_float32():
    """Where cuBLAS multiplies, it adds up in float32."""
    matmul = torch.backends.cuda.matmul  # has attributes by __getattr__, which monkeypatch would delete in the end
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before = [getattr(matmul, name) for name in names]
    for name in names:
        setattr(matmul, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(matmul, name, value)


@pytest.fixture
def poison():
    """Fills memory that was just free with ones: an output that a kernel leaves out is not zero by chance."""

    def fill(device, *sizes):
        held = [torch.full((size,), -1, dtype=torch.int8, device=device) for size in sizes for _ in range(3)]
        del held

    return fill
