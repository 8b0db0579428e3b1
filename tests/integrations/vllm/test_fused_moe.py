"""Experts whose tokens come from several processes, for which vLLM needs GPUs."""

from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from hf_kbit.integrations.vllm import fused_moe
from hf_kbit.nn.experts import KbitProjection

SIZE, EXPERTS = 64, 4


class Group:
    """What vLLM has for this process and a second one, which has tokens of its own."""

    def __init__(self, divided: bool, *others: torch.Tensor):
        self.divided, self.others, self.made = divided, others, None

    def dispatch(self, x, topk_weights, topk_ids, is_sequence_parallel):
        assert is_sequence_parallel == self.divided
        return [torch.cat(pair) for pair in zip((x, topk_weights, topk_ids), self.others, strict=True)]

    def combine(self, hidden_states, is_sequence_parallel):
        assert is_sequence_parallel == self.divided
        self.made = hidden_states
        return hidden_states[: -len(self.others[0])]


def projection(rows: int) -> KbitProjection:
    made = KbitProjection(EXPERTS, in_features=SIZE, out_features=rows)
    made.load(made.quantize(torch.randn(EXPERTS, rows, SIZE)))
    return made.eval()


def routed(tokens: int) -> tuple[torch.Tensor, ...]:
    """Inputs, weights and experts as vLLM's routers make them, with -1 for the last token, which is padding."""
    experts = torch.rand(tokens, EXPERTS).topk(2).indices.int()
    experts[-1] = -1
    return torch.randn(tokens, SIZE), torch.rand(tokens, 2) * (experts >= 0), experts


def method_of(**parallel) -> fused_moe.KbitExpertsMethod:
    moe = SimpleNamespace(**({"dp_size": 1, "is_sequence_parallel": False} | parallel))
    return fused_moe.KbitExpertsMethod(moe, "experts", {"gate_up_proj": None, "down_proj": None}, {})


@pytest.mark.parametrize("parallel", [{"dp_size": 2}, {"is_sequence_parallel": True}], ids=str)
def test_tokens_of_other_processes_come_after_routing(parallel, monkeypatch):
    """vLLM's routers know which tokens are padding of those of their own process alone."""
    torch.manual_seed(0)
    layer = SimpleNamespace(activation=MoEActivation.SILU, expert_map=None, up_bias=None, down_bias=None)
    layer.up, layer.down = projection(2 * SIZE), projection(SIZE)
    own, others = routed(3), routed(5)
    expected = method_of().apply(layer, *map(torch.cat, zip(own, others, strict=True)), None, None)
    assert expected.any(1).tolist() == [True, True, False, True, True, True, True, False]

    method = method_of(**parallel)
    group = Group(method.moe.is_sequence_parallel, *others)
    monkeypatch.setattr(fused_moe, "get_ep_group", lambda: group)
    runner = SimpleNamespace(moe_config=method.moe, _quant_method=method)
    assert not MoERunner.do_naive_dispatch_combine.fget(runner), "vLLM has them come before"
    assert torch.equal(method.apply(layer, *own, None, None), expected[:3])
    assert torch.equal(group.made, expected)
