"""The kernels of csrc/cpu, compiled for ARM and run by an emulator, beside the reference."""

import shutil
import struct
import subprocess
from pathlib import Path

import cases
import pytest
import torch

from hf_kbit.format import reference

SOURCE = Path(__file__).parents[2] / "csrc"
COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = next(filter(None, map(shutil.which, ("qemu-aarch64-static", "qemu-aarch64"))), None)

# Quantizes a weight, decodes it, multiplies: sizes and tensors come in, codes, scales, weight and product go out.
DRIVER = """
#include <cstdio>
#include <vector>

#include "cpu/kernels.h"

using namespace hf_kbit;

template <class T>
std::vector<T> taken(int64_t count) {
    std::vector<T> values(count);
    if (std::fread(values.data(), sizeof(T), count, stdin) != static_cast<size_t>(count)) throw 1;
    return values;
}

template <class T>
void give(const std::vector<T>& values) { std::fwrite(values.data(), sizeof(T), values.size(), stdout); }

int main() {
    const auto sizes = taken<int32_t>(5);
    const int bits = sizes[0], rotated = sizes[4];
    const int64_t rows = sizes[1], columns = sizes[2], tokens = sizes[3], blocks = num_blocks(columns);
    const auto codebook = taken<float>(1 << bits), weight = taken<float>(rows * columns);
    const auto x = taken<float>(tokens * columns);
    std::vector<int32_t> planes(rows * blocks * bits);
    std::vector<uint8_t> absmax(rows * blocks);
    cpu::quantize(weight.data(), Dtype::float32, codebook.data(), bits, true, rotated, columns, planes.data(),
                  absmax.data(), 0, rows);
    std::vector<float> decoded(rows * columns), out(tokens * rows);
    cpu::dequantize(planes.data(), absmax.data(), rotated, codebook.data(), bits, columns, nullptr, rotated,
                    decoded.data(), Dtype::float32, 0, rows);
    std::vector<float> panel(cpu::gemm_panel_size(Dtype::float32, tokens, false, columns));
    cpu::gemm_pack(x.data(), Dtype::float32, tokens, false, columns, nullptr, rotated, panel.data(), 0, tokens);
    cpu::gemm(panel.data(), tokens, false, planes.data(), absmax.data(), rotated, codebook.data(), bits, nullptr,
              out.data(), Dtype::float32, rows, columns, 0, rows);
    give(planes), give(absmax), give(decoded), give(out);
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """Of sizes and tensors, what the driver makes of them."""
    for tool, name in ((COMPILER, "g++-aarch64-linux-gnu"), (EMULATOR, "qemu-user-static")):
        if not tool:
            pytest.skip(f"{name} of Debian is not installed")
    folder = tmp_path_factory.mktemp("arm")
    (folder / "driver.cpp").write_text(DRIVER)
    sources = [folder / "driver.cpp", *(SOURCE / "cpu").glob("*.cpp")]
    flags = ["-std=c++17", "-O3", "-static", "-ffp-contract=off", f"-I{SOURCE}", "-Wall", "-Wextra", "-Werror"]
    command = [COMPILER, *flags, "-o", folder / "driver", *sources]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr

    def run(sizes, *tensors):
        given = struct.pack(f"{len(sizes)}i", *sizes) + b"".join(tensor.numpy().tobytes() for tensor in tensors)
        return subprocess.run([EMULATOR, folder / "driver"], input=given, capture_output=True, check=True).stdout

    return run


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("bits", cases.BITS)
def test_kernels(driver, bits, rotated):
    shape, codebook = (19, 1000 if not rotated else 992), cases.codebook(bits) * (16 if rotated else 1)
    weight = cases.weight(shape)
    planes, absmax = reference.quantize(weight, codebook, True, rotated)
    decoded = reference.dequantize(planes, absmax, codebook, list(shape), torch.float32, None, rotated)
    for tokens in (1, 5):
        x = cases.x((tokens,), shape[1])
        found = bytearray(driver([bits, *shape, tokens, rotated], codebook, weight, x))
        for expected in (planes, absmax, decoded):
            ours = torch.frombuffer(found[: expected.nbytes], dtype=expected.dtype).view(expected.shape)
            assert torch.equal(ours, expected)
            del found[: expected.nbytes]
        product = torch.frombuffer(found, dtype=torch.float32).view(tokens, shape[0])
        stored = cases.stored(planes, absmax, codebook, rotated)[:, : shape[1]]
        cases.assert_product(product, x, stored.T, rotated=rotated)
