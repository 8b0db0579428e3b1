"""The experts of a mixture in vLLM: two ``KbitProjection`` of those that this process has, or of its part of each.

vLLM's models load experts in ways of their own, few of which know whole projections ``[E, N, K]``. So all tensors of
packed experts are taken out of the stream that a model loads (``loading.py``). Those of a trellis are cut together, as
soon as all are there; an EXL3 folder has them of each matrix.
"""

import re
from collections import defaultdict
from dataclasses import replace

import torch
from torch import nn
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.activation import get_act_and_mul_fn
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from hf_kbit.files import exl3
from hf_kbit.format.decoding import ABSMAX, Decoding
from hf_kbit.integrations.vllm.linear import check_columns, own_columns, packed_of, whole_of
from hf_kbit.nn.experts import DOWN_PROJECTION, KbitProjection
from hf_kbit.ops import combine_experts, route_experts
from hf_kbit.weight.packing import Recipe
from hf_kbit.weight.tensor import KbitTensor, Packed

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
    ``decodings`` are by own names of projections, and ``inputs`` those of ``KbitProduct``. Where the checkpoint has
    experts one by one, ``members`` say of each matrix of an expert, by its name there, of which projection it is a
    part, and which part."""

    def __init__(
        self,
        moe,
        name: str,
        decodings: dict[str, Decoding],
        members: dict[str, tuple[str, int]],
        inputs: str | None = None,
    ):
        super().__init__(moe)
        self.name, self.decodings, self.members, self.inputs = name, decodings, members, inputs
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
        for own, decoding in self.decodings.items():
            sizes = intermediate_size_per_partition, self.moe.intermediate_size
            if own == DOWN_PROJECTION or decoding.read_whole:  # whose rows decode in blocks too
                check_columns(f"{self.name}.{own}", *sizes, decoding)
        self.dtype, self.device, self.num_experts = params_dtype, torch.get_default_device(), num_experts
        self.arrived: dict[str, dict[str, torch.Tensor]] = {own: {} for own in self.decodings}
        # Of a projection what this process has, or of each expert's matrices, by number and part.
        self.weights: dict[str, KbitTensor] = {}
        self.matrices: dict[str, dict[tuple[int, int], KbitTensor]] = defaultdict(dict)
        self.biases: dict[str, torch.Tensor] = {}

    def load(self, layer, name: str, tensor: torch.Tensor) -> None:
        """Keeps what this process has of a tensor, whose name is relative to the experts."""
        projection, _, part = name.rpartition(".")
        if part in exl3.NAMES and (found := re.fullmatch(r"(\d+)\.(.+)", projection)) and found[2] in self.members:
            self._load_matrix(layer, int(found[1]), found[2], part, tensor)
            return
        if name.endswith(BIAS_SUFFIX):
            projection, part = name.removesuffix(BIAS_SUFFIX), BIAS_SUFFIX
        if projection not in self.arrived:
            raise ValueError(f"{self.name}.{name}: found it, expected tensors of {list(self.arrived)} alone")
        if part != BIAS_SUFFIX and self.decodings[projection].read_whole:
            self._load_projection(layer, projection, part, tensor)
            return
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
    def _own_experts(layer, experts: int) -> list[int]:
        places = [layer.expert_map_manager.map_global_to_local(expert) for expert in range(experts)]
        return sorted((expert for expert, place in enumerate(places) if place >= 0), key=places.__getitem__)

    def _of_own_experts(self, layer, tensor: torch.Tensor) -> torch.Tensor:
        own = self._own_experts(layer, len(tensor))
        return tensor if len(own) == len(tensor) else tensor[own]

    def _load_matrix(self, layer, expert: int, member: str, part: str, tensor: torch.Tensor) -> None:
        """Keeps what this process has of a matrix of one expert, once all its tensors have come."""
        place = layer.expert_map_manager.map_global_to_local(expert)
        if place < 0 or part in exl3.MARKS:  # which headers were asked for
            return
        name, (projection, number) = f"{expert}.{member}", self.members[member]
        arrived = self.arrived.setdefault(name, {})
        arrived[part] = tensor.to(self.device, copy=True)
        if exl3.is_whole(arrived):
            tensors, decoding = exl3.tensors_as_ours(self.arrived.pop(name)), self.decodings[projection]
            weight = self._whole(name, projection, tensors, replace(decoding, stacked=1), 1)
            self.matrices[projection][place, number] = self._own_part(projection, weight, 1)

    def _load_projection(self, layer, projection: str, part: str, tensor: torch.Tensor) -> None:
        """Keeps what this process has of a projection, once all its tensors have come."""
        arrived, decoding = self.arrived[projection], self.decodings[projection]
        arrived[part] = tensor.to(self.device, copy=True)
        if exl3.is_whole(arrived):
            gates = 2 if self.moe.is_act_and_mul and projection != DOWN_PROJECTION else 1
            weight = self._whole(projection, projection, self.arrived.pop(projection), decoding, gates)
            experts = self._own_experts(layer, len(weight.words))
            if len(experts) < len(weight.words):
                weight = weight.picked(0, torch.tensor(experts, device=self.device))
            apart = gates if layer.activation != MoEActivation.SWIGLUOAI else 1  # see _own_rows
            own = self._own_part(projection, weight, apart)
            ordered = Packed(own.file_tensors(), own.decoding)  # as products read it, whatever was picked or joined
            self.weights[projection] = KbitTensor.of(ordered, own.whole_shape, self.dtype)

    def _whole(self, name: str, projection: str, tensors, decoding: Decoding, gates: int) -> KbitTensor:
        """The weight of these tensors, with so many rows for each of the intermediate size."""
        inner, outer = self.moe.intermediate_size, self.moe.hidden_dim
        matrix = (outer, inner) if projection == DOWN_PROJECTION else (gates * inner, outer)
        lead = tensors["trellis"].shape[: tensors["trellis"].dim() - (4 if decoding.stacked > 1 else 3)]
        packed = whole_of(f"{self.name}.{name}", tensors, decoding, (*lead, *matrix))
        return KbitTensor.of(packed, (*lead, *matrix), self.dtype)

    def _own_part(self, projection: str, weight: KbitTensor, apart: int) -> KbitTensor:
        """The rows that this process has of each of so many parts, or its columns."""
        if self.moe.tp_size == 1:
            return weight
        (rows, columns), rank, dim = weight.matrix, self.moe.tp_rank, len(weight.lead)
        if projection == DOWN_PROJECTION:
            own = columns // self.moe.tp_size
            return weight.cut_columns(rank * own, rank * own + own).each(torch.clone)
        each = rows // apart
        own = each // self.moe.tp_size
        starts = range(rank * own, rows, each)
        first, *others = (weight.rows(dim, start, start + own) for start in starts)
        return first.joined(others, dim) if others else first.each(torch.clone)

    def _weight(self, projection: str, decoding: Decoding) -> KbitTensor:
        """What this process has of a projection, as it came or of the matrices that have come."""
        if not self.members:
            if projection not in self.weights:
                found = sorted(self.arrived[projection])
                raise ValueError(f"{self.name}.{projection}: found {found} alone, expected {list(decoding.names)}")
            return self.weights.pop(projection)
        matrices = self.matrices.pop(projection, {})
        places = [(expert, part) for expert in range(self.num_experts) for part in range(decoding.stacked)]
        if missing := sorted({*places} - matrices.keys()):
            found = f"found {len(matrices)} matrices of {self.num_experts} experts"
            raise ValueError(f"{self.name}.{projection}: {found}, expected {len(places)}: {missing} are missing")
        rows, columns = matrices[places[0]].matrix
        found = [matrices.pop(place).file_tensors() for place in places]
        lead = (self.num_experts, decoding.stacked) if decoding.stacked > 1 else (self.num_experts,)
        tensors = {own: torch.stack([each[own] for each in found]).unflatten(0, lead) for own in decoding.names}
        return KbitTensor.of(Packed(tensors, decoding), (lead[0], decoding.stacked * rows, columns), self.dtype)

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
            if self.moe.has_bias and own not in self.biases:
                raise ValueError(f"{self.name}.{own}{BIAS_SUFFIX}: missing, expected it in the checkpoint")
            if decoding.read_whole:
                projections.append(KbitProjection.of(self._weight(own, decoding), Recipe(), transposed=False).eval())
                continue
            packed = packed_of(f"{self.name}.{own}", self.arrived.pop(own), decoding)
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

    @property
    def supports_internal_mk(self) -> bool:
        """Whether ``apply`` exchanges tokens with other processes, as kernels of vLLM do. Else vLLM does it before it
        routes them, for which its routers (0.33) fail: they know of a process's own tokens which are padding."""
        return True

    def apply(self, layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input) -> torch.Tensor:
        divided = self.moe.is_sequence_parallel
        if self.moe.dp_size == 1 and not divided:
            return self._run(layer, x, topk_weights, topk_ids)
        group = get_ep_group()
        return group.combine(self._run(layer, *group.dispatch(x, topk_weights, topk_ids, divided)), divided)

    def _run(self, layer, x, topk_weights, topk_ids) -> torch.Tensor:
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
