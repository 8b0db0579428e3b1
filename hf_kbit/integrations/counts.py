"""How many parameters a quantized model has: other libraries count the packed words, each of which holds several."""

import functools

from torch import nn

from hf_kbit.nn.weight import KbitWeight, distinct


def _missed(model: nn.Module) -> int:
    """Weights of quantized layers less what their packed form has in elements; none of them is trainable."""
    layers = distinct(layer for layer in model.modules() if isinstance(layer, KbitWeight))
    return sum(layer.num_weights - sum(tensor.numel() for tensor in layer.packed.values()) for layer in layers)


def wrap_num_parameters(num_parameters):
    """``PreTrainedModel.num_parameters``."""

    @functools.wraps(num_parameters)
    def wrapped(self, only_trainable=False, *args, **kwargs):
        count = num_parameters(self, only_trainable, *args, **kwargs)
        return count if only_trainable else count + _missed(self)

    return wrapped


def wrap_nb_trainable_parameters(get_nb_trainable_parameters):
    """``get_nb_trainable_parameters`` of PEFT's models, on which its other figures rest."""

    @functools.wraps(get_nb_trainable_parameters)
    def wrapped(self):
        trainable, count = get_nb_trainable_parameters(self)
        return trainable, count + _missed(self)

    return wrapped
