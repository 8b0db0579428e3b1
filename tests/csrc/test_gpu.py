"""What needs the CUDA runtime but no GPU: errors of ``gpu.cu``, compiled by nvcc."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[2] / "csrc"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed"),
    pytest.mark.skipif(not (SOURCE / "kernels").is_dir(), reason="the source tree is not there"),
]

# Without the runtime, whose functions the error stays with: without a driver every call has the same one.
CHECK = r"""
#include <cstring>

#include "kernels/gpu.h"
#include "kernels/mma/plan.h"

static cudaError_t last = cudaSuccess;
cudaError_t cudaGetLastError() {
    const cudaError_t error = last;
    last = cudaSuccess;
    return error;
}
const char* cudaGetErrorString(cudaError_t) { return "too many CTAs"; }

extern "C" int last_error_after_check(char* message) {
    last = cudaErrorInvalidConfiguration;
    try {
        hf_kbit::cuda::check("gemm", last, hf_kbit::MmaPlan{32, 4, 2});
    } catch (const std::runtime_error& error) {
        std::strncpy(message, error.what(), 200);
    }
    return last;
}
"""

WRAPPER = r"""
#include <cstring>
#include <stdexcept>

#include "kernels/gpu.h"

extern "C" int processors(char* message) {
    try {
        return hf_kbit::cuda::current_gpu().processors;
    } catch (const std::runtime_error& error) {
        std::strncpy(message, error.what(), 200);
        return 0;
    }
}
"""


def compile_by_nvcc(folder, name, text, *arguments) -> ctypes.CDLL:
    (folder / name).write_text(text)
    flags = ["-std=c++17", "--shared", "-Xcompiler=-fPIC", f"-I{SOURCE}", *arguments]
    ran = subprocess.run(
        ["nvcc", *flags, "-o", folder / "gpu.so", folder / name], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    return ctypes.CDLL(str(folder / "gpu.so"))


def test_an_error_is_not_left_for_the_next_launch(tmp_path):
    message = ctypes.create_string_buffer(201)
    assert compile_by_nvcc(tmp_path, "check.cpp", CHECK, "-cudart=none").last_error_after_check(message) == 0
    assert message.value == b"hf_kbit: gemm (token_tile=32 tiles=4 split=2): too many CTAs"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu(tmp_path):
    """An error, no GPU of zero processors."""
    library = compile_by_nvcc(tmp_path, "gpu.cu", WRAPPER, "-arch=compute_75", SOURCE / "kernels/gpu.cu")
    message = ctypes.create_string_buffer(201)
    assert library.processors(message) == 0
    assert message.value.startswith(b"hf_kbit: cudaGetDevice: ")
