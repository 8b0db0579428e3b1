"""How a weight is quantized into a value, and what is refused."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hf_kbit import codebooks
from hf_kbit.format.decoding import TRANSFORMS, ScalarDecoding
from hf_kbit.format.spec import BITS
from hf_kbit.weight import packing as module
from hf_kbit.weight.balance import balance
from hf_kbit.weight.packing import MOST_TO_TRANSFORM, TOO_LARGE, Rows, quantize_weight
from hf_kbit.weight.tensor import Packed

LEVELS = codebooks.optimal(3)


def decode(packed: Packed, shape, dtype=torch.float32) -> torch.Tensor:
    (planes, absmax, *columns), decoding = packed.tensors.values(), packed.decoding
    how = decoding.codebook("cpu"), shape[-2:], dtype, *(columns or [None]), decoding.transformed
    return torch.ops.hf_kbit.dequantize(planes, absmax, *how)


def decoded(weight: torch.Tensor, transform: str, levels=LEVELS) -> torch.Tensor:
    return decode(quantize_weight(weight, levels, search=True, transform=transform), weight.shape)


class MadeAnew:
    """A weight that is no tensor, ``reference.matrices``."""

    def __init__(self, weight: torch.Tensor):
        self.shape, self.device, self._weight = weight.shape, weight.device, weight

    def __iter__(self):
        return (matrix.clone() for matrix in self._weight)


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("size, stands_out", [(1.0, False), (1e-20, False), (1.0, True)])
def test_parts_cannot_be_seen(size, stands_out, transform, monkeypatch):
    """Nor the order of a weight in memory: the same bytes as of one matrix at once, of any magnitude."""
    weight = torch.randn(3, 50, 70, generator=torch.Generator().manual_seed(1)) * size
    if stands_out:
        weight[1, 40, 7] = 1000 * size
    how = codebooks.optimal(4, signed=transform == "rotated"), True, transform
    expected = quantize_weight(weight.reshape(150, 70), *how)
    assert ("weight_columns" in expected.tensors) == expected.decoding.transformed == (transform == "rotated")
    before = weight.clone()
    for numbers in (1, 7 * 70, 1 << 30):
        monkeypatch.setattr(module, "_SLICE_ON_CPU", numbers)
        for given in (weight.requires_grad_(), weight.mT.contiguous().mT, MadeAnew(weight.detach())):
            found = quantize_weight(given, *how)
            assert found.decoding == expected.decoding and found.tensors.keys() == expected.tensors.keys()
            for name, tensor in found.tensors.items():
                assert torch.equal(tensor.view(expected.tensors[name].shape), expected.tensors[name])
                assert not tensor.requires_grad and (name == "weight_columns" or tensor.shape[:2] == (3, 50))
        columns = expected.tensors.get("weight_columns")
        stored = [Rows(given, columns, "weight").weight for given in (weight, weight.mT.contiguous().mT)]
        assert torch.equal(*stored) and torch.equal(weight, before)


def test_a_part_at_a_time_is_alive(monkeypatch):
    """Of what a large weight becomes by its transform: whole, it would be twice as large, and made in two copies."""
    monkeypatch.setattr(module, "_SLICE_ON_CPU", 64 * 10)
    weight, alive, most = torch.randn(4, 25, 64, dtype=torch.bfloat16), [], 0
    to_stored = module.to_stored

    def record(*args, **kwargs):
        nonlocal most
        part = to_stored(*args, **kwargs)
        alive.append(StorageWeakRef(part.untyped_storage()))
        most = max(most, sum(not storage.expired() for storage in alive))
        return part

    monkeypatch.setattr(module, "to_stored", record)
    quantize_weight(weight, LEVELS, True, "rotated")
    assert len(alive) >= 12 and most <= 2


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_weight_is_freed_at_once(transform):
    """Without the garbage collector: while a model loads, few weights are in memory."""
    weight = torch.randn(64, 64)
    storage = StorageWeakRef(weight.untyped_storage())
    gc.disable()
    try:
        quantize_weight(weight, LEVELS, search=True, transform=transform)
        del weight
        assert storage.expired()
    finally:
        gc.enable()


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("largest", [0.999 * TOO_LARGE, 1.001 * MOST_TO_TRANSFORM, MOST_TO_TRANSFORM, 2.0**-120])
def test_the_largest_weights_decode_to_finite_ones(largest, transform):
    """Transformed too, in the worst case: all of a block large, and of the smallest column scale or the largest."""
    weight = torch.ones(2, 64)
    weight[:, 32:] = torch.linspace(-1e-6, 1e-6, 32)
    for turned in (weight, weight.T.contiguous(), torch.linspace(-1, 1, 128).view(2, 64)):
        assert decoded(turned * largest, transform).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_huge_weights_are_not_transformed(dtype):
    weight = torch.full((2, 64), MOST_TO_TRANSFORM, dtype=dtype)
    for times, transform in ((1.0, "rotated"), (1.01, "none")):
        packed = quantize_weight(weight * times, LEVELS, search=False, transform="rotated")
        assert packed.decoding.transform == transform
        assert ("weight_columns" in packed.tensors) == (transform != "none") == packed.decoding.transformed


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (TOO_LARGE, r"found magnitudes up to 3.\d+e\+38, expected them below"),
        (-3.4e38, r"found magnitudes up to 3.\d+e\+38, expected them below"),
        *((value, "found NaN or infinite values") for value in (float("nan"), float("inf"), -float("inf"))),
    ],
)
def test_weights_whose_decoded_ones_would_not_be_finite_are_refused(value, message, transform):
    weight = torch.zeros(2, 64)
    weight[1, 3] = value
    with pytest.raises(ValueError, match=f"^q_proj.weight: {message}"):
        quantize_weight(weight, LEVELS, search=True, transform=transform, name="q_proj.weight")


@pytest.mark.parametrize("size", [1e-30, 1e-20, 0.01, 1e3, 1e15, 1e28])
def test_weights_of_any_size_are_quantized_as_well(size):
    """A power of two goes into the column scales and, beyond their range, into the exponent."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    levels = codebooks.optimal(4, signed=True)
    error, expected = (
        ((decoded(weight * unit, "rotated", levels) - weight * unit).double() / unit).square().mean().item()
        for unit in (size, 1.0)
    )
    assert error == pytest.approx(expected, rel=0.03)
    packed = quantize_weight(weight * size, levels, search=True, transform="rotated")
    assert (packed.decoding.exponent == 0) == (size == 0.01)


