"""Collects the text that a Linux machine with Python has anyway, in parts to train on and to hold out.

    python -m benchmarks.quality.data

prints what there is: megabytes of each source, and a hash of the text. A source is the standard library, an installed
package, the English manual pages, or a package's documentation in /usr/share/doc. From each at most ``CAP`` bytes are
taken to train on, and one in ``HELD_OUT_ONE_IN`` of that to hold out, so that none drowns the others: files in the
order of a hash of their names.

Left out: files that are the same as an earlier one, licences, tables (few letters, or long lines), and what many files
have at their top: the comment with the licence, the macros of a manual page. Held out are whole folders of sources
(``transformers/models``, ``torch/optim``; one in ``HELD_OUT_ONE_IN``, told by a hash of the name), since the files of
one folder are often alike; and of those no file that has more than half of its longer lines in common with the text
to train on.
"""

import gzip
import hashlib
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".py", ".md", ".rst", ".txt")
LEFT_OUT = {"__pycache__", "site-packages", "dist-packages"}
LICENCES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "COPYRIGHT", "THIRD")
SMALLEST, LARGEST = 200, 1 << 20  # bytes of a file
LONGEST_LINES = 120  # characters, on average
FEWEST_LETTERS = 0.5  # of the characters that are not space
CAP = 32 << 20
HELD_OUT_ONE_IN = 16
BEGINNING = 4096  # characters of a file to calibrate on
LONG_LINE = 40  # characters: shorter ones are in many files


@dataclass(frozen=True)
class File:
    source: str
    folder: str
    name: str
    path: Path

    @property
    def order(self) -> bytes:
        return hashlib.sha256(self.name.encode()).digest()

    @property
    def held_out(self) -> bool:
        return hashlib.sha256(self.folder.encode()).digest()[0] % HELD_OUT_ONE_IN == 0


@dataclass
class Text:
    """Documents to train on and held out, and of each source the bytes taken: ``{"torch": [train, held out]}``."""

    train: list[str]
    held_out: list[str]
    sources: dict[str, list[int]]

    @property
    def sha256(self) -> str:
        digest = hashlib.sha256()
        for document in (*self.train, "\0", *self.held_out):
            digest.update(document.encode())
        return digest.hexdigest()


def roots() -> dict[str, tuple[Path, tuple[str, ...]]]:
    """Folders on this machine, by what they are called here, and the suffixes of files to read there."""
    packages = sorted({entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")})
    return {
        "python": (Path(sysconfig.get_paths()["stdlib"]), SUFFIXES),
        **{f"packages{number}": (Path(entry), SUFFIXES) for number, entry in enumerate(packages)},
        "doc": (Path("/usr/share/doc"), (*SUFFIXES, "README", "README.gz", ".txt.gz", ".md.gz", ".rst.gz")),
        **{f"man{section}": (Path(f"/usr/share/man/man{section}"), (".gz",)) for section in range(1, 10)},
    }


def files(root: str, folder: Path, suffixes: tuple[str, ...]) -> Iterator[File]:
    for where, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.endswith(".dist-info")]
        for name in names:
            path = Path(where) / name
            if name.endswith(suffixes) and not name.upper().startswith(LICENCES) and not path.is_symlink():
                parts = path.relative_to(folder).parts
                if root == "python":
                    source, group = root, parts[:1]
                elif root.startswith("man"):
                    source, group = "man", parts
                else:
                    source, group = parts[0] if root.startswith("packages") else root, parts[:2]
                yield File(source, "/".join((root.rstrip("0123456789"), *group)), "/".join((root, *parts)), path)


def read(path: Path) -> str | None:
    """The text of a file without its licence; None if it is unreadable, no prose and no program."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        text = content.decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error):
        return None
    if not SMALLEST <= len(content) <= LARGEST or "\0" in text:
        return None
    text = without_top(text, path.suffix)
    letters = sum(map(str.isalpha, text))
    if len(text) > LONGEST_LINES * (text.count("\n") + 1) or letters < FEWEST_LETTERS * len("".join(text.split())):
        return None
    return text


def without_top(text: str, suffix: str) -> str:
    """Python without a first comment about rights; a manual page (``.gz``) from its first section on."""
    if suffix == ".gz":
        section = re.search(r"^\.S[Hh] ", text, flags=re.MULTILINE)
        return text[section.start() :] if section else text
    comment = re.match(r"(#.*\n)*", text)[0] if suffix == ".py" else ""
    return text.removeprefix(comment) if re.search("copyright|licen[cs]e", comment, flags=re.IGNORECASE) else text


def long_lines(text: str) -> list[str]:
    return [line for line in map(str.strip, text.splitlines()) if len(line) >= LONG_LINE]


def collect(folders: dict[str, tuple[Path, tuple[str, ...]]] | None = None, cap: int = CAP) -> Text:
    """The text of ``folders``, by default ``roots()``: on one machine always the same, in the same order."""
    found = [file for root, where in (folders or roots()).items() for file in files(root, *where)]
    found.sort(key=lambda file: (file.source, file.order))
    with ThreadPoolExecutor() as pool:
        texts = pool.map(read, [file.path for file in found])
        taken = list(capped(zip(found, texts, strict=True), cap))
    train = [(file, text) for file, text in taken if not file.held_out]
    known = {line for _, text in train for line in long_lines(text)}
    held_out = [(file, text) for file, text in taken if file.held_out and not is_known(text, known)]
    sources = {file.source: [0, 0] for file, _ in taken}
    for part, documents in enumerate((train, held_out)):
        for file, text in documents:
            sources[file.source][part] += len(text.encode())
    return Text([text for _, text in train], [text for _, text in held_out], sources)


def training_text(characters: int, folders: dict[str, tuple[Path, tuple[str, ...]]] | None = None) -> str:
    """So many characters from folders that are not held out: the beginnings of files in the order of a hash of their
    names, at most ``BEGINNING`` of each."""
    found = [file for root, where in (folders or roots()).items() for file in files(root, *where) if not file.held_out]
    parts, taken = [], 0
    for file in sorted(found, key=lambda file: file.order):
        if taken >= characters:
            break
        text = (read(file.path) or "")[:BEGINNING]
        parts.append(text)
        taken += len(text)
    return "\n\n".join(filter(None, parts))[:characters]


def capped(documents: Iterable[tuple[File, str | None]], cap: int) -> Iterator[tuple[File, str]]:
    """Documents that are no copy of an earlier one, as many of each source as fit into ``cap`` bytes."""
    seen, taken = set(), Counter()
    for file, text in documents:
        if text is None:
            continue
        content, part = text.encode(), (file.source, file.held_out)
        limit = cap // HELD_OUT_ONE_IN if file.held_out else cap
        digest = hashlib.sha256(content).digest()
        if digest not in seen and taken[part] + len(content) <= limit:
            seen.add(digest)
            taken[part] += len(content)
            yield file, text


def is_known(text: str, known: set[str]) -> bool:
    lines = long_lines(text)
    return 2 * sum(line in known for line in lines) > len(lines)


def main() -> None:
    text = collect()
    print(f"{'MB to train on':>14}{'held out':>10}")
    for source, (train, held_out) in sorted(text.sources.items(), key=lambda item: -sum(item[1])):
        print(f"{train / 1e6:14.2f}{held_out / 1e6:10.2f}  {source}")
    train, held_out = (sum(part) for part in zip(*text.sources.values(), strict=True))
    print(f"{train / 1e6:14.2f}{held_out / 1e6:10.2f}  together; SHA-256 {text.sha256}")


if __name__ == "__main__":
    main()
