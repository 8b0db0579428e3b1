"""Times a step of fine-tuning with LoRA on Llama-3-8B's shape: bf16, hf_kbit and bitsandbytes, on one CUDA GPU.

    python benchmarks/qlora.py [--layers 32] [--bits 2,3,4,5] [--sequences 4] [--tokens 1024]
                               [--trellis] [--peers bitsandbytes] [--json results.jsonl] [--plot qlora.png]
    python benchmarks/qlora.py --shape qwen3-30b-a3b --layers 8  # a mixture, with LoRA on its experts too
    python benchmarks/qlora.py --from results.jsonl --plot qlora.png

One 16-bit checkpoint with random weights is written to a temporary folder, and every model is loaded from it as a user
would, quantized on the fly. All get the same LoRA of rank 16 on all linear layers but the head, gradient checkpointing
that is not reentrant, bfloat16 autocast and AdamW. With that PEFT adapts the experts and the router of a mixture too,
those with twice the rank for gate and up. Models in few bits are measured twice:

- prepared no: as they are, with embedding, head and norms in bfloat16, like the model in bf16,
- prepared yes: after PEFT's ``prepare_model_for_kbit_training``, which casts those to float32.

A line has the median milliseconds of a step, GPU memory that the loaded model takes, the peak of memory in training,
the loss of the last step, and ratios to bf16 and to NF4 (prepared alike) in the same run. bitsandbytes, with NF4 in
blocks of 64, runs where it is installed, and before hf_kbit. --trellis measures each width with a trellis too, of one
layer that all are, as model.py does. --plot needs matplotlib.
"""

import argparse
import gc
import statistics
import tempfile
import time
from pathlib import Path

import peft
import torch
import transformers
from gemm import COLOURS, find_peers, skipped
from load import SHAPES, load, make_checkpoint
from model import DENSE, KINDS, OTHERS, PEERS, SHAPE, TRELLIS, pack_one_layer
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from timing import Report, gpu_and_command, numbers, parse, run_and_plot

import hf_kbit
from hf_kbit.format.spec import BITS

RANK = 16
WARM_UP, STEPS = 2, 5
CHECKPOINTING = {"use_reentrant": False}


# --- measuring ------------------------------------------------------------------------------------


def adapted(model, prepared: bool) -> peft.PeftModel:
    """LoRA on all linear layers, and gradient checkpointing."""
    if prepared:
        model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=CHECKPOINTING)
    else:
        model.gradient_checkpointing_enable(CHECKPOINTING)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, lora).train()


def optimizer_of(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW((parameter for parameter in model.parameters() if parameter.requires_grad), lr=2e-4)


def step(model, optimizer, ids: torch.Tensor) -> float:
    """One step; returns the loss, for which the host waits."""
    with torch.autocast(ids.device.type, torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def measure(folder: str, config, prepared: bool, shape: tuple[int, int]) -> tuple[dict, float]:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    quantized = {"quantization_config": config} if config else {}  # None would undo what a folder says
    model, _, _ = load(folder, "cuda", **quantized)
    loaded = torch.cuda.memory_allocated() - before
    torch.manual_seed(0)
    model = adapted(model, prepared)
    optimizer = optimizer_of(model)
    ids = torch.randint(model.config.vocab_size, shape, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = step(model, optimizer, ids)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before
    ms = statistics.median(times[WARM_UP:]) * 1e3
    return {"ms": ms, "peak_GB": peak / 1e9, "loaded_GB": loaded / 1e9}, loss


# --- the plot -------------------------------------------------------------------------------------


def plot(lines, file: str) -> None:
    """Milliseconds of a step and the peak of memory as bars; light ones are models that were prepared."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4), dpi=100)
    lines = list({(line["name"], line["bits"], line["prepared"]): line for line in lines}.values())
    labels = [label_of(line) for line in lines]
    for axis, key, title in zip(axes, ("ms", "peak_GB"), ("ms of a step", "peak of GPU memory, GB"), strict=True):
        colours = [
            OTHERS[line["name"]]["color"] if line["name"] in OTHERS else COLOURS[line["bits"]] for line in lines
        ]
        drawn = axis.barh(labels, [line[key] for line in lines], color=colours)
        for bar, line in zip(drawn, lines, strict=True):
            bar.set_alpha(0.5 if line["prepared"] == "yes" else 1)
        axis.bar_label(drawn, fmt="%.3g", fontsize=8, padding=2)
        axis.invert_yaxis()
        axis.set(title=title)
        axis.margins(x=0.12)
    axes[1].set_yticks([])
    what = lines[-1]
    figure.suptitle(
        f"LoRA of rank {RANK}, {what['shape']}, {what['layers']} layers, {what['sequences']} x {what['tokens']} "
        f"tokens, {what['gpu']}, {what['date']}"
    )
    figure.tight_layout()
    figure.savefig(file)


def label_of(line: dict) -> str:
    name = line["name"]
    label = OTHERS[name]["label"] if name in OTHERS else f"{name}, {line['bits']} bits"
    return f"{label}, prepared" if line["prepared"] == "yes" else label


# --- command line ---------------------------------------------------------------------------------


def command_line():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default=SHAPE)
    parser.add_argument("--layers", type=int, help="fewer are quicker; default: those of the shape")
    parser.add_argument("--bits", type=numbers, default=list(BITS))
    parser.add_argument("--trellis", action="store_true", help="measure each width with a trellis as well")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sequence")
    return parse(parser, PEERS)


def run(arguments) -> list[dict]:
    layers = arguments.layers or SHAPES[arguments.shape]["num_hidden_layers"]
    report = Report(
        arguments.json,
        **gpu_and_command(),
        transformers=transformers.__version__,
        peft=peft.__version__,
        shape=arguments.shape,
        layers=layers,
        sequences=arguments.sequences,
        tokens=arguments.tokens,
    )
    lines, measured = [], {}

    def emit(way: dict, config, prepared: str, folder: str) -> None:
        result, loss = measure(folder, config, prepared == "yes", (arguments.sequences, arguments.tokens))
        measured[way["name"], prepared] = result
        ratios = {}
        for name, against in (("bf16", "no"), ("bitsandbytes", prepared)):
            if other := measured.get((name, against)):
                ratios |= {f"{key}_over_{name}": result[key] / other[key] for key in ("ms", "peak_GB")}
        entry = {**way, "prepared": prepared, **result, **ratios, "loss": loss}
        report.line(**entry)
        lines.append({**report.context, **entry})

    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(arguments.shape, folder, "cuda", num_hidden_layers=layers)
        emit(DENSE, None, "no", folder)
        for peer, version in find_peers(arguments.peers).items():
            for prepared in ("no", "yes"):
                try:
                    emit({"name": peer, "bits": 4, "version": version}, PEERS[peer](), prepared, folder)
                except Exception as error:
                    skipped(peer, f", prepared {prepared}", error)
        for bits in arguments.bits:
            for prepared in ("no", "yes"):
                emit({"name": "hf_kbit", "bits": bits}, hf_kbit.KbitConfig(bits=bits), prepared, folder)
            if arguments.trellis:
                with tempfile.TemporaryDirectory() as packed:
                    config = hf_kbit.KbitConfig(bits=bits, **KINDS[TRELLIS])
                    pack_one_layer(arguments.shape, layers, config, Path(packed))
                    for prepared in ("no", "yes"):
                        emit({"name": TRELLIS, "bits": bits}, None, prepared, f"{packed}/all")
    return lines


def main() -> None:
    arguments = command_line()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    run_and_plot(arguments, run, plot)


if __name__ == "__main__":
    main()