def test_metadata_of_an_untransformed_weight_is_what_it_was_before_there_were_transforms():
    assert ScalarDecoding(LEVELS, 2).to_dict() == {"levels": list(LEVELS), "exponent": 2}
    assert ScalarDecoding(LEVELS, 2, "rotated").to_dict()["transform"] == "rotated"


def test_with_its_own_column_scales_a_decoded_weight_is_quantized_to_the_same_codes():
    """As when adapters that hardly change a weight are merged into it; with others it would be rounded anew.

    But for a few blocks, whose largest weight was rounded to less than the largest of the other sign: so is theirs.
    """
    levels = codebooks.optimal(3, signed=True)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(64, 100, generator=generator) * torch.exp2(torch.randn(100, generator=generator))
    packed = quantize_weight(weight, levels, search=True, transform="rotated")
    dense = decoded(weight, "rotated", levels)
    columns = packed.tensors["weight_columns"]
    assert not torch.equal(balance(dense), columns), "or this would prove nothing"
    again = quantize_weight(dense, levels, search=True, transform="rotated", columns=columns)
    assert torch.equal(again.tensors["weight_columns"], columns)
    assert (again.tensors["weight"] != packed.tensors["weight"]).float().mean() < 0.04


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e20])
@pytest.mark.parametrize("bits", BITS)
def test_levels_are_symmetric_where_a_weight_stands_out(bits, size):
    """Rotated, its block has one magnitude and both signs. Levels without a counterpart would lose much of that."""
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(bits)) * size
    lopsided, symmetric = codebooks.optimal(bits, signed=True), codebooks.optimal(bits)
    assert quantize_weight(weight, lopsided, True, transform="rotated").decoding.levels == lopsided
    weight[3, 40] = 1000 * size
    assert quantize_weight(weight, lopsided, True, transform="rotated").decoding.levels == symmetric
    others = codebooks.integer(bits)
    assert quantize_weight(weight, others, True, transform="rotated").decoding.levels == others
    error = (decoded(weight, "rotated", lopsided) - weight)[3, 32:64].double().norm() / weight[3, 40]
    assert error < 0.03, "0.17 at 2 bits by the lopsided ones"
    zeros = quantize_weight(torch.zeros(2, 64), lopsided, True, transform="rotated")
    assert not zeros.tensors["weight_absmax"].any()


