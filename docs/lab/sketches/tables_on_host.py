"""Gemma 3n E4B's shape with random weights: GPU memory, ms a token and a prompt, with its tables on the GPU or not.

    python docs/lab/sketches/tables_on_host.py FOLDER results.jsonl

Writes the 16-bit model to FOLDER, 14 GB, where it is not there yet. Tokens are timed by `generate`, uncompiled.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Gemma3nForCausalLM, Gemma3nTextConfig

from hf_kbit import KbitConfig

WAYS = {
    "16 bits": {},
    "4 bits": {"bits": 4},
    "4 bits, tables on the host": {"bits": 4, "embedding_device": "cpu"},
    "4 bits, tables in 4 bits": {"bits": 4, "embedding_bits": 4},
    "4 bits, tables in 4 bits on the host": {"bits": 4, "embedding_bits": 4, "embedding_device": "cpu"},
}


def seconds(run) -> float:
    """The median of five, after one."""
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]


def measured(folder: Path, config: dict) -> dict:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    quantized = {"quantization_config": KbitConfig(**config)} if config else {}
    model = AutoModelForCausalLM.from_pretrained(folder, device_map={"": 0}, dtype=torch.bfloat16, **quantized)
    line = {
        "load_s": time.perf_counter() - start,
        "GB": (torch.cuda.memory_allocated() - before) / 1e9,
        "peak_load_GB": (torch.cuda.max_memory_allocated() - before) / 1e9,
    }
    ids = torch.randint(1000, 200_000, (1, 2048), device="cuda")

    def generate(count: int) -> float:
        how = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return seconds(lambda: model.generate(ids[:, :64], **how))

    with torch.no_grad():
        prompt = seconds(lambda: model(ids))
    return line | {"ms_a_token": (generate(24) - generate(8)) / 16 * 1e3, "prompt_2048_ms": prompt * 1e3}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if not folder.exists():
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("cuda"):
            Gemma3nForCausalLM(Gemma3nTextConfig()).save_pretrained(folder)
        torch.set_default_dtype(torch.float32)
    with open(sys.argv[2], "a") as file:
        for name, config in WAYS.items():
            print(json.dumps({"name": name, **measured(folder, config)}), file=file, flush=True)
