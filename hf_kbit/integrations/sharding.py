"""What cannot shard packed weights, refused before it fails on them in words of its own: FSDP1 and DeepSpeed's ZeRO-3.

FSDP2 can (``torch.distributed.fsdp.fully_shard``), from the torch on that shards integers.
"""

from functools import wraps

import torch
from packaging.version import Version
from torch import nn
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

from hf_kbit.nn.weight import KbitWeight

OLDEST_TORCH = "2.12"  # of which FSDP2 shards integers


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


def refuse_old_torch(fully_shard):
    """``fully_shard`` that says which torch it takes."""
    if Version(torch.__version__) >= Version(OLDEST_TORCH):
        return fully_shard

    @wraps(fully_shard)
    def wrapped(module, *args, **kwargs):
        for part in module if isinstance(module, (list, tuple)) else [module]:
            _refuse(part, f"expected torch {OLDEST_TORCH} or newer to shard them, found {torch.__version__}")
        return fully_shard(module, *args, **kwargs)

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
