"""benchmarks/optimal_levels.py finds the levels that the package has, whatever torch is set to."""

import pytest
import torch

from hf_kbit import codebooks
from hf_kbit.format.spec import BITS


@pytest.mark.parametrize("signed", [False, True])
def test_levels_of_the_package(benched, signed):
    found, threads = benched("optimal_levels"), torch.get_num_threads()
    torch.set_num_threads(3 - min(threads, 2))
    torch.set_default_dtype(torch.bfloat16)
    try:
        for bits in BITS:
            levels = codebooks.optimal(bits, signed)
            expected = levels if signed else levels[2 ** (bits - 1) :]
            assert [level / 2**13 for level in found.find(bits, signed)] == list(expected)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
