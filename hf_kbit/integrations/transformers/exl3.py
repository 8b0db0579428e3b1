"""EXL3 folders in Transformers: which layers of a model they have, and how their tensors become its weights.

A folder of exllamav3 has names of its model's 16-bit checkpoint, with other tensors. Experts are there one by one,
projections apart; a head has tensors of its own, even where the model ties it; biases are as long as padded outputs.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import nn
from transformers.core_model_loading import WeightConverter, dot_natural_key

from hf_kbit.files import exl3
from hf_kbit.files.checkpoint import WEIGHT_SUFFIX, TensorHeader, read_some
from hf_kbit.format.errors import refuse
from hf_kbit.format.model import ModelFormat
from hf_kbit.format.spec import TRELLIS
from hf_kbit.format.trellis import ROTATED
from hf_kbit.integrations.transformers.conversions import Cut, KbitAssemble
from hf_kbit.integrations.transformers.names import Names
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import sites
from hf_kbit.plan.config import KbitConfig

EXPERT = re.compile(r"^(.*)\.(\d+)\.([^.]+)$")


@dataclass
class Folder:
    """What a folder has for a model.

    Attributes:
        packed: ``{name of a layer or projection in the model: its name here}``.
        config: with what the tensors say.
        tensors: headers, as a file of ours would have them.
        headers: as they are.
        stacks: of a projection in the model its layers here, by the number of the expert and the part.
        layers: names of linear layers, as converters find them.
        experts: of members of mixtures, by what follows an expert's number, the projection that they are a part of,
            and which part.
        mixtures: what stands before that number.
        biases: ``{name: size in the model}`` of those that are padded, as converters find them.
    """

    packed: dict[str, str]
    config: KbitConfig
    tensors: dict[str, TensorHeader]
    headers: Mapping[str, TensorHeader]
    stacks: dict[str, dict[tuple[int, int], str]] = field(default_factory=lambda: defaultdict(dict))
    layers: list[str] = field(default_factory=list)
    experts: dict[str, tuple[str, int]] = field(default_factory=dict)
    mixtures: set[str] = field(default_factory=set)
    biases: dict[str, int] = field(default_factory=dict)

    def read(self, name: str) -> dict[str, torch.Tensor]:
        """The tensors of a layer or projection of the model, from the files."""
        files = {tensor: header.file for tensor, header in self.headers.items()}

        def ours(stored: str) -> dict[str, torch.Tensor]:
            own = [own for own in exl3.NAMES if f"{stored}.{own}" in files]
            given = read_some(files, (f"{stored}.{each}" for each in own))
            return exl3.tensors_as_ours(dict(zip(own, given, strict=True)))

        if name not in self.stacks:
            return ours(self.packed[name])
        parts = defaultdict(list)
        for (_, part), stored in sorted(self.stacks[name].items()):
            parts[part].append(ours(stored))
        return _joined([{own: torch.stack([e[own] for e in part]) for own in part[0]} for part in parts.values()])

    def conversions(self, quantizer) -> list[WeightConverter]:
        """What makes weights of the tensors of layers and experts, and cuts biases."""
        made = []
        if self.layers:
            sources = [rf"^({_any(self.layers)})\.{own}$" for own in exl3.NAMES]
            made.append(WeightConverter(sources, r"\1.weight", [AssembleLinear(quantizer, list(exl3.NAMES))]))
        mixtures = _any(self.mixtures)
        for projection in dict.fromkeys(projection for projection, _ in self.experts.values()):
            members = sorted((part, last) for last, (own, part) in self.experts.items() if own == projection)
            names = [(part, own) for part, _ in members for own in exl3.NAMES]
            sources = [rf"^({mixtures})\.\d+\.{re.escape(last)}\.{own}$" for _, last in members for own in exl3.NAMES]
            made.append(WeightConverter(sources, rf"\1.{projection}.weight", [AssembleExperts(quantizer, names)]))
        for size in set(self.biases.values()):
            padded = [name for name, own in self.biases.items() if own == size]
            made.append(WeightConverter([rf"^({_any(padded)})\.bias$"], r"\1.bias", [Cut(size)]))
        return made


def _any(names: Iterable[str]) -> str:
    return "|".join(map(re.escape, sorted(names)))


# --- headers --------------------------------------------------------------------------------------


def untie(model: nn.Module, tensors: Mapping[str, TensorHeader]) -> None:
    """Gives a tied head a weight of its own, where the folder has tensors for it."""
    name, tied = _head(model), model.all_tied_weights_keys
    if f"{name}.trellis" in tensors and f"{name}{WEIGHT_SUFFIX}" in tied:
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.empty_like(head.weight))
        del tied[f"{name}{WEIGHT_SUFFIX}"]
        model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _head(model: nn.Module) -> str | None:
    head = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def read(
    model: nn.Module, config: KbitConfig, files: list[str], headers: Mapping[str, TensorHeader], names: Names
) -> Folder:
    """The folder of these files, with these headers.

    Raises:
        ValueError: names all tensors, or entries of configs, that are at fault.
    """
    decodings, places = exl3.packed_modules(headers), sites(model)
    if not decodings:
        raise ValueError(f"{files[0]}: found no trellis, expected those that config.json (quant_method: exl3) is of")
    exl3.check_config(config.stored.entries, Path(files[0]).parent, decodings, _head(model))
    found, problems = Folder({}, config, {}, headers), []
    for stored in sorted(decodings, key=dot_natural_key):
        (target, *others), converted = names.targets(stored + WEIGHT_SUFFIX)
        site, own = places.get(target), names.renamed(stored)
        if not converted:
            found.packed[target.removesuffix(WEIGHT_SUFFIX)] = stored
            found.tensors |= exl3.as_ours(stored, headers)
            found.layers.append(own)
        elif others or site is None or site.kind is not KbitProjection or not (parts := EXPERT.match(own)):
            problems.append(f"{stored}: found a trellis, expected 16 bits: the model has it in {target}, with others")
        else:
            before, expert, last = parts.groups()
            place = target.rpartition(".")[2], names.place(stored + WEIGHT_SUFFIX)
            found.experts[last] = place
            found.mixtures.add(before)
            found.stacks[target][int(expert), place[1]] = stored
    layers = {stored: decodings[stored] for stored in found.packed.values()}
    for target, members in found.stacks.items():
        problems += _stack(target, members, decodings, headers, found, layers)
    refuse(problems, "hf_kbit cannot load the EXL3 folder")
    _take_others(model, headers, decodings, names, found)
    (bits, _), *_ = Counter(decoding.bits for decoding in layers.values()).most_common(1)
    found.config = replace(config, bits=bits, stored=ModelFormat.of(layers, bits, {}, None, TRELLIS))
    return found


def _take_others(model, headers: Mapping[str, TensorHeader], decodings: dict, names: Names, found: Folder) -> None:
    """Tells the headers of what is no part of a trellis; those of padded biases as the model has them."""
    for name, header in headers.items():
        module, _, own = name.rpartition(".")
        if module in decodings and own in exl3.NAMES:
            continue
        if module in decodings and own == "bias":
            (target, *_), _ = names.targets(name)
            size = model.get_parameter(target).shape if target in names else header.shape
            if header.shape == (-(-size[0] // ROTATED) * ROTATED,) != tuple(size):
                header = replace(header, shape=tuple(size))
                found.biases[names.renamed(module)] = size[0]
        found.tensors[name] = header


def _stack(target: str, members: dict, decodings, headers, found: Folder, layers: dict) -> Iterator[str]:
    """Tells the headers and the decoding of a projection of experts; yields what is wrong with its members."""
    first, heads = next(iter(members.values())), {}
    experts, parts = (len({place[i] for place in members}) for i in range(2))
    if set(members) != {(expert, part) for expert in range(experts) for part in range(parts)}:
        yield f"{target}: found {len(members)} matrices, expected {parts} of each of {experts} experts"
    for stored in members.values():
        ours = {name.rpartition(".")[2]: header for name, header in exl3.as_ours(stored, headers).items()}
        heads = heads or ours
        if decodings[stored] != decodings[first] or ours != heads:
            yield f"{stored}: found {ours['trellis']}, {decodings[stored].described}, expected what {first} has"
    lead = (experts, parts) if parts > 1 else (experts,)
    found.tensors |= {f"{target}.{own}": replace(each, shape=(*lead, *each.shape)) for own, each in heads.items()}
    found.packed[target] = target
    layers[target] = replace(decodings[first], stacked=parts)


# --- tensors --------------------------------------------------------------------------------------


class AssembleLinear(KbitAssemble):
    """Makes a weight of the tensors of a layer."""

    def gathered(self, tensors):
        return exl3.tensors_as_ours(super().gathered(tensors))


class AssembleExperts(KbitAssemble):
    """Makes a weight of the tensors of all experts, whose parts lie one below the other."""

    def gathered(self, tensors):
        parts = defaultdict(dict)
        for (part, own), given in zip(self.names, tensors, strict=True):
            if given:
                parts[part][own] = torch.stack(given)
        return _joined([exl3.tensors_as_ours(given) for _, given in sorted(parts.items())])


def _joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The tensors of all experts, of those of each part."""
    return parts[0] if len(parts) == 1 else {own: torch.stack([part[own] for part in parts], 1) for own in parts[0]}
