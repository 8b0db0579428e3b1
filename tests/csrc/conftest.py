"""Compiled kernels are compared with ``hf_kbit.reference``, on a CPU and, marked ``gpu``, on a GPU."""

import pytest
import torch

from hf_kbit import _native


@pytest.fixture
def device(device):
    library = _native.library(device)
    if not library.loaded:
        pytest.skip(f"no compiled kernels for {device}: {library.missing}")
    return device


@pytest.fixture
def poison():
    """Fills memory that was just free with ones: an output that a kernel leaves out is not zero by chance."""

    def fill(device, *sizes):
        held = [torch.full((size,), -1, dtype=torch.int8, device=device) for size in sizes for _ in range(3)]
        del held

    return fill
