"""``hf-kbit eval``: what quantization costs a language model."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_kbit.cli.device import resolve_device
from hf_kbit.cli.model import Loading
from hf_kbit.cli.output import line
from hf_kbit.cli.text import Column, Dataset, Split, Text, read_text

if TYPE_CHECKING:
    import torch

    from hf_kbit.evaluation import Evaluation


@dataclass(frozen=True)
class Reading:
    """Options that say what is predicted, and how much the model sees of it."""

    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, or name on the Hub, of the tokenizer. Default: that of MODEL.")
    ] = None
    text: Text = None
    dataset: Dataset = None
    split: Split = "test"
    column: Column = "text"
    window: Annotated[int, typer.Option(help="Number of tokens that the model reads at once.")] = 2048
    stride: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens from the start of a window to the start of the next. Default: that of --window."
        ),
    ] = None
    limit_tokens: Annotated[
        int | None, typer.Option(min=2, help="Number of tokens to evaluate, from the start of the text. Default: all.")
    ] = None

    def tokens(self, vocabulary: str, source: dict[str, Any]) -> "torch.Tensor":
        """Of the text, by the tokenizer of this name."""
        text = read_text(self.text, self.dataset, self.split, self.column)
        return _tokenize(text, vocabulary, source)[: self.limit_tokens]


@dataclass(frozen=True)
class Quantizing:
    """Options that quantize the model; a ValueError where one has no use without another."""

    bits: Annotated[
        int | None,
        typer.Option(
            help="Number of bits to quantize MODEL to while it loads: 2, 3, 4 or 5. Default: it stays as it is."
        ),
    ] = None
    codebook: Annotated[
        str | None,
        typer.Option(help="With --bits: codebook, the levels that weights are rounded to. Default: optimal."),
    ] = None
    scale: Annotated[
        str | None, typer.Option(help="With --bits: how scales are found, absmax or search. Default: search.")
    ] = None

    def __post_init__(self):
        if self.bits is None and (self.codebook or self.scale):
            raise ValueError(f"--{'codebook' if self.codebook else 'scale'}: found it without --bits, expected both")

    def config(self, model: str, found: object) -> dict[str, Any]:
        """Arguments of ``from_pretrained``, for the model that is to be quantized; ``found`` is its own config."""
        if self.bits is None:
            return {}
        if getattr(found, "quantization_config", None) is not None:
            raise ValueError(f"--bits: found {self.bits}, expected none, for {model} is quantized already")
        from hf_kbit.config import KbitConfig

        given = {name: value for name, value in asdict(self).items() if value is not None}
        return {"quantization_config": KbitConfig(**given)}


def command(
    model: Annotated[
        str, typer.Argument(help="Model to evaluate: a folder, or a name on the Hub, quantized or in 16 bits.")
    ],
    reference: Annotated[
        str | None, typer.Option(help="16-bit model to compare with. Default: MODEL itself with --bits, else none.")
    ] = None,
    *,
    reading: Reading,
    quantizing: Quantizing,
    device: Annotated[
        str | None,
        typer.Option(
            help="Device to compute on: cpu, cuda, cuda:1, or auto for all GPUs. Default: the first GPU, or the CPU "
            "if there is none."
        ),
    ] = None,
    loading: Loading,
    as_json: Annotated[bool, typer.Option("--json", help="Print one line of JSON. Default: a table to read.")] = False,
    card: Annotated[
        bool,
        typer.Option(
            "--card", help="Write the figures into README.md in MODEL, a folder. Default: they are printed alone."
        ),
    ] = False,
) -> None:
    """Measure what quantization costs: perplexity, and how far the model is from the 16-bit one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_kbit.evaluation import check, evaluate
    from hf_kbit.integrations.transformers.cards import write_figures

    load = {"device_map": resolve_device(device), "dtype": loading.dtype}
    readme = Path(model) / "README.md"
    if card and (quantizing.bits is not None or not readme.is_file()):
        raise ValueError(
            f"--card: found it for {model}, expected a folder with a quantized model and its README.md, and no --bits"
        )
    if quantizing.bits is not None and reference is None:
        reference = model
    vocabulary = reading.tokenizer or model
    # What is said of MODEL holds for the other arguments where they name it too.
    others = replace(loading, revision=None).source
    source = {name: loading.source if name == model else others for name in (model, reference, vocabulary)}
    configs = {name: AutoConfig.from_pretrained(name, **source[name]) for name in (model, reference) if name}
    quantization = quantizing.config(model, configs[model])
    tokens = reading.tokens(vocabulary, source[vocabulary])
    stride = reading.window if reading.stride is None else reading.stride
    windows = {"window": reading.window, "stride": stride}
    check(configs, tokens, **windows)  # before anything large is loaded
    evaluated = AutoModelForCausalLM.from_pretrained(model, **load, **source[model], **quantization)
    compared = AutoModelForCausalLM.from_pretrained(reference, **load, **source[reference]) if reference else None
    found = evaluate(evaluated, tokens, reference=compared, **windows, progress=True)
    rows = _rows(found)
    if card:
        read = ", ".join(map(str, reading.text or [reading.dataset]))
        write_figures(readme, {"text": read, **({"compared with": reference} if reference else {})} | rows)
    if as_json:
        width = getattr(getattr(evaluated.config, "quantization_config", None), "bits", None)
        typer.echo(json.dumps({"model": model, "bits": width, "reference": reference} | asdict(found)))
    else:
        for label, value in rows.items():
            line(label, value)


def _tokenize(text: str, name: str, source: dict) -> "torch.Tensor":
    from transformers import AutoTokenizer

    from hf_kbit.calibration.data import tokenize

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name}: found no tokenizer, expected one; name another with --tokenizer ({error})"
        ) from None
    return tokenize(text, tokenizer)


def _rows(found: "Evaluation") -> dict[str, str]:
    stride = "" if found.stride == found.window else f", {found.stride} apart"
    rows = {"tokens": f"{found.tokens:,} predicted, in windows of {found.window:,}{stride}"}
    rows["perplexity"] = f"{found.perplexity:.4f}"
    if found.reference_perplexity is not None:
        rows["reference"] = f"{found.reference_perplexity:.4f}"
        rows["KL divergence"] = f"{found.kl_divergence:.5f} nats"
        rows["same top-1"] = f"{found.top1_agreement:.2%}"
    return rows
