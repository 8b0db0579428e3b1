"""What all tests share: GPU tests are skipped, with the reason, where there is no GPU."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device, or a torch without CUDA"))
