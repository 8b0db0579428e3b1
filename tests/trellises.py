"""Weights with a trellis as tests have them: of random codes, beside what they are in float64."""

import torch
from torch.nn import functional as F

from hf_kbit.format.transforms import butterflies
from hf_kbit.format.trellis import INPUT, OUTPUT, TILE, TrellisDecoding, sums, windows
from hf_kbit.weight.tensor import KbitTensor, Packed

TOLERANCES = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float64: 1e-13}


def weight(decoding: TrellisDecoding, *shape: int) -> KbitTensor:
    """Random codes, with scales as weights of some hundredths have."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, (dtype, size) in decoding.layout(shape).items():
        if dtype == torch.int16:
            tensors[name] = torch.randint(-(2**15), 2**15, size, generator=generator).short()
        else:
            tensors[name] = (torch.randn(size, generator=generator) * (0.05 if name == "suh" else 1)).half()
    return KbitTensor.of(Packed(tensors, decoding), shape, torch.float32)


def operands(packed: KbitTensor) -> tuple:
    return packed.words, packed.suh, packed.svh, list(packed.matrix), packed.decoding.code, packed.decoding.block


def near(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> bool:
    return bool((found.double() - exact).norm() < TOLERANCES[dtype] * exact.norm())


def in_whole_numbers(x: torch.Tensor, packed: KbitTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What CPUs compute for few tokens of 16 bits, to the last bit (docs/internals.md)."""
    block, (rows, width) = packed.decoding.block, packed.matrix

    def rotated(numbers: torch.Tensor) -> torch.Tensor:
        return butterflies(numbers.reshape(-1, block).T.contiguous()).T.reshape(numbers.shape)

    padding = len(packed.suh) - width
    turned = rotated(F.pad(x.float() * packed.suh[:width].float(), (0, padding)))
    largest = turned.abs().amax(1, keepdim=True)
    inputs = (turned * (torch.tensor(8191.0) / largest)).round().to(torch.int64)
    own = windows(packed.words.transpose(-3, -2).contiguous())
    whole = torch.empty((len(packed.svh), len(packed.suh)), dtype=torch.int64)
    tiles = whole.view(len(own[0]), TILE, len(own), TILE).permute(2, 0, 1, 3)
    tiles[..., OUTPUT, INPUT] = sums(own)
    totals = 1774 * (inputs @ whole.T) - 905216 * inputs.sum(1, keepdim=True)
    scale = largest * torch.tensor(1 / 8191) * (2.0**-18 / block)
    y = (rotated(totals.float()) * scale * packed.svh.float())[:, :rows]
    return (y if bias is None else y + bias.float()).to(x.dtype)


def of_experts(stacked: int) -> tuple:
    """Experts, of which one gets no rows, and rows of none."""
    packed = weight(TrellisDecoding(3, block=64, stacked=stacked), 4, 128, 64)
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8, 0], dtype=torch.int32)
    return packed, rows, torch.tensor([0, 3, 3, 7, 9], dtype=torch.int32)
