"""hf_kbit.fast_generate against ``generate``; on a CPU as a GPU runs it, with a stand-in for CUDA graphs."""

import gc
import weakref
from functools import wraps

import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME
from byte_tokenizer import byte_tokenizer
from cpu_graph import Launches, cpu_graph
from peft import LoraConfig, get_peft_model
from torch._dynamo.testing import CompileCounter
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria

import hf_kbit
from hf_kbit.generation import decode_step, static_cache
from hf_kbit.generation.attention import NAME
from hf_kbit.generation.sampling import Sampler, largest
from hf_kbit.generation.static_cache import CACHE
from hf_kbit.generation.unsupported import Unsupported

DECODERS = [each for each in ARCHITECTURES if each.generates and each.name not in ("t5", "whisper")]
SAMPLED = {"do_sample": True, "temperature": 1.2, "top_k": 40, "top_p": 0.9}
CUDA = decode_step.BACKENDS["cuda"]


@pytest.fixture
def as_a_gpu(monkeypatch):
    """Steps on a CPU are recorded and launched ahead."""
    monkeypatch.setitem(decode_step.BACKENDS, "cpu", decode_step.Backend(capture=cpu_graph, ahead=CUDA.ahead))


@pytest.fixture(scope="module")
def llama(device):
    return BY_NAME["llama"].build(vocab_size=256).to(device)


def prompts(device, lengths=(7, 3, 5)) -> dict:
    """Padded on the left."""
    ids = torch.randint(5, 90, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(2)).to(device)
    mask = torch.stack([torch.arange(max(lengths)) >= max(lengths) - length for length in lengths]).long().to(device)
    return {"input_ids": ids * mask, "attention_mask": mask}


def same(model, inputs: dict, **settings) -> torch.Tensor:
    """What generate finds, which decode must find too."""
    found = []
    for way in ({}, {"custom_generate": hf_kbit.fast_generate}):
        torch.manual_seed(4)
        found.append(model.generate(**inputs, **{"max_new_tokens": 9, **settings, **way}))
    assert torch.equal(*found), found
    return found[0]


@pytest.mark.parametrize("architecture", DECODERS, ids=str)
def test_architectures(architecture, as_a_gpu, device):
    """Padded prompts, past every window; plain ones, with images where there are some."""
    model = architecture.build().to(device)
    if (device, architecture.name) == ("cuda", "falcon"):
        with pytest.raises(ValueError, match="FalconForCausalLM cannot be recorded in a CUDA graph"):
            same(model, prompts(device), disable_compile=True)  # it takes heads by numbers that the host sends
        return
    same(model, prompts(device), disable_compile=True)
    inputs = {name: tensor.to(device) for name, tensor in architecture.inputs().items()}
    same(model, inputs, disable_compile=True, **SAMPLED)


@pytest.mark.parametrize("size", [1, 384, 511, 512, 513, 2000])
def test_the_largest(size, device):
    """And of equal ones the first, as in torch; NaN is larger than all."""
    scores = torch.randint(9, (4, size), generator=torch.Generator().manual_seed(size)).float().to(device)
    scores[1, -1] = torch.nan
    scores[2] = -torch.inf
    scores[3] = -torch.inf
    scores[3, -1] = -5.0
    torch.testing.assert_close(largest(scores), tuple(scores.max(-1)), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("ends", "operations"), [([], 7), ([2], 10), ([2, 3], 11)])
def test_operations_of_a_greedy_choice(ends, operations):
    """Each is a kernel on a GPU, though there is little to do."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(9), *[EosTokenCriteria(ends)] * bool(ends)])
    config = GenerationConfig()
    config.pad_token_id = 0
    choose = Sampler(torch.ones(1, 3, dtype=torch.int64), LogitsProcessorList(), criteria, config)
    logits = torch.randn(1, 32000)
    with Launches() as launches:
        choose(logits, 4)
    assert sum(not operation.is_view for operation, *_ in launches.launched) == operations


class Even(LogitsProcessor):
    """Allows only tokens of the parity of the length."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(256, device=scores.device) % 2 != input_ids.shape[1] % 2, -torch.inf)


