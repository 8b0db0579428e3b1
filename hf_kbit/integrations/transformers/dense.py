"""Dense layers in the places of packed ones: for good, of decoded weights, or while a model's own code is at work."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_kbit.integrations.transformers import experts, selection
from hf_kbit.integrations.transformers.plain import take_over
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.experts import KbitProjection, place_of
from hf_kbit.nn.weight import KbitWeight, packed_layers


def dense_like(layer: KbitWeight, weight: nn.Parameter) -> nn.Module:
    """What a packed layer was before it was quantized: ``nn.Linear``, GPT-2's Conv1D or a table. It has this weight,
    in the order of the model, and the layer's own bias, hooks and attributes."""
    if isinstance(layer, KbitEmbedding):
        dense = layer.to_embedding(weight=weight)
    else:
        with torch.device("meta"):
            kind = Conv1D if layer.transposed else nn.Linear
            size = (layer.out_features, layer.in_features)
            dense = kind(*(size if layer.transposed else reversed(size)))
        dense.weight, dense.bias = weight, layer.bias
    take_over(dense, layer)
    return dense.train(layer.training)


def to_dense(
    layer: KbitWeight, dtype: torch.dtype, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> nn.Module:
    """What the layer was before it was quantized, of the decoded weight ``[N, K]`` and its bias, or of others."""
    dense = dense_like(layer, _parameter(layer, layer.dequantize(dtype) if weight is None else weight.to(dtype)))
    _cast_bias(dense, getattr(layer, "bias", None) if bias is None else bias, dtype)
    return dense


def dequantize(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Puts 16-bit layers and tensors in the places of all packed ones; those that are tied stay so."""
    layers, tied = packed_layers(model), {}
    while layers:  # one at a time, so that each packed weight is freed before the next dense one is made
        name, layer = layers.popitem()
        weight = tied.get(layer.weight)
        if weight is None:
            weight = _parameter(layer, layer.dequantize(dtype))
        if layer.tied:
            tied[layer.weight] = weight
        put(model, {name: weight})
        if not isinstance(layer, KbitProjection):
            _cast_bias(model.get_submodule(name), getattr(layer, "bias", None), dtype)


def put(model: nn.Module, weights: Mapping[str, nn.Parameter]) -> None:
    """Puts what was there before in the places of packed layers and projections, with these weights."""
    new = {}
    for name, weight in weights.items():
        layer = model.get_submodule(name)
        if isinstance(layer, KbitProjection):
            experts.put_tensor(*place_of(model, name), weight)
        else:
            new[name] = dense_like(layer, weight)
    selection.replace_modules(model, new)


def put_empty(model: nn.Module, names: Iterable[str], device: torch.device | str | None = None) -> None:
    """``put``, with weights that are still to come: on a device, or on that where the packed ones are."""
    layers = {name: model.get_submodule(name) for name in names}
    weights = {
        name: torch.empty(layer.model_shape, dtype=layer.dense_dtype, device=device or layer.weight.device)
        for name, layer in layers.items()
    }
    put(model, {name: nn.Parameter(weight) for name, weight in weights.items()})


@contextmanager
def shown_dense(model: nn.Module) -> Iterator[None]:
    """Inside, a model has dense layers in the places of packed ones, for code that knows no others. What it does to
    their weights, which take no memory, is lost; what it does to biases, buffers and all else stays."""
    layers = packed_layers(model)
    put_empty(model, layers, "meta")
    projections = {name: layer for name, layer in layers.items() if isinstance(layer, KbitProjection)}
    dense = {name: model.get_submodule(name) for name in layers.keys() - projections.keys()}
    for name in layers:  # as what Transformers has loaded
        selection.dense_weight(model, name)._is_hf_initialized = True
    try:
        yield
    finally:
        for name, layer in layers.items():
            if name in projections:
                experts.put(model, name, layer)
            elif isinstance(layer, KbitEmbedding):
                layer.take_besides(dense[name])
            else:
                layer.bias = dense[name].bias
        selection.replace_modules(model, {name: layers[name] for name in dense})


def _parameter(layer: KbitWeight, weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight.mT.contiguous() if layer.transposed else weight)


def _cast_bias(dense: nn.Module, bias: torch.Tensor | None, dtype: torch.dtype | None) -> None:
    if bias is not None:
        dense.bias = nn.Parameter(bias.detach().to(dtype))
