"""Tuning: what is stored of a model is trained until the model computes what it did in 16 bits.

Solvers round a linear layer at a time (``layerwise``), for its own outputs. What is left is a matter of several: their
errors add up or cancel out, and few of them reach the logits. Two stages train through what is stored, by Adam:

1. ``tune_layer``, of one layer of the model after another, while they are solved, on the squared error of its output:
   the scale of each block, as a number between bytes that is decoded as the byte next to it, and the code of each
   weight, as a number between levels that is decoded as the level next to it.
2. ``tune_model``, of the whole model, on the divergence of its predictions: scales, and the vectors that
   stay in 16 bits: weights of norms, and biases.

Both train the same things by the same loop (``trained``). The result is stored as any other.

What was tried and left out, on SmolLM2-135M (one H200, 300 to 1000 steps of 4,096 or 8,192 tokens, 2026-11-23): codes
in the second stage, whose gradients are noise for a single weight, so that either none changes or a tenth of them at
once, and the model is lost; column scales, which gain nothing (+10.9% perplexity at 3 bits with, +10.7% without).
Levels stay, too: scales make up for them.

Source: layers first and then all scales is EfficientQAT (arXiv:2407.11062), scales on the loss of the whole model are
FLUTE's (arXiv:2407.10960); the divergence from the 16-bit model on text of its own is the loss of LLM-QAT
(arXiv:2305.17888), the optimizer Adam (arXiv:1412.6980).
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import psutil
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import deterministic
from torch.utils._pytree import tree_leaves
from transformers.utils import logging

from hf_kbit.calibration import stream
from hf_kbit.calibration.data import LENGTH
from hf_kbit.calibration.resume import Finished
from hf_kbit.calibration.trained import Trained, parameter_of
from hf_kbit.nn.weight import KbitWeight, packed_layers

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
# By the type of the device that computes; "" is any other than a CPU. Steps unless a number is asked for, tokens of
# each, and how many sequences and tokens of each the model writes if there is no data.
STEPS, TOKENS = {"cpu": 200, "": 1000}, {"cpu": 1024, "": 8192}
LAYER_STEPS = 5  # of the steps for the whole model, one of so many is taken for each layer
AMOUNTS = {"cpu": (256, 256), "": (4096, 640)}
HELD_OUT, MOST_HELD_OUT = 16, 64  # one of so many sequences, and at most so many of them
SEED, TINY = 0, 1e-20
CHUNK = 1 << 27  # logits whose probabilities are in memory at a time, in float32
# Bytes for each weight of the whole model: its code, and its share of a scale with gradient and moments; what is
# decoded, its gradient and products on the way take as much in the dtype to compute in, so many times.
OWN_BYTES, COPIES = 2, 4
ROOM = 0.8  # of the memory that is free, so much is taken at most


class Gain(NamedTuple):
    """What tuning has changed on sequences that were held out: perplexities and mean divergences, in nats.

    Attributes:
        tokens: predicted.
        steps: after which it was best; 0 where it never was better than before.
        perplexity: of the model in 16 bits.
        before: perplexity and divergence of the quantized one.
        after: the same, tuned.
    """

    tokens: int
    steps: int
    perplexity: float
    before: tuple[float, float]
    after: tuple[float, float]

    def __str__(self) -> str:
        (was, kl), (now, less) = self.before, self.after
        return (
            f"perplexity {was:.4g} -> {now:.4g}, {self.perplexity:.4g} in 16 bits, divergence {kl:.3g} -> {less:.3g}, "
            f"on {self.tokens:,} tokens that were held out, after {self.steps:,} steps"
        )


def check(model: nn.Module, steps: int | bool, rows: int | None = None) -> None:
    """Refuses what cannot be tuned; ``rows`` are the sequences that there are, if that is known.

    Raises:
        TypeError: the number of steps is none.
        ValueError: it is negative, the model is no causal language model, or there are too few sequences.
    """
    if not isinstance(steps, int):
        raise TypeError(f"tune: found {steps!r}, expected a number of steps, or True")
    if steps < 0:
        raise ValueError(f"tune: found {steps}, expected 0 or more steps")
    if steps and not (stream.is_causal(model.config) and stream.reads_tokens(model) and model.can_generate()):
        raise ValueError(
            f"tune: found {type(model).__name__}, expected a causal language model: what is trained on is how it "
            "predicts the next token"
        )
    if steps and rows is not None and rows < 2:
        raise ValueError(f"data: found {rows} sequence, expected 2 or more to tune on, one of which is held out")


def steps_on(device: torch.device, steps: int | bool) -> int:
    """The number of steps that is asked for."""
    return STEPS.get(device.type, STEPS[""]) if steps is True else int(steps)


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules alone, with the same parameters and buffers: what one replaces, the other keeps."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def check_room(model: nn.Module, weights: int, length: int | None, device: torch.device) -> None:
    """Refuses to train so many weights of a model at once, beside the model in 16 bits, where there is no room.

    Args:
        length: tokens of a sequence; None where it is not known.

    Raises:
        MemoryError: it would take more than ``ROOM`` of what is free on the device.
    """
    config, dtype = model.config.get_text_config(), stream.dtype_on(device, model.dtype)
    hidden, depth = getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0)
    tokens = max(TOKENS.get(device.type, TOKENS[""]), length or LENGTH)
    activations = tokens * dtype.itemsize * (4 * config.vocab_size + 40 * hidden * depth)  # some 40 tensors in a layer
    copied = (x.numel() for x in model.parameters() if (x.device, x.dtype) != (device, dtype))
    needed = sum(copied) * dtype.itemsize + weights * (OWN_BYTES + COPIES * dtype.itemsize) + activations
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed > ROOM * free:
        raise MemoryError(
            f"tune: found {free / 1e9:,.1f} GB free on {device}, expected {needed / ROOM / 1e9:,.1f} to train "
            f"{type(model).__name__} as a whole; make room, take another device, or train its layers alone, with "
            "tune_whole=False (--no-tune-whole)"
        )


def tune_model(
    model: nn.Module,
    dense: nn.Module,
    names: Iterable[str],
    ids: torch.Tensor,
    steps: int,
    device: torch.device,
    finished: Finished | None = None,
    progress: bool = False,
) -> Gain:
    """Trains scales of layers of a quantized model, and the vectors beside them, on the divergence of its predictions.

    Args:
        model: on any one device, and it stays there.
        dense: the same in 16 or 32 bits, from ``sharing_copy``.
        names: of the layers; whatever else is packed is as it is.
        ids: int64 ``[sequences, tokens]``, 2 or more; a part is held out, and says what was gained and what is kept.
        steps: of ``TOKENS`` tokens.
        device: where all of it is meanwhile.
        finished: keeps where it is, and goes on from there.
        progress: shows a bar on stderr.
    """
    ids, names = ids.to(device), list(names)
    layers = {name: model.get_submodule(name) for name in names}
    rows = _rows_in_step(ids, device)
    held_out = ids[_held_out(len(ids)) :]
    batches = _batches(_held_out(len(ids)), rows, steps)
    with stream.placed(dense, "", device), _deterministic():
        trained = Trained(layers, None, _vectors(dense), steps, device, stream.dtype_on(device, dense.dtype))
        others = packed_layers(model)
        others = {name: module.dequantize().to(device, trained.dtype) for name, module in others.items()}
        fixed = {parameter_of(dense, name): weight for name, weight in others.items() if name not in layers}

        def before(part: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return dense(input_ids=part, use_cache=False).logits

        def after(part: torch.Tensor) -> torch.Tensor:
            with holding(dense, fixed | trained.values(dense)):
                return dense(input_ids=part, use_cache=False).logits

        def look() -> tuple[float, float]:
            return _measure(after, before, held_out.split(rows))

        reference = _measure(before, before, held_out.split(rows))[0]
        step = trained.stepper(lambda part: _Divergence.apply(after(part), before(part)), ids[batches[0]])
        start = look()
        taken, best = trained.descend(
            lambda number, rate: step(ids[batches[number]], rate), look, start, finished, progress
        )
    trained.store(model)
    return Gain(held_out[:, 1:].numel(), taken, reference, start, best)


def tune_layer(
    model: nn.Module,
    layers: Mapping[str, KbitWeight],
    run: Callable[[slice], Any],
    ids: torch.Tensor,
    drifting: bool,
    steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Trains scales and codes of one layer of a model on the squared error of its output.

    Args:
        model: with that layer in 16 or 32 bits, on ``device``, and quantized ones before it.
        layers: what is quantized of the layer, by its name in the model.
        run: computes the layer on a slice of the data.
        ids: int64 ``[sequences, tokens]``, the data.
        drifting: whether that is first as dense layers before it pass it on, for which its output is what is aimed at,
            and then once more as quantized ones do.
        steps: of ``TOKENS`` tokens.

    Returns:
        The error, over the square of the output, on sequences that were held out: before and after.
    """
    count, rows = len(ids), _rows_in_step(ids, device)
    after = count if drifting else 0
    batches = _batches(_held_out(count), rows, steps)
    weights = {name: model.get_submodule(name).weight.detach() for name in layers}
    trained = Trained(layers, weights, {}, steps, device, stream.dtype_on(device, model.dtype))

    def error(part: slice) -> tuple[torch.Tensor, int]:
        """A sum over outputs: of the squares of differences, over the mean square of what is aimed at; and of how
        many numbers."""
        with torch.no_grad():
            aim = _output(run(part)).float()
        with holding(model, trained.values(model)):
            found = _output(run(slice(part.start + after, part.stop + after))).float()
        return (found - aim).square().sum() / aim.square().mean().clamp(min=TINY), aim.numel()

    def look() -> tuple[float, ...]:
        parts = [slice(start, min(start + rows, count)) for start in range(_held_out(count), count, rows)]
        with torch.no_grad():
            means = [total.item() / count for total, count in map(error, parts)]
        return (sum(means) / len(means),)

    with _deterministic():
        step = trained.stepper(lambda part: error(part)[0])
        start = look()
        _, best = trained.descend(lambda number, rate: step(batches[number], rate), look, start)
    trained.store(model)
    return start[0], best[0]


