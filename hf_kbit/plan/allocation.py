"""Bit allocation: how bits are spent on the layers of a model, and a rule that does so without data."""

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig

from hf_kbit.format.spec import BITS, BLOCK_SIZE, absmax_shape
from hf_kbit.nn.site import Site
from hf_kbit.plan.config import KbitConfig
from hf_kbit.plan.patterns import exactly

SCALE_BITS = 8 / BLOCK_SIZE  # of a weight


@dataclass(frozen=True)
class Layer:
    """A layer's number of weights as stored, and what each width costs the model, in any unit that adds up."""

    weights: int
    costs: Mapping[int, float]


def spend(layers: Mapping[str, Layer], bits: float) -> dict[str, int]:
    """The width of each layer for which the sum of costs is least, with at most ``bits`` for a weight on average.

    Exact for layers of one size if each width lowers a cost by less than the one before; near to it for others.
    """
    chosen, weights = dict.fromkeys(layers, BITS[0]), sum(layer.weights for layer in layers.values())
    left = bits * weights - weights * BITS[0]
    steps: list[tuple[float, str]] = []

    def offer(name: str) -> None:
        """What the next width of a layer gains for each weight; the layer's name makes equal gains a fixed order."""
        layer, width = layers[name], chosen[name]
        if width < BITS[-1]:
            heapq.heappush(steps, ((layer.costs[width + 1] - layer.costs[width]) / layer.weights, name))

    for name in layers:
        offer(name)
    while steps:
        _, name = heapq.heappop(steps)
        if layers[name].weights <= left:
            left -= layers[name].weights
            chosen[name] += 1
            offer(name)
    return chosen


def config_of(config: KbitConfig, chosen: Mapping[str, int]) -> KbitConfig:
    """A copy of ``config`` with the widths chosen."""
    common = Counter(chosen.values()).most_common(1)[0][0]
    others = {exactly(name): own for name, own in chosen.items() if own != common}
    return replace(config, bits=common, module_bits={**left(config), **others})


def left(config: KbitConfig) -> dict[str, None]:
    """What ``module_bits`` leaves in 16 bits."""
    return {pattern: None for pattern, bits in config.module_bits.items() if bits is None}


def stored_weights(sites: Iterable[Site]) -> int:
    """Number of weights of these layers as they are stored: with what pads the last block of a row."""
    shapes = [site.shape for site in sites]
    return sum(math.prod((*shape[:-2], *absmax_shape(*shape[-2:]))) * BLOCK_SIZE for shape in shapes)


def column_bytes(sites: Iterable[Site], config: KbitConfig) -> int:
    """Bytes of these layers' column scales, one for each of their inputs where weights are transformed."""
    return 0 if config.transform == "none" else sum(site.shape[-1] for site in sites)


def packed_bytes(widths: Mapping[Site, int], config: KbitConfig) -> int:
    """Bytes of these layers, each in its width, with all scales."""
    words = sum(stored_weights([site]) * (bits + SCALE_BITS) for site, bits in widths.items())
    return round(words / 8) + column_bytes(widths, config)


def gets_smaller(site: Site) -> bool:
    """Whether a layer takes less in the widest width than in 16 bits: a short row is mostly the padding of its block,
    and a column scale of few rows is as large as their codes.

    >>> from hf_kbit.nn.site import sites
    >>> [gets_smaller(site) for site in sites(nn.Sequential(nn.Linear(8, 512), nn.Linear(32, 512))).values()]
    [False, True]
    """
    return stored_weights([site]) * (BITS[-1] + SCALE_BITS) / 8 + site.shape[-1] < 2 * math.prod(site.shape)


def units(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """``{module: names in it}``: linear layers by the layer of the model that they are in, the outermost element of a
    ``ModuleList``; one that is in none stands for itself."""
    found, wholes = {}, list(elements(model))
    for name in names:
        unit = next((whole for whole in wholes if f"{name}.".startswith(f"{whole}.")), name)
        found.setdefault(unit, []).append(name)
    return found


def elements(model: nn.Module) -> Iterator[str]:
    """Names of the elements of the outermost module lists; of a list of lists those of the inner ones."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in found):
            own = [f"{name}.{key}" for key, child in module._modules.items() if not isinstance(child, nn.ModuleList)]
            found += own
            yield from own


# --- without data ---------------------------------------------------------------------------------

KEYS_OR_VALUES = re.compile(r"(^|_)(k|v|kv|key|value)(_|$)")
# What an error of one weight costs, relative to that in a square one in the middle of a model: as measured on
# SmolLM2-135M (rotated and balanced weights, 2026-11-22), rounded.
SHARED = 4.0  # of keys and values at most, where several heads share them: the number of these
WIDE = 0.75  # more outputs than inputs
FIRST, LAST = (3, 1.6), (2, 3.0)  # so many layers at the beginning, all of each; at the end, but attention


def by_rule(model: nn.Module, sites: Mapping[str, Site], bits: float) -> dict[str, int]:
    """Widths of these linear layers, ``bits`` on average, by names and shapes alone: more bits get keys and
    values that several heads share, the first layers of the model, and what is no attention in the last ones."""
    layers = {}
    for unit, inside in units(model, sites).items():
        for name in inside:
            weights = stored_weights([sites[name]])
            cost = weights * _sensitivity(model, sites[name], unit)
            layers[name] = Layer(weights, {width: cost * 4.0**-width for width in BITS})  # as rounding errors fall
    return spend(layers, bits)


def _sensitivity(model: nn.Module, site: Site, unit: str) -> float:
    """What an error of one weight of a layer costs; ``unit`` is the layer of the model that it is in."""
    config, own = getattr(model, "config", None), site.name.rpartition(".")[2]
    text = config.get_text_config() if isinstance(config, PreTrainedConfig) else None
    *_, outputs, inputs = site.shape
    heads, sharing = (getattr(text, key, None) for key in ("num_attention_heads", "num_key_value_heads"))
    found = 1.0
    if KEYS_OR_VALUES.search(own):
        known = isinstance(heads, int) and isinstance(sharing, int) and 0 < sharing < heads
        found = min(heads / sharing, SHARED) if known else 1.0
    elif outputs > inputs:
        found = WIDE
    parent, _, place = unit.rpartition(".")
    if place.isdigit():
        place, depth = int(place), len(model.get_submodule(parent))
        attention = any("attn" in part or "attention" in part for part in site.name.split("."))
        if place < FIRST[0]:
            found *= FIRST[1]
        elif place >= depth - LAST[0] and not attention:
            found *= LAST[1]
    return found
