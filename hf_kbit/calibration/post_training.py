"""``quantize_model``: quantizes a model that is in memory already, of Transformers or of anybody."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_kbit.calibration import stream
from hf_kbit.calibration.data import Text, size_of
from hf_kbit.calibration.layerwise import Calibration, choose
from hf_kbit.calibration.solving import Solving, sort
from hf_kbit.calibration.widths import measure as measure_widths
from hf_kbit.calibration.writing import chosen as chosen_text
from hf_kbit.integrations.transformers.in_memory import finish
from hf_kbit.plan.allocation import by_rule, config_of, spend, stored_weights
from hf_kbit.plan.config import TRELLIS, KbitConfig, config_or
from hf_kbit.plan.memory import ENOUGH_FOR_LAYERS, Footprint, bits_for_memory, embedding_bits_for_memory, parse_size
from hf_kbit.plan.plan import quantize_layers
from hf_kbit.plan.selection import Packable

MEASURED = (8, 256)  # sequences, and tokens of each, on which widths are chosen


@dataclass(frozen=True)
class Quantized:
    """What ``quantize_model`` did.

    Attributes:
        bits: ``{name: width}`` of the layers, tables and projections of experts that it quantized; of a table and what
            is tied to it one name.
        left: ``{name: why}`` of those that it left: ``"asked for"`` by the config, or a reason of its own: ``"head"``,
            ``"router"``, ``"table"`` of embeddings, ``"small"``, so that packing would save nothing, ``"tied"`` to a
            table that is left, ``"fixed"``, tied to another tensor or kept in float32, ``"adapter"`` of PEFT, or
            ``"range"``, some rows being too small beside the largest weight for packed scales. Or what it has that a
            quantized layer would lose, ``"has a forward of its own"``, or what of the model writes its weight.
        bytes_before, bytes_after: of all parameters and buffers.
    """

    bits: Mapping[str, int]
    left: Mapping[str, str]
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Fitting:
    """Into which memory a model is to fit, and how widths are chosen for a mean.

    Attributes:
        memory: bytes, or a size such as ``"20GB"``, that the model may take, instead of ``bits``; tables are packed
            for that if the other layers would have fewer than 4 bits otherwise
            (``hf_kbit.embedding_bits_for_memory``).
        context: with ``memory``: tokens of a sequence that there must be room for.
        measure: whether the widths for a mean, as of ``bits=3.5`` or ``memory``, are chosen by what few bits in each
            layer cost on the data, or on text that the model writes; else by the rule that loading takes. Default:
            with data, ``calibrate`` or ``memory``, if the model is a causal language model.
    """

    memory: int | str | None = None
    context: int = 8192
    measure: bool | None = None


def quantize_model(
    model: nn.Module,
    config: KbitConfig | None = None,
    *,
    data: torch.Tensor | Mapping[str, Any] | str | Path | Iterable[str] | None = None,
    calibrate: bool | None = None,
    device: torch.device | str | None = None,
    report: Callable[[str, str], object] | None = None,
    **settings: Any,
) -> Quantized:
    """Quantizes the linear layers of a model in place, and the experts of mixtures; tables of embeddings too if
    ``embedding_bits`` or a memory says so. This is all that ``hf-kbit quantize`` does with a model that it has loaded.

    Any ``nn.Module`` will do: a model of Transformers becomes what ``from_pretrained`` with the config would have
    loaded. Another module runs, and its ``state_dict`` loads into one that was quantized likewise. A model that reads
    tokens can be calibrated (``hf_kbit.calibrate``), and any be made to fit into a memory, each layer with a width of
    its own (``hf_kbit.bits_for_memory``, ``choose_widths``). Bars show on stderr if it takes more than seconds.

    Args:
        model: weights float32, float16 or bfloat16, on any devices, and they stay there; on one to be calibrated.
        config: what to quantize, as for loading.
        data: what the model is for, as for ``calibrate``.
        calibrate: whether to quantize with data, or with what ``hf_kbit.calibrate`` takes if there is none. Default:
            if there is data.
        device: where a weight is while it is quantized, and what computes on data. Default: a GPU where there is one,
            else where it is.
        report: called with a word and a line of text for each thing that was chosen, with the reasons, as soon as it
            was, and before each long step: ``report=print`` shows them.
        settings: the fields of ``post_training.Fitting`` (into which memory), and the settings of ``calibrate``.

    Returns:
        What was done.

    Raises:
        TypeError: the model is no ``nn.Module``, or none of Transformers and to be calibrated or measured; the rest as
            for ``calibrate``.
        ValueError: an argument is out of range or has no use, the model is quantized already, there is no layer to
            quantize, a weight is NaN, infinite, or not in memory, the memory is too small, or the model cannot be
            calibrated. In all these cases the model is as it was.
        MemoryError: there is no room to tune the whole model, and it is as it was.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    >>> quantize_model(model, bits=3).bits
    {'0': 3, '2': 3, '4': 3}
    >>> model[0]
    KbitLinear(in_features=64, out_features=64, bias=True, bits=3)
    """
    text, solving, fitting, arguments = sort(settings, Text, Solving, Fitting)
    config, text = config_or(config, arguments), replace(text, data=data)
    calibrate = data is not None if calibrate is None else calibrate
    if fitting.measure is None:
        wanted = calibrate or data is not None or fitting.memory is not None
        fitting = replace(fitting, measure=wanted and stream.predicts_tokens(model))
    _check_use(model, config, solving, fitting, data is not None, calibrate, "bits" in arguments)
    report = report or (lambda label, line: None)
    if fitting.memory is not None:
        config, fitting = _with_tables(model, config, fitting, report)
    packable, chosen = choose(model, config)
    if calibrate:
        solving.check_model(model, [packable.sites[name] for name in chosen], config, text, device)
    before, tables = _bytes(model), packable.tables_in(chosen)
    reasons = (
        {} if config.embedding_bits is not None else dict.fromkeys(packable.tables, "table")
    ) | packable.reasons_for(config)
    mean = config.bits if fitting.memory is None else _mean_in_memory(model, fitting, config, report)
    measured = bool(mean % 1 and fitting.measure)
    if calibrate or measured:
        ids, name, counts = _read(model, text, solving, config, calibrate, measured, device)
        source = f"{name}, on {stream.resolve(None, model) if device is None else device}"
    if mean % 1:
        if measured:
            method = solving.method if calibrate else None
            own = _measured(model, packable, mean, ids, source, config, method, device, report)
        else:
            own = by_rule(model, {name: packable.sites[name] for name in chosen if name not in tables}, mean, config)
            _report_widths(packable, own, ", by names and shapes", config, report)
        config, chosen = config_of(config, own), chosen | own
    elif fitting.memory is not None:
        config, chosen = replace(config, bits=int(mean)), {name: tables.get(name, int(mean)) for name in chosen}
    plan = packable.plan(config, chosen)
    if calibrate:
        report("calibrating", f"{solving.method}, {size_of(ids)} of {source}")
        Calibration(plan, solving, ids, device, True, name, counts).run()
        if plan.outcome.tuned:
            report("tuned", plan.outcome.tuned)
    else:
        quantize_layers(plan, plan.decodings, device)
        finish(plan)
    chosen = {name: bits for name, bits in chosen.items() if name not in plan.outcome.lost}
    reasons = reasons | dict.fromkeys(plan.outcome.lost, "range")
    left = {
        name: reasons.get(name, "asked for")
        for name in packable.names
        if name not in chosen and packable.ties.get(name) not in chosen
    }
    return Quantized(chosen, left, before, _bytes(model))


def _check_use(
    model, config: KbitConfig, solving: Solving, fitting: Fitting, data: bool, calibrate: bool, bits: bool
) -> None:
    """Refuses what does not go together; ``data`` and ``bits`` say whether there are any."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model: found {type(model).__name__}, expected a torch.nn.Module, such as a part of a pipeline; a model "
            "that has a name or a folder is quantized while it loads, by AutoModelForCausalLM.from_pretrained(name, "
            "quantization_config=hf_kbit.KbitConfig(bits=3))"
        )
    if (data or calibrate or fitting.measure) and not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model: found {type(model).__name__}, expected a model of Transformers to calibrate or to measure: of a "
            "module that holds one, quantize that part with data"
        )
    if calibrate:
        solving.check(config)
    for name, value in {} if calibrate else {"tune": solving.tune or None, "resume": solving.resume}.items():
        if value is not None:
            raise ValueError(f"{name}: found {value!r}, but nothing is calibrated, expected data, or calibrate=True")
    limited = fitting.memory is not None
    if limited and (bits or any(config.module_bits.values())):
        raise ValueError("memory: found it and bits or widths in module_bits, expected one")
    if data and not calibrate and not (fitting.measure and (limited or config.bits % 1)):
        raise ValueError("data: found it, but neither calibrate nor measured widths need it")


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


