"""The command ``hf-kbit``."""

import json
import os
import platform
import re
import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import hf_kbit
from hf_kbit import _native, widths
from hf_kbit.calibration.data import LENGTH, SEQUENCES, read, token_ids
from hf_kbit.calibration.model import METHODS, load
from hf_kbit.config import KbitConfig
from hf_kbit.evaluation import Evaluation, check, evaluate
from hf_kbit.format import BITS
from hf_kbit.integrations import selection

app = typer.Typer(help="Low-bit weights for Transformers.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Low-bit weights for Transformers."""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _line(label: str, text: str) -> None:
    typer.echo(f"{label:<13} {text}")


def _fail(command: str, reason: object) -> NoReturn:
    typer.echo(f"hf-kbit {command}: {reason}", err=True)
    raise typer.Exit(1) from None


@app.command()
def info() -> None:
    """Shows what is loaded, what is missing, why, and what to do about it."""
    build = _native.build_info()
    _line("hf_kbit", f"{hf_kbit.__version__}, Python {platform.python_version()}, {platform.platform()}")
    _line("torch", f"{torch.__version__} in {torch.__path__[0]}")
    for package in ("transformers", "accelerate", "peft"):
        _line(package, _version(package))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    _line("GPUs", ", ".join(gpus) or "none that torch can use")
    for name in ("cpu", "cuda"):
        library, built = _native.library(name), build.get(name, {})
        if not library.loaded:
            _line(f"{name} kernels", f"missing: {library.missing}")
            continue
        _line(f"{name} kernels", str(library.path))
        if built:
            _line("", f"built by {built['compiler']} with the headers of torch {build['torch']}")
        if archs := built.get("archs", "").split():
            newer = ["newer ones"] if any(arch.isdigit() for arch in archs) else []  # the others are without PTX
            _line("", "for " + ", ".join([f"sm_{arch.removesuffix('-real')}" for arch in archs] + newer))
        if name == "cpu":
            set_by = ", set by HF_KBIT_CPU" if os.environ.get("HF_KBIT_CPU") else ""
            _line("", f"uses {_native.instruction_set(library.path)} instructions{set_by}")
    usable = ["cpu"] + (["cuda"] if torch.version.cuda else [])
    if not all(_native.library(name).loaded for name in usable):
        _line("", f"to install hf_kbit again, add {_native.REINSTALL_OPTIONS} to the command that installed it")


# Options of commands that read text.
Text = Annotated[list[Path] | None, typer.Option(help="A file of text; may be given several times.")]
Dataset = Annotated[
    str | None, typer.Option(metavar="NAME[:CONFIG]", help="A dataset of the Hub, a folder or a file of rows.")
]
Split = Annotated[str, typer.Option(help="Of the dataset.")]
Column = Annotated[str, typer.Option(help="Of the dataset: the one with the text.")]
DTYPES = ("auto", "float32", "float16", "bfloat16")
# How datasets reads a file, by the end of its name.
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


@app.command("eval")
def eval_(
    model: Annotated[str, typer.Argument(help="Folder, or name on the Hub: a quantized model or one in 16 bits.")],
    reference: Annotated[str | None, typer.Option(help="The 16-bit model; with --bits it is MODEL itself.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Where the tokenizer is, if not with MODEL.")] = None,
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "test",
    column: Column = "text",
    window: Annotated[int, typer.Option(help="Tokens that the model sees at once.")] = 2048,
    stride: Annotated[int | None, typer.Option(help="Tokens from window to window; default: --window.")] = None,
    limit_tokens: Annotated[int | None, typer.Option(min=2, help="So many, from the start of the text.")] = None,
    bits: Annotated[int | None, typer.Option(help="Quantize MODEL while loading it: 2, 3, 4 or 5.")] = None,
    codebook: Annotated[str | None, typer.Option(help="With --bits: name of the levels.")] = None,
    scale: Annotated[str | None, typer.Option(help="With --bits: how scales are found, absmax or search.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, auto (all GPUs); default: GPU, if any.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16, or auto: that of the checkpoint.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON.")] = False,
) -> None:
    """Measures perplexity, and KL divergence and top-1 agreement against the 16-bit model."""
    try:
        load = _load_arguments(device, dtype)
        quantization = _quantization(model, bits, codebook, scale)
        if bits is not None and reference is None:
            reference = model
        tokens = _tokenize(_read(text, dataset, split, column), tokenizer or model)[:limit_tokens]
        configs = {name: AutoConfig.from_pretrained(name) for name in (model, reference) if name}
        check(configs, tokens, window, window if stride is None else stride)  # before anything large is loaded
        evaluated = AutoModelForCausalLM.from_pretrained(model, **load, **quantization)
        compared = AutoModelForCausalLM.from_pretrained(reference, **load) if reference else None
        found = evaluate(evaluated, tokens, reference=compared, window=window, stride=stride, progress=True)
    except (ImportError, OSError, ValueError) as error:
        _fail("eval", error)
    if as_json:
        width = getattr(getattr(evaluated.config, "quantization_config", None), "bits", None)
        typer.echo(json.dumps({"model": model, "bits": width, "reference": reference} | asdict(found)))
    else:
        _show(found)


def _load_arguments(device: str | None, dtype: str) -> dict:
    """Arguments of ``from_pretrained``, for both models."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: found {dtype!r}, expected one of {list(DTYPES)}")
    return {"device_map": _device(device), "dtype": dtype}


def _device(device: str | None) -> str:
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: found {device}, but torch can use no GPU; see hf-kbit info")
    return device


def _quantization(model: str, bits: int | None, codebook: str | None, scale: str | None) -> dict:
    """Arguments of ``from_pretrained``, for the model that is to be quantized."""
    given = {name: value for name, value in (("codebook", codebook), ("scale", scale)) if value is not None}
    if bits is None:
        if given:
            raise ValueError(f"--{min(given)}: found it without --bits, expected both")
        return {}
    if getattr(AutoConfig.from_pretrained(model), "quantization_config", None) is not None:
        raise ValueError(f"--bits: found {bits}, expected none, for {model} is quantized already")
    return {"quantization_config": hf_kbit.KbitConfig(bits=bits, **given)}


def _read(files: list[Path] | None, dataset: str | None, split: str, column: str) -> str:
    """The files, or the rows of the dataset, with an empty line between two."""
    if bool(files) == bool(dataset):
        raise ValueError(f"found {'both' if files else 'neither'} of --text and --dataset, expected one")
    if dataset:
        return "\n\n".join(_rows(dataset, split, column))
    return "\n\n".join(map(read, files))


def _rows(dataset: str, split: str, column: str) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("--dataset: found no package datasets, expected it: pip install datasets") from None
    if (file := Path(dataset)).is_file():
        if file.suffix not in READERS:
            raise ValueError(f"{file}: found {file.suffix!r}, expected a name with one of {sorted(READERS)}")
        rows = load_dataset(READERS[file.suffix], data_files={split: dataset}, split=split)
    else:
        name, _, config = dataset.partition(":")
        rows = load_dataset(name, config or None, split=split)
    if column not in rows.column_names:
        raise ValueError(f"--column: found {column!r}, expected one of {rows.column_names}, which {dataset} has")
    texts = list(rows[column])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"--column: found values in {column!r} that are no text, expected text in each row")
    return texts


def _tokenize(text: str, name: str) -> torch.Tensor:
    """int64 ``[length]``: the whole text at once, with the special tokens that the tokenizer adds to any text."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name}: found no tokenizer, expected one; name another with --tokenizer ({error})"
        ) from None
    ids = tokenizer(text, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def _show(found: Evaluation) -> None:
    stride = "" if found.stride == found.window else f", {found.stride} apart"
    rows = {"tokens": f"{found.tokens:,} predicted, in windows of {found.window:,}{stride}"}
    rows["perplexity"] = f"{found.perplexity:.4f}"
    if found.reference_perplexity is not None:
        rows["reference"] = f"{found.reference_perplexity:.4f}"
        rows["KL divergence"] = f"{found.kl_divergence:.5f} nats"
        rows["same top-1"] = f"{found.top1_agreement:.2%}"
    for label, value in rows.items():
        _line(label, value)


UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
MEASURED = (2, 512)  # sequences, and tokens of each, on which widths are chosen
UNFINISHED = "unfinished"  # folder in a model's that is not all there yet


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="Folder, or name on the Hub, of a model in 16 or 32 bits.")],
    out: Annotated[Path, typer.Argument(help="Folder to save the quantized model in; a killed run goes on there.")],
    bits: Annotated[
        float | None, typer.Option(help="2 to 5; 3.4, say, is a mean, with widths chosen for each layer. Default: 4.")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Instead of --bits: as many as fit, such as 20GB or 800MiB.")
    ] = None,
    context: Annotated[int, typer.Option(min=0, help="With --memory: tokens that a KV cache has room for.")] = 8192,
    calibrate: Annotated[bool, typer.Option(help="Quantize with data: better, and slower.")] = False,
    method: Annotated[str, typer.Option(help=f"Of calibrating: {', '.join(METHODS)}.")] = "feedback",
    text: Text = None,
    dataset: Dataset = None,
    split: Split = "train",
    column: Column = "text",
    sequences: Annotated[int, typer.Option(min=1, help="Of the text, for calibrating, at most.")] = SEQUENCES,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence; as many as the model will read.")] = LENGTH,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that go through a layer at a time.")] = 4,
    codebook: Annotated[str | None, typer.Option(help="Name of the levels.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Pattern of layers to leave in 16 bits; repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1; default: GPU, if any.")] = None,
) -> None:
    """Quantizes a model and saves it, to a width or to a memory, with a little data or none.

    Without --text and --dataset, what needs data takes the built-in text.
    """
    start = time.monotonic()
    try:
        device, size = _device(device), None if memory is None else _bytes(memory)
        _check_quantize(model, out, bits, size, method)
        choices = {"codebook": codebook} if codebook else {}
        config = KbitConfig(modules_to_not_convert=skip or [], **choices)
        if not (calibrate or size or (bits and bits % 1)) and (text or dataset):
            raise ValueError("--text: found data, but neither --calibrate nor mixed widths need it")
        data = _read(text, dataset, split, column) if text or dataset else None
        dense = load(model)
        mean = (bits or KbitConfig().bits) if size is None else _fit(dense, size, context, config)
        if calibrate or mean % 1:
            source = ", ".join(map(str, text or ())) or dataset or "the built-in text"
            ids = token_ids(data, AutoTokenizer.from_pretrained(model), dense, sequences, length)
        if mean % 1:
            config = _mix(dense, mean, ids, source, config, device)
        else:
            config = replace(config, bits=int(mean))
        (out / UNFINISHED).mkdir(parents=True, exist_ok=True)
        if calibrate:
            _line("calibrating", f"{method}, {len(ids):,} x {ids.shape[1]:,} tokens of {source}, on {device}")
            quantized = hf_kbit.calibrate(
                dense,
                ids,
                method=method,
                batch=batch,
                device=device,
                resume=out / UNFINISHED,
                progress=True,
                bits=config.bits,
                module_bits=config.module_bits,
                modules_to_not_convert=config.modules_to_not_convert,
                **choices,
            )
        else:
            kind = type(dense)
            del dense
            quantized = kind.from_pretrained(model, dtype="auto", device_map=device, quantization_config=config)
        quantized.save_pretrained(out)
        _save_tokenizer(model, out)
    except (ImportError, OSError, TypeError, ValueError) as error:
        _fail("quantize", error)
    shutil.rmtree(out / UNFINISHED, ignore_errors=True)
    saved = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    _line("saved", f"{out}: {saved / 1e6:,.3g} MB, after {time.monotonic() - start:,.0f} s")


