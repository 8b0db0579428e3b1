"""The plot and the table of README.md, from lines that other benchmarks wrote.

    python benchmarks/readme.py [--plot docs/images/readme.png]

writes the table between the two marks in README.md, and with ``--plot`` draws the picture, which needs matplotlib:
what ``model.py`` measured, compiled and at batch 1. The table has besides what ``quality/measure.py`` measured.
"""

import argparse
import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPEED = RESULTS / "model-h200-2026-11-21.jsonl"
QUALITY = sorted(RESULTS.glob("quality-qwen2.5-coder-1.5b-h200-*.jsonl"))
MARKS = "<!-- table -->\n", "<!-- end of table -->\n"
# What the table compares: a label, the library, its bits and way in QUALITY, and the name in SPEED, where it is there.
ROWS = (
    ("16 bits", "fp16", 16, "as trained", "bf16"),
    ("bitsandbytes NF4", "bitsandbytes", 4, "NF4, block 64", "bitsandbytes"),
    ("EXL3, 4 bits", "exllamav3", 4, "EXL3", None),
    ("**hf_kbit, 4 bits**", "hf_kbit", 4, "optimal, search", "hf_kbit"),
    ('**hf_kbit, 4 bits, "weighted"**', "hf_kbit", 4, "optimal, weighted, built-in text", "hf_kbit"),
    ("EXL3, 3 bits", "exllamav3", 3, "EXL3", None),
    ("**hf_kbit, 3 bits, calibrated**", "hf_kbit", 3, "optimal, feedback, own text", "hf_kbit"),
    ("**the same, a trellis**", "hf_kbit", 3, "trellis, feedback, own text", None),
)


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def prose(file: Path) -> list[dict]:
    """Its lines but those about code."""
    return [line for line in read(file) if not line["model"].endswith(", code")]


def speeds() -> dict[tuple[str, int], tuple[float, float]]:
    """Milliseconds a token and GB of weights, by name and bits."""
    lines = read(SPEED)
    memory = {(line["name"], line["bits"]): line["resident_GB"] for line in lines if line["what"] == "load"}
    return {
        (line["name"], line["bits"]): (line["ms"], memory[line["name"], line["bits"]])
        for line in lines
        if (line["what"], line.get("mode"), line.get("batch")) == ("decode", "compiled", 1)
    }


def table() -> str:
    quality = {(line["library"], line["bits"], line["way"]): line for file in QUALITY for line in prose(file)}
    rows = [
        "| | bits per weight | MB | perplexity | ms a token, 8B | GB, 8B |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for label, library, bits, way, name in ROWS:
        line = quality[library, bits, way]
        ms, gigabytes = (f"{value:.1f}" for value in speeds()[name, bits]) if name else ("", "")
        figures = f"{line['stored_bits_per_weight']:.2f}", f"{line['model_MB']:.0f}", f"{line['perplexity']:.2f}"
        rows.append(f"| {' | '.join((label, *figures, ms, gigabytes))} |")
    return "\n".join(rows) + "\n"


def fill(page: Path) -> None:
    start, end = map(re.escape, MARKS)
    text, count = re.subn(f"({start}).*({end})", rf"\1\n{table()}\n\2", page.read_text(), flags=re.DOTALL)
    if not count:
        raise ValueError(f"{page}: found no marks {MARKS[0].strip()} and {MARKS[1].strip()}, expected both")
    page.write_text(text)


def draw(file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = {
        "16 bits": ("bf16", 16),
        "bitsandbytes NF4": ("bitsandbytes", 4),
        "hf_kbit, 4 bits": ("hf_kbit", 4),
        "hf_kbit, 3 bits": ("hf_kbit", 3),
    }
    colours = ["#999999", "#7570b3", "#1b9e77", "#1b9e77"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), dpi=150, sharey=True)
    for axis, title, index in zip(axes, ("milliseconds a token", "GB of weights"), range(2), strict=True):
        values = [speeds()[key][index] for key in names.values()]
        axis.bar_label(axis.barh(list(names), values, color=colours), fmt="%.1f", padding=3)
        axis.set_title(title, fontsize=10)
        axis.set_xlim(0, max(values) * 1.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].invert_yaxis()
    line = read(SPEED)[0]
    figure.suptitle(f"Llama-3-8B's shape, batch 1, compiled; one {line['gpu']}, {line['date']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    arguments = parser.parse_args()
    fill(ROOT / "README.md")
    if arguments.plot:
        draw(arguments.plot)


if __name__ == "__main__":
    main()
