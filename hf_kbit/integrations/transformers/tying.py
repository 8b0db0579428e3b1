"""Heads and tables that are tied: one packed weight, which the look-up and the product read.

A model of Transformers says which parameters are one (``all_tied_weights_keys``, names of targets and sources), and
ties them after loading, counts them once on a device, and saves them once. So a packed weight is tied as a dense one
is, but that it is up to three parameters, and that what is tied has to decode in the same way.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import wraps

import torch
from torch import nn

from hf_kbit.integrations.transformers import selection
from hf_kbit.integrations.transformers.dense import dense_like
from hf_kbit.nn.weight import PACKED, KbitWeight

WEIGHT = f".{PACKED[0]}"


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
                new[other].decode_as(packed.decoding)
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
    return [x for x in group if x != name and model.get_submodule(x).weight.is_floating_point()]


def declare(model: nn.Module) -> None:
    """Has Transformers tie all that belongs to a tied weight, while it loads."""
    for name, first in tied(model).items():
        for own in PACKED:
            if model.get_submodule(name)._parameters[own] is not None:
                model.all_tied_weights_keys[f"{name}.{own}"] = f"{first}.{own}"


def follow(model: nn.Module, loaded: Iterable[str]) -> None:
    """Has what Transformers has tied decode as that which was ``loaded``. What it has not, for the checkpoint has two
    different weights, gets scales of its own."""
    groups, loaded = defaultdict(list), set(loaded)
    for name, first in tied(model).items():
        groups[first].append(name)
    for first, names in groups.items():
        source = model.get_submodule(next((name for name in (first, *names) if name in loaded), first))
        for layer in map(model.get_submodule, (first, *names)):
            layer.decode_as(source.decoding)
            layer.tied = True
    for target in list(model.all_tied_weights_keys):
        name, _, own = target.rpartition(".")
        if own in PACKED[1:] and f"{name}{WEIGHT}" not in model.all_tied_weights_keys:
            layer, _ = model.get_submodule(name), model.all_tied_weights_keys.pop(target)
            layer._parameters[own] = nn.Parameter(layer._parameters[own].clone(), requires_grad=False)


def put_back(model: nn.Module, layers: Iterable[str]) -> None:
    """Puts 16-bit layers in the place of tied ones, of which those that they are tied to are in 16 bits already."""
    for name in layers:
        dense = dense_like(model.get_submodule(name), nn.Parameter(torch.empty(0)))
        selection.replace_modules(model, {name: dense})
    forget(model, layers)
    model.tie_weights(recompute_mapping=False)


def forget(model: nn.Module, layers: Iterable[str]) -> None:
    """Has Transformers tie no more than the weights of layers that are in 16 bits again."""
    packed, ties = {f"{name}.{own}" for name in layers for own in PACKED[1:]}, model.all_tied_weights_keys
    for target in [target for target, source in ties.items() if packed & {target, source}]:
        del ties[target]


def store_once(gather_sharded_state_dict_for_save):
    """``gather_sharded_state_dict_for_save``, which gives the state dict that a model is saved by, without what is
    tied: Transformers leaves that out itself, but not of a model that is on disk or sharded by FSDP2."""

    @wraps(gather_sharded_state_dict_for_save)
    def wrapped(self, model_to_save, *args, **kwargs):
        state = gather_sharded_state_dict_for_save(self, model_to_save, *args, **kwargs)
        left_out = {f"{name}.{own}" for name in tied(model_to_save) for own in PACKED}
        return {name: tensor for name, tensor in state.items() if name not in left_out}

    return wrapped


def keep_bias(adjust_bias):
    """``_adjust_bias``, which fits a tied head's bias to the number of rows of its weight: tiles have another."""

    @wraps(adjust_bias)
    def wrapped(self, output_embeddings, input_embeddings, *args, **kwargs):
        if not isinstance(output_embeddings, KbitWeight):
            adjust_bias(self, output_embeddings, input_embeddings, *args, **kwargs)

    return wrapped
