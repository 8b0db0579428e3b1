"""What the notebooks show without being run: `make notebooks` stores it, `make test-all` runs them."""

import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
MOST_BYTES = 300_000
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:[\w.-]+/)+")

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]


def test_stored_outputs_are_those_of_one_run(path):
    """From top to bottom, without an error, and without times that would differ in every commit."""
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    for cell in cells:
        assert all(output["output_type"] != "error" for output in cell["outputs"]), cell["id"]
        assert "execution" not in cell["metadata"], cell["id"]


def test_stored_outputs_have_a_plot(path):
    shown = [data for cell in code_cells(path) for output in cell["outputs"] for data in output.get("data", ())]
    assert "image/png" in shown


def test_stored_outputs_name_no_path_of_a_machine(path):
    for cell in code_cells(path):
        for output in cell["outputs"]:
            text = "".join(output.get("text", ())) + "".join(output.get("data", {}).get("text/plain", ()))
            assert not ABSOLUTE.findall(text), cell["id"]


def test_notebook_is_small(path):
    assert path.stat().st_size < MOST_BYTES
