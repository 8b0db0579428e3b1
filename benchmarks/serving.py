"""Times vLLM on models of a known shape with random weights: 16 bits, hf_kbit, FP8 and GPTQ, on CUDA GPUs.

    python benchmarks/serving.py --folder /tmp/models [--shape llama-3-8b] [--model-layers 32]
                                 [--methods bf16,hf_kbit-4,hf_kbit-3,hf_kbit-2,fp8,gptq,gptq-marlin,...]
                                 [--sequences 1,4,16,64,256] [--prompts 512,2048] [--tensor-parallel 2]
                                 [--json results.jsonl] [--plot serving.png] [--table]
    python benchmarks/serving.py --from results.jsonl [--plot serving.png] [--table]
    VLLM_CPU_KVCACHE_SPACE=1 python benchmarks/serving.py --folder /tmp/tiny --shape tiny --sequences 1,4 \\
        --prompts 32,64 --methods bf16,hf_kbit-4,gptq  # a rehearsal, where vLLM is one for CPUs

The methods:

- bf16: 16 bits,
- hf_kbit-4 and so on: ours, so many bits, quantized before,
- fp8: vLLM quantizes the 16-bit checkpoint while it loads it, activations at each step,
- gptq: 4 bits with a scale for each 128, by the kernel that vLLM chooses,
- gptq-marlin, gptq-machete, gptq-humming: the same checkpoint by a kernel that it is told to take.

Every layer of a checkpoint is the same layer of random weights, which each method rounds to nearest. Checkpoints stay
in --folder, where later runs find them. They are read once before, so that vLLM finds them in the page cache. Each
method has a process of its own, and a cache of its own for what vLLM compiles: every start compiles. What vLLM says
goes to METHOD.log in --folder. One that fails gets a line that says so, and the run goes on.

The kinds of lines, by ``what``; ``took_s`` is what measuring it took:

- start: seconds until ``LLM(...)`` returns, of which vLLM's log has the parts: reading the checkpoint, processing
  what it read too, then profiling, compiling and recording CUDA graphs; weights on each GPU; the KV cache that is left
  on each at vLLM's own limit of memory, and its tokens; the kernels of the linear layers,
- first token: milliseconds from handing over a prompt, none of which is cached, to its first token,
- decode: milliseconds from token to token, while all sequences decode after a prompt each, whose keys and values are
  there already. Where the KV cache has no room for all of them, ``fits`` is false, and nothing was measured,
- saturation: tokens a second in the end, of twice as many requests as there may be sequences at once, prefills
  included.

Ratios to bf16 are those to lines of this run, or else to lines of --json of the same day, GPUs and model. --plot needs
matplotlib; --table prints tables in Markdown.
"""

import argparse
import importlib.metadata
import itertools
import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from gemm import COLOURS
from load import SHAPES, load, make_checkpoint, repeat
from safetensors.torch import load_file, save_file
from timing import Report, gpu_and_command, markdown, read, run_and_plot

import hf_kbit
from hf_kbit.format import BITS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = 128  # columns that share a scale in GPTQ's checkpoint
FORCED = ("marlin", "machete", "humming")
METHODS = ["bf16", *(f"hf_kbit-{bits}" for bits in sorted(BITS, reverse=True)), "fp8", "gptq"]
METHODS += [f"gptq-{backend}" for backend in FORCED]
DEFAULT_METHODS = [method for method in METHODS if method != "hf_kbit-5"]
FIRST_TOKENS = 6
SETTLED, WINDOWS, STEPS = 4, 3, 20  # tokens of each sequence: before the clock runs, and then
NEW_TOKENS = 128
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that measures it, whose memory it then reads
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # nothing is sampled; and it is compiled where FlashInfer is
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # needs multicast between GPUs
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # for this file has asked for GPUs before vLLM is imported
    "HF_HUB_OFFLINE": "1",
}
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


# --- checkpoints ----------------------------------------------------------------------------------


def checkpoint_of(method: str) -> str:
    """The name of what it serves; several serve the same."""
    return "bf16" if method == "fp8" else method.partition("-")[0] if method.startswith("gptq") else method


