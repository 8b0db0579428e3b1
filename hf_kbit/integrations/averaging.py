"""Averages of models over training (``torch.optim.swa_utils.AveragedModel``): packed words are copied instead."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hf_kbit.nn.weight import PACKED, KbitWeight


def copy_packed_words(update_parameters):
    """``AveragedModel.update_parameters``, which would average the bits of packed words and scales as integers.

    They are frozen, so that the average is what the model has.
    """

    @functools.wraps(update_parameters)
    def wrapped(self, model):
        with _out_of_sight(self.module), _out_of_sight(model):
            update_parameters(self, model)
        with torch.no_grad():
            for averaged, own in zip(_quantized(self.module), _quantized(model), strict=True):
                _copy(averaged, own)

    return wrapped


def _copy(averaged: KbitWeight, own: KbitWeight) -> None:
    """Packed words, in place where these are of one form and decode alike."""
    if averaged.decoding == own.decoding and averaged.is_tiled == own.is_tiled:
        for name, tensor in own.packed.items():
            averaged.get_parameter(name).copy_(tensor)
        return
    state = own.state_dict()
    for name in state.keys() - own.packed.keys():
        del state[name]
    averaged.load_state_dict(state, strict=False)


def _quantized(model: nn.Module) -> Iterator[KbitWeight]:
    return (module for module in model.modules() if isinstance(module, KbitWeight))


@contextmanager
def _out_of_sight(model: nn.Module) -> Iterator[None]:
    """``model.parameters()`` has no packed words inside."""
    layers = [(layer, layer._parameters) for layer in _quantized(model)]
    for layer, parameters in layers:
        layer._parameters = {name: value for name, value in parameters.items() if name not in PACKED}
    try:
        yield
    finally:
        for layer, parameters in layers:
            layer._parameters = parameters
