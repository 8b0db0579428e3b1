"""Tables and a plot of what ``measure`` and ``minilm`` measured, put into the page about it.

    python -m benchmarks.quality.report benchmarks/results/quality-*.jsonl [--page docs/lab/2026-11-25-quality.md]
                                        [--plots docs/images]

prints the tables, and with ``--page`` also writes them between the two marks there: published models first, from the
largest on, then the model that the benchmark trained, then all-MiniLM-L6-v2. Where files hold several runs, the last
line of each method counts. There is a plot of each language model, with the relative gap of perplexity and the KL
divergence against bits per weight: calibrated models bold, mixed widths dashed in the colour of what is one width for
all, peers dotted, hf_kbit's codebooks other than the default and the trellis pale; and one of SmolLM2 in short. They
need matplotlib.
"""

import argparse
import json
import math
import os
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import hf_kbit
from benchmarks.quality.methods import MIXED, OWN_TEXT, TUNED

QWEN, GEMMA, SMOLLM2 = "Qwen2.5-Coder-1.5B-Instruct", "gemma-3-270m", "SmolLM2-135M-Instruct"
TRAINED, MINILM = "trained", "all-MiniLM-L6-v2"
MARKS = "<!-- results -->\n", "<!-- end of results -->\n"
DEFAULT = f"{hf_kbit.KbitConfig().codebook}, {hf_kbit.KbitConfig().scale}"
FEEDBACK = "optimal, feedback"
TRELLIS = "trellis"
CALIBRATED = {"weighted", "learned", "feedback"}  # ways of stored lines
GAP = "gap, of fp16's perplexity"
# For each width: the most that the default of hf_kbit may have of a plain method's gap, and that method.
NF4 = ("bitsandbytes", 4, "NF4, block 64")
PLAIN = "normal_float, absmax"
TARGETS = {4: (0.6, NF4), 3: (0.7, ("hf_kbit", 3, PLAIN)), 2: (0.35, ("hf_kbit", 2, PLAIN))}
# The same for error feedback, against the default without data; and the most that the gap of what is calibrated may be
# of fp16's perplexity.
CALIBRATED_TARGETS = {4: (0.6, ("hf_kbit", 4, DEFAULT)), 3: (0.5, ("hf_kbit", 3, DEFAULT))}
RELATIVE_TARGETS = {FEEDBACK: {2: 0.25}, FEEDBACK + OWN_TEXT + TUNED: {2: 0.06}}
# The most that a mean width may have of what a straight line between two widths gives a model of its size.
MIXED_TARGETS = {3.5: (1.0, 3, 4)}
# Of published models, for each way and width: the most that the gap may be of the 16-bit model's perplexity.
QWEN_TARGETS = {
    DEFAULT: {4: 0.027, 3: 0.18},
    FEEDBACK + OWN_TEXT: {4: 0.015, 3: 0.08, 2: 0.5},
    FEEDBACK + OWN_TEXT + TUNED: {3: 0.055, 2: 0.24},
}
SMOLLM2_TARGETS = {
    DEFAULT: {4: 0.09, 3: 0.45, 2: 10.0},
    FEEDBACK + OWN_TEXT: {4: 0.04, 3: 0.17, 2: 1.2},
    FEEDBACK: {4: 0.028, 3: 0.14, 2: 0.95},
    FEEDBACK + OWN_TEXT + MIXED: {3.5: 0.08, 2.5: 0.45},
    FEEDBACK + OWN_TEXT + TUNED: {4: 0.025, 3: 0.09, 2: 0.45},
    FEEDBACK + OWN_TEXT + TUNED + MIXED: {2.5: 0.22},
}


