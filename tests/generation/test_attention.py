"""Attention of one token, against that of torch, and where it is in place of it."""

import threading

import pytest
import torch
from architectures import BY_NAME
from torch.nn.functional import scaled_dot_product_attention

from hf_kbit.generation import attention
from hf_kbit.generation.attention import NAME, attend, attend_one_token
from hf_kbit.generation.decode_step import for_one_token

# Heads, those that keys have, size, that of values, length, sequences.
SHAPES = {
    "each its own keys": (4, 4, 8, 12, 20, 3),
    "some share keys": (6, 2, 24, 24, 100, 2),
    "more than a program has": (18, 1, 16, 16, 70, 1),
    "in many parts": (4, 2, 64, 64, 1030, 1),
    "large": (2, 1, 256, 200, 90, 1),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_against_torch(shape, dtype, device):
    """In 16 bits its only rounding is that of the result. What is masked is not read: it may be NaN."""
    pytest.importorskip("triton")
    if (device, dtype) == ("cpu", torch.bfloat16):
        pytest.skip("Triton's interpreter has no products of bfloat16")
    heads, shared, size, value_size, length, batch = shape
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(batch, 1, 1, length, generator=generator) < 0.5
    mask[..., length // 3 : length // 2] = False
    mask[0, ..., 33:] = False
    mask[..., 5] = True
    query, key, value = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((batch, 1, heads, size), (batch, length, shared, size), (batch, shared, length, value_size))
    )
    states = query.transpose(1, 2), key.transpose(1, 2), value
    exact = [state.double() for state in states]
    expected = scaled_dot_product_attention(*exact, mask, scale=0.9 * size**-0.5, enable_gqa=True).transpose(1, 2)
    for state in states[1:]:
        state.transpose(1, 2)[~mask[:, 0, 0]] = torch.nan
    on_device = [state.to(device) for state in (*states, mask)]
    found, weights = attend(torch.nn.Identity(), *on_device, scaling=0.9 * size**-0.5)
    assert weights is None and found.dtype == dtype
    torch.testing.assert_close(found.double().cpu(), expected, rtol=1.01 * torch.finfo(dtype).eps, atol=2e-6)


def test_large_products(device, monkeypatch):
    """They grow from block to block, so that no weight may be computed without the largest; in one part and many."""
    kernels = pytest.importorskip("hf_kbit.generation.attention_kernels", exc_type=ImportError)
    query, keys = torch.full((1, 2, 1, 16), 5.0), torch.rand(1, 2, 200, 16, generator=torch.Generator().manual_seed(0))
    keys *= torch.linspace(0, 9, 200)[:, None]
    mask = torch.ones(1, 1, 1, 200, dtype=torch.bool)
    expected = scaled_dot_product_attention(query.double(), keys.double(), keys.double(), scale=1.0).transpose(1, 2)
    on_device = [state.to(device) for state in (query, keys, keys, mask)]
    for programs in (1, kernels.PROGRAMS):
        monkeypatch.setattr(kernels, "PROGRAMS", programs)
        found = attend_one_token(*on_device, 1.0)
        torch.testing.assert_close(found.double().cpu(), expected, rtol=1e-3, atol=0)


def test_the_op(device):
    """Its fake too, with a mask that all sequences share and with a scale of its own."""
    pytest.importorskip("triton")
    query, keys = torch.randn(2, 4, 1, 8, device=device), torch.randn(2, 2, 5, 8, device=device)
    mask = torch.ones(1, 1, 1, 5, dtype=torch.bool, device=device)
    torch.library.opcheck(attend_one_token, (query, keys, keys, mask, 0.5))
    found, _ = attend(torch.nn.Identity(), query, keys, keys, mask)
    expected = scaled_dot_product_attention(query, keys, keys, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("left_to_torch", ["several tokens", "no mask", "position_bias", "softcap", "dropout"])
def test_what_is_left_to_torch(left_to_torch, monkeypatch):
    monkeypatch.setattr(attention, "sdpa_attention_forward", lambda *args, **kwargs: "torch's")
    tokens = 2 if left_to_torch == "several tokens" else 1
    query, keys = torch.rand(1, 2, tokens, 8), torch.rand(1, 2, 5, 8)
    mask = None if left_to_torch == "no mask" else torch.ones(1, 1, tokens, 5, dtype=torch.bool)
    settings = {"position_bias": torch.rand(1, 2, 1, 5), "softcap": 30.0, "dropout": 0.1}
    settings = {name: value if name == left_to_torch else None for name, value in settings.items()}
    assert attend(torch.nn.Identity(), query, keys, keys, mask, **settings) == "torch's"


@pytest.mark.parametrize(("own", "inside"), [("sdpa", NAME), ("eager", "eager")])
def test_where_it_is_used(own, inside):
    """In place of sdpa alone: eager attention may cap its scores. Images go through theirs, and an error ends it."""
    model = BY_NAME["llava"].build(attn_implementation=own)
    with pytest.raises(InterruptedError), for_one_token(model):
        assert model.config.text_config._attn_implementation == inside
        assert model.config.vision_config._attn_implementation == own
        raise InterruptedError
    assert model.config.text_config._attn_implementation == own


def test_threads_share_a_model():
    """Neither waits for the other, as compiling takes long, and the first leaves before the second does."""
    model = BY_NAME["mixtral"].build(attn_implementation="sdpa", experts_implementation="grouped_mm")
    model.lm_head.register_full_backward_hook(lambda *args: None)

    def state():
        hooks = len(model.lm_head._backward_hooks)
        return model.config._attn_implementation, model.get_experts_implementation()[""], hooks

    both, left, seen = threading.Barrier(2, timeout=10), threading.Event(), []

    def enter(wait):
        with for_one_token(model):
            both.wait()
            wait()
            seen.append(state())
        left.set()

    threads = [threading.Thread(target=enter, args=[wait]) for wait in (bool, left.wait)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert seen == 2 * [(NAME, "batched_mm", 0)] and state() == ("sdpa", "grouped_mm", 1)
