"""Times exllamav3's own generator on a model of Llama-3-8B's shape that hf_kbit has packed and exported.

    PYTHONPATH=benchmarks python docs/lab/sketches/exllamav3_generator.py [--bits 3] [--model-layers 32] [--json FILE]

``docs/lab/2026-11-29-trellis-gpu.md`` has the figures. It needs exllamav3 and one CUDA GPU. All layers are one layer
of random weights, as ``benchmarks/model.py --trellis`` has them; the head and the table are in 16 bits, as there. A
line for each number of sequences: milliseconds from token to token once all decode, after prompts of 128 tokens; and
for each prompt: milliseconds to its first token. Tokens are made up, so the tokenizer has no more than names for them.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import exllamav3
import torch
from exllamav3.version import __version__
from model import pack_one_layer
from timing import Report, gpu_and_command
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import hf_kbit
from hf_kbit.integrations.transformers.exl3_export import export_exl3

SHAPE, WORDS = "llama-3-8b", 128256
PROMPT, NEW_TOKENS, SETTLED = 128, 150, 20


def write_tokenizer(folder: Path) -> None:
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"<{number}>" for number in range(WORDS))][:WORDS]
    tokenizer = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def load(folder: Path) -> exllamav3.Generator:
    config = exllamav3.Config.from_directory(str(folder))
    model = exllamav3.Model.from_config(config)
    cache = exllamav3.Cache(model, max_num_tokens=16 * 4096)
    model.load(progressbar=False)
    return exllamav3.Generator(model, cache, exllamav3.Tokenizer.from_config(config), max_batch_size=16)


def run(generator: exllamav3.Generator, sequences: int, prompt: int, new_tokens: int) -> list[tuple[float, int]]:
    """After each step: seconds since the first was asked for, and how many sequences got a token."""
    for _ in range(sequences):
        ids = torch.randint(300, WORDS, (1, prompt))
        job = exllamav3.Job(ids, max_new_tokens=new_tokens, sampler=exllamav3.GreedySampler(), stop_conditions=[])
        generator.enqueue(job)
    steps, start = [], time.perf_counter()
    while generator.num_remaining_jobs():
        told = generator.iterate()
        torch.cuda.synchronize()
        steps.append((time.perf_counter() - start, sum(each.get("stage") == "streaming" for each in told)))
    return steps


def decode_ms(generator: exllamav3.Generator, sequences: int) -> float:
    steps = run(generator, sequences, PROMPT, NEW_TOKENS)
    pairs = itertools.pairwise(steps)
    found = [now - before for (before, some), (now, then) in pairs if some == then == sequences]
    return statistics.median(found[SETTLED:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=3)
    parser.add_argument("--model-layers", type=int, default=32)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    about = {"exllamav3": __version__, "shape": SHAPE, "layers": arguments.model_layers}
    report = Report(arguments.json, **gpu_and_command(), **about, bits=arguments.bits)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = hf_kbit.KbitConfig(bits=arguments.bits, codebook="trellis")
        pack_one_layer(SHAPE, arguments.model_layers, config, folder)
        export_exl3(folder / "all", folder / "exl3")
        write_tokenizer(folder / "exl3")
        generator = load(folder / "exl3")
        for sequences in (1, 16):
            decode_ms(generator, sequences)
            report.line(what="decode", sequences=sequences, ms=decode_ms(generator, sequences))
        for prompt in (512, 2048):
            times = [run(generator, 1, prompt, 1)[-1][0] for _ in range(6)]
            report.line(what="prompt", tokens=prompt, ms=statistics.median(times[1:]) * 1e3)


if __name__ == "__main__":
    main()
