"""Averages of models over training (``torch.optim.swa_utils.AveragedModel``): packed words are copied instead."""

import functools

import torch

from hf_kbit.nn.linear import PACKED, KbitLinear


def copy_packed_words(update_parameters):
    """``AveragedModel.update_parameters``, which would average the bits of packed words and scales as integers.

    They are frozen, so that the average is what the model has.
    """

    @functools.wraps(update_parameters)
    def wrapped(self, model):
        update_parameters(self, model)
        with torch.no_grad():
            for averaged, own in zip(self.module.modules(), model.modules(), strict=True):
                if isinstance(own, KbitLinear):
                    for name in PACKED:
                        averaged.get_parameter(name).copy_(own.get_parameter(name))

    return wrapped
