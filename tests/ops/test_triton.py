"""Triton's kernels, by its interpreter where there is no GPU, and what runs them: devices without a library."""

import json
import os
import subprocess
import sys

import cases
import pytest
import torch
from contract import TRANSFORMS, on

from hf_kbit.format import reference, transforms
from hf_kbit.format import spec as format
from hf_kbit.ops import native

triton = pytest.importorskip("triton", reason="Triton, of the extra `test`, is not installed")
kernels = pytest.importorskip("hf_kbit.ops.triton")


@pytest.fixture
def device(device):
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton interprets all kernels or none")
    return device


def rounded(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 tensor in another dtype; to bfloat16 Triton's interpreter rounds towards zero, whatever is asked."""
    if exact.device.type == "cpu" and dtype == torch.bfloat16:
        exact = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return exact.to(dtype)


# --- dequantize -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (16, 256), (2, 3, 5, 40)], ids=str)
def test_decoded_weights_are_those_of_the_reference(shape, bits, device):
    """Bit for bit: all bytes are scales, and sums in a rotation have their order."""
    packed = on(device, [*cases.random_packed(shape, bits), cases.codebook(bits)])
    for scaled, rotated in TRANSFORMS:
        columns = on(device, cases.columns(shape[-1], scaled))
        how = [*shape[-2:]], columns, rotated
        exact = reference.dequantize(*packed, how[0], torch.float32, *how[1:])
        for dtype in (*cases.FLOATS, torch.float64) if rotated and scaled else (torch.float32,):
            found = kernels.dequantize(*packed, how[0], dtype, *how[1:])
            assert found.dtype == dtype and found.is_contiguous()
            assert torch.equal(found, rounded(exact, dtype)), (dtype, scaled, rotated)


def test_every_scale_is_decoded(device):
    """All bytes, with and without a sign, and as scales of columns."""
    scales = torch.arange(256, dtype=torch.uint8)
    planes, absmax, codebook = on(device, [torch.zeros(256, 2).int(), scales[:, None], torch.ones(4)])
    for rotated in (False, True):
        found = kernels.dequantize(planes, absmax, codebook, [256, 32], torch.float32, None, rotated)
        levels = reference.decode_scales(absmax, rotated).expand(-1, 32)
        assert torch.equal(found, transforms.to_original(levels, None, rotated, 32))
    ones = absmax[:1].new_full((1, 8), format.encode_e4m4(1.0))
    row = planes[:8].view(1, 16), ones, codebook, [1, 256], torch.float32, absmax[:, 0]
    assert torch.equal(kernels.dequantize(*row)[0], reference.decode_e4m4(absmax[:, 0]))


def test_tensors_need_not_lie_in_one_piece(device):
    """Nor need there be any rows."""
    planes, absmax = cases.random_packed((4, 40), 3)
    planes, absmax, codebook = on(device, [planes, absmax, cases.codebook(3)])
    spread = planes.T.contiguous().T, absmax.T.contiguous().T, codebook.repeat_interleave(2)[::2]
    assert not any(tensor.is_contiguous() for tensor in spread)
    expected = reference.dequantize(*spread, [4, 40], torch.float32)
    assert torch.equal(kernels.dequantize(*spread, [4, 40], torch.float32), expected)
    empty = planes.new_empty(0, *planes.shape), absmax.new_empty(0, *absmax.shape), codebook
    assert kernels.dequantize(*empty, [4, 40], torch.float32).shape == (0, 4, 40)


# --- gemm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (17, 257), (64, 100), (2, 1500)], ids=str)
def test_products_against_float64(shape, bits, device):
    """Numpy, by which the interpreter multiplies, has no bfloat16."""
    for scaled, rotated in TRANSFORMS:
        columns = on(device, cases.columns(shape[1], scaled))
        packed = on(device, cases.quantized(shape, bits, columns=cases.columns(shape[1], scaled), rotated=rotated))
        stored = cases.stored(*packed, rotated)[:, : None if rotated else shape[1]]
        for dtype in cases.FLOATS if device == "cuda" else (torch.float32, torch.float16)[: 1 + scaled]:
            x, bias = on(device, [cases.x((5,), shape[1], dtype), cases.x((), shape[0], dtype)])
            found = kernels.gemm(x, *packed, bias, shape[0], columns, rotated)
            assert found.dtype == dtype and found.is_contiguous()
            cases.assert_product(found, x, stored.T, bias, columns=columns, rotated=rotated)


@pytest.mark.parametrize("rotated", [False, True], ids=["plain", "rotated"])
def test_any_number_of_tokens(device, rotated):
    """One kernel, or the decoded weight; x of any leading dimensions and strides."""
    packed = on(device, cases.quantized((7, 33), 3, rotated=rotated))
    dense = reference.dequantize(*packed, [7, 33], torch.float64, None, rotated)
    batches = [*cases.BATCHES, (kernels.MOST_TOKENS,), (kernels.MOST_TOKENS + 1,)]
    for x in [cases.x(batch, 33) for batch in batches] + [cases.x((33,), 3).T, cases.x((4,), 66)[:, ::2]]:
        x = x.to(device)
        found = kernels.gemm(x, *packed, None, 7, None, rotated)
        assert found.shape == (*x.shape[:-1], 7) and not found._is_view()
        torch.testing.assert_close(found.double(), x.double() @ dense.T, rtol=1e-5, atol=1e-5)
        doubled = kernels.gemm(x.double(), *packed, None, 7, None, rotated)
        torch.testing.assert_close(doubled, x.double() @ dense.T)


# --- where they run -------------------------------------------------------------------------------

ON_A_DEVICE_WITHOUT_LIBRARY = """
import os, warnings
os.environ["TRITON_INTERPRET"] = "1"
import torch
warnings.showwarning = lambda message, category, *_: category is RuntimeWarning and print(message)

def load_library(path):
    raise OSError("not here")

torch.ops.load_library = load_library
import hf_kbit
from hf_kbit.ops import native
from hf_kbit.ops import triton as kernels

native.TRITON_DEVICES = ("cpu",)
kernels.check = lambda device_type, dtype: None  # in bfloat16, which the interpreter does not multiply

calls = []
for name in ("dequantize", "gemm"):
    whole = getattr(kernels, name)
    setattr(kernels, name, lambda *a, n=name, f=whole: calls.append(n) or f(*a))
torch.manual_seed(0)
layer = hf_kbit.KbitLinear.from_linear(torch.nn.Linear(100, 24), bits=3)
assert not layer.weight.is_tiled
dense, tokens = layer.dequantize(), torch.randn(5, 100, requires_grad=True)
expected = torch.nn.functional.linear(tokens.detach(), dense, layer.bias)
found = layer(tokens)
torch.testing.assert_close(found, expected)
found.sum().backward()
torch.testing.assert_close(tokens.grad, dense.sum(0).expand(5, -1))
assert calls == ["dequantize", "gemm", "dequantize"], calls
with torch.no_grad():
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), expected)
    weight, absmax, columns = layer.packed.values()
    packed = weight, absmax, layer.weight.codebook, (24, 100)
    rows = hf_kbit.ops.embed(torch.tensor([3, 1]), *packed, columns=columns, rotated=True)
    assert torch.equal(rows, dense[[3, 1]])
"""


def test_ops_of_a_device_without_library(fresh):
    lines = fresh.run(ON_A_DEVICE_WITHOUT_LIBRARY).splitlines()
    (warned,) = [line for line in lines if line.startswith("hf_kbit")]  # beside what torch says of this Python
    assert "hf_kbit: the ops run in Triton's kernels and plain PyTorch on cpu, correct but slower: " in warned
    assert " does not load (not here); " in warned


@pytest.mark.gpu
def test_triton_serves_this_gpu():
    assert native.triton_missing("cuda") == ""


@pytest.mark.parametrize("op", ["dequantize", "gemm"])
def test_check_finds_other_numbers(monkeypatch, device, op):
    """A weight that is a bit off, or a product that is of another weight."""
    kernels.check(device, torch.float16)
    right = getattr(reference, op)
    monkeypatch.setattr(reference, op, lambda *args: right(*args) * (1.001 if op == "dequantize" else -1))
    with pytest.raises(RuntimeError, match="they do not give what plain PyTorch gives"):
        kernels.check(device, torch.float16)


COMPILE = """
import json, torch
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_kbit.ops import triton as kernels

POINTERS = {"planes": "*i32", "absmax": "*u8", "columns": "*u8", "codebook": "*fp32"}
TILE = {"tile_rows": 16, "tile_blocks": 4}
KERNELS = {
    kernels._dequantize_kernel: {"bits": 5, "scaled": True, "rotated": True, **TILE},
    kernels._of_input_kernel: {"scaled": True, "rotated": True, "tile_blocks": 4},
    kernels._gemm_kernel: {"bits": 5, "signed": True, "biased": True, "tile_tokens": 16, **TILE},
}
for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
    for kernel, constants in KERNELS.items():
        types = POINTERS | dict.fromkeys(("x", "bias", "out"), "*bf16") | dict.fromkeys(constants, "constexpr")
        signature = {name: types.get(name, "i32") for name in kernel.arg_names}
        made = compile(ASTSource(kernel, signature, constants), target=target, options=kernels._OPTIONS)
        code = made.asm.get("ptx") or made.asm["amdgcn"]
        print(json.dumps([target.backend, kernel.__name__, sorted({w for w in code.split() if "fma" in w})]))
"""


def test_kernels_compile_for_other_gpus(tmp_path):
    """For NVIDIA's and AMD's, without one; nothing that is rounded twice becomes an operation that rounds once."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    env.pop("TRITON_INTERPRET", None)
    ran = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    made = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [backend for backend, *_ in made] == ["cuda"] * 3 + ["hip"] * 3
    assert all(not fused or kernel == "_gemm_kernel" for _, kernel, fused in made), made


def test_who_runs_an_op_without_library(monkeypatch):
    """Triton's kernels, or plain PyTorch, and why."""

    def fail(device_type, dtype):
        raise RuntimeError("Failed to find C compiler")

    missing = native.triton_missing.__wrapped__
    monkeypatch.setattr(kernels, "check", fail)
    assert missing("mps") == "Triton has no kernels for mps devices"
    assert missing("xpu") == "Triton's kernels fail here (RuntimeError: Failed to find C compiler)"
    monkeypatch.setattr(kernels, "check", lambda device_type, dtype: None)
    assert missing("xpu") == ""
    too_old = "Triton's products in bfloat16 need compute capability 8.0"
    for hip, capability, why in ((None, (7, 5), too_old), (None, (8, 0), ""), ("7.0", (6, 0), "")):
        monkeypatch.setattr(torch.version, "hip", hip)  # AMD's GPUs are numbered otherwise
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        assert missing("cuda") == why
    with monkeypatch.context() as without:
        without.setattr(native.importlib.util, "find_spec", lambda name: None)
        assert missing("xpu") == "Triton is not installed"
    monkeypatch.setattr(native, "warn_missing", lambda device_type: None)
    assert native.fallback("gemm_inference", "mps") is reference.gemm
    monkeypatch.setattr(native, "triton_missing", lambda device_type: "")
    for op in kernels.OPS:
        assert native.fallback(op, "xpu") is getattr(kernels, op)
    assert native.fallback("gemm_inference", "xpu") is kernels.gemm
    assert native.fallback("embed", "xpu") is reference.embed
