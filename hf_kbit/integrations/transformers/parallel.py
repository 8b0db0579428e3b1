"""Tensor and expert parallelism of Transformers, for packed weights.

A plan of Transformers has a rule for each layer, which shards all parameters of the layer along one dimension. Words
and scales ``[*, N, B]`` can be sharded so, along K by whole blocks; column scales ``[K]`` go with K, and with nothing
else. A projection of experts has a rule of its own, but nothing to communicate: the rule of the experts sums up what
comes out of all of them, and the gradient of what goes in. A table gathers what all processes have of the rows itself
(``KbitEmbedding``), whatever its rule; one that is tied to a head is shared as the head is.

FSDP2 needs nothing of this, for it gathers what it has sharded before a layer runs.

A 16-bit weight that is quantized while it loads is read whole by each process, for its column scales, exponent and
levels look at all of it. Quantizing is deterministic, so that all processes come to the same bytes, of which each
keeps its part. Transformers reads whole what goes into a plain tensor: plain stand-ins are in the places of the packed
tensors until these come, and know how they are sharded.
"""

from collections import defaultdict
from functools import wraps

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_kbit.hooks.setting import require
from hf_kbit.hooks.table import SHARDING_NAMES
from hf_kbit.integrations.transformers import tying
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.experts import KbitExperts, KbitProjection
from hf_kbit.nn.weight import KbitWeight, is_sharded, local, packed_layers
from hf_kbit.weight.tensor import KbitTensor, as_parameter

MESHES = ("tp", "ep")  # Transformers' names of them; FSDP2's have others


def is_shared(config) -> bool:
    """Whether the model is about to be spread over several processes.

    Raises:
        ValueError: each of them is to have some of the layers alone.
    """
    plan = getattr(config, "distributed_config", None)
    sizes = {name: getattr(plan, name, None) or 1 for name in ("tp_size", "fsdp_size", "pp_size", "ep_size")}
    if sizes["pp_size"] > 1:
        raise ValueError(
            f"distributed_config: found pp_size={sizes['pp_size']}, expected none while quantizing: quantize and save "
            "first, in one process, or by tp_size or fsdp_size"
        )
    return max(sizes.values()) > 1


def shard_packed(maybe_distribute_model):
    """``maybe_distribute_model``, which shards a model before its weights are loaded, for packed weights too.

    Raises:
        ValueError: so many processes cannot share a layer; the message names it.
        ImportError: what quantizing into shards relies on has moved in Transformers.
    """

    @wraps(maybe_distribute_model)
    def wrapped(cls, model, distributed_config, *args, **kwargs):
        layers = packed_layers(model)
        if distributed_config is None or not layers:
            return maybe_distribute_model(cls, model, distributed_config, *args, **kwargs)
        empty = [layer for layer in layers.values() if layer.awaits_dense or layer.decoding.read_whole]
        if empty:
            require("transformers", SHARDING_NAMES, "quantizing into shards")
        shared = max(_size(distributed_config, "tp_size"), _size(distributed_config, "ep_size")) > 1
        if shared:
            _count_local_experts(model, distributed_config)
        model = maybe_distribute_model(cls, model, distributed_config, *args, **kwargs)
        if shared:
            _share_as_tied(model)
            for name, layer in layers.items():
                _follow_rule(model, name, layer)
        for layer in empty:
            put_stand_in(layer)
        return model

    return wrapped


def gather_once(gather_sharded_state_dict_for_save):
    """``gather_sharded_state_dict_for_save``, which makes another state dict of a model that FSDP2 has sharded, but
    for what our quantizer has gathered."""

    @wraps(gather_sharded_state_dict_for_save)
    def wrapped(self, model_to_save, state_dict, *args, **kwargs):
        if packed_layers(model_to_save) and not any(map(is_sharded, state_dict.values())):
            return state_dict
        return gather_sharded_state_dict_for_save(self, model_to_save, state_dict, *args, **kwargs)

    return wrapped


def put_stand_in(layer: KbitWeight) -> None:
    """Puts a plain tensor on the meta device in the place of a sharded weight until ``KbitQuantize`` has made this:
    what goes into a plain one is read whole."""
    weight = layer.weight
    if isinstance(weight, DTensor):
        stand_in = nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device="meta"), requires_grad=False)
        stand_in.stands_for = weight
        layer._parameters["weight"] = stand_in


def own_part(weight: KbitTensor, stand_in: nn.Parameter) -> torch.Tensor:
    """What takes the place of a stand-in: the weight or, of one that is to be sharded, the DTensor of this process's
    part."""
    sharded = getattr(stand_in, "stands_for", None)
    if sharded is None:
        return as_parameter(weight)
    from transformers.distributed.sharding_utils import DtensorShardOperation, _dtensor_from_local_like

    part = DtensorShardOperation(sharded).shard_tensor(weight.as_stored(), device=weight.device, dtype=weight.dtype)
    part = part.clone().settled()  # a view would keep all of the weight in memory
    return nn.Parameter(_dtensor_from_local_like(part, sharded), requires_grad=False)