def read(files: Iterable[Path]) -> dict[str, dict[tuple, dict]]:
    """For each model the last line of each method, by library, bits and way."""
    found = {}
    for line in (json.loads(line) for file in files for line in file.read_text().splitlines()):
        found.setdefault(line["model"], {})[line["library"], line["bits"], line["way"]] = line
    return found


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Markdown: the first column to the left, the others to the right."""
    header = list(header)
    lines = [header, ["---", *(["---:"] * (len(header) - 1))], *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def ordered(methods: dict[tuple, dict]) -> list[dict]:
    """The largest first."""
    return sorted(methods.values(), key=lambda line: -line["bits_per_weight"])


def of_plain(line: dict, methods: dict[tuple, dict], key: str) -> str:
    """Over what the plain method of the same width has."""
    plain = methods.get(TARGETS[line["bits"]][1]) if line["bits"] in TARGETS else None
    return f"{line[key] / plain[key]:.2f}" if plain else ""


def label_of(line: dict) -> str:
    return f"{line['library']}, {line['bits']} bits: {line['way']}"


def language_table(methods: dict[tuple, dict]) -> str:
    header = ("", "bits", "stored", "MB", "perplexity", "gap", "of plain", "KL", "of plain", "99%", "99.9%")
    header += ("same token", "right endings", "error", "seconds", "peak MB")
    rows = (
        (
            label_of(line),
            f"{line['bits_per_weight']:.2f}",
            f"{line['stored_bits_per_weight']:.2f}",
            f"{line['model_MB']:.0f}",
            f"{line['perplexity']:.3f}",
            gap_of(line),
            of_plain(line, methods, "gap"),
            f"{line['kl_divergence']:.5f}",
            of_plain(line, methods, "kl_divergence"),
            *(f"{line[key]:.3f}" if key in line else "" for key in ("kl_p99", "kl_p999")),
            f"{100 * line['top1_agreement']:.1f}%",
            f"{100 * line['right_endings']:.1f}%" if "right_endings" in line else "",
            f"{line['squared_error']:.5f}",
            f"{line['load_seconds']:.1f}",
            f"{line['peak_MB']:.0f}" if "peak_MB" in line else "",
        )
        for line in ordered(methods)
    )
    return table(header, rows)


def gap_of(line: dict) -> str:
    """In percent of the 16-bit model's perplexity, with its standard error."""
    reference = line["perplexity"] - line["gap"]
    return f"{100 * line['gap'] / reference:+.2f} ± {100 * line['gap_error'] / reference:.2f}%"


def minilm_table(methods: dict[tuple, dict]) -> str:
    header = ("", "bits", "stored", "MB", "1 - cosine", "of plain", "error", "of plain")
    rows = (
        (
            label_of(line),
            f"{line['bits_per_weight']:.2f}",
            f"{line['stored_bits_per_weight']:.2f}",
            f"{line['model_MB']:.1f}",
            f"{line['cosine_error']:.4f}",
            of_plain(line, methods, "cosine_error"),
            f"{line['squared_error']:.5f}",
            of_plain(line, methods, "squared_error"),
        )
        for line in ordered(methods)
    )
    return table(header, rows)


Target = tuple[float, str, str, float, float]  # width, way, what is measured, what was found and the most it may be


def targets_table(targets: Iterable[Target]) -> str:
    rows = (
        (f"{bits} bits: {way}", measured, f"{found:.4g}", f"{target}", verdict(found, target))
        for bits, way, measured, found, target in targets
    )
    return table(("", "measured", "found", "target", ""), rows)


def of_hf_kbit(methods: dict[tuple, dict]) -> dict[tuple, dict]:
    return {(bits, way): line for (library, bits, way), line in methods.items() if library == "hf_kbit"}


def relative_targets(methods: dict[tuple, dict], targets: dict[str, dict[float, float]]) -> Iterator[Target]:
    """Those of the gap over the 16-bit model's perplexity whose lines are there."""
    ours = of_hf_kbit(methods)
    for way, most in targets.items():
        for bits, target in most.items():
            if (bits, way) in ours:
                yield bits, way, GAP, relative_gap(ours[bits, way]), target


