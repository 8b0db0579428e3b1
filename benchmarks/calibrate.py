"""Times calibrating a model whose layers go to the GPU one after another: seconds of a layer, and memory.

    python benchmarks/calibrate.py [--methods feedback,weighted] [--bits 4] [--layers 3] [--sequences 128]
                                   [--length 2048] [--batch 4] [--shape llama-3-8b] [--tune 1000]
                                   [--json results.jsonl]
    python benchmarks/calibrate.py --shape qwen3-30b-a3b --layers 2 --methods weighted  # a mixture of 128 experts

The model has random weights, with the deviation that Transformers starts training from, in bfloat16 and in CPU memory,
and so few layers that it is quick; the tokens are random. Once all is warm, one with a single layer is calibrated and
one with ``--layers``. The difference gives the seconds of a layer, what the single one took more the rest: embedding,
checks, moving what is there once. ``all_layers_s`` is EXTRAPOLATED from these to the layers of the shape. Peaks are
those of calibrating ``--layers``: what torch allocated on the GPU and what it reserved for that, and the memory of the
process so far. That of the host grows with the layers, for the model is in it; that of the GPU does by ``feedback``,
which weighs tokens with the model there.

``--tune`` trains each layer after that, a fifth of so many steps. Of tuning this is the stage that takes one layer at
a time; the other, of the whole model, is left out, for the whole shape does not fit.
"""

import argparse
import gc
import resource
import shlex
import sys
import time

import torch
import transformers
from load import SHAPES
from timing import Report, gpu_and_command
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

import hf_kbit
from hf_kbit.calibration.solving import METHODS


def config_of(arguments, **changes) -> PreTrainedConfig:
    return AutoConfig.for_model(**SHAPES[arguments.shape] | {"max_position_embeddings": arguments.length} | changes)


def make_model(arguments, layers: int) -> PreTrainedModel:
    """On the CPU, with random numbers that the device makes."""
    with torch.device(arguments.device):
        config = config_of(arguments, num_hidden_layers=layers)
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cpu()


def measure(arguments, layers: int, ids: torch.Tensor, **options) -> dict[str, float]:
    """Seconds, and peaks in GB, of calibrating a new model."""
    model = make_model(arguments, layers)
    gc.collect()
    on_gpu = arguments.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    hf_kbit.calibrate(model, ids, device=arguments.device, batch=arguments.batch, tune_whole=False, **options)
    if on_gpu:
        torch.cuda.synchronize()
    return {
        "seconds": time.perf_counter() - start,
        "gpu_GB": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else 0.0,
        "gpu_reserved_GB": torch.cuda.max_memory_reserved() / 1e9 if on_gpu else 0.0,
        "host_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    }


def run(arguments) -> None:
    transformers.logging.set_verbosity_error()
    where = gpu_and_command() if arguments.device == "cuda" else {"gpu": "none"}
    where["command"] = shlex.join(["python", *sys.argv])
    names = ("shape", "layers", "sequences", "length", "batch", "tune")
    what = {name: getattr(arguments, name) for name in names}
    report = Report(arguments.json, **where, transformers=transformers.__version__, **what)
    torch.manual_seed(0)
    config = config_of(arguments)
    ids = torch.randint(config.vocab_size, (arguments.sequences, arguments.length))
    widths = [int(bits) for bits in arguments.bits.split(",")]
    for method in arguments.methods.split(","):
        measure(arguments, 1, ids[: arguments.batch], method=method, bits=widths[0], tune=0)  # warms up
        for bits in widths:
            options = {"method": method, "bits": bits, "tune": arguments.tune}
            one, found = (measure(arguments, layers, ids, **options) for layers in (1, arguments.layers))
            layer = (found["seconds"] - one["seconds"]) / (arguments.layers - 1)
            rest = one["seconds"] - layer
            times = {"layer_s": layer, "rest_s": rest, "all_layers_s": rest + config.num_hidden_layers * layer}
            report.line(method=method, bits=bits, **found, **times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=3, help="2 or more; default %(default)s")
    parser.add_argument("--methods", default=",".join(METHODS), help="default %(default)s")
    parser.add_argument("--bits", default="4", help="default %(default)s")
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence; default %(default)s")
    parser.add_argument("--batch", type=int, default=4, help="sequences that a layer takes at a time")
    parser.add_argument("--tune", type=int, default=0, help="steps, a fifth of which a layer takes; default none")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", help="file to append a JSON line for each method and width to")
    arguments = parser.parse_args()
    if arguments.layers < 2:
        parser.error(f"--layers: found {arguments.layers}, expected 2 or more, for a difference")
    run(arguments)


if __name__ == "__main__":
    main()
