"""Products of 8-bit inputs, which are the reference's to the last bit, for every number of tokens at which their path
changes. ``tests/ops/test_native.py`` runs this file with each instruction set."""

import cases
import pytest
import torch
from compiled import BITS, FORMS, OPS, moved

from hf_kbit import codebooks
from hf_kbit.format import reference
from hf_kbit.ops import native

SHAPES = [*cases.SHAPES, (1100, 256), (33, 2100), (5, 4096 + 40)]
TOKENS = [1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 40, 300]


@pytest.fixture(autouse=True)
def needs_library():
    if not native.library("cpu").loaded:
        pytest.skip(f"no compiled kernels: {native.library('cpu').missing}")


def weight(shape, bits, exponent=0, tiled=False):
    """Any words and scales, a row of zeros, and levels that are not symmetric; column scales."""
    planes, absmax = cases.random_packed(shape, bits)
    if shape[0] > 2:
        absmax[1] = 0
    codebook = torch.tensor(codebooks.optimal(bits, signed=True)) * 2.0**exponent
    packed = reference.repack(planes, absmax, bits, list(shape)) if tiled else (planes, absmax)
    return (*packed, codebook), cases.columns(shape[1])


def inputs(tokens, in_features, dtype):
    """Usual tokens, and those that are zeros, have an outlier, or are too small."""
    x = cases.x((tokens,), in_features).to(dtype)
    if tokens > 3:
        x[1], x[2, in_features // 2] = 0, 3e4
        x[3] *= 2.0**-110
    return x


def assert_same(x, packed, columns, rows, bias=None):
    expected = reference.gemm_int8(x, *packed, bias, rows, columns)
    inverses = OPS.int8_inverses(*packed, [rows, x.shape[-1]])
    assert torch.equal(inverses, reference.int8_inverses(*packed, [rows, x.shape[-1]]))
    for known in (inverses, None):
        found = OPS.gemm_int8(x, *packed, bias, rows, columns, known)
        assert found.dtype == x.dtype and found.is_contiguous() and torch.equal(found, expected)


@FORMS
@pytest.mark.parametrize("dtype", cases.FLOATS)
@BITS
def test_every_number_of_tokens(bits, dtype, tiled, poison):
    shape = (35, 1000)
    packed, columns = weight(shape, bits, tiled=tiled)
    for tokens in TOKENS:
        poison("cpu", tokens * shape[0] * dtype.itemsize)
        assert_same(inputs(tokens, shape[1], dtype), packed, columns, shape[0], cases.x((), 35, dtype))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@BITS
def test_every_shape(bits, shape):
    packed, columns = weight(shape, bits)
    for tokens in (1, 6):
        assert_same(inputs(tokens, shape[1], torch.float32), packed, columns, shape[0])


@BITS
def test_every_code_of_every_scale(bits):
    """Each level times each scale, in rows of large and small ones: products that are halves are rounded to even."""
    levels, rows = 2**bits, 256
    codes = torch.arange(levels).repeat(rows, 8 * 32 // levels).view(rows, 8, 32).to(torch.uint8)
    absmax = (torch.arange(rows)[:, None] + torch.arange(8) * 37).remainder(256).to(torch.uint8)
    planes = reference.pack_codes(codes, bits)
    for exponent in (-90, 0, 100):
        codebook = torch.linspace(-1, 0.75, levels) * 2.0**exponent
        assert_same(torch.eye(256)[:40] * 3, (planes, absmax, codebook), cases.columns(256), rows)


@BITS
def test_largest_sums(bits):
    """All numbers 127, or with the other sign: nothing saturates, and what wraps around is right in the end."""
    for in_features in (4096, 133_120):
        blocks = in_features // 32
        planes, absmax = torch.full((3, blocks * bits), -1).int(), torch.full((3, blocks), 100).byte()
        absmax[1] += 128
        codebook = torch.linspace(-0.9, 1, 2**bits)
        x = torch.zeros(5, in_features)
        x[:, ::32] = torch.tensor([1.0, -1, 1, -1, 1])[:, None]  # which a rotation spreads
        columns = torch.full((in_features,), 176).byte()
        q, _ = reference.tokens_to_int8(x, columns)
        assert (q.abs() == 127).all()
        for tokens in (1, 5):
            assert_same(x[:tokens], (planes, absmax, codebook), columns, 3)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf, 3e38], ids=str)