# --- what a memory or a mean comes to -------------------------------------------------------------


def _with_tables(model: nn.Module, config: KbitConfig, fitting: Fitting, report) -> tuple[KbitConfig, Fitting]:
    """The config with the width of tables that suits the memory, and that in bytes."""
    fitting = replace(fitting, memory=parse_size(fitting.memory))
    tables = embedding_bits_for_memory(model, fitting.memory, context=fitting.context, config=config)
    if tables != config.embedding_bits:
        fewer = f"beside tables in 16 the other layers would have fewer than {ENOUGH_FOR_LAYERS}"
        report("tables", f"of embeddings in {tables} bits, for {fewer}")
    return replace(config, embedding_bits=tables), fitting


def _mean_in_memory(model: nn.Module, fitting: Fitting, config: KbitConfig, report) -> float:
    """The mean width with which the model takes so many bytes; says what they are for."""
    bits = bits_for_memory(model, fitting.memory, context=fitting.context, config=config)
    footprint = Footprint.of(model, fitting.context, config)
    weights = f"{footprint.weights:,} weights, {bits:.2f} bits and {footprint.scale_bits} for scales"
    parts = footprint.parts | {weights: int(footprint.weight_bytes(bits))}
    report("memory", f"{fitting.memory:,} bytes")
    for what, taken in parts.items():
        report("", f"{taken:,} for {what}")
    report("", f"{fitting.memory - sum(parts.values()):,} left over")
    return bits


