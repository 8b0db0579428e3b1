"""Times quantized models on several GPUs: decoding under tensor and expert parallelism, QLoRA under FSDP2 and DDP.

    torchrun --nproc_per_node 2 benchmarks/parallel.py --folder /tmp/models [--shape llama-3-70b] [--layers 16]
                                                       [--bits 4] [--ways tensor,fsdp,ddp] [--json results.jsonl]
    torchrun --nproc_per_node 1 benchmarks/parallel.py --folder /tmp/models --ways tensor,ddp  # to compare with

The first process quantizes a layer of random weights, and writes a checkpoint that has it as often as there are layers
into --folder, where later runs find it. The ways:

- tensor, expert: decoding of one sequence by the parallelism of that name, for each of --modes as ``model.py`` has
  them, with its milliseconds from token to token; with one process, a model on one GPU,
- sums: microseconds of the sum over processes of what one token hands from layer to layer, in a CUDA graph of many, by
  NCCL and, where GPUs can, directly, as ``hf_kbit.fast_generate`` does it, the latter also with the norm that follows,
- fsdp, ddp: LoRA as in ``qlora.py``, milliseconds of a step of --sequences in each process; with one process, ``ddp``
  is a step on one GPU.

A line also has the seconds of loading, GPU memory that the loaded model takes, and its peak, all of the process that
takes most. Without a GPU all but ``sums`` runs on CPUs, by gloo, to see that it runs.
"""

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from load import SHAPES, make_checkpoint, repeat
from model import COMPILED, MODES, decode, decode_compiled
from qlora import adapted, optimizer_of, step
from timing import Report, driver, some_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_kbit
from hf_kbit.generation.all_reduce import all_reduce, all_reduce_norm, connect, connected

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UP, STEPS, SUMS = 2, 5, 100


# --- the checkpoint -------------------------------------------------------------------------------


def checkpoint(folder: Path, shape: str, layers: int, bits: int) -> Path:
    """A quantized one, which the first process makes if it is not there."""
    path = folder / f"{shape}-{layers}-{bits}"
    if dist.get_rank() == 0 and not path.exists():
        one = folder / f"{shape}-one-{bits}"
        make_checkpoint(shape, one / "dense", DEVICE, num_hidden_layers=1, bos_token_id=None, eos_token_id=None)
        load(one / "dense", device_map=DEVICE, quantization_config=hf_kbit.KbitConfig(bits=bits)).save_pretrained(one)
        repeat(one, path, layers)
    dist.barrier()
    return path


def load(folder: Path, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs)


# --- ways -----------------------------------------------------------------------------------------


def tensor(folder: Path):
    processes = dist.get_world_size()
    return load_shared(folder, DistributedConfig(tp_size=processes) if processes > 1 else None)


def expert(folder: Path):
    processes = dist.get_world_size()
    own = {"ep_size": processes} if hasattr(DistributedConfig(), "ep_size") else {"enable_expert_parallel": True}
    return load_shared(folder, DistributedConfig(tp_size=processes, **own) if processes > 1 else None)


def load_shared(folder: Path, plan: DistributedConfig | None):
    return load(folder, **({"device_map": DEVICE} if plan is None else {"distributed_config": plan}))


def fsdp(folder: Path):
    model = adapted(load(folder, device_map=own_device()), prepared=False)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    base = model.get_base_model()
    for part in (base.model.embed_tokens, *base.model.layers):
        fully_shard(part, mesh=mesh)
    fully_shard([base.model.norm, base.lm_head], mesh=mesh, reshard_after_forward=False)  # backward begins with them
    return fully_shard(model, mesh=mesh)


def ddp(folder: Path):
    return DistributedDataParallel(adapted(load(folder, device_map=own_device()), prepared=False))


WAYS_OF_SUMS = {
    "NCCL": lambda x, group: dist.all_reduce(x.clone()),
    "direct": lambda x, group: all_reduce(x, group),
    "direct, norm": lambda x, group: all_reduce_norm(x, x, x.flatten(), 1e-5, group),
}


