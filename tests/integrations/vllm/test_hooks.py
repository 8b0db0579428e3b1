"""What the plugin relies on in vLLM."""

import pytest

from hf_kbit import hooks
from hf_kbit.integrations.vllm import register


@pytest.mark.parametrize("entry", (*hooks.VLLM_NAMES, *hooks.VLLM_HOOKS, *hooks.VLLM_WORKER_HOOKS), ids=repr)
def test_the_installed_vllm_has_what_we_expect(entry):
    hooks.install_vllm()
    assert hooks.moved([entry]) == []


def test_a_moved_name_is_a_warning(monkeypatch):
    """vLLM goes on with models that are not ours."""
    moved = hooks.Name("vllm.model_executor.layers.linear:LinearMethodBase.make_weights")
    monkeypatch.setattr(hooks, "VLLM_NAMES", (*hooks.VLLM_NAMES, moved))
    with pytest.warns(RuntimeWarning, match=r"cannot be served: vllm .*make_weights \(found none\)"):
        register()
