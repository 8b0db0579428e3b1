"""``hf-kbit info``: what is installed."""

import os
import platform
from argparse import ArgumentParser, Namespace
from importlib.metadata import PackageNotFoundError, version

import hf_kbit
from hf_kbit.cli.output import line


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def add_options(parser: ArgumentParser) -> None:
    """None of its own."""


def command(given: Namespace) -> None:
    """Show what is installed and what is missing, why, and what to do about it."""
    import torch

    from hf_kbit.ops import native

    build = native.build_info()
    line("hf_kbit", f"{hf_kbit.__version__}, Python {platform.python_version()}, {platform.platform()}")
    line("torch", f"{torch.__version__} in {torch.__path__[0]}")
    for package in ("transformers", "accelerate", "peft"):
        line(package, _version(package))
    gpus = [of.get_device_name(i) for of in (torch.cuda, torch.xpu) for i in range(of.device_count())]
    line("GPUs", ", ".join(gpus) or "none that torch can use")
    for name in ("cpu", "cuda", *(["xpu"] if torch.xpu.is_available() else [])):
        library, built = native.library(name), build.get(name, {})
        if not library.loaded:
            line(f"{name} kernels", f"missing: {library.missing}")
            if name in native.TRITON_DEVICES and getattr(torch, name).is_available():
                line("", native.triton_missing(name) or "Triton's kernels decode weights and multiply instead")
            continue
        line(f"{name} kernels", str(library.path))
        if built:
            line("", f"built by {built['compiler']} with the headers of torch {build['torch']}")
        if archs := built.get("archs", "").split():
            newer = ["newer ones"] if any(arch.isdigit() for arch in archs) else []  # the others are without PTX
            line("", "for " + ", ".join([f"sm_{arch.removesuffix('-real')}" for arch in archs] + newer))
        if name == "cpu":
            set_by = ", set by HF_KBIT_CPU" if os.environ.get("HF_KBIT_CPU") else ""
            line("", f"uses {native.instruction_set(library.path)} instructions{set_by}")
    usable = ["cpu"] + (["cuda"] if torch.version.cuda else [])
    if not all(native.library(name).loaded for name in usable):
        line("", f"to install hf_kbit again, add {native.REINSTALL_OPTIONS} to the command that installed it")
