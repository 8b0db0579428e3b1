"""csrc/CMakeLists.txt with tools, torch or GPUs missing, and csrc/install.cmake with code that does not compile.

Both say what is built, and why the rest is not, in ``_build.json``.

``tests/ops/test_native.py`` says whether the library of this installation was built.
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

import hf_kbit
from hf_kbit.ops import native

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "csrc"
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


@pytest.fixture
def install(tmp_path):
    """Builds and installs, a file at a time; returns ``_build.json`` and all that was printed."""

    def run():
        commands = (["--build", tmp_path / "build"], ["--install", tmp_path / "build", "--prefix", tmp_path])
        env = os.environ | {"CMAKE_BUILD_PARALLEL_LEVEL": "1"}
        ran = [subprocess.run(["cmake", *c], env=env, capture_output=True, text=True, timeout=120) for c in commands]
        printed = "".join(each.stdout + each.stderr for each in ran)
        assert not any(each.returncode for each in ran), printed
        return json.loads((tmp_path / "hf_kbit/_build.json").read_text()), printed

    return run


@pytest.fixture
def launcher(tmp_path):
    """An option that compiles empty files in place of the sources.

    It fails for those that the file ``broken`` names, and adds the others' names to the file ``compiled``.
    """
    (tmp_path / "launcher").write_text(f"""#!{sys.executable} -IS
import subprocess, sys
*command, path = sys.argv[1:]
if path.split("/")[-1] in open({str(tmp_path / "broken")!r}).read().split():
    sys.exit(f"{{path}}:1:2: error: planted")
print(path.split("/")[-1], file=open({str(tmp_path / "compiled")!r}, "a"))
sys.exit(subprocess.call([*command, "-x", "c++", "/dev/null"]))
""")
    (tmp_path / "launcher").chmod(0o755)
    return f"-DCMAKE_CXX_COMPILER_LAUNCHER={tmp_path / 'launcher'}"


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
@pytest.mark.parametrize(
    "gpus, archs, missing",
    [
        (None, "", 'as in HF_KBIT_CUDA_ARCHS="80;90a", and install hf_kbit again'),
        ("NVIDIA-SMI has failed\\n", "", "no GPU was found"),  # the driver does not answer
        (
            "7.2\\n6.1\\n",
            "",
            "expected a GPU of compute capability 7.5 or newer when hf_kbit was installed, found 7.2, 6.1",
        ),
        (None, "none", "HF_KBIT_CUDA_ARCHS=none; install it again without"),
    ],
)
def test_no_gpu_to_build_for(configure, gpus, archs, missing):
    build, _ = configure(ANY_CUDA_COMPILER, gpus=gpus, HF_KBIT_CUDA_ARCHS=archs)
    assert missing in build["cuda"]["missing"]
    assert build["cuda"]["archs"] == "" and build["cpu"]["missing"] == ""


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


# --- code that does not compile -------------------------------------------------------------------


@needs_compiler
@pytest.mark.slow
def test_library_that_does_not_compile(configure, install, tmp_path):
    """The package goes on in plain PyTorch and says why, even where an older build left a library that loads."""
    ignored = shutil.ignore_patterns("_build*", "__pycache__")
    shutil.copytree(Path(hf_kbit.__file__).parent, tmp_path / "hf_kbit", ignore=ignored)
    if older := native.library("cpu").path:
        shutil.copy2(older, tmp_path / "hf_kbit")
    folder = fake_torch(tmp_path / "torch", "2.10")
    (tmp_path / "torch/lib").mkdir()
    (tmp_path / "torch/lib/libtorch_cpu.so").touch()  # which Ninja asks for first
    header = tmp_path / "torch/include/torch/csrc/stable/tensor.h"
    header.parent.mkdir(parents=True)
    header.write_text('#error "a \\ planted\terror"\x1b; [')
    configure(HF_KBIT_TORCH=folder)
    build, printed = install()
    error = f'{header}:1:2: error: #error "a \\ planted\terror" ; ['
    missing = (
        f"the cpu library did not compile when hf_kbit was installed ({error}); install hf_kbit again with another "
        "C++ compiler, named in CXX, or another torch"
    )
    assert build["cpu"]["missing"] == missing and build["torch"] == "2.10"
    assert "hf_kbit: no cpu library: the cpu library did not compile" in " ".join(printed.split())
    log = tmp_path / "hf_kbit/_build_cpu.log"
    assert log.read_text() in printed and 'error: #error "a \\ planted\terror"\x1b; [' in log.read_text()

    code = f"""
