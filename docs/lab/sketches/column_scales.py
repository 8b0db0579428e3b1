"""Divergence of a model, quantized without data, whose column scales are other powers of what ``balance`` measures:

    python docs/lab/sketches/column_scales.py /tmp/qwen --bits 3 --tokens 4096 --powers 2.25 1.5 1.25 1

The folder is one that ``benchmarks.quality.pretrained`` filled. Each line is paired with the first.
"""

import argparse
import math
from pathlib import Path

import torch
from hf_kbit.evaluation import of_tokens, summary
from safetensors.torch import load_file

from benchmarks.quality.methods import linears, load
from benchmarks.quality.train import spread
from hf_kbit import KbitLinear, balance

WINDOW = 2048


def scales(weight: torch.Tensor, power: float) -> torch.Tensor:
    """uint8 ``[K]``: ``m**power`` in place of ``m**2.25``, without the care for bits that ``balance`` takes."""
    roots = weight.float().abs().sqrt()
    mean = (roots / roots.mean(1, keepdim=True).clamp_min(1e-20)).mean(0)
    return balance._encode(mean**power, roots.mean().square())


@torch.no_grad()
def quantize(model, dense: dict[str, torch.Tensor], bits: int, power: float) -> None:
    for name, layer in linears(model).items():
        packed = KbitLinear(layer.in_features, layer.out_features, bias=False, bits=bits, device=layer.weight.device)
        packed.load_dense(dense[name], name, scales(dense[name], power))
        layer.weight.copy_(packed.dequantize())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=1 << 14)
    parser.add_argument("--powers", type=float, nargs="+", default=[2.25, 2, 1.75, 1.5, 1.25, 1])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    tokens = spread(load_file(arguments.folder / "held_out.safetensors")["tokens"].long(), WINDOW, arguments.tokens)
    reference, model = (load(arguments.folder, arguments.device) for _ in range(2))
    dense, first = {name: layer.weight for name, layer in linears(reference).items()}, None
    for power in arguments.powers:
        quantize(model, dense, arguments.bits, power)
        figures = of_tokens({"model": model, "reference": reference}, tokens, WINDOW, WINDOW)
        found, divergences = summary(figures, WINDOW, WINDOW), figures[2].double()
        first = divergences if first is None else first
        error = (divergences - first).std() / math.sqrt(len(first)) / first.mean()
        print(
            f"{arguments.bits} bits, m**{power:g}: perplexity {found.perplexity:.3f} of "
            f"{found.reference_perplexity:.3f}, KL {found.kl_divergence:.4f}, "
            f"{100 * (divergences.mean() / first.mean() - 1):+.1f} ± {100 * error:.1f}%, 99.9% {found.kl_p999:.2f}, "
            f"same token {found.top1_agreement:.2%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
