"""Prose and comments have lines of at most 120 characters, in all files; ruff and clang-format see to code."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 120
SUFFIXES = {".cmake", ".cpp", ".cu", ".cuh", ".h", ".ipynb", ".md", ".py", ".toml", ".yml", ".cff"}
BUILT = {"build", "dist", "site"}
# Of Markdown: what cannot be wrapped, a row of a table or a line that is one link, an image or an address.
WHOLE = re.compile(r"\s*(\||(- |\d+\. )?!?\[[^\]]*\]\([^)]*\)\W*$|<?https?://\S+$)")


def files() -> Iterator[Path]:
    yield from (ROOT / "Makefile", ROOT / ".ci" / "run")
    for folder, inner, names in os.walk(ROOT):
        inner[:] = [name for name in inner if not name.startswith(".") and name not in BUILT]
        for name in names:
            if Path(name).suffix in SUFFIXES or name == "CMakeLists.txt":
                yield Path(folder, name)


def long_lines(lines: list[str]) -> list[int]:
    return [number for number, line in enumerate(lines, 1) if len(line) > MOST]


def long_lines_of_markdown(lines: list[str]) -> list[int]:
    """All but those of code and ``WHOLE`` ones."""
    found, fence = [], None
    for number, line in enumerate(lines, 1):
        mark = re.match(r"\s*(```+|~~~+)", line)
        if mark and fence in (None, mark[1]):
            fence = None if fence else mark[1]
        elif fence is None and len(line) > MOST and not WHOLE.match(line):
            found.append(number)
    return found


def long_lines_of(file: Path) -> list[str]:
    """Where they are, as an editor wants it."""
    text = file.read_text(encoding="utf-8")
    name = file.relative_to(ROOT)
    if file.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
        return [
            f"{name}, {cell['id']}:{number}"
            for cell in cells
            for number in long_lines_of_markdown("".join(cell["source"]).splitlines())
        ]
    found = long_lines_of_markdown if file.suffix == ".md" else long_lines
    return [f"{name}:{number}" for number in found(text.splitlines())]


def bold_powers(text: str) -> list[str]:
    """Powers outside of code, of which Markdown takes the stars of two for bold."""
    prose = re.sub(r"^\s*(```+|~~~~+).*?^\s*\1|`[^`]+`", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\b\d+\*\*-?\w+", prose)


def test_powers_are_code():
    found = {file.name: bold_powers(file.read_text(encoding="utf-8")) for file in files() if file.suffix == ".md"}
    assert not any(found.values()), found


def test_no_long_lines():
    found = [place for file in files() for place in long_lines_of(file)]
    assert not found, f"wrap at {MOST} characters: " + ", ".join(found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x" * 120, []),
        ("short\n" + "word " * 30, [2]),
        ("- an item\n  " + "word " * 30, [2]),
        ("# " + "title " * 30, [1]),
        ("[a page](" + "x" * 130 + ") and " + "word " * 30, [1]),
        ("| " + "cell " * 30 + "|", []),
        ("![picture](" + "x" * 130 + ")", []),
        ("- [a page](" + "x" * 130 + ").", []),
        ("https://" + "x" * 130, []),
        ("```bash\n" + "code " * 30 + "\n```\n" + "word " * 30, [4]),
        ("````\n```\n" + "code " * 30 + "\n````", []),
    ],
)
def test_what_counts_as_prose(text, expected):
    assert long_lines_of_markdown(text.splitlines()) == expected
