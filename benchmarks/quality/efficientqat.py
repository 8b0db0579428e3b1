"""The recipe of EfficientQAT in our own code, on its own grid and on the text that hf_kbit's tuned rows train on.

A group of ``GROUP`` weights has a scale in float16 and a zero point of as many bits as a weight: code ``c`` stands for
``(c - zero) * scale``. Rounding counts as the identity on the way back. Two stages train what is stored:

1. Block-AP, of one decoder layer after another: weights, scales and zeros, on the squared error of the layer's output
   to that of the model in 16 bits. The layer reads what the quantized layers before it make.
2. E2E-QP, of the whole model: scales alone, on how it predicts the next token of the text.

Adam takes as many steps, of as many tokens, as in ``hf_kbit.calibration.tuning``. Rates are relative to the weights
and to the scales, as the paper's are for models of one family and for more steps.

Source: arXiv:2407.11062.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from benchmarks.quality.methods import OWN_TEXT, Method, Storage, dtype_of, linears, load, text_to_tune_on
from hf_kbit.calibration import stream, tuning

GROUP, BITS = 64, (2, 3)
WAY = f"EfficientQAT's recipe in our own code, group {GROUP}{OWN_TEXT}"
# Of the first steps, over the mean magnitude of weights, or of scales; zeros are in steps of the grid. Measured on two
# layers of SmolLM2 at 2 bits: for weights half of it leaves 7 to 16% more error, 2.5 times as much more still.
WEIGHTS, SCALES, ZEROS = 2e-2, 5e-3, 5e-3
SCALES_OF_WHOLE = 4e-3  # about what trained.SCALES is
LAST = 0.05  # of the rates that they fall to, as a cosine
TINY = 1e-8  # the least of a scale
EPSILON = 1e-20  # Adam's: the gradient of a mean is tiny for a single weight


class Grid:
    """Weights of several layers in groups, one after another, as launching kernels for each layer takes longer."""

    def __init__(self, weights: dict[str, torch.Tensor], bits: int):
        self.shapes = {name: weight.shape for name, weight in weights.items()}
        for name, shape in self.shapes.items():
            if shape[-1] % GROUP:
                raise ValueError(f"{name}: found rows of {shape[-1]} weights, expected a multiple of {GROUP}")
        self.most = 2**bits - 1
        self.weights = torch.cat([weight.float().view(-1, GROUP) for weight in weights.values()])
        low, high = self.weights.aminmax(dim=1, keepdim=True)
        low = low.clamp(max=0)
        self.scales = ((high.clamp(min=0) - low) / self.most).clamp(min=TINY)
        self.zeros = -low / self.scales

    def parameters(self) -> list[torch.Tensor]:
        """Weights, scales and zeros."""
        return [tensor.requires_grad_() for tensor in (self.weights, self.scales, self.zeros)]

    def stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and zeros as they are stored, through which gradients flow."""
        scales = _through(self.scales, self.scales.half().float().clamp(min=TINY))
        zeros = self.zeros.clamp(0, self.most)
        zeros = _through(zeros, zeros.round())
        places = self.weights / scales
        return (_through(places, places.round()) + zeros).clamp(0, self.most), scales, zeros

    def values(self, codes, scales, zeros, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Decoded weights, by the names of the model's parameters."""
        sizes = [shape.numel() // GROUP for shape in self.shapes.values()]
        parts = ((codes - zeros) * scales).to(dtype).split(sizes)
        shapes = self.shapes.items()
        return {f"{name}.weight": part.view(shape) for (name, shape), part in zip(shapes, parts, strict=True)}


def _through(value: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """``stored``, whose gradient is that of ``value``."""
    return value + (stored - value).detach()


def descend(
    loss: Callable[[int], torch.Tensor], rates: Iterable[tuple[torch.Tensor, float]], steps: int
) -> list[float]:
    """Takes the steps; ``loss`` of a step's number is to be small. Returns the mean of each tenth of them."""
    groups = [{"params": [parameter], "lr": rate} for parameter, rate in rates]
    optimizer = torch.optim.Adam(groups, eps=EPSILON, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: LAST + (1 - LAST) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    losses = []
    with torch.enable_grad():
        for number in range(steps):
            found = loss(number)
            optimizer.zero_grad()
            found.backward(inputs=[group["params"][0] for group in groups])
            optimizer.step()
            schedule.step()
            losses.append(found.detach())
    return [part.mean().item() for part in torch.stack(losses).split(max(steps // 10, 1))]


@torch.no_grad()
def train(model: nn.Module, text: torch.Tensor, bits: int, steps: int) -> tuple[list[list[float]], list[float]]:
    """Quantizes a model in place to decoded weights; returns the losses of each layer, and those of the whole model.

    Args:
        model: a causal language model on the device to compute on, in float32 or bfloat16.
        text: int64 ``[sequences, tokens]``.
        steps: for the whole model; each layer takes one in ``tuning.LAYER_STEPS``.
    """
    device, dtype = model.device, model.dtype
    rows = min(max(tuning.TOKENS.get(device.type, tuning.TOKENS[""]) // text.shape[1], 1), len(text))
    of_layer = max(steps // tuning.LAYER_STEPS, 1)
    text = text.to(device)
    read = text[: of_layer * rows]
    names: dict[str, list[str]] = {}
    for name in linears(model):
        names.setdefault(name[: name.index(".", len("model.layers."))], []).append(name)
    grids, losses = {}, []

    def visit(layer: str, run: Callable[[slice], object]):
        if layer not in names:
            return [(slice(0, 2 * len(read)), run(slice(None)))]
        grid = Grid({name: model.get_submodule(name).weight for name in names[layer]}, bits)
        weights, scales, zeros = grid.parameters()
        first, inputs = _parts(0, len(read), rows), _parts(len(read), 2 * len(read), rows)
        dense = [run(part) for part in first]
        aims = [_output(output) for output in dense]

        def error(number: int) -> torch.Tensor:
            place = number % len(inputs)
            with tuning.holding(model, grid.values(*grid.stored(), dtype)):
                return F.mse_loss(_output(run(inputs[place])).float(), aims[place].float())

        rates = [(weights, WEIGHTS * weights.abs().mean().item()), (scales, SCALES * scales.mean().item())]
        losses.append(descend(error, [*rates, (zeros, ZEROS)], of_layer))
        grids[layer] = grid
        with tuning.holding(model, grid.values(*grid.stored(), dtype)):
            found = [run(part) for part in inputs]
        return zip([*first, *inputs], [*dense, *found], strict=True)

    stream.stream(model, list(names), torch.cat([read, read]), device, visit)
    return losses, _train_scales(model, list(grids.values()), text, rows, steps)


def _train_scales(model: nn.Module, grids: list[Grid], text: torch.Tensor, rows: int, steps: int) -> list[float]:
    """The second stage; what is decoded at its end becomes the model's weights."""
    stored = [[tensor.detach() for tensor in grid.stored()] for grid in grids]
    parts = _parts(0, len(text), rows)

    def values() -> dict[str, torch.Tensor]:
        found = {}
        for grid, (codes, scales, zeros) in zip(grids, stored, strict=True):
            found |= grid.values(codes, _through(scales, scales.half().float()), zeros, model.dtype)
        return found

    def loss(number: int) -> torch.Tensor:
        ids = text[parts[number % len(parts)]]
        with tuning.holding(model, values()):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    rates = [(scales.requires_grad_(), SCALES_OF_WHOLE * scales.mean().item()) for _, scales, _ in stored]
    losses = descend(loss, rates, steps)
    for name, weight in values().items():
        model.get_parameter(name).copy_(weight)
    return losses


def _parts(start: int, end: int, rows: int) -> list[slice]:
    return [slice(first, min(first + rows, end)) for first in range(start, end, rows)]


def _output(output: object) -> torch.Tensor:
    return next(leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor))


def load_efficientqat(folder: Path, device: str, bits: int) -> nn.Module:
    text = text_to_tune_on(folder, device)
    model = load(folder, device, torch.bfloat16 if device == "cuda" else torch.float32).eval()
    layers, whole = train(model, text, bits, tuning.steps_on(model.device, True))
    first, last = (sum(losses[place] for losses in layers) / len(layers) for place in (0, -1))
    print(f"mean of layers {first:.4g} -> {last:.4g}, whole model {whole[0]:.4f} -> {whole[-1]:.4f}", flush=True)
    return model.to(dtype_of(folder))


def efficientqat_storage(model: nn.Module, bits: int) -> Storage:
    """Of what it would save: the layers hold decoded weights."""
    weights = sum(layer.weight.numel() for layer in linears(model).values())
    return Storage(weights, weights * bits // 8, weights // GROUP * (16 + bits) // 8)


def efficientqat_methods() -> list[Method]:
    return [
        Method(
            "torch",
            bits,
            WAY,
            partial(load_efficientqat, bits=bits),
            partial(efficientqat_storage, bits=bits),
            "decoded weights, torch",
        )
        for bits in BITS
    ]