@pytest.mark.parametrize("tokens", [1, 6])
def test_what_is_not_finite_stays_in_its_token(tokens, wrong):
    """Nor what a rotation makes infinite of two neighbours that are finite."""
    packed, columns = weight((20, 100), 4)
    columns[50:52] = 176
    x = cases.x((tokens,), 100)
    expected = OPS.gemm_int8(x, *packed, None, 20, columns)
    x[-1, 50:52] = wrong
    found = OPS.gemm_int8(x, *packed, None, 20, columns)
    assert found[-1].isnan().all() and torch.equal(found[:-1], expected[:-1])


def test_strides_and_odd_addresses():
    packed, columns = weight((20, 300), 3)
    x = cases.x((2, 3), 300)
    expected = reference.gemm_int8(x, *packed, None, 20, columns)
    strided = torch.stack([x, x + 1], dim=-1)[..., 0]
    inverses = reference.int8_inverses(*packed, [20, 300])
    for some in (strided, x.transpose(0, 1).contiguous().transpose(0, 1), moved(x)):
        elsewhere = [moved(tensor) for tensor in packed]
        found = OPS.gemm_int8(some, *elsewhere, None, 20, columns, inverses)
        assert torch.equal(found, expected)


def test_threads():
    """Rows are divided among threads, which have memory of their own."""
    packed, columns = weight((700, 1000), 5)
    x = cases.x((40,), 1000)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        for tokens in (1, 40):
            assert_same(x[:tokens], packed, columns, 700)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", cases.FLOATS)
@pytest.mark.parametrize("tokens", [1, 70])
def test_a_group_gives_what_each_gives_alone(tokens, dtype):
    """Weights of any rows and bits, with a bias or without, which have column scales in common or their own."""
    x, group, alone = inputs(tokens, 1000, dtype), [], []
    common, own = cases.columns(1000), cases.columns(1000, seed=1)
    for rows, bits, biased, columns in ((35, 3, False, common), (7, 4, True, common), (130, 4, False, own)):
        stored, _ = weight((rows, 1000), bits, exponent=bits)
        packed = *stored, cases.x((), rows, dtype) if biased else None, rows, columns
        inverses = OPS.int8_inverses(*stored, [rows, 1000])
        group.append((*packed, 1, inverses))
        alone.append(reference.gemm_int8(x, *packed))
    for found, wanted in zip(OPS.gemm_group(x, *map(list, zip(*group, strict=True))), alone, strict=True):
        assert found.is_contiguous() and torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_a_group_has_weights_of_both_kinds(dtype):
    """8-bit inputs of the weight with inverses, and 16-bit ones of the others."""
    stored, columns = weight((35, 1000), 3)
    x, bias = inputs(70, 1000, dtype), cases.x((), 35, dtype)
    packed = *stored, bias, 35, columns
    known = OPS.int8_inverses(*packed[:3], [35, 1000])
    exact, rounded = OPS.gemm(x, *packed, True), OPS.gemm_int8(x, *packed, known)
    group = *([part] * 3 for part in (*packed, 1)), [None, known, None]
    for found, wanted in zip(OPS.gemm_group(x, *group), (exact, rounded, exact), strict=True):
        assert torch.equal(found, wanted)
    first, second, third = reference.gemm_group(x, *group)
    assert torch.equal(second, rounded) and torch.equal(first, third) and not torch.equal(first, second)
