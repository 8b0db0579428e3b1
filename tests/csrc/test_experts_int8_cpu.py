"""Products of experts with 8-bit inputs, which are the reference's to the last bit, for every number of rows at which
their path changes. ``tests/ops/test_native.py`` runs this file with each instruction set."""

import cases
import pytest
import torch
from compiled import BITS, FORMS, OPS, moved

from hf_kbit import codebooks
from hf_kbit.format import reference
from hf_kbit.ops import native

SHARES = [0, 1, 2, 5, 0, 9, 17, 33, 0, 1]  # rows of each expert
ROWS, TOKENS = sum(SHARES) + 3, 20  # the last three are no expert's
OFFSETS = torch.tensor([0, *SHARES]).cumsum(0).int()


@pytest.fixture(autouse=True)
def needs_library():
    if not native.library("cpu").loaded:
        pytest.skip(f"no compiled kernels: {native.library('cpu').missing}")


def weights(shape, bits, tiled=False):
    """Any words and scales, first rows that are not zeros and last ones that are, if there are two, and levels that
    are not symmetric; column scales; inverses."""
    planes, absmax = cases.random_packed((len(SHARES), *shape), bits)
    absmax[:, -1], absmax[:, 0] = 0, 100
    codebook = torch.tensor(codebooks.optimal(bits, signed=True))
    inverses = [reference.int8_inverses(*one, codebook, list(shape)) for one in zip(planes, absmax, strict=True)]
    packed = reference.repack(planes, absmax, bits, list(shape)) if tiled else (planes, absmax)
    return (*packed, codebook), cases.columns(shape[1]), torch.stack(inverses)


def picked() -> torch.Tensor:
    return torch.randint(0, TOKENS, (ROWS,), generator=cases.generator(ROWS)).int()


def assert_same(x, packed, columns, inverses, bias, rows, out_features):
    how = bias, rows, OFFSETS
    expected = reference.gemm_experts_int8(x, *packed, *how, out_features, columns)
    arguments = x, *packed, *how
    for known in (inverses, None):
        found = OPS.gemm_experts_int8(*arguments, out_features, columns, known)
        assert found.dtype == x.dtype and found.is_contiguous() and torch.equal(found, expected)
    assert not found[OFFSETS[-1] :].any() and found[: OFFSETS[-1], 0].all()


@FORMS
@pytest.mark.parametrize("dtype", cases.FLOATS)
@BITS
def test_every_number_of_rows(bits, dtype, tiled, poison):
    packed, columns, inverses = weights((35, 1000), bits, tiled)
    bias = cases.x((len(SHARES),), 35, dtype)
    for x, rows in ((cases.x((ROWS,), 1000, dtype), None), (cases.x((TOKENS,), 1000, dtype), picked())):
        poison("cpu", ROWS * 35 * dtype.itemsize)
        assert_same(x, packed, columns, inverses, bias, rows, 35)


@pytest.mark.parametrize("shape", cases.SHAPES, ids=str)
@BITS
def test_every_shape(bits, shape):
    packed, columns, inverses = weights(shape, bits)
    assert_same(cases.x((TOKENS,), shape[1]), packed, columns, inverses, None, picked(), shape[0])


def test_strides_odd_addresses_and_threads():
    (planes, absmax, codebook), columns, inverses = weights((700, 300), 3)
    x, rows, bias = cases.x((TOKENS,), 300), picked(), cases.x((len(SHARES),), 700)
    expected = reference.gemm_experts_int8(x, planes, absmax, codebook, bias, rows, OFFSETS, 700, columns)
    strided = [torch.stack([tensor, tensor + 1], dim=-1)[..., 0] for tensor in (bias, rows, OFFSETS)]
    there = [moved(tensor) for tensor in (x, planes, absmax, codebook)]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        found = OPS.gemm_experts_int8(*there, *strided, 700, columns, inverses)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)


def test_what_is_not_finite_stays_in_its_row():
    packed, columns, inverses = weights((20, 100), 4)
    x = cases.x((ROWS,), 100)
    how = None, None, OFFSETS
    expected = OPS.gemm_experts_int8(x, *packed, *how, 20, columns, inverses)
    x[7, 50] = torch.inf
    found = OPS.gemm_experts_int8(x, *packed, *how, 20, columns, inverses)
    assert found[7].isnan().all()
    others = torch.arange(ROWS) != 7
    assert torch.equal(found[others], expected[others])


def test_wrong_rows_and_offsets_are_refused():
    packed, columns, _ = weights((20, 100), 4)
    x, wrong = cases.x((TOKENS,), 100), OFFSETS.flip(0)
    arguments = x, *packed, None
    with pytest.raises(ValueError, match="offsets: found 68, expected 0 first"):
        OPS.gemm_experts_int8(*arguments, picked(), wrong, 20, columns)
    with pytest.raises(ValueError, match="rows: found 20, expected from 0 to 19, those of x"):
        OPS.gemm_experts_int8(*arguments, picked() + 1, OFFSETS, 20, columns)


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_a_gate_comes_before(dtype):
    packed, columns, inverses = weights((35, 1000), 3)
    x = cases.x((ROWS,), 2000, dtype)
    how = *packed, None, None, OFFSETS, 35, columns, inverses
    expected = OPS.gemm_experts_int8(reference.swiglu_of(x), *how)
    for op in (OPS.gemm_experts_int8, reference.gemm_experts_int8):
        assert torch.equal(op(x, *how, True), expected)
