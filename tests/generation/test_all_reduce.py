"""The kernel of sums over processes, by Triton's interpreter in two processes that share memory; GPUs run it in
tests/integrations/parallel/test_gpus.py."""

from pathlib import Path
from unittest.mock import patch

import pytest
import ranks
import torch

from hf_kbit.generation import all_reduce

triton = pytest.importorskip("triton", reason="Triton, of the extra `test`, is not installed")
tl = triton.language

# One row and several, whole blocks of the kernel and odd ones, one program and several.
SHAPES = (1, 90), (1, 2, 3000)
EPS = 1e-5


@triton.jit
def _await(pointers, sum_numbers):
    """As the kernel's, without instructions of GPUs."""
    found = tl.load(pointers)
    while tl.sum(((found >> 32).to(tl.int32) != sum_numbers).to(tl.int32), 0) != 0:
        found = tl.load(pointers)
    return found.to(tl.uint32)


def numbers(shape, dtype, seed) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def place_of(rank: int, folder: Path) -> all_reduce.Buffers:
    """In files that all processes map."""
    words = all_reduce.MOST_BYTES // 4
    memory = [
        torch.from_file(str(folder / f"memory{process}"), True, 2 * ranks.SIZE * words, dtype=torch.int64)
        for process in range(ranks.SIZE)
    ]
    addresses = torch.tensor([part.data_ptr() for part in memory])
    return all_reduce.Buffers(None, addresses, torch.zeros(2, dtype=torch.int32), rank, words, memory)


def in_each_process(rank, folder):
    from hf_kbit.generation import all_reduce_kernels

    place, found = place_of(rank, folder), {}
    with patch.object(all_reduce_kernels, "_await", _await):
        for dtype in all_reduce.DTYPES:
            for shape in SHAPES:
                x, residual, weight = (
                    numbers(shape, dtype, rank),
                    numbers(shape, dtype, 2),
                    numbers(shape[-1:], dtype, 3),
                )
                summed = all_reduce_kernels.all_reduce(x, place)
                found[dtype, shape] = summed, *all_reduce_kernels.all_reduce_norm(x, place, residual, weight, EPS)
    return found | {"state": place.state}


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets all kernels or none")
def test_by_the_interpreter(tmp_path):
    """The same bits in both processes, as near as the dtype allows, one sum after the other in alternating places."""
    for process in range(ranks.SIZE):
        (tmp_path / f"memory{process}").write_bytes(bytes(2 * ranks.SIZE * all_reduce.MOST_BYTES * 2))
    first, second = ranks.run(in_each_process, tmp_path)
    for process in (first, second):
        assert process.pop("state").tolist() == [2 * len(all_reduce.DTYPES) * len(SHAPES), 0]
    for (dtype, shape), made in first.items():
        for tensor, other in zip(made, second[dtype, shape], strict=True):
            assert torch.equal(tensor, other)
        summed = sum(numbers(shape, dtype, rank).double() for rank in range(ranks.SIZE))
        added, weight = numbers(shape, dtype, 2).double() + summed, numbers(shape[-1:], dtype, 3).double()
        normed = torch.nn.functional.rms_norm(added, weight.shape, weight, EPS)
        # Of bfloat16 the interpreter rounds each step towards zero.
        eps = torch.finfo(dtype).eps
        for tensor, expected in zip(made, (summed, added, normed), strict=True):
            torch.testing.assert_close(tensor.double(), expected, rtol=4 * eps, atol=8 * eps)
