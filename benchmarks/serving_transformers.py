"""Times ``transformers serve`` on one CUDA GPU: a model of a known shape in 16 bits and quantized.

    python benchmarks/serving_transformers.py [--shape llama-3-8b] [--model-layers 8] [--bits 4] [--clients 1,8,32]
                                              [--seconds 10] [--json results.jsonl] [--table]
    python benchmarks/serving_transformers.py --from results.jsonl --table

Weights are random. The server is started as a user would, ``hf-kbit run transformers serve FOLDER``, with and without
``--continuous-batching``; without it answers are made one after another. So many clients as ``--clients`` says stream
completions of ``PROMPT`` random tokens, ``NEW_TOKENS`` greedy tokens each, one after another, until ``--seconds`` are
over. A line has tokens a second of all clients together, from the first request to the end of the last. It has the
milliseconds from a request to the first text of its answer: their median and their 95th percentile, which 95% of them
do not exceed. --table prints a table in Markdown for docs/lab.

It needs ``transformers[serving]``.
"""

import argparse
import http.client
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import transformers
from load import SHAPES, make_checkpoint, report_of_model
from timing import markdown, numbers, parse, read
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import hf_kbit

PROMPT, NEW_TOKENS = 128, 64
START = 300  # seconds within which a server must be ready
WAYS = {"one after another": [], "continuous batching": ["--continuous-batching"]}


# --- the models -----------------------------------------------------------------------------------


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Token n is the word ``n``."""
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(size)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make(shape: str, layers: int, widths: list[int], folder: Path, device: str) -> dict[str, tuple[int, Path]]:
    """``{name: (bits, folder)}`` of the model in bfloat16 and in each width."""
    # Without an end of sequence every answer has the same length.
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    make_checkpoint(shape, folder / "bf16", device, num_hidden_layers=layers, **ends)
    made = {"bf16": (16, folder / "bf16")}
    for bits in widths:
        config = hf_kbit.KbitConfig(bits=bits)
        model = AutoModelForCausalLM.from_pretrained(
            folder / "bf16", quantization_config=config, device_map=device, dtype=torch.bfloat16
        )
        made[f"hf_kbit {bits}"] = bits, folder / f"{bits}"
        model.save_pretrained(folder / f"{bits}")
    for _, place in made.values():
        make_tokenizer(model.config.vocab_size).save_pretrained(place)
    return made


# --- the server -----------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def served(folder: Path, device: str, options: list[str]):
    """The port of a server that is ready."""
    port = free_port()
    command = [sys.executable, "-m", "hf_kbit.cli", "run", "transformers", "serve", str(folder), "--device", device]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", *options]
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        end = time.monotonic() + START
        while not healthy(port):
            if server.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {(folder / 'log').read_text()[-4000:]}")
            time.sleep(0.5)
        yield port
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def healthy(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


# --- measuring ------------------------------------------------------------------------------------


def ask(port: int, folder: Path, choose: random.Random, vocab_size: int) -> tuple[float, int]:
    """Seconds to the first token of an answer, and its tokens."""
    prompt = " ".join(str(choose.randrange(vocab_size)) for _ in range(PROMPT))
    body = {"model": str(folder), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    start, first, tokens = time.perf_counter(), None, 0
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line.removeprefix(b"data: "))
        if "error" in chunk:
            raise RuntimeError(f"the server says {chunk['error']}")
        if first is None and chunk["choices"][0]["text"]:
            first = time.perf_counter() - start
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
    connection.close()
    if first is None or tokens != NEW_TOKENS:
        raise RuntimeError(f"an answer of {tokens} tokens, expected {NEW_TOKENS}")
    return first, tokens


def measure(port: int, folder: Path, clients: int, seconds: float, vocab_size: int) -> dict[str, float]:
    begin = time.perf_counter()

    def client(seed: int) -> list[tuple[float, int]]:
        choose, found = random.Random(seed), []
        while not found or time.perf_counter() < begin + seconds:
            found.append(ask(port, folder, choose, vocab_size))
        return found

    with ThreadPoolExecutor(clients) as pool:
        answers = [answer for found in pool.map(client, range(clients)) for answer in found]
    took = time.perf_counter() - begin
    firsts = sorted(first for first, _ in answers)
    return {
        "tokens_per_s": sum(tokens for _, tokens in answers) / took,
        "first_ms": statistics.median(firsts) * 1e3,
        "first_p95_ms": firsts[math.ceil(19 * len(firsts) / 20) - 1] * 1e3,
        "answers": len(answers),
    }


# --- the run --------------------------------------------------------------------------------------


def run(arguments) -> list[dict]:
    report, lines = report_of_model(arguments, prompt=PROMPT, new_tokens=NEW_TOKENS), []
    shape, layers = report.context["shape"], report.context["layers"]
    with tempfile.TemporaryDirectory() as folder:
        made = make(shape, layers, arguments.bits, Path(folder), arguments.device)
        torch.cuda.empty_cache()
        for way, options in WAYS.items():
            for name, (bits, place) in made.items():
                vocab_size = transformers.AutoConfig.from_pretrained(place).vocab_size
                with served(place, arguments.device, [*options, *arguments.option]) as port:
                    # Kernels are loaded, caches made.
                    measure(port, place, min(4, max(arguments.clients)), 0, vocab_size)
                    for clients in arguments.clients:
                        measured = measure(port, place, clients, arguments.seconds, vocab_size)
                        entry = {"name": name.split()[0], "bits": bits, "mode": way, "clients": clients, **measured}
                        report.line(**entry)
                        lines.append({**report.context, **entry})
    return lines


def table(lines: list[dict]) -> str:
    """In Markdown: a row for each way and number of clients, two columns for each model."""
    cells, names = {}, {}
    for line in lines:  # where a file holds several runs, the last one counts
        name = names[line["name"], line["bits"]] = f"{line['bits']} bits"
        row = cells.setdefault((line["mode"], line["clients"]), {})
        row[name] = f"{line['tokens_per_s']:.0f}", f"{line['first_ms']:.0f} ({line['first_p95_ms']:.0f})"
    head = [f"{name}, {what}" for name in names.values() for what in ("tokens/s", "ms to the first token (95%)")]
    rows = [
        [f"{mode}, {clients} client{'s' * (clients > 1)}", *(c for n in names.values() for c in row.get(n, ("", "")))]
        for (mode, clients), row in cells.items()
    ]
    return markdown(["", *head], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="llama-3-8b")
    parser.add_argument("--model-layers", type=int, default=8, help="0 for those of the shape; default %(default)s")
    parser.add_argument("--bits", type=numbers, default=[4])
    parser.add_argument("--clients", type=numbers, default=[1, 8, 32])
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement; default %(default)s")
    parser.add_argument(
        "--option", action="append", default=[], help="another one of the server, as --option=--compile"
    )
    parser.add_argument("--table", action="store_true", help="print a table at the end")
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)  # of tests
    arguments = parse(parser, {}, uses=("table",))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    lines = read(arguments.source) if arguments.source else run(arguments)
    if arguments.table:
        print(table(lines))


if __name__ == "__main__":
    main()