def _read(
    model: PreTrainedModel, text: Text, solving: Solving, config: KbitConfig, calibrate: bool, measured: bool, device
) -> tuple[list[torch.Tensor], str, list[float] | None]:
    """Token ids, what reports call them, and how much tokens of each sequence count, if not alike. ``measured``:
    whether widths are chosen on them too, which takes more."""
    amount = (text.sequences, text.length) if calibrate else MEASURED
    little = calibrate and solving.needs_little and not measured
    trellis, tune = config.codebook == TRELLIS and not solving.needs_little, calibrate and solving.tune
    how = {"trellis": trellis, "tune": tune, "device": device, "progress": True}
    text, *others = chosen_text(model, text, little, amount, **how)
    return text.ids(model), *others


def _measured(
    model, packable: Packable, mean: float, ids, source: str, config: KbitConfig, method: str | None, device, report
) -> dict[str, int]:
    """Widths for a mean, by what each layer loses; says which layers get how many, and why."""
    sample = [row[: MEASURED[1]] for row in ids[:: max(len(ids) // MEASURED[0], 1)][: MEASURED[0]]]
    tokens = sum(map(len, sample))
    report("measuring", f"what few bits in each layer cost on {tokens:,} tokens of {source}")
    layers = measure_widths(model, sample, config, method=method, device=device, progress=True)
    chosen = spend(layers, mean)
    _report_widths(packable, chosen, "", config, report)
    fewest = config.widths[0]
    costs = sorted(layers, key=lambda name: layers[name].costs[fewest] / layers[name].weights)
    for extreme, name in (("most", costs[-1]), ("least", costs[0])):
        cost = f"for {fewest} cost {layers[name].costs[fewest] / tokens:.2g} nats a token"
        report("", f"{name}: {chosen[name]} bits, {cost}, the {extreme} for its size")
    return chosen


def _report_widths(packable: Packable, chosen: Mapping[str, int], how: str, config: KbitConfig, report) -> None:
    """Says how many layers have which width, and the mean of each kind."""
    counts = ", ".join(f"{count} in {width} bits" for width, count in sorted(Counter(chosen.values()).items()))
    weights, used = Counter(), Counter()
    for name, width in chosen.items():
        for key in ("", name.rpartition(".")[2]):
            weights[key] += (stored := stored_weights([packable.sites[name]], config))
            used[key] += stored * width
    means = {key: used[key] / weights[key] for key in weights}
    report("widths", f"{means.pop(''):.2f} bits for a weight{how}: {counts}")
    report("", ", ".join(f"{kind} {width:.2f}" for kind, width in means.items()))
