"""The command ``hf-kbit``."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch
import typer

import hf_kbit
from hf_kbit import _native

app = typer.Typer(help="Low-bit weights for Transformers.", no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Low-bit weights for Transformers."""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _line(label: str, text: str) -> None:
    typer.echo(f"{label:<13} {text}")


@app.command()
def info() -> None:
    """Shows what is loaded, what is missing, why, and what to do about it."""
    build = _native.build_info()
    _line("hf_kbit", f"{hf_kbit.__version__}, Python {platform.python_version()}, {platform.platform()}")
    _line("torch", f"{torch.__version__} in {torch.__path__[0]}")
    for package in ("transformers", "accelerate", "peft"):
        _line(package, _version(package))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    _line("GPUs", ", ".join(gpus) or "none that torch can use")
    for name in ("cpu", "cuda"):
        library, built = _native.library(name), build.get(name, {})
        if not library.loaded:
            _line(f"{name} kernels", f"missing: {library.missing}")
            continue
        _line(f"{name} kernels", str(library.path))
        if built:
            _line("", f"built by {built['compiler']} with the headers of torch {build['torch']}")
        if archs := built.get("archs", "").split():
            newer = ["newer ones"] if any(arch.isdigit() for arch in archs) else []  # the others are without PTX
            _line("", "for " + ", ".join([f"sm_{arch.removesuffix('-real')}" for arch in archs] + newer))
        if name == "cpu":
            set_by = ", set by HF_KBIT_CPU" if os.environ.get("HF_KBIT_CPU") else ""
            _line("", f"uses {_native.instruction_set(library.path)} instructions{set_by}")
    usable = ["cpu"] + (["cuda"] if torch.version.cuda else [])
    if not all(_native.library(name).loaded for name in usable):
        _line("", f"to install hf_kbit again, add {_native.REINSTALL_OPTIONS} to the command that installed it")


if __name__ == "__main__":
    app()
