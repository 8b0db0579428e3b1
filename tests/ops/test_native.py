"""Finding and loading the compiled libraries, the reasons when one is missing, and the ops without any."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import hf_kbit
from hf_kbit.format import reference
from hf_kbit.ops import native

ROOT = Path(__file__).parents[2]
library = native.library.__wrapped__  # without the cache, which would outlive a test
needs_compiler = pytest.mark.skipif(not shutil.which("c++"), reason="no C++ compiler is installed")
needs_library = pytest.mark.skipif(
    not native.library("cpu").loaded, reason=f"CPU library: {native.library('cpu').missing}"
)


# Of what ran: the last line that it printed, in JSON, and warnings.
RECORDED = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
{}
print(json.dumps([found, [str(warning.message) for warning in caught if warning.category is RuntimeWarning]]))
"""


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A folder that is all the package has for its libraries."""
    monkeypatch.setattr(hf_kbit, "__path__", [str(tmp_path)])
    return tmp_path


# --- found, or not --------------------------------------------------------------------------------


def test_cpu_library_is_loaded_where_it_could_be_built():
    """So that no test run checks plain PyTorch alone unnoticed."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler is installed")
    found = native.library("cpu")
    assert found.loaded, found.missing
    assert found.path.name == "libhf_kbit_cpu.so" and str(found.path.parent) in hf_kbit.__path__
    assert native.build_info()["cpu"]["missing"] == ""
    assert torch._C._dispatch_has_kernel_for_dispatch_key("hf_kbit::gemm", "CPU")


def test_why_there_is_no_library(empty):
    found = library("cpu")
    assert not found.loaded and found.path is None and native.build_info() == {}
    assert found.missing == f"{empty}/libhf_kbit_cpu.so does not exist; install hf_kbit again"
    (empty / "libhf_kbit_cpu.so").write_bytes(b"no library")
    found = library("cpu")
    assert not found.loaded and found.path == empty / "libhf_kbit_cpu.so"
    assert found.missing == f"{found.path} does not load ({found.path}: file too short); install hf_kbit again"
    record = {"cpu": {"missing": "no C++ compiler"}, "cuda": {"missing": "no nvcc"}}
    (empty / "_build.json").write_text(json.dumps(record))  # the file is of an older build
    assert library("cpu").missing == "no C++ compiler"


@pytest.mark.parametrize("newest", [0, 1])
@pytest.mark.parametrize("file", ["_build.json", "libhf_kbit_cpu.so"])
def test_newest_build_counts(tmp_path, monkeypatch, newest, file):
    folders = [tmp_path / "tree", tmp_path / "site-packages"]
    monkeypatch.setattr(hf_kbit, "__path__", [str(folder) for folder in folders])
    for i, folder in enumerate(folders):
        folder.mkdir()
        (folder / "_build.json").write_text(json.dumps({"torch": str(i)}))
        os.utime(folder / "_build.json", (1000, 1000))
    (folders[newest] / file).touch()
    assert native.build_info() == {"torch": str(newest)}


# --- device types ---------------------------------------------------------------------------------


def test_devices_without_library(empty, monkeypatch):
    """ROCm's are of the type cuda, too; a torch with CUDA would not serve them."""
    assert library("mps").missing == "hf_kbit has no compiled kernels for mps devices"
    (empty / "_build.json").write_text(json.dumps({"cuda": {"missing": "no nvcc"}}))
    without = f"torch {torch.__version__} was built without CUDA; install a torch with CUDA"
    rocm = "hf_kbit has no compiled kernels for ROCm"
    for cuda, hip, expected in (("13.0", None, "no nvcc"), (None, None, without), (None, "7.0", rocm)):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.version, "hip", hip)
        assert library("cuda") == native.Library("cuda", None, expected)
    monkeypatch.setattr(native, "library", library)
    assert native.group_limits.__wrapped__() == (0, 0), "nothing is joined"