def trained_targets(methods: dict[tuple, dict]) -> Iterator[Target]:
    """What hf_kbit's default, error feedback and mixed widths have of what their targets name, where that is there."""
    ours = of_hf_kbit(methods)
    for way, most in ((DEFAULT, TARGETS), (FEEDBACK, CALIBRATED_TARGETS)):
        for bits, (target, key) in most.items():
            if key in methods and (bits, way) in ours:
                found = ours[bits, way]["gap"] / methods[key]["gap"]
                yield bits, way, f"gap, of that of {key[0]}, {key[2]}", found, target
    yield from relative_targets(methods, RELATIVE_TARGETS)
    for way in (DEFAULT, FEEDBACK):
        for bits, (target, *ends) in MIXED_TARGETS.items():
            needed = [(bits, way + MIXED), *((end, way) for end in ends)]
            if all(key in ours for key in needed):
                mixed, *line = (ours[key] for key in needed)
                for name, key in (("gap", "gap"), ("KL", "kl_divergence")):
                    measured = f"{name}, of that on the line from {ends[0]} to {ends[1]} bits"
                    yield (
                        bits,
                        way + MIXED,
                        measured,
                        mixed[key] / on_line(*line, mixed["bits_per_weight"], key),
                        target,
                    )


def relative_gap(line: dict) -> float:
    return line["gap"] / (line["perplexity"] - line["gap"])


def on_line(start: dict, end: dict, bits_per_weight: float, key: str) -> float:
    """What the straight line through two methods' figures has at ``bits_per_weight``, those of all layers counted."""
    sizes = start["bits_per_weight"], end["bits_per_weight"]
    return start[key] + (end[key] - start[key]) * (bits_per_weight - sizes[0]) / (sizes[1] - sizes[0])


def verdict(ratio: float, target: float) -> str:
    return "reached" if ratio <= target else "missed"


def where_from(methods: dict[tuple, dict]) -> str:
    """For each machine and day the versions, and the commands in a block of code."""
    found = {}
    for line in methods.values():
        where = "a CPU" if line["gpu"] == "none" else line["gpu"]
        versions, commands = found.setdefault((where, line["date"]), ({}, {}))
        versions |= {name: line[name] for name in ("torch", "transformers", "hf_kbit")}
        versions |= {line["library"]: line["version"]} if "version" in line else {}
        commands[line["command"]] = None
    return "\n\n".join(
        wrapped(f"Measured on {where}, {date}, with {', '.join(map(' '.join, versions.items()))}:")
        + "\n\n```bash\n"
        + "\n".join(map(wrapped_command, commands))
        + "\n```"
        for (where, date), (versions, commands) in found.items()
    )


def wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def wrapped_command(command: str) -> str:
    """``command`` in lines of 120 characters, broken outside of quotes; not indented, for one argument has as many."""
    whole = re.sub("'[^']*'", lambda quoted: quoted[0].replace(" ", "\0"), command)
    lines = textwrap.wrap(whole, 118, break_long_words=False, break_on_hyphens=False) if len(whole) > 120 else [whole]
    return " \\\n".join(lines).replace("\0", " ")


LANGUAGE_MODELS = {
    QWEN: partial(relative_targets, targets=QWEN_TARGETS),
    f"{QWEN}, code": partial(relative_targets, targets={}),
    GEMMA: partial(relative_targets, targets={}),
    f"{GEMMA}, code": partial(relative_targets, targets={}),
    SMOLLM2: partial(relative_targets, targets=SMOLLM2_TARGETS),
    TRAINED: trained_targets,
}


