"""What Transformers asks of the experts of a mixture while it loads them."""

import torch
from torch import nn

from hf_kbit.nn.experts import KbitProjection


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
