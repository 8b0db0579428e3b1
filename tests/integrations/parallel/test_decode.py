"""hf_kbit.decode of models that two processes share, under tensor and expert parallelism."""

from unittest.mock import patch

import pytest
import ranks
import torch
from adapters import relative
from torch._dynamo.utils import counters
from transformers.distributed import DistributedConfig

import hf_kbit
from hf_kbit.decoding import loop, sums
from hf_kbit.decoding.step import logits_of

WAYS = {"tensor": ("llama", "qwen3_moe", "tied"), "expert": ("qwen3_moe", "gpt_oss")}
CASES = [(way, name) for way, names in WAYS.items() for name in names]
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20}
# How many sums of a layer have their norm with them: a bias parts one from its own.
SUMMED = {"llama": 1, "qwen3_moe": 2}


def tokens(model, seed=0, **settings) -> torch.Tensor:
    torch.manual_seed(seed)
    ids = ranks.IDS.to(model.device)
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, **{"do_sample": False, **settings}
    ).cpu()


def load(way, path):
    return ranks.load(
        path, distributed_config=ranks.expert_parallel() if way == "expert" else DistributedConfig(tp_size=ranks.SIZE)
    )


def in_each_process(rank, folder):
    found = {}
    for way, name in CASES:
        model = ranks.as_on_a_gpu(load(way, folder / name))
        found[way, name] = {
            "greedy": tokens(model, custom_generate=hf_kbit.decode),
            "sampled": tokens(model, custom_generate=hf_kbit.decode, **SAMPLED),
        }
    sample = {"custom_generate": hf_kbit.decode, **SAMPLED}
    found["complaints"] = {
        "seed": ranks.complaint(tokens, model, seed=rank, **sample),
        "time": ranks.complaint(tokens, model, max_time=60.0, custom_generate=hf_kbit.decode),
    }
    found["graphs"] = graphs(load("tensor", folder / "qwen3_moe"))
    return found | {("compiled", name): compiled(load("tensor", folder / name)) for name in SUMMED}


def graphs(model) -> tuple[int, int, bool]:
    """How many graphs a step is, and how many breaks it has; and whether the model has its hooks afterwards."""
    counters.clear()
    with loop._without_backward_hooks(model), torch.no_grad():
        torch.compile(logits_of, dynamic=False, backend="eager")(model, {"input_ids": ranks.IDS})
    hooks = any(module._backward_hooks for module in model.modules())
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), hooks


def compiled(model) -> dict:
    """Logits of code that sums directly: by gloo here, as a CPU has no memory that other processes read."""
    replaced = dict.fromkeys(("sum_directly", "sum_and_norm"), 0)

    class Counted(sums.SumDirectly):
        def __call__(self, graph):
            super().__call__(graph)
            for name in replaced:
                target = getattr(torch.ops.hf_kbit, name).default
                replaced[name] += len(graph.find_nodes(op="call_function", target=target))

        def uuid(self):
            return None  # never from a cache

    group = loop._processes(model)
    passes = torch._inductor.config.patch(post_grad_custom_post_pass=Counted())
    places = patch.dict(sums._places, {group.group_name: None})
    with places, passes, loop._without_backward_hooks(model), torch.no_grad():
        found = torch.compile(logits_of, dynamic=False)(model, {"input_ids": ranks.IDS})
    return {"logits": found, "replaced": replaced}


def checkpoints(folder):
    for name in {name for _, name in CASES}:
        ranks.save_quantized(name, folder)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("way", "name"), CASES)
def test_tokens_are_those_of_one_process(found, folder, way, name, settings):
    expected = tokens(ranks.load(folder / name), **settings)
    for process in found:
        assert torch.equal(process[way, name]["sampled" if settings else "greedy"], expected)


def test_what_processes_would_not_agree_on_is_refused(found):
    for process in found:
        assert "found random generators in different states in the processes" in process["complaints"]["seed"]
        assert "found max_time, expected none for a model that processes share" in process["complaints"]["time"]


def test_a_step_is_one_graph(found):
    """Though plans of Transformers 5.17 put hooks on Qwen3's norms, that add up gradients; the model keeps them."""
    for process in found:
        assert process["graphs"] == (1, 0, ranks.OLD)


@pytest.mark.parametrize("name", SUMMED)
def test_sums_of_compiled_code(found, folder, name):
    """Two of each layer, and that of the table where Transformers shares it; the logits are gathered, not summed."""
    expected = logits_of(ranks.load(folder / name), {"input_ids": ranks.IDS})
    layers, normed = ranks.SETTINGS["num_hidden_layers"], SUMMED[name]
    for process in found:
        replaced = process["compiled", name]["replaced"]
        assert replaced == {"sum_directly": (2 - normed) * layers + (not ranks.OLD), "sum_and_norm": normed * layers}
        assert relative(process["compiled", name]["logits"], expected) < 2e-6
