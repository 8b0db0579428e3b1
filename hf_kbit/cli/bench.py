"""``hf-kbit bench``: how large and how fast a quantized model is on this machine, beside 16 bits."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_kbit.cli.options import add, add_device, add_loading, at_least, resolve_device, source
from hf_kbit.cli.output import line

if TYPE_CHECKING:
    from hf_kbit.cli.generate import Speed

BAR = 40  # characters, of the longest


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="Quantized model to time: a folder, or a name on the Hub.")
    add(parser, "--prompt-tokens", "Number of tokens of the prompt.", type=at_least(1), default=512)
    add(parser, "--new-tokens", "Number of tokens to generate after it.", type=at_least(2), default=64)
    add(parser, "--repeats", "Number of times to measure; the median counts.", type=at_least(1), default=3)
    add(parser, "--png", "File to draw the figures into as well. Default: they are only printed.", type=Path)
    add_device(parser)
    add_loading(parser)


def command(given: Namespace) -> None:
    """Time a quantized model on this machine: memory, prompt and new tokens, beside the same model in 16 bits.

    The model in 16 bits is the quantized one, decoded, so no second model is needed.
    """
    device = resolve_device(given.device)
    if given.png is not None:
        _pyplot()  # before anything that takes time

    import torch
    from transformers import AutoConfig

    from hf_kbit.cli.generate import load, measure
    from hf_kbit.integrations.transformers.cards import widths

    model, sizes = given.model, (given.prompt_tokens, given.new_tokens)
    config = AutoConfig.from_pretrained(model, **source(given))
    found = getattr(config, "quantization_config", None) or {}
    if found.get("quant_method") != "kbit":
        raise ValueError(
            f"{model}: found a model that hf_kbit has not quantized, expected what hf-kbit quantize saves"
        )
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and sum(sizes) > positions:
        raise ValueError(
            f"--prompt-tokens: found {sizes[0]} and --new-tokens {sizes[1]}, expected at most {positions} together, "
            f"the positions of {model}"
        )
    packed = load(given, device)
    name = widths(packed)
    where = (
        torch.cuda.get_device_name(device) if packed.device.type == "cuda" else f"{torch.get_num_threads()} threads"
    )
    line("machine", f"{device}, {where}, torch {torch.__version__}")
    speeds = {name: measure(packed, *sizes, given.repeats)}
    speeds[str(packed.dtype).removeprefix("torch.")] = measure(packed.dequantize(), *sizes, given.repeats)
    figures = _figures(speeds, *sizes)
    for title, values in figures.items():
        print(f"\n{title}")
        for label, value in values.items():
            bar = "█" * max(1, round(BAR * value / max(values.values())))
            print(f"  {label:<{max(map(len, values))}}  {bar} {_number(value)}")
    if given.png is not None:
        _draw(figures, given.png, model)
        line("\ndrawn", str(given.png))


def _figures(speeds: dict[str, "Speed"], prompt_tokens: int, new_tokens: int) -> dict[str, dict[str, float]]:
    """What is shown, by title, for each model."""
    kinds = {
        "weights, MB": lambda speed: speed.weights / 1e6,
        "most GPU memory, MB": lambda speed: speed.peak and speed.peak / 1e6,
        f"prompt of {prompt_tokens:,}, tokens per second": lambda speed: speed.prefill,
        f"{new_tokens:,} new tokens, tokens per second": lambda speed: speed.decode,
    }
    found = {title: {name: value(speed) for name, speed in speeds.items()} for title, value in kinds.items()}
    return {title: values for title, values in found.items() if None not in values.values()}


def _number(value: float) -> str:
    """With four digits, or all before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _pyplot():
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--png: found no package matplotlib, expected it: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _draw(figures: dict[str, dict[str, float]], file: Path, name: str) -> None:
    figure, axes = _pyplot().subplots(1, len(figures), figsize=(4 * len(figures), 3), squeeze=False)
    for axis, (title, values) in zip(axes[0], figures.items(), strict=True):
        axis.bar_label(axis.bar(list(values), list(values.values()), color=["#1b9e77", "#999999"]), fmt=_number)
        axis.set_title(title, fontsize=9)
    figure.suptitle(name)
    figure.tight_layout()
    figure.savefig(file)
