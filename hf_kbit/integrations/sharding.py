"""FSDP2, which shards packed weights, and what cannot, refused before it fails on them in words of its own: FSDP1 and
DeepSpeed's ZeRO-3.
"""

from functools import wraps

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_kbit.nn.weight import KbitWeight


def refuse_fsdp1(init):
    """``FullyShardedDataParallel.__init__``, which makes one flat tensor of all parameters, that is of floats."""

    @wraps(init)
    def wrapped(self, module, *args, **kwargs):
        _refuse(
            module,
            "expected none for FullyShardedDataParallel, which cannot flatten packed integers: use FSDP2, "
            "torch.distributed.fsdp.fully_shard, or version 2 in fsdp_config of TrainingArguments",
        )
        init(self, module, *args, **kwargs)

    return wrapped


def shard_integers(fully_shard):
    """``fully_shard``, which from here on takes integers with any torch: before 2.12 its parameters want gradients
    while they are made, and a policy of mixed precision casts all of them."""
    if Version(torch.__version__) < Version("2.12"):
        from torch.distributed.fsdp._fully_shard import _fsdp_param  # private: elsewhere in a later torch, maybe

        if _fsdp_param.nn is nn:
            _fsdp_param.nn = _Modules
            _fsdp_param.FSDPParam.init_dtype_attrs = _cast_floats_alone(_fsdp_param.FSDPParam.init_dtype_attrs)
    return fully_shard


class _Modules:
    """What FSDP2's parameters use of ``torch.nn``."""

    Module = nn.Module

    @staticmethod
    def Parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad and data.is_floating_point())


def _cast_floats_alone(init_dtype_attrs):
    @wraps(init_dtype_attrs)
    def wrapped(self, mp_policy):
        init_dtype_attrs(self, mp_policy if self.sharded_param.is_floating_point() else MixedPrecisionPolicy())

    return wrapped


def _refuse(model: nn.Module, why: str) -> None:
    for name, module in model.named_modules():
        if isinstance(module, KbitWeight):
            raise ValueError(f"{name or 'module'}: found a quantized layer, {why}")


def refuse_zero3() -> None:
    """Raises if DeepSpeed is about to take models apart: its ZeRO-3 leaves layers without their weights' shapes."""
    if is_deepspeed_zero3_enabled():
        raise ValueError(
            "DeepSpeed: found ZeRO-3, expected ZeRO-1 or ZeRO-2 for a quantized model: use FSDP2 instead to shard it"
        )
