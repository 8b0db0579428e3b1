"""Which architecture is planned for: ``csrc/kernels/arch.h``, compiled for the CPU."""

import ctypes

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


REFUSED = ["sm_80", "8.0", "90a", " 80", "80 ", "-80", "75", "100", "900", "9" * 30, "0", "a"]


def test_wanted_arch(compile_for_cpu):
    """That of the GPU or, for tests, any other that runs the code."""
    library, message = compile_for_cpu(WRAPPER), ctypes.create_string_buffer(201)
    for wanted, expected in ((None, 900), (b"", 900), (b"80", 800), (b"86", 860), (b"89", 890), (b"90", 900)):
        assert library.wanted_arch(wanted, 800, 900, message) == expected
    for wanted in REFUSED:
        assert library.wanted_arch(wanted.encode(), 800, 900, message) == 0
        assert message.value.decode() == (
            f"HF_KBIT_CUDA_ARCH: found {wanted}, expected a number from 80, for which the code in use was built, to "
            "90, this GPU's"
        )
    # KB, from the CUDA programming guide's table of compute capabilities.
    table = {750: 64, 800: 163, 860: 99, 870: 163, 890: 99, 900: 227, 1000: 227, 1030: 227, 1200: 99, 1210: 99}
    assert {arch: library.shared_limit_of(arch) >> 10 for arch in table} == table
