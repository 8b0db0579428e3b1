"""What cannot shard quantized models says so, and leaves other models alone."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from adapters import quantized
from packaging.version import Version
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import LlamaForCausalLM
from transformers.integrations import deepspeed

from hf_kbit import KbitLinear
from hf_kbit.integrations import sharding


def models():
    return nn.Sequential(nn.Linear(64, 64), KbitLinear.from_linear(nn.Linear(64, 64))), nn.Sequential(
        nn.Linear(64, 64)
    )


@pytest.fixture
def group(tmp_path):
    """Of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_fsdp1(group):
    packed, dense = models()
    wrap = partial(FullyShardedDataParallel, device_id=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"1: found a quantized layer, expected none for FullyShardedDataParallel.*use"
    ):
        wrap(packed)
    assert wrap(dense)(torch.ones(1, 64)).shape == (1, 64)


@pytest.mark.parametrize("several", [False, True])
def test_fsdp2_of_a_torch_that_shards_no_integers(group, monkeypatch, several):
    monkeypatch.setattr(torch, "__version__", "2.11.1+cu126")
    refusing = sharding.refuse_old_torch(fully_shard)
    monkeypatch.undo()
    packed, dense = models()
    with pytest.raises(ValueError, match=r"found a quantized layer, expected torch 2\.12 or newer to shard them"):
        refusing([dense, packed] if several else packed)
    mesh = init_device_mesh("cpu", (1,))
    refusing(dense, mesh=mesh)
    assert refusing.state(dense) is not None, "by which torch itself asks the function about modules"


def test_fsdp2_of_this_torch_is_left_as_it_is():
    assert (sharding.refuse_old_torch(fully_shard) is fully_shard) == (Version(torch.__version__) >= Version("2.12"))


def test_zero3(monkeypatch, tmp_path):
    """Before a quantized model is loaded, and where a Trainer asks whether it can be trained."""
    model = quantized()
    model.save_pretrained(tmp_path)

    class ZeRO3:
        def is_zero3(self):
            return True

    monkeypatch.setattr(deepspeed, "_hf_deepspeed_config_weak_ref", ZeRO3)
    for call in (partial(LlamaForCausalLM.from_pretrained, tmp_path), lambda: model.hf_quantizer.is_trainable):
        with pytest.raises(ValueError, match=r"DeepSpeed: found ZeRO-3, expected ZeRO-1 or ZeRO-2"):
            call()
