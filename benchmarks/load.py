"""Times loading: a 16-bit checkpoint as it is, the same quantized on the fly, and a quantized checkpoint.

    python benchmarks/load.py [--shape llama-3-8b] [--bits 2,3,4,5] [--folder /tmp] [--json results.jsonl]

The checkpoint has random weights and is read once before, so that all loads find it in the page cache. The ways take
turns. Prints seconds, the peak of what torch allocated on the GPU while loading, and that peak over the size of the
loaded model.
"""

import argparse
import gc
import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from timing import Report, gpu_and_command
from transformers import AutoConfig, AutoModelForCausalLM

import hf_kbit
from hf_kbit.files.checkpoint import TENSORS

SHAPES = {
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3-70b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
    },
    "tiny": {
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "tiny-mixture": {
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}


def make_checkpoint(shape: str, folder: Path, device: str, **changes) -> None:
    """Random weights in bfloat16; ``changes`` of the shape's configuration."""
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[shape] | changes), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5GB")


def repeat(one: Path, path: Path, layers: int) -> None:
    """Writes a checkpoint whose layers all are the one of another; a file for each, ``config.json`` last."""
    config = json.loads((one / "config.json").read_text())
    assert not config.get("quantization_config", {}).get("layers"), "the layer has levels or an exponent of its own"
    config["num_hidden_layers"] = layers
    if "layer_types" in config:
        config["layer_types"] *= layers
    files: dict[str, dict[str, torch.Tensor]] = {}
    metadata = {}
    for source in one.glob("*.safetensors"):
        with safe_open(source, "pt") as stored:
            metadata |= {name: text for name, text in stored.metadata().items() if name != TENSORS}
            for name in stored.keys():
                tensor = stored.get_tensor(name)
                if ".layers.0." not in name:
                    files.setdefault("rest.safetensors", {})[name] = tensor
                    continue
                for layer in range(layers):
                    own = files.setdefault(f"layer-{layer}.safetensors", {})
                    own[name.replace(".layers.0.", f".layers.{layer}.")] = tensor
    path.mkdir(exist_ok=True)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda file: save_file(files[file], path / file, metadata), files))
    index = {"metadata": {}, "weight_map": {name: file for file, tensors in files.items() for name in tensors}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (path / "config.json").write_text(json.dumps(config))


def report_of_model(arguments, **context) -> Report:
    """Of a benchmark of models of ``--shape``, with ``--model-layers`` or all that it has."""
    layers = arguments.model_layers or SHAPES[arguments.shape]["num_hidden_layers"]
    where = {"transformers": transformers.__version__, "shape": arguments.shape, "layers": layers}
    return Report(arguments.json, **gpu_and_command(), **where, **context)


def load(folder: Path, device: str, **kwargs):
    """A loaded model, the seconds it took, and its peak in bytes over what was allocated before."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device, dtype=torch.bfloat16, **kwargs)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    return model, seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--bits", default="2,3,4,5")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoints are written, then deleted")
    parser.add_argument("--json", type=Path, default=None, help="file to append a JSON line for each way to")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    context = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "shape": arguments.shape,
        "scale": hf_kbit.KbitConfig().scale,
    }
    print(", ".join(f"{key} {value}" for key, value in context.items()), flush=True)

    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        make_checkpoint(arguments.shape, folder / "dense", arguments.device)
        ways = {"16 bits": (folder / "dense", {})}
        for bits in map(int, arguments.bits.split(",")):
            config = {"quantization_config": hf_kbit.KbitConfig(bits=bits)}
            ways[f"{bits} bits, on the fly"] = (folder / "dense", config)
            load(folder / "dense", arguments.device, **config)[0].save_pretrained(folder / f"{bits}")
            ways[f"{bits} bits, quantized before"] = (folder / f"{bits}", {})
        results = {way: [] for way in ways}
        for _ in range(arguments.rounds):
            for way, (source, kwargs) in ways.items():
                model, seconds, peak = load(source, arguments.device, **kwargs)
                results[way].append((seconds, peak, model.get_memory_footprint()))
                del model
    dense_seconds = statistics.median(seconds for seconds, _, _ in results["16 bits"])
    print(f"{'':26}{'seconds':>9}{'over 16 bits':>14}{'model GB':>10}{'peak GB':>9}{'peak / model':>14}")
    for way, runs in results.items():
        seconds, peak = statistics.median(run[0] for run in runs), max(run[1] for run in runs)
        size = runs[0][2]
        row = {"seconds": seconds, "over_16_bits": seconds / dense_seconds}
        row |= {"model_GB": size / 1e9, "peak_GB": peak / 1e9, "peak_over_model": peak / size}
        shown = zip(row.values(), ("9.2f", "14.2f", "10.2f", "9.2f", "14.3f"), strict=True)
        print(f"{way:26}" + "".join(f"{value:>{layout}}" for value, layout in shown))
        if arguments.json:
            with arguments.json.open("a") as file:
                print(json.dumps({**context, "way": way, **row}), file=file)


if __name__ == "__main__":
    main()
