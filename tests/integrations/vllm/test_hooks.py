"""What the plugin relies on in vLLM."""

import re
from pathlib import Path

import pytest
import vllm.envs

from hf_kbit.hooks import setting, table
from hf_kbit.integrations.vllm import register


@pytest.mark.parametrize("entry", (*table.VLLM_NAMES, *table.VLLM_HOOKS, *table.VLLM_WORKER_HOOKS), ids=repr)
def test_the_installed_vllm_has_what_we_expect(entry):
    setting.install_vllm()
    assert setting.moved([entry]) == []


def test_a_moved_name_is_a_warning(monkeypatch):
    """vLLM goes on with models that are not ours."""
    moved = table.Name("vllm.model_executor.layers.linear:LinearMethodBase.make_weights")
    monkeypatch.setattr(table, "VLLM_NAMES", (*table.VLLM_NAMES, moved))
    with pytest.warns(RuntimeWarning, match=r"cannot be served: vllm .*make_weights \(found none\)"):
        register()


def test_vllm_knows_the_variables_that_tests_and_benchmarks_set():
    root = Path(__file__).parents[3]
    files = [file for folder in ("tests", "benchmarks") for file in (root / folder).rglob("*.py")]
    named = {name: file for file in files for name in re.findall(r'"(VLLM_[A-Z0-9_]+)": ', file.read_text())}
    unknown = {name: file for name, file in named.items() if name not in vllm.envs.environment_variables}
    assert named and not unknown
