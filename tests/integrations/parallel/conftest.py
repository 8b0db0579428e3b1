"""What each file here has: models that ``checkpoints(folder)`` saves, and what ``in_each_process`` finds of them."""

import pytest
import ranks


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    request.module.checkpoints(folder)
    return folder


@pytest.fixture(scope="module")
def found(request, folder):
    return ranks.run(request.module.in_each_process, folder)
