"""Numbers that decode to weights, and vectors beside them, with the optimizer that moves them.

Rounding counts as the identity on the way back (a straight-through estimate). The optimizer is Adam (arXiv:1412.6980).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers.utils import logging
from transformers.utils.logging import tqdm

from hf_kbit.calibration.launches import NotRecorded, one_launch
from hf_kbit.calibration.trained_levels import BLOCKS, Levels
from hf_kbit.calibration.trained_trellises import Trellises
from hf_kbit.files.finished import Finished
from hf_kbit.format.trellis import TrellisDecoding
from hf_kbit.nn.weight import KbitWeight

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
TUNING = "tuning."  # where it is, among what a run has finished: no layer's name ends so
# The rate of a vector's first steps, of its mean magnitude: ten times that is no better. All rates fall to 0 as a
# cosine. They were measured on SmolLM2-135M (one H200, 300 to 1000 steps of 4,096 or 8,192 tokens, 2026-11-23), that
# of codes on a trained model of 1.3 million parameters, on a CPU.
VECTORS = 3e-4
WARM_UP = 20  # steps, or a tenth of them
DECAY, DECAY_OF_SQUARES = 0.9, 0.95  # Adam's
LOOKS = 10  # at what was held out, evenly spread over the steps; the best that was seen is kept
HALVINGS = 3  # at most at one look, of the way from the best, where two looks in a row are worse
KEPT = 300  # seconds after which a run that may be killed writes where it is, again and again


class Group(Protocol):
    """Layers whose weights are trained as one tensor of each kind: launching kernels for each layer would take longer
    than they do.

    Attributes:
        blocks: how many times 32 weights they have.
        moves_codes: whether codes are trained, and not scales alone.
    """

    blocks: int
    moves_codes: bool

    def rates(self, steps: int, slower: float) -> list[tuple[torch.Tensor, float]]:
        """What is trained, leaves that ask for gradients, and the rate of each; that of scales is so much slower."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each layer's name and decoded weight, as the model has it."""

    def confine(self) -> None:
        """Keeps what is trained where it can be stored."""

    def rounded(self) -> list[torch.Tensor]:
        """What is stored, from what is trained."""

    def stored(self) -> list[torch.Tensor]:
        """The tensors that ``rounded`` is for, which the group keeps."""

    def store(self) -> None:
        """Loads the layers with ``stored``."""


def _groups(layers: Mapping[str, KbitWeight], dense, device: torch.device, dtype: torch.dtype) -> list[Group]:
    alike: dict[Any, dict[str, KbitWeight]] = {}
    for name, layer in layers.items():
        decoding = layer.decoding
        key = TrellisDecoding if isinstance(decoding, TrellisDecoding) else replace(decoding, exponent=0)
        alike.setdefault(key, {})[name] = layer
    made = ((Trellises if key is TrellisDecoding else Levels, own) for key, own in alike.items())
    return [kind(own, dense, device, dtype) for kind, own in made]