def own_columns(columns: torch.Tensor | None, weight: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """The column scales of this process's part of a weight, which is a DTensor if others have parts too."""
    if columns is None:
        return None
    width = local(weight).matrix[1]
    if width < weight.shape[-1]:
        mesh = weight.device_mesh
        rank = mesh[mesh.mesh_dim_names[-1]].get_local_rank() if mesh.ndim > 1 else mesh.get_local_rank()
        columns = columns[rank * width : (rank + 1) * width]
    return columns.to(device, copy=True)


def _size(distributed_config, name: str) -> int:
    return getattr(distributed_config, name, None) or 1


def _count_local_experts(model: nn.Module, distributed_config) -> None:
    """Tells experts how many of them a process gets, which the rule of the experts asks them before any is sharded; in
    16 bits the rule of a tensor tells them."""
    # Transformers 5.17 has the flag alone.
    default = _size(distributed_config, "tp_size") if distributed_config.enable_expert_parallel else 1
    processes = getattr(distributed_config, "ep_size", None) or default
    for name, experts in model.named_modules():
        if isinstance(experts, KbitExperts):
            if experts.num_experts % processes:
                raise ValueError(f"{name}: found {experts.num_experts} experts, expected a multiple of {processes}")
            experts.num_experts //= processes


def _share_as_tied(model: nn.Module) -> None:
    """Shards tables as the head is that they are tied to: it has its rule's communication, they have their own."""
    groups = defaultdict(list)
    for name, first in tying.tied(model).items():
        groups[first].append(name)
    for first, others in groups.items():
        names = sorted((first, *others), key=lambda name: isinstance(model.get_submodule(name), KbitEmbedding))
        leader, *followers = names
        mesh, placement = _shards(model.get_submodule(leader).weight)
        for name in followers:
            layer = model.get_submodule(name)
            if not isinstance(layer, KbitEmbedding) and _shards(layer.weight) != (mesh, placement):
                raise ValueError(f"{name}: found another rule than that of {leader}, expected one, for they are tied")
            _shard(layer, mesh, placement)


def _follow_rule(model: nn.Module, name: str, layer: KbitWeight) -> None:
    """Shards what belongs to words that a rule has sharded, and tells the layer what it has of a matrix."""
    mesh, placement = _shards(layer.weight)
    if isinstance(layer, KbitProjection | KbitEmbedding):
        layer.__dict__.pop("forward", None)  # with the communication that a rule has put around it
    if isinstance(layer, KbitProjection):
        _check_experts(model, name, layer, mesh, placement)
    if placement is None:
        return
    if layer.transposed and layer.lead and placement.dim > 0:
        placement = _transpose(layer, mesh, placement)
    rows, width, lead, processes = layer.out_features, layer.in_features, len(layer.lead), mesh.size()
    units = layer.decoding.units
    if placement.dim == lead:
        groups = getattr(placement, "split_factor", 1) * processes
        what = f"{processes} processes" if units[0] == 1 else f"blocks of {units[0]} in {processes} processes"
        _check_divides(f"{name}.out_features", rows, groups * units[0], what)
    elif placement.dim == lead + 1:
        whole_blocks = f"whole blocks of {units[1]} in each of {processes} processes"
        _check_divides(f"{name}.in_features", width, units[1] * processes, whole_blocks)


def _shards(weight: torch.Tensor):
    """The mesh and the placement by which a rule has sharded words; None and None if none has."""
    if not isinstance(weight, DTensor):
        return None, None
    mesh, names, placement = weight.device_mesh, weight.device_mesh.mesh_dim_names, weight.placements[-1]
    if (names and names[-1] not in MESHES) or placement.is_replicate():
        return None, None
    return mesh[names[-1]] if mesh.ndim > 1 else mesh, placement


def _check_experts(model: nn.Module, name: str, layer: KbitProjection, mesh, placement) -> None:
    """Refuses rules that would give wrong results: of experts as a whole they are what sums up, and counts."""
    experts_name = name.rpartition(".")[0]
    experts = model.get_submodule(experts_name)
    found = layer.lead[0] // mesh.size() if placement is not None and placement.dim == 0 else layer.lead[0]
    if found != experts.num_experts:
        raise ValueError(f"{name}: found a rule that leaves a process {found} experts, not {experts.num_experts}")
    if placement is not None and "forward" not in experts.__dict__:  # where a rule puts what it communicates
        raise ValueError(f"{name}: found a rule for it, expected one for {experts_name} too, which sums up results")
    if placement is not None and placement.dim > 0 and experts.has_bias:
        raise ValueError(f"{name}: found a rule for parts of each expert, expected none: each process adds its bias")


def _check_divides(name: str, size: int, unit: int, what: str) -> None:
    if size % unit:
        raise ValueError(
            f"{name}: found {size}, expected a multiple of {unit}, for {what}. Take fewer processes, or leave the "
            "layer in 16 bits (modules_to_not_convert) when the model is quantized"
        )


def _transpose(layer: KbitProjection, mesh, placement):
    """Shards ``[E, N, K]`` as a rule for ``[E, K, N]`` means it."""
    factor, dim = getattr(placement, "split_factor", None), 3 - placement.dim
    placement = Shard(dim) if factor is None else type(placement)(dim, split_factor=factor)
    _shard(layer, mesh, placement)
    return placement


def _shard(layer: KbitWeight, mesh, placement) -> None:
    """Makes the weight, which is on the meta device, a DTensor; a plain tensor if there is no placement."""
    layer.make_room(layer.decoding)
    if placement is not None:
        sharded = distribute_tensor(layer.weight.data, mesh, [placement], src_data_rank=None)
        layer.weight = nn.Parameter(sharded, requires_grad=False)
