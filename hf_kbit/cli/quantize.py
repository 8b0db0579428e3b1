"""``hf-kbit quantize``: quantizes a model and saves it."""

import re
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from huggingface_hub import snapshot_download, upload_folder
from transformers import AutoConfig, AutoTokenizer

import hf_kbit
from hf_kbit import mixing, widths
from hf_kbit.calibration.data import LENGTH, SEQUENCES, token_ids
from hf_kbit.calibration.layerwise import METHODS, load
from hf_kbit.calibration.writing import AMOUNTS as WRITTEN
from hf_kbit.calibration.writing import write
from hf_kbit.cli.device import resolve_device
from hf_kbit.cli.folder import claim
from hf_kbit.cli.model import Dtype, Revision, TrustRemoteCode, check_dtype
from hf_kbit.cli.output import line
from hf_kbit.cli.text import Column, Dataset, Split, Text, read_text
from hf_kbit.config import KbitConfig
from hf_kbit.format import BITS
from hf_kbit.integrations.transformers import mxfp4, selection

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MEASURED = (8, 256)  # sequences, and tokens of each, on which widths are chosen
INTERRUPTED = "interrupted; the same command goes on after the last layer that was calibrated, if any was"
# What lies beside a model and is copied as it is: tokenizers, processors, chat templates.
BESIDE = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "normalizer.json"),
    *("*.model", "*.tiktoken", "*.spm", "*processor_config.json", "chat_template*", "additional_chat_templates/*"),
)


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder, or name on the Hub, of a model in 16 or 32 bits, or of GPT-OSS with MXFP4 experts."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to save the quantized model in: a new one, or an empty one.")],
    bits: Annotated[
        float | None,
        typer.Option(
            help="Bits for each weight: 2, 3, 4 or 5, or a mean such as 3.4, for which each layer gets its own width. "
            "Default: 4."
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Instead of --bits: the memory, such as 20GB or 800MiB, that the model may take."
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option(min=0, help="With --memory: tokens of a sequence that there must be room for."),
    ] = 8192,
    calibrate: Annotated[bool, typer.Option(help="Quantize with data, which is better and takes longer.")] = False,
    method: Annotated[
        str, typer.Option(help=f"With --calibrate: how weights are chosen, one of {', '.join(METHODS)}.")
    ] = "feedback",
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    sequences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --calibrate: number of sequences to take of the text, at most, or that the model writes. "
            f"Default: {SEQUENCES}; {WRITTEN['cpu'][0]} if it writes them on a CPU.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens in a sequence. Best as many as the model will read at once. "
            f"Default: {LENGTH} of a text; {WRITTEN[''][1]} that the model writes, {WRITTEN['cpu'][1]} on a CPU.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences that go through a layer at a time.")] = 4,
    embedding_bits: Annotated[
        int | None,
        typer.Option(
            help="Bits for tables of embeddings and heads tied to them: 2, 3, 4 or 5. Default: they stay as they are."
        ),
    ] = None,
    codebook: Annotated[str | None, typer.Option(help="Name of the codebook: the levels of a weight.")] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Name or pattern of layers to leave in 16 bits. Can be given several times."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Where to compute: cpu, cuda or cuda:1. Default: a GPU, if there is one.")
    ] = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="REPOSITORY", help="Name on the Hub to upload the saved model to as well.")
    ] = None,
) -> None:
    """Quantizes a model and saves it, to a width or to a memory, with a little data or none.

    Without --text and --dataset, what needs data takes text that the model writes by itself, or the built-in text if
    it cannot. Given again, the command goes on where calibrating was interrupted or killed.
    """
    start = time.monotonic()
    device, size = resolve_device(device), None if memory is None else _bytes(memory)
    source = {"revision": revision, "trust_remote_code": trust_remote_code}
    needs_dense = calibrate or size is not None or bool(bits and bits % 1)
    _check(model, bits, size, method, source, needs_dense)
    dtype = check_dtype(dtype)
    choices = {"codebook": codebook} if codebook else {}
    config = KbitConfig(modules_to_not_convert=skip or [], embedding_bits=embedding_bits, **choices)
    if not needs_dense and (text or dataset):
        raise ValueError("--text: found data, but neither --calibrate nor mixed widths need it")
    data = read_text(text, dataset, split, column) if text or dataset else None
    with claim(out) as output:
        dense = load(model, dtype=dtype, **source) if needs_dense else None
        mean = (bits or KbitConfig().bits) if size is None else _fit(dense, size, context, config)
        if calibrate or mean % 1:
            named = ", ".join(map(str, text or ())) or dataset
            if data is None:
                amount = (sequences, length) if calibrate else MEASURED
                data = write(dense, *amount, device=device, progress=True)
                named = "the built-in text" if data is None else "text that the model wrote"
            ids = token_ids(data, AutoTokenizer.from_pretrained(model, **source), dense, sequences, length)
        if mean % 1:
            config = _mix(dense, mean, ids, named, config, device)
        else:
            config = replace(config, bits=int(mean))
        if calibrate:
            line("calibrating", f"{method}, {len(ids):,} x {ids.shape[1]:,} tokens of {named}, on {device}")
            options = {"method": method, "batch": batch, "device": device}
            quantized = hf_kbit.calibrate(dense, ids, config=config, resume=output.layers, progress=True, **options)
        else:
            del dense
            quantized = load(model, dtype=dtype, device_map=device, quantization_config=config, **source)
        quantized.save_pretrained(output.model)
        _copy_beside(model, revision, output.model)
        output.publish()
    saved = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    line("saved", f"{out}: {saved / 1e6:,.3g} MB, after {time.monotonic() - start:,.0f} s")
    if push_to_hub is not None:
        quantized.push_to_hub(push_to_hub)
        upload_folder(repo_id=push_to_hub, folder_path=out, allow_patterns=list(BESIDE))
        line("uploaded", push_to_hub)


