"""Options that several commands have: how a model is loaded, the device, and the text to read."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

# How datasets reads a file, by the end of its name.
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}


def add(parser: ArgumentParser, name: str, about: str, **how: Any) -> None:
    """Adds an option, whose help says its default."""
    default = how.get("default")
    shown = "" if default in (None, True) else f" Default: {default}."
    parser.add_argument(name, help=about + shown, **how)


def at_least(least: int) -> Callable[[str], int]:
    """For ``type`` of an option."""

    def number(text: str) -> int:
        if int(text) < least:
            raise ArgumentTypeError(f"found {text}, expected {least} or more")
        return int(text)

    return number


def check_alone(other: str, is_given: object, **options: object) -> None:
    """Refuses options that have no use without another one."""
    for name, value in options.items():
        if value and not is_given:
            raise ValueError(f"--{name.replace('_', '-')}: found it without --{other}, expected both")


# --- the model and the device ---------------------------------------------------------------------


def add_loading(parser: ArgumentParser) -> None:
    dtypes = ("auto", "float32", "float16", "bfloat16")
    about = "Dtype of what is not quantized; auto takes that of the checkpoint."
    add(parser, "--dtype", about, choices=dtypes, default="auto")
    add(parser, "--revision", "Branch, tag or commit of the model on the Hub. Default: its main branch.")
    about = "Allow Python code that comes with the model to run. Default: it is not run."
    add(parser, "--trust-remote-code", about, action="store_true")


def source(given: Namespace) -> dict[str, Any]:
    """Arguments of every ``from_pretrained``, those of tokenizers and configs too."""
    return {"revision": given.revision, "trust_remote_code": given.trust_remote_code}


def add_device(parser: ArgumentParser, names: str = "cpu, cuda or cuda:1") -> None:
    about = f"Device to compute on: {names}. Default: the first GPU, or the CPU if there is none."
    add(parser, "--device", about)


def resolve_device(device: str | None) -> str:
    """What ``--device`` says, or a GPU where there is one; a ValueError where torch cannot use the one named."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"--device: found {device}, but torch can use no GPU; see hf-kbit info")
    return device


def add_inputs(parser: ArgumentParser) -> None:
    about = "Inputs of quantized layers: int8 rounds them to 8 bits, none leaves them in 16. Default: as MODEL wishes."
    add(parser, "--inputs", about, choices=("int8", "none"))


def set_inputs(model, given: Namespace) -> None:
    """Has a loaded model take the inputs that ``--inputs`` says."""
    from hf_kbit.integrations.transformers import inputs

    if given.inputs is not None:
        inputs.set_inputs(model, None if given.inputs == "none" else given.inputs)


# --- text -----------------------------------------------------------------------------------------


class NamedText(str):
    """A text, and the name that reports have for it."""

    name: str


def add_text(parser: ArgumentParser, split: str, required: bool = False) -> None:
    group = parser.add_mutually_exclusive_group(required=required)
    about = "File of text in UTF-8 to read. Can be given several times."
    add(group, "--text", about, type=Path, action="append", metavar="FILE")
    about = "Dataset to read instead of --text: a name on the Hub, a folder, or a file of rows."
    add(group, "--dataset", about, metavar="NAME[:CONFIG]")
    add(parser, "--split", "With --dataset: name of its split.", default=split)
    add(parser, "--column", "With --dataset: name of its column that has the text.", default="text")


def read_text(given: Namespace) -> NamedText | None:
    """The files, or the rows of the dataset, with an empty line between two; None if neither is given."""
    from hf_kbit.calibration.data import read

    if not given.text and not given.dataset:
        return None
    parts = map(read, given.text) if given.text else _rows(given.dataset, given.split, given.column)
    text = NamedText("\n\n".join(parts))
    text.name = ", ".join(map(str, given.text or [given.dataset]))
    return text


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