def _check_quantize(model: str, out: Path, bits: float | None, size: int | None, method: str) -> None:
    """Refuses what can be refused before anything large is loaded."""
    if bits is not None and size is not None:
        raise ValueError("--memory: found it and --bits, expected one")
    if bits is not None and not BITS[0] <= bits <= BITS[-1]:
        raise ValueError(f"--bits: found {bits}, expected {BITS[0]} to {BITS[-1]}")
    if method not in METHODS:
        raise ValueError(f"--method: found {method!r}, expected one of {sorted(METHODS)}")
    if getattr(AutoConfig.from_pretrained(model), "quantization_config", None) is not None:
        raise ValueError(f"{model}: found it quantized already, expected a model in 16 or 32 bits")
    if out.exists() and not (out / UNFINISHED).is_dir() and (out.is_file() or any(out.iterdir())):
        raise ValueError(f"{out}: found files, expected a new folder, or that of a killed run")


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
    weights = widths.stored_weights(model, chosen)
    parts = {
        "what is not quantized": widths.rest_bytes(model, chosen),
        f"keys and values of {context:,} tokens": widths.cache_bytes(model, context),
        f"{weights:,} weights, {bits:.2f} bits and {widths.SCALE_BITS} for scales": int(
            weights * (bits + widths.SCALE_BITS) / 8
        ),
    }
    _line("memory", f"{size:,} bytes")
    for what, taken in parts.items():
        _line("", f"{taken:,} for {what}")
    _line("", f"{size - sum(parts.values()):,} left over")
    return bits


