"""Trains the language model that ``measure`` quantizes: a Llama on text of this machine, in some minutes on one GPU.

    python -m benchmarks.quality.train --folder /tmp/quality [--layers 6] [--tokens 400000000] [...]

Every field of ``Recipe`` is an option. The folder gets a float16 checkpoint with a BPE tokenizer of its own, as
``from_pretrained`` reads them, ``held_out.safetensors`` (int32 ``tokens`` [n]: pieces of ``context`` tokens that lie
evenly in the held-out text) and ``record.json``: the recipe, versions, sources and hash of the text, and the losses.

The text is collected as ``data`` says. Documents are joined, each with an end, and cut into sequences, which are
shuffled. AdamW with a warm-up and a linear decay to zero, bfloat16 autocast over float32 weights; layers are compiled
on a GPU.
"""

import argparse
import json
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.quality.data import Text, collect

END = "<|end|>"
SAMPLE = 64 << 20  # characters that the tokenizer is trained on
HELD_OUT_TOKENS = 1 << 18
DOCUMENTS = 4096  # tokenized at a time
LOG_STEPS = 50


@dataclass(frozen=True)
class Recipe:
    vocabulary: int = 16384
    hidden: int = 768
    intermediate: int = 2048
    layers: int = 6
    heads: int = 12
    kv_heads: int = 4
    context: int = 1024
    sequences: int = 64  # of a step
    tokens: int = 400_000_000  # to train on, over again where there are fewer
    rate: float = 1.5e-3
    warm_up: int = 100  # steps
    decay: float = 0.1  # of matrices
    seed: int = 0

    @property
    def steps(self) -> int:
        return self.tokens // (self.sequences * self.context)


# --- text to tokens -------------------------------------------------------------------------------


def train_tokenizer(documents: list[str], vocabulary: int) -> tokenizers.Tokenizer:
    """A byte-level BPE, trained on documents spread evenly, as many as ``SAMPLE`` characters need."""
    every = max(1, round(sum(map(len, documents)) / SAMPLE))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents[::every], trainer)
    return tokenizer


def tokenize(tokenizer: tokenizers.Tokenizer, documents: list[str]) -> torch.Tensor:
    """int32 [n]: all documents, each followed by ``END``."""
    parts, end = [], tokenizer.token_to_id(END)
    for start in range(0, len(documents), DOCUMENTS):
        for encoding in tokenizer.encode_batch_fast(documents[start : start + DOCUMENTS]):
            parts.append(torch.tensor([*encoding.ids, end], dtype=torch.int32))
    return torch.cat(parts)


def spread(tokens: torch.Tensor, length: int, most: int) -> torch.Tensor:
    """At most ``most`` of the tokens, in pieces of ``length`` that lie evenly in them."""
    pieces = tokens[: len(tokens) // length * length].view(-1, length)
    places = torch.linspace(0, len(pieces) - 1, min(len(pieces), most // length)).long()
    return pieces[places].flatten()


def batches(tokens: torch.Tensor, recipe: Recipe) -> Iterator[torch.Tensor]:
    """int64 [sequences, context], without end: all sequences once in a random order, then again in another one."""
    sequences = tokens[: len(tokens) // recipe.context * recipe.context].view(-1, recipe.context)
    generator = torch.Generator().manual_seed(recipe.seed)
    if len(sequences) < recipe.sequences:
        raise ValueError(f"text: found {len(sequences)} sequences, expected {recipe.sequences} or more")
    while True:
        order = torch.randperm(len(sequences), generator=generator).to(tokens.device)
        for places in order.split(recipe.sequences):
            if len(places) == recipe.sequences:
                yield sequences[places].long()


# --- training -------------------------------------------------------------------------------------


def make_model(recipe: Recipe, end: int) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=recipe.vocabulary,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.context,
        bos_token_id=None,
        eos_token_id=end,
    )
    return LlamaForCausalLM(config)


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def optimizer_of(model, recipe: Recipe):
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95), fused=True)

    def rate(step: int) -> float:
        return min((step + 1) / recipe.warm_up, (recipe.steps - step) / max(1, recipe.steps - recipe.warm_up))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def fit(model, tokens: torch.Tensor, recipe: Recipe) -> list[tuple[int, float]]:
    """Trains in place; returns the loss of every ``LOG_STEPS``-th step and of the last."""
    device = model.device.type
    loss_of = next_token_loss
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
        loss_of = torch.compile(next_token_loss)
        # Each by itself: inside one graph with the mask, torch before 2.14 has no causal flash attention.
        for layer in model.model.layers:
            layer.compile()
    optimizer, schedule = optimizer_of(model, recipe)
    losses, start = [], time.perf_counter()
    for step, ids in zip(range(recipe.steps), batches(tokens, recipe), strict=False):
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(model(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % LOG_STEPS == 0 or step == recipe.steps - 1:
            losses.append((step, loss.item()))
            print(
                f"step {step:5} of {recipe.steps}  loss {loss.item():.4f}  {time.perf_counter() - start:.0f} s",
                flush=True,
            )
    return losses


def train(folder: Path, text: Text, recipe: Recipe, device: str) -> dict:
    """Trains on ``text`` and fills ``folder``; returns what is in its ``record.json``."""
    start = time.perf_counter()
    tokenizer = train_tokenizer(text.train, recipe.vocabulary)
    tokens, held_out = (tokenize(tokenizer, documents) for documents in (text.train, text.held_out))
    print(
        f"{len(tokens):,} tokens to train on, {len(held_out):,} held out, {time.perf_counter() - start:.0f} s",
        flush=True,
    )

    model = make_model(recipe, tokenizer.token_to_id(END)).to(device)
    trained = time.perf_counter()
    losses = fit(model, tokens.to(device), recipe)
    seconds = time.perf_counter() - trained
    record = {
        "model": "trained",
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
        **asdict(recipe),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "text_sha256": text.sha256,
        "text_bytes": text.sources,
        "text_tokens": len(tokens),
        "epochs": recipe.steps * recipe.sequences * recipe.context / len(tokens),
        "seconds": seconds,
        "losses": losses,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    model.half().save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    save_file({"tokens": spread(held_out, recipe.context, HELD_OUT_TOKENS)}, folder / "held_out.safetensors")
    (folder / "record.json").write_text(json.dumps(record))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    arguments = vars(parser.parse_args())
    folder, device = arguments.pop("folder"), arguments.pop("device")
    transformers.logging.set_verbosity_error()
    start = time.perf_counter()
    text = collect()
    print(f"text collected in {time.perf_counter() - start:.0f} s, SHA-256 {text.sha256}", flush=True)
    record = train(folder, text, Recipe(**arguments), device)
    print(
        f"{record['parameters'] / 1e6:.1f}M parameters, {record['epochs']:.2f} epochs, {record['seconds']:.0f} s of "
        f"training, {time.perf_counter() - start:.0f} s in all; in {folder}"
    )


if __name__ == "__main__":
    main()
