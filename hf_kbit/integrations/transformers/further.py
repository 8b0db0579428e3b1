"""Layers that a checkpoint has beyond those of the model, such as those that predict further tokens: what of them is
packed, without data, while the model is saved that was quantized.

Nothing but names and shapes says what they are. So a weight is packed as the last layer of the model whose name is the
same after its number, and that has its shape: ``mtp.layers.0.mlp.up_proj`` as ``model.layers.47.mlp.up_proj``.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from hf_kbit.files.checkpoint import WEIGHT_SUFFIX, TensorHeader, compare_packed
from hf_kbit.format.decoding import Decoding
from hf_kbit.format.errors import refuse
from hf_kbit.format.model import ModelFormat
from hf_kbit.integrations.transformers.ignored import Ignored
from hf_kbit.integrations.transformers.names import Names
from hf_kbit.integrations.transformers.report import logger
from hf_kbit.nn.site import Site, sites
from hf_kbit.plan.config import Chooser, KbitConfig
from hf_kbit.plan.selection import is_for_ignored
from hf_kbit.weight.packing import Recipe
from hf_kbit.weight.tensor import Packed

NUMBER = re.compile(r"(?:^|\.)\d+\.")


class Alike:
    """The linear layers and projections of experts of a model, by what is the same in the names of further ones."""

    def __init__(self, model):
        self._sites = defaultdict(list)
        for name, site in reversed(sites(model).items()):
            if not site.is_table:
                self._sites[_after_number(name)].append(site)

    def to(self, name: str) -> list[Site]:
        """Those that are like a further one, the last of the model first."""
        return self._sites.get(_after_number(name), [])


def _after_number(name: str) -> str:
    """What follows the first number in the name of a layer.

    >>> _after_number("model.layers.61.mlp.experts.gate_up_proj")
    'mlp.experts.gate_up_proj'
    """
    return NUMBER.split(name, maxsplit=1)[-1]


@torch.no_grad()
def pack(
    model, ignored: Ignored, tensors: dict[str, torch.Tensor], config: KbitConfig
) -> tuple[dict[str, torch.Tensor], dict[str, Decoding]]:
    """What ``ignored.read`` has given, which is used up, with packed layers in the place of what they are made of, and
    how these decode, by their names. What nobody loads is no reason not to save the rest: a weight that cannot be
    packed stays as it is, after a warning."""
    names, alike, chooser, groups = Names(model), Alike(model), _chooser(model, config), defaultdict(dict)
    for name, (stored_name, _) in ignored.places.items():
        targets, converted = names.targets(stored_name)
        groups[targets[0] if converted and len(targets) == 1 else name][name] = stored_name
    found, decodings = {}, {}
    for target, group in groups.items():
        layer, own = target.removesuffix(WEIGHT_SUFFIX), {name: tensors.pop(name) for name in group if name in tensors}
        packed, places = None, alike.to(layer) if len(own) == len(group) else []  # else some are gone
        if places:
            weight = names.together({group[name]: tensor for name, tensor in own.items()}, model)
            try:
                packed = _packed(layer, weight, places, chooser, config)
            except ValueError as error:
                logger.warning("hf_kbit: saved in 16 bits: %s", error)
        if packed is None:
            found |= own
        else:
            found |= {f"{layer}.{part}": tensor.cpu() for part, tensor in packed.tensors.items()}
            decodings[layer] = packed.decoding
    return found, decodings


def _chooser(model, config: KbitConfig) -> Chooser:
    """By the patterns that are for further layers alone: ``layers.0`` is one of the model, not of ``mtp``."""
    bits = {pattern: bits for pattern, bits in config.module_bits.items() if is_for_ignored(model, pattern)}
    left = [pattern for pattern in config.modules_to_not_convert if is_for_ignored(model, pattern)]
    return Chooser(replace(config, module_bits=bits, modules_to_not_convert=left))


def _packed(
    name: str, weight: torch.Tensor, places: list[Site], chooser: Chooser, config: KbitConfig
) -> Packed | None:
    """A weight, in the order of the model, packed as the first of these that has its shape; None if there is none, if
    that one is in 16 bits, or if the config leaves this one so."""
    site = next((site for site in places if tuple(site.turned(weight).shape) == site.shape), None)
    bits, asked_for = chooser.choose(name)
    if site is None or not site.is_packed or bits is None:
        return None
    layer, device = site.layer, "cuda" if torch.cuda.is_available() else "cpu"
    decoding = config.decoding(bits if asked_for else layer.bits, site.shape, False)
    turned = site.turned(weight.to(device, layer.dense_dtype))
    packed = Recipe(config.scale, config.transform).quantize(turned, decoding, f"{name}{WEIGHT_SUFFIX}")
    if packed.lost:
        raise ValueError(f"{name}{WEIGHT_SUFFIX}: {packed.lost}")
    return packed


def read_decodings(
    model, ignored: Ignored, tensors: Mapping[str, TensorHeader], stored: ModelFormat
) -> dict[str, Decoding]:
    """How further layers decode that a checkpoint has packed.

    Raises:
        ValueError: one is not as a layer of the model is; the message names its tensors.
    """
    alike, decodings, problems = Alike(model), {}, []
    for name, own in ignored.packed.items():
        decoding = decodings[name] = stored.decoding(own)
        wrong = [compare_packed(own, tensors, site.shape, decoding) for site in alike.to(name)]
        if not wrong:
            problems.append(f"{own}: found it packed, expected 16 bits: {type(model).__name__} has no layer like it")
        elif all(wrong):
            problems += wrong[0]
    refuse(problems, f"the quantized checkpoint does not fit the model ({type(model).__name__})")
    return decodings
