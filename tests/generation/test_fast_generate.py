"""hf_kbit.fast_generate against ``generate``; on a CPU as a GPU runs it, with a stand-in for CUDA graphs."""

import gc
import weakref

import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME
from byte_tokenizer import byte_tokenizer
from cpu_graph import cpu_graph
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, DynamicCache

import hf_kbit
from hf_kbit.generation import decode_step, static_cache
from hf_kbit.generation.attention import NAME
from hf_kbit.generation.decode_step import BACKENDS, Backend
from hf_kbit.generation.sampling import largest
from hf_kbit.generation.static_cache import CACHE
from hf_kbit.generation.unsupported import Unsupported

DECODERS = [each for each in ARCHITECTURES if each.generates and each.name not in ("t5", "whisper")]
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 40, "top_p": 0.9}
AHEAD = BACKENDS["cuda"].ahead


@pytest.fixture
def as_a_gpu(monkeypatch):
    """Steps on a CPU are captured and launched ahead."""
    monkeypatch.setitem(BACKENDS, "cpu", Backend(capture=cpu_graph, ahead=AHEAD))


@pytest.fixture(scope="module")
def llama(device):
    return BY_NAME["llama"].build(vocab_size=256).to(device)


@pytest.fixture
def forwards(llama):
    """Lengths of what goes through the model from Python."""
    lengths = []
    hook = llama.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    yield lengths
    hook.remove()