def _check(model: str, bits: float | None, size: int | None, method: str, source: dict, needs_dense: bool) -> None:
    """Refuses what can be refused before anything large is loaded."""
    if bits is not None and size is not None:
        raise ValueError("--memory: found it and --bits, expected one")
    if bits is not None and not BITS[0] <= bits <= BITS[-1]:
        raise ValueError(f"--bits: found {bits}, expected {BITS[0]} to {BITS[-1]}")
    if method not in METHODS:
        raise ValueError(f"--method: found {method!r}, expected one of {sorted(METHODS)}")
    found = getattr(AutoConfig.from_pretrained(model, **source), "quantization_config", None)
    if found is not None and not mxfp4.is_config(found):
        raise ValueError(f"{model}: found it quantized already, expected a model in 16 or 32 bits")
    if found is not None and needs_dense:
        raise ValueError(
            f"{model}: found experts in MXFP4, which are quantized without data, expected neither --calibrate nor "
            "--memory nor a mean of --bits"
        )


def _bytes(size: str) -> int:
    """
    >>> _bytes("20GB"), _bytes("1.5 MiB")
    (20000000000, 1572864)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]|[KMGT]i)?B", size)
    if not match:
        raise ValueError(f"--memory: found {size!r}, expected a size such as 20GB or 800MiB")
    return int(float(match[1]) * UNITS[match[2] or ""])


def _fit(model, size: int, context: int, config: KbitConfig) -> float:
    """The mean width with which the model takes so many bytes; says what they are for."""
    bits = widths.bits_for_memory(model, size, context=context, config=config)
    chosen = selection.choose(model, config)
    tables = selection.table_widths(model, chosen)
    layers = [name for name in chosen if name not in tables]
    weights = mixing.stored_weights(model, layers)
    parts = {
        "what is not quantized": widths.rest_bytes(model, chosen),
        "tables of embeddings": mixing.packed_bytes(model, tables, config),
        "column scales": mixing.column_bytes(model, layers, config),
        f"what is kept of {context:,} tokens": widths.cache_bytes(model, context),
        f"{weights:,} weights, {bits:.2f} bits and {mixing.SCALE_BITS} for scales": int(
            weights * (bits + mixing.SCALE_BITS) / 8
        ),
    }
    line("memory", f"{size:,} bytes")
    for what, taken in parts.items():
        line("", f"{taken:,} for {what}")
    line("", f"{size - sum(parts.values()):,} left over")
    return bits


def _mix(model, mean: float, ids: torch.Tensor, source: str, config: KbitConfig, device: str) -> KbitConfig:
    """Widths for a mean, by what each layer loses; says which layers get how many, and why."""
    sample = ids[:: max(len(ids) // MEASURED[0], 1), : MEASURED[1]][: MEASURED[0]]
    tokens = sample.numel()
    line("measuring", f"what few bits in each layer cost on {tokens:,} tokens of {source}, on {device}")
    layers = widths.measure(model, sample.flatten(), config, window=sample.shape[1], device=device, progress=True)
    chosen = mixing.spend(layers, mean * sum(layer.weights for layer in layers.values()))
    counts = ", ".join(f"{count} in {width} bits" for width, count in sorted(Counter(chosen.values()).items()))
    weights, used = Counter(), Counter()
    for name, layer in layers.items():
        for key in ("", name.rpartition(".")[2]):
            weights[key] += layer.weights
            used[key] += layer.weights * chosen[name]
    means = {key: used[key] / weights[key] for key in weights}
    line("widths", f"{means.pop(''):.2f} bits for a weight: {counts}")
    line("", ", ".join(f"{kind} {width:.2f}" for kind, width in means.items()))
    costs = sorted(layers, key=lambda name: layers[name].costs[BITS[0]] / layers[name].weights)
    for extreme, name in (("most", costs[-1]), ("least", costs[0])):
        cost = layers[name].costs[BITS[0]] / tokens
        line(
            "", f"{name}: {chosen[name]} bits, for {BITS[0]} cost {cost:.2g} nats a token, the {extreme} for its size"
        )
    return mixing.config_of(config, chosen)


def _copy_beside(model: str, revision: str | None, out: Path) -> None:
    """Copies the tokenizer, processors and chat templates that the model has, and makes up none."""
    if Path(model).is_dir():
        folder = Path(model)
    else:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=list(BESIDE)))
    files = [file for pattern in BESIDE for file in folder.glob(pattern) if file.is_file()]
    for file in files:
        target = out / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    if not any(file.name.startswith("tokenizer") or "processor" in file.name for file in files):
        line("tokenizer", f"none in {model}")
