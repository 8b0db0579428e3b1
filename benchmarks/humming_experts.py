"""A mixture's experts by Humming (humming-kernels), beside which ``benchmarks/experts.py`` times ours.

Its products are called as vLLM calls them, with the configurations that Humming's heuristics choose for the number of
rows, in two ways: ``indexed``, vLLM's choice on one GPU, in which a product gathers rows of x itself, and ``grouped``,
in which x is put in the order of experts first. What vLLM runs around them is not in Humming's package: a kernel of
this file makes blocks of rows, and hf_kbit's own ones sort the rows and add up the results.
"""

import copy
import functools
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import triton
import triton.language as tl
from humming.forward import may_process_input
from humming.kernel.humming import HummingKernel
from humming.layer import HummingLayer
from humming.tune import get_heuristics_config
from torch import nn

from hf_kbit.ops import combine_experts, route_experts

GROUP = 32  # weights that share a 16-bit scale
SWIGLU = {"activation_type": "binary_split", "activation_impl": "b * a / (1.0f + expf(-a))"}
WAYS = {"indexed": "indexed", "grouped": "grouped_contiguous"}  # as Humming calls them
CHUNK = 64  # rows, and blocks of rows, of one program of ``align``


class HummingExperts:
    """intN weights with a scale for each 32, made from the experts of Transformers.

    ``indexed`` and ``grouped`` are called as those are: hidden states ``[T, H]``, experts int64 ``[T, k]`` and their
    weights ``[T, k]`` to ``[T, H]``. ``decoded`` are Transformers' experts with the same weights in 16 bits.
    """

    def __init__(self, dense: nn.Module, bits: int):
        self.num_experts = dense.num_experts
        self.decoded = copy.copy(dense)
        self.decoded._parameters = {}
        layers = []
        for name in ("gate_up_proj", "down_proj"):
            layer, weight = packed(getattr(dense, name), bits)
            layers.append(layer)
            self.decoded._parameters[name] = nn.Parameter(weight, requires_grad=False)
        self.up, self.down = layers

    def kernels(self, way: str, rows: int) -> list[tuple[HummingLayer, str, str]]:
        """Of both products of so many rows: layer, compute_config and tuning_config."""
        compute = {"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": WAYS[way]}
        return [(layer, json.dumps(compute), json.dumps(tuning(layer, way, rows))) for layer in (self.up, self.down)]

    def indexed(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        _, places, offsets = route_experts(ids, self.num_experts)
        (up, *up_configs), (down, *down_configs) = self.kernels("indexed", ids.numel())
        blocks = block_size(up_configs), block_size(down_configs)
        order = align(ids, places, offsets, blocks[0])
        hidden = run(up, x, up_configs, ids.numel(), top_k=ids.shape[1], **order)
        hidden, _, _ = may_process_input(down.humming_config, hidden, **SWIGLU)
        if blocks[1] != blocks[0]:
            order = align(ids, places, offsets, blocks[1])
        y = run(down, hidden, down_configs, ids.numel(), **order)
        return combine_experts(y, as_they_are(*ids.shape), weights)

    def grouped(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        _, places, offsets = route_experts(ids, self.num_experts)
        (up, *up_configs), (down, *down_configs) = self.kernels("grouped", ids.numel())
        x, _, _ = may_process_input(up.humming_config, x, layout="scatter", scatter_idx=places)
        hidden = run(up, x, up_configs, ids.numel(), expert_layout=offsets)
        hidden, _, _ = may_process_input(down.humming_config, hidden, **SWIGLU)
        y = run(down, hidden, down_configs, ids.numel(), expert_layout=offsets)
        return combine_experts(y, places, weights)


def packed(weight: torch.Tensor, bits: int) -> tuple[HummingLayer, torch.Tensor]:
    """A layer of Humming for a weight ``[E, N, K]``, and what it stores, decoded to the weight's dtype."""
    experts, n, k = weight.shape
    config = {"dtype": f"int{bits}", "group_size": GROUP}
    layer = HummingLayer(n, k, weight_config=config, num_experts=experts, torch_dtype=weight.dtype).cuda()
    schema = layer.weight_schema
    tensors = schema.quant_tensor(weight, schema, weight.dtype)
    decoded = schema.dequant_tensors(tensors).to(weight.dtype)
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer, decoded


def tuning(layer: HummingLayer, way: str, rows: int) -> dict:
    return get_heuristics_config(layer.humming_config, shape_m=rows, gemm_type=WAYS[way])


def block_size(configs: list[str]) -> int:
    """Rows that a CTA of a product takes at a time, all of one expert."""
    return json.loads(configs[1])["block_shape"][0]


def run(layer: HummingLayer, x: torch.Tensor, configs: list[str], rows: int, **order) -> torch.Tensor:
    compute, chosen = configs
    return layer(x, compute_config=compute, tuning_config=chosen, valid_shape_m=rows, **order)


@functools.cache
def as_they_are(tokens: int, count: int) -> torch.Tensor:
    """The places of rows that are in no other order than that of tokens."""
    return torch.arange(tokens * count, dtype=torch.int32, device="cuda").view(tokens, count)


def compile_kernels(experts: list[HummingExperts], rows: list[int]) -> None:
    """All of them at once, as each takes seconds of one processor.

    A failure comes up again, and is told, where the kernel is used.
    """
    start = time.perf_counter()
    needed = {
        (layer.humming_config.to_str(), compute, chosen)
        for block in experts
        for way in WAYS
        for count in rows
        for layer, compute, chosen in block.kernels(way, count)
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for config in needed:
            pool.submit(HummingKernel.prepare_kernels, *config)
    print(f"humming: {len(needed)} kernels compiled in {time.perf_counter() - start:.0f} s", flush=True)


# --- rows in blocks of one expert -----------------------------------------------------------------


def align(ids: torch.Tensor, places: torch.Tensor, offsets: torch.Tensor, block: int) -> dict[str, torch.Tensor]:
    """What an indexed product reads: rows sorted by expert, those of each filled up to whole blocks by a row that does
    not exist, the expert of each block, and the number of rows with those that were added."""
    rows, experts = ids.numel(), len(offsets) - 1
    blocks = min(rows, experts + rows // block)  # at most; a block has a row at least
    sorted_ids = torch.empty(blocks * block, dtype=torch.int32, device=ids.device)
    expert_ids = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    padded = torch.empty(1, dtype=torch.int32, device=ids.device)
    grid = (triton.cdiv(max(rows, blocks), CHUNK),)
    sizes = {"EXPERTS": triton.next_power_of_2(experts), "WIDTH": triton.next_power_of_2(block), "CHUNK": CHUNK}
    align_kernel[grid](
        ids, places, offsets, sorted_ids, expert_ids, padded, rows, experts, block, **sizes, num_warps=8
    )
    return {"sorted_ids": sorted_ids, "expert_ids": expert_ids, "num_tokens_padded": padded}


@triton.jit
def align_kernel(
    ids,
    places,
    offsets,
    sorted_ids,
    expert_ids,
    padded,
    rows,
    experts,
    block,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    program = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    firsts = tl.load(offsets + every, mask=every < experts, other=0)
    lasts = tl.load(offsets + every + 1, mask=every < experts, other=0)
    blocks = (lasts - firsts + block - 1) // block
    ends = tl.cumsum(blocks, 0)
    shifts = (ends - blocks) * block - firsts  # from a row's place to that among blocks
    total = tl.sum(blocks, 0)
    if program == 0:
        tl.store(padded, total * block)

    own = program * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + own, mask=own < rows, other=0).to(tl.int32)
    place = tl.load(places + own, mask=own < rows, other=0)
    shift = tl.sum(tl.where(expert[:, None] == every[None, :], shifts[None, :], 0), 1)
    tl.store(sorted_ids + place + shift, own, mask=own < rows)

    owner = tl.sum((ends[None, :] <= own[:, None]).to(tl.int32), 1)
    tl.store(expert_ids + own, owner, mask=own < total)
    is_owner = owner[:, None] == every[None, :]
    end = tl.sum(tl.where(is_owner, lasts[None, :] + shifts[None, :], 0), 1)
    place = own[:, None] * block + tl.arange(0, WIDTH)[None, :]
    added = (own[:, None] < total) & (tl.arange(0, WIDTH)[None, :] < block) & (place >= end[:, None])
    tl.store(sorted_ids + place, tl.zeros_like(place) + rows, mask=added)