def prompts(device, lengths=(7, 3, 5)) -> dict:
    """Padded on the left."""
    ids = torch.randint(5, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long().to(device)
    return {"input_ids": ids * mask, "attention_mask": mask}


def fast(model, inputs: dict, **settings) -> torch.Tensor:
    torch.manual_seed(4)
    defaults = {"max_new_tokens": 9, "disable_compile": True, "custom_generate": hf_kbit.fast_generate}
    return model.generate(**inputs, **{**defaults, **settings})


def same(model, inputs: dict, **settings) -> torch.Tensor:
    """What generate finds, which fast_generate must find too."""
    found, expected = fast(model, inputs, **settings), fast(model, inputs, **settings, custom_generate=None)
    assert torch.equal(found, expected), (found, expected)
    return found


# --- the same tokens ------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", DECODERS, ids=str)
def test_architectures(architecture, as_a_gpu, device):
    """Padded prompts, past every window; plain ones, with images where there are some."""
    model = architecture.build().to(device)
    if (device, architecture.name) == ("cuda", "falcon"):
        with pytest.raises(ValueError, match="FalconForCausalLM cannot be recorded in a CUDA graph"):
            same(model, prompts(device))  # it takes heads by numbers that the host sends
        return
    same(model, prompts(device))
    same(model, {name: tensor.to(device) for name, tensor in architecture.inputs().items()}, **SAMPLED)


def even(ids, scores) -> torch.Tensor:
    """Allows only tokens of the parity of the length."""
    return scores.masked_fill(torch.arange(256, device=scores.device) % 2 != ids.shape[1] % 2, -torch.inf)


def seen(ids, scores) -> torch.Tensor:
    """Ends a sequence at a token that it had before."""
    return (ids[:, :-1] == ids[:, -1:]).any(1)


SETTINGS = {
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "a length": {"max_new_tokens": None, "max_length": 20},
    "several sequences": SAMPLED | {"num_return_sequences": 2},
    "sampling by min_p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
    "sampling by typical_p": {"do_sample": True, "typical_p": 0.5},
    "repetition penalty": {"repetition_penalty": 1.7},
    "bad words": {"bad_words_ids": [[7], [8, 9]], "eos_token_id": 3},
    "least tokens": {"min_new_tokens": 6, "eos_token_id": list(range(3, 200))},
    "guidance": {"guidance_scale": 1.5},
    "a chunked prompt": {"prefill_chunk_size": 3},
    "a static cache": {"cache_implementation": "static"},
    "padding": {"eos_token_id": list(range(40, 250)), "pad_token_id": 2},
    "a processor": {"logits_processor": [even]},
    "a criterion": {"stopping_criteria": [seen]},
    "a criterion and an end": {"stopping_criteria": [seen], "eos_token_id": list(range(200, 256))},
    "no time": {"max_time": 0.0},
    "stop strings": {"stop_strings": ["a", "\x10"], "tokenizer": byte_tokenizer(), "max_new_tokens": 30},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(settings, as_a_gpu, llama, device):
    same(llama, prompts(device), **settings)


def test_prompts(as_a_gpu, llama, device):
    """Of embeddings; and one that leaves the cache full, at the last position of the model."""
    inputs = prompts(device)
    same(llama, inputs | {"inputs_embeds": llama.get_input_embeddings()(inputs.pop("input_ids"))})
    found = same(llama, prompts(device, (50, 44)), max_new_tokens=14)
    assert found.shape[1] == llama.config.max_position_embeddings == static_cache.LENGTHS


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_ends(settings, as_a_gpu, llama, device, monkeypatch):
    """A sequence ends at each of its tokens in turn; a batch ends with the last one; the rest is padding, or the end
    where there is no token for padding."""
    monkeypatch.setattr(llama.generation_config, "pad_token_id", None)
    plain = same(llama, prompts(device), eos_token_id=None, **settings)
    for column in range(7, 16):
        same(llama, prompts(device), eos_token_id=plain[1, column].item(), **settings)
        every = plain[:, column].tolist()
        assert same(llama, prompts(device), eos_token_id=every, pad_token_id=1, **settings).shape[1] <= column + 1


def test_adapters(as_a_gpu, device):
    """PEFT's, over packed weights."""
    model = BY_NAME["llama"].build()
    hf_kbit.quantize_model(model, bits=3)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    adapted = get_peft_model(model, config).to(device)
    found = same(adapted, prompts(device))
    with adapted.disable_adapter():
        assert not torch.equal(found, same(adapted, prompts(device)))


@torch.no_grad()
def test_8_bit_inputs(as_a_gpu, device):
    """Asked for and taken back between calls; on a GPU the prompts' alone are rounded, and none of float32."""
    model = BY_NAME["llama"].build(vocab_size=256).to(device, torch.float16 if device == "cuda" else torch.float32)
    hf_kbit.quantize_model(model, bits=3)
    inputs = prompts(device, lengths=(9, 70))
    exact, logits = same(model, inputs), model(**inputs).logits
    hf_kbit.set_inputs(model, "int8")
    same(model, inputs)
    assert not torch.equal(model(**inputs).logits, logits)
    hf_kbit.set_inputs(model, None)
    assert torch.equal(same(model, inputs), exact) and torch.equal(model(**inputs).logits, logits)


def test_without_a_graph(llama, device, monkeypatch):
    """As on other devices: a step is called, and looked at before the next; no random numbers are lost."""
    monkeypatch.delitem(BACKENDS, device, raising=False)
    drawn = []
    for custom in (None, hf_kbit.fast_generate):
        found = fast(llama, prompts(device, (7,)), eos_token_id=[*range(128, 256)], custom_generate=custom, **SAMPLED)
        drawn.append(torch.rand(3, device=device))
    assert found.shape[1] < 16 and torch.equal(*drawn)


@pytest.mark.parametrize("size", [1, 384, 511, 512, 513, 2000])
def test_the_largest(size, device):
    """And of equal ones the first, as in torch; NaN is larger than all."""
    scores = torch.randint(9, (4, size), generator=torch.Generator().manual_seed(size)).float().to(device)
    scores[1, -1] = torch.nan
    scores[2:] = -torch.inf
    scores[3, -1] = -5.0
    torch.testing.assert_close(largest(scores), tuple(scores.max(-1)), rtol=0, atol=0, equal_nan=True)


# --- how steps are run ----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.7}], ids=["captured", "between steps"])
def test_a_step_is_captured_once(settings, as_a_gpu, llama, device, forwards):
    """The prompt, a first step, and the second, which is captured; all others repeat it."""
    fast(llama, prompts(device), **settings)
    assert forwards == [7, 1, 1]


def test_steps_past_the_end(llama, device, monkeypatch, forwards):
    """As many as are launched ahead, and none past the greatest length."""
    monkeypatch.setitem(BACKENDS, device, Backend(ahead=2))
    ends = fast(llama, prompts(device))[:, 10].tolist()
    assert forwards == [7] + 8 * [1]
    found = fast(llama, prompts(device), eos_token_id=ends)
    assert len(forwards) - 9 == found.shape[1] - 7 + 2


def test_lengths_share_compiled_code(llama, device, monkeypatch):
    """Caches and paddings of other lengths too; another batch is compiled for itself."""
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(decode_step.logits_of, backend=counter, dynamic=False)
    monkeypatch.setitem(BACKENDS, device, Backend(lambda: compiled))
    for frames, lengths, new_tokens in ((1, (7, 3), 9), (1, (5, 5), 120), (2, (6,), 9)):
        fast(llama, prompts(device, lengths), max_new_tokens=new_tokens, disable_compile=False)
        assert counter.frame_count == frames


@pytest.mark.parametrize("new_tokens", [2, 3, 9])
def test_nothing_is_kept(new_tokens, as_a_gpu, llama, device, monkeypatch):
    """The keys and values go with the call, and do not wait for the garbage collector."""
    kept, made = [], decode_step.static_cache

    def spying(*args):
        found = made(*args)
        kept.extend(weakref.ref(layer.keys) for layer in found.layers)
        return found

    monkeypatch.setattr(decode_step, "static_cache", spying)
    gc.disable()
    try:
        fast(llama, prompts(device), max_new_tokens=new_tokens)
    finally:
        gc.enable()
    assert len(kept) == 2 and not any(keys() is not None for keys in kept)


@pytest.mark.parametrize("disabled", [False, True])
def test_attention_of_steps(disabled, llama, device, monkeypatch):
    """Is that of one token, compiled or not, and after that the model's own again; padding and places are left out."""
    pytest.importorskip("triton")
    seen, logits_of = [], decode_step.logits_of

    def spying(model, inputs):
        seen.append(model.config._attn_implementation)
        return logits_of(model, inputs)

    monkeypatch.setitem(BACKENDS, device, Backend(lambda: spying, decode_step.for_one_token))
    monkeypatch.setattr(decode_step, "logits_of", spying)
    same(llama, prompts(device), max_new_tokens=4, disable_compile=disabled)
    assert seen == 3 * [NAME] and llama.config._attn_implementation == "sdpa"


# --- streamers, errors ------------------------------------------------------------------------------


class Streamer:
    """Keeps what it is given."""

    def __init__(self):
        self.given = []

    def put(self, tokens):
        assert tokens.device.type == "cpu"
        self.given.append(tokens.tolist())

    def end(self):
        self.given.append("end")


@pytest.mark.parametrize("settings", [{}, {"eos_token_id": list(range(100, 250))}], ids=["to the length", "ended"])
def test_streamers(settings, as_a_gpu, llama, device):
    """They get the prompt, each token once it is known, none past the end, and are told of the end."""
    streamers = Streamer(), Streamer()
    for streamer, custom in zip(streamers, (None, hf_kbit.fast_generate), strict=True):
        fast(llama, prompts(device), streamer=streamer, custom_generate=custom, **settings)
    assert streamers[0].given == streamers[1].given and streamers[0].given[-1] == "end"


def test_other_callables_get_what_they_did(llama, device):
    """Transformers keeps streamers from them."""
    got = fast(llama, prompts(device), streamer=Streamer(), custom_generate=lambda model, ids, **others: others)
    assert "streamer" not in got and CACHE in got


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero])
def test_a_forward_that_reads_back(read, as_a_gpu):
    """It cannot be captured: an error says so. On a CPU alone, for CUDA is not to be trusted after it in a process."""
    llama = BY_NAME["llama"].build()
    llama.register_forward_hook(lambda module, args, output: (read(output.logits.sum()), None)[1])
    with pytest.raises(Unsupported, match="LlamaForCausalLM cannot be recorded in a CUDA graph"):
        fast(llama, prompts("cpu"))


