"""Wrote golden.safetensors and golden.json, the bytes of format version 1; that version needs no other.

It uses the scalar definitions of ``hf_kbit.format`` only, so that a bug in vectorised code cannot hide in the file.
"""

import json
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_kbit import format
from hf_kbit.codebooks import normal_float

CASES = [((3, 70), 0), ((4, 64), 0), ((5, 33), -9), ((2, 100), 7)]  # shape and exponent, for 2 to 5 bits


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def quantize_row(row: list[float], levels: list[float], bits: int) -> tuple[list[int], list[int], list[float]]:
    """One row by the definition: words, scale bytes, decoded values; every step rounded to float32."""
    row = row + [0.0] * (-len(row) % format.BLOCK_SIZE)
    halfway = [float32(float32(low + high) / 2) for low, high in pairwise(levels)]
    largest_level = max(map(abs, levels))
    words, scales, decoded = [], [], []
    for start in range(0, len(row), format.BLOCK_SIZE):
        block = row[start : start + format.BLOCK_SIZE]
        byte = format.encode_e4m4(float32(max(map(abs, block)) / largest_level))
        scale = format.decode_e4m4(byte)
        inverse = float32(1 / scale) if scale else 0.0
        codes = [sum(middle < float32(value * inverse) for middle in halfway) for value in block]
        words += format.pack_block(codes, bits)
        scales.append(byte)
        decoded += [float32(levels[code] * scale) for code in codes]
    return words, scales, decoded


def main() -> None:
    tensors, meta = {}, {}
    for bits, (shape, exponent) in zip(format.BITS, CASES, strict=True):
        original = torch.randn(shape, generator=torch.Generator().manual_seed(bits)) * 2.0**exponent
        original[0, 0], original[1, :32] = 0.0, 0.0
        levels = list(normal_float(bits))
        rows = [quantize_row(row, [level * 2.0**exponent for level in levels], bits) for row in original.tolist()]
        unsigned = torch.tensor([words for words, _, _ in rows], dtype=torch.int64)
        tensors[f"layer{bits}.weight"] = unsigned.to(torch.int32)
        tensors[f"layer{bits}.weight_absmax"] = torch.tensor([scales for _, scales, _ in rows], dtype=torch.uint8)
        tensors[f"layer{bits}.decoded"] = torch.tensor([decoded for _, _, decoded in rows])[:, : shape[1]].contiguous()
        tensors[f"layer{bits}.original"] = original
        meta[bits] = {"shape": shape, "exponent": exponent, "levels": levels}
    here = Path(__file__).parent
    save_file(tensors, here / "golden.safetensors", metadata={"format": "pt"})
    (here / "golden.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    main()