class Seen(StoppingCriteria):
    """Ends a sequence at a token that it had before."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, :-1] == input_ids[:, -1:]).any(1)


SETTINGS = {
    "one token": {"max_new_tokens": 1},
    "two tokens": {"max_new_tokens": 2},
    "a length": {"max_new_tokens": None, "max_length": 20},
    "several sequences": SAMPLED | {"num_return_sequences": 2},
    "sampling by min_p": {"do_sample": True, "min_p": 0.05, "top_k": 0},
    "sampling by typical_p": {"do_sample": True, "typical_p": 0.5},
    "repetition penalty": {"repetition_penalty": 1.7},
    "no repeated n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[7], [8, 9]], "eos_token_id": 3},
    "least tokens": {"min_new_tokens": 6, "eos_token_id": list(range(3, 200))},
    "guidance": {"guidance_scale": 1.5},
    "a chunked prompt": {"prefill_chunk_size": 3},
    "a static cache": {"cache_implementation": "static"},
    "padding": {"eos_token_id": list(range(40, 250)), "pad_token_id": 2},
    "a processor": {"logits_processor": [Even()]},
    "a criterion": {"stopping_criteria": [Seen()]},
    "a criterion and an end": {"stopping_criteria": [Seen()], "eos_token_id": list(range(200, 256))},
    "no time": {"max_time": 0.0},
    "stop strings": {"stop_strings": ["a", "\x10"], "tokenizer": byte_tokenizer(), "max_new_tokens": 30},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_settings(settings, as_a_gpu, llama, device):
    same(llama, prompts(device), disable_compile=True, **settings)


def test_embeddings_for_a_prompt(as_a_gpu, llama, device):
    inputs = prompts(device)
    embeddings = llama.get_input_embeddings()(inputs.pop("input_ids"))
    same(llama, inputs | {"inputs_embeds": embeddings}, disable_compile=True)


@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_ends(settings, as_a_gpu, llama, device):
    """A sequence ends at each of its tokens in turn; a batch ends with the last one; the rest is padding."""
    plain = same(llama, prompts(device), eos_token_id=None, disable_compile=True, **settings)
    for column in range(7, 16):
        same(llama, prompts(device), eos_token_id=plain[1, column].item(), disable_compile=True, **settings)
        every = plain[:, column].tolist()
        found = same(llama, prompts(device), eos_token_id=every, pad_token_id=1, disable_compile=True, **settings)
        assert found.shape[1] <= column + 1


def test_a_full_context(as_a_gpu, llama, device):
    """To the last position that the model has, and a cache that is full to its last place."""
    found = same(llama, prompts(device, (50, 44)), max_new_tokens=14, disable_compile=True)
    assert found.shape[1] == llama.config.max_position_embeddings == static_cache.LENGTHS


def test_without_a_graph(llama, device, monkeypatch):
    """As on other devices: a step is called, and looked at before the next; no random numbers are lost."""
    monkeypatch.delitem(decode_step.BACKENDS, device, raising=False)
    drawn = []
    for way in ({}, {"custom_generate": hf_kbit.fast_generate}):
        torch.manual_seed(4)
        found = llama.generate(**prompts(device, (7,)), eos_token_id=list(range(128, 256)), **SAMPLED, **way)
        drawn.append(torch.rand(3, device=device))
    assert found.shape[1] < 20 and torch.equal(*drawn)


# --- how steps are run ----------------------------------------------------------------------------


@pytest.fixture
def forwards(llama, monkeypatch):
    """Lengths of what goes through the model from Python."""
    lengths, forward = [], llama.forward

    @wraps(forward)
    def counted(*args, **kwargs):
        lengths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(llama, "forward", counted)
    return lengths


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.7}], ids=["recorded", "between steps"])
def test_a_step_is_recorded_once(settings, as_a_gpu, llama, device, forwards):
    """The prompt, a first step, and the second, which is recorded; all others repeat it."""
    llama.generate(
        **prompts(device), max_new_tokens=9, disable_compile=True, custom_generate=hf_kbit.fast_generate, **settings
    )
    assert forwards == [7, 1, 1]


def test_steps_past_the_end(llama, device, monkeypatch, forwards):
    """As many as are launched ahead, and none past the greatest length."""
    monkeypatch.setitem(decode_step.BACKENDS, device, decode_step.Backend(ahead=2))
    plain = llama.generate(**prompts(device), max_new_tokens=9, custom_generate=hf_kbit.fast_generate)
    assert forwards == [7] + 8 * [1]
    del forwards[:]
    ends = plain[:, 10].tolist()
    found = llama.generate(
        **prompts(device), max_new_tokens=9, eos_token_id=ends, custom_generate=hf_kbit.fast_generate
    )
    assert len(forwards) == found.shape[1] - 7 + 2


def test_lengths_share_compiled_code(llama, device, monkeypatch):
    """Caches and paddings of other lengths too; another batch is compiled for itself."""
    torch.compiler.reset()
    counter = CompileCounter()
    monkeypatch.setitem(
        decode_step.BACKENDS,
        device,
        decode_step.Backend(lambda: torch.compile(decode_step.logits_of, backend=counter, dynamic=False)),
    )
    for new_tokens in (9, 40, 120):
        same(llama, prompts(device), max_new_tokens=new_tokens, use_cache=True)
    assert counter.frame_count == 1
    same(llama, prompts(device, (6, 4)))
    assert counter.frame_count == 2


@pytest.mark.parametrize("new_tokens", [2, 3, 9])
def test_nothing_is_kept(new_tokens, as_a_gpu, llama, device, monkeypatch):
    """The keys and values go with the call, and do not wait for the garbage collector."""
    kept, static_cache_ = [], decode_step.static_cache

    def spying(*args):
        found = static_cache_(*args)
        kept.extend(weakref.ref(layer.keys) for layer in found.layers)
        return found

    monkeypatch.setattr(decode_step, "static_cache", spying)
    gc.disable()
    try:
        same(llama, prompts(device), max_new_tokens=new_tokens, disable_compile=True)
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

    monkeypatch.setitem(decode_step.BACKENDS, device, decode_step.Backend(lambda: spying, decode_step.for_one_token))
    monkeypatch.setattr(decode_step, "logits_of", spying)
    same(llama, prompts(device), disable_compile=disabled)
    assert seen == 8 * [NAME] and llama.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("bits", [None, 3], ids=["16 bits", "3 bits"])
def test_adapters(bits, as_a_gpu, device):
    """PEFT's, over packed weights and others."""
    model = BY_NAME["llama"].build()
    if bits is not None:
        hf_kbit.quantize_model(model, bits=bits)
    config = LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(5)
    adapted = get_peft_model(model, config).to(device)
    found = same(adapted, prompts(device), disable_compile=True)
    with adapted.disable_adapter():
        assert not torch.equal(found, same(adapted, prompts(device), disable_compile=True))


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.nonzero])
def test_a_forward_that_reads_back(read, as_a_gpu, monkeypatch):
    """It cannot be recorded: an error says so. On a CPU alone, for CUDA is not to be trusted after it in a process."""
    llama = BY_NAME["llama"].build()
    forward = llama.forward

    @wraps(forward)
    def reading(*args, **kwargs):
        output = forward(*args, **kwargs)
        read(output.logits.sum())
        return output

    monkeypatch.setattr(llama, "forward", reading)
    with pytest.raises(Unsupported, match="LlamaForCausalLM cannot be recorded in a CUDA graph"):
        llama.generate(**prompts("cpu"), max_new_tokens=9, custom_generate=hf_kbit.fast_generate)


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
    for streamer, way in zip(streamers, ({}, {"custom_generate": hf_kbit.fast_generate}), strict=True):
        llama.generate(**prompts(device), max_new_tokens=9, streamer=streamer, disable_compile=True, **settings, **way)
    assert streamers[0].given == streamers[1].given and streamers[0].given[-1] == "end"


