"""Squared errors of codebooks over the squares of the weights, as tables in the documentation have them.

    python benchmarks/codebooks.py [--model FOLDER_OR_NAME]

Of Gaussian weights, or of the linear layers of a model of Transformers.
"""

import argparse

import torch
from transformers import AutoModel

import hf_kbit
from hf_kbit.format.codebooks import NAMED
from hf_kbit.format.spec import BITS
from hf_kbit.weight.packing import SCALES


def relative_error(linears: list[torch.nn.Linear], codebook: str, scale: str, bits: int) -> float:
    """The sum of squared errors of all weights over the sum of their squares."""
    errors = squares = 0.0
    for linear in linears:
        weight = linear.weight.detach().float()
        decoded = hf_kbit.KbitLinear.from_linear(linear, bits, codebook, scale).dequantize(torch.float32)
        errors += (decoded - weight).double().square().sum().item()
        squares += weight.double().square().sum().item()
    return errors / squares


def gaussian() -> list[torch.nn.Linear]:
    """One layer, the same 4 million weights each time."""
    linear = torch.nn.Linear(4096, 1024, bias=False)
    linear.weight.data = torch.randn(1024, 4096, generator=torch.Generator().manual_seed(0))
    return [linear]


def linears_of(model: str) -> list[torch.nn.Linear]:
    return [module for module in AutoModel.from_pretrained(model).modules() if type(module) is torch.nn.Linear]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="of Transformers, a folder or name")
    model = parser.parse_args().model
    linears = linears_of(model) if model else gaussian()
    print("| codebook | scale | " + " | ".join(f"{bits} bits" for bits in BITS) + " |")
    print("|---|---|" + "---:|" * len(BITS))
    for codebook in sorted(NAMED):
        for scale in SCALES:
            widths = (4,) if codebook == "fp4" else BITS
            cells = [
                f"{relative_error(linears, codebook, scale, bits):.3g}" if bits in widths else "" for bits in BITS
            ]
            print(f"| `{codebook}` | `{scale}` | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