def text_of(models: dict[str, dict[tuple, dict]], images: dict[str, Path | str]) -> str:
    """Of each model what was measured and its tables; of a language model also its image, where ``images`` has one."""
    parts = []
    for model, targets in LANGUAGE_MODELS.items():
        if methods := models.get(model):
            line = next(reversed(methods.values()))
            text = f"{line['tokens']} held-out tokens of the text with SHA-256 {line['text_sha256'][:12]}..."
            parts.append(wrapped(f"**{model}**, {line['parameters'] / 1e6:.1f}M parameters, {text}"))
            if model in images:
                parts.append(f"![Perplexity and divergence of {model} against bits per weight]({images[model]})")
            found = list(targets(methods))
            parts += [targets_table(found)] * bool(found) + [language_table(methods), where_from(methods)]
    if methods := models.get(MINILM):
        line = next(reversed(methods.values()))
        parts += [f"**{MINILM}**, {line['sentences']} sentences", minilm_table(methods), where_from(methods)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def fill(page: Path, text: str) -> None:
    """Replaces what is between the marks of the page."""
    start, end = (re.escape(mark) for mark in MARKS)
    content = page.read_text()
    if not re.search(f"{start}.*{end}", content, flags=re.DOTALL):
        raise ValueError(f"{page}: found no marks {MARKS[0].strip()} and {MARKS[1].strip()}, expected both")
    content = re.sub(f"({start}).*({end})", lambda marks: f"{marks[1]}\n{text}\n{marks[2]}", content, flags=re.DOTALL)
    page.write_text(content)


# --- the plot -------------------------------------------------------------------------------------

COLOURS = (
    "#000000",
    "#1b9e77",
    "#d95f02",
    "#7570b3",
    "#e7298a",
    "#66a61e",
    "#e6ab02",
    "#a6761d",
    "#1f78b4",
    "#e31a1c",
    "#8c6bb1",
    "#17becf",
    "#999999",
    "#b15928",
    "#08519c",
    "#bcbd22",
    "#fb9a99",
    "#238b45",
)
MARKERS = {
    "hf_kbit": "o",
    "bitsandbytes": "s",
    "hqq": "^",
    "torchao": "v",
    "sinq": "<",
    "auto-round": ">",
    "llama_cpp_python": "D",
}


def curves(methods: dict[tuple, dict]) -> dict[tuple[str, str], list[dict]]:
    """The lines of each way that takes several widths, by library and way; fp16 has no place among them."""
    found = {}
    for (library, _, way), line in methods.items():
        if library != "fp16":
            found.setdefault((library, way), []).append(line)
    return {key: sorted(lines, key=lambda line: line["bits_per_weight"]) for key, lines in found.items()}


def styles(ways: Iterable[tuple[str, str]]) -> dict[tuple[str, str], dict]:
    """How the curves look, those that matter most at first, for that is the order of the legend."""
    found, colours = {}, {}
    for library, way in sorted(ways, key=lambda key: (key[0] != "hf_kbit", not is_calibrated(key[1]))):
        style = {"marker": MARKERS.get(library, "x"), "markersize": 5, "linewidth": 1.2}
        if library != "hf_kbit":
            style |= {"linestyle": ":", "alpha": 0.5}
        else:
            alike = way.removesuffix(MIXED)
            style["color"] = colours.setdefault(alike, COLOURS[len(colours) % len(COLOURS)])
            if is_calibrated(way):
                style["linewidth"] = 2.5
            elif alike not in (DEFAULT, TRELLIS):
                style["alpha"] = 0.4
            if way.endswith(MIXED):
                style |= {"linestyle": "--", "fillstyle": "none", "markersize": 9}
        found[library, way] = style
    return found


PLOTS = 0.76  # of the figure's width; the legend has the rest


def is_calibrated(way: str) -> bool:
    return not CALIBRATED.isdisjoint(way.split(", "))


def plot(methods: dict[tuple, dict], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    values = {
        "perplexity above fp16, %": lambda line: 100 * relative_gap(line),
        "KL divergence from fp16, nats": lambda line: line["kl_divergence"],
    }
    figure, axes = plt.subplots(1, 2, figsize=(15, 7), dpi=100)
    for (library, way), style in styles(curves(methods)).items():
        lines = curves(methods)[library, way]
        for axis, value in zip(axes, values.values(), strict=True):
            axis.plot(
                [line["bits_per_weight"] for line in lines],
                [value(line) if value(line) > 0 else math.nan for line in lines],
                label=f"{library}: {way}",
                **style,
            )
    for axis, title in zip(axes, values, strict=True):
        axis.set(xlabel="bits per weight, with scales, zeros and levels", title=title, yscale="log")
        axis.grid(which="both", alpha=0.2)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=7)
    last = next(reversed(methods.values()))
    model = f"{last['model']}, {last['parameters'] / 1e6:.0f}M parameters"
    figure.suptitle(f"{model}, {measured_on(methods.values())}", x=PLOTS / 2, fontsize=11)
    figure.tight_layout(rect=(0, 0, PLOTS, 1))
    figure.savefig(file)


def measured_on(lines: Iterable[dict]) -> str:
    """The GPUs, and the first and the last day."""
    gpus, dates = (sorted({line[key] for line in lines}) for key in ("gpu", "date"))
    return f"{' and '.join(gpus)}, {' to '.join(sorted({dates[0], dates[-1]}))}"


# Of SmolLM2's plot in short: a label, the library, its ways, and a colour.
IN_SHORT = (
    ("hf_kbit, no data", "hf_kbit", (DEFAULT,), "#1b9e77"),
    ("hf_kbit, calibrated on its own text", "hf_kbit", (FEEDBACK + OWN_TEXT,), "#00441b"),
    (
        "hf_kbit, tuned on its own text",
        "hf_kbit",
        (FEEDBACK + OWN_TEXT + TUNED, FEEDBACK + OWN_TEXT + TUNED + MIXED),
        "#000000",
    ),
    ("hf_kbit, trellis, no data", "hf_kbit", (TRELLIS,), "#6baed6"),
    ("hf_kbit, trellis, calibrated on its own text", "hf_kbit", (f"{TRELLIS}, feedback{OWN_TEXT}",), "#08306b"),
    ("bitsandbytes NF4", "bitsandbytes", ("NF4, block 64",), "#7570b3"),
    ("HQQ, groups of 64", "hqq", ("group 64",), "#d95f02"),
    ("HQQ, groups of 32", "hqq", ("group 32",), "#fdae6b"),
    ("SINQ, groups of 64", "sinq", ("group 64",), "#e7298a"),
    ("llama.cpp, Q3_K_M and Q4_K_M", "llama_cpp_python", ("Q3_K_M", "Q4_K_M"), "#666666"),
    ("AutoRound, on text like the test's", "auto-round", ("symmetric, group 64",), "#e6ab02"),
    ("AutoRound, on the model's own text", "auto-round", (f"symmetric, group 64{OWN_TEXT}",), "#a6761d"),
    (
        "EfficientQAT's recipe, on the model's own text",
        "torch",
        (f"EfficientQAT's recipe in our own code, group 64{OWN_TEXT}",),
        "#80b1d3",
    ),
)


def plot_in_short(methods: dict[tuple, dict], file: Path) -> None:
    """What a user chooses between: perplexity alone, up to where a model is of no use."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(9, 5), dpi=110, layout="constrained")
    drawn = []
    for label, library, ways, colour in IN_SHORT:
        lines = [line for line in methods.values() if line["library"] == library and line["way"] in ways]
        lines.sort(key=lambda line: line["bits_per_weight"])
        drawn += lines
        sizes = [line["bits_per_weight"] for line in lines]
        ours = {"linewidth": 2.5, "zorder": 3} if library == "hf_kbit" else {"linewidth": 1}
        axis.plot(sizes, [100 * relative_gap(line) for line in lines], "o-", color=colour, label=label, **ours)
    axis.set(yscale="log", xlim=(1.9, 5.8), ylim=(0.1, 1000), xlabel="bits per weight, with scales, zeros and levels")
    axis.yaxis.set_major_formatter("+{x:g}%")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=8)
    axis.set_title(f"Perplexity of {SMOLLM2} above that in 16 bits; {measured_on(drawn)}", fontsize=9)
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, nargs="+", help="files of JSON lines")
    parser.add_argument("--page", type=Path, help="Markdown file to put the tables into")
    parser.add_argument("--plots", type=Path, help="folder to draw a PNG of each language model into")
    arguments = parser.parse_args()
    models = read(arguments.results)
    images = {}
    if arguments.plots:
        drawn = [model for model in LANGUAGE_MODELS if model in models]
        images = {model: arguments.plots / f"quality-{model.lower().replace(', ', '-')}.png" for model in drawn}
    for model, image in images.items():
        plot(models[model], image)
    if SMOLLM2 in images:
        plot_in_short(models[SMOLLM2], arguments.plots / "quality-in-short.png")
    if arguments.page:
        images = {model: os.path.relpath(image, arguments.page.parent) for model, image in images.items()}
    text = text_of(models, images)
    print(text)
    if arguments.page:
        fill(arguments.page, text)


if __name__ == "__main__":
    main()
