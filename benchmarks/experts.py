"""Times a mixture's experts, from the router's output to y, beside Transformers' own in 16 bits, on one CUDA GPU.

    python benchmarks/experts.py [--models qwen3-30b-a3b,mixtral-8x7b] [--bits 2,3,4,5] [--tokens 1,16,256,2048]
                                 [--json results.jsonl]

A time is the median of replays of a CUDA graph of several calls, each with tokens and experts of its own, at random,
so that few weights are in L2; all sides of a line take turns. bfloat16; weights are random, rotated and with column
scales, as by default. The floor is the time to read what the experts that have tokens need, at the speed of a kernel
that only reads. ``up`` and ``down`` are the two products by themselves.
"""

import argparse
import copy
from functools import partial

import torch
from timing import Report, gpu_and_command, graph_us, in_turns_us, parse, read_kernel
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_kbit.integrations.transformers import experts as integration
from hf_kbit.nn import experts as nn_experts

PEERS = ("grouped_mm", "batched_mm")
QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MIXTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "qwen3-30b-a3b": (Qwen3MoeExperts, Qwen3MoeConfig(**QWEN3), 8),
    "mixtral-8x7b": (MixtralExperts, MixtralConfig(**MIXTRAL), 2),
}
FEW = 16  # tokens up to which there are as many calls in a graph, beyond a quarter
MOST_GATHERED = 64 << 30  # bytes of weights that batched_mm may copy


def dense_experts(model: str):
    cls, config, _ = MODELS[model]
    with torch.device("cuda"):
        dense = cls(config).bfloat16().requires_grad_(False)
    for parameter in dense.parameters():
        parameter.data.normal_(0, 0.02)
    return dense


def packed_experts(dense, bits: int):
    """The experts with packed projections, the 16-bit ones left alone."""
    packed = copy.copy(dense)
    packed._parameters, packed._modules = dict(dense._parameters), dict(dense._modules)
    holder = torch.nn.ModuleDict({"experts": packed})
    for name in list(nn_experts.projections(holder)):
        projection = integration.new_projection(holder, name, bits=bits)
        projection.load_dense(holder.get_parameter(name).data)
        integration.put(holder, name, projection)
    return packed


def inputs(model: str, tokens: int, calls: int):
    _, config, top = MODELS[model]
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    for _ in range(calls):
        x = torch.randn(tokens, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, device="cuda").topk(top).indices
        yield x, ids, torch.softmax(torch.randn(tokens, top, device="cuda"), -1).bfloat16()


def dense_calls(dense, implementation: str, calls):
    def call(*arguments):
        dense.config._experts_implementation = implementation
        return dense(*arguments)

    return [partial(call, *arguments) for arguments in calls]


def projection_calls(packed, calls):
    """Of both products alone, with what the block makes for them."""
    up, down = [], []
    for x, ids, _ in calls:
        count, (ids, order) = ids.shape[1], torch.sort(ids.reshape(-1), stable=True)
        bounds = torch.arange(packed.num_experts + 1, device="cuda")
        offsets = torch.searchsorted(ids, bounds, out_int32=True)
        up.append(partial(packed.gate_up_proj, x, (order // count).int(), offsets))
        hidden = torch.randn(len(order), packed.down_proj.in_features, device="cuda", dtype=torch.bfloat16)
        down.append(partial(packed.down_proj, hidden, None, offsets))
    return {"up": up, "down": down}


def floor_us(weights_bytes: float, experts: int, calls) -> float:
    """Microseconds to read the weights of the experts that have tokens, as many as in the mean of the calls."""
    hit = sum(len(ids.unique()) for _, ids, _ in calls) / len(calls)
    size = int(weights_bytes * hit / experts) // 64 * 64
    read, sink = read_kernel(), torch.zeros(1, dtype=torch.int32, device="cuda")
    sources = [torch.zeros(size // 4, dtype=torch.int32, device="cuda") for _ in range(max(2, (256 << 20) // size))]
    ways = [{"per_processor": n, "block": 2048, "warps": 4} for n in (4, 8, 16)]
    return min(graph_us([partial(read, source, sink, **way) for source in sources], budget_ms=3) for way in ways)


def run(arguments) -> None:
    report = Report(arguments.json, **gpu_and_command())
    for model in arguments.models.split(","):
        dense = dense_experts(model)
        experts, size = dense.num_experts, sum(parameter.nbytes for parameter in dense.parameters())
        packed = {int(bits): packed_experts(dense, int(bits)) for bits in arguments.bits.split(",")}
        for tokens in map(int, arguments.tokens.split(",")):
            calls = list(inputs(model, tokens, 16 if tokens <= FEW else 4))
            sides = {bits: [partial(block, *each) for each in calls] for bits, block in packed.items()}
            for peer in arguments.peers:
                if peer != "batched_mm" or size / experts * calls[0][1].numel() * len(calls) <= MOST_GATHERED:
                    sides[peer] = dense_calls(dense, peer, calls)
            for bits, block in packed.items():
                sides |= {(bits, what): of for what, of in projection_calls(block, calls).items()}
            times = in_turns_us(sides, 12, failed=lambda side, error: print(f"{side}: {error}"))
            of_peers = {f"{peer}_us": times[peer] for peer in arguments.peers if peer in times}
            of_peers["floor_16_us"] = floor_us(size, experts, calls)
            for bits, block in packed.items():
                held = sum(tensor.nbytes for tensor in block.parameters())
                own = {"us": times[bits], "up_us": times[bits, "up"], "down_us": times[bits, "down"]}
                floor = floor_us(held, experts, calls)
                report.line(model=model, tokens=tokens, bits=bits, **own, floor_us=floor, **of_peers)
        del dense, packed
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--bits", default="2,3,4,5")
    parser.add_argument("--tokens", default="1,4,16,64,256,2048")
    run(parse(parser, PEERS))


if __name__ == "__main__":
    main()
