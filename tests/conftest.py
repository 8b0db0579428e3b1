"""What all tests share: the devices, and that GPU tests are skipped, with the reason, where there is no GPU."""

import os
import zlib
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
from fresh import Fresh

pytest.register_assert_rewrite("kinds", "adapters")  # what they assert is shown as in tests
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the Hub; read by huggingface_hub's import
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on CPUs, one operation at a time; read by its import


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    """A test that takes it runs on a CPU and, marked ``gpu``, on a GPU."""
    return request.param


@pytest.fixture(params=["planes", "tiles"])
def form(request, monkeypatch) -> str:
    """Of packed weights in memory: as files have them, or what kernels of a GPU read, on a CPU too."""

    from hf_kbit.weight import scalar  # not at the top: Triton reads what is set there

    if request.param == "tiles":
        monkeypatch.setattr(scalar, "reads_tiles", lambda device: device.type == "cpu")
    return request.param


@pytest.fixture
def always_int8() -> Iterator[None]:
    """8-bit inputs are rounded wherever they are asked for, also where a GPU is faster without."""
    from hf_kbit.ops import set_batch_invariant  # not at the top: Triton reads what is set there

    set_batch_invariant(True)
    yield
    set_batch_invariant(False)


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What a test, or a library in it, does to the environment ends with the test.

    PEFT's BOFT, where its CUDA code does not compile, leaves ``CXX=gcc``, with which Inductor links no C++.
    """
    with patch.dict(os.environ):
        yield


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    """Runs code where neither hf_kbit nor PEFT was imported before."""
    process = Fresh()
    yield process
    process.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """What a test draws, its fixtures included, goes by its name and not by what ran before it.

    Each has a seed of its own: with one for all, a model that a test makes would equal one of another test's fixture.
    """
    torch.manual_seed(zlib.crc32(item.nodeid.encode()))


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or a torch without CUDA"))
