"""Sites: where a model has a weight that can be packed. ``pack`` and ``unpack`` change the layer that is there.

A layer stays the object that it is, with its bias, hooks and attributes, and so does all that refers to it: its weight
and its class change. Of the experts of a mixture, which have several such weights, each becomes a ``KbitProjection``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from hf_kbit.format.decoding import Decoding
from hf_kbit.nn.classes import change
from hf_kbit.nn.embedding import KbitEmbedding, is_table
from hf_kbit.nn.experts import (
    DOWN_PROJECTION,
    LLAMA4,
    UP_PROJECTIONS,
    KbitExperts,
    KbitProjection,
    experts_class,
)
from hf_kbit.nn.linear import KbitConv1D, KbitLinear
from hf_kbit.nn.weight import OWN, KbitWeight, is_sharded
from hf_kbit.weight.packing import Recipe
from hf_kbit.weight.tensor import KbitTensor

# Subclasses of nn.Linear whose own forward computes what nn.Linear's does.
PLAIN_LINEAR_CLASSES = ("FalconLinear",)
# What Transformers' decorator ``use_experts_implementation`` leaves on the experts that it can run in several ways.
DECORATED = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
STATE_DICT_HOOKS = [name for name in vars(nn.Module()) if "state_dict" in name]


@dataclass(frozen=True, eq=False)
class Site:
    """Where a model has a weight that can be packed, or is.

    Attributes:
        name: of the layer or, of the experts of a mixture, of the projection.
        home: the module that has the weight while it is dense: the layer, or the experts.
        own: what the dense weight is called there.
        kind: the class of ours that the layer becomes, or one derived from it.
    """

    name: str
    home: nn.Module
    own: str
    kind: type[KbitWeight]

    @property
    def layer(self) -> nn.Module:
        """The module that has the weight, packed or not."""
        return self.home._modules.get(self.own, self.home) if self.kind is KbitProjection else self.home

    @property
    def is_packed(self) -> bool:
        return isinstance(self.layer, KbitWeight)

    @property
    def weight(self) -> nn.Parameter:
        """In the order of the model, ``[N, K]``, of a Conv1D ``[K, N]``, unless it is packed."""
        return self.layer._parameters["weight" if self.is_packed else self.own]

    @property
    def transposed(self) -> bool:
        """Whether the dense weight has K before N."""
        return is_transposed(self.home) if self.kind is KbitProjection else self.kind.transposed

    def turned(self, weight: torch.Tensor) -> torch.Tensor:
        """A dense weight ``[*lead, N, K]`` in the order of the model, and back."""
        return weight.mT if self.transposed else weight

    @property
    def shape(self) -> tuple[int, ...]:
        """``[*lead, N, K]``."""
        layer = self.layer
        if isinstance(layer, KbitWeight):
            return layer.shape
        if self.kind is KbitProjection:
            return tuple(self.turned(self.weight).shape)
        if self.is_table:
            return layer.num_embeddings, layer.embedding_dim
        return (layer.nf, layer.nx) if self.transposed else (layer.out_features, layer.in_features)

    @property
    def is_table(self) -> bool:
        return issubclass(self.kind, KbitEmbedding)


def sites(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Site]:
    """All of a model by their names, in its order; with ``remove_duplicate`` those of a layer in two places once."""
    found = {}
    for name, module in model.named_modules(remove_duplicate=remove_duplicate):
        found |= {site.name: site for site in _sites_in(name, module)}
    return found


def site_of(model: nn.Module, name: str) -> Site | None:
    """The one of that name, if there is one."""
    parent, _, own = name.rpartition(".")
    try:
        experts = model.get_submodule(parent)
        if is_experts(experts) and own in packable(experts):
            return Site(name, experts, own, KbitProjection)
        return next(iter(_sites_in(name, model.get_submodule(name))), None)
    except AttributeError:
        return None


def _sites_in(name: str, module: nn.Module) -> Iterator[Site]:
    if is_experts(module):
        yield from (Site(f"{name}.{own}".removeprefix("."), module, own, KbitProjection) for own in packable(module))
    elif isinstance(module, KbitProjection):
        return
    elif isinstance(module, KbitWeight):
        yield Site(name, module, "weight", module.kind)
    elif (kind := _kind(module)) is not None:
        yield Site(name, module, "weight", kind)


def _kind(module: nn.Module) -> type[KbitWeight] | None:
    if is_linear(module):
        return KbitConv1D if isinstance(module, Conv1D) else KbitLinear
    return KbitEmbedding if is_table(module) else None


def is_linear(module: nn.Module) -> bool:
    """Whether a module is, by its class, a linear layer that is used by calling it: a Linear, or GPT-2's Conv1D."""
    # nn.MultiheadAttention reads the weight of its NonDynamicallyQuantizableLinear without calling it.
    others = KbitLinear | NonDynamicallyQuantizableLinear | nn.LazyLinear
    if not isinstance(module, nn.Linear | Conv1D) or isinstance(module, others):
        return False
    plain = Conv1D if isinstance(module, Conv1D) else nn.Linear
    same = type(module).forward is plain.forward or type(module).__name__ in PLAIN_LINEAR_CLASSES
    # Not by the attribute, which a parametrization computes, and some change by that.
    weight = module._parameters.get("weight")
    return same and (weight is None or weight.numel() > 0)


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds the experts of a mixture as tensors ``[E, N, K]`` or ``[E, K, N]``, one a projection."""
    decorated = all(hasattr(module, name) for name in DECORATED) and hasattr(module, DOWN_PROJECTION)
    return decorated or LLAMA4 in (type(module).__name__, type(module).__bases__[-1].__name__)


def is_transposed(experts: nn.Module) -> bool:
    """Whether matrices are ``[K, N]`` in the model."""
    return type(experts).__name__ == LLAMA4 or experts.is_transposed


def packable(experts: nn.Module) -> list[str]:
    """Own names of the projections of experts, packed or such that they can be."""
    tensors = {own: experts._parameters.get(own) for own in (*UP_PROJECTIONS, DOWN_PROJECTION)}
    return [
        own
        for own, tensor in tensors.items()
        if isinstance(experts._modules.get(own), KbitProjection)
        or (tensor is not None and tensor.dim() == 3 and tensor.numel() > 0)
    ]


def obstacle(site: Site) -> str:
    """What a dense layer, or its class, has that no packed one can have; "" if there is nothing.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    >>> obstacle(Site("0", layer, "weight", KbitLinear))
    'has parametrizations besides weight and bias'
    """
    layer, weight = site.home, site.home._parameters.get(site.own)
    if site.kind is KbitProjection:
        kinds = (kind for kind in type(layer).__mro__ if not issubclass(kind, KbitExperts))
        kind = next(kind for kind in kinds if "forward" in vars(kind))
        known = hasattr(kind.forward, "__wrapped__") or kind.__name__ == LLAMA4
        return "" if known else f"has the forward of {kind.__name__}"
    if weight is None or "parametrizations" in layer._modules:
        others = [*layer._parameters, *layer._buffers, *layer._modules]
        return f"has {', '.join(name for name in others if name not in ('weight', 'bias'))} besides weight and bias"
    if type(weight.data) is not torch.Tensor and not is_sharded(weight):
        return f"has a weight of type {type(weight.data).__name__}"
    if any(vars(layer)[hooks] for hooks in STATE_DICT_HOOKS):
        return "has hooks on its state dict"
    if site.is_table:
        return ""
    size = (layer.nx, layer.nf) if isinstance(layer, Conv1D) else (layer.out_features, layer.in_features)
    if weight.shape != size:
        return f"has a weight {list(weight.shape)} for features {list(size)}"
    taken = site.kind.names_taken(layer)
    return f"has {', '.join(sorted(taken))}, a name that a quantized layer uses" if taken else ""


# --- changes --------------------------------------------------------------------------------------


def empty(site: Site, decoding: Decoding) -> KbitTensor:
    """A weight of zeros on the meta device that a dense site could have."""
    return KbitTensor.empty(site.shape, decoding, site.weight.dtype, "meta", site.kind.reads_tiles)


def pack(site: Site, weight: KbitTensor, recipe: Recipe | None = None) -> KbitWeight:
    """Puts a packed weight ``[*lead, N, K]`` in the place of the dense one, and returns the layer that has it.
    ``recipe``: how another weight is quantized that the layer may get later."""
    recipe = recipe or site.kind.recipe
    if site.kind is KbitProjection:
        layer = KbitProjection.of(weight, recipe, site.transposed).train(site.home.training)
        put_projection(site, layer)
    else:
        site.kind.pack(site.home, weight, recipe)
        layer = site.home
    layer.qualified_name = site.name
    return layer


def unpack(site: Site, weight: nn.Parameter) -> None:
    """Puts a dense weight, in the order of the model, in the place of the packed one."""
    if site.kind is not KbitProjection:
        site.home.unpack(weight)
        return
    experts = site.home
    del experts._modules[site.own]
    experts.register_parameter(site.own, weight)
    if DOWN_PROJECTION in experts._parameters:  # last, as in all classes: the order is that in which PEFT adapts them
        experts._parameters[DOWN_PROJECTION] = experts._parameters.pop(DOWN_PROJECTION)
    if not any(isinstance(module, KbitProjection) for module in experts.children()):
        change(experts, type(experts).plain)


def put_projection(site: Site, layer: nn.Module) -> None:
    """Puts a module in the place of a dense projection."""
    del site.home._parameters[site.own]
    setattr(site.home, site.own, layer)
    if not isinstance(site.home, KbitExperts):
        change(site.home, experts_class(type(site.home)))


@contextmanager
def unpacked(site: Site, weight: nn.Parameter) -> Iterator[None]:
    """Inside, a site has a dense weight; afterwards the layer is packed again as it was."""
    layer = site.layer
    kind, own = type(layer), {name: vars(layer)[name] for name in OWN if name in vars(layer)}
    packed = layer._parameters["weight"]
    unpack(site, weight)
    try:
        yield
    finally:
        if site.kind is KbitProjection:
            put_projection(site, layer)
        else:
            change(layer, kind)
            layer._parameters["weight"] = packed
            vars(layer).update(own)
