"""hf_kbit.fast_generate on a GPU: compiled and captured, with and without packed weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from architectures import BY_NAME
from generation.test_fast_generate import SAMPLED, prompts, same
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import hf_kbit

pytestmark = pytest.mark.gpu


def build(name: str, bits: int | None, dtype=torch.float32):
    torch.compiler.reset()
    model = BY_NAME[name].build(dtype, vocab_size=256, max_position_embeddings=512).cuda()
    if bits is not None:
        hf_kbit.quantize_model(model, bits=bits)
    return model


@pytest.fixture(scope="module")
def small():
    return build("llama", None)


def compiled(model, new_tokens=40, **settings) -> torch.Tensor:
    settings |= {"max_new_tokens": new_tokens, "custom_generate": hf_kbit.fast_generate}
    return model.generate(**prompts("cuda"), **settings)


@pytest.mark.parametrize(("name", "bits"), [("llama", None), ("llama", 4), ("gemma3", 4), ("mixtral", None)])
def test_compiled(name, bits):
    """The tokens of ``generate``, greedy and sampled; caches of all lengths take the code that was compiled first. In
    float32, where no two logits are so near each other that another order of sums chooses another token."""
    model = build(name, bits)
    for lengths in ((7,), (7, 3, 5)):
        counters.clear()
        for settings in ({"max_new_tokens": 40}, {"max_new_tokens": 150}, SAMPLED):
            same(model, prompts("cuda", lengths), disable_compile=False, **settings)
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("name", ["llama", "gemma3", "mixtral"])
def test_16_bits(name):
    """Half precision runs, and does so to the same tokens each time."""
    model = build(name, 4, torch.bfloat16)
    found = [compiled(model) for _ in range(2)]
    assert torch.equal(*found) and found[0].shape == (3, 47)


@pytest.mark.parametrize("settings", [{}, SAMPLED, {"eos_token_id": 1000}], ids=["greedy", "sampled", "with an end"])
def test_a_step_is_one_launch(small, settings):
    """Of 39 steps the first is launched kernel by kernel."""
    compiled(small, **settings)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        compiled(small, **settings)
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls["cudaGraphLaunch"] == 38
    assert calls.get("cudaStreamSynchronize", 0) < 20, "the host waits for steps"


def test_memory(small):
    """Nothing is kept: no cache, no graph; nor does what the allocator holds grow from call to call."""
    compiled(small)
    before, held = torch.cuda.memory_allocated(), []
    for _ in range(6):
        compiled(small)
        assert torch.cuda.memory_allocated() == before
        held.append(torch.cuda.memory_reserved())
    assert max(held[2:]) <= max(held[:2])


def test_streams_and_threads(small):
    """Another stream; two calls at a time, of one model, in threads of their own."""
    expected = [compiled(small, new_tokens) for new_tokens in (30, 60)]
    with torch.cuda.stream(torch.cuda.Stream()):
        found = compiled(small, 30)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(found, expected[0])
    with ThreadPoolExecutor(2) as threads:
        for _ in range(4):
            assert all(map(torch.equal, threads.map(lambda tokens: compiled(small, tokens), (30, 60)), expected))
