"""Gaussian weights coded by a bit-shift trellis, in plain PyTorch, beside the codebooks of today.

A weight takes ``bits`` new bits of its chain, and its value is the entry of a table that the last ``window`` bits say.
``docs/lab/2026-11-26-trellis.md`` has the figures. To make them again, from the root of the repository:

    python docs/lab/sketches/trellis.py 2,2 2,6 3,5 3,7        # bits,window or bits,window,remembered

A window as wide as the bits is a codebook. Tables are kept in the folder ``--keep``.

Source: trellis-coded quantization (Marcellin and Fischer 1990); the bit-shift form is that of QTIP (arXiv:2406.11235).
"""

import argparse
import math
from pathlib import Path

import torch
from hf_kbit.reference import MAGNITUDE, decode_e4m4, encode_e4m4
from safetensors.torch import load_file, save_file

from hf_kbit import codebooks, reference

STEPS = range(-8, 9)  # bytes around that of a block's root mean square in which its scale is searched
NUMBERS = 1 << 24  # costs that are held at a time


class Trellis:
    """Chains are columns of ``[steps, chains]``. A state is the table's index; its lower ``bits`` bits are new, the
    rest, the history, are the last bits of the states before. Of each weight the history takes up ``remembered``
    bits. A window of ``bits`` has no history: it is a codebook."""

    def __init__(self, bits: int, window: int, remembered: int | None = None):
        self.bits, self.histories = bits, 1 << (window - bits)
        self.remembered = min(remembered or bits, window - bits)
        self.table = torch.zeros(1 << window)
        # A state's bits are: forgotten of the history, kept of it, new and not remembered, new and remembered.
        forgotten = 1 << self.remembered
        self.fields = forgotten, self.histories // forgotten, (1 << bits) // forgotten, forgotten
        self.before = self.by_next(torch.arange(1 << window)[:, None])[..., 0]  # [2**bits, histories]

    def by_next(self, of_states):
        """``[states, n]`` as ``[2**bits, histories, n]``: by the history that follows."""
        return of_states.unflatten(0, self.fields).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def next(self, states):
        return (states >> self.bits) % self.fields[1] * self.fields[0] + states % self.fields[0]

    def forward(self, ratios, weights=None, start=None, keep=True):
        """Least weighted errors by the history after the last step, and the errors of all states at each step."""
        costs, kept = self.begin(ratios.shape[1], start), []
        entries = self.table.view(self.histories, -1, 1)
        for step, ratio in enumerate(ratios):
            errors = (ratio - entries).square_()
            errors = errors if weights is None else errors.mul_(weights[step])
            full = errors.add_(costs[:, None]).flatten(0, 1)
            costs = self.by_next(full).amin(0)
            if keep:
                kept.append(full)
        return costs, kept

    def begin(self, chains, history=None):
        """Costs before the first step: 0, but infinite where ``history`` ``[chains]`` is another one."""
        if history is None:
            return torch.zeros(self.histories, chains)
        return torch.full((self.histories, chains), math.inf).scatter_(0, history[None], 0.0)

    def backward(self, history, kept):
        """The states that lead to ``history``."""
        states = []
        for full in reversed(kept):
            candidates = self.before[:, history]
            best = full.gather(0, candidates).argmin(0)
            states.append(candidates.gather(0, best[None])[0])
            history = states[-1] >> self.bits
        return torch.stack(states[::-1])

    def encode(self, ratios, weights=None, bite=False):
        """States of least error; ``bite``: the chain ends with the history that it begins with, which then costs no
        bits. That history is the one that a chain has in its middle when it is begun there."""
        most = max(NUMBERS // (len(ratios) * len(self.table)), 16)
        if ratios.shape[1] > most:
            weights = [None] * len(ratios[0]) if weights is None else weights.split(most, 1)
            parts = zip(ratios.split(most, 1), weights, strict=False)
            return torch.cat([self.encode(*part, bite) for part in parts], 1)
        half = len(ratios) // 2 if bite else 0
        rolled = None if weights is None else weights.roll(half, 0)
        costs, kept = self.forward(ratios.roll(half, 0), rolled)
        states = self.backward(costs.argmin(0), kept)
        if not bite:
            return states
        history = states[half] >> self.bits
        return self.backward(history, self.forward(ratios, weights, history)[1])

    def scales(self, blocks, start=None, steps=STEPS):
        """For blocks ``[n, blocks]`` the E4M4 bytes up to 127 with the least error, each block being a chain."""
        middle = encode_e4m4(blocks.square().mean(0).sqrt()).int()
        tried = (middle + torch.tensor(steps)[:, None]).clamp(1, MAGNITUDE).to(torch.uint8)
        costs = []
        for scale in decode_e4m4(tried):
            costs.append(self.forward(blocks / scale, start=start, keep=False)[0].amin(0) * scale.square())
        return tried.gather(0, torch.stack(costs).argmin(0)[None])[0]

    def quantize(self, chains, size=32, bite=False, steps=STEPS):
        """Decoded weights of chains ``[steps, chains]`` of blocks of ``size``, their states, and scales, all alike."""
        blocks = chains.unflatten(0, (-1, size)).transpose(0, 1).flatten(1)
        parts = blocks.split(max((1 << 19) // len(self.table), 64), 1)
        scale = decode_e4m4(torch.cat([self.scales(part * signs(part), steps=steps) for part in parts])) * signs(
            blocks
        )
        scale = scale.view(-1, 1, chains.shape[1]).expand(-1, size, -1).flatten(0, 1)
        states = self.encode(chains / scale, scale.square(), bite)
        return self.table[states] * scale, states, scale

    def lloyd(self, chains, rounds, size=32, steps=STEPS):
        """Makes each entry the weighted mean of what it stands for, so many times; returns the error before."""
        for _ in range(rounds):
            decoded, states, scale = self.quantize(chains, size, steps=steps)
            sums, weights = torch.zeros(2, len(self.table))
            sums.index_add_(0, states.flatten(), (chains * scale).flatten())
            weights.index_add_(0, states.flatten(), scale.square().flatten())
            self.table = torch.where(weights > 0, sums / weights, self.table)
        return error(decoded, chains)


def signs(blocks):
    """The sign of a block's scale: that of its largest weight."""
    least, most = blocks.aminmax(dim=0)
    return torch.where(-least > most, -1.0, 1.0)


def error(decoded, weights):
    return ((decoded - weights).square().mean() / weights.square().mean()).item()


def gaussian(steps, chains, seed):
    return torch.randn(steps, chains, generator=torch.Generator().manual_seed(seed)) / 32


def named(text):
    """bits, window and how many bits of each weight are remembered: all, if it is not said."""
    bits, window, *remembered = map(int, text.split(","))
    return bits, window, *(remembered or [bits])


def trained(bits, window, remembered, keep, size=32, starts=16):
    """A trellis with the best table of many starts. Each has the quantiles of a Gaussian: in any order, or so that
    each history has one of each ``2**bits``-th of them, in ascending or any order."""
    file = keep / f"table-{bits}-{window}-{remembered}-{size}.safetensors"
    trellis = Trellis(bits, window, remembered)
    if file.exists():
        trellis.table = load_file(file)["table"]
        return trellis
    few, many, found = gaussian(256, 192, 1), gaussian(256, 1024, 2), []
    quantiles = torch.special.ndtri((torch.arange(1 << window) + 0.5) / (1 << window))
    histories, branches = trellis.histories, 1 << bits
    for kind in ("any", "ascending", "structured") if histories > 1 else ("any",):
        for seed in range(starts if histories > 1 else 1):
            generator = torch.Generator().manual_seed(seed)
            fine = torch.rand(branches, histories, generator=generator).argsort(1).T
            order = torch.rand(histories, branches, generator=generator).argsort(1)
            order = torch.arange(branches).expand(histories, -1) if kind == "ascending" else order
            mixed = (order * histories + fine.gather(1, order)).flatten()
            anyhow = torch.rand(1 << window, generator=generator).argsort()
            trellis.table = quantiles[anyhow if kind == "any" else mixed]
            found.append((trellis.lloyd(few, 5, size, steps=(-2, 2)), kind, trellis.table))
    found.sort(key=lambda each: each[0])
    kinds = {kind: f"{min(e for e, k, _ in found if k == kind):.4f}" for kind in {k for _, k, _ in found}}
    refined = []
    for _, kind, trellis.table in found[:3]:
        trellis.lloyd(few, 40, size, steps=range(-6, 7, 3))
        refined.append((trellis.lloyd(few, 3, size), kind, trellis.table))
    trellis.table = min(refined, key=lambda each: each[0])[2]
    trellis.lloyd(many, 10, size, steps=range(-8, 9, 2))
    print(f"{bits} bits, window {window}: of starts {kinds}, refined {[(round(e, 4), k) for e, k, _ in refined]}")
    save_file({"table": trellis.table}, file)
    return trellis


def block_by_block(trellis, chains):
    """As with feedback: a block is coded before the next is known, and begins with the history that it is left."""
    history, decoded = torch.zeros(chains.shape[1], dtype=torch.int64), []
    for block in chains.split(32):
        scale = decode_e4m4(trellis.scales(block * signs(block), history)) * signs(block)
        costs, kept = trellis.forward(block / scale, start=history)
        states = trellis.backward(costs.argmin(0), kept)
        history = trellis.next(states[-1])
        decoded.append(trellis.table[states] * scale)
    return torch.cat(decoded)


def across_rows(trellis, rows, rounds=6):
    """Chains of 16 rows in each column of ``[16, 32 * blocks]``, that end as they begin: scales, one a row and block,
    and codes are found in turns."""
    blocks = rows.unflatten(1, (-1, 32))
    sign = signs(blocks.movedim(-1, 0))[..., None]
    scale = blocks.square().mean(-1, keepdim=True).sqrt() * sign
    for _ in range(rounds):
        each = scale.expand_as(blocks).flatten(1)
        values = trellis.table[trellis.encode(rows / each, each.square(), bite=True)].view_as(blocks)
        best = (values * blocks).sum(-1, keepdim=True) / values.square().sum(-1, keepdim=True)
        scale = decode_e4m4(encode_e4m4((best * sign).clamp(min=2.0**-13), MAGNITUDE)) * sign
    return (values * scale).flatten(1)


def todays(bits, weights):
    codebook = codebooks.scaled(codebooks.optimal(bits, signed=True), 0, weights.device)
    planes, absmax = reference.quantize(weights.T.contiguous(), codebook, search=True, signed=True)
    levels = codebook[reference.unpack_codes(planes, bits).int()]
    return (levels * reference.decode_scales(absmax, signed=True)[..., None]).flatten(-2).T


def show(trellis, name, decoded, weights, free_start=0, size=32):
    """The error, its standard error by parts of 16 weights, and the bits that are stored for a weight: chains of
    ``free_start`` weights begin with a history of their own."""
    blocks = (decoded - weights).square().unflatten(0, (-1, 16)).mean(1).flatten() / weights.square().mean()
    stored = trellis.bits + 8 / size + (math.log2(trellis.histories) / free_start if free_start else 0)
    print(f"  {name:34} {blocks.mean():.5f} +- {blocks.std() / len(blocks) ** 0.5:.5f} at {stored:.3f} bits", end="")
    print(f", {10 * math.log10(blocks.mean() * 4**stored):.2f} dB from the limit", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("trellises", nargs="+")
    parser.add_argument("--sizes", type=int, nargs="+", default=[32, 64, 128], help="of the blocks of a scale")
    parser.add_argument("--keep", type=Path, default=Path("trellis"))
    arguments = parser.parse_args()
    arguments.keep.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    weights = gaussian(2048, 512, 3)
    for each in arguments.trellises:
        bits, window, remembered = named(each)
        print(each, flush=True)
        for size in arguments.sizes:
            trellis = trained(bits, window, remembered, arguments.keep, size)
            show(trellis, f"a row of 2048, scales of {size}", trellis.quantize(weights, size)[0], weights, 2048, size)
        if window == bits:
            show(trellis, "hf_kbit's optimal, search", todays(bits, weights), weights)
            continue
        trellis = trained(bits, window, remembered, arguments.keep)
        show(trellis, "a row, block by block", block_by_block(trellis, weights), weights)
        for steps in (256, 64, 32):
            chains = weights.unflatten(0, (-1, steps)).movedim(0, 1).flatten(1)
            show(trellis, f"{steps} of a row, ends as it begins", trellis.quantize(chains, bite=True)[0], chains)
        rows = weights.view(16, -1)
        show(trellis, "16 rows of a column, the same", across_rows(trellis, rows), rows)


if __name__ == "__main__":
    main()
