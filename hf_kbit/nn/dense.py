"""Packed layers made dense again: for good, of decoded weights, or while a model's own code is at work."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import Site, sites, unpack, unpacked
from hf_kbit.nn.weight import KbitWeight


def packed_sites(model: nn.Module) -> list[Site]:
    return [site for site in sites(model).values() if site.is_packed]


def to_dense(
    layer: KbitWeight, dtype: torch.dtype, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> None:
    """Makes a layer, in place, what it was before it was quantized, of the decoded weight ``[N, K]`` and its bias, or
    of others."""
    weight = layer.dequantize(dtype) if weight is None else weight.to(dtype)
    _cast_bias(layer, bias, dtype)
    layer.unpack(_parameter(layer, weight))


def dequantize(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Makes all packed layers and projections dense; those that are tied stay so."""
    found, tied = packed_sites(model), {}
    while found:  # one at a time, so that each packed weight is freed before the next dense one is made
        site = found.pop()
        layer, packed = site.layer, site.weight
        weight = tied.get(packed)
        if weight is None:
            weight = _parameter(layer, layer.dequantize(dtype))
        if layer.tied:
            tied[packed] = weight
        if site.kind is not KbitProjection:
            _cast_bias(layer, None, dtype)
        del packed
        unpack(site, weight)


def empty_dense(site: Site, device: torch.device | str) -> nn.Parameter:
    """A dense weight for a packed site, which is still to come."""
    return nn.Parameter(torch.empty(site.layer.model_shape, dtype=site.layer.dense_dtype, device=device))


@contextmanager
def shown_dense(model: nn.Module) -> Iterator[None]:
    """Inside, packed layers of a model are dense, for code that knows no others. What it does to their weights, which
    take no memory, is lost; what it does to biases, buffers and all else stays."""
    with ExitStack() as stack:
        for site in packed_sites(model):
            weight = empty_dense(site, "meta")
            weight._is_hf_initialized = True  # as what Transformers has loaded
            stack.enter_context(unpacked(site, weight))
        yield


def _parameter(layer: KbitWeight, weight: torch.Tensor) -> nn.Parameter:
    """A weight ``[*lead, N, K]`` in the order of the model."""
    return nn.Parameter(weight.mT.contiguous() if layer.transposed else weight)


def _cast_bias(layer: nn.Module, bias: torch.Tensor | None, dtype: torch.dtype | None) -> None:
    bias = getattr(layer, "bias", None) if bias is None else bias
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().to(dtype))
