"""Tuning: what is stored of a model is trained until the model computes what it did in 16 bits.

Solvers round a linear layer at a time (``layerwise``), for its own outputs. What is left is a matter of several: their
errors add up or cancel out, and few of them reach the logits. Two stages train through what is stored (``trained``):

1. ``tune_layer``, of one layer of the model after another, while they are solved, on the squared error of its output:
   the scale of each block, as a number between bytes that is decoded as the byte next to it, and the code of each
   weight, as a number between levels that is decoded as the level next to it.
2. ``tune_model``, of the whole model, on the divergence of its predictions: scales, and the vectors that
   stay in 16 bits: weights of norms, and biases.

What was tried and left out, on SmolLM2-135M (one H200, 300 to 1000 steps of 4,096 or 8,192 tokens, 2026-11-23): codes
in the second stage, whose gradients are noise for a single weight, so that either none changes or a tenth of them at
once, and the model is lost; column scales, which gain nothing (+10.9% perplexity at 3 bits with, +10.7% without).
Levels stay, too: scales make up for them.

Source: layers first and then all scales is EfficientQAT (arXiv:2407.11062), scales on the loss of the whole model are
FLUTE's (arXiv:2407.10960); the divergence from the 16-bit model on text of its own is the loss of LLM-QAT
(arXiv:2305.17888).
"""

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import deterministic
from torch.utils._pytree import tree_leaves

from hf_kbit.calibration import stream
from hf_kbit.calibration.data import LENGTH, batches_of
from hf_kbit.calibration.trained import Trained, parameter_of
from hf_kbit.files.finished import Finished
from hf_kbit.nn.weight import KbitWeight, packed_layers

# By the type of the device that computes; "" is any other than a CPU. Steps unless a number is asked for, tokens of
# each, and how many sequences and tokens of each the model writes if there is no data.
STEPS, TOKENS = {"cpu": 200, "": 1000}, {"cpu": 1024, "": 8192}
AMOUNTS = {"cpu": (256, 256), "": (4096, 640)}
LAYER_STEPS = 5  # of the steps for the whole model, one of so many is taken for each layer
HELD_OUT, MOST_HELD_OUT = 16, 64  # one of so many sequences, and at most so many of them
SEED, TINY = 0, 1e-20
CHUNK = 1 << 27  # logits whose probabilities are in memory at a time, in float32
# Bytes for each weight of the whole model: its code, and its share of a scale with gradient and moments; what is
# decoded, its gradient and products on the way take as much in the dtype to compute in, so many times.
OWN_BYTES, COPIES = 2, 4
ROOM = 0.8  # of the memory that is free, so much is taken at most


