"""Finds the levels of the codebook ``optimal``, in units of 2**-13, as hf_kbit/format/codebooks.py has them.

    python benchmarks/optimal_levels.py

Lloyd's iteration on 4096 blocks of Gaussian weights; it takes some seconds and gives the same on every machine.
"""

import torch
import torch.nn.functional as F

from hf_kbit.format.spec import BITS, BLOCK_SIZE


def gaussian_blocks(count: int) -> torch.Tensor:
    """float64 ``[count, 32]``: numbers of N(0, 1) without order, the same on every machine (hashes of their index)."""
    hashed = torch.arange(1, count * BLOCK_SIZE + 1) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        hashed = (hashed ^ (hashed >> shift & (1 << 64 - shift) - 1)) * factor
    uniform = ((hashed >> 12 & (1 << 52) - 1).double() + 0.5) / 2**52
    return torch.special.ndtri(uniform).view(count, BLOCK_SIZE)


def lloyd(weights: torch.Tensor, levels: torch.Tensor, turns: int) -> torch.Tensor:
    """Refines ascending float64 levels, the last of which is 1 and the largest, on blocks of float64 ``[count, 32]``.

    Weights are taken in steps of 1/128, scales are those of E4M4 from 1 to 3.875, in steps of 1/16. So errors come
    from a table of both, and all sums are of whole numbers that float64 holds: no order of adding changes them.
    """
    weights = (weights * 128).round().long()
    least, most = torch.stack(torch.aminmax(weights)).tolist()
    scales = torch.tensor([step * i for step in (1, 2) for i in range(16, 32)])
    values = torch.arange(least, most + 1)[:, None]
    ratios = values.double() / (128 * scales.double() / 16)
    products, squares = (values * scales).double(), scales.square().expand_as(ratios).double()
    for _ in range(turns):
        codes = torch.bucketize(ratios, (levels[1:] + levels[:-1]) / 2)
        errors = ((ratios - levels[codes]) * scales).square().mul(2**20).round()
        chosen = F.embedding_bag(weights - least, errors, mode="sum").argmin(dim=1, keepdim=True)
        pairs = ((weights - least) * len(scales) + chosen).flatten()
        counts = torch.bincount(pairs, minlength=ratios.numel()).view_as(ratios)
        sums = (
            torch.bincount(codes.flatten(), (part * counts).flatten(), len(levels)) for part in (products, squares)
        )
        mean = next(sums) / next(sums)
        levels = levels + 1.8 * (mean / mean[-1] - levels)
        levels = levels / levels[-1]
    return levels


def find(bits: int, signed: bool) -> list[int]:
    """The levels for scales with signs, or those above zero for scales without. Steps are taken 1.8 times as far as
    the means are, which needs half as many."""
    count = 2**bits if signed else 2 ** (bits - 1)
    weights = gaussian_blocks(4096)
    # Quantiles of N(0, 3): as dense as fine levels are best, by the cube root of the density of weights (Panter and
    # Dite 1951); its tails are cut, for a block ends at its scale.
    share = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    if signed:
        weights = weights * weights.gather(1, weights.abs().argmax(1, keepdim=True)).sign()
        levels = torch.special.ndtri(0.12 + 0.83 * share)
    else:
        weights = weights.abs()
        levels = torch.special.ndtri(0.5 + 0.45 * share)
    refined = lloyd(weights, levels / levels[-1], turns=24 if signed else 12)
    return [round(level * 2**13) for level in refined.tolist()]


def main() -> None:
    for signed in (False, True):
        print("scales with signs:" if signed else "scales without signs:")
        for bits in BITS:
            print(f"    {bits}: {find(bits, signed)}")


if __name__ == "__main__":
    main()
