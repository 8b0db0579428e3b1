"""8-bit inputs of the layers of a model: which layers take them, and the wish for them in ``config.json``."""

from collections.abc import Mapping

from torch import nn

from hf_kbit.format.errors import shown
from hf_kbit.integrations.transformers.report import logger, report_inputs
from hf_kbit.nn.product import KbitProduct
from hf_kbit.nn.weight import KbitWeight, packed_layers
from hf_kbit.plan.config import INPUTS, check_inputs

# In config.json, beside quantization_config, of which an hf_kbit that knows no such wish would refuse it.
WISH = "kbit_inputs"


def set_inputs(model: nn.Module, inputs: str | None) -> dict[str, str]:
    """Has the quantized linear layers and experts of a model round their inputs to 8 bits, or leaves these in 16 bits
    again. The weights stay as they are, and so do adapters on them, which get 16-bit inputs. A GPU leaves inputs in 16
    bits where that is faster, as up to 64 tokens.

    It holds outside of training: in ``eval()`` mode, and under ``torch.no_grad()`` or where no input and no bias wants
    a gradient. ``save_pretrained`` keeps it as a wish, which ``from_pretrained`` fulfils.

    Args:
        model: any module with quantized layers, also under adapters of PEFT.
        inputs: ``"int8"`` or None.

    Returns:
        ``{name: why}`` of the quantized layers that keep 16-bit inputs all the same, which are ``"not transformed"``:
        their inputs may have outliers. A log line names them too.

    Raises:
        TypeError: the model is no module.
        ValueError: ``inputs`` is neither, or the model has no layer that takes them; the message names some.

    >>> import hf_kbit, torch
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    >>> done = hf_kbit.quantize_model(model, bits=4)
    >>> hf_kbit.set_inputs(model, "int8")
    {}
    >>> with torch.no_grad():
    ...     model(torch.randn(5, 64)).shape
    torch.Size([5, 8])
    """
    check_inputs(inputs)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: found {type(model).__name__}, expected a torch.nn.Module")
    layers = packed_layers(model)
    left = _left(layers)
    if inputs and not _multiplying(layers).keys() - left.keys():
        found = ", ".join(f"{name} ({why})" for name, why in left.items()) or "no quantized layer"
        raise ValueError(
            f"inputs: found {shown(found)} in {type(model).__name__}, expected a layer that takes 8-bit inputs"
        )
    return set_where_possible(layers, inputs)


def set_where_possible(layers: Mapping[str, KbitWeight], inputs: str | None) -> dict[str, str]:
    """``set_inputs`` of some layers, of which none need take them."""
    left, multiplying = _left(layers) if inputs else {}, _multiplying(layers)
    for layer in multiplying.values():
        layer.take_inputs(inputs)
    if inputs:
        report_inputs(len(multiplying), left)
    return left


def inputs_of(model: nn.Module) -> str | None:
    """What inputs layers of a model were asked to take."""
    return next(filter(None, (layer.inputs for layer in _multiplying(packed_layers(model)).values())), None)


def set_wished(model, layers: Mapping[str, KbitWeight], config, pre_quantized: bool) -> None:
    """Has layers of a model of Transformers take what its config, or that of its checkpoint, wishes for."""
    if wish := wish_in(model.config) if pre_quantized else config.inputs:
        set_where_possible(layers, wish)


def wish_in(config) -> str | None:
    """What the config of a model wishes for; warns of what is not known."""
    wish = getattr(config, WISH, None)
    if wish in INPUTS:
        return wish
    logger.warning("hf_kbit: config.json: %s: found %r, which this hf_kbit does not know: ignored", WISH, wish)
    return None


def save_wish(model, config) -> None:
    """Has the configs of a model of Transformers say what its layers take."""
    config.inputs = inputs_of(model)
    remove_wish(model)
    if config.inputs:
        setattr(model.config, WISH, config.inputs)


def remove_wish(model) -> None:
    """Takes the wish out of the config of a model."""
    vars(model.config).pop(WISH, None)


def _multiplying(layers: Mapping[str, KbitWeight]) -> dict[str, KbitProduct]:
    return {name: layer for name, layer in layers.items() if isinstance(layer, KbitProduct)}


def _left(layers: Mapping[str, KbitWeight]) -> dict[str, str]:
    """Layers that multiply 16-bit inputs in any case, and why."""
    found = {name: layer.decoding.keeps_inputs for name, layer in _multiplying(layers).items()}
    return {name: why for name, why in found.items() if why}
