"""``hf-kbit eval``: what quantization costs a language model."""

import json
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_kbit.cli.device import resolve_device
from hf_kbit.cli.output import fail, line
from hf_kbit.cli.text import Column, Dataset, Split, Text, read_text
from hf_kbit.config import KbitConfig
from hf_kbit.evaluation import Evaluation, check, evaluate

DTYPES = ("auto", "float32", "float16", "bfloat16")


def command(
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
        tokens = _tokenize(read_text(text, dataset, split, column), tokenizer or model)[:limit_tokens]
        configs = {name: AutoConfig.from_pretrained(name) for name in (model, reference) if name}
        check(configs, tokens, window, window if stride is None else stride)  # before anything large is loaded
        evaluated = AutoModelForCausalLM.from_pretrained(model, **load, **quantization)
        compared = AutoModelForCausalLM.from_pretrained(reference, **load) if reference else None
        found = evaluate(evaluated, tokens, reference=compared, window=window, stride=stride, progress=True)
    except (ImportError, OSError, ValueError) as error:
        fail("eval", error)
    if as_json:
        width = getattr(getattr(evaluated.config, "quantization_config", None), "bits", None)
        typer.echo(json.dumps({"model": model, "bits": width, "reference": reference} | asdict(found)))
    else:
        _show(found)


def _load_arguments(device: str | None, dtype: str) -> dict:
    """Arguments of ``from_pretrained``, for both models."""
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: found {dtype!r}, expected one of {list(DTYPES)}")
    return {"device_map": resolve_device(device), "dtype": dtype}


def _quantization(model: str, bits: int | None, codebook: str | None, scale: str | None) -> dict:
    """Arguments of ``from_pretrained``, for the model that is to be quantized."""
    given = {name: value for name, value in (("codebook", codebook), ("scale", scale)) if value is not None}
    if bits is None:
        if given:
            raise ValueError(f"--{min(given)}: found it without --bits, expected both")
        return {}
    if getattr(AutoConfig.from_pretrained(model), "quantization_config", None) is not None:
        raise ValueError(f"--bits: found {bits}, expected none, for {model} is quantized already")
    return {"quantization_config": KbitConfig(bits=bits, **given)}


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
        line(label, value)