def sharing_copy(model: nn.Module) -> nn.Module:
    """A copy of the modules alone, with the same parameters and buffers: what one replaces, the other keeps."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def check_room(model: nn.Module, weights: int, length: int | None, device: torch.device) -> None:
    """Refuses to train so many weights of a model at once, on sequences of ``length`` tokens if that is known, where
    that would take more than ``ROOM`` of what is free on the device."""
    config, itemsize = model.config.get_text_config(), stream.dtype_on(device, model.dtype).itemsize
    hidden, depth = getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0)
    tokens = max(stream.usual(TOKENS, device), length or LENGTH)
    activations = tokens * itemsize * (4 * config.vocab_size + 40 * hidden * depth)  # some 40 tensors in a layer
    needed = stream.moved_bytes(model, device) + weights * (OWN_BYTES + COPIES * itemsize) + activations
    free, _ = stream.memory_of(device)
    if needed > ROOM * free:
        raise MemoryError(
            f"tune: found {free / 1e9:,.1f} GB free on {device}, expected {needed / ROOM / 1e9:,.1f} to train "
            f"{type(model).__name__} as a whole; make room, take another device, or train its layers alone, with "
            "tune_whole=False (--no-tune-whole)"
        )


@torch.no_grad()
def tune_model(
    model: nn.Module,
    dense: nn.Module,
    names: Iterable[str],
    sequences: Sequence[torch.Tensor],
    steps: int,
    device: torch.device,
    finished: Finished | None = None,
    progress: bool = False,
) -> str:
    """Trains scales of layers of a quantized model, and the vectors beside them, on the divergence of its predictions
    from those of ``dense``, a ``sharing_copy`` in 16 or 32 bits, for ``sequences``, int64 ``[tokens]`` each; says what
    that has changed on those that were held out. All of it is on ``device`` meanwhile."""
    layers = {name: model.get_submodule(name) for name in names}
    kept = len(sequences) - _held_out(len(sequences))
    ids, held_out = (
        batches_of([row.to(device) for row in part], most_together(sequences, device))
        for part in (sequences[:kept], sequences[kept:])
    )
    batches = [[ids[number] for number in part] for part in _turns(_together(ids, device), steps)]
    with stream.placed(dense, "", device), reproducible():
        vectors = {name: x for name, x in dense.named_parameters() if x.dim() == 1 and x.is_floating_point()}
        trained = Trained(layers, None, vectors, steps, device, stream.dtype_on(device, dense.dtype))
        fixed = {
            parameter_of(dense, name): layer.dequantize().to(device, trained.dtype)
            for name, layer in packed_layers(model).items()
            if name not in layers
        }

        def before(part: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return dense(input_ids=part, use_cache=False).logits

        def after(part: torch.Tensor) -> torch.Tensor:
            with _holding(dense, fixed | trained.values(dense)):
                return dense(input_ids=part, use_cache=False).logits

        def loss(parts: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
            parts = [parts] if isinstance(parts, torch.Tensor) else parts
            return sum(_Divergence.apply(after(part), before(part)) for part in parts)

        if {tuple(part.shape for part in parts) for parts in batches} == {(ids[0].shape,)}:  # so that one is recorded
            batches = [part for (part,) in batches]
        reference, _ = _measured(before, before, held_out)
        at, start, best = trained.train(
            loss,
            batches,
            lambda: _measured(after, before, held_out),
            finished,
            progress,
        )
    trained.store(model)
    (was, divergence), (now, less) = start, best
    return (
        f"perplexity {was:.4g} -> {now:.4g}, {reference:.4g} in 16 bits, divergence {divergence:.3g} -> {less:.3g}, "
        f"on {sum(part[:, 1:].numel() for part in held_out):,} tokens that were held out, after {at:,} steps"
    )


@torch.no_grad()
def tune_layer(
    model: nn.Module,
    layers: Mapping[str, KbitWeight],
    run: Callable[[int], Any],
    batches: Sequence[torch.Tensor],
    first: int,
    steps: int,
    device: torch.device,
) -> tuple[float, float]:
    """Trains scales and codes of one layer of a model, which is on ``device`` in 16 or 32 bits, on the squared error
    of its output, and returns that over the square of the output, on sequences that were held out: before and after.

    Args:
        layers: what is quantized of the layer, by its name in the model.
        run: computes the layer on a batch of the data, by its number.
        batches: int64 ``[sequences, tokens]`` each, as dense layers before it pass them on, for which its output is
            what is aimed at.
        first: the number of the first of these batches as quantized layers pass them on; 0 if that is the same.
    """
    kept = len(batches)
    while sum(map(len, batches[kept:])) < _held_out(sum(map(len, batches))):
        kept -= 1
    parts = _together(batches[:kept], device)
    held_out = [[kept + number for number in part] for part in _together(batches[kept:], device, all_of=True)]
    weights = {name: model.get_submodule(name).weight.detach() for name in layers}
    trained = Trained(layers, weights, {}, steps, device, stream.dtype_on(device, model.dtype))

    def error(part: list[int]) -> tuple[torch.Tensor, int]:
        """A sum over outputs: of the squares of differences, over the mean square of what is aimed at; and of how
        many numbers."""
        with torch.no_grad():
            aims = [_output(run(number)).float() for number in part]
        with _holding(model, trained.values(model)):
            found = [_output(run(first + number)).float() for number in part]
        count = sum(aim.numel() for aim in aims)
        size = sum(aim.square().sum() for aim in aims) / count
        return sum((x - aim).square().sum() for x, aim in zip(found, aims, strict=True)) / size.clamp(min=TINY), count

    def look() -> tuple[float]:
        means = [total.item() / count for total, count in map(error, held_out)]
        return (sum(means) / len(means),)

    with reproducible():
        _, start, best = trained.train(lambda part: error(part)[0], _turns(parts, steps), look)
    trained.store(model)
    return start[0], best[0]


@contextmanager
def reproducible() -> Iterator[None]:
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
def _holding(model: nn.Module, values: Mapping[str, torch.Tensor]) -> Iterator[None]:
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


def most_together(sequences: Sequence[torch.Tensor], device: torch.device) -> int:
    """How many sequences a step takes, of the longest ones."""
    return max(stream.usual(TOKENS, device) // max(map(len, sequences)), 1)


def _held_out(count: int) -> int:
    """So many of the sequences at least, the last ones."""
    return min(max(count // HELD_OUT, 1), MOST_HELD_OUT)


def _together(batches: Sequence[torch.Tensor], device: torch.device, all_of: bool = False) -> list[list[int]]:
    """Numbers of batches by what a step takes: as many as have the tokens of one. What is left over, too few for a
    step, is not taken, unless ``all_of`` them are."""
    found, sizes, most = [], [], stream.usual(TOKENS, device)
    for number, batch in enumerate(batches):
        if not found or sizes[-1] + batch.numel() > most:
            found.append([])
            sizes.append(0)
        found[-1].append(number)
        sizes[-1] += batch.numel()
    return found if all_of or sizes[-1] >= sizes[0] else found[:-1]


def _turns(parts: list[list[int]], steps: int) -> list[list[int]]:
    """What each step takes: all in turn, in an order of its own each turn."""
    order, generator = [], torch.Generator().manual_seed(SEED)
    while len(order) < steps:
        order += torch.randperm(len(parts), generator=generator).tolist()
    return [parts[place] for place in order[:steps]]


def _output(output: Any) -> torch.Tensor:
    """What a layer passes on to the next: the first tensor of floats."""
    return next(x for x in tree_leaves(output) if isinstance(x, torch.Tensor) and x.is_floating_point())


def _measured(after: Callable, before: Callable, parts: Iterable[torch.Tensor]) -> tuple[float, float]:
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
