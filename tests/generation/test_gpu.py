"""hf_kbit.fast_generate on a GPU: compiled and recorded, with and without packed weights."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from architectures import BY_NAME
from generation.test_fast_generate import SAMPLED, prompts, same
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import hf_kbit

pytestmark = pytest.mark.gpu


MODELS = {"llama": None, "llama, 4 bits": 4, "gemma3, 4 bits": 4, "mixtral": None}


@pytest.fixture(scope="module", params=MODELS.items(), ids=MODELS)
def model(request):
    """In float32, where no two logits are so near each other that another order of sums chooses another token."""
    torch.compiler.reset()
    name, bits = request.param
    model = BY_NAME[name.split(",")[0]].build(vocab_size=256, max_position_embeddings=512).cuda()
    if bits is not None:
        hf_kbit.quantize_model(model, bits=bits)
    return model


@pytest.fixture(scope="module")
def small():
    return BY_NAME["llama"].build(vocab_size=256, max_position_embeddings=512).cuda()


def decode(model, **settings) -> torch.Tensor:
    settings = {"max_new_tokens": 40, "custom_generate": hf_kbit.fast_generate, **settings}
    return model.generate(**prompts("cuda"), **settings)


@pytest.mark.parametrize("lengths", [(7,), (7, 3, 5)], ids=["one", "padded"])
def test_compiled(model, lengths):
    """The tokens of ``generate``, greedy and sampled; caches of all lengths take the code that was compiled first."""
    counters.clear()
    for new_tokens in (40, 150):
        same(model, prompts("cuda", lengths), max_new_tokens=new_tokens)
    same(model, prompts("cuda", lengths), **SAMPLED)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "mixtral"])
def test_16_bits(architecture):
    """Half precision runs, and does so to the same tokens each time."""
    model = BY_NAME[architecture].build(torch.bfloat16, vocab_size=256, max_position_embeddings=512).cuda()
    hf_kbit.quantize_model(model, bits=4)
    found = [decode(model) for _ in range(2)]
    assert torch.equal(*found) and found[0].shape == (3, 47)


@pytest.mark.parametrize("settings", [{}, SAMPLED, {"eos_token_id": 1000}], ids=["greedy", "sampled", "with an end"])
def test_a_step_is_one_launch(small, settings):
    """Of 39 steps the first is launched kernel by kernel."""
    decode(small, **settings)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        decode(small, **settings)
    calls = {event.key: event.count for event in profiled.key_averages()}
    assert calls["cudaGraphLaunch"] == 38
    assert calls.get("cudaStreamSynchronize", 0) < 20, "the host waits for steps"


def test_memory(small):
    """Nothing is kept: no cache, no graph; nor does what the allocator holds grow from call to call."""
    decode(small)
    before, held = torch.cuda.memory_allocated(), []
    for _ in range(6):
        decode(small)
        assert torch.cuda.memory_allocated() == before
        held.append(torch.cuda.memory_reserved())
    assert max(held[2:]) <= max(held[:2])


def test_another_stream(small):
    expected = decode(small)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = decode(small)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(found, expected)


def test_threads(small):
    """Two calls at a time, of one model, in threads of their own."""
    expected = [decode(small, max_new_tokens=tokens) for tokens in (30, 60)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(4):
            found = threads.map(lambda tokens: decode(small, max_new_tokens=tokens), (30, 60))
            assert all(map(torch.equal, found, expected))
