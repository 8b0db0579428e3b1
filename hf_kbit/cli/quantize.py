"""``hf-kbit quantize``: quantizes a model and saves it."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_kbit.cli.device import Device, resolve_device
from hf_kbit.cli.model import Loading
from hf_kbit.cli.output import line
from hf_kbit.cli.text import Column, Dataset, Split, Text, read_text
from hf_kbit.format import BITS

INTERRUPTED = "interrupted; the same command goes on after the last layer that was calibrated, if any was"
# What lies beside a model and is copied as it is: tokenizers, processors, chat templates.
BESIDE = (
    *("tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "normalizer.json"),
    *("*.model", "*.tiktoken", "*.spm", "*processor_config.json", "chat_template*", "additional_chat_templates/*"),
)


@dataclass(frozen=True)
class Width:
    """Options that say how many bits a weight gets; a ValueError where they contradict each other."""

    bits: Annotated[
        float | None,
        typer.Option(
            help="Number of bits for each weight: 2, 3, 4 or 5, or a mean such as 3.4, for which each layer gets its "
            "own width. Default: 4."
        ),
    ] = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory that the model may take, such as 20GB or 800MiB, instead of --bits. Default: not limited.",
        ),
    ] = None
    context: Annotated[
        int, typer.Option(min=0, help="With --memory: number of tokens of a sequence that must fit in it too.")
    ] = 8192

    def __post_init__(self):
        if self.bits is not None and self.memory is not None:
            raise ValueError("--memory: found it and --bits, expected one")
        if self.bits is not None and not BITS[0] <= self.bits <= BITS[-1]:
            raise ValueError(f"--bits: found {self.bits}, expected {BITS[0]} to {BITS[-1]}")

    @property
    def is_mean(self) -> bool:
        return bool(self.bits and self.bits % 1)


@dataclass(frozen=True)
class Data:
    """Options of quantizing with data; a ValueError where one has no use without another."""

    calibrate: Annotated[
        bool, typer.Option(help="Quantize with data: better, most of all at 2 and 3 bits, and slower.")
    ] = False
    method: Annotated[str, typer.Option(help="With --calibrate: how weights are chosen, by feedback or weighted.")] = (
        "feedback"
    )
    tune: Annotated[
        bool,
        typer.Option(
            help="With --calibrate: then train what is stored, each layer and then the whole model, towards 16 bits: "
            "better still at 2 and 3 bits, and slower."
        ),
    ] = False
    steps: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of steps of --tune for the whole model; each layer gets a fifth. "
            "Default: 1000, or 200 on a CPU.",
        ),
    ] = None
    tune_whole: Annotated[
        bool,
        typer.Option(
            help="With --tune: train the whole model too, after its layers; there must be memory for it some six "
            "times in 16 bits. Without, its layers alone."
        ),
    ] = True
    text: Text = None
    dataset: Dataset = None
    split: Split = "train"
    column: Column = "text"
    sequences: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of sequences to calibrate on: the most to take of a text, or what the model writes. "
            "Default: 128, or 64 if the model writes them on a CPU; with --tune 4096 and 256.",
        ),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of tokens in a sequence, best as many as the model will read at once. "
            "Default: 2048 of a text, 640 if the model writes them, 256 if it does so on a CPU.",
        ),
    ] = None
    batch: Annotated[
        int, typer.Option(min=1, help="Number of sequences that go through a layer at once; fewer need less memory.")
    ] = 4

    def __post_init__(self):
        if self.tune and not self.calibrate:
            raise ValueError("--tune: found it without --calibrate, expected both")
        if self.steps and not self.tune:
            raise ValueError(f"--steps: found {self.steps} without --tune, expected both")
        if not self.tune_whole and not self.tune:
            raise ValueError("--no-tune-whole: found it without --tune, expected both")

    def read(self):
        """The text that is given, or None."""
        given = self.text or self.dataset
        return read_text(self.text, self.dataset, self.split, self.column) if given else None

    @property
    def settings(self) -> dict[str, Any]:
        """Of ``quantize_model``, but for the data."""
        solving = {"method": self.method, "tune": self.steps or self.tune, "tune_whole": self.tune_whole}
        amount = {"sequences": self.sequences, "length": self.length, "batch": self.batch}
        return {"calibrate": self.calibrate, **solving, **amount}


@dataclass(frozen=True)
class Layers:
    """Options that say what is quantized, and to which levels."""

    embedding_bits: Annotated[
        int | None,
        typer.Option(
            help="Number of bits for tables of embeddings, and for heads tied to them: 2, 3, 4 or 5. "
            "Default: they stay in 16 bits, or with --memory get 5 where the other layers would have fewer than 4."
        ),
    ] = None
    codebook: Annotated[
        str | None,
        typer.Option(
            help="Codebook, the levels that weights are rounded to: optimal, normal_float, int or fp4. "
            "Default: optimal."
        ),
    ] = None
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Name or pattern of layers to leave in 16 bits. Can be given several times. Default: none."),
    ] = None

    @property
    def settings(self) -> dict[str, Any]:
        """Of ``KbitConfig``."""
        codebook = {"codebook": self.codebook} if self.codebook else {}
        return {"modules_to_not_convert": self.skip or [], "embedding_bits": self.embedding_bits, **codebook}


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="Model to quantize: a folder, or a name on the Hub, in 16 or 32 bits, or GPT-OSS with MXFP4 experts."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to save the quantized model in: a new one or an empty one.")],
    width: Width,
    data: Data,
    layers: Layers,
    device: Device = None,
    *,
    loading: Loading,
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="REPOSITORY", help="Name on the Hub to upload the saved model to. Default: it is not uploaded."
        ),
    ] = None,
) -> None:
    """Quantize a model and save it.

    Without --text and --dataset, calibrating takes text that the model writes itself, or the built-in text if the
    model cannot write. If it is interrupted, the same command goes on after the last layer that was finished.
    """
    from hf_kbit.calibration.data import tokenizer_of
    from hf_kbit.calibration.layerwise import load
    from hf_kbit.cli.folder import claim
    from hf_kbit.config import KbitConfig
    from hf_kbit.integrations.transformers.cards import model_card
    from hf_kbit.memory import parse_size
    from hf_kbit.post_training import quantize_model

    start = time.monotonic()
    device, size = resolve_device(device), None if width.memory is None else parse_size(width.memory, "--memory")
    source, dtype = loading.source, loading.dtype
    needs_dense = data.calibrate or size is not None or width.is_mean
    _check(model, data.method, source, needs_dense)
    bits = {"bits": width.bits if width.is_mean else int(width.bits)} if width.bits else {}
    config = KbitConfig(**layers.settings, **bits)
    if not needs_dense and (data.text or data.dataset):
        raise ValueError("--text: found data, but neither --calibrate nor mixed widths need it")
    text = data.read()
    with claim(out) as output:
        if needs_dense:
            quantized = load(model, dtype=dtype, **source)
            fit = {"memory": size, "context": width.context, "measure": width.is_mean or None}
            read = {"data": text, "tokenizer": tokenizer_of(model, **source)}
            kept = {"resume": output.layers} if data.calibrate else {}
            quantize_model(quantized, config, **fit, **read, **data.settings, **kept, device=device, report=line)
        else:
            quantized = load(model, dtype=dtype, device_map=device, quantization_config=config, **source)
        quantized.save_pretrained(output.model)
        model_card(quantized, push_to_hub or out.resolve().name).save(output.model / "README.md")
        _copy_beside(model, loading.revision, output.model)
        output.publish()
    saved = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    line("saved", f"{out}: {saved / 1e6:,.3g} MB, after {time.monotonic() - start:,.0f} s")
    if push_to_hub is not None:
        from huggingface_hub import create_repo, file_exists, upload_folder

        repository = create_repo(push_to_hub, exist_ok=True).repo_id
        kept = ["README.md"] if file_exists(repository, "README.md") else []  # a card that somebody has written
        upload_folder(repo_id=repository, folder_path=out, ignore_patterns=kept)
        line("uploaded", repository)


def _check(model: str, method: str, source: dict, needs_dense: bool) -> None:
    """Refuses what can be refused before anything large is loaded."""
    from transformers import AutoConfig

    from hf_kbit.calibration.layerwise import METHODS
    from hf_kbit.integrations.transformers import mxfp4

    if method not in METHODS:
        raise ValueError(f"--method: found {method!r}, expected one of {sorted(METHODS)}")
    found = getattr(AutoConfig.from_pretrained(model, **source), "quantization_config", None)
    if found is not None and not mxfp4.is_config(found):
        raise ValueError(f"{model}: found it quantized already, expected a model in 16 or 32 bits")
    if found is not None and needs_dense:
        raise ValueError(
            f"{model}: found experts in MXFP4, which are quantized without data, expected neither --calibrate nor "
            "--memory nor a mean of --bits"
        )


def _copy_beside(model: str, revision: str | None, out: Path) -> None:
    """Copies the tokenizer, processors and chat templates that the model has, and makes up none."""
    if Path(model).is_dir():
        folder = Path(model)
    else:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model, revision=revision, allow_patterns=list(BESIDE)))
    files = [file for pattern in BESIDE for file in folder.glob(pattern) if file.is_file()]
    for file in files:
        target = out / file.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    if not any(file.name.startswith("tokenizer") or "processor" in file.name for file in files):
        line("tokenizer", f"none in {model}")
