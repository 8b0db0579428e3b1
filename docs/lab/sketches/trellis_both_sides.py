"""A trellis whose feedback goes along outputs too: errors of an output make up for those of the outputs before it.

    python docs/lab/sketches/trellis_both_sides.py MODEL IDS [--bits 3,2] [--draws 2] [--most inf]
                                                      [--damping 0.03] [--json FILE]

MODEL and IDS are those of ``trellis_calibrated.py``; on a GPU, which needs room for a square of each layer's outputs
in float32. ``docs/lab/2026-11-28-trellis-quantizing.md`` has figures of a small model.

What counts is ``trace(Ho @ D @ Hi @ D.T)`` for the difference D of a weight: Hi is what ``calibrate`` has, Ho the sum
of g.T @ g for gradients g by a layer's outputs of the logarithms of probabilities of tokens that the model draws. With
``U.T @ U`` the inverse of each, tile (j, i) leaves e, and all tiles that come later on both sides lose their part of
``Uo[j].T @ E @ Ui[i]``, where ``E = inv(Uo[j, j]).T @ e @ inv(Ui[i, i])``. Tiles with j + i alike are encoded at once.

Source: YAQA (arXiv:2505.22988), whose Hessian is that of the divergence too.
"""

import argparse
import json
import math
import time
from functools import partial

import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from trellis_calibrated import in_16_bits, load, report

import hf_kbit
from hf_kbit.calibration import rounding, sensitivity, trellis
from hf_kbit.calibration.feedback import inverse_root
from hf_kbit.calibration.moments import damping_of
from hf_kbit.calibration.writing import draw, write
from hf_kbit.format.trellis import MOST_LEAD, TILE, tiles_of
from hf_kbit.weight.tensor import Packed
from hf_kbit.weight.trellis_packing import CODE, best_factor, encodable, inner_of, outer_of, scales_of


def of_outputs(model, ids: torch.Tensor, draws: int, most=math.inf, together: int = 4) -> dict[str, torch.Tensor]:
    """``{name of a linear layer: Ho}``, float32 ``[N, N]``, of all but the head. A token counts at most so many times
    as much as one at ``sensitivity.QUANTILE`` of those at once: a few may have most of a model's squared gradients."""
    head = model.get_output_embeddings()
    linear = {name: own for name, own in model.named_modules() if isinstance(own, torch.nn.Linear) and own is not head}
    sizes = {name: own.out_features for name, own in linear.items()}
    found = {name: torch.zeros(size, size, device=ids.device) for name, size in sizes.items()}
    choose = partial(draw, generator=torch.Generator(ids.device).manual_seed(0))

    def add(name, module, given, gradient):
        rows = gradient.float()
        squares = rows.square().sum(-1, keepdim=True)
        limit = most * squares[:, 1:].flatten().quantile(sensitivity.QUANTILE)
        rows = (rows * (limit / squares).clamp(max=1).sqrt()).flatten(0, -2)
        found[name].addmm_(rows.T, rows)

    with sdpa_kernel(SDPBackend.MATH):
        for part in ids.split(together):
            sensitivity.gradients(model, list(found), part, ids.device, choose, add, draws)
    return found


