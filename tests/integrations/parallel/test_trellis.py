"""Layers with a trellis in two processes: shards of weights, tensor and expert parallelism, and FSDP2."""

import exl3
import pytest
import ranks
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import LlamaConfig, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from hf_kbit.nn.weight import local, whole
from hf_kbit.weight.trellis import TrellisTensor

SIDES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SHAPE = {"vocab_size": 256, "head_dim": 128, "num_hidden_layers": 1, **SIDES}
EXPERTS = {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "experts": Qwen3MoeConfig(**SHAPE, **EXPERTS),
    "narrow": LlamaConfig(**SHAPE | {"num_key_value_heads": 1}),
}
Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.experts.gate_up_proj"


def checkpoints(folder):
    for name, config in MODELS.items():
        exl3.save_random(config, folder / name)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(ranks.IDS).logits


def sharded(folder, mesh):
    model = ranks.load(folder)
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model


def in_each_process(rank, folder):
    mesh, found = init_device_mesh("cpu", (ranks.SIZE,)), {}
    for name in ("llama", "experts"):
        one = ranks.load(folder / name).eval()
        found[name, "one"] = logits(one)
        weights = {key: own.data for key, own in one.named_parameters() if isinstance(own, TrellisTensor)}
        for key, dim in ((f"{Q}.weight", 0), (f"{Q}.weight", 1), (f"{UP}.weight", 0), (f"{UP}.weight", 2)):
            if key in weights:
                made = distribute_tensor(weights[key], mesh, [Shard(dim)])
                same = torch.equal(whole(made).dequantize(), weights[key].dequantize())
                found[name, key, dim] = same, type(local(made)), tuple(local(made).shape)
        model = sharded(folder / name, mesh)
        steps = [model(ranks.IDS, labels=ranks.IDS) for _ in range(2)]  # gathered anew
        steps[1].loss.backward()
        found[name, "fsdp"] = steps[1].logits.detach()
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        other = sharded(folder / name, mesh)
        set_model_state_dict(other, state if rank == 0 else {}, options=broadcast)
        found[name, "broadcast"] = logits(other)
        for way, config in (("tp", DistributedConfig(tp_size=2)), ("ep", ranks.expert_parallel())):
            if name == "experts" or way == "tp":
                model = ranks.load(folder / name, distributed_config=config).eval()
                found[name, way] = logits(model)
                model.save_pretrained(folder / f"{name}-{way}")
    config = DistributedConfig(tp_size=2)
    found["narrow"] = ranks.complaint_before_reading(ranks.load, folder / "narrow", distributed_config=config)
    return found


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_it_computes_what_one_process_does(found, folder, name):
    expected = found[0][name, "one"]
    ways = ["fsdp", "broadcast", "tp"] + ["ep"] * (name == "experts")
    for process in found:
        for way in ways:
            torch.testing.assert_close(process[name, way], expected, rtol=0, atol=2e-5, msg=way)
    for way in ways[2:]:
        assert torch.equal(logits(ranks.load(folder / f"{name}-{way}").eval()), expected), "saved by both processes"


def test_shards_are_parts_and_come_together(found):
    sizes = {(Q, 0): (256, 256), (Q, 1): (512, 128), (UP, 0): (2, 512, 256), (UP, 2): (4, 512, 128)}
    for process in found:
        shards = {key[1:]: value for key, value in process.items() if len(key) == 3}
        assert {(key.removesuffix(".weight"), dim): shape for (key, dim), (*_, shape) in shards.items()} == sizes
        assert all(same and kind is TrellisTensor for same, kind, _ in shards.values())


def test_cuts_inside_a_block_are_refused(found):
    """By the layer's name, before anything is read."""
    for process in found:
        assert (
            f"{Q.replace('q_proj', 'k_proj')}.out_features: found 128, expected a multiple of 256" in process["narrow"]
        )
