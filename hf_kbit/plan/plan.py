"""The plan of what of a model is quantized, which all that quantizes, loads or saves one is handed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from hf_kbit.format.decoding import Decoding
from hf_kbit.nn.site import Site, empty, pack
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.plan.config import KbitConfig
from hf_kbit.weight import dynamic_range
from hf_kbit.weight.packing import Recipe
from hf_kbit.weight.tensor import KbitTensor, Packed

SHOWN_AFTER = 3  # seconds, the bar


@dataclass
class Outcome:
    """What is to be told of a model that was quantized.

    Attributes:
        told: ``{name: why}`` of layers that stayed in 16 bits for what they are.
        lost: ``{name: what would be lost}`` of those that turned out to have to stay in 16 bits.
        untransformed: ``{name: why}`` of those that turned out to be quantized without a transform.
        calibrated: by which method, on what, in words, if it was.
        tuned: what tuning has gained, in words, if it has been done.
    """

    told: Mapping[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    untransformed: dict[str, str] = field(default_factory=dict)
    calibrated: str = ""
    tuned: str = ""


@dataclass
class Plan:
    """What is quantized of a model, and how.

    Attributes:
        model: of which it is.
        sites: those of the model.
        decodings: of what is quantized, by the name that it is stored under, widths and levels.
        config: how scales and transforms are found, and what was wished for besides.
        ties: ``{name: name that its weight is stored under}``.
        outcome: what is to be told of it.
    """

    model: nn.Module
    sites: Mapping[str, Site]
    decodings: dict[str, Decoding]
    config: KbitConfig
    ties: Mapping[str, str] = field(default_factory=dict)
    outcome: Outcome = field(default_factory=Outcome)

    def group(self, name: str) -> list[str]:
        """Names of all that has the weight of a layer, the one that it is stored under first."""
        first = self.ties.get(name, name)
        return [first, *(other for other, stored in self.ties.items() if stored == first)]

    def recipe(self, name: str) -> Recipe:
        """How a weight is quantized. Those of tables, of what is tied to them and of heads are not balanced: what was
        measured of a table (``KbitEmbedding``) is the head's share."""
        site, model = self.sites[name], self.model
        head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
        balances = not (site.is_table or len(self.group(name)) > 1 or site.home is head)
        return Recipe(self.config.scale, self.config.transform, balances)

    def make_room(self) -> dict[str, KbitWeight]:
        """Has all layers wait for their packed weights, on the meta device; returns them by their names."""
        layers = {}
        for name, decoding in self.decodings.items():
            for each in self.group(name):
                if not (site := self.sites[each]).is_packed:  # two that are to be tied may be stored apart
                    pack(site, empty(site, self.decodings.get(each, decoding)), self.recipe(each))
                layers[each] = site.layer
        return layers

    def put(self, name: str, packed: Packed) -> None:
        """Packs a layer, and all that is tied to it, where its dense weight is, unless that is on the meta device."""
        site = self.sites[name]
        weight = KbitTensor.of(packed, site.shape, site.weight.dtype, site.kind.reads_tiles)
        pack(site, weight if site.weight.is_meta else weight.moved(site.weight.device), self.recipe(name))
        if packed.untransformed:
            self.outcome.untransformed[name] = packed.untransformed
        self.tie(name)

    def tie(self, name: str) -> None:
        """Gives the weight of a packed layer to all that is tied to it."""
        layer = self.sites[name].layer
        for other in self.group(name):
            if not (tied := self.sites[other]).is_packed:
                pack(tied, layer.weight, self.recipe(other)).tied = layer.tied = True


# --- without data ---------------------------------------------------------------------------------


@torch.no_grad()
def quantize_layers(plan: Plan, names: Iterable[str], device: torch.device | str | None = None) -> None:
    """Quantizes layers of a plan, without data, on ``device`` or on a GPU where there is one; each ends where it was.
    What would lose rows stays as it is (``Outcome.lost``)."""
    for name in tqdm(names, desc="quantizing", unit="layer", delay=SHOWN_AFTER):
        weight = plan.sites[name].weight
        packed = _quantized(plan, name, device or ("cuda" if torch.cuda.is_available() else weight.device))
        if packed.lost:
            plan.outcome.lost[name] = packed.lost
        else:
            plan.put(name, packed)


@torch.no_grad()
def leave_lost(plan: Plan, device: torch.device | str) -> None:
    """Takes out of a plan what quantizing without data leaves in 16 bits (``Outcome.lost``)."""
    for name in plan.decodings:
        if dynamic_range.is_wide(plan.sites[name].turned(plan.sites[name].weight.to(device))):
            if lost := _quantized(plan, name, device).lost:
                plan.outcome.lost[name] = lost


def _quantized(plan: Plan, name: str, device: torch.device | str):
    site = plan.sites[name]
    weight = site.turned(site.weight.to(device))
    return plan.recipe(name).quantize(weight, plan.decodings[name], f"{name}.weight")
