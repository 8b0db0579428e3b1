"""Wrote golden.safetensors and golden.json, the bytes of format version 1, and golden2.*, those of version 2.

It uses the scalar definitions of ``hf_kbit.format`` only, so that a bug in vectorised code cannot hide in the files.
"""

import json
import math
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_kbit import format
from hf_kbit.codebooks import normal_float, optimal

CASES = [((3, 70), 0), ((4, 64), 0), ((5, 33), -9), ((2, 100), 7)]  # shape and exponent, for 2 to 5 bits


def float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).float().item()


def scale_byte(block: list[float], largest_level: float, signed: bool) -> int:
    """For levels of which 1, times a power of two, is the largest; every step rounded to float32."""
    ratio = float32(max(map(abs, block)) / largest_level)
    if not signed:
        return format.encode_e4m4(ratio)
    byte = min(format.encode_e4m4(ratio / 16), 127)  # SE3M4 is 16 times what the same bits are as E4M4
    return byte | 128 if byte and -min(block) > max(block) else byte


def quantize_row(
    row: list[float], levels: list[float], bits: int, signed: bool = False
) -> tuple[list[int], list[int], list[float]]:
    """One row by the definition: words, scale bytes, decoded values; every step rounded to float32."""
    row = row + [0.0] * (-len(row) % format.BLOCK_SIZE)
    halfway = [float32(float32(low + high) / 2) for low, high in pairwise(levels)]
    largest_level = max(map(abs, levels))
    words, scales, decoded = [], [], []
    for start in range(0, len(row), format.BLOCK_SIZE):
        block = row[start : start + format.BLOCK_SIZE]
        byte = scale_byte(block, largest_level, signed)
        scale = format.decode_se3m4(byte) if signed else format.decode_e4m4(byte)
        inverse = float32(1 / scale) if scale else 0.0
        codes = [sum(middle < float32(value * inverse) for middle in halfway) for value in block]
        words += format.pack_block(codes, bits)
        scales.append(byte)
        decoded += [float32(levels[code] * scale) for code in codes]
    return words, scales, decoded


class Single(float):
    """A float32 number: sums, differences and products are rounded to float32."""

    def __add__(self, other):
        return Single(float32(float(self) + float(other)))

    def __sub__(self, other):
        return Single(float32(float(self) - float(other)))

    def __mul__(self, other):
        return Single(float32(float(self) * float32(other)))


def rotate_row(row: list[float]) -> list[float]:
    """Whole blocks of one row, rotated."""
    starts = range(0, len(row), format.BLOCK_SIZE)
    blocks = ([Single(value) for value in row[start : start + format.BLOCK_SIZE]] for start in starts)
    return [float(value) for block in blocks for value in format.hadamard(block)]


def column_scales(rows: list[list[float]]) -> list[int]:
    """The bytes that docs/format.md, "How a writer chooses", says; every step rounded as it says there."""
    largest = max(abs(value) for row in rows for value in row)
    unit = float32(2.0**24 / float32(math.sqrt(largest)))
    sums, total = [0] * len(rows[0]), 0
    for row in rows:
        roots = [round(float32(float32(math.sqrt(abs(value))) * unit)) for value in row]
        total += sum(roots)
        factor = float32(1 / sum(roots) * (2.0**20 * len(row))) if any(roots) else 0.0
        sums = [of_column + round(float32(root * factor)) for of_column, root in zip(sums, roots, strict=True)]
    means = [float32(total * (1 / (2.0**20 * len(rows)))) for total in sums]
    roots = [float32(math.sqrt(float32(math.sqrt(mean)))) for mean in means]
    scales = [float32(float32(mean * mean) * root) for mean, root in zip(means, roots, strict=True)]
    root = float32(total / (unit * len(rows) * len(rows[0])))
    power = math.frexp(float32(float32(root * root) * float32(2.0**5.5)))[1] - 1
    scales = [math.ldexp(scale, min(max(power, -4), 3)) if scale else 1.0 for scale in scales]
    return [format.encode_e4m4(min(max(scale, 2.0**-10), 31.0)) for scale in scales]


def version_1() -> tuple[dict, dict]:
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
    return tensors, meta


def version_2() -> tuple[dict, dict]:
    tensors, meta = {}, {}
    for bits, (shape, magnitude) in zip(format.BITS, CASES, strict=True):
        generator = torch.Generator().manual_seed(bits)
        original = torch.randn(shape, generator=generator) * 4.0**magnitude
        original *= torch.exp2(torch.randn(shape[1], generator=generator))
        start = 32 if shape[1] >= 64 else 0
        original[0, start : start + 32] *= 2.0**-12 if len(original) == 2 else 2.0**-7  # for a scale that is subnormal
        original[-1] *= -1  # for one that is negative
        original[0, 0], original[1, :32], original[:, 32] = 0.0, 0.0, 0.0
        levels, columns = list(optimal(bits, signed=True)), column_scales(original.tolist())
        scales = [format.decode_e4m4(byte) for byte in columns]
        padding = [0.0] * (-shape[1] % format.BLOCK_SIZE)
        stored = [
            rotate_row([float32(value / scale) for value, scale in zip(row, scales, strict=True)] + padding)
            for row in original.tolist()
        ]
        exponent = format.layer_exponent(max(abs(value) for row in stored for value in row), signed=True)
        rows = [quantize_row(row, [level * 2.0**exponent for level in levels], bits, signed=True) for row in stored]
        decoded = [
            [float32(value * scale) for value, scale in zip(rotate_row(row), scales, strict=False)]
            for _, _, row in rows
        ]
        unsigned = torch.tensor([words for words, _, _ in rows], dtype=torch.int64)
        tensors[f"layer{bits}.weight"] = unsigned.to(torch.int32)
        tensors[f"layer{bits}.weight_absmax"] = torch.tensor([absmax for _, absmax, _ in rows], dtype=torch.uint8)
        tensors[f"layer{bits}.weight_columns"] = torch.tensor(columns, dtype=torch.uint8)
        tensors[f"layer{bits}.decoded"] = torch.tensor(decoded)
        tensors[f"layer{bits}.original"] = original
        meta[bits] = {"shape": shape, "exponent": exponent, "levels": levels}
    return tensors, meta


def main() -> None:
    here = Path(__file__).parent
    for name, (tensors, meta) in {"golden": version_1(), "golden2": version_2()}.items():
        save_file(tensors, here / f"{name}.safetensors", metadata={"format": "pt"})
        (here / f"{name}.json").write_text(json.dumps(meta, indent=1) + "\n")


if __name__ == "__main__":
    main()
