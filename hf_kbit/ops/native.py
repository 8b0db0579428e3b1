"""Finds and loads the compiled libraries, and says why when one is missing, and what runs instead.

Loading a library registers its kernels with the ops' schemas for one dispatch key. There is one for CPUs and one for
CUDA, built against torch's stable ABI, so that neither depends on the version of torch or Python. The CUDA library is
loaded where torch itself was built with CUDA, whether or not there is a GPU.
"""

import ctypes
import functools
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_kbit.format import reference

TRITON_DEVICES = ("cuda", "xpu")  # ROCm's are "cuda" too
REINSTALL_OPTIONS = "--force-reinstall --no-deps --no-cache-dir"
OLDEST_DRIVERS = {12: "525", 13: "580"}  # that run what each CUDA built, in NVIDIA's table of compatibility


@dataclass(frozen=True)
class Library:
    """A compiled library of the package: where it is, or why there is none and what to do about it."""

    name: str
    path: Path | None
    missing: str = ""

    @property
    def loaded(self) -> bool:
        return not self.missing


def _folder() -> Path:
    """Where the newest build lies: beside this file, or where an editable install put one."""
    folders = [Path(folder) for folder in sys.modules["hf_kbit"].__path__]
    built = [path for folder in folders for path in (*folder.glob("_build.json"), *folder.glob("libhf_kbit_*.so"))]
    return max(built, key=lambda path: path.stat().st_mtime).parent if built else folders[0]


def build_info() -> dict:
    """What csrc/CMakeLists.txt recorded when the package was built; empty where nothing was."""
    path = _folder() / "_build.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _driver_cuda() -> int:
    """The newest CUDA that the driver of this machine runs, as 12080 for 12.8; 0 without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0
    return version.value


def _old_driver() -> str:
    """What to do where the driver is older than the CUDA that the library was built with; empty where it is not.

    A torch built with an older CUDA works there, and every kernel of ours would fail.
    """
    compiler = build_info().get("cuda", {}).get("compiler", "")
    found, built = _driver_cuda(), re.fullmatch(r"nvcc (\d+)\..*", compiler)
    if not found or not built or found // 1000 >= int(built[1]):
        return ""
    oldest = OLDEST_DRIVERS.get(int(built[1]), f"for CUDA {built[1]}")
    return (
        f"the CUDA library was built with CUDA {built[1]} and needs NVIDIA driver {oldest} or newer, found one for "
        f"CUDA {found // 1000}.{found % 1000 // 10}; install a newer driver, or hf_kbit from source with an older nvcc"
    )


def _load(name: str) -> Library:
    path = _folder() / f"libhf_kbit_{name}.so"
    # The record comes first: a library that the newest build left out may lie there from an older one.
    record = build_info().get(name, {})
    if missing := record.get("missing"):
        output = f"; {_folder() / record['log']} has what the compiler said" if "log" in record else ""
        return Library(name, None, missing + output)
    if not path.exists():
        return Library(name, None, f"{path} does not exist; install hf_kbit again")
    if name == "cuda" and (old := _old_driver()):
        return Library(name, None, old)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return Library(name, path, f"{path} does not load ({error.__cause__ or error}); install hf_kbit again")
    if name == "cpu" and (found := instruction_set(path)) not in ("amx", "avx512", "avx2", "portable"):
        raise ValueError(found)
    return Library(name, path)


def instruction_set(path: Path) -> str:
    """What the CPU library uses here, from ``amx`` to ``portable``, or what is wrong with ``HF_KBIT_CPU``."""
    function = ctypes.CDLL(str(path)).hf_kbit_cpu_instruction_set
    function.restype = ctypes.c_char_p
    return function().decode()


REFUSAL = re.compile(r"\w+: found ")


def refusal(error: Exception) -> TypeError | ValueError | None:
    """An error about what an op was given, if it is one. A library's are ValueErrors, of which torch 2.15 makes
    RuntimeErrors, as others are."""
    if isinstance(error, TypeError | ValueError):
        return error
    return ValueError(str(error)) if type(error) is RuntimeError and REFUSAL.match(str(error)) else None


batch_invariant = False  # what set_batch_invariant was last asked for


def set_batch_invariant(enabled: bool) -> None:
    """For the products of both libraries, and of what runs in plain PyTorch where one is missing."""
    global batch_invariant
    batch_invariant = enabled
    for found in (library("cpu"), library("cuda")):
        if found.loaded:
            ctypes.CDLL(str(found.path)).hf_kbit_set_batch_invariant(int(enabled))


def _cuda_number(name: str) -> int:
    """What a function of the CUDA library returns; 0 where the library is not loaded."""
    found = library("cuda")
    return getattr(ctypes.CDLL(str(found.path)), f"hf_kbit_cuda_{name}")() if found.loaded else 0


@functools.cache
def group_limits() -> tuple[int, int]:
    """The most tokens and the most products that ``inductor`` gives ``gemm_group``; zeros without CUDA library."""
    return _cuda_number("group_tokens"), _cuda_number("group_products")


@functools.cache
def cuda_arch(device: torch.device) -> int:
    """The compute capability that the code was built for that a GPU runs, 800 for 8.0; 0 without CUDA library."""
    with torch.cuda.device(device):
        return _cuda_number("arch")


@functools.cache
def many_trellis_tokens(device: torch.device) -> int:
    """The most tokens that ``gemm_trellis_many`` takes on a GPU; 0 where there is no kernel for it."""
    with torch.cuda.device(device):
        return _cuda_number("many_trellis_tokens")


@functools.cache
def library(name: str) -> Library:
    """The library of a device type, ``cpu`` or ``cuda``, loaded at the first call."""
    if name not in ("cpu", "cuda"):
        return Library(name, None, f"hf_kbit has no compiled kernels for {name} devices")
    if name == "cuda" and torch.version.hip is not None:
        return Library(name, None, "hf_kbit has no compiled kernels for ROCm")
    if name == "cuda" and torch.version.cuda is None:
        return Library(name, None, f"torch {torch.__version__} was built without CUDA; install a torch with CUDA")
    return _load(name)


@functools.cache
def triton_missing(device_type: str) -> str:
    """Why Triton's kernels cannot stand in for the library of a device type; empty if they can."""
    if device_type not in TRITON_DEVICES:
        return f"Triton has no kernels for {device_type} devices"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        if device_type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability() < (8, 0):
            return "Triton's products in bfloat16 need compute capability 8.0"
        from hf_kbit.ops import triton

        for dtype in (torch.float16, torch.bfloat16):
            triton.check(device_type, dtype)
    except Exception as error:  # Triton's, its compilers' and drivers', which have no class in common
        return f"Triton's kernels fail here ({type(error).__name__}: {error})"
    return ""


