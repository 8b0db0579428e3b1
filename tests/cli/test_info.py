"""``hf-kbit info``: what it says is installed, and missing."""

import importlib.metadata
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import succeed

import hf_kbit
from hf_kbit import cli
from hf_kbit.ops import native

REINSTALL = "to install hf_kbit again, add --force-reinstall --no-deps --no-cache-dir to the command that installed it"
BUILD = {
    "torch": "2.13",
    "cpu": {"missing": "", "compiler": "GNU 12.2.0"},
    "cuda": {"missing": "", "compiler": "nvcc 13.0.88", "archs": "80-real 90a-real 120"},
}


def info():
    return succeed("info").stdout.splitlines()


def test_this_installation():
    lines = info()
    assert lines[0].startswith(f"hf_kbit       {hf_kbit.__version__}, Python {sys.version.split()[0]}, ")
    assert lines[1] == f"torch         {torch.__version__} in {torch.__path__[0]}"
    assert f"transformers  {importlib.metadata.version('transformers')}" in lines
    found = native.library("cpu")
    assert f"cpu kernels   {found.path if found.loaded else f'missing: {found.missing}'}" in lines


CPU = ["cpu kernels   /p/cpu.so", "              built by GNU 12.2.0 with the headers of torch 2.13"]
CUDA = ["cuda kernels  /p/cuda.so", "              built by nvcc 13.0.88 with the headers of torch 2.13"]
USES = "              uses avx2 instructions"
NO_PTX = {**BUILD, "cuda": {**BUILD["cuda"], "archs": "90a-real"}}
NO_CUDA = "torch was built without CUDA"


@pytest.mark.parametrize(
    ("missing", "build", "torch_cuda", "shown"),
    [
        ({}, BUILD, "13.0", [*CPU, USES, *CUDA, "              for sm_80, sm_90a, sm_120, newer ones"]),
        ({}, NO_PTX, "13.0", [*CPU, USES, *CUDA, "              for sm_90a"]),
        ({}, {}, "13.0", [CPU[0], USES, CUDA[0]]),
        (
            {"cpu": "no C++ compiler", "cuda": "no nvcc"},
            BUILD,
            "13.0",
            ["cpu kernels   missing: no C++ compiler", "cuda kernels  missing: no nvcc", f"{'':13} {REINSTALL}"],
        ),
        # Which installing again would not mend.
        ({"cuda": NO_CUDA}, BUILD, None, [*CPU, USES, f"cuda kernels  missing: {NO_CUDA}"]),
    ],
)
def test_kernels(monkeypatch, missing, build, torch_cuda, shown):
    monkeypatch.setattr(native, "build_info", lambda: build)
    monkeypatch.setattr(native, "instruction_set", lambda path: "avx2")
    monkeypatch.setattr(
        native, "library", lambda name: native.Library(name, f"/p/{name}.so", missing=missing.get(name, ""))
    )
    monkeypatch.setattr(torch.version, "cuda", torch_cuda)
    monkeypatch.delenv("HF_KBIT_CPU", raising=False)
    assert info()[6:] == shown
    monkeypatch.setenv("HF_KBIT_CPU", "avx2")
    assert info()[6:] == [f"{line}, set by HF_KBIT_CPU" if line == USES else line for line in shown]


def test_packages_and_gpus(monkeypatch):
    monkeypatch.setattr(cli.info, "version", lambda name: importlib.metadata.version("no-such-package"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: f"GPU {i}")
    assert {"peft          not installed", "GPUs          GPU 0, GPU 1"} <= set(info())


def test_where_the_command_is():
    """In ``pyproject.toml``, and as a module."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (target,) = re.findall(r'^hf-kbit = "(.+)"$', text, flags=re.MULTILINE)
    assert pkgutil.resolve_name(target) is cli.main
    ran = subprocess.run([sys.executable, "-m", "hf_kbit.cli", "--version"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, f"{hf_kbit.__version__}\n"), ran.stderr
