"""Squared errors of codebooks: of Gaussian weights, over their variance, as tables in the documentation have them.

python benchmarks/codebooks.py
"""

import torch

import hf_kbit
from hf_kbit.codebooks import NAMED, named
from hf_kbit.format import BITS
from hf_kbit.linear import SCALES


def gaussian_error(codebook: str, scale: str, bits: int) -> float:
    """Mean squared error over variance of the same 4 million weights each time."""
    weight = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0))
    levels = torch.tensor(named(codebook, bits))
    planes = hf_kbit.quantize(weight, levels, search=scale == "search")
    decoded = hf_kbit.dequantize(*planes, levels, weight.shape)
    return float((decoded - weight).double().square().mean() / weight.double().square().mean())


def main() -> None:
    print("| codebook | scale | " + " | ".join(f"{bits} bits" for bits in BITS) + " |")
    print("|---|---|" + "---:|" * len(BITS))
    for codebook in sorted(NAMED):
        for scale in SCALES:
            widths = (4,) if codebook == "fp4" else BITS
            errors = [f"{gaussian_error(codebook, scale, bits):.3g}" if bits in widths else "" for bits in BITS]
            print(f"| `{codebook}` | `{scale}` | " + " | ".join(errors) + " |")


if __name__ == "__main__":
    main()
