"""The text that commands read: options, files and datasets."""

from pathlib import Path
from typing import Annotated

import typer

# Options of commands that read text.
Text = Annotated[list[Path] | None, typer.Option(help="File of text in UTF-8 to read. Can be given several times.")]
Dataset = Annotated[
    str | None,
    typer.Option(
        metavar="NAME[:CONFIG]",
        help="Dataset to read instead of --text: a name on the Hub, a folder, or a file of rows.",
    ),
]
Split = Annotated[str, typer.Option(help="With --dataset: name of its split.")]
Column = Annotated[str, typer.Option(help="With --dataset: name of its column that has the text.")]

# How datasets reads a file, by the end of its name.
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


class NamedText(str):
    """A text, and what reports call it."""

    def __new__(cls, text: str, name: str):
        new = super().__new__(cls, text)
        new.name = name
        return new


def read_text(files: list[Path] | None, dataset: str | None, split: str, column: str) -> NamedText:
    """The files, or the rows of the dataset, with an empty line between two."""
    from hf_kbit.calibration.data import read

    if bool(files) == bool(dataset):
        raise ValueError(f"found {'both' if files else 'neither'} of --text and --dataset, expected one")
    if dataset:
        return NamedText("\n\n".join(_rows(dataset, split, column)), dataset)
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"--text: found no file {missing[0]}, expected one of text in UTF-8")
    return NamedText("\n\n".join(map(read, files)), ", ".join(map(str, files)))


def _rows(dataset: str, split: str, column: str) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError("--dataset: found no package datasets, expected it: pip install datasets") from None
    if (file := Path(dataset)).is_file():
        if file.suffix not in READERS:
            raise ValueError(f"{file}: found {file.suffix!r}, expected a name with one of {sorted(READERS)}")
        rows = load_dataset(READERS[file.suffix], data_files={split: dataset}, split=split)
    else:
        name, _, config = dataset.partition(":")
        rows = load_dataset(name, config or None, split=split)
    if column not in rows.column_names:
        raise ValueError(f"--column: found {column!r}, expected one of {rows.column_names}, which {dataset} has")
    texts = list(rows[column])
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"--column: found values in {column!r} that are no text, expected text in each row")
    return texts
