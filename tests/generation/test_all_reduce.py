"""The kernel of sums over processes, by Triton's interpreter in the place of two processes, one after the other; GPUs
run it in tests/integrations/parallel/test_gpus.py."""

import pytest
import torch

from hf_kbit.generation import all_reduce

triton = pytest.importorskip("triton", reason="Triton, of the extra `test`, is not installed")
kernels = pytest.importorskip("hf_kbit.generation.all_reduce_kernels", exc_type=ImportError)
tl = triton.language

# One row and several, whole blocks of the kernel and odd ones, one program and several.
SHAPES = (1, 90), (1, 2, 3000)
EPS = 1e-5
NAN = tl.constexpr(0x7FC07FC0)  # in all dtypes


@triton.jit
def _await(pointers, sum_numbers):
    """As the kernel's, but what would be awaited for ever is NaN."""
    found = tl.load(pointers)
    return tl.where((found >> 32).to(tl.int32) == sum_numbers, found.to(tl.uint32), NAN)


def numbers(shape, dtype, seed) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton interprets all kernels or none")
def test_by_the_interpreter(monkeypatch):
    """The same bits in both processes, as near as the dtype allows, one sum after the other in alternating places."""
    monkeypatch.setattr(kernels, "_await", _await)
    words = all_reduce.MOST_BYTES // 4
    memory = torch.zeros(2, 4 * words, dtype=torch.int64)
    addresses, states = torch.tensor([own.data_ptr() for own in memory]), torch.zeros(2, 2, dtype=torch.int32)
    places = [all_reduce.Buffers(None, addresses, states[rank], rank, words, memory[rank]) for rank in range(2)]

    def in_both(call):
        """The first reads what the second has written, whose own result is right only when it is called again. What
        the sum before has written is still there, for a process that is late."""
        call(1, places[1]._replace(state=states[1].clone()))
        made = [call(rank, place) for rank, place in enumerate(places)]
        number = int(states[0, 0])
        assert {int(there >> 32) for there in memory[0].view(2, 2, words)[:, 1, 0]} == {number, number - 1}
        return made

    for dtype in all_reduce.DTYPES:
        for shape in SHAPES:
            x = [numbers(shape, dtype, seed) for seed in range(2)]
            residual, weight = numbers(shape, dtype, 2), numbers(shape[-1:], dtype, 3)
            summed = in_both(lambda rank, place, x=x: kernels.all_reduce(x[rank], place))
            more = residual, weight, EPS
            both = in_both(lambda rank, place, x=x, more=more: kernels.all_reduce_norm(x[rank], place, *more))
            exact = sum(own.double() for own in x)
            added = residual.double() + exact
            normed = torch.nn.functional.rms_norm(added, weight.shape, weight.double(), EPS)
            # Of bfloat16 the interpreter rounds each step towards zero.
            eps = torch.finfo(dtype).eps
            for found, expected in ((summed, exact), *zip(zip(*both, strict=True), (added, normed), strict=True)):
                assert torch.equal(*found)
                torch.testing.assert_close(found[0].double(), expected, rtol=4 * eps, atol=8 * eps)
    assert states.tolist() == 2 * [[2 * len(all_reduce.DTYPES) * len(SHAPES), 0]]
