"""``hf-kbit bench``: how large and how fast a quantized model is on this machine, beside 16 bits."""

import statistics
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hf_kbit.cli.options import add, add_device, add_inputs, add_loading, at_least, resolve_device, source
from hf_kbit.cli.output import line

BAR = 40  # characters, of the longest


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("model", help="Quantized model to time: a folder, or a name on the Hub.")
    add(parser, "--prompt-tokens", "Number of tokens of the prompt.", type=at_least(1), default=512)
    add(parser, "--new-tokens", "Number of tokens to generate after it.", type=at_least(2), default=64)
    add(parser, "--repeats", "Number of times to measure; the median counts.", type=at_least(1), default=3)
    add(parser, "--png", "File to draw the figures into as well. Default: they are only printed.", type=Path)
    add_inputs(parser)
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

    from hf_kbit.cli.generate import load
    from hf_kbit.integrations.transformers.cards import widths
    from hf_kbit.integrations.transformers.inputs import inputs_of
    from hf_kbit.plan.config import EXL3

    model, sizes = given.model, (given.prompt_tokens, given.new_tokens)
    config = AutoConfig.from_pretrained(model, **source(given))
    found = getattr(config, "quantization_config", None) or {}
    if found.get("quant_method") not in ("kbit", EXL3):
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
    name = widths(packed) + (f", {inputs} inputs" if (inputs := inputs_of(packed)) else "")
    where = (
        torch.cuda.get_device_name(device) if packed.device.type == "cuda" else f"{torch.get_num_threads()} threads"
    )
    line("machine", f"{device}, {where}, torch {torch.__version__}")
    measured = {name: _measure(packed, *sizes, given.repeats)}
    dense = packed.dequantize()  # in place
    measured[str(dense.dtype).removeprefix("torch.")] = _measure(dense, *sizes, given.repeats)
    figures = {title: {name: found[title] for name, found in measured.items()} for title in measured[name]}
    for title, values in figures.items():
        print(f"\n{title}")
        for label, value in values.items():
            bar = "█" * max(1, round(BAR * value / max(values.values())))
            print(f"  {label:<{max(map(len, values))}}  {bar} {_number(value)}")
    if given.png is not None:
        _draw(figures, given.png, model)
        line("\ndrawn", str(given.png))


def _measure(model, prompt_tokens: int, new_tokens: int, repeats: int) -> dict[str, float]:
    """By title: the weights, on a GPU the most that torch held there meanwhile, and medians of ``repeats`` answers to
    a prompt of random tokens, after one that does not count."""
    import torch

    from hf_kbit.cli.generate import Clock, generate

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, prompt_tokens), generator=generator)
    inputs = {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    clocks = []
    for _ in range(repeats + 1):
        clocks.append(Clock())
        length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        generate(model, **inputs, **length, do_sample=False, streamer=clocks[-1], pad_token_id=0)
    first = statistics.median(clock.times[0] for clock in clocks[1:])
    peak = {"most GPU memory, MB": torch.cuda.max_memory_allocated(model.device) / 1e6} if on_gpu else {}
    return {
        "weights, MB": model.get_memory_footprint() / 1e6,
        **peak,
        f"prompt of {prompt_tokens:,}, tokens per second": prompt_tokens / first,
        f"{new_tokens:,} new tokens, tokens per second": statistics.median(c.tokens_per_second for c in clocks[1:]),
    }


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