def make(folder: str, shape: str, layers: int, tensor_parallel: int, name: str) -> Iterator[dict]:
    """Writes a checkpoint, if it is not there, and puts it into the page cache.

    Raises:
        RuntimeError: it has more bytes than the GPUs together or the disk have room for.
    """
    folder, start = Path(folder), time.perf_counter()
    path, dense = folder / f"{shape}-{layers}-{name}", folder / f"{shape}-one-bf16"
    if not (path / "config.json").exists():  # which is written last
        if not (dense / "config.json").exists():
            torch.manual_seed(0)
            make_checkpoint(shape, dense, DEVICE, num_hidden_layers=1, max_position_embeddings=8192)
        with tempfile.TemporaryDirectory(dir=folder) as quantized:
            one = dense if name == "bf16" else Path(quantized)
            if name == "gptq":
                make_gptq(dense, one)
            elif name != "bf16":
                make_kbit(dense, one, int(name.removeprefix("hf_kbit-")))
            check_room(one, layers, tensor_parallel)
            repeat(one, path, layers)
    buffer = bytearray(64 << 20)
    for file in path.glob("*.safetensors"):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass
    size = sum(file.stat().st_size for file in path.iterdir())
    yield {"path": str(path), "GB": size / 1e9, "seconds": time.perf_counter() - start}


def check_room(one: Path, layers: int, tensor_parallel: int) -> None:
    rooms = {"disk": shutil.disk_usage(one).free}
    if DEVICE == "cuda":
        rooms[f"memory of {tensor_parallel} GPU"] = torch.cuda.get_device_properties(0).total_memory * tensor_parallel
    tensors = itertools.chain.from_iterable(load_file(file).items() for file in one.glob("*.safetensors"))
    size = sum(tensor.nbytes * (layers if ".layers.0." in name else 1) for name, tensor in tensors)
    for room, free in rooms.items():
        if size > free:
            raise RuntimeError(f"weights: found {size / 1e9:.0f} GB, expected at most {free / 1e9:.0f} GB, the {room}")


def make_kbit(dense: Path, path: Path, bits: int) -> None:
    model, *_ = load(dense, DEVICE, quantization_config=hf_kbit.KbitConfig(bits=bits))
    model.save_pretrained(path)


