"""Scales of blocks, and codes, of layers whose weights have levels, as ``trained.Trained`` moves them.

A scale is a number between bytes that decodes as the byte next to it, a code a number between levels.
"""

import math
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from hf_kbit.format import codebooks
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

SCALES = 0.1  # the rate, in steps between bytes: 0.02 is slower, 0.3 worse
# It suits so many blocks, SmolLM2-135M's. In a larger model noise moves more of them, so it falls as the root. Of
# Qwen2.5-Coder-1.5B-Instruct, with 12 times as many, 0.3 of the rate leaves 2% less divergence than all of it (two
# H200s, 300 steps of 8,192 tokens, 2 and 3 bits, 2026-11-27).
BLOCKS = 3.32e6
# Of the distance between levels, over the root of the number of steps: noise moves a number by the root, what is none
# by the number. After error feedback twice of it gains half as much.
CODES = 0.1
START = 0.5  # of the way from a level to where the weight was, numbers start: at 0.9 noise undoes error feedback


class Levels:
    """Layers with the same levels: all of their blocks, one after another. ``trained.Group`` says what members do."""

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
        self.blocks = self.places.numel()

    def rates(self, steps: int, slower: float) -> list[tuple[torch.Tensor, float]]:
        codes = [(self.numbers, CODES * self.gap / math.sqrt(steps))] if self.moves_codes else []
        return [(self.places, slower * SCALES), *codes]

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
        scales = _Bytes.apply(self.places) * self.units
        blocks = _Blocks.apply(self.numbers, scales, self.levels, self.rotation, self.dtype)
        parts = zip(self.layers.items(), blocks.split(self.sizes), self.shapes, self.columns, strict=True)
        for (name, layer), part, shape, columns in parts:
            weight = part.view(*shape[:-1], -1)[..., : layer.in_features]
            weight = weight if columns is None else weight * columns.to(self.dtype)
            yield name, weight.mT if layer.transposed else weight

    def confine(self) -> None:
        self.places.clamp_(1, self.most)
        if self.moves_codes:
            self.numbers.clamp_(*self.ends)

    def rounded(self) -> list[torch.Tensor]:
        """Codes, uint8 ``[blocks, 32]``, and scales, uint8 ``[blocks]``."""
        magnitudes = torch.where(self.units == 0, 0, self.places.round()).to(torch.uint8)
        codes = _codes(self.numbers, self.levels) if self.moves_codes else self.codes
        return [codes, with_signs(magnitudes, self.signs)]

    def stored(self) -> list[torch.Tensor]:
        return [self.codes, self.absmax]

    def store(self) -> None:
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