def sum_us(numbers: int, sum_over_processes: Callable) -> float:
    x, group = torch.ones(1, numbers, dtype=torch.bfloat16, device=own_device()), dist.group.WORLD.group_name

    def many():
        for _ in range(SUMS):
            sum_over_processes(x, group)

    many()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    times = []
    for _ in range(WARM_UP + STEPS):
        start = now()
        graph.replay()
        times.append(now() - start)
    return statistics.median(times[WARM_UP:]) / SUMS * 1e6


DECODING, TRAINING = {"tensor": tensor, "expert": expert}, {"fsdp": fsdp, "ddp": ddp}
WAYS = DECODING | TRAINING


def decoded(model, mode: str, kernels: bool) -> dict:
    torch.manual_seed(0)  # all processes work on the same prompt
    with torch.no_grad():
        ms, compilation = decode_compiled(model, 1, mode) if mode in COMPILED else (decode(model, 1)[0], {})
        if kernels:
            with profile(activities=[ProfilerActivity.CUDA]) as profiled:
                decode(model, 1, **COMPILED.get(mode, {}))
    if kernels and dist.get_rank() == 0:
        print(profiled.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=80))
    return {"ms": ms, **compilation}


def trained(model, shape: tuple[int, int]) -> dict:
    torch.manual_seed(dist.get_rank())
    ids = torch.randint(1000, shape, device=own_device())
    optimizer, times = optimizer_of(model), []
    for _ in range(WARM_UP + STEPS):
        start = now()
        loss = step(model, optimizer, ids)
        times.append(now() - start)
    return {"ms": statistics.median(times[WARM_UP:]) * 1e3, "loss": loss}


# --- measuring ------------------------------------------------------------------------------------


def own_device() -> torch.device:
    return torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def most(number: float) -> float:
    """Of all processes."""
    numbers = torch.tensor([number], dtype=torch.float64, device=own_device())
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.item()


def measure(way: str, folder: Path, shape: tuple[int, int], of_decoding: list[str], kernels: bool, emit) -> None:
    """Calls ``emit`` with what was measured of each mode, or of training."""
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    allocated, peak = (
        (torch.cuda.memory_allocated, torch.cuda.max_memory_allocated) if DEVICE == "cuda" else (lambda: 0,) * 2
    )
    before, start = allocated(), now()
    model = WAYS[way](folder)
    loaded = {"load_s": most(now() - start), "loaded_GB": most(allocated() - before) / 1e9}
    for mode in of_decoding if way in DECODING else ["training"]:
        measured = decoded(model, mode, kernels) if way in DECODING else trained(model, shape)
        emit(way=way, mode=mode, **measured, **loaded, peak_GB=most(peak() - before) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoints, which stay there")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-70b")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument(
        "--ways",
        default="tensor,fsdp,ddp",
        help=f"of {','.join(WAYS)}; '' makes the checkpoint alone; default %(default)s",
    )
    parser.add_argument("--modes", type=some_of(MODES), default=MODES, help="of decoding")
    parser.add_argument("--kernels", action="store_true", help="print the time of each kernel in decoding")
    parser.add_argument("--sequences", type=int, default=4, help="in each process")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--json", help="file to append a JSON line for each measurement to")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    first = dist.get_rank() == 0
    gpu = {"gpu": torch.cuda.get_device_name(), "driver": driver()} if DEVICE == "cuda" else {"gpu": "none"}
    settings = {key: getattr(arguments, key) for key in ("shape", "layers", "bits", "sequences", "tokens")}
    context = {**gpu, "processes": dist.get_world_size(), "transformers": transformers.__version__, **settings}
    report = Report(arguments.json, **context) if first else None
    folder = checkpoint(arguments.folder, arguments.shape, arguments.layers, arguments.bits)

    def emit(**line) -> None:
        if first:
            report.line(**line)

    for way in filter(None, arguments.ways.split(",")):
        if way == "sums":
            connect(dist.group.WORLD, own_device())
            for mode, sum_over_processes in WAYS_OF_SUMS.items():
                if mode == "NCCL" or connected(dist.group.WORLD):
                    us = sum_us(SHAPES[arguments.shape]["hidden_size"], sum_over_processes)
                    emit(way=way, mode=mode, us=most(us))
            continue
        shape = arguments.sequences, arguments.tokens
        measure(way, folder, shape, arguments.modes, arguments.kernels, emit)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