def _mix(model, mean: float, ids: torch.Tensor, source: str, config: KbitConfig, device: str) -> KbitConfig:
    """Widths for a mean, by what each layer loses; says which layers get how many, and why."""
    sample = ids[:: max(len(ids) // MEASURED[0], 1), : MEASURED[1]][: MEASURED[0]]
    tokens = sample.numel()
    _line("measuring", f"what 2 bits in each layer cost on {tokens:,} tokens of {source}, on {device}")
    layers = widths.measure(model, sample.flatten(), config, window=sample.shape[1], device=device, progress=True)
    chosen = widths.spend(layers, mean * sum(layer.weights for layer in layers.values()))
    counts = ", ".join(f"{count} in {width} bits" for width, count in sorted(Counter(chosen.values()).items()))
    weights, used = Counter(), Counter()
    for name, layer in layers.items():
        for key in ("", name.rpartition(".")[2]):
            weights[key] += layer.weights
            used[key] += layer.weights * chosen[name]
    means = {key: used[key] / weights[key] for key in weights}
    _line("widths", f"{means.pop(''):.2f} bits for a weight: {counts}")
    _line("", ", ".join(f"{kind} {width:.2f}" for kind, width in means.items()))
    costs = sorted(layers, key=lambda name: layers[name].costs[BITS[0]] / layers[name].weights)
    for extreme, name in (("most", costs[-1]), ("least", costs[0])):
        cost = layers[name].costs[BITS[0]] / tokens
        _line(
            "", f"{name}: {chosen[name]} bits, for {BITS[0]} cost {cost:.2g} nats a token, the {extreme} for its size"
        )
    return widths.config_of(config, chosen)


def _save_tokenizer(model: str, out: Path) -> None:
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError):
        _line("tokenizer", f"none in {model}")
    else:
        tokenizer.save_pretrained(out)


@app.command(
    "lm-eval", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, add_help_option=False
)
def lm_eval(context: typer.Context) -> None:
    """Runs lm-eval's own command, with its own arguments, where quantized models are known."""
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        _fail("lm-eval", f"found no package lm_eval, expected it: pip install lm_eval ({error})")
    sys.argv = ["lm-eval", *context.args]
    cli_evaluate()


if __name__ == "__main__":
    app()
