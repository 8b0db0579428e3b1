"""Ops are compared with float64, on a CPU and, marked ``gpu``, on a GPU."""

import pytest
import torch


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
