"""FSDP2 of quantized layers; what cannot shard quantized models says so, and leaves other models alone."""

import copy
from functools import partial

import pytest
import torch
import torch.distributed as dist
from adapters import quantized
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
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


@pytest.mark.parametrize("version", [None, "2.11.1+cu126"], ids=["this torch", "2.11"])
def test_fsdp2_casts_no_integers(group, monkeypatch, version):
    if version:  # what is changed for it, which this one may not need
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(_fsdp_param, "nn", nn)
        monkeypatch.setattr(FSDPParam, "init_dtype_attrs", FSDPParam.init_dtype_attrs)
        assert sharding.shard_integers(fully_shard) is fully_shard
    packed, _ = models()
    packed.append(nn.Linear(64, 64))
    x = torch.randn(3, 64)
    expected = copy.deepcopy(packed).bfloat16()(x.bfloat16())
    words = packed[1].weight.clone()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(packed, mesh=init_device_mesh("cpu", (1,)), mp_policy=policy)
    assert packed[1].weight.dtype == torch.int32 and not packed[1].weight.requires_grad
    torch.testing.assert_close(packed(x), expected, rtol=2e-2, atol=2e-2)
    packed(x).sum().backward()
    assert packed[-1].weight.grad is not None
    assert torch.equal(packed[1].weight.full_tensor(), words)


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
