"""Times quantized models on several GPUs: decoding under tensor parallelism, QLoRA under FSDP2 and DDP.

    torchrun --nproc_per_node 2 benchmarks/parallel.py [--shape llama-3-70b] [--layers 8] [--bits 4]
                                                       [--ways tensor,fsdp,ddp] [--json results.jsonl]

The first process quantizes a checkpoint of random weights, of no more layers than one GPU holds in 16 bits. Then each
way loads it, and a line of the first process has the median milliseconds from token to token of ``generate``, in eager
mode with one sequence, or of a step of LoRA as in ``qlora.py``; GPU memory that the loaded model takes, and the peak,
in the process that takes most. With one process, ``tensor`` is a model on one GPU, to compare with. Without a GPU it
runs on CPUs, by gloo, to see that it runs.
"""

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from load import SHAPES, make_checkpoint
from qlora import adapted, optimizer_of, step
from timing import Report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import hf_kbit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT, NEW_TOKENS, SETTLED = 128, 32, 8
WARM_UP, STEPS = 2, 5


def load(folder: Path, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kwargs)


def quantize(shape: str, layers: int, bits: int, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as dense:
        make_checkpoint(shape, dense, DEVICE, num_hidden_layers=layers)
        config = hf_kbit.KbitConfig(bits=bits)
        load(dense, device_map=DEVICE, quantization_config=config).save_pretrained(folder)


# --- ways -----------------------------------------------------------------------------------------


def tensor(folder: Path, ids: torch.Tensor):
    """What gives seconds from token to token."""
    processes = dist.get_world_size()
    where = {"distributed_config": DistributedConfig(tp_size=processes)} if processes > 1 else {"device_map": DEVICE}
    model = load(folder, **where)
    return partial(decode, model, ids[:1, :PROMPT])


def decode(model, ids: torch.Tensor) -> list[float]:
    stamps = []

    def clock(_, scores):
        stamps.append(now())
        return scores

    model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, logits_processor=[clock])
    return [after - before for before, after in zip(stamps[SETTLED:-1], stamps[SETTLED + 1 :], strict=True)]


def fsdp(folder: Path, ids: torch.Tensor):
    model = adapted(load(folder, device_map={"": ids.device}), prepared=False)
    mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return partial(train, model, ids)


def ddp(folder: Path, ids: torch.Tensor):
    model = adapted(load(folder, device_map={"": ids.device}), prepared=False)
    return partial(train, DistributedDataParallel(model), ids)


def train(model, ids: torch.Tensor) -> list[float]:
    optimizer, times = optimizer_of(model), []
    for _ in range(WARM_UP + STEPS):
        start = now()
        step(model, optimizer, ids)
        times.append(now() - start)
    return times[WARM_UP:]


WAYS = {"tensor": tensor, "fsdp": fsdp, "ddp": ddp}


# --- measuring ------------------------------------------------------------------------------------


def now() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def most(number: float) -> float:
    """Of all processes."""
    numbers = torch.tensor([number], dtype=torch.float64, device=DEVICE)
    dist.all_reduce(numbers, dist.ReduceOp.MAX)
    return numbers.item()


def measure(way: str, folder: Path, shape: tuple[int, int]) -> dict[str, float]:
    torch.manual_seed(dist.get_rank())
    device = torch.device(DEVICE, torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated if DEVICE == "cuda" else lambda: 0
    ids = torch.randint(1000, shape, device=device)
    if way == "tensor":
        dist.broadcast(ids, 0)  # all processes of it work on one batch
    run = WAYS[way](folder, ids)
    loaded = allocated()
    ms = statistics.median(run()) * 1e3
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    return {"ms": most(ms), "loaded_GB": most(loaded) / 1e9, "peak_GB": most(peak) / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-70b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--sequences", type=int, default=4, help="in each process")
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    parser.add_argument("--json", help="file to append a JSON line for each way to")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    first = dist.get_rank() == 0
    settings = {key: getattr(arguments, key) for key in ("shape", "layers", "bits", "sequences", "tokens")}
    where = {"device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU", "processes": dist.get_world_size()}
    report = Report(arguments.json, **where, transformers=transformers.__version__, **settings) if first else None
    paths = [tempfile.mkdtemp() if first else None]
    dist.broadcast_object_list(paths)
    folder = Path(paths[0])
    if first:
        quantize(arguments.shape, arguments.layers, arguments.bits, folder)
    dist.barrier()
    for way in arguments.ways.split(","):
        line = measure(way, folder, (arguments.sequences, arguments.tokens))
        if first:
            report.line(way=way, **line)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
