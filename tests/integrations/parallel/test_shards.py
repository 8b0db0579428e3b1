"""One packed weight as shards of two processes: gathered, padded, broadcast, and under FSDP2."""

import itertools

import pytest
import ranks
import torch
from adapters import assert_same_state
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hf_kbit import KbitLinear
from hf_kbit.nn.weight import whole

WIDTH = 128
ROWS = (64, 35, 3, 1)  # whole tiles in each process, odd ones, and none in one of them
BROADCAST = ROWS[:3]  # of which each process has some
FORMS = ("planes", "tiles")
POLICIES = {
    "plain": {},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
}
PLACEMENTS = {
    **{f"{rows} rows": (rows, Shard(0)) for rows in ROWS},
    "columns": (64, Shard(1)),
    "gates": (64, _StridedShard(0, split_factor=2)),
}
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def linear(rows: int, seed: int = 0) -> KbitLinear:
    torch.manual_seed(seed)
    return KbitLinear.from_linear(nn.Linear(WIDTH, rows), bits=5)


def step(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out, and the gradient of what goes in."""
    x = X.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return y.detach().float(), x.grad


def shard(layer: nn.Module, mesh, **policies) -> nn.Module:
    model = nn.Sequential(layer, nn.Identity())
    fully_shard(model[0], mesh=mesh, **policies)
    return fully_shard(model, mesh=mesh, **policies)


def in_each_process(rank, folder):
    found, mesh = {}, init_device_mesh("cpu", (ranks.SIZE,))
    options = StateDictOptions(full_state_dict=True)
    for form in FORMS:
        with ranks.where_tiles_are_read(form == "tiles"):
            for name, (rows, placement) in PLACEMENTS.items():
                sharded = distribute_tensor(linear(rows).weight.data, mesh, [placement])
                found[form, name] = whole(sharded).file_tensors()
            for rows, (policy, settings) in itertools.product(ROWS, POLICIES.items()):
                model = shard(linear(rows), mesh, **settings)
                found[form, rows, policy] = [step(model), step(model)]  # gathered anew
                state = get_model_state_dict(model, options=options) if policy == "plain" else {}
                if state:
                    found[form, rows] = state["0.weight"].dequantize()
                if rows in BROADCAST and policy == "plain":
                    other = shard(linear(rows, seed=1), mesh)
                    other(X)
                    broadcast = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                    set_model_state_dict(other, state if rank == 0 else {}, options=broadcast)
                    found[form, rows, "broadcast"] = [step(other)]
    return found


def checkpoints(folder):
    pass


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("form", FORMS)
def test_gathering_brings_all_of_it(found, form, name):
    """Also the column scales of the other process's columns."""
    for process in found:
        assert_same_state(process[form, name], linear(PLACEMENTS[name][0]).packed)


@pytest.mark.parametrize(
    ("rows", "policy"), [*itertools.product(ROWS, POLICIES), *((rows, "broadcast") for rows in BROADCAST)]
)
@pytest.mark.parametrize("form", FORMS)
def test_fsdp2_computes_what_one_process_does(found, form, rows, policy):
    expected, tolerance = step(linear(rows)), {"rtol": 2e-2, "atol": 5e-2} if policy == "mixed" else {}
    for process in found:
        for made in process[form, rows, policy]:
            torch.testing.assert_close(made, expected, **tolerance)
        assert torch.equal(process[form, rows], linear(rows).dequantize())