def encoded(weight: torch.Tensor, inputs: torch.Tensor, outputs: torch.Tensor, bits: int) -> torch.Tensor:
    """int16 ``[K / 16, N / 16, 16 * bits]`` of what is to be encoded, float32 ``[N, K]``, and both U, all in the order
    to go by."""
    rows, width = weight.shape
    down, across = rows // TILE, width // TILE
    tiles = weight.view(down, TILE, across, TILE).transpose(1, 2)
    up, along = outputs.T.reshape(down, TILE, rows), inputs.view(width, across, TILE).transpose(0, 1)
    own_up, own_along = (
        torch.stack([root[n : n + TILE, n : n + TILE] for n in range(0, len(root), TILE)])
        for root in (outputs, inputs)
    )
    inverse_up, inverse_along = torch.linalg.inv(own_up).mT, torch.linalg.inv(own_along)
    errors = weight.new_zeros(across, rows, TILE)  # E, by columns of tiles
    passed = weight.new_zeros(down, TILE, width)  # Uo.T @ E, by rows of tiles
    found = torch.empty(across, down, 16 * bits, dtype=torch.int16, device=weight.device)
    for diagonal in range(down + across - 1):
        i = torch.arange(max(0, diagonal - down + 1), min(diagonal, across - 1) + 1, device=weight.device)
        j = diagonal - i
        from_above = up[j] @ errors[i]
        target = tiles[j, i] - passed[j] @ along[i] - from_above @ own_along[i]
        codes = torch.ops.hf_kbit.encode_trellis(tiles_of(target.flatten(0, 1))[0], bits, MOST_LEAD)
        decoded = torch.ops.hf_kbit.decode_trellis(codes[None], CODE, torch.float32).view_as(target)
        left = inverse_up[j] @ (target - decoded) @ inverse_along[i]
        errors.view(across, down, TILE, TILE)[i, j] = left
        passed.view(down, TILE, across, TILE)[j, :, i] = from_above + own_up[j].mT @ left
        found[i, j] = codes
    return found


def solver(of_each: dict[str, torch.Tensor], damping: float):
    """``trellis.solve``, with Ho of the layers that have one."""
    alone = trellis.solve

    def by_moments(hessian: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        order = hessian.diagonal().view(-1, TILE).sum(1).sort(descending=True, stable=True).indices
        return order, (order[:, None] * TILE + torch.arange(TILE, device=order.device)).flatten()

    def solve(weight, hessian, decoding, balances, name="weight"):
        its = of_each.get(name.removesuffix(".weight"))
        if its is None:
            return alone(weight, hessian, decoding, balances, name)
        decoding = encodable(decoding)
        scales = scales_of(weight, decoding, balances)
        scales = scales.times(best_factor(weight, decoding, scales))
        inputs = trellis._turned(hessian, scales.suh, decoding.block)
        outputs = trellis._turned(its, scales.svh, decoding.block)
        (across, columns), (down, rows) = by_moments(inputs), by_moments(outputs)
        roots = (
            inverse_root(inputs[columns][:, columns], damping_of(inputs, trellis.DAMPING)),
            inverse_root(outputs[rows][:, rows], damping_of(outputs, damping)),
        )
        inner = inner_of(weight, scales.suh, scales.svh, decoding.block)
        codes = encoded(inner[rows][:, columns].contiguous(), *roots, decoding.bits)
        codes = torch.empty_like(codes).index_copy_(1, down, codes)
        codes = torch.empty_like(codes).index_copy_(0, across, codes)
        decoded = outer_of(torch.ops.hf_kbit.decode_trellis(codes, CODE, torch.float32), scales.suh, decoding.block)
        decoded = decoded[: len(weight), : weight.shape[1]]
        svh = trellis._best_sizes(weight, decoded, scales.svh, hessian)
        return Packed(dict(zip(decoding.names, (codes, scales.suh, svh), strict=True)), decoding)

    return solve


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("ids")
    parser.add_argument("--bits", default="3,2")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--most", type=float, default=math.inf, help="times as much, that a token counts")
    parser.add_argument("--damping", default="0.03", help="some, with commas")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    ids = load_file(arguments.ids)["ids"].long().cuda()
    model = load(arguments.model)
    exact = in_16_bits(model, ids)
    model = model.bfloat16()
    own, start = write(model), time.perf_counter()
    of_each = of_outputs(model, own, arguments.draws, arguments.most)
    torch.cuda.synchronize()
    print(json.dumps({"seconds_of_gradients": time.perf_counter() - start}), flush=True)
    del model

    def calibrated(solve, bits: int):
        rounding.trellis.solve = solve
        return hf_kbit.calibrate(load(arguments.model), own, bits=bits, codebook="trellis")

    solvers = {f"both sides, {part}": solver(of_each, float(part)) for part in arguments.damping.split(",")}
    solvers["inputs alone"] = trellis.solve
    report({way: partial(calibrated, solve) for way, solve in solvers.items()}, arguments, ids, exact)


if __name__ == "__main__":
    main()