def has_int8(device_type: str) -> bool:
    """Whether the library of a device type is there and has kernels of 8-bit inputs, on CUDA for this GPU."""
    # By torch, which then knows that a process has a GPU: vLLM asks it before it forks.
    return library(device_type).loaded and (device_type != "cuda" or torch.cuda.get_device_capability() >= (8, 0))


def fallback(op: str, device_type: str) -> Callable:
    """What runs an op on a device type without library: a kernel of Triton's if it has one, or the reference."""
    name = op.removesuffix("_inference")
    warn_missing(device_type)
    if batch_invariant and name in ("gemm", "gemm_group", "gemm_experts"):
        missing = library(device_type).missing
        raise RuntimeError(f"batch-invariant products were asked for, and only libraries have them: {missing}")
    if not triton_missing(device_type):
        from hf_kbit.ops import triton

        if name in triton.OPS:
            return getattr(triton, name)
    return getattr(reference, name)


@functools.cache
def warn_missing(device_type: str) -> None:
    """Says once for each device type in what its ops run, why, and what to do."""
    kernels, why = "plain PyTorch", library(device_type).missing
    if device_type in TRITON_DEVICES:
        if missing := triton_missing(device_type):
            why = f"{why}; {missing}"
        else:
            kernels = "Triton's kernels and plain PyTorch"
    warnings.warn(
        f"hf_kbit: the ops run in {kernels} on {device_type}, correct but slower: {why}. "
        "`hf-kbit info` shows what is installed",
        RuntimeWarning,
        stacklevel=2,
    )