# --- pieces ---------------------------------------------------------------------------------------


class _Divergence(torch.autograd.Function):
    """The sum of KL(before || after) of logits ``[*, vocabulary]``; its gradient is made at once, in their dtype."""

    @staticmethod
    def forward(ctx, after, before):
        gradient = torch.empty_like(after)
        total, rows = after.new_zeros((), dtype=torch.float32), max(CHUNK // after.shape[-1], 1)
        parts = (x.flatten(0, -2).split(rows) for x in (after, before, gradient))
        for new, old, own in zip(*parts, strict=True):
            new, old = new.float().log_softmax(-1), old.float().log_softmax(-1)
            aim = old.exp()
            total += (aim * (old - new)).sum()
            own.copy_(new.exp() - aim)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx, by_sum):
        return ctx.saved_tensors[0] * by_sum, None


@contextmanager
def holding(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, the parameters of those names are these tensors, through which gradients flow."""
    places = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in values]
    before = [module._parameters[own] for module, own in places]
    for (module, own), value in zip(places, values.values(), strict=True):
        module._parameters[own] = value
    try:
        yield
    finally:
        for (module, own), parameter in zip(places, before, strict=True):
            module._parameters[own] = parameter


@contextmanager
def _deterministic() -> Iterator[None]:
    """Inside, torch's functions give the same each time on one machine, as far as they can."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filling = deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*determin")
        torch.use_deterministic_algorithms(True, warn_only=True)
        deterministic.fill_uninitialized_memory = False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            deterministic.fill_uninitialized_memory = filling


def _vectors(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: x for name, x in model.named_parameters() if x.dim() == 1 and x.is_floating_point()}


def _rows_in_step(ids: torch.Tensor, device: torch.device) -> int:
    return min(max(TOKENS.get(device.type, TOKENS[""]) // ids.shape[1], 1), _held_out(len(ids)))


def _held_out(count: int) -> int:
    """The number of the first of so many sequences that is held out."""
    return count - min(max(count // HELD_OUT, 1), MOST_HELD_OUT)


def _batches(count: int, rows: int, steps: int) -> list[slice]:
    """Which sequences each step takes: all in turn, the batches of each turn in an order of their own."""
    generator, batches = torch.Generator().manual_seed(SEED), []
    while len(batches) < steps:
        for place in torch.randperm(count // rows, generator=generator).tolist():
            batches.append(slice(place * rows, (place + 1) * rows))
    return batches[:steps]


def _output(output: Any) -> torch.Tensor:
    """What a layer passes on to the next: the first tensor of floats."""
    return next(x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point())


@torch.no_grad()
def _measure(after: Callable, before: Callable, parts: Iterable[torch.Tensor]) -> tuple[float, float]:
    """Perplexity of ``after`` and mean divergence from ``before``, functions from ids to logits."""
    nll = divergence = predicted = 0.0
    for part in parts:
        logits, target = after(part)[:, :-1], part[:, 1:]
        divergence += _Divergence.apply(logits, before(part)[:, :-1]).item()
        nll += sum(
            F.cross_entropy(row.float(), own, reduction="sum").item() for row, own in zip(logits, target, strict=True)
        )
        predicted += target.numel()
    return math.exp(min(nll / predicted, 700)), divergence / predicted
