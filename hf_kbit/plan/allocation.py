"""Bit allocation: how bits are spent on the layers of a model, and a rule that does so without data."""

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig

from hf_kbit.format.decoding import Decoding, ScalarDecoding
from hf_kbit.format.spec import BITS
from hf_kbit.nn.site import Site
from hf_kbit.plan.config import KbitConfig
from hf_kbit.plan.patterns import exactly


@dataclass(frozen=True)
class Layer:
    """A layer's number of weights as stored, and what each width costs the model, in any unit that adds up."""

    weights: int
    costs: Mapping[int, float]


def spend(layers: Mapping[str, Layer], bits: float) -> dict[str, int]:
    """The width of each layer for which the sum of costs is least, with at most ``bits`` for a weight on average.

    Exact for layers of one size if each width lowers a cost by less than the one before; near to it for others.
    """
    chosen = {name: min(layer.costs) for name, layer in layers.items()}
    left = sum(layer.weights * (bits - chosen[name]) for name, layer in layers.items())
    steps: list[tuple[float, str]] = []

    def offer(name: str) -> None:
        """What the next width of a layer gains for each weight; the layer's name makes equal gains a fixed order."""
        layer, width = layers[name], chosen[name]
        if width + 1 in layer.costs:
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


def usual_decoding(site: Site, config: KbitConfig) -> Decoding:
    """How it decodes, or nearly so, whatever its own width is: sizes of all widths follow from it."""
    bits = math.floor(config.bits)
    if site.is_table:
        bits = config.embedding_bits or min(max(bits, BITS[0]), BITS[-1])
    return config.decoding(bits, site.shape, site.is_table)


def stored_weights(sites: Iterable[Site], config: KbitConfig) -> int:
    """Number of weights of these layers as they are stored: with padding."""
    return sum(usual_decoding(site, config).codes(site.shape) for site in sites)


def side_bytes(sites: Iterable[Site], config: KbitConfig) -> int:
    """Bytes of these layers' scales of whole rows or columns."""
    decodings = {site: usual_decoding(site, config) for site in sites}
    return sum(
        round(how.nbytes(site.shape) - how.codes(site.shape) * (how.bits + how.scale_bits) / 8)
        for site, how in decodings.items()
    )


def packed_bytes(widths: Mapping[Site, int], config: KbitConfig) -> int:
    """Bytes of these layers, each in its width, with all scales."""
    return sum(config.decoding(bits, site.shape, site.is_table).nbytes(site.shape) for site, bits in widths.items())


def gets_smaller(site: Site, config: KbitConfig | None = None) -> bool:
    """Whether a layer takes less packed than in 16 bits: a short row may be mostly padding, and a scale of a column of
    few rows is as large as their codes. Fewer bits than scalars have at most count as many; without a config a layer
    has scalars of so many.

    >>> from hf_kbit.nn.site import sites
    >>> layers = sites(nn.Sequential(nn.Linear(8, 512), nn.Linear(32, 512), nn.Linear(512, 2))).values()
    >>> [[gets_smaller(site, KbitConfig(codebook=of)) for site in layers] for of in ("optimal", "trellis")]
    [[False, True, True], [False, True, False]]
    """
    how = usual_decoding(site, config) if config else ScalarDecoding((0.0,) * 2 ** BITS[-1], 0, "rotated")
    wider = how.codes(site.shape) * max(BITS[-1] - how.bits, 0) / 8
    return how.nbytes(site.shape) + wider < 2 * math.prod(site.shape)


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


def by_rule(model: nn.Module, sites: Mapping[str, Site], bits: float, config: KbitConfig) -> dict[str, int]:
    """Widths of these linear layers, of those that a config has, ``bits`` on average, by names and shapes alone: more
    bits get keys and values that several heads share, the first layers of the model, and what is no attention in the
    last ones."""
    layers = {}
    for unit, inside in units(model, sites).items():
        for name in inside:
            weights = stored_weights([sites[name]], config)
            cost = weights * _sensitivity(model, sites[name], unit)
            layers[name] = Layer(
                weights, {width: cost * 4.0**-width for width in config.widths}
            )  # as rounding errors fall
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
