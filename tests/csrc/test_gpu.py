"""What needs the CUDA runtime but no GPU: errors of ``gpu.cu``, and ``dispatch.h``, compiled by nvcc."""

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
#include <string>

#include "kernels/dispatch.h"
#include "kernels/gpu.h"

using namespace hf_kbit;

extern "C" int processors(char* message) {
    try {
        return cuda::current_gpu().processors;
    } catch (const std::runtime_error& error) {
        std::strncpy(message, error.what(), 200);
        return 0;
    }
}
extern "C" int dispatched(int bits, int dtype, int* found_bits, int* found_dtype) {
    return cuda::dispatch<float, __half, __nv_bfloat16>(bits, static_cast<Dtype>(dtype), [&](auto width, auto value) {
        *found_bits = width();
        *found_dtype = static_cast<int>(cuda::kDtypeOf<decltype(value)>);
        return cudaSuccess;
    });
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


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return compile_by_nvcc(
        tmp_path_factory.mktemp("gpu"), "gpu.cu", WRAPPER, "-arch=compute_75", SOURCE / "kernels/gpu.cu"
    )


def test_an_error_is_not_left_for_the_next_launch(tmp_path):
    message = ctypes.create_string_buffer(201)
    assert compile_by_nvcc(tmp_path, "check.cpp", CHECK, "-cudart=none").last_error_after_check(message) == 0
    assert message.value == b"hf_kbit: gemm (token_tile=32 tiles=4 split=2): too many CTAs"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu(library):
    """An error, no GPU of zero processors."""
    message = ctypes.create_string_buffer(201)
    assert library.processors(message) == 0
    assert message.value.startswith(b"hf_kbit: cudaGetDevice: ")


def test_dispatch(library):
    bits, dtype = ctypes.c_int(), ctypes.c_int()
    found = {}
    for asked_bits in range(8):
        for asked_dtype in range(4):
            if library.dispatched(asked_bits, asked_dtype, ctypes.byref(bits), ctypes.byref(dtype)) == 0:
                found[asked_bits, asked_dtype] = bits.value, dtype.value
    assert found == {(b, d): (b, d) for b in (2, 3, 4, 5) for d in (0, 1, 2)}  # no float64 among the types asked for
