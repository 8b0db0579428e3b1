"""The experts of a mixture in vLLM: two ``KbitProjection`` of those that this process has, or of its part of each.

vLLM's models load experts in ways of their own, few of which know whole projections ``[E, N, K]``. So all tensors of
packed experts are taken out of the stream that a model loads (``loading.py``).
"""

import torch
from torch import nn
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from hf_kbit.format.decoding import ABSMAX, Decoding
from hf_kbit.integrations.vllm.linear import check_columns, own_columns, packed_of
from hf_kbit.nn.experts import DOWN_PROJECTION, KbitProjection
from hf_kbit.ops import combine_experts, route_experts

BIAS_SUFFIX = "_bias"
# What vLLM calls the gates that it has on every device; the first one our product makes itself.
GATES = {
    MoEActivation.SILU: "silu",
    MoEActivation.GELU: "gelu",
    MoEActivation.GELU_TANH: "gelu_pytorch_tanh",
    MoEActivation.SWIGLUOAI: "swigluoai",
}


class KbitExpertsMethod(FusedMoEMethodBase):
    """Loads and runs the experts of a layer: ``moe`` is vLLM's description, ``name`` theirs in the checkpoint,
    ``decodings`` are by own names of projections, and ``inputs`` those of ``KbitProduct``."""

    def __init__(self, moe, name: str, decodings: dict[str, Decoding], inputs: str | None = None):
        super().__init__(moe)
        self.name, self.decodings, self.inputs = name, decodings, inputs
        if len(decodings) != 2:
            raise ValueError(
                f"{name}: found {list(decodings)} alone packed, expected two projections: vLLM runs no experts that "
                "are in 16 bits in part"
            )

    def create_weights(
        self, layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **settings
    ) -> None:
        unknown = layer.activation.is_gated and layer.activation not in GATES
        if layer.apply_router_weight_on_input or layer.swiglu_limit is not None or unknown:
            raise ValueError(
                f"{self.name}: found experts with the gate {layer.activation.value!r} of limit {layer.swiglu_limit}, "
                f"whose input is{'' if layer.apply_router_weight_on_input else ' not'} weighted, expected one of "
                f"{list(GATES.values())} without limit, and weighted results; serve this model with Transformers"
            )
        self.gate = get_act_and_mul_fn(GATES[layer.activation]) if layer.activation.is_gated else None
        check_columns(f"{self.name}.{DOWN_PROJECTION}", intermediate_size_per_partition, self.moe.intermediate_size)
        self.dtype, self.device = params_dtype, torch.get_default_device()
        self.arrived: dict[str, dict[str, torch.Tensor]] = {own: {} for own in self.decodings}
        self.biases: dict[str, torch.Tensor] = {}

    def load(self, layer, name: str, tensor: torch.Tensor) -> None:
        """Keeps what this process has of a tensor, whose name is relative to the experts."""
        projection, _, part = name.rpartition(".")
        if name.endswith(BIAS_SUFFIX):
            projection, part = name.removesuffix(BIAS_SUFFIX), BIAS_SUFFIX
        if projection not in self.arrived:
            raise ValueError(f"{self.name}.{name}: found it, expected tensors of {list(self.arrived)} alone")
        if part != "weight_columns":
            tensor = self._of_own_experts(layer, tensor)
        if projection == DOWN_PROJECTION:
            tensor = self._own_columns(tensor, part)
        elif part != "weight_columns":
            tensor = self._own_rows(layer, tensor)
        here = tensor.to(self.device, copy=True).contiguous()
        if part == BIAS_SUFFIX:
            self.biases[projection] = here.to(self.dtype)
        else:
            self.arrived[projection][part] = here

    @staticmethod
    def _of_own_experts(layer, tensor: torch.Tensor) -> torch.Tensor:
        places = [layer.expert_map_manager.map_global_to_local(expert) for expert in range(len(tensor))]
        own = sorted((expert for expert, place in enumerate(places) if place >= 0), key=places.__getitem__)
        return tensor if len(own) == len(tensor) else tensor[own]

    def _own_rows(self, layer, tensor: torch.Tensor) -> torch.Tensor:
        # Gates, then what they open; but a pair is side by side in the experts with this function.
        joined = 2 if self.moe.is_act_and_mul and layer.activation != MoEActivation.SWIGLUOAI else 1
        of_rank = [half.chunk(self.moe.tp_size, dim=1)[self.moe.tp_rank] for half in tensor.chunk(joined, dim=1)]
        return torch.cat(of_rank, dim=1)

    def _own_columns(self, tensor: torch.Tensor, part: str) -> torch.Tensor:
        if part == BIAS_SUFFIX:  # once in the sum of all processes
            return tensor if self.moe.tp_rank == 0 else torch.zeros_like(tensor)
        columns = self.moe.intermediate_size_per_partition
        return own_columns(tensor, self.moe.tp_rank, columns, self.moe.intermediate_size)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        projections = []
        for own, decoding in self.decodings.items():
            packed = packed_of(f"{self.name}.{own}", self.arrived.pop(own), decoding)
            if self.moe.has_bias and own not in self.biases:
                raise ValueError(f"{self.name}.{own}{BIAS_SUFFIX}: missing, expected it in the checkpoint")
            experts, rows, _ = packed.tensors[ABSMAX].shape
            down = own == DOWN_PROJECTION
            columns = self.moe.intermediate_size_per_partition if down else self.moe.hidden_dim
            projection = KbitProjection(experts, columns, rows, bits=decoding.bits, device="meta")
            projection.load(packed)
            projection.take_inputs(self.inputs)
            projections.append(projection.eval())
        up, down = self.decodings
        layer.up, layer.down = projections
        layer.up_bias, layer.down_bias = self.biases.pop(up, None), self.biases.pop(down, None)

    def get_fused_moe_quant_config(self, layer):
        return None

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input) -> torch.Tensor:
        # Experts of other processes have the number -1 here. Shared ones are layers of their own, which vLLM runs.
        experts = topk_ids if layer.expert_map is None else layer.expert_map[topk_ids.long()]
        rows, places, offsets = route_experts(experts, layer.down.lead[0])
        hidden = layer.up(x, rows, offsets, layer.up_bias)
        swiglu = layer.activation == MoEActivation.SILU  # on the way into the next product
        if not swiglu and self.gate is not None:
            hidden = self.gate(hidden)
        elif not swiglu:
            hidden = apply_moe_activation(layer.activation, torch.empty_like(hidden), hidden)
        y = layer.down(hidden, None, offsets, layer.down_bias, swiglu)
        return combine_experts(y, places, topk_weights.float())
