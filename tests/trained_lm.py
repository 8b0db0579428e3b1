"""A small language model with trained weights: random ones have no structure that quantization could lose.

A byte-level Llama of 1.3M parameters, trained on the source of the Python standard library, which every machine has.
The first call takes a minute or two on 2 CPU cores; the result is cached (``HF_KBIT_TEST_CACHE``, else
``~/.cache/hf_kbit/tests``), separately for each version of this file, of Python and of torch.
"""

import hashlib
import math
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from filelock import FileLock
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, LENGTH, STEPS, LEARNING_RATE = 8, 128, 900, 2e-3
HELD_OUT_BYTES = 1 << 16
# Tests, vendored copies, and two packages of prose and tables, which would drown the code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "pydoc_data", "encodings"}


def trained_lm() -> Path:
    """The directory of the trained model, float32, as ``save_pretrained`` wrote it."""
    key = f"{Path(__file__).read_text()} {platform.python_version()} {torch.__version__}"
    cache_dir = Path(os.environ.get("HF_KBIT_TEST_CACHE", Path.home() / ".cache" / "hf_kbit" / "tests"))
    folder = cache_dir / f"trained_lm-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = Path(tempfile.mkdtemp(dir=cache_dir))
            try:
                _train().save_pretrained(unfinished)
                os.replace(unfinished, folder)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    return folder


@cache
def _text() -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 bytes of the files to train on, and of the files held out: about one in 16, told by a hash of the name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = [], []
    for file in sorted(root.rglob("*.py")):
        name = file.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            parts[hashlib.sha256(name.as_posix().encode()).digest()[0] < 16].append(file.read_bytes())
    train, held = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return train, held


def held_out() -> torch.Tensor:
    """int64 [sequences, 128]: 64 KiB spread evenly over the held-out files."""
    text = _text()[1]
    sequences = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH).long()
    return sequences[torch.linspace(0, len(sequences) - 1, HELD_OUT_BYTES // LENGTH).long()]


def _loss(model, sequences: torch.Tensor) -> torch.Tensor:
    logits = model(sequences).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


def batches(number: int) -> Iterator[torch.Tensor]:
    """int64 [8, 128], so many times: pieces from anywhere in the files to train on, the same each time."""
    text, generator = _text()[0], torch.Generator().manual_seed(0)
    for _ in range(number):
        start = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        yield text[start + torch.arange(LENGTH)].long()


@torch.inference_mode()
def mean_loss(model, sequences: torch.Tensor) -> float:
    """Mean cross entropy of the next byte, in nats."""
    batches = sequences.to(model.device).split(32)
    return sum(_loss(model, batch).item() * len(batch) for batch in batches) / len(sequences)


def _train() -> LlamaForCausalLM:
    shape = {"hidden_size": 160, "intermediate_size": 424, "num_attention_heads": 5, "num_key_value_heads": 5}
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=256, num_hidden_layers=4, max_position_embeddings=512, **shape, **ids)
        )
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name]
    others = [p for name, p in model.named_parameters() if not (p.dim() == 2 and ".layers." in name)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    warmup = STEPS // 10

    def rate(step: int) -> float:
        return min((step + 1) / warmup, 0.51 + 0.49 * math.cos(math.pi * max(0, step - warmup) / (STEPS - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for sequences in batches(STEPS):
        _loss(model, sequences).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model.eval()
