"""Heads and tables that are tied: one packed weight, which the look-up and the product read.

A model of Transformers says which parameters are one (``all_tied_weights_keys``, names of targets and sources), ties
them after loading, and saves them once.
"""

from torch import nn

from hf_kbit.nn.weight import KbitWeight

WEIGHT = ".weight"


def tied(model: nn.Module) -> dict[str, str]:
    """``{name: name of the layer whose weight it has}`` of packed layers."""
    modules, found = dict(model.named_modules()), {}
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        names = [name.removesuffix(WEIGHT) for name in (target, source)]
        if target.endswith(WEIGHT) and all(isinstance(modules.get(name), KbitWeight) for name in names):
            found[names[0]] = names[1]
    return found


def mark(model: nn.Module) -> None:
    """Has layers know that others have their weight too, once Transformers has tied them."""
    for name, first in tied(model).items():
        for layer in (model.get_submodule(name), model.get_submodule(first)):
            layer.tied = True
