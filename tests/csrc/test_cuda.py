"""What only a GPU can get wrong: streams, devices, graphs, indices beyond 32 bits."""

import functools
import gc
import os
import subprocess
import sys

import cases
import pytest
import torch
from compiled import FORMS, NEEDED, OPS, cuda_arch

from hf_kbit.format import reference
from hf_kbit.ops import native

pytestmark = NEEDED


def calls(bits: int, device="cuda") -> dict:
    """Every op on small inputs of its own: name to (function of nothing, the tensors that it reads)."""
    shape = [130, 300]
    weight, codebook = cases.weight(shape).to(device), cases.codebook(bits).to(device)
    planes = OPS.quantize(weight, codebook)
    tiles = OPS.repack(*planes, bits, shape)
    x, more = (cases.x((tokens,), 300, torch.float16).to(device) for tokens in (5, 40))
    columns = cases.columns(300).to(device)
    indices = torch.arange(200, device=device).flip(0) % 130
    found = {
        "quantize": (lambda: OPS.quantize(weight, codebook), [weight, codebook]),
        "repack": (lambda: OPS.repack(*planes, bits, shape), planes),
        "repack inverse": (lambda: OPS.repack(*tiles, bits, shape, True), tiles),
    }
    for form, words in (("planes", planes), ("tiles", tiles)):
        for kind, how in (("", ()), ("transformed ", (columns, True))):
            packed = [*words, codebook]
            ops = {
                "dequantize": (OPS.dequantize, [], (shape, torch.float16)),
                "embed": (OPS.embed, [indices], (shape, torch.float32)),
                "gemm": (OPS.gemm, [x], (None, 130)),
                "gemm of 40 tokens": (OPS.gemm, [more], (None, 130)),
            }
            for name, (op, given, rest) in ops.items():
                call = functools.partial(op, *given, *packed, *rest, *how)
                found[f"{name}, {kind}{form}"] = call, [*given, *packed, *how[:1]]
    return found


def as_tuple(result):
    return result if isinstance(result, tuple) else (result,)


def assert_equal(found, expected):
    for ours, theirs in zip(as_tuple(found), as_tuple(expected), strict=True):
        assert torch.equal(ours, theirs)


NAMES = list(calls(2, "cpu"))


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("name", NAMES)
def test_graph_capture(name, bits):
    call, _ = calls(bits)[name]
    expected = call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    for tensor in as_tuple(found):
        tensor.fill_(77)
    graph.replay()
    torch.cuda.synchronize()
    assert_equal(found, expected)


@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_current_stream(name):
    """Its inputs are written by the same stream, late: a kernel on another stream would read them too early."""
    call, inputs = calls(3)[name]
    expected = call()
    values = [tensor.clone() for tensor in inputs]
    for tensor in inputs:
        tensor.zero_()
    busy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(10):
            busy = busy @ busy * 1e-4
        for tensor, value in zip(inputs, values, strict=True):
            tensor.copy_(value)
        found = call()
    torch.cuda.synchronize()
    assert_equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_a_device_that_is_not_the_current_one(name):
    assert torch.cuda.current_device() == 0
    found, expected = calls(3, "cuda:1")[name][0](), calls(3, "cuda:0")[name][0]()
    assert all(tensor.device.index == 1 for tensor in as_tuple(found))
    assert_equal(tuple(t.cpu() for t in as_tuple(found)), tuple(t.cpu() for t in as_tuple(expected)))
    assert torch.cuda.current_device() == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_devices_in_one_call_are_refused():
    codebook = cases.codebook(3)
    with pytest.raises(ValueError, match=r"codebook: found on cuda:1, expected on cuda:0 like weight"):
        OPS.quantize(cases.weight((16, 256)).cuda(0), codebook.cuda(1))


def test_planned_for_the_code_that_runs():
    """The newest that the GPU runs, not the GPU's own: a library built for 80 alone has no code for Hopper's plans."""
    major, minor = torch.cuda.get_device_capability()
    gpu = 10 * major + minor
    built = [arch.partition("-")[0].rstrip("af") for arch in native.build_info()["cuda"]["archs"].split()]
    assert cuda_arch() == 10 * max(int(arch) for arch in built if int(arch) <= gpu)


def run_gemm(**variables) -> subprocess.CompletedProcess:
    code = "import torch, hf_kbit; linear = torch.nn.Linear(512, 256, dtype=torch.float16)\n"
    code += "print(hf_kbit.KbitLinear.from_linear(linear).cuda()(torch.ones(3, 512).half().cuda()).isfinite().all())"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **variables})