class Trained:
    """Numbers that decode to the weights of layers, and vectors, which are parameters of the model, with the optimizer
    that moves them; ``dense`` is what weights were in 16 or 32 bits, to train codes of levels too, or None. All are by
    name.
    """

    def __init__(self, layers: Mapping[str, KbitWeight], dense, vectors, steps: int, device, dtype):
        self.steps, self.dtype, self.device = steps, dtype, device
        self.groups = _groups(layers, dense, device, dtype)
        self.moves_codes = any(group.moves_codes for group in self.groups)
        self.start = {name: vector.detach().float() for name, vector in vectors.items()}
        self.sizes = {name: float(x.abs().mean()) or 1.0 for name, x in self.start.items()}
        self.moved = {name: torch.zeros_like(x).requires_grad_() for name, x in self.start.items()}
        blocks = sum(group.blocks for group in self.groups)
        slower = 1.0 if dense is not None else min(math.sqrt(BLOCKS / blocks), 1.0)
        rates = [rate for group in self.groups for rate in group.rates(steps, slower)]
        rates += [(vector, slower * VECTORS) for vector in self.moved.values()]
        self.rates = torch.tensor([rate for _, rate in rates], device=device)
        self.parameters = [parameter for parameter, _ in rates]
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.Adam(
            [{"params": [parameter], "lr": torch.zeros((), device=device)} for parameter in self.parameters],
            betas=(DECAY, DECAY_OF_SQUARES),
            capturable=on_gpu,
            fused=on_gpu,
        )

    def values(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """Decoded weights, and vectors, by the names of the model's parameters that they take the places of."""
        weights = {parameter_of(model, name): weight for group in self.groups for name, weight in group.weights()}
        return weights | {name: self._vector(name).to(self.dtype) for name in self.start}

    def _vector(self, name: str) -> torch.Tensor:
        return self.start[name] + self.sizes[name] * self.moved[name]

    @torch.no_grad()
    def train(
        self,
        loss: Callable[[Any], torch.Tensor],
        batches: Sequence[Any],
        look: Callable[[], tuple[float, ...]],
        finished: Finished | None = None,
        progress: bool = False,
    ) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
        """Takes a step for each batch, looks now and then at what comes last in ``look()``, and ends with the best
        that it saw: after how many steps that was, what ``look()`` was at first, and what it was there.

        Without codes, where two looks in a row are worse than the best, the way from there is halved until it is not,
        and all rates with it, for smaller steps would have led about there. One look says little: in the first steps
        noise is ahead of what is learned. With codes it is so for longer, and none changes half-way.

        The loss is a sum: of means, the gradient of a single weight of a large model would be nothing beside what Adam
        adds to its size, and nothing at all in float16. Where batches are tensors, a step is one launch on a GPU, if
        the model allows that: what it computes may not depend on what a tensor holds.
        """
        step, zero = self._step(loss), torch.zeros((), device=self.device)
        if isinstance(batches[0], torch.Tensor):
            try:
                step = one_launch(step, batches[0], zero)
            except NotRecorded as error:
                logger.warning("hf_kbit: tuning is slower, for its kernels are launched one by one: %s", error)
        start = look()
        step(batches[0], zero)  # makes the optimizer's state, which may have come into being before
        self._forget()
        best, kept, first, factor = (0, start), [own.detach().clone() for own in self.parameters], 0, 1.0
        if finished is not None and (found := finished.load(TUNING)) is not None:
            tensors, (first, factor, at, *values) = found
            best = at, tuple(values)
            for name, tensor in self._state(kept).items():
                tensor.copy_(tensors[name])
        every, warm_up = max(self.steps // LOOKS, 1), max(min(self.steps // 10, WARM_UP), 1)
        written = time.monotonic()
        with tqdm(total=self.steps, initial=first, desc="tuning", unit="step", disable=not progress) as bar:
            for number in range(first, self.steps):
                fall = (1 + math.cos(math.pi * number / self.steps)) / 2
                step(batches[number], zero + factor * min((number + 1) / warm_up, 1.0) * fall)
                bar.update()
                if (number + 1) % every and number + 1 < self.steps:
                    continue
                now, halvings = look(), 0
                most = HALVINGS if number + 1 - best[0] > every and not self.moves_codes else 0
                while halvings < most and not now[-1] <= best[1][-1]:  # NaN is worse
                    for own, mine in zip(self.parameters, kept, strict=True):
                        own.lerp_(mine, 0.5)
                    now, halvings, factor = look(), halvings + 1, factor / 2
                bar.set_postfix_str(f"held out: {now[-1]:.3g}, at first {start[-1]:.3g}")
                if now[-1] <= best[1][-1]:
                    best = number + 1, now
                    _copy(self.parameters, kept)
                elif halvings:
                    _copy(kept, self.parameters)
                if halvings:
                    self._forget()
                if finished is not None and time.monotonic() - written >= KEPT:
                    finished.save(TUNING, self._state(kept), (number + 1, factor, best[0], *best[1]))
                    written = time.monotonic()
        _copy(kept, self.parameters)
        _copy(self._packed(), self._stored())
        return best[0], start, best[1]

    def _step(self, loss: Callable) -> Callable[[Any, torch.Tensor], tuple[()]]:
        """A function of a batch and of a factor for all rates that takes one step."""

        def step(batch, rate: torch.Tensor) -> tuple[()]:
            for parameter in self.parameters:
                parameter.grad = None
            with torch.enable_grad():
                loss(batch).backward(inputs=self.parameters)
            for group, own in zip(self.optimizer.param_groups, self.rates, strict=True):
                group["lr"].copy_(own * rate)
            self.optimizer.step()
            for group in self.groups:
                group.confine()
            return ()

        return step

    def _forget(self) -> None:
        """Has the optimizer start anew."""
        for state in self.optimizer.state.values():
            for tensor in state.values():
                tensor.zero_()

    def _state(self, kept: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """All that a run goes on from, by name."""
        states = (sorted(self.optimizer.state[parameter].items()) for parameter in self.parameters)
        moments = [tensor for state in states for _, tensor in state]
        return {f"{number}": tensor for number, tensor in enumerate([*self.parameters, *moments, *kept])}

    def _packed(self) -> list[torch.Tensor]:
        """What all of it is as stored: codes, scales and vectors."""
        rounded = [tensor for group in self.groups for tensor in group.rounded()]
        return [*rounded, *(vector.detach().clone() for vector in self.moved.values())]

    def _stored(self) -> list[torch.Tensor]:
        """The tensors that ``_packed`` is of."""
        return [*(tensor for group in self.groups for tensor in group.stored()), *self.moved.values()]

    @torch.no_grad()
    def store(self, model: nn.Module) -> None:
        """Loads the layers with what is packed, and writes the vectors into the model."""
        for group in self.groups:
            group.store()
        for name in self.start:
            model.get_parameter(name).copy_(self._vector(name))


def _copy(tensors: Iterable[torch.Tensor], places: Iterable[torch.Tensor]) -> None:
    for tensor, place in zip(tensors, places, strict=True):
        place.copy_(tensor)


def parameter_of(model: nn.Module, name: str) -> str:
    """The name of the parameter of a layer's weight, or of a projection's in a module of experts."""
    parent, _, own = name.rpartition(".")
    return name if own in model.get_submodule(parent)._parameters else f"{name}.weight"
