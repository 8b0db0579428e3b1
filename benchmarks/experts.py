"""Times a mixture's experts, from the router's output to y, beside Transformers' own in 16 bits, on one CUDA GPU.

    python benchmarks/experts.py [--models qwen3-30b-a3b,mixtral-8x7b] [--bits 2,3,4,5] [--tokens 1,16,256,2048]
                                 [--trellis] [--peers grouped_mm,batched_mm] [--json results.jsonl] [--table]
    python benchmarks/experts.py --from results.jsonl --table

A time is the median of replays of a CUDA graph of several calls, each with tokens and experts of its own, at random,
so that few weights are in L2; all sides of a line take turns. bfloat16; weights are random, rotated and with column
scales, as by default. The floor is the time to read what the experts that have tokens need, at the speed of a kernel
that only reads. ``up`` and ``down`` are the two products by themselves, and fields with ``int8`` are of experts that
ask for 8-bit inputs, which they get where the library finds that faster. With --trellis each width is measured with a
trellis as well, of random codes; its fields begin with ``trellis_``. --table prints the table of docs/performance.md.
"""

import argparse
import copy
from functools import partial

import torch
from gemm import skipped
from timing import Report, gpu_and_command, graph_us, in_turns_us, markdown, numbers, parse, read, read_kernel
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_kbit import codebooks
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.format.spec import BITS
from hf_kbit.format.trellis import TrellisDecoding
from hf_kbit.nn import experts as nn_experts
from hf_kbit.nn.site import empty, pack, sites
from hf_kbit.ops import native
from hf_kbit.weight.tensor import KbitTensor, Packed, as_parameter

PEERS = ("grouped_mm", "batched_mm")
QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
MIXTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2}
MODELS = {
    "qwen3-30b-a3b": (Qwen3MoeExperts, Qwen3MoeConfig(**QWEN3), 8),
    "mixtral-8x7b": (MixtralExperts, MixtralConfig(**MIXTRAL), 2),
}
DEVICE = "cuda"
FEW = 16  # tokens up to which there are as many calls in a graph, beyond a quarter
MOST_GATHERED = 64 << 30  # bytes of weights that batched_mm may copy


def dense_experts(model: str):
    cls, config, _ = MODELS[model]
    with torch.device(DEVICE):
        dense = cls(config).bfloat16().requires_grad_(False)
    for parameter in dense.parameters():
        parameter.data.normal_(0, 0.02)
    return dense


def packed_experts(dense, bits: int):
    """The experts with packed projections, the 16-bit ones left alone."""
    packed, own_sites = as_sites(dense)
    for site in own_sites:
        weight = site.weight.data
        pack(site, empty(site, ScalarDecoding(codebooks.optimal(bits, signed=True), 0, "rotated"))).load_dense(weight)
    return packed


def trellis_experts(dense, bits: int):
    """The experts with random trellises."""
    packed, own_sites = as_sites(dense)
    for site in own_sites:
        decoding, weight = TrellisDecoding(bits), site.weight.data
        tensors = {
            name: torch.randint(-(2**15), 2**15, size, dtype=dtype, device=DEVICE)
            if dtype == torch.int16
            else torch.full(size, 0.1, dtype=dtype, device=DEVICE)
            for name, (dtype, size) in decoding.layout(weight.shape).items()
        }
        layer = pack(site, empty(site, decoding))
        layer.weight = as_parameter(KbitTensor.of(Packed(tensors, decoding), weight.shape, weight.dtype))
    return packed


def as_sites(dense):
    """A copy of the experts, whose weights can be replaced, and where these are."""
    packed = copy.copy(dense)
    packed._parameters, packed._modules = dict(dense._parameters), dict(dense._modules)
    return packed, list(sites(torch.nn.ModuleDict({"experts": packed})).values())


def with_int8_inputs(packed):
    """The same packed experts, which round their inputs to 8 bits."""
    rounded = copy.copy(packed)
    rounded._modules = dict(packed._modules)
    for name, module in packed.named_children():
        if isinstance(module, nn_experts.KbitProjection):
            rounded._modules[name] = copy.copy(module).eval()
            rounded._modules[name].take_inputs("int8")
    return rounded