# --- what is much smaller than the largest weight -------------------------------------------------


def smaller(part: str, size: float) -> tuple[torch.Tensor, tuple]:
    """A weight of which a part is so many times smaller than the rest, and where that part is."""
    weight = torch.randn(4, 64, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    where = {"rows": (..., slice(16), slice(None)), "expert": (1,), "columns": (..., slice(64, 128))}[part]
    weight[where] *= size
    return weight, where


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("part", ["rows", "expert", "columns"])
@pytest.mark.parametrize("bits", BITS)
def test_rows_experts_and_columns_are_held_beside_much_larger_ones(bits, part, transform):
    """A hundred thousand times larger ones: with an error of 1.4 times what the width explains at most."""
    levels = codebooks.optimal(bits, signed=transform == "rotated")
    usual = None
    for size in (1, 1e-2, 1e-3, 1e-4, 1e-5):
        weight, where = smaller(part, size)
        packed = quantize_weight(weight, levels, search=True, transform=transform)
        assert packed.decoding.transform == transform or packed.untransformed
        error = ((decode(packed, weight.shape) - weight)[where].norm() / weight[where].norm()).item()
        usual = usual or error
        assert error < 1.4 * usual, (size, packed.untransformed)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_no_exponent_holds_is_said(transform):
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight[3, 7] = 1e7
    packed = quantize_weight(weight, LEVELS, search=True, transform=transform)
    assert packed.lost.startswith("63 of 64 rows")
    weight[3, 7], weight[4], weight[5] = 1, 0, 1e-9  # zero and dead rows cost nothing
    packed = quantize_weight(weight, LEVELS, search=True, transform=transform)
    assert (packed.lost, packed.untransformed, packed.decoding) == ("", "", ScalarDecoding(LEVELS, 0, transform))


def test_a_wider_exponent_is_enough_for_most():
    """The transform, without which language models lose much at 2 and 3 bits, is kept where it can be."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[:8] *= 0.007
    packed = quantize_weight(weight, codebooks.optimal(3, signed=True), search=True, transform="rotated")
    assert packed.decoding.transform == "rotated" and packed.decoding.exponent < 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("bits", BITS)
def test_weights_near_the_end_of_float16_decode_finite(bits, transform, dtype):
    weight = torch.rand(64, 256, generator=torch.Generator().manual_seed(bits)) * 2 - 1
    levels = codebooks.optimal(bits, signed=transform == "rotated")
    for largest in (65280, 60000, 30000):  # the first is the last that both hold
        packed = quantize_weight((weight * largest).to(dtype), levels, search=True, transform=transform)
        assert decode(packed, weight.shape, torch.float16).isfinite().all() and not packed.lost


def test_the_largest_weights_of_a_transformed_layer_have_levels_for_scales_without_signs():
    """The others would decode to infinity: the layer is not transformed, for it is too large."""
    weight = (torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) * 2 - 1) * 3.3e38
    assert decoded(weight, "rotated", codebooks.optimal(2, signed=True)).isfinite().all()
