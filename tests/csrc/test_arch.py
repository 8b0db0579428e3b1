"""Which architecture is planned for: ``csrc/kernels/arch.h``, compiled for the CPU."""

import ctypes

import pytest

WRAPPER = """
#include <cstring>

#include "kernels/arch.h"

extern "C" int shared_limit_of(int arch) { return hf_kbit::shared_limit_of(arch); }
extern "C" int wanted_arch(const char* wanted, int of_code, int of_gpu, char* message) {
    try {
        return hf_kbit::wanted_arch(wanted, of_code, of_gpu);
    } catch (const std::invalid_argument& error) {
        std::strncpy(message, error.what(), 200);
        return 0;
    }
}
"""


@pytest.fixture(scope="module")
def library(compile_for_cpu):
    return compile_for_cpu(WRAPPER)


@pytest.fixture(scope="module")
def wanted_arch(library):
    def call(wanted, of_code, of_gpu):
        message = ctypes.create_string_buffer(201)
        found = library.wanted_arch(None if wanted is None else wanted.encode(), of_code, of_gpu, message)
        return found or message.value.decode()

    return call


@pytest.mark.parametrize("wanted", [None, ""])
def test_without_a_wish_it_is_the_gpus(wanted_arch, wanted):
    assert wanted_arch(wanted, 800, 900) == 900


@pytest.mark.parametrize("wanted", ["80", "86", "89", "90"])
def test_any_that_runs_the_code(wanted_arch, wanted):
    assert wanted_arch(wanted, 800, 900) == int(wanted) * 10


@pytest.mark.parametrize(
    "wanted", ["sm_80", "8.0", "90a", " 80", "80 ", "-80", "75", "100", "900", "9" * 30, "0", "a"]
)
def test_refuses_what_is_no_number_or_does_not_run(wanted_arch, wanted):
    expected = (
        f"HF_KBIT_CUDA_ARCH: found {wanted}, expected a number from 80, for which the code in use was built, to "
    )
    assert wanted_arch(wanted, 800, 900) == expected + "90, this GPU's"


def test_shared_memory(library):
    """KB, from the CUDA programming guide's table of compute capabilities."""
    table = {750: 64, 800: 163, 860: 99, 870: 163, 890: 99, 900: 227, 1000: 227, 1030: 227, 1200: 99, 1210: 99}
    assert {arch: library.shared_limit_of(arch) >> 10 for arch in table} == table