def inputs(model: str, tokens: int, calls: int):
    _, config, top = MODELS[model]
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    for _ in range(calls):
        x = torch.randn(tokens, config.hidden_size, device=DEVICE, dtype=torch.bfloat16)
        ids = torch.rand(tokens, experts, device=DEVICE).topk(top).indices
        yield x, ids, torch.softmax(torch.randn(tokens, top, device=DEVICE), -1).bfloat16()


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
        bounds = torch.arange(packed.num_experts + 1, device=DEVICE)
        offsets = torch.searchsorted(ids, bounds, out_int32=True)
        up.append(partial(packed.gate_up_proj, x, (order // count).int(), offsets))
        hidden = torch.randn(len(order), packed.down_proj.in_features, device=DEVICE, dtype=torch.bfloat16)
        down.append(partial(packed.down_proj, hidden, None, offsets))
    return {"up": up, "down": down}


def floor_us(block, calls) -> float:
    """Microseconds to read the weights of the experts that have tokens, as many as in the mean of the calls."""
    hit = sum(len(ids.unique()) for _, ids, _ in calls) / len(calls)
    held = sum(parameter.nbytes for parameter in block.parameters())
    size = int(held * hit / block.num_experts) // 64 * 64
    read, sink = read_kernel(), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    sources = [torch.zeros(size // 4, dtype=torch.int32, device=DEVICE) for _ in range(max(2, (256 << 20) // size))]
    ways = [{"per_processor": n, "block": 2048, "warps": 4} for n in (4, 8, 16)]
    return min(graph_us([partial(read, source, sink, **way) for source in sources], budget_ms=3) for way in ways)


def measured(dense, packed: dict, peers, calls) -> dict[tuple[str, int | None], float]:
    """Microseconds by field of a line and width, None where it is that of any."""
    own = {}
    for bits, kinds in packed.items():
        blocks = dict(kinds)
        if native.has_int8(DEVICE):
            blocks |= {f"{prefix}int8_": with_int8_inputs(block) for prefix, block in kinds.items()}
        for prefix, its in blocks.items():
            own[f"{prefix}us", bits] = [partial(its, *each) for each in calls]
            own |= {(f"{prefix}{what}_us", bits): of for what, of in projection_calls(its, calls).items()}
    others = {}
    gathered = sum(p.nbytes for p in dense.parameters()) / dense.num_experts * calls[0][1].numel() * len(calls)
    for peer in peers:
        if peer != "batched_mm" or gathered <= MOST_GATHERED:
            others[f"{peer}_us", None] = dense_calls(dense, peer, calls)

    def failed(side, error):
        if side in own:
            raise error
        skipped(side[0], f", {len(calls[0][0])} tokens", error)

    return in_turns_us(own | others, 12, failed=failed)


def run(arguments) -> list[dict]:
    report = Report(arguments.json, **gpu_and_command())
    lines = []
    for model in arguments.models:
        dense = dense_experts(model)
        packed = {bits: {"": packed_experts(dense, bits)} for bits in arguments.bits}
        for bits, kinds in packed.items() if arguments.trellis else ():
            kinds["trellis_"] = trellis_experts(dense, bits)
        for tokens in arguments.tokens:
            calls = list(inputs(model, tokens, 16 if tokens <= FEW else 4))
            times = measured(dense, packed, arguments.peers, calls)
            dense_floor = floor_us(dense, calls)
            for bits, kinds in packed.items():
                own = {field: us for (field, width), us in times.items() if width in (bits, None)}
                floors = {"floor_us": floor_us(kinds[""], calls), "floor_16_us": dense_floor}
                line = {"model": model, "tokens": tokens, "bits": bits, **own, **floors}
                report.line(**line)
                lines.append({**report.context, **line})
        del dense, packed
        torch.cuda.empty_cache()
    return lines


# --- the table ------------------------------------------------------------------------------------


def table(lines: list[dict]) -> str:
    """Microseconds in Markdown, ours beside Transformers'."""
    cells = {(line["model"], line["tokens"], line["bits"]): line for line in lines}  # of several runs the last
    places = list(dict.fromkeys((model, tokens) for model, tokens, _ in cells))
    widths = sorted({bits for _, _, bits in cells})
    dense = {"grouped_mm": "grouped_mm_us", "batched_mm": "batched_mm_us", "read, 16 bits": "floor_16_us"}

    def number(line, field: str) -> str:
        return f"{line[field]:.0f}" if field in line else ""

    def beside_floor(line) -> str:
        return "{} ({} + {}; {})".format(*(number(line, f) for f in ("us", "up_us", "down_us", "floor_us")))

    rows = []
    for model, tokens in places:
        own = [cells.get((model, tokens, bits), {}) for bits in widths]
        any_width = [number(next(filter(None, own)), field) for field in dense.values()]
        rows.append([model, str(tokens), *any_width, *(beside_floor(line) if line else "" for line in own)])
    return markdown(["model", "tokens", *dense, *(f"{bits} bits" for bits in widths)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--bits", type=numbers, default=list(BITS))
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 16, 64, 256, 2048])
    parser.add_argument("--trellis", action="store_true", help="measure each width with a trellis as well")
    parser.add_argument("--table", action="store_true", help="print the table of docs/performance.md at the end")
    arguments = parse(parser, PEERS, uses=("table",))
    lines = read(arguments.source) if arguments.source else run(arguments)
    if arguments.table:
        print(table(lines))


if __name__ == "__main__":
    main()
