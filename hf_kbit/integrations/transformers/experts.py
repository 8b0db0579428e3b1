"""The experts of a mixture in a model of Transformers: putting packed ones in their place, also while it loads."""

import torch
from torch import nn

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
    return projection.train(experts.training)


def put(model: nn.Module, name: str, projection: KbitProjection) -> None:
    """Puts a projection in the place of the tensor of that name."""
    experts, own = place_of(model, name)
    del experts._parameters[own]
    setattr(experts, own, projection)
    if not isinstance(experts, KbitExperts):
        experts.__class__ = experts_class(type(experts))


def put_tensor(experts: KbitExperts, own: str, tensor: nn.Parameter) -> None:
    """Puts a tensor, in the order of the model, in the place of a projection."""
    del experts._modules[own]
    experts.register_parameter(own, tensor)
    if DOWN_PROJECTION in experts._parameters:  # last, as in all classes: the order is that in which PEFT adapts them
        experts._parameters[DOWN_PROJECTION] = experts._parameters.pop(DOWN_PROJECTION)
    if not any(isinstance(module, KbitProjection) for module in experts.children()):
        experts.__class__ = plain_class(experts)


def parameter_of(model: nn.Module, name: str) -> nn.Parameter:
    """``get_parameter``, by which Transformers asks what is to be loaded; for an empty projection, a tensor like the
    one whose name the checkpoint knows it by."""
    parent, _, own = name.rpartition(".")
    projection = getattr(model.get_submodule(parent), own, None)
    if not isinstance(projection, KbitProjection):
        return type(model).get_parameter(model, name)
    tensor = nn.Parameter(torch.empty(projection.model_shape, dtype=projection.dense_dtype, device="meta"))
    tensor.stands_for = getattr(projection.weight, "stands_for", projection.weight)
    return tensor
