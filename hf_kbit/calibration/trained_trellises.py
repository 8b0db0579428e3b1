"""Scales of both sides of layers whose weights have a trellis, as ``trained.Trained`` moves them.

Both rotations of such a weight are of codes alone: ``W = svh[:, None] * M * suh``, where M is decoded once and stays.

Source: QuIP# (arXiv:2402.04396) trains these scales, by the signs that it has in their place.
"""

from collections.abc import Iterator, Mapping

import torch

from hf_kbit.nn.weight import KbitWeight
from hf_kbit.weight.tensor import Packed

# Of each scale. A trained model of 1.3 million parameters at 2 bits, 100 steps of 1,024 tokens on a CPU, loses 0.0064
# nats before, and after steps of 0.001, 0.003 and 0.01 it loses 0.0044, 0.0039 and 0.0034 (2026-11-29).
RATE = 0.01
MOST = 0.5  # of a scale it moves at most, so that none changes its sign
LARGEST = torch.finfo(torch.float16).max


class Trellises:
    """Any layers with a trellis. ``trained.Group`` says what members do."""

    moves_codes = False

    def __init__(self, layers: Mapping[str, KbitWeight], dense, device: torch.device, dtype: torch.dtype):
        self.layers = layers
        self.fixed, sides = [], []
        for layer in layers.values():
            weight = layer.weight.moved(device)
            sides += [weight.suh, weight.svh]
            plain = weight.like(suh=torch.ones_like(weight.suh), svh=torch.ones_like(weight.svh))
            self.fixed.append(plain.dequantize(dtype))
        self.shapes = [side.shape for side in sides]
        self.start = torch.cat([side.flatten() for side in sides]).float()
        self.scales = self.start.half()
        self.moved = torch.zeros_like(self.start).requires_grad_()
        self.blocks = sum(fixed.numel() for fixed in self.fixed) // 32

    def rates(self, steps: int, slower: float) -> list[tuple[torch.Tensor, float]]:
        return [(self.moved, slower * RATE)]

    def _sides(self, scales: torch.Tensor) -> list[torch.Tensor]:
        """``suh`` and ``svh`` of each layer in turn."""
        parts = scales.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        sides = iter(self._sides(self.start * (1 + self.moved)))
        for (name, layer), fixed, suh, svh in zip(self.layers.items(), self.fixed, sides, sides, strict=True):
            groups = layer.decoding.stacked
            lead, (rows, width) = fixed.shape[:-2], fixed.shape[-2:]
            matrices = fixed.view(*lead, *([groups, -1] if groups > 1 else [rows]), width)
            own = _Scaled.apply(matrices, svh[..., : matrices.shape[-2]], suh[..., :width]).view(fixed.shape)
            yield name, own.mT if layer.transposed else own

    def confine(self) -> None:
        self.moved.clamp_(-MOST, MOST)

    def rounded(self) -> list[torch.Tensor]:
        return [(self.start * (1 + self.moved)).clamp(-LARGEST, LARGEST).half()]

    def stored(self) -> list[torch.Tensor]:
        return [self.scales]

    def store(self) -> None:
        sides = iter(self._sides(self.scales))
        for layer, suh, svh in zip(self.layers.values(), sides, sides, strict=True):
            tensors = layer.packed | {"suh": suh.to(layer.weight.device), "svh": svh.to(layer.weight.device)}
            layer.load(Packed(tensors, layer.decoding))


class _Scaled(torch.autograd.Function):
    """``matrices * svh[..., None] * suh[..., None, :]``, rounded to the dtype of the matrices. Scales are float32, for
    in 16 bits a step would not change them."""

    @staticmethod
    def forward(ctx, matrices, svh, suh):
        ctx.save_for_backward(matrices, svh, suh)
        return (matrices * svh[..., None] * suh[..., None, :]).to(matrices.dtype)

    @staticmethod
    def backward(ctx, gradient):
        matrices, svh, suh = ctx.saved_tensors
        product = gradient * matrices
        by_row, by_column = (product * suh[..., None, :]).sum(-1), (product * svh[..., None]).sum(-2)
        return None, by_row, by_column