def test_architecture_of_the_environment():
    ran = run_gemm(HF_KBIT_CUDA_ARCH="sm_90")
    assert (
        ran.stderr.strip().splitlines()[-1].startswith("ValueError: HF_KBIT_CUDA_ARCH: found sm_90, expected a number")
    )
    ran = run_gemm(HF_KBIT_CUDA_ARCH=str(cuda_arch() // 10))
    assert "True" in ran.stdout, ran.stderr


@pytest.fixture(params=[40])
def free_memory(request):
    """What the large tests need, GiB, given back afterwards."""
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < request.param << 30:
        pytest.skip(f"needs {request.param} GiB of free GPU memory")
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("bits", cases.BITS)
def test_more_than_4_gib(bits, free_memory):
    """A weight of 4.3 billion 16-bit numbers: byte and element offsets beyond 32 bits, planes beyond 1 GiB.

    The first and last rows and those around the places where 32-bit offsets turn over are compared with the reference.
    """
    rows, columns = (1 << 20) + 48, 4096
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 1 << 17):
        weight[start : start + (1 << 17)].normal_()
    codebook = cases.codebook(bits).cuda()
    planes = OPS.quantize(weight, codebook)
    tiles = OPS.repack(*planes, bits, [rows, columns])
    back = OPS.repack(*tiles, bits, [rows, columns], True)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(back, planes, strict=True))
    del back
    turns = [1 << 18, 1 << 19, 1 << 20]  # 2**31 and 2**32 bytes of bfloat16, 2**32 elements
    spots = [slice(0, 16), *(slice(turn - 16, turn + 16) for turn in turns), slice(rows - 16, rows)]
    for packed in (planes, tiles):
        decoded = OPS.dequantize(*packed, codebook, [rows, columns], torch.bfloat16)
        for spot in spots:
            expected = reference.quantize(weight[spot], codebook)
            assert all(torch.equal(ours[spot], theirs) for ours, theirs in zip(planes, expected, strict=True))
            part = reference.dequantize(*expected, codebook, [len(weight[spot]), columns], torch.bfloat16)
            assert torch.equal(decoded[spot], part)
        del decoded


@FORMS
def test_rows_of_a_table_of_more_than_4_gib(tiled, free_memory):
    """4.3 billion weights of 5 bits, as many looked up, last row first: table and result beyond 32-bit offsets."""
    rows, columns, bits = (1 << 20) + 48, 4096, 5
    planes = torch.randint(-(2**31), 2**31, (rows, columns // 32 * bits), dtype=torch.int32, device="cuda")
    absmax = torch.randint(0, 256, (rows, columns // 32), dtype=torch.uint8, device="cuda")
    codebook = cases.codebook(bits).cuda()
    packed = OPS.repack(planes, absmax, bits, [rows, columns]) if tiled else (planes, absmax)
    backwards = torch.arange(rows - 1, -1, -1, device="cuda")
    found = OPS.embed(backwards, *packed, codebook, [rows, columns], torch.bfloat16)
    for turn in (0, 1 << 18, 1 << 19, 1 << 20, rows):
        first, last = max(turn - 16, 0), min(turn + 16, rows)
        own = planes[first:last], absmax[first:last]
        expected = reference.dequantize(*own, codebook, [last - first, columns], torch.bfloat16)
        assert torch.equal(found[rows - last : rows - first].flip(0), expected)


@pytest.mark.parametrize("tokens", [16, 40])
def test_rows_too_long_for_32_bits(tokens, free_memory):
    """More columns than a fused kernel counts; the tokens are one-hot, so that the product is some columns."""
    rows, columns = 16, 150_000_128
    words, scales = [(rows // 16, -(-columns // 256), *shape) for shape in ((2, 32, 4), (8, 16))]
    words = torch.randint(-(2**31), 2**31, words, dtype=torch.int32, device="cuda")
    scales = torch.randint(0, 256, scales, dtype=torch.uint8, device="cuda")
    codebook = cases.codebook(2).cuda()
    x = torch.zeros(tokens, columns, dtype=torch.float16, device="cuda")
    ones = torch.linspace(0, columns - 1, tokens, dtype=torch.float64).long().cuda()
    x[torch.arange(tokens, device="cuda"), ones] = 1
    expected = OPS.dequantize(words, scales, codebook, [rows, columns], torch.float16)[:, ones].T
    assert torch.equal(OPS.gemm(x, words, scales, codebook, None, rows), expected)


@pytest.mark.parametrize("free_memory", [90], indirect=True)
def test_more_blocks_than_are_counted_are_refused(free_memory):
    rows = (15 << 25) + 1
    planes = torch.empty(rows, 16, dtype=torch.int32, device="cuda")
    absmax = torch.empty(rows, 8, dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match=f"weight: found 1 times {8 * rows} blocks of 32 weights, expected at most"):
        OPS.repack(planes, absmax, 2, [rows, 256])


def test_no_memory_is_held():
    """Ops allocate their outputs and nothing else."""
    for name, (call, _) in calls(3).items():
        call()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        found = call()
        expected = sum(-(-tensor.nbytes // 512) * 512 for tensor in as_tuple(found))
        assert torch.cuda.memory_allocated() - before == expected, name
        del found