def test_no_probabilities(as_a_gpu, llama, device):
    """A model whose logits are NaN does not draw from them in silence."""
    broken = [lambda ids, scores: scores * torch.nan if ids.shape[1] > 9 else scores]
    with pytest.raises(ValueError, match="found probabilities that are NaN") as error:
        fast(llama, prompts(device), logits_processor=broken, do_sample=True)
    assert not isinstance(error.value, Unsupported), "tokens were handed on"


REFUSED = {
    "found generation mode beam_search, expected [^;]*$": {"num_beams": 2},
    "found generation mode assisted_generation, expected [^;]*$": {"prompt_lookup_num_tokens": 2},
    "found return_dict_in_generate=True, expected [^;]*$": {"return_dict_in_generate": True},
    "found cache_implementation='offloaded', expected [^;]*$": {"cache_implementation": "offloaded"},
    f"found {CACHE}, expected [^;]*$": {CACHE: DynamicCache()},
    "found synced_gpus=True, expected [^;]*$": {"synced_gpus": True},
    "found generation mode beam_sample, .*; found use_cache=False, .*; found a compile_config, expected [^;]*$": {
        **{"num_beams": 3, "do_sample": True, "use_cache": False, "compile_config": CompileConfig()}
    },
    "found that a step of LlamaForCausalLM takes logits_to_keep, expected no tensors but inp": {
        "logits_to_keep": torch.tensor([-1])
    },
}


