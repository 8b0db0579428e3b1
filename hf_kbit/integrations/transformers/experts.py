"""The experts of a mixture in a model of Transformers: putting packed ones in their place, also while it loads."""

import functools

import torch
from torch import nn
from transformers.core_model_loading import ConversionOps, Transpose, WeightConverter

from hf_kbit.nn.experts import (
    DOWN_PROJECTION,
    KbitExperts,
    KbitProjection,
    experts_class,
    is_transposed,
    place_of,
    plain_class,
    shape_of,
)


def new_projection(model: nn.Module, name: str, **settings) -> KbitProjection:
    """An empty stand-in on the meta device."""
    experts, own = place_of(model, name)
    count, out_features, in_features = shape_of(model, name)
    dtype = experts._parameters[own].dtype
    projection = KbitProjection(count, in_features, out_features, device="meta", dtype=dtype, **settings)
    projection.transposed = is_transposed(experts)
    return projection


def put(model: nn.Module, name: str, projection: KbitProjection) -> None:
    """Puts a projection in the place of the tensor of that name."""
    experts, own = place_of(model, name)
    del experts._parameters[own]
    setattr(experts, own, projection)
    if not isinstance(experts, KbitExperts):
        experts.__class__ = experts_class(type(experts))


def put_back(model: nn.Module, name: str, dtype: torch.dtype | None = None) -> None:
    """The inverse of ``put``, of the decoded weights."""
    experts, own = place_of(model, name)
    projection = experts._modules[own]
    weight = projection.dequantize(dtype)
    put_tensor(experts, own, nn.Parameter(weight.mT.contiguous() if projection.transposed else weight))


def put_tensor(experts: KbitExperts, own: str, tensor: nn.Parameter) -> None:
    """Puts a tensor, in the order of the model, in the place of a projection."""
    del experts._modules[own]
    experts.register_parameter(own, tensor)
    if DOWN_PROJECTION in experts._parameters:  # last, as in all classes: the order is that in which PEFT adapts them
        experts._parameters[DOWN_PROJECTION] = experts._parameters.pop(DOWN_PROJECTION)
    if not any(isinstance(module, KbitProjection) for module in experts.children()):
        experts.__class__ = plain_class(experts)


# --- loading --------------------------------------------------------------------------------------


class TransposeToFit(ConversionOps):
    """``Transpose`` with ``check_dims``, which looks at the tensor in the model to tell whether to transpose: where
    there is a projection, at the shape of the 16-bit tensor that it stands for."""

    def __init__(self, transpose: Transpose):
        self.transpose = transpose

    @torch.no_grad()
    def convert(self, input_dict, *args, model=None, full_layer_name=None, **kwargs):
        kwargs |= {"model": model, "full_layer_name": full_layer_name}
        parent, _, own = full_layer_name.rpartition(".")
        projection = getattr(model.get_submodule(parent), own, None)
        if not isinstance(projection, KbitProjection):
            return self.transpose.convert(input_dict, *args, **kwargs)
        size = projection.out_features, projection.in_features
        expected = (*projection.lead, *(reversed(size) if projection.transposed else size))
        (tensors,) = input_dict.values()
        tensor = tensors[0] if isinstance(tensors, list) else tensors
        if tuple(tensor.shape) != expected:
            tensor = tensor.transpose(self.transpose.dim0, self.transpose.dim1)
        patterns = kwargs["source_patterns"], kwargs["target_patterns"]
        return {self.transpose.get_target_pattern(input_dict, *patterns): tensor.contiguous()}

    @property
    def reverse_op(self) -> ConversionOps:
        return self.transpose.reverse_op


def fit_transposes(conversions: list) -> None:
    """Replaces every ``Transpose`` that checks dimensions, in place."""
    for conversion in conversions:
        if isinstance(conversion, WeightConverter):
            conversion.operations = [
                TransposeToFit(op) if isinstance(op, Transpose) and op.check_dims else op
                for op in conversion.operations
            ]


def find_empty_projections(get_total_byte_count):
    """``get_total_byte_count``, by which memory of a GPU is taken before a model loads: of a state dict's names, among
    which an empty projection has that of the tensor it stands for."""

    @functools.wraps(get_total_byte_count)
    def wrapped(model, accelerator_device_map, *args, **kwargs):
        devices = {}
        for name, device in accelerator_device_map.items():
            parent, _, own = name.rpartition(".")
            empty = isinstance(getattr(model.get_submodule(parent), own, None), KbitProjection)
            devices[f"{name}.weight" if empty else name] = device
        return get_total_byte_count(model, devices, *args, **kwargs)

    return wrapped
