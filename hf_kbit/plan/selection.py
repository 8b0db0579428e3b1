"""What of a model is quantized: linear layers, tables of embeddings, and the projections of experts."""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from hf_kbit.format.errors import refuse, shown
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.site import Site, obstacle, sites
from hf_kbit.plan.allocation import gets_smaller
from hf_kbit.plan.config import Chooser, KbitConfig
from hf_kbit.plan.plan import Outcome, Plan
from hf_kbit.plan.written import written

FEW_ROWS = 64  # tables of fewer take next to nothing: kinds of tokens, buckets of distances

GATE = re.compile(r"^gate$|(^|_)experts?_gate$")


def _is_router(model, name: str) -> bool:
    """Whether a layer chooses which experts of a mixture a token goes to, or how much of a shared one it gets.

    A name says so: ``router`` as a word anywhere in it (``mlp.router.layer``, ``router_gate``), or, in a module that
    has ``experts`` too, ``gate`` or ``shared_expert_gate``. A dense ``gate_proj`` is none.
    """
    parts = name.split(".")
    return any(
        "router" in part.split("_")
        or (GATE.search(part) is not None and hasattr(model.get_submodule(".".join(parts[:depth])), "experts"))
        for depth, part in enumerate(parts)
    )


def _is_small(site: Site, config: KbitConfig | None = None) -> bool:
    return (site.is_table and site.shape[0] < FEW_ROWS) or not gets_smaller(site, config)


def check_any(model: nn.Module, names: Iterable[str]) -> None:
    """Refuses a model of which no layers are to be quantized."""
    if not names:
        raise ValueError(f"model: found no linear layer to quantize in {type(model).__name__}")


