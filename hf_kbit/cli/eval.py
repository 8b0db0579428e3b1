"""``hf-kbit eval``: what quantization costs a language model."""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from hf_kbit.cli import options
from hf_kbit.cli.options import add, add_device, add_inputs, add_loading, add_text, at_least, check_alone, read_text
from hf_kbit.cli.output import line

if TYPE_CHECKING:
    from hf_kbit.calibration.evaluation import Evaluation


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="Model to evaluate: a folder, or a name on the Hub, quantized or in 16 bits.")
    add(parser, "--reference", "16-bit model to compare with. Default: MODEL itself with --bits, else none.")
    add(parser, "--tokenizer", "Folder, or name on the Hub, of the tokenizer. Default: that of MODEL.")
    add_text(parser, split="test", required=True)
    add(parser, "--window", "Number of tokens that the model reads at once.", type=int, default=2048)
    about = "Number of tokens from the start of a window to the start of the next. Default: that of --window."
    add(parser, "--stride", about, type=int)
    about = "Number of tokens to evaluate, from the start of the text. Default: all."
    add(parser, "--limit-tokens", about, type=at_least(2))
    about = "Number of bits to quantize MODEL to while it loads: 2, 3, 4 or 5. Default: it stays as it is."
    add(parser, "--bits", about, type=int)
    about = "With --bits: codebook, the levels that weights are rounded to. Default: optimal."
    add(parser, "--codebook", about)
    add(parser, "--scale", "With --bits: how scales are found, absmax or search. Default: search.")
    add_inputs(parser)
    add_device(parser, "cpu, cuda, cuda:1, or auto for all GPUs")
    add_loading(parser)
    add(parser, "--json", "Print one line of JSON. Default: a table to read.", action="store_true")
    about = "Write the figures into README.md in MODEL, a folder. Default: they are printed alone."
    add(parser, "--card", about, action="store_true")


def command(given: Namespace) -> None:
    """Measure what quantization costs: perplexity, and how far the model is from the 16-bit one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_kbit.calibration.data import tokenize, tokenizer_of
    from hf_kbit.calibration.evaluation import check, evaluate
    from hf_kbit.integrations.transformers.cards import write_figures
    from hf_kbit.integrations.transformers.inputs import inputs_of
    from hf_kbit.plan.config import KbitConfig

    model, bits = given.model, given.bits
    load = {"device_map": options.resolve_device(given.device), "dtype": given.dtype}
    check_alone("bits", bits, codebook=given.codebook, scale=given.scale)
    readme = Path(model) / "README.md"
    if given.card and (bits is not None or not readme.is_file()):
        raise ValueError(
            f"--card: found it for {model}, expected a folder with a quantized model and its README.md, and no --bits"
        )
    reference = given.reference or (None if bits is None else model)
    vocabulary = given.tokenizer or model
    # What is said of MODEL holds for the other arguments where they name it too.
    source = {
        name: options.source(given) | ({} if name == model else {"revision": None})
        for name in (model, reference, vocabulary)
    }
    configs = {name: AutoConfig.from_pretrained(name, **source[name]) for name in (model, reference) if name}
    quantization = {}
    if bits is not None:
        if getattr(configs[model], "quantization_config", None) is not None:
            raise ValueError(f"--bits: found {bits}, expected none, for {model} is quantized already")
        chosen = {"bits": bits, "codebook": given.codebook, "scale": given.scale}
        chosen = {name: value for name, value in chosen.items() if value is not None}
        quantization = {"quantization_config": KbitConfig(**chosen)}
    text, tokenizer = read_text(given), tokenizer_of(vocabulary, **source[vocabulary])
    if tokenizer is None:
        raise ValueError(f"{vocabulary}: found no tokenizer, expected one; name another with --tokenizer")
    tokens = tokenize(text, tokenizer)[0][: given.limit_tokens]
    windows = {"window": given.window, "stride": given.window if given.stride is None else given.stride}
    check(configs, tokens, **windows)  # before anything large is loaded
    evaluated = AutoModelForCausalLM.from_pretrained(model, **load, **source[model], **quantization)
    options.set_inputs(evaluated, given)
    inputs = {"inputs": name} if (name := inputs_of(evaluated)) else {}
    compared = AutoModelForCausalLM.from_pretrained(reference, **load, **source[reference]) if reference else None
    found = evaluate(evaluated, tokens, reference=compared, **windows, progress=True)
    rows = inputs | _rows(found)
    if given.card:
        with_reference = {"compared with": reference} if reference else {}
        write_figures(readme, {"text": text.name} | with_reference | rows)
    if given.json:
        width = getattr(getattr(evaluated.config, "quantization_config", None), "bits", None)
        print(json.dumps({"model": model, "bits": width, "reference": reference} | inputs | asdict(found)))
    else:
        for label, value in rows.items():
            line(label, value)


def _rows(found: "Evaluation") -> dict[str, str]:
    stride = "" if found.stride == found.window else f", {found.stride} apart"
    rows = {"tokens": f"{found.tokens:,} predicted, in windows of {found.window:,}{stride}"}
    rows["perplexity"] = f"{found.perplexity:.4f}"
    if found.reference_perplexity is not None:
        rows["reference"] = f"{found.reference_perplexity:.4f}"
        rows["KL divergence"] = f"{found.kl_divergence:.5f} nats"
        rows |= {"KL of 99%": f"{found.kl_p99:.5f} nats or less", "KL of 99.9%": f"{found.kl_p999:.5f} nats or less"}
        rows["same top-1"] = f"{found.top1_agreement:.2%}"
    return rows
