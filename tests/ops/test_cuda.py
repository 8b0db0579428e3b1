"""What only a GPU can get wrong: streams, devices, graphs, memory, indices beyond 32 bits. Of all ops."""

import gc
import os
import subprocess
import sys
from dataclasses import replace

import cases
import contract
import pytest
import torch
from compiled import FORMS, NEEDED, cuda_arch
from contract import ALL_OPS, OPS, Call, as_list, assert_same_bits, batch_invariant, on
from torch.utils._pytree import tree_leaves

from hf_kbit.format import reference
from hf_kbit.ops import native

pytestmark = NEEDED
EVERY_OP = pytest.mark.parametrize("op", ALL_OPS)


def calls(op: str, bits: int, device="cuda") -> list[Call]:
    """On small inputs of their own, which lie on the device."""
    found = [its for call in contract.examples(op, bits, (130, 304)) for its in call.forms() if its.runs_on("cuda")]
    return [replace(call, arguments=on(device, call.arguments)) for call in found]


def run(call: Call) -> list[torch.Tensor]:
    with batch_invariant(call.int8):
        return as_list(getattr(OPS, call.op)(*call.arguments.values()))


def tensors_of(call: Call) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(call.arguments) if isinstance(leaf, torch.Tensor)]


def assert_equal(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("bits", cases.BITS)
@EVERY_OP
def test_graph_capture(op, bits):
    for call in calls(op, bits):
        expected, graph = run(call), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(call)
        for tensor in found:
            tensor.fill_(77)
        graph.replay()
        torch.cuda.synchronize()
        assert_equal(found, expected)


@EVERY_OP
def test_runs_on_the_current_stream(op):
    """Its inputs are written by the same stream, late: a kernel on another stream would read them too early."""
    for call in calls(op, 3):
        expected, inputs = run(call), tensors_of(call)
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
            found = run(call)
        torch.cuda.synchronize()
        assert_equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@EVERY_OP
def test_a_device_that_is_not_the_current_one(op):
    assert torch.cuda.current_device() == 0
    for there, here in zip(calls(op, 3, "cuda:1"), calls(op, 3, "cuda:0"), strict=True):
        found, expected = run(there), run(here)
        assert all(tensor.device.index == 1 for tensor in found)
        assert_equal(on("cpu", found), on("cpu", expected))
    assert torch.cuda.current_device() == 0


@EVERY_OP
def test_no_memory_is_held(op):
    """Ops allocate their outputs and nothing else that stays."""
    for call in calls(op, 3):
        run(call)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        found = run(call)
        expected = sum(-(-tensor.nbytes // 512) * 512 for tensor in found)
        assert torch.cuda.memory_allocated() - before == expected, str(call)
        del found


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


# --- rows of tables, and of experts ---------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("index", [-1, 50, 2**32 + 3])
def test_an_index_that_is_no_row_stops_a_gpu(index, tiled):
    """In a process of its own, which cannot use the GPU afterwards. Row 50 would be in the last tile, as padding."""
    form = "OPS.repack(planes, absmax, 4, [50, 96])" if tiled else "(planes, absmax)"
    code = f"""
import torch, hf_kbit
OPS = torch.ops.hf_kbit
codebook = torch.tensor(hf_kbit.format.codebooks.normal_float(4)).cuda()
planes, absmax = OPS.quantize(torch.randn(50, 96).cuda(), codebook)
found = OPS.embed(torch.tensor([3, {index}]).cuda(), *{form}, codebook, [50, 96], torch.float16)
print("went on", flush=True)
torch.cuda.synchronize()
print("was not stopped")
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ran.returncode and "was not stopped" not in ran.stdout, ran.stdout
    assert "went on" in ran.stdout, ran.stderr  # the host did not wait
    assert "indices: each is 0 to V - 1" in ran.stderr and "device-side assert" in ran.stderr, ran.stderr


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 50, 2_000, 8_000, 40_000])
def test_any_number_of_rows(count, dtype, tiled):
    """From one, which several warps share, to more than all warps of a GPU have in one round."""
    indices = torch.randint(0, 300, (count,), generator=cases.generator(count))
    contract.embed(4, dtype, (300, 2600), indices=indices, home="cuda").forms()[tiled].hold("cuda")


@FORMS
def test_longer_rows_than_all_warps_take_in_a_turn(tiled):
    shape = [16, 12_000_032]
    planes = torch.randint(-(2**31), 2**31, (16, 2 * shape[1] // 32), dtype=torch.int32, device="cuda")
    absmax = torch.randint(0, 256, (16, shape[1] // 32), dtype=torch.uint8, device="cuda")
    codebook = cases.codebook(2).cuda()
    packed = OPS.repack(planes, absmax, 2, shape) if tiled else (planes, absmax)
    found = OPS.embed(torch.tensor([13, 0], device="cuda"), *packed, codebook, shape, torch.float16)
    for row, expected in zip((13, 0), found, strict=True):
        own = planes[row : row + 1], absmax[row : row + 1]
        assert torch.equal(OPS.dequantize(*own, codebook, [1, shape[1]], torch.float16)[0], expected)


@FORMS
def test_a_graph_reads_indices_anew(tiled):
    call = contract.embed(4, torch.float16, (300, 1056), home="cuda").forms()[tiled]
    held, graph = call.arguments["indices"].clone(), torch.cuda.CUDAGraph()
    its = replace(call, arguments=call.arguments | {"indices": held})
    run(its)
    with torch.cuda.graph(graph):
        (found,) = run(its)
    for seed in range(4):
        held.copy_(torch.randint(0, 300, held.shape, generator=cases.generator(seed)))
        graph.replay()
        assert_same_bits(found, run(its)[0])


@pytest.mark.parametrize("count", [1, 128, 257, 1024, 3000, 8192])
def test_route_of_many(count):
    """As the reference has it, to the number."""
    for tokens, each in ((1, 1), (16, 8), (129, 1), (40, 8), (9000, 8), (100_000, 2)):
        ids = torch.randint(-1, count + 1, (tokens, each), generator=cases.generator(tokens, count)).cuda()
        assert_equal(OPS.route_experts(ids, count), reference.route_experts(ids, count))
