"""How a weight is quantized into a value, and what is refused."""

import pytest
import torch

from hf_kbit import codebooks
from hf_kbit.nn.packed import TOO_LARGE, Decoding, quantize_weight

LEVELS = codebooks.optimal(3)


def decoded(weight: torch.Tensor) -> torch.Tensor:
    planes, absmax, decoding = quantize_weight(weight, LEVELS, search=True)
    return torch.ops.hf_kbit.dequantize(planes, absmax, decoding.codebook("cpu"), weight.shape, torch.float32)


def test_quantizing_leaves_its_arguments_alone():
    weight = torch.randn(4, 64, requires_grad=True)
    before = weight.detach().clone()
    packed = quantize_weight(weight, LEVELS, search=True)
    assert torch.equal(weight, before) and not packed.planes.requires_grad
    assert packed.decoding == Decoding(LEVELS, 0) and packed.decoding.bits == 3


def test_the_largest_weights_decode_to_finite_ones():
    weight = torch.linspace(-1, 1, 128).view(2, 64) * 0.999 * TOO_LARGE
    assert decoded(weight).isfinite().all()


@pytest.mark.parametrize("value", [TOO_LARGE, 3.4e38])
def test_weights_whose_decoded_ones_would_be_infinite_are_refused(value):
    weight = torch.zeros(2, 64)
    weight[1, 3] = -value
    with pytest.raises(ValueError, match=r"q_proj.weight: found magnitudes up to 3.\d+e\+38, expected them below"):
        quantize_weight(weight, LEVELS, search=True, name="q_proj.weight")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match="k_proj: found NaN or infinite values"):
        quantize_weight(torch.full((1, 32), value), LEVELS, search=False, name="k_proj")


def test_refined_levels_belong_to_the_weight():
    weight = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) - 0.3
    own = quantize_weight(weight, LEVELS, search=True, refined=True).decoding
    assert own.levels != LEVELS and own.bits == 3
    assert Decoding.from_dict(own.to_dict(), 3, "weight") == own
