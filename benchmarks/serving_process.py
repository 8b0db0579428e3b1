"""What ``serving.py`` does in processes of its own: it makes a checkpoint, or measures vLLM on one."""

import itertools
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from load import load, make_checkpoint, repeat
from safetensors.torch import load_file, save_file

import hf_kbit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GROUP = 128  # columns that share a scale in GPTQ's checkpoint
FIRST_TOKENS = 6
SETTLED, WINDOWS, STEPS = 4, 3, 20  # tokens of each sequence: before the clock runs, and then
NEW_TOKENS = 128


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
    os._exit(0)  # all is measured: threads that vLLM leaves may crash while Python ends


# --- checkpoints ----------------------------------------------------------------------------------


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
                _, bits, *kind = name.split("-")
                make_kbit(dense, one, bits=int(bits), **({"codebook": "trellis"} if kind else {}))
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


def make_kbit(dense: Path, path: Path, **config) -> None:
    model, *_ = load(dense, DEVICE, quantization_config=hf_kbit.KbitConfig(**config))
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


# --- measuring -----------------------------------------------------------


def serve(path: str, method: str, tensor_parallel: int, sequences: list[int], prompts: list[int]) -> Iterator[dict]:
    """All measurements of a method, one after the other."""
    then = time.perf_counter()
    from vllm import LLM

    imported = time.perf_counter()
    backend = method.partition("-")[2] if method.startswith("gptq-") else None
    options = {"quantization": "fp8"} if method == "fp8" else {"linear_backend": backend} if backend else {}
    options |= {"hf_overrides": {"kbit_inputs": "int8"}} if method.endswith("-int8") else {}
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
    """What a process of vLLM holds: bytes of weights, bytes of keys and values, and the kernels of linear layers and
    of experts, but for those of routers, which stay in 16 bits."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    runner = worker.model_runner
    layers = [
        layer
        for name, layer in runner.get_model().named_modules()
        if isinstance(layer, (LinearBase, RoutedExperts)) and not name.endswith(".gate")
    ]
    methods = [layer.quant_method for layer in layers]
    # Where kernels are chosen, the method has one: GPTQ as ``kernel``, FP8 as ``fp8_linear``.
    chosen = [getattr(own, "kernel", None) or getattr(own, "fp8_linear", None) or own for own in methods]
    names = {type(own).__name__ + " of int8" * bool(getattr(own, "inputs", None)) for own in chosen}
    storages = {cache.untyped_storage().data_ptr(): cache.untyped_storage().nbytes() for cache in runner.kv_caches}
    return {
        "weights": getattr(runner, "model_memory_usage", 0),  # which vLLM measures, but not on a CPU
        "kv": sum(storages.values()),
        "kernels": sorted(names),
    }


def check(engine, method: str, backend: str | None, kernels: list[str]) -> None:
    """That the model is quantized as it should be, by the kernel asked for, and computes numbers.

    Raises:
        RuntimeError: it is or does not.
    """
    dense = any(name.startswith("Unquantized") for name in kernels)
    forced = backend is None or all(name.lower().startswith(backend) for name in kernels)
    forced = forced and method.endswith("-int8") == any(name.endswith(" of int8") for name in kernels)
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