REFUSED = {
    "generation mode beam_search": {"num_beams": 2},
    "generation mode assisted_generation": {"prompt_lookup_num_tokens": 2},
    "return_dict_in_generate=True": {"return_dict_in_generate": True},
    "use_cache=False": {"use_cache": False},
    "cache_implementation='offloaded'": {"cache_implementation": "offloaded"},
    CACHE: {CACHE: DynamicCache()},
    "a compile_config": {"compile_config": CompileConfig()},
    "synced_gpus=True": {"synced_gpus": True},
}


@pytest.mark.parametrize(("found", "settings"), REFUSED.items(), ids=REFUSED)
def test_refusals(found, settings, llama, device, forwards):
    if "offloaded" in found and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("Transformers makes a stream first, which a torch with CUDA does not without a GPU")
    with pytest.raises(Unsupported, match=f"^hf_kbit.fast_generate: found {found}, expected [^;]*$"):
        llama.generate(**prompts(device), custom_generate=hf_kbit.fast_generate, **settings)
    assert not forwards


def test_tensors_that_may_differ_from_step_to_step(llama, device):
    """Nothing that is not known to stay is recorded."""
    with pytest.raises(
        ValueError, match="a step of LlamaForCausalLM takes logits_to_keep, expected no tensors but inp"
    ):
        last = torch.tensor([-1], device=device)
        llama.generate(**prompts(device), logits_to_keep=last, max_new_tokens=3, custom_generate=hf_kbit.fast_generate)