@needs_compiler
def test_driver_too_old(tmp_path, fresh):
    """A stand-in for the driver of CUDA 12.8, beside a torch with CUDA and a library that CUDA 13 built."""
    source = 'extern "C" int cuDriverGetVersion(int *version) { *version = 12080; return 0; }'
    (tmp_path / "driver.cpp").write_text(source)
    command = ["c++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "driver.so", "driver.cpp"]
    subprocess.run(command, check=True, timeout=60, cwd=tmp_path)
    (tmp_path / "_build.json").write_text(json.dumps({"cuda": {"missing": "", "compiler": "nvcc 13.0.88"}}))
    (tmp_path / "libhf_kbit_cuda.so").touch()
    code = f"""
    import ctypes, torch, hf_kbit
    from hf_kbit.ops import native
    ctypes.CDLL({str(tmp_path / "driver.so")!r})
    torch.version.cuda = "12.8"
    hf_kbit.__path__ = [{str(tmp_path)!r}]
    native.library.cache_clear()
    native.warn_missing("cuda")
    found = None
"""
    assert (
        "correct but slower: the CUDA library was built with CUDA 13 and needs NVIDIA driver 580 or newer, found "
        "one for CUDA 12.8; install a newer driver, or hf_kbit from source with an older nvcc"
    ) in fresh.run(RECORDED.format(code))


@pytest.mark.parametrize(
    ("driver", "compiler", "expected"),
    [
        (13000, "nvcc 13.0.88", None),
        (13010, "nvcc 12.8.93", None),
        (12080, "nvcc 12.9.41", None),  # an older one of the same CUDA runs it
        (0, "nvcc 13.0.88", None),  # no driver, and no GPU
        (12090, "nvcc ", None),
        (11040, "nvcc 12.8.93", "CUDA 12 and needs NVIDIA driver 525 or newer, found one for CUDA 11.4;"),
        (13020, "nvcc 14.1.0", "CUDA 14 and needs NVIDIA driver for CUDA 14 or newer, found one for CUDA 13.2;"),
    ],
)
def test_drivers(empty, monkeypatch, driver, compiler, expected):
    (empty / "_build.json").write_text(json.dumps({"cuda": {"missing": "", "compiler": compiler}}))
    monkeypatch.setattr(native, "_driver_cuda", lambda: driver)
    found = native._old_driver()
    assert expected in found if expected else found == ""


# --- HF_KBIT_CPU ----------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("wanted", ["portable", "sse2"])
def test_instruction_set(wanted, fresh):
    code = f"""
import os
os.environ["HF_KBIT_CPU"] = {wanted!r}
try:
    from hf_kbit.ops import native as n
    print(n.instruction_set(n.library("cpu").path))
except ValueError as error:
    print(error)
"""
    found = fresh.run(code)
    assert found == wanted or (found.startswith("HF_KBIT_CPU: found sse2, ") and found.endswith("portable"))
    assert native.instruction_set(native.library("cpu").path) in ("amx", "avx512", "avx2", "portable")


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["portable", "avx2", "avx512"])
def test_other_kernels(wanted):
    """The best instruction set of this machine is tested by itself; here, those that it has besides."""
    env = os.environ | {"HF_KBIT_CPU": wanted}
    if subprocess.run([sys.executable, "-c", "import hf_kbit.ops"], env=env, capture_output=True).returncode:
        pytest.skip(f"this machine has no {wanted}")
    tests = [f"tests/ops/test_{name}.py" for name in ("contract", "batch_invariance", "trellis_products")]
    command = [sys.executable, "-m", "pytest", *tests, "-k", "cpu", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-5000:]
    assert " passed" in ran.stdout


# --- without a library ----------------------------------------------------------------------------


def test_warning_comes_once_for_each_device_type(monkeypatch):
    monkeypatch.setattr(native, "library", lambda name: native.Library(name, None, f"no {name}; buy one"))
    monkeypatch.setattr(native, "triton_missing", lambda name: f"no Triton for {name}")
    native.warn_missing.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for device_type in ("cpu", "cuda", "cpu", "cuda"):
            native.warn_missing(device_type)
    native.warn_missing.cache_clear()
    assert [warning.category for warning in caught] == [RuntimeWarning] * 2
    for warning, name in zip(caught, ("cpu", "cuda"), strict=True):
        assert f"in plain PyTorch on {name}, " in str(warning.message)
        why = f"no {name}; buy one" + ("; no Triton for cuda" if name == "cuda" else "")
        assert f": {why}. " in str(warning.message) and "`hf-kbit info`" in str(warning.message)


def test_which_devices_have_kernels_of_8_bit_inputs(monkeypatch):
    monkeypatch.setattr(native, "library", lambda name: native.Library(name, Path("there")))
    for capability in ((8, 0), (7, 5)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert [native.has_int8(device) for device in ("cpu", "cuda")] == [True, capability == (8, 0)]
    monkeypatch.setattr(native, "library", lambda name: native.Library(name, None, "none"))
    assert not native.has_int8("cpu")


CALLS = """
import hashlib, torch

def digests(ops):
    from hf_kbit import codebooks
    torch.manual_seed(0)
    codebook = torch.tensor(codebooks.normal_float(3))
    planes, absmax = ops.quantize(torch.randn(70, 100), codebook)
    dense = ops.dequantize(planes, absmax, codebook, [70, 100], torch.float16)
    tiles = ops.repack(planes, absmax, 3, [70, 100])
    product = ops.gemm(torch.ones(2, 100), planes, absmax, codebook, None, 70)
    trellis = ops.encode_trellis(torch.randn(4, 256), 3)
    exact = (planes, absmax, dense, *tiles, trellis, ops.decode_trellis(trellis.view(2, 2, 48), "mcg"))
    return [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in exact], product.tolist()
"""


def test_ops_without_libraries_give_the_same_bytes(tmp_path, fresh):
    """The reference takes over, and says so once, with the reason; but plain PyTorch adds up as it likes."""
    ignored = shutil.ignore_patterns("*.so", "_build.json", "__pycache__")
    shutil.copytree(Path(hf_kbit.__file__).parent, tmp_path / "hf_kbit", ignore=ignored)
    code = f"""
    import sys, importlib.machinery as m
    sys.meta_path[:] = [m.BuiltinImporter, m.FrozenImporter, m.PathFinder]  # not that of an editable install
    sys.path.insert(0, {str(tmp_path)!r})
    import hf_kbit
    found = [*digests(hf_kbit.ops), hf_kbit.__file__]
    hf_kbit.set_batch_invariant(True)
    try:
        digests(hf_kbit.ops)
    except RuntimeError as error:
        found.append(str(error))
"""
    (exact, product, file, refused), (warned,) = json.loads(fresh.run(CALLS + RECORDED.format(code)))
    assert Path(file).parent == tmp_path / "hf_kbit"
    missing = f"{tmp_path}/hf_kbit/libhf_kbit_cpu.so does not exist; install hf_kbit again"
    assert warned.startswith("hf_kbit: the ops run in plain PyTorch on cpu") and missing in warned
    assert refused == f"batch-invariant products were asked for, and only libraries have them: {missing}"
    exec(CALLS, here := {})
    assert exact == here["digests"](hf_kbit.ops)[0]
    assert product == here["digests"](reference)[1]