class Packable:
    """What of a model can be quantized, what of that is left unless it is asked for, and what is tied; found out once.

    Attributes:
        sites: linear layers, tables and projections of experts by their names; of a layer in two places both.
        names: of those, each once, in the order of the model.
        tables: names of the tables of embeddings among them.
        ties: ``{name: name of the layer whose weight it has}`` of what is quantized with a table.
        reasons: ``{name: reason}`` of what stays in 16 bits unless, or even if, it is asked for:

            - ``"head"``: the output embedding, or a layer outside the base model or at the end: small or sensitive.
            - ``"router"``: it routes tokens to experts: small, and a small error sends a token elsewhere.
            - ``"small"``: packed it would take as much as in 16 bits, for its rows are short, or few; or a table of so
              few rows that there is next to nothing to save.
            - ``"tied"``: the weight is that of a table, and is quantized with it or not at all (``ties``).
            - ``"fixed"``: the weight is tied to what cannot be quantized, or kept in float32 by the model.
            - ``"adapter"``: it belongs to an adapter of PEFT, or is trained beside one.
            - the words of ``written.written``, if the model's own code writes the weight (``written``).
            - the words of ``nn.site.obstacle``, if nothing can ask for it (``unusual``).
    """

    def __init__(self, model: nn.Module):
        self.model, self.sites = model, sites(model, remove_duplicate=False)
        once = [self.sites[name] for name in sites(model)]
        self.names = sorted((site.name for site in once), key=dot_natural_key)
        self.tables = {site.name for site in once if site.is_table}
        self.unusual = {site.name: why for site in once if (why := obstacle(site))}
        self.written = written(model, once)
        reasons = _heads_and_routers(model, self.sites)
        small = (site.name for site in once if _is_small(site))
        reasons |= dict.fromkeys(small, "small")
        reasons |= self.written | _kept_in_float32(model, self.sites) | self.unusual | _of_adapters(model, self.sites)
        groups = _tied(model)
        for group in groups:
            if _is_one_table(self.sites, group, reasons) and not (self.unusual | self.written).keys() & set(group):
                reasons.pop(group[0], None)
                reasons |= dict.fromkeys(group[1:], "tied")
            else:
                reasons |= dict.fromkeys(group, "fixed")
        self.reasons = {name: reason for name, reason in reasons.items() if name in self.sites}
        self.ties = {name: first for first, *others in groups for name in others if self.reasons.get(name) == "tied"}

        # Tables, and heads that are stored for a table that is tied to them.
        self._looked_up = self.tables | set(self.ties.values())

    def reasons_for(self, config: KbitConfig) -> dict[str, str]:
        """``reasons``, and what else is small as this config would pack it."""
        small = (name for name in self.names if _is_small(self.sites[name], config))
        return dict.fromkeys(small, "small") | self.reasons

    def tables_in(self, chosen: Mapping[str, int]) -> dict[str, int]:
        """Those in what ``choose`` gives that are stored for a table."""
        return {name: bits for name, bits in chosen.items() if name in self._looked_up}

    def told(self, chosen: Mapping[str, int]) -> dict[str, str]:
        """What the load report says of those that are left for what they have, or for what writes them."""
        return {name: what for name, what in (self.written | self.unusual).items() if name not in chosen}

    def choose(self, config: KbitConfig) -> dict[str, int]:
        """``{name: bits}`` of the layers, tables and projections to quantize, in the order of the model; of what is
        tied to a table the name under which it is stored (``ties`` has the others).

        Raises:
            ValueError: a pattern of ``module_bits`` names nothing of the kind, or what cannot be quantized; one of
                ``modules_to_not_convert`` names nothing at all.
        """
        chosen, chooser, reasons = {}, Chooser(config), self.reasons_for(config)
        self._check_patterns(chooser)
        for name in self.names:
            (bits, asked_for), reason = chooser.choose(name, name in self._looked_up), reasons.get(name)
            if asked_for and (name in self.unusual or reason in ("tied", "fixed")):
                raise ValueError(f"{name}: module_bits asks for {bits} bits, but {self._why_not(name)}")
            default = reason is None or (reason == "head" and not config.skip_default_modules)
            if bits is not None and (asked_for or default):
                chosen[name] = bits
        return chosen

    def plan(self, config: KbitConfig, widths: Mapping[str, int]) -> Plan:
        """To quantize what was chosen, in these widths."""
        decodings = {
            name: config.decoding(bits, self.sites[name].shape, name in self._looked_up)
            for name, bits in widths.items()
        }
        return Plan(self.model, self.sites, decodings, config, self.ties, Outcome(self.told(widths)))

    def stored(self, config: KbitConfig, packed: Mapping[str, str]) -> Plan:
        """What a checkpoint holds packed, ``{name: its name there}``, of what the model has.

        Raises:
            ValueError: a layer of the model cannot be packed; the message names all there are.
        """
        known = {name: stored for name, stored in packed.items() if name in self.sites}
        refuse(
            [
                f"{stored}: found it packed, expected 16 bits: {name} of {type(self.model).__name__} {why}"
                for name, stored in known.items()
                if (why := obstacle(self.sites[name]))
            ]
        )
        plan = Plan(self.model, self.sites, {}, config, self.ties)
        said = config.stored.layers
        for name, stored in known.items():
            others = [other for other in plan.group(name) if other != name]
            if stored not in said and not known.keys() & set(others):
                # Another library may have kept the other name of a weight that is tied.
                stored = next((other for other in others if other in said), stored)
            plan.decodings[name] = config.stored.decoding(stored)
        return plan

    def _why_not(self, name: str) -> str:
        reason, kind = self.reasons[name], type(self.model).__name__
        if name in self.unusual:
            return f"it {reason}, which a quantized layer would lose: leave it in 16 bits"
        if reason == "tied":
            both = "embedding_bits, or a pattern for that name, quantizes both"
            return f"{kind} ties its weight to {self.ties[name]}: {both}"
        return f"{kind} ties its weight or keeps it in float32"

    def _check_patterns(self, chooser: Chooser) -> None:
        modules = [*self.names, *(name for name, _ in self.model.named_modules() if name)]
        for option, kind, unused in (
            ("module_bits", "linear layer, table or experts", chooser.widths.unused(self.names)),
            ("modules_to_not_convert", "module", chooser.left.unused(modules)),
        ):
            for pattern in unused:
                if is_for_ignored(self.model, pattern):
                    continue
                raise ValueError(
                    f"{option}[{shown(pattern)}]: found no {kind} of that name in {type(self.model).__name__}, "
                    "expected a regular expression for whole parts of a dotted name, or the end of one"
                )


