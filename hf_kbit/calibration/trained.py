"""Numbers that decode to weights, and vectors beside them, with the optimizer that moves them.

Rounding counts as the identity on the way back (a straight-through estimate). The optimizer is Adam (arXiv:1412.6980).
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm.auto import tqdm
from transformers.utils import logging

from hf_kbit.calibration.launches import NotRecorded, one_launch
from hf_kbit.calibration.resume import Finished
from hf_kbit.format import codebooks
from hf_kbit.format.decoding import Decoding
from hf_kbit.format.reference import (
    MAGNITUDE,
    SIGN,
    decode_e4m4,
    halfway,
    nearest,
    pack_codes,
    unpack_codes,
    with_signs,
)
from hf_kbit.format.spec import BLOCK_SIZE, E4M4_BIAS
from hf_kbit.format.transforms import rotate, to_stored
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.weight.packing import of_planes

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
TUNING = "tuning."  # where it is, among what a run has finished: no layer's name ends so
# Rates of the first steps; they fall to 0 as a cosine. Measured on SmolLM2-135M (one H200, 300 to 1000 steps of 4,096
# or 8,192 tokens, 2026-11-23), and codes on a trained model of 1.3 million parameters, on a CPU.
SCALES = 0.1  # steps between bytes: 0.02 is slower, 0.3 worse
VECTORS = 3e-4  # of a vector's mean magnitude: ten times that is no better
# Both suit so many blocks, SmolLM2-135M's. In a larger model noise moves more of them, so they fall as the root. Of
# Qwen2.5-Coder-1.5B-Instruct, with 12 times as many, 0.3 of the rates leave 2% less divergence than all of them (two
# H200s, 300 steps of 8,192 tokens, 2 and 3 bits, 2026-11-27).
BLOCKS = 3.32e6
# Of the distance between levels, over the root of the number of steps: noise moves a number by the root, what is none
# by the number. After error feedback twice of it gains half as much.
CODES = 0.1
START = 0.5  # of the way from a level to where the weight was, numbers start: at 0.9 noise undoes error feedback
WARM_UP = 20  # steps, or a tenth of them
DECAY, DECAY_OF_SQUARES = 0.9, 0.95  # Adam's
LOOKS = 10  # at what was held out, evenly spread over the steps; the best that was seen is kept
HALVINGS = 3  # at most at one look, of the way from the best, where two looks in a row are worse
KEPT = 300  # seconds after which a run that may be killed writes where it is, again and again


class Trained:
    """Numbers that decode to the weights of layers, and vectors, which are parameters of the model, with the optimizer
    that moves them; ``dense`` is what weights were in 16 or 32 bits, to train codes too, or None. All are by name.

    Layers with the same levels are trained as one tensor of blocks: launching kernels for each of them would take
    longer than they do.
    """

    def __init__(self, layers: Mapping[str, KbitWeight], dense, vectors, steps: int, device, dtype):
        self.steps, self.dtype, self.device = steps, dtype, device
        alike: dict[Decoding, dict[str, KbitWeight]] = {}
        for name, layer in layers.items():
            alike.setdefault(replace(layer.decoding, exponent=0), {})[name] = layer
        self.groups = [_Group(own, dense, device, dtype) for own in alike.values()]
        self.moves_codes = dense is not None
        self.start = {name: vector.detach().float() for name, vector in vectors.items()}
        self.sizes = {name: float(x.abs().mean()) or 1.0 for name, x in self.start.items()}
        self.moved = {name: torch.zeros_like(x).requires_grad_() for name, x in self.start.items()}
        blocks = sum(group.places.numel() for group in self.groups)
        slower = 1.0 if self.moves_codes else min(math.sqrt(BLOCKS / blocks), 1.0)
        rates = [(group.places, slower * SCALES) for group in self.groups]
        rates += [(group.numbers, CODES * group.gap / math.sqrt(steps)) for group in self.groups if self.moves_codes]
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
        return [*(own for group in self.groups for own in (group.codes, group.absmax)), *self.moved.values()]

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


class _Group:
    """Layers with the same levels: all of their blocks, one after another."""

    def __init__(self, layers: Mapping[str, KbitWeight], dense, device: torch.device, dtype: torch.dtype):
        self.layers, self.dtype, self.moves_codes = layers, dtype, dense is not None
        self.decoding = next(iter(layers.values())).decoding
        signed = self.decoding.transformed
        self.most = MAGNITUDE if signed else 255
        stored = [[tensor.to(device) for tensor in layer.packed.values()] for layer in layers.values()]
        self.shapes = [absmax.shape for _, absmax, *_ in stored]
        self.sizes = [shape.numel() for shape in self.shapes]
        self.columns = [decode_e4m4(columns[0]) if columns else None for _, _, *columns in stored]
        self.codes = torch.cat([unpack_codes(planes, self.decoding.bits).flatten(0, -2) for planes, *_ in stored])
        self.absmax = torch.cat([absmax.flatten() for _, absmax, *_ in stored])
        magnitudes = self.absmax & self.most
        self.signs = torch.where((self.absmax >= SIGN) & signed, -1.0, 1.0)
        factors = [2.0**layer.decoding.codebook_exponent for layer in layers.values()]
        units = [torch.full((size,), factor, device=device) for factor, size in zip(factors, self.sizes, strict=True)]
        # What a scale is multiplied by; 0 for blocks of zeros, which stay.
        self.units = torch.cat(units) * self.signs * (magnitudes > 0)
        self.levels = codebooks.scaled(self.decoding.levels, 0, device)
        self.rotation = rotate(torch.eye(BLOCK_SIZE, device=device)).to(dtype) if signed else None
        gaps = self.levels.diff()
        self.gap = gaps.mean().item()
        self.ends = torch.stack((self.levels[0] - gaps[0] / 2, self.levels[-1] + gaps[-1] / 2))
        self.places = magnitudes.float().requires_grad_()
        self.numbers = self._numbers(dense).requires_grad_() if self.moves_codes else self.codes

    def _numbers(self, dense: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Where the weights were between the levels, but next to the level of their code, and START of the way."""
        own = []
        for (name, layer), columns in zip(self.layers.items(), self.columns, strict=True):
            weight = dense[name].mT if layer.transposed else dense[name]
            weight = to_stored(weight, columns, self.decoding.transformed)
            own.append(F.pad(weight, (0, -weight.shape[-1] % BLOCK_SIZE)).view(-1, BLOCK_SIZE))
        scales = _Bytes.apply(self.places.detach()) * self.units
        places = torch.cat(own) / torch.where(scales == 0, 1.0, scales)[:, None]
        edges, codes = torch.cat((self.ends[:1], halfway(self.levels), self.ends[1:])), self.codes.int()
        levels = self.levels[codes]
        return levels + START * (places.clamp(edges[codes], edges[codes + 1]) - levels)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each layer's name and decoded weight, as the model has it."""
        scales = _Bytes.apply(self.places) * self.units
        blocks = _Blocks.apply(self.numbers, scales, self.levels, self.rotation, self.dtype)
        parts = zip(self.layers.items(), blocks.split(self.sizes), self.shapes, self.columns, strict=True)
        for (name, layer), part, shape, columns in parts:
            weight = part.view(*shape[:-1], -1)[..., : layer.in_features]
            weight = weight if columns is None else weight * columns.to(self.dtype)
            yield name, weight.mT if layer.transposed else weight

    def confine(self) -> None:
        """Keeps numbers next to a byte or a level."""
        self.places.clamp_(1, self.most)
        if self.moves_codes:
            self.numbers.clamp_(*self.ends)

    def rounded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes, uint8 ``[blocks, 32]``, and scales, uint8 ``[blocks]``."""
        magnitudes = torch.where(self.units == 0, 0, self.places.round()).to(torch.uint8)
        codes = _codes(self.numbers, self.levels) if self.moves_codes else self.codes
        return codes, with_signs(magnitudes, self.signs)

    def store(self) -> None:
        """Loads the layers with ``codes`` and ``absmax``."""
        parts = self.codes.split(self.sizes), self.absmax.split(self.sizes)
        for layer, shape, codes, absmax in zip(self.layers.values(), self.shapes, *parts, strict=True):
            device, columns = layer.weight.device, layer.weight.columns
            planes = pack_codes(codes.view(*shape, BLOCK_SIZE), layer.bits).to(device)
            layer.load(of_planes(planes, absmax.view(shape).to(device), layer.decoding, columns))


class _Bytes(torch.autograd.Function):
    """What E4M4 bytes decode to, of numbers between them; on the way back, as it grows from this byte to the next."""

    @staticmethod
    def forward(ctx, places):
        nearby = places.round()
        exponent = (nearby / 16).floor()
        growth = torch.exp2(exponent.clamp(min=1) - (E4M4_BIAS + 4))
        ctx.save_for_backward(growth)
        mantissa = nearby - 16 * exponent
        return growth * torch.where(exponent > 0, 16 + mantissa, mantissa)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class _Blocks(torch.autograd.Function):
    """Decoded blocks ``[blocks, 32]``: of each number the level next to it, times the block's scale, turned back."""

    @staticmethod
    def forward(ctx, numbers, scales, levels, rotation, dtype):
        codes = _codes(numbers, levels) if numbers.is_floating_point() else numbers
        ctx.save_for_backward(codes, scales, levels, rotation)
        stored = (levels[codes.int()] * scales[:, None]).to(dtype)
        return stored if rotation is None else stored @ rotation

    @staticmethod
    def backward(ctx, gradient):
        codes, scales, levels, rotation = ctx.saved_tensors
        if rotation is not None:  # its own inverse
            gradient = gradient @ rotation
        by_scale = (gradient * levels.to(gradient.dtype)[codes.int()]).sum(1, dtype=torch.float32)
        by_number = gradient * scales[:, None] if ctx.needs_input_grad[0] else None
        return by_number, by_scale, None, None, None


def _codes(numbers: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    return nearest(numbers, halfway(levels)).to(torch.uint8)


def parameter_of(model: nn.Module, name: str) -> str:
    """The name of the parameter of a layer's weight, or of a projection's in a module of experts."""
    parent, _, own = name.rpartition(".")
    return name if own in model.get_submodule(parent)._parameters else f"{name}.weight"