import importlib.machinery as m, sys
sys.meta_path[:] = [m.BuiltinImporter, m.FrozenImporter, m.PathFinder]
sys.path.insert(0, {str(tmp_path)!r})
import torch, hf_kbit
from hf_kbit.cli import main
planes, absmax = hf_kbit.ops.quantize(torch.ones(4, 32), torch.arange(4.0) / 3)
assert hf_kbit.ops.dequantize(planes, absmax, torch.arange(4.0) / 3, [4, 32], torch.float32).equal(torch.ones(4, 32))
assert not torch._C._dispatch_has_kernel_for_dispatch_key("hf_kbit::quantize", "CPU")
main(["info"])
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    reason = f"{missing}; {log} has what the compiler said"
    assert f"RuntimeWarning: hf_kbit: the ops run in plain PyTorch on cpu, correct but slower: {reason}" in ran.stderr
    assert f"cpu kernels   missing: {reason}\n" in ran.stdout


@needs_compiler
def test_error_that_was_mended(configure, install, launcher, tmp_path):
    """What had compiled is not compiled again, and nothing is left of the failure."""
    (tmp_path / "broken").write_text("portable.cpp")
    configure(launcher)
    build, _ = install()
    assert "(cpu/portable.cpp:1:2: error: planted); install hf_kbit again" in build["cpu"]["missing"]
    assert build["cpu"]["log"] == "_build_cpu.log"
    assert {path.name for path in tmp_path.glob("hf_kbit/*")} == {"_build.json", "_build_cpu.log"}

    (tmp_path / "broken").write_text("")
    build, _ = install()
    assert build["cpu"]["missing"] == "" and "log" not in build["cpu"]
    assert {path.name for path in tmp_path.glob("hf_kbit/*")} == {"_build.json", "libhf_kbit_cpu.so"}
    compiled = (tmp_path / "compiled").read_text().split()
    expected = {path.name for path in SOURCE.glob("[co]p[us]/*.cpp") if not path.name.startswith("backend_cuda")}
    assert sorted(compiled) == sorted(expected)


@needs_compiler
@needs_nvcc
@pytest.mark.slow
def test_only_the_cuda_library_fails(configure, install, launcher, tmp_path):
    (tmp_path / "broken").write_text("backend_cuda.cpp")
    configure(launcher, hide=("nvidia-smi",), HF_KBIT_CUDA_ARCHS="80")
    build, _ = install()
    assert build["cpu"]["missing"] == "" and (tmp_path / "hf_kbit/libhf_kbit_cpu.so").exists()
    assert re.match(r"the cuda library .*backend_cuda.cpp:1:2: error: planted.*CUDACXX", build["cuda"]["missing"])
    assert (tmp_path / "hf_kbit/_build_cuda.log").exists()


# --- the oldest torch -----------------------------------------------------------------------------


def test_oldest_torch_is_the_same_everywhere():
    def found(file, pattern):
        (version,) = re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE)
        return version

    oldest = found("pyproject.toml", r'"torch>=([\d.]+)"')
    assert found("Makefile", r"^OLDEST_TORCH \?= ([\d.]+)\.0$") == oldest
    assert found("csrc/CMakeLists.txt", r"VERSION_LESS (2\.[\d.]+)\)") == oldest
    target = found("csrc/CMakeLists.txt", r"TORCH_TARGET_VERSION=0x([0-9a-f]{4})0{12}ULL")
    assert f"{int(target[:2], 16)}.{int(target[2:], 16)}" == oldest
