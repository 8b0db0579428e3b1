"""The load report: what of a model is quantized, what stays in 16 bits, and why."""

import re
from collections import Counter
from collections.abc import Mapping

from torch import nn
from transformers.utils import logging

from hf_kbit.format.errors import MAX_NAMED
from hf_kbit.nn.weight import KbitWeight, distinct
from hf_kbit.plan import allocation, selection
from hf_kbit.plan.config import KbitConfig
from hf_kbit.plan.memory import USUAL_FOR_TABLES
from hf_kbit.plan.plan import Outcome

# A child of the logger of Transformers, so that transformers.logging.set_verbosity speaks of it too.
logger = logging.get_logger("transformers.hf_kbit")
# Of the weights left in 16 bits: from here on a warning says so, for few bits then help little.
MUCH_LEFT = 0.1


def report(quantizer, model: nn.Module, layers: Mapping[str, KbitWeight]) -> None:
    """Logs one line on what a ``KbitHfQuantizer`` has quantized, which are ``layers``, and on what is left, like names
    gathered; then what is out of the ordinary."""
    packed = {id(parameter) for layer in layers.values() for parameter in layer.parameters()}
    left, sizes = Counter(), Counter()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and parameter.is_floating_point() and id(parameter) not in packed:
            pattern = _gathered(name.removesuffix(".weight"))
            left[pattern] += 1
            sizes[pattern] += parameter.numel()
    weights = sum(layer.num_weights for layer in distinct(layers.values()))
    widths = Counter(layer.bits for layer in layers.values())
    widths = ", ".join(f"{count} in {bits} bits" for bits, count in sorted(widths.items())) or "none"
    listing = ", ".join(f"{name} ({count} x, {sizes[name]:,})" for name, count in left.items())
    share = sizes.total() / max(weights + sizes.total(), 1)
    much = share > MUCH_LEFT and not quantizer.pre_quantized  # what is quantized already was told of then
    level = logging.WARNING if much else logging.INFO
    if logger.isEnabledFor(level):
        logger.log(
            level,
            f"hf_kbit: {len(layers)} quantized layers with {weights:,} weights ({widths}); left as they are: "
            f"{left.total()} tensors with {sizes.total():,} weights ({share:.0%}){listing and f': {listing}'}"
            f"{_advice(quantizer, model)}",
        )
    report_exceptions(quantizer.outcome)
    _report_mxfp4(quantizer.from_mxfp4)


def report_exceptions(outcome: Outcome) -> None:
    """Warns of layers that are not transformed, or not quantized, though the config says that they are to be."""
    counts = Counter(f"{_gathered(name)} {what}" for name, what in outcome.told.items())
    if counts:
        listing = "; ".join(f"{what} ({count} x)" for what, count in counts.most_common(MAX_NAMED))
        logger.warning("hf_kbit: left in 16 bits, for quantized layers cannot take their places: %s", listing)
    for what, reasons in (("quantized without a transform", outcome.untransformed), ("left in 16 bits", outcome.lost)):
        if reasons:
            listing = ", ".join(f"{name} ({why})" for name, why in reasons.items())
            logger.warning("hf_kbit: %s: %s", what, listing)


def report_inputs(count: int, left: Mapping[str, str]) -> None:
    """Logs one line on how many of so many layers take 8-bit inputs, and, as a warning, on those that do not."""
    counts = Counter(f"{_gathered(name)}: {why}" for name, why in left.items())
    listing = ", ".join(f"{what} ({count} x)" for what, count in counts.items())
    level, rest = (logging.WARNING, f"; 16-bit ones stay in {listing}") if left else (logging.INFO, "")
    logger.log(level, f"hf_kbit: 8-bit inputs in {count - len(left)} of {count} layers{rest}")


def _advice(quantizer, model: nn.Module) -> str:
    """What tables take that are left only because nobody has asked for them, and what they would take packed."""
    config = quantizer.quantization_config
    if quantizer.pre_quantized or config.embedding_bits is not None:
        return ""
    others = {"modules_to_not_convert": config.modules_to_not_convert, "transform": config.transform}
    packed, packable = KbitConfig(embedding_bits=USUAL_FOR_TABLES, **others), selection.Packable(model)
    tables = packable.tables_in(packable.choose(packed))
    if not tables:
        return ""
    widths = {packable.sites[name]: bits for name, bits in tables.items()}
    taken = sum(site.weight.nbytes for site in widths) / 1e6
    left = allocation.packed_bytes(widths, packed) / 1e6
    return f"; embedding_bits={USUAL_FOR_TABLES} would bring the tables among them from {taken:.3g} to {left:.3g} MB"


def _report_mxfp4(from_mxfp4: Mapping[str, int | None]) -> None:
    exact = [name for name, anew in from_mxfp4.items() if anew == 0]
    if exact:
        logger.info("hf_kbit: %d projections of MXFP4 taken over exactly, on the levels of fp4", len(exact))
    for name, anew in from_mxfp4.items():
        if anew is None:
            logger.warning("hf_kbit: %s: requantized from MXFP4: only 4 bits hold it exactly", name)
        elif anew:
            few = "blocks with scales below 2**-17 of the largest, requantized"
            logger.warning("hf_kbit: %s: taken over from MXFP4, but for %d %s", name, anew, few)


def _gathered(name: str) -> str:
    """What like names of all layers have in common: ``layers.*.experts.gate_up_proj``."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
