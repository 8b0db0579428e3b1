"""hf_kbit.fast_generate from models that two processes share, under tensor and expert parallelism."""

from unittest.mock import patch

import pytest
import ranks
import torch
from adapters import relative
from torch._dynamo.utils import counters
from transformers.distributed import DistributedConfig

import hf_kbit
from hf_kbit.generation import all_reduce
from hf_kbit.generation.decode_step import for_one_token, logits_of
from hf_kbit.generation.fast_generate import _tensor_parallel_group

CASES = [("tensor", name) for name in ("llama", "qwen3_moe", "tied")] + [
    ("expert", name) for name in ("qwen3_moe", "gpt_oss")
]
FAST = {"custom_generate": hf_kbit.fast_generate}
SETTINGS = {"greedy": {"do_sample": False}, "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 20}}
# Models that are compiled: their layers, and how many sums of each have their norm with them, from which a bias parts.
COMPILED = {"llama": (2, 1), "shallow qwen3_moe": (1, 2)}


def tokens(model, settings="greedy", seed=0, **others) -> torch.Tensor:
    torch.manual_seed(seed)
    ids = ranks.IDS.to(model.device)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    length = {"max_new_tokens": 12, "min_new_tokens": 12}
    return model.generate(ids, attention_mask=mask, **length, **SETTINGS[settings], **others).cpu()


def load(way, path):
    plan = ranks.expert_parallel() if way == "expert" else DistributedConfig(tp_size=ranks.SIZE)
    return ranks.load(path, distributed_config=plan)


def in_each_process(rank, folder):
    found = {}
    for way, name in CASES:
        model = ranks.as_on_a_gpu(load(way, folder / name))
        found[way, name] = {settings: tokens(model, settings, **FAST) for settings in SETTINGS}
    found["complaints"] = [
        ranks.complaint(tokens, model, "sampled", seed=rank, **FAST),
        ranks.complaint(tokens, model, max_time=60.0, **FAST),
    ]
    return found | {("compiled", name): compiled(load("tensor", folder / name)) for name in COMPILED}


def compiled(model) -> dict:
    """Logits of code with our all-reduce: by gloo here, as a CPU has no memory that other processes read."""
    replaced = dict.fromkeys(("all_reduce", "all_reduce_norm"), 0)

    class Counted(all_reduce.AllReducePass):
        def __call__(self, graph):
            super().__call__(graph)
            for name in replaced:
                target = getattr(torch.ops.hf_kbit, name).default
                replaced[name] += len(graph.find_nodes(op="call_function", target=target))

        def uuid(self):
            return None  # never from a cache

    counters.clear()
    passes = torch._inductor.config.patch(post_grad_custom_post_pass=Counted())
    buffers = patch.dict(all_reduce._buffers, {_tensor_parallel_group(model).group_name: None})
    with buffers, passes, for_one_token(model), torch.no_grad():
        logits = torch.compile(logits_of, dynamic=False)(model, {"input_ids": ranks.IDS})
    hooks = any(module._backward_hooks for module in model.modules())
    graphs = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return {"logits": logits, "replaced": replaced, "graphs": graphs, "hooks": hooks}


def checkpoints(folder):
    for name in {name for _, name in CASES}:
        ranks.save_quantized(name, folder)
    ranks.save_quantized("qwen3_moe", folder, "shallow qwen3_moe", num_hidden_layers=1)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize(("way", "name"), CASES)
def test_tokens_are_those_of_one_process(found, folder, way, name, settings):
    expected = tokens(ranks.load(folder / name), settings)
    assert all(torch.equal(process[way, name][settings], expected) for process in found)


def test_what_processes_would_not_agree_on_is_refused(found):
    for process in found:
        seed, time = process["complaints"]
        assert "found random generators in different states in the processes" in seed
        assert "found max_time, expected none for a model that processes share" in time


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps(found, folder, name):
    """One graph, though plans of Transformers 5.17 put hooks on Qwen3's norms, that add up gradients: the model keeps
    them. Sums: two of each layer, and that of the table where Transformers shares it; the logits are gathered."""
    expected = logits_of(ranks.load(folder / name), {"input_ids": ranks.IDS})
    layers, normed = COMPILED[name]
    for process in found:
        step = process["compiled", name]
        assert step["graphs"] == (1, 0) and step["hooks"] == (ranks.OLD and "qwen3_moe" in name)
        assert step["replaced"] == {
            "all_reduce": (2 - normed) * layers + (not ranks.OLD),
            "all_reduce_norm": normed * layers,
        }
        assert relative(step["logits"], expected) < 2e-6
