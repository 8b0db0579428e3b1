"""Compiled kernels are compared with ``hf_kbit.reference``, on a CPU and, marked ``gpu``, on a GPU."""

import pytest
import torch

from hf_kbit import _native


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    library = _native.library(request.param)
    if not library.loaded:
        pytest.skip(f"no compiled kernels for {request.param}: {library.missing}")
    return request.param


@pytest.fixture
def poison():
    """Fills memory that was just free with ones: an output that a kernel leaves out is not zero by chance."""

    def fill(device, *sizes):
        held = [torch.full((size,), -1, dtype=torch.int8, device=device) for size in sizes for _ in range(3)]
        del held

    return fill
