"""Heads and tables that are tied: one packed weight, which the look-up and the product read.

A model of Transformers says which parameters are one (``all_tied_weights_keys``, names of targets and sources), ties
them after loading, and saves them once.
"""

from collections.abc import Mapping

from torch import nn

from hf_kbit.nn.weight import KbitWeight

WEIGHT = ".weight"


def new_layers(
    quantizer, model: nn.Module, ties: Mapping[str, str], layers: Mapping[str, KbitWeight]
) -> dict[str, KbitWeight]:
    """Empty stand-ins for what is tied to one of ``layers``, which are not in the model yet; ``ties`` are those of
    ``Packable``."""
    new = {}
    for name, first in ties.items():
        packed = next((layers[other] for other in (first, name) if other in layers), None)
        for other in (first, name):
            if packed is not None and other not in layers and other not in new:
                new[other] = quantizer.new_layer(model, other, packed.bits)
                new[other].make_room(packed.decoding)
                new[other].balances = packed.balances = False  # as of any table
    return new


def tied(model: nn.Module) -> dict[str, str]:
    """``{name: name of the layer whose weight it has}`` of packed layers."""
    modules, found = dict(model.named_modules()), {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        names = [name.removesuffix(WEIGHT) for name in (target, source)]
        if target.endswith(WEIGHT) and all(isinstance(modules.get(name), KbitWeight) for name in names):
            found[names[0]] = names[1]
    return found


def followers(model: nn.Module, name: str) -> list[str]:
    """Names of stand-ins that are tied to that one, and that no weight has come for."""
    ties = tied(model)
    first = ties.get(name, name)
    group = (first, *(other for other, source in ties.items() if source == first))
    return [x for x in group if x != name and model.get_submodule(x).weight.is_meta]


def mark(model: nn.Module) -> None:
    """Has layers know that others have their weight too, once Transformers has tied them."""
    for name, first in tied(model).items():
        for layer in (model.get_submodule(name), model.get_submodule(first)):
            layer.tied = True
