"""Tables, plots and comparisons are made of stored lines."""

import json
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
CELLS = [
    {"shape": shape, "dtype": "float16", "tokens": tokens, "bits": bits, "us": 2.0 * tokens + bits, "cublas_us": 40.0}
    for shape in ("64x64", "128x64")
    for tokens in (1, 16)
    for bits in (2, 5)
]


def write(file: Path, lines: list[dict]) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def slowed(line: dict, us: float, machine: float = 1.0) -> dict:
    return line | {"us": line["us"] * us * machine, "cublas_us": line["cublas_us"] * machine}


PEER = CELLS[0] | {"peer": "humming", "us": 99.0}
SLOWER = [slowed(line, {3: 1.5, 6: 1.2}.get(i, 0.7), machine=0.8) for i, line in enumerate(CELLS)]
FIRST = [slowed(line, 3.0) for line in CELLS]


@pytest.mark.parametrize(
    ("now", "named"),
    [
        ([*(slowed(line, 1.04, machine=1.3) for line in CELLS), PEER], 0),  # a slower machine, or peer
        (SLOWER, 2),
        ([*FIRST, *CELLS], 0),  # of several runs the last counts
        ([*CELLS, *FIRST], 8),
        ([*CELLS, *(line | {"of": "gradient"} for line in FIRST)], 0),
    ],
)
def test_what_gemm_says_has_become_slower(benched, capsys, tmp_path, now, named):
    files = write(tmp_path / "now", now), write(tmp_path / "before", CELLS)
    with pytest.raises(SystemExit) as ended:
        benched("gemm").run_main("--from", files[0], "--against", files[1], json_lines=False)
    printed = capsys.readouterr().out
    assert ended.value.code == (named > 0) and f"{named} cells" in printed and printed.count("slower: ") == named
    if now is SLOWER:
        assert "slower: 64x64 float16, 5 bits, 16 tokens: 1.50 times as long\n" in printed


def test_table_of_experts(benched, capsys):
    benched("experts").run_main("--from", str(RESULTS / "experts-h200-2026-11-23.jsonl"), "--table", json_lines=False)
    page = (RESULTS.parents[1] / "docs" / "lab" / "2026-11-23-experts.md").read_text().lower()
    head, *rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("| ")]
    assert len(rows) == 12 and all(row in page.splitlines() for row in (head, *rows))


def test_table_of_models(benched, capsys, tmp_path):
    """One for each shape; of several lines for a cell the last counts, and what was not measured is empty."""
    bf16, ours = {"name": "bf16", "bits": 16}, {"name": "hf_kbit", "bits": 4}
    small, decode = {"shape": "s", "layers": 2}, {"what": "decode", "mode": "eager", "batch": 16}
    loaded = {"seconds": 2.0, "resident_GB": 11.2, "peak_GB": 123.4}
    lines = [
        small | bf16 | {"what": "load"} | loaded,
        small | ours | {"what": "load"} | loaded | {f"{field}_over_bf16": 0.5 for field in loaded},
        small | ours | decode | {"ms": 1.0, "ms_over_bf16": 9.0},
        small | ours | decode | {"ms": 2.345, "ms_over_bf16": 0.5},
        small | bf16 | {"what": "prefill", "tokens": 8, "ms": 3.0},
        {"shape": "t", "layers": 2} | bf16 | {"what": "host", "us": 10.0},
    ]
    file = write(tmp_path / "lines.jsonl", lines)
    benched("model").run_main("--from", file, "--table", json_lines=False)
    assert capsys.readouterr().out.splitlines() == [
        "s, 2 layers",
        "",
        "|  | 16 bits | 4 bits |",
        "|---|---:|---:|",
        "| loading, s | 2.00 | 2.00 (0.50) |",
        "| GPU memory, GB | 11.2 | 11.2 (0.50) |",
        "| its peak while loading, GB | 123 | 123 (0.50) |",
        "| eager, batch 16, ms per token |  | 2.35 (0.50) |",
        "| prefill of 8 tokens, ms | 3.00 |  |",
        "",
        "t, 2 layers",
        "",
        "|  | 16 bits |",
        "|---|---:|",
        "| a call of a 256 x 256 layer, us of the host | 10.0 |",
        "",
    ]


@pytest.mark.parametrize(
    ("name", "results"),
    [("model", "model-decode-h100-2026-11-25"), ("qlora", "qlora-h200-2026-11-21"), ("gemm", "gemm-h200-2026-11-23")],
)
def test_plots(benched, monkeypatch, tmp_path, name, results):
    """Each axis has what was timed."""
    figures = pytest.importorskip("matplotlib.figure")
    drawn, save = [], figures.Figure.savefig
    monkeypatch.setattr(figures.Figure, "savefig", lambda self, file: (drawn.append(self), save(self, file)))
    lines, file = str(RESULTS / f"{results}.jsonl"), tmp_path / "plot.png"
    benched(name).run_main("--from", lines, "--plot", str(file), json_lines=False)
    assert file.stat().st_size > 1000 and any(axis.lines or axis.containers for axis in drawn[0].axes)
    if name == "model":
        bars = [[round(bar.get_height(), 2) for bar in bars] for bars in drawn[0].axes[0].containers]
        assert bars == [[6.68, 7.08], [2.66, 3.5], [2.41, 3.4]]
