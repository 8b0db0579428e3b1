"""Attention of one token, against that of torch, and where it is in place of it."""

import pytest
import torch
from architectures import BY_NAME
from torch.nn.functional import scaled_dot_product_attention

from hf_kbit.decoding.attention import NAME, attend, of_one_token


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_against_torch(heads, dtype, device):
    """Heads that share keys; values of another size; in bfloat16 its only rounding is that of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = (3, heads[0], 1, 8), (3, heads[1], 20, 8), (3, heads[1], 20, 12)
    states = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    mask = torch.rand(3, 1, 1, 20, generator=generator).to(device) < 0.5
    mask[..., -1] = True
    found, weights = attend(torch.nn.Identity(), *states, mask, scaling=0.5)
    exact = [state.double() for state in states]
    expected = scaled_dot_product_attention(*exact, mask, scale=0.5, enable_gqa=True).transpose(1, 2)
    assert weights is None and found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("left_to_torch", ["several tokens", "no mask", "position_bias", "softcap", "dropout"])
def test_what_is_left_to_torch(left_to_torch, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "hf_kbit.decoding.attention.sdpa_attention_forward", lambda *args, **kwargs: asked.append(args)
    )
    tokens = 2 if left_to_torch == "several tokens" else 1
    query, keys = torch.rand(1, 2, tokens, 8), torch.rand(1, 2, 5, 8)
    mask = None if left_to_torch == "no mask" else torch.ones(1, 1, tokens, 5, dtype=torch.bool)
    settings = {"position_bias": torch.rand(1, 2, 1, 5), "softcap": 30.0, "dropout": 0.1}
    settings = {name: value if name == left_to_torch else None for name, value in settings.items()}
    attend(torch.nn.Identity(), query, keys, keys, mask, **settings)
    assert len(asked) == 1


@pytest.mark.parametrize(("attention", "inside"), [("sdpa", NAME), ("eager", "eager")])
def test_where_it_is_used(attention, inside):
    """In place of sdpa alone: eager attention may cap its scores. Images go through theirs, and an error ends it."""
    model = BY_NAME["llava"].build(attn_implementation=attention)
    with pytest.raises(InterruptedError), of_one_token(model):
        assert model.config.text_config._attn_implementation == inside
        assert model.config.vision_config._attn_implementation == attention
        raise InterruptedError
    assert model.config.text_config._attn_implementation == attention
