"""Lines of prose, powers, and links of Markdown that mkdocs does not see; ruff and clang-format see to code."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 120
SUFFIXES = {".cmake", ".cpp", ".cu", ".cuh", ".h", ".ipynb", ".md", ".toml", ".yml", ".cff"}
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


def long_lines(text: str, markdown: bool) -> list[int]:
    """Their numbers; of Markdown all but those of code and ``WHOLE`` ones."""
    found, fence = [], None
    for number, line in enumerate(text.splitlines(), 1):
        mark = markdown and re.match(r"\s*(```+|~~~+)", line)
        if mark and fence in (None, mark[1]):
            fence = None if fence else mark[1]
        elif fence is None and len(line) > MOST and not (markdown and WHOLE.match(line)):
            found.append(number)
    return found


def texts_of(file: Path) -> Iterator[tuple[str, str]]:
    """Its place, as an editor wants it, and its text; of a notebook those of each cell of Markdown."""
    name, text = str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        yield name, text
        return
    for cell in json.loads(text)["cells"]:
        if cell["cell_type"] == "markdown":
            yield f"{name}, {cell['id']}", "".join(cell["source"])


def bold_powers(text: str) -> list[str]:
    """Powers outside of code, of which Markdown takes the stars of two for bold."""
    prose = re.sub(r"^\s*(```+|~~~~+).*?^\s*\1|`[^`]+`", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"\b\d+\*\*-?\w+", prose)


def test_lines_and_powers():
    found = []
    for file in files():
        markdown = file.suffix in (".md", ".ipynb")
        for place, text in texts_of(file):
            found += [f"{place}:{number}: wrap at {MOST} characters" for number in long_lines(text, markdown)]
            found += [f"{place}: {power} is no code" for power in bold_powers(text)] if markdown else []
    assert not found, "\n".join(found)


def test_links_of_pages_that_mkdocs_does_not_build():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for name, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", page.read_text()):
            target = ROOT / name if name else page
            assert target.exists(), f"{page.name}: {name}"
            headings = re.findall("^#+ (.*)$", target.read_text(), flags=re.MULTILINE) if anchor else ()
            slugs = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
            assert not anchor or anchor in slugs, f"{page.name}: {name}#{anchor}"
