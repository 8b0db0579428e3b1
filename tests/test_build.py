"""csrc/CMakeLists.txt with tools, torch or GPUs missing: what it would build, and the reasons in ``_build.json``.

CMake only configures here; ``tests/test_native.py`` says whether the library of this installation was built.
"""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[1] / "csrc"
COMPILERS = ("cc", "gcc*", "c++*", "g++*", "clang*", "*-gcc*", "*-g++*", "*-c++*", "icpx")
ANY_CUDA_COMPILER = "-DCMAKE_CUDA_COMPILER=nvcc"  # believed, and not run unless there is a GPU to build for
RELEASE = "75-real 80-real 86-real 89-real 90a-real 100-real 120"

pytestmark = pytest.mark.skipif(not shutil.which("cmake"), reason="cmake is not installed")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="no C++ compiler is installed"
)
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")


@pytest.fixture
def configure(tmp_path):
    """Configures with a PATH that lacks the tools in ``hide``; returns ``_build.json`` and what CMake printed."""

    def run(*definitions, hide=("nvcc", "nvidia-smi"), python=sys.executable, gpus=None, **variables):
        tools = tmp_path / "tools"
        tools.mkdir()
        if gpus is not None:
            (tools / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '{gpus}'\n")
            (tools / "nvidia-smi").chmod(0o755)
        for folder in filter(os.path.isdir, os.environ["PATH"].split(os.pathsep)):
            for tool in Path(folder).iterdir():
                if not any(fnmatch.fnmatch(tool.name, name) for name in hide) and not os.path.lexists(
                    tools / tool.name
                ):
                    (tools / tool.name).symlink_to(tool)
        ours = ("HF_KBIT_", "CXX", "CUDACXX", "CUDAHOSTCXX", "CUDAARCHS", "PYTHONPATH")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        command = ["cmake", "-S", SOURCE, "-B", tmp_path / "build", f"-DPython3_EXECUTABLE={python}", *definitions]
        ran = subprocess.run(
            command, env={**env, "PATH": str(tools), **variables}, capture_output=True, text=True, timeout=120
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return json.loads((tmp_path / "build/_build.json").read_text()), " ".join(ran.stderr.split())

    return run


def fake_torch(folder, version):
    header = folder / "include/torch/headeronly/version.h"
    header.parent.mkdir(parents=True)
    major, minor = version.split(".")
    header.write_text(f"#define TORCH_VERSION_MAJOR {major}\n#define TORCH_VERSION_MINOR {minor}\n")
    return str(folder)


def test_without_cpp_compiler(configure):
    build, printed = configure(hide=(*COMPILERS, "nvcc"))
    for half in ("cpu", "cuda"):
        assert re.match(r"no C\+\+ compiler .* g\+\+, then hf_kbit again", build[half]["missing"])
        assert f"hf_kbit: no {half} library: {build[half]['missing']}" in printed


@needs_compiler
def test_without_nvcc(configure):
    build, printed = configure()
    assert build["cpu"]["missing"] == "" and build["cpu"]["compiler"].split()[0] in ("GNU", "Clang")
    assert re.match(r"no nvcc .* CUDA toolkit, or set CUDACXX .* hf_kbit again", build["cuda"]["missing"])
    assert "no cpu library" not in printed and f"no cuda library: {build['cuda']['missing']}" in printed


@needs_compiler
def test_torch_is_found_from_a_build_that_hides_it(configure, tmp_path):
    """pip puts a ``sitecustomize`` on PYTHONPATH that takes the environment's packages off ``sys.path``."""
    hiding = tmp_path / "overlay"
    hiding.mkdir()
    packages = os.path.dirname(torch.__path__[0])
    hiding.joinpath("sitecustomize.py").write_text(f"import sys; sys.path.remove({packages!r})")
    build, _ = configure(PYTHONPATH=str(hiding))
    assert build["torch"] == ".".join(torch.__version__.split(".")[:2])
    assert build["cpu"]["missing"] == ""


@needs_compiler
def test_without_torch(configure, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True, timeout=60)
    build, _ = configure(python=tmp_path / "venv/bin/python")
    assert re.match(r"torch was not there .* uv .* again, with HF_KBIT_TORCH set to torch's", build["cpu"]["missing"])
    assert build["cuda"]["missing"] == build["cpu"]["missing"] and build["torch"] == ""


@needs_compiler
@pytest.mark.parametrize("version, missing", [("1.13", True), ("2.9", True), ("2.10", False), ("3.0", False)])
def test_torch_version(configure, tmp_path, version, missing):
    build, _ = configure(HF_KBIT_TORCH=fake_torch(tmp_path / "torch", version))
    assert build["torch"] == version
    expected = f"expected torch 2.10 or newer when hf_kbit was installed, found {version}; install a newer torch, "
    assert build["cpu"]["missing"] == (expected + "then hf_kbit again" if missing else "")


@needs_compiler
def test_folder_that_is_not_torchs_with_signs_that_json_escapes(configure, tmp_path):
    folder = str(tmp_path / 'a "b" \\c; d')
    build, _ = configure(HF_KBIT_TORCH=folder)
    assert f"found {folder} without include/torch/headeronly/version.h" in build["cpu"]["missing"]


@needs_compiler
def test_definition_wins_over_environment(configure, tmp_path):
    folder = fake_torch(tmp_path / "torch", "2.11")
    assert configure(f"-DHF_KBIT_TORCH={folder}", HF_KBIT_TORCH="/nowhere")[0]["torch"] == "2.11"


@needs_compiler
def test_without_gpu(configure):
    build, _ = configure(ANY_CUDA_COMPILER)
    assert 'as in HF_KBIT_CUDA_ARCHS="80;90a", and install hf_kbit again' in build["cuda"]["missing"]
    assert build["cuda"]["archs"] == "" and build["cpu"]["missing"] == ""


@needs_compiler
def test_gpu_driver_does_not_answer(configure):
    build, _ = configure(ANY_CUDA_COMPILER, gpus="NVIDIA-SMI has failed\\n")
    assert build["cuda"]["missing"].startswith("no GPU was found")


@needs_compiler
def test_gpu_too_old(configure):
    build, _ = configure(ANY_CUDA_COMPILER, gpus="7.2\\n6.1\\n")
    assert build["cuda"]["missing"].startswith("expected a GPU of compute capability 7.5 or newer")
    assert build["cuda"]["missing"].endswith("found 7.2, 6.1")


@needs_compiler
def test_cuda_not_wanted(configure):
    build, _ = configure(ANY_CUDA_COMPILER, HF_KBIT_CUDA_ARCHS="none")
    assert "HF_KBIT_CUDA_ARCHS=none; install it again without" in build["cuda"]["missing"]


@needs_compiler
@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    "gpus, wanted, archs",
    [
        ("9.0\\n8.6\\n7.5\\n9.0\\n7.0\\n", "", "90a-real 86-real 75-real"),
        ("10.0\\n", "", "100a-real"),
        ("9.0\\n", "80;90a", "80 90a"),
        ("", "90;90-real;100", "90a 90a-real 100"),
        ("", "release", RELEASE),
    ],
)
def test_gpus_to_build_for(configure, gpus, wanted, archs):
    build, _ = configure(hide=("nvidia-smi",), gpus=gpus, HF_KBIT_CUDA_ARCHS=wanted)
    assert build["cuda"]["missing"] == "" and build["cuda"]["archs"] == archs
    assert re.fullmatch(r"nvcc [\d.]+", build["cuda"]["compiler"])
