"""LoRA by PEFT's ``target_parameters`` on the packed weight of a linear layer.

PEFT adds ``B @ A`` to a parameter while the layer runs, which would decode it each time. Of a linear layer that is
LoRA beside the layer, in the same parameters.
"""

import torch
from peft.tuners.lora.layer import Linear, ParamWrapper
from torch import nn

from hf_kbit.integrations.peft.layer import KbitTunerLayer


class KbitLinearWrapper(KbitTunerLayer, ParamWrapper):
    """LoRA on the weight ``[N, K]`` of a ``KbitLinear``: ``lora_A[adapter].weight`` is floating ``[r, K]``,
    ``lora_B[adapter].weight`` ``[N, r]``, as of PEFT's ``ParamWrapper``."""

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        run = ParamWrapper.forward if self.quantized is None else Linear.forward
        return run(self, x, *args, **kwargs)

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names) -> nn.Module:
        if merge:
            self.merge(safe_merge=safe_merge, adapter_names=adapter_names)
        return self.base_layer  # which merging into 16 bits replaces

    __reduce_ex__ = object.__reduce_ex__  # pickle finds this class by its name