def is_for_ignored(model, pattern: str) -> bool:
    """Whether a pattern names what a model's class leaves out while it loads, such as ``"mtp.layers.0"``. That may be
    in the files, and is packed while the model is saved."""
    text = pattern.replace("\\", "").removeprefix("^") + "."  # some say that one has to follow
    return any(re.search(each, text) for each in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())


def _heads_and_routers(model, found_sites: Mapping[str, Site]) -> dict[str, str]:
    found = {}
    # A number in its name means that the last module is the end of a layer, not a head.
    last = next(reversed(dict(model.named_parameters())), "").rpartition(".")[0]
    output = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    base = base_of(model)
    linears = (name for name, site in found_sites.items() if issubclass(site.kind, KbitLinear))
    for name in linears:
        at_the_end = name == last and not re.search(r"(^|\.)\d+(\.|$)", name)
        if model.get_submodule(name) is output or not f"{name}.".startswith(base) or at_the_end:
            found[name] = "head"
        elif _is_router(model, name):
            found[name] = "router"
    return found


def base_of(model: nn.Module) -> str:
    """What the names of a base model's layers begin with, such as ``"bert."``; "" if the model is one itself."""
    prefix = model.base_model_prefix if isinstance(model, PreTrainedModel) else ""
    return f"{prefix}." if isinstance(getattr(model, prefix or "_", None), nn.Module) else ""


def _of_adapters(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """``"adapter"`` for what PEFT has put into the model, and for what its adapters need in 16 bits."""
    begin = tuple(_adapted(model))
    return {name: "adapter" for name in names if f"{name}.".startswith(begin)}


def _adapted(model: nn.Module) -> Iterator[str]:
    """What the names of layers begin with that are adapters, or that adapters need in 16 bits."""
    if "peft" not in sys.modules:
        return
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    for name, module in model.named_modules():
        if isinstance(module, AuxiliaryTrainingWrapper):
            yield f"{name}."
        elif isinstance(module, BaseTunerLayer):
            base = isinstance(module.base_layer, nn.Linear | nn.Embedding) and not module.merged
            yield from (f"{name}.{part}." for part in module._modules if part != "base_layer" or not base)


def _kept_in_float32(model, names: Iterable[str]) -> dict[str, str]:
    kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    parts = {part for attribute in kept for part in getattr(model, attribute, None) or ()}
    return {name: "fixed" for name in names if any(re.search(rf"(^|\.){part}($|\.)", name) for part in parts)}


def _is_one_table(found: Mapping[str, Site], names: list[str], reasons: Mapping[str, str]) -> bool:
    """Whether what is tied can be quantized as one: tables and linear layers of one shape, that are called."""
    group = [found.get(name) for name in names]
    return (
        None not in group
        and any(site.is_table for site in group)
        and all((site.is_table or site.kind is KbitLinear) and site.shape == group[0].shape for site in group)
        and not any(reasons.get(name) in ("fixed", "small") for name in names)
    )


def _tied(model: nn.Module) -> list[list[str]]:
    """Names of what has a parameter in common, or is to have one (``all_tied_weights_keys``); each is stored by the
    first."""
    groups = defaultdict(list)
    for name, source in getattr(model, "all_tied_weights_keys", {}).items():
        groups[source].append(name)
    found = [[source, *names] for source, names in groups.items()]
    same = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same[id(parameter)].append(name)
    for names in same.values():
        known = next((group for group in found if set(group) & set(names)), None)
        if known is not None:
            known += [name for name in names if name not in known]
        # A module that stands in two places is one, and changes in both.
        elif len({id(model.get_submodule(name.rpartition(".")[0])) for name in names}) > 1:
            found.append(names)
    return [[name.removesuffix(".weight") for name in group] for group in found]