@pytest.mark.parametrize(("told", "settings"), REFUSED.items(), ids=REFUSED)
def test_refusals(told, settings, llama, device, forwards):
    """All that is refused is named, before anything runs; what is not known to stay from step to step, after that."""
    if "offloaded" in told and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("Transformers makes a stream first, which a torch with CUDA does not without a GPU")
    with pytest.raises(Unsupported, match=f"^hf_kbit.fast_generate: {told}"):
        fast(llama, prompts(device), **settings)
    assert not forwards or "logits_to_keep" in settings


def test_an_assistant_is_refused(llama, device):
    with pytest.raises(Unsupported, match="found generation mode assisted_generation"):
        fast(llama, prompts(device, (3,)), assistant_model=llama)


MIXED = BY_NAME["qwen3"].settings | {"layer_types": ["linear_attention", "full_attention"], "num_experts_per_tok": 1}
MIXED |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "num_experts": 2}
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 99}


def model_of(kind: str, sizes: dict):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


def on_two_devices():
    model = BY_NAME["llama"].build()
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    return model


MODELS = {
    "T5ForConditionalGeneration, an encoder-decoder, expected a decoder": BY_NAME["t5"].build,
    "Qwen3NextForCausalLM, whose cache has a LinearAttentionLayer": lambda: model_of("qwen3_next", MIXED),
    f"OpenAIGPTLMHeadModel, whose forward takes no {CACHE}": lambda: model_of("openai-gpt", GPT),
    "a model on 0, cpu, expected one device": on_two_devices,
    "attn_implementation='flex_attention'": lambda: BY_NAME["llama"].build(attn_implementation="flex_attention"),
}


@pytest.mark.parametrize(("found", "build"), MODELS.items(), ids=MODELS)
def test_models_that_are_refused(found, build):
    with pytest.raises(Unsupported, match=f"found {found}"):
        fast(build(), {"input_ids": torch.tensor([[5, 6]])})


@pytest.mark.gpu
def test_more_models_that_are_refused():
    """On a GPU."""
    model = BY_NAME["llama"].build(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}).cuda()
    with pytest.raises(Unsupported, match=r"found input_ids on cpu, .* where the model is; found rope_type='dyn"):
        fast(model, {"input_ids": torch.tensor([[5, 6]])})
