"""benchmarks/gemm.py: what it says has become slower."""

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CELLS = [
    {"shape": shape, "dtype": "float16", "tokens": tokens, "bits": bits, "us": 2.0 * tokens + bits, "cublas_us": 40.0}
    for shape in ("64x64", "128x64")
    for tokens in (1, 16)
    for bits in (2, 5)
]
PEER = CELLS[0] | {"peer": "humming"}


def against(monkeypatch, capsys, folder: Path, now: list[dict], before: list[dict]) -> tuple[int, str]:
    """Exit status and output of the command for two files with these lines."""
    for name, lines in (("now", now), ("before", before)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["gemm.py", "--from", str(folder / "now"), "--against", str(folder / "before")]
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / "gemm.py"), run_name="__main__")
    return int(ended.value.code), capsys.readouterr().out


def slowed(line: dict, us: float, machine: float = 1.0) -> dict:
    return line | {"us": line["us"] * us * machine, "cublas_us": line["cublas_us"] * machine}


def test_a_slower_machine_is_no_slower_kernel(monkeypatch, capsys, tmp_path):
    now = [slowed(line, 1.04, machine=1.3) for line in CELLS]
    code, printed = against(monkeypatch, capsys, tmp_path, [*now, PEER | {"us": 99.0}], [*CELLS, PEER])
    assert code == 0 and printed.startswith("0 cells")


def test_what_is_slower_is_named(monkeypatch, capsys, tmp_path):
    now = [slowed(line, {3: 1.5, 6: 1.2}.get(i, 0.7), machine=0.8) for i, line in enumerate(CELLS)]
    code, printed = against(monkeypatch, capsys, tmp_path, now, CELLS)
    assert code == 1 and printed.splitlines()[:2] == [
        "slower: 64x64 float16, 5 bits, 16 tokens: 1.50 times as long",
        "slower: 128x64 float16, 2 bits, 16 tokens: 1.20 times as long",
    ]
    assert printed.splitlines()[2].startswith("2 cells")


def test_of_several_runs_the_last_one_counts(monkeypatch, capsys, tmp_path):
    first = [slowed(line, 3.0) for line in CELLS]
    assert against(monkeypatch, capsys, tmp_path, [*first, *CELLS], CELLS)[0] == 0
    assert against(monkeypatch, capsys, tmp_path, CELLS, [*CELLS, *first])[0] == 0
    assert against(monkeypatch, capsys, tmp_path, [*CELLS, *first], [*first, *CELLS])[0] == 1


def test_products_and_gradients_are_not_compared(monkeypatch, capsys, tmp_path):
    gradients = [slowed(line, 2.0) | {"of": "gradient"} for line in CELLS]
    assert against(monkeypatch, capsys, tmp_path, [*CELLS, *gradients], CELLS)[0] == 0
    monkeypatch.setattr(sys, "argv", ["gemm.py"])
    with pytest.raises(ValueError, match="--against: found no shape"):
        against(monkeypatch, capsys, tmp_path, gradients, CELLS)