def make_gptq(dense: Path, path: Path) -> None:
    """As GPTQ stores 4 bits, symmetric and without an order of activations; rounded to nearest."""
    tensors = {}
    for file in dense.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            layer = name.removesuffix(".weight")
            packed = gptq(tensor.to(DEVICE)) if layer.endswith("_proj") else {"weight": tensor}
            tensors |= {f"{layer}.{own}": value.cpu().contiguous() for own, value in packed.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    settings = {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "lm_head": False}
    config["quantization_config"] = {"quant_method": "gptq", **settings}
    (path / "config.json").write_text(json.dumps(config))


def gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a weight [N, K]: codes [K / 8, N], eight in an int32, and a scale for each ``GROUP`` of K, [K / GROUP, N]."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2, keepdim=True) / 7).half()
    codes = (groups / scales.float()).round().clamp(-8, 7).nan_to_num().flatten(1).T.int() + 8
    shifts = 4 * torch.arange(8, device=weight.device, dtype=torch.int32)
    return {
        "qweight": (codes.unflatten(0, (-1, 8)) << shifts[:, None]).sum(1, dtype=torch.int32),
        # The zero is 8 everywhere; the format stores one less.
        "qzeros": torch.full((groups.shape[1], len(weight) // 8), 0x77777777, dtype=torch.int32),
        "scales": scales.squeeze(2).T.contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }


# --- measuring, in a process of its own -----------------------------------------------------------


def serve(path: str, method: str, tensor_parallel: int, sequences: list[int], prompts: list[int]) -> Iterator[dict]:
    """All measurements of a method, one after the other."""
    then = time.perf_counter()
    from vllm import LLM

    imported = time.perf_counter()
    backend = method.partition("-")[2] if method.startswith("gptq-") else None
    options = {"quantization": "fp8"} if method == "fp8" else {"linear_backend": backend} if backend else {}
    llm = LLM(
        path,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(prompts) + NEW_TOKENS,
        max_num_seqs=max(sequences),
        enable_prefix_caching=True,
        enforce_eager=DEVICE == "cpu",
        tensor_parallel_size=tensor_parallel,
        **options,
    )
    ready = time.perf_counter()
    engine, cache = llm.llm_engine, llm.llm_engine.vllm_config.cache_config
    found = llm.collective_rpc(look_inside)[0]
    check(engine, method, backend, found["kernels"])
    kv_tokens = cache.num_gpu_blocks * cache.block_size
    yield {
        "what": "start",
        "seconds": ready - imported,
        "import_s": imported - then,
        "weights_GB": found["weights"] / 1e9,
        "kv_GB": found["kv"] / 1e9,
        "kv_tokens": kv_tokens,
        "memory_utilization": cache.gpu_memory_utilization,
        "kernels": ", ".join(found["kernels"]),
    }
    vocabulary = engine.model_config.get_vocab_size()

    def random_prompts(count: int, tokens: int) -> list[list[int]]:
        return torch.randint(vocabulary, (count, tokens)).tolist()

    torch.manual_seed(0)
    for tokens in prompts:
        ms = first_token_ms(engine, random_prompts(FIRST_TOKENS, tokens))
        yield {"what": "first token", "prompt": tokens, "ms": ms}
    kept = random_prompts(max(sequences), max(prompts))  # the short ones are the beginnings of the long ones
    for tokens, count in itertools.product(sorted(prompts), sorted(sequences)):
        cell = {"what": "decode", "prompt": tokens, "sequences": count}
        # Each sequence fills up its last block.
        room = count * (tokens + SETTLED + WINDOWS * STEPS + cache.block_size) <= kv_tokens
        measured = {"ms": step_ms(engine, [prompt[:tokens] for prompt in kept[:count]])} if room else {}
        yield {**cell, "fits": room, **measured}
    requests = random_prompts(2 * max(sequences), min(prompts))
    yield {
        "what": "saturation",
        "prompt": min(prompts),
        "new_tokens": NEW_TOKENS,
        "requests": len(requests),
        "tokens_per_s": tokens_per_s(engine, requests),
    }


def look_inside(worker) -> dict:
    """What a process of vLLM holds: bytes of weights, bytes of keys and values, and the kernels of linear layers."""
    from vllm.model_executor.layers.linear import LinearBase

    runner = worker.model_runner
    methods = [layer.quant_method for layer in runner.get_model().modules() if isinstance(layer, LinearBase)]
    # Where kernels are chosen, the method has one: GPTQ as ``kernel``, FP8 as ``fp8_linear``.
    chosen = [getattr(own, "kernel", None) or getattr(own, "fp8_linear", None) or own for own in methods]
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner.kv_caches}
    return {
        "weights": getattr(runner, "model_memory_usage", 0),  # which vLLM measures, but not on a CPU
        "kv": sum(storages.values()),
        "kernels": sorted({type(own).__name__ for own in chosen}),
    }


def check(engine, method: str, backend: str | None, kernels: list[str]) -> None:
    """That the model is quantized as it should be, by the kernel asked for, and computes numbers.

    Raises:
        RuntimeError: it is or does not.
    """
    dense = any(name.startswith("Unquantized") for name in kernels)
    forced = backend is None or all(name.lower().startswith(backend) for name in kernels)
    if dense != (method == "bf16") or not forced:
        raise RuntimeError(f"kernels of linear layers: found {', '.join(kernels)}, expected those of {method}")
    add(engine, [list(range(5, 37))], 2, logprobs=1)
    steps = [output.outputs[0].logprobs for output in run_out(engine)]
    found = [entry.logprob for step in itertools.chain(*steps) for entry in step.values()]
    if len(found) < 2 or not all(map(math.isfinite, found)):
        raise RuntimeError(f"log-probabilities: found {found}, expected finite numbers")


REQUESTS = map(str, itertools.count())


def add(engine, prompts: list[list[int]], tokens: int, **settings) -> list[str]:
    """Requests of so many tokens after each prompt, by their names."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.DELTA  # what a step gives are its tokens alone
    settings |= {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, "output_kind": kind}
    names = list(itertools.islice(REQUESTS, len(prompts)))
    for name, prompt in zip(names, prompts, strict=True):
        engine.add_request(name, {"type": "token", "prompt_token_ids": prompt}, SamplingParams(**settings))
    return names


def step(engine) -> Counter:
    """How many tokens each request has got: none after a call that only hands work to the GPU, while that of an
    earlier call still runs. So times are those of many steps, over the tokens that came."""
    return Counter({output.request_id: len(output.outputs[0].token_ids) for output in engine.step()})


def run_out(engine) -> list:
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs


def first_token_ms(engine, prompts: list[list[int]]) -> float:
    """The median of all but the first, which warms up."""
    times = []
    for prompt in prompts:
        start = time.perf_counter()
        add(engine, [prompt], 1)
        run_out(engine)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * 1e3


def step_ms(engine, prompts: list[list[int]]) -> float:
    """Milliseconds of a step in which every sequence gets a token: the median of several windows of many steps."""
    add(engine, prompts, 1)  # into the cache, so that all sequences begin together
    run_out(engine)
    names, got, times = add(engine, prompts, NEW_TOKENS), Counter(), []
    while len(got) < len(names) or min(got.values()) < SETTLED:
        got += step(engine)
    for _ in range(WINDOWS):
        start, tokens = time.perf_counter(), 0
        while tokens < STEPS * len(names):
            tokens += step(engine).total()
        times.append((time.perf_counter() - start) * len(names) / tokens)
    if (running := engine.get_num_unfinished_requests()) != len(names):
        raise RuntimeError(f"sequences: found {running} at the end of decoding, expected {len(names)}")
    engine.abort_request(names)
    return statistics.median(times) * 1e3


def tokens_per_s(engine, prompts: list[list[int]]) -> float:
    start = time.perf_counter()
    add(engine, prompts, NEW_TOKENS)
    tokens = sum(len(output.outputs[0].token_ids) for output in run_out(engine))
    return tokens / (time.perf_counter() - start)


# --- processes ------------------------------------------------------------------------------------


def child(function: str, arguments: dict) -> None:
    """Prints what the function yields as JSON; of an error, a line that tells it."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    last = time.perf_counter()
    try:
        for line in globals()[function](**arguments):
            now = time.perf_counter()
            print(json.dumps({**line, "took_s": now - last}), flush=True)
            last = now
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        failed = {"what": "failed", "error": f"{type(error).__name__}: {reason}"}
        print(json.dumps({**failed, "took_s": time.perf_counter() - last}), flush=True)
        raise


def in_a_process(function: str, log: Path, **arguments) -> Iterator[dict]:
    """The lines of ``child``, as they come: of an own process, for what another leaves on the GPU would be missing."""
    code = "import json, sys, serving; serving.child(sys.argv[1], json.loads(sys.argv[2]))"
    command = [sys.executable, "-c", code, function, json.dumps(arguments)]
    with tempfile.TemporaryDirectory() as cache, log.open("w") as errors:
        path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **ENVIRONMENT, **dict.fromkeys(CACHES, cache), "PYTHONPATH": path}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
        last = {}
        for line in process.stdout:
            if line.startswith("{"):  # other libraries print too
                last = json.loads(line)
                yield last
        if process.wait() and last.get("what") != "failed":
            yield {"what": "failed", "error": f"exit code {process.returncode}, see {log}"}


PARTS = {
    "read_s": r"Loading weights took ([\d.]+) seconds",
    "load_s": r"Model loading took .* and ([\d.]+) seconds",
    "compile_s": r"init engine .* took .*\(compilation: ([\d.]+) s",
    "capture_s": r"Graph capturing finished in ([\d.]+) secs",
    "engine_s": r"init engine .* took ([\d.]+) s",
}


def parts(log: str) -> dict[str, float]:
    """What vLLM says that the parts of a start took."""
    found = {part: re.search(pattern, log) for part, pattern in PARTS.items()}
    return {part: float(match[1]) for part, match in found.items() if match}


# --- the run --------------------------------------------------------------------------------------

WHERE = ("what", "prompt", "sequences")  # what a line is of
COMPARED = ("seconds", "weights_GB", "kv_GB", "kv_tokens", "ms", "tokens_per_s")
MODEL = ("shape", "layers", "tensor_parallel", "gpu")


def cell(line: dict) -> tuple:
    return tuple(line.get(key) for key in WHERE)


def dense_lines(file: str | None, context: dict) -> dict[tuple, dict]:
    """Those of bf16 in a file, by cells, which can be compared with."""
    if not file or not Path(file).exists():
        return {}
    same = [line for line in read(file) if all(line.get(key) == context[key] for key in ("date", *MODEL))]
    return {cell(line): line for line in same if line["method"] == "bf16"}


def run(arguments) -> list[dict]:
    shape, layers = arguments.shape, arguments.model_layers or SHAPES[arguments.shape]["num_hidden_layers"]
    context = {
        **(gpu_and_command() if DEVICE == "cuda" else {"gpu": "none"}),
        "vllm": vllm_version(),
        "transformers": transformers.__version__,
        "shape": shape,
        "layers": layers,
        "tensor_parallel": arguments.tensor_parallel,
    }
    report = Report(arguments.json, **context)
    dense, lines = dense_lines(arguments.json, report.context), []
    arguments.folder.mkdir(parents=True, exist_ok=True)

    def emit(method: str, measured: dict) -> None:
        if method == "bf16":
            dense[cell(measured)] = measured
        first = dense.get(cell(measured), {})
        compared = [key for key in COMPARED if measured.get(key) and first.get(key)]
        ratios = {f"{key}_over_bf16": measured[key] / first[key] for key in compared}
        entry = {"method": method, **measured, **ratios}
        report.line(**entry)
        lines.append({**report.context, **entry})

    for method in arguments.methods:
        log = arguments.folder / f"{method}.log"
        wanted = {key: context[key] for key in ("shape", "layers", "tensor_parallel")}
        (made,) = in_a_process("make", log, folder=str(arguments.folder), name=checkpoint_of(method), **wanted)
        if made.get("what") == "failed":
            emit(method, made)
            continue
        print(f"{made['path']}: {made['GB']:.1f} GB, written or read in {made['seconds']:.0f} s", flush=True)
        settings = {key: getattr(arguments, key) for key in ("tensor_parallel", "sequences", "prompts")}
        for line in in_a_process("serve", log, path=made["path"], method=method, **settings):
            emit(method, {**line, **(parts(log.read_text()) if line["what"] == "start" else {})})
    return lines


def vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return "none"  # each method says so


# --- the plot -------------------------------------------------------------------------------------

OTHERS = {
    "bf16": {"color": "#555555"},
    "fp8": {"color": "#e6ab02"},
    "gptq": {"color": "#66a61e"},
    "gptq-marlin": {"color": "#1f78b4", "linestyle": "--"},
    "gptq-machete": {"color": "#a6761d", "linestyle": "--"},
    "gptq-humming": {"color": "#e31a1c", "linestyle": "--"},
}


def style(method: str) -> dict:
    own = {"color": COLOURS[int(method[-1])]} if method.startswith("hf_kbit") else OTHERS[method]
    return {"label": method.replace("-", ", ") + " bits" * method.startswith("hf_kbit"), **own}


def latest(lines: list[dict]) -> dict[tuple, dict[str, dict]]:
    """By cells and methods; where a file holds several runs, the last one counts."""
    cells = {}
    for line in lines:
        cells.setdefault(cell(line), {})[line["method"]] = line
    return cells


def title(line: dict) -> str:
    gpus = f"{line['tensor_parallel']} x " if line["tensor_parallel"] > 1 else ""
    return f"{line['shape']}, {line['layers']} layers, {gpus}{line['gpu']}"


def plot(lines, file: str) -> None:
    """Of the model measured last, a panel of decoding for each length of prompts, and one of saturation."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    last = lines[-1]
    own = [line for line in lines if all(line[key] == last[key] for key in MODEL)]
    lengths = sorted({line["prompt"] for line in own if line["what"] == "decode"})
    figure, axes = plt.subplots(1, len(lengths) + 1, figsize=(6 * len(lengths) + 6, 5), dpi=100, squeeze=False)
    for axis, length in zip(axes[0], lengths, strict=False):
        of_length = [line for line in own if line["what"] == "decode" and line["prompt"] == length]
        curves(axis, of_length)
        axis.set(title=f"Decode after {length} tokens", xlabel="sequences", ylabel="ms per token")
    done = {line["method"]: line["tokens_per_s"] for line in own if line["what"] == "saturation"}
    for place, (method, tokens) in enumerate(done.items()):
        drawn = axes[0, -1].bar(place, tokens, color=style(method)["color"])
        axes[0, -1].bar_label(drawn, fmt="%.0f", fontsize=8)
    axes[0, -1].set_xticks(range(len(done)), [style(method)["label"] for method in done], rotation=30, ha="right")
    axes[0, -1].set(title="Saturation", ylabel="tokens per second")
    axes[0, -1].grid(axis="y", alpha=0.3)
    figure.suptitle(f"{title(last)}, vLLM {last['vllm']}, {last['date']}")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(file)


def curves(axis, lines) -> None:
    methods = {}
    for line in lines:
        if line["fits"]:
            methods.setdefault(line["method"], {})[line["sequences"]] = line["ms"]
    for method, ms in methods.items():
        axis.plot(sorted(ms), [ms[count] for count in sorted(ms)], marker="o", markersize=4, **style(method))
    counts = sorted({line["sequences"] for line in lines})
    axis.set_xscale("log", base=4)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xticks(counts, counts)
    axis.grid(alpha=0.3)


# --- the tables -----------------------------------------------------------------------------------

ROWS = {  # of a kind of line: a label for each field
    "start": {
        "seconds": "start, s",
        "weights_GB": "weights, GB",
        "kv_GB": "KV cache, GB",
        "kv_tokens": "its tokens, thousands",
    },
    "first token": {"ms": "first token, prompt {prompt}, ms"},
    "decode": {"ms": "decode, prompt {prompt}, {sequences} sequences, ms a token"},
    "saturation": {"tokens_per_s": "saturation, tokens a second"},
}
MORE_IS_BETTER = ("kv_GB", "kv_tokens", "tokens_per_s")


def four_bits(method: str) -> bool:
    return method == "hf_kbit-4" or method.startswith("gptq")


def tables(lines: list[dict]) -> str:
    """In Markdown, one for each model: a column for each method, with ratios to bf16 in brackets, the best method of 4
    bits in bold; below it the kernels, and what failed."""
    models = {}
    for line in lines:
        models.setdefault(title(line), []).append(line)
    return "\n".join(f"{name}\n\n{table(own)}" for name, own in models.items())


def table(lines: list[dict]) -> str:
    cells = latest(lines)
    methods = list(dict.fromkeys(line["method"] for line in lines if line["what"] != "failed"))
    rows = []
    for own in cells.values():
        for field, label in ROWS.get(next(iter(own.values()))["what"], {}).items():
            best = best_of(own, field)
            label = label.format(**next(iter(own.values())))
            row = [shown(own.get(method), field, method == best) for method in methods]
            if any(row):
                rows.append([label, *row])
    kernels = {method: line["kernels"] for own in cells.values() for method, line in own.items() if "kernels" in line}
    notes = [f"- {method}: {names}" for method, names in kernels.items()]
    last = {line["method"]: line for line in lines}
    notes += [f"- {method} failed: {line['error']}" for method, line in last.items() if "error" in line]
    return markdown(["", *methods], rows) + "\n" + "\n".join([*notes, ""])


def best_of(own: dict[str, dict], field: str) -> str | None:
    values = {method: line[field] for method, line in own.items() if four_bits(method) and field in line}
    choose = max if field in MORE_IS_BETTER else min
    return choose(values, key=values.get) if len(values) > 1 else None


def shown(line: dict | None, field: str, best: bool) -> str:
    if line is None or field not in line:
        return "no room" if line and not line.get("fits", True) else ""
    number = line[field] / 1000 if field == "kv_tokens" else line[field]
    value = f"{number:#.3g}" if number < 99.5 else f"{number:.0f}"
    ratio = line.get(f"{field}_over_bf16")
    value += f" ({ratio:.2f})" if ratio and line["method"] != "bf16" else ""
    return f"**{value}**" if best else value


# --- command line ---------------------------------------------------------------------------------


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def methods(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(METHODS):
        raise argparse.ArgumentTypeError(f"found {', '.join(unknown)}, expected some of {', '.join(METHODS)}")
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="of the checkpoints, which stay there")
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--model-layers", type=int, help="fewer are quicker; default: those of the shape")
    parser.add_argument("--methods", type=methods, default=DEFAULT_METHODS, help=f"some of {', '.join(METHODS)}")
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="tokens")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share a model")
    parser.add_argument("--json", help="file to append a JSON line for each measurement to")
    parser.add_argument("--plot", help="PNG to draw")
    parser.add_argument("--from", dest="source", help="measure nothing; take this file of JSON lines")
    parser.add_argument("--table", action="store_true", help="print tables at the end")
    arguments = parser.parse_args()
    if not arguments.source and not arguments.folder:
        parser.error("expected --folder, to measure, or --from, to look at what was measured")
    lines = run_and_plot(arguments, run, plot)
    if arguments.table:
        print(tables(lines))


if __name__ == "__main__":
    main()