def test_all_that_is_refused_is_named(llama, device):
    with pytest.raises(
        ValueError, match=r"found generation mode beam_sample, .*; found use_cache=False, .*; found a comp"
    ):
        settings = {"num_beams": 3, "do_sample": True, "use_cache": False, "compile_config": CompileConfig()}
        llama.generate(**prompts(device), custom_generate=hf_kbit.fast_generate, **settings)


def small(kind: str, **sizes):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, vocab_size=99, pad_token_id=0))


def mixed():
    """Layers of attention, and one of linear attention."""
    config = BY_NAME["qwen3"].settings | {"layer_types": ["linear_attention", "full_attention"]}
    config |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "num_experts": 2, "num_experts_per_tok": 1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_next", **config))


def on_two_devices():
    model = BY_NAME["llama"].build()
    model.hf_device_map = {"model": 0, "lm_head": "cpu"}
    return model


MODELS = {
    "T5ForConditionalGeneration, an encoder-decoder, expected a decoder": BY_NAME["t5"].build,
    "MambaForCausalLM, whose cache has a LinearAttentionLayer": lambda: small(
        "mamba", hidden_size=16, state_size=4, num_hidden_layers=1
    ),
    "Qwen3NextForCausalLM, whose cache has a LinearAttentionLayer": mixed,
    f"OpenAIGPTLMHeadModel, whose forward takes no {CACHE}": lambda: small(
        "openai-gpt", n_embd=16, n_layer=1, n_head=2
    ),
    f"RwkvForCausalLM, whose forward takes no {CACHE}": lambda: small("rwkv", hidden_size=16, num_hidden_layers=2),
    "a model on 0, cpu, expected one device": on_two_devices,
    "attn_implementation='flex_attention'": lambda: BY_NAME["llama"].build(attn_implementation="flex_attention"),
}


@pytest.mark.parametrize(("found", "build"), MODELS.items(), ids=MODELS)
def test_models_that_are_refused(found, build):
    with pytest.raises(Unsupported, match=f"found {found}"):
        build().generate(torch.tensor([[5, 6]]), max_new_tokens=3, custom_generate=hf_kbit.fast_generate)


@pytest.mark.gpu
def test_more_models_that_are_refused():
    """On a GPU."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(
        ValueError, match=r"found input_ids on cpu, expected .* where the model is; found rope_type='dyn"
    ):
        model = BY_NAME["llama"].build(rope_parameters=rope).cuda()
        model.generate(torch.tensor([[5, 6]]), custom_generate=hf_kbit.fast_generate)


def test_an_assistant_is_refused(llama, device):
    with pytest.raises(ValueError, match="found generation mode assisted_generation"):
        llama.generate(**prompts(device, (3,)), assistant_model=llama, custom_generate=hf_kbit.fast_generate)


def test_no_probabilities(as_a_gpu, llama, device):
    """A model whose logits are NaN does not draw from them in silence."""

    class Broken(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores * torch.nan if input_ids.shape[1] > 9 else scores

    settings = dict(logits_processor=[Broken()], do_sample=True, disable_compile=True)
    with pytest.raises(ValueError, match="found probabilities that are NaN") as error:
        llama.generate(**prompts(device), custom_generate=hf_kbit.fast_generate, **settings)
    assert not isinstance(error.value, Unsupported), "tokens were handed on"


def test_other_callables_get_what_they_did(llama, device):
    """Transformers keeps streamers from them."""
    got = {}

    def custom(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        got.update(kwargs)
        return input_ids

    llama.generate(**prompts(device), streamer=Streamer(), custom_generate=custom)
    assert "streamer" not in got and CACHE in got
