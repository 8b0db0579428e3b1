"""The decode loop: ``model.generate(..., custom_generate=hf_kbit.decode)``, for quantized models and for others.

``generate`` itself launches the kernels of a step, waits for its token, and only then launches the next step: much of
the time the GPU waits. Here a step is one CUDA graph, launched before the token of the step before has been read. In
the order of a call:

- ``_refuse`` names what the loop cannot do, before anything runs.
- The prompt goes through the model as in ``generate``; ``_with_room`` copies its keys and values to where those of all
  tokens to come have room, so that no tensor changes its place or its shape from step to step.
- ``_Choice`` makes a token of logits: processors, sampling and stopping, as ``generate`` does, on the device.
- ``_Reports`` brings tokens to the host, for streamers and to stop, a few steps late; what was computed past the end
  is dropped.
- ``WAYS`` says how the steps are run on a type of device; on a CPU they are merely called.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMode,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

ROOM = 64  # lengths of caches are multiples of it: attention kernels want aligned masks

# Processors that read the scores alone, and nothing back: they are recorded with the step. Others run between steps.
RECORDED = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


def decode(
    model,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer=None,
    tokenizer=None,
    assistant_model=None,
    **model_kwargs: Any,
) -> Tensor:
    """A ``custom_generate`` of Transformers' ``generate`` that does not wait for the host: on a CUDA GPU each step is
    one CUDA graph, launched before the token of the step before has been read.

    It takes what ``generate`` takes for greedy decoding and for sampling, and gives the same token ids, of quantized
    models and of others; ``docs/decoding.md`` has its limits. The arguments are those that ``generate`` passes.

    Args:
        model: a decoder of Transformers, on one device.
        input_ids: the prompt, int64 ``[batch, tokens]``, padded on the left.
        logits_processor: what ``generate`` made of temperature, penalties and the like, and of those given to it.
        stopping_criteria: likewise.
        generation_config: likewise.
        synced_gpus: refused.
        streamer: gets the tokens, a few steps late.
        tokenizer: of stop strings, which are among the stopping criteria by now.
        assistant_model: refused.
        model_kwargs: the model's other inputs.

    Returns:
        Token ids, int64 ``[batch, length]``: the prompt, the new tokens, and padding after the end of a sequence.

    Raises:
        ValueError: for what it cannot do, such as beams, before anything runs; and for probabilities that are NaN.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> size = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(LlamaConfig(**size, vocab_size=64)).eval()
        >>> ids = torch.tensor([[1, 5, 9]])
        >>> model.generate(ids, max_new_tokens=4, eos_token_id=None, custom_generate=decode).shape
        torch.Size([1, 7])
    """
    _refuse(model, input_ids, generation_config, synced_gpus, assistant_model, model_kwargs)
    way = WAYS.get(model.device.type, Way())
    last = stopping_criteria.max_length
    with torch.cuda.device_of(input_ids):
        model_kwargs["past_key_values"] = DynamicCache(config=model.config.get_text_config(decoder=True))
        outputs = model._prefill(input_ids, generation_config, model_kwargs)
        choice = _Choice(input_ids, last, logits_processor, stopping_criteria, generation_config)
        reports = _Reports(way.ahead, input_ids.shape[0], streamer)
        length = input_ids.shape[1] + 1
        choice(outputs.logits[:, -1], length)
        reports.add(choice.report)
        if length < last and not reports.ended:
            step = _Step(model, outputs, model_kwargs, choice, last - length, way, generation_config.disable_compile)
            del outputs
            with model._optimize_model_for_decode():
                while length < last and not reports.ended:
                    length += 1
                    step(length)
                    reports.add(choice.report)
        new = reports.finish()
        if streamer is not None:
            streamer.end()
        return choice.ids[:, : input_ids.shape[1] + new].clone()


# --- what it cannot do ----------------------------------------------------------------------------


def _refuse(model, input_ids: Tensor, config: GenerationConfig, synced_gpus, assistant_model, model_kwargs) -> None:
    """Raises a ValueError that names the first thing the loop cannot do."""
    mode = config.get_generation_mode(assistant_model)
    cache = model_kwargs.get("past_key_values")
    attention = model.config.get_text_config(decoder=True)._attn_implementation
    devices = set(map(str, (getattr(model, "hf_device_map", None) or {}).values()))
    for wrong, found, expected in (
        (
            mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE),
            f"generation mode {mode.value}",
            "greedy decoding or sampling: no beams, assistants or constraints",
        ),
        (model.config.is_encoder_decoder, f"{type(model).__name__}, an encoder-decoder", "a decoder"),
        (config.return_dict_in_generate, "return_dict_in_generate=True", "False: token ids are all that it gives"),
        (config.use_cache is False, "use_cache=False", "True"),
        (
            config.cache_implementation not in (None, "dynamic", "static", "hybrid"),
            f"cache_implementation={config.cache_implementation!r}",
            "none: its cache is static, in the model's dtype, on the model's device",
        ),
        (getattr(cache, "_is_user_defined", False), "past_key_values", "none: it makes its own cache and keeps it"),
        (
            config.compile_config is not None,
            "a compile_config",
            "none: how a step is compiled is fixed; disable_compile=True leaves that out",
        ),
        (synced_gpus, "synced_gpus=True", "a model that is not sharded"),
        ((getattr(model, "_tp_size", None) or 1) > 1, "tensor parallelism", "a model that is not sharded"),
        (len(devices) > 1, f"a model on {', '.join(sorted(devices))}", "one device"),
        (
            input_ids.device != model.device,
            f"input_ids on {input_ids.device}",
            f"them on {model.device}, where the model is",
        ),
        (attention not in ("sdpa", "eager"), f"attn_implementation={attention!r}", '"sdpa" or "eager"'),
        (
            cache is None,
            f"{type(model).__name__}, which has no past_key_values",
            "a model with a cache of keys and values",
        ),
    ):
        if wrong:
            raise ValueError(f"hf_kbit.decode: found {found}, expected {expected}")
    for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers:
        if type(layer) not in GROWING:
            raise ValueError(
                f"hf_kbit.decode: found {type(model).__name__}, whose cache has a {type(layer).__name__}, expected "
                f"layers of attention alone, whose keys and values can be kept in place"
            )


# --- the cache ------------------------------------------------------------------------------------

GROWING = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    if hasattr(cache_utils, name)
)


class _Places(CacheLayerMixin):
    """A layer's keys and values, ``[batch, heads, length, size]``, of which those before ``position`` are known.

    One that sees a window has all of them too: the mask, which the model makes of the length, leaves out the others.
    """

    is_compileable, is_sliding, is_initialized = True, False, True

    def __init__(self, keys: Tensor, values: Tensor, seen: int, length: int, position: Tensor):
        self.position = position  # int64, a scalar that all layers share
        self.keys, self.values = (_widened(tensor, seen, length) for tensor in (keys, values))

    def lazy_initialization(self, key_states, value_states) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.position[None], key_states)
        self.values.index_copy_(2, self.position[None], value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Tensor:
        return self.position

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def _widened(states: Tensor, seen: int, length: int) -> Tensor:
    """A window's last states go where they would be among all."""
    places = states.new_zeros(*states.shape[:2], length, states.shape[3])
    places[:, :, seen - states.shape[2] : seen] = states
    return places


def _with_room(cache: Cache, steps: int, position: Tensor) -> Cache:
    """The keys and values of ``cache``, which is emptied, and room for ``steps`` more; ``position`` says where."""
    seen = int(position)
    length = -(-(seen + steps) // ROOM) * ROOM
    layers = []
    for layer in cache.layers:
        if layer.keys is not None:
            places = _Places(layer.keys, layer.values, seen, length, position)
            layer.keys = layer.values = None  # one layer after another, for the memory
            layer = places
        layers.append(layer)
    return Cache(layers=layers)


# --- a token ---------------------------------------------------------------------------------------


class _Choice:
    """Makes tokens of logits as ``generate`` does, in tensors that stay where they are.

    Attributes:
        ids: int64 ``[batch, length]``, the tokens so far, then anything.
        token: int64 ``[batch, 1]``, the last of each.
        report: int64 ``[batch + 2]``: the last tokens, whether any sequence goes on, whether all was well.
        recorded: whether it can be recorded: it reads no tokens but the last, and nothing back.
    """

    def __init__(self, input_ids, length, processors, criteria, config: GenerationConfig):
        batch, device = input_ids.shape[0], input_ids.device
        self.processors, self.sample = processors, config.do_sample
        self.criteria = StoppingCriteriaList(
            each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        ends = [each.eos_token_id for each in criteria if type(each) is EosTokenCriteria]
        self.eos = torch.cat([torch.empty(0, dtype=torch.int64), *ends]).to(device)
        self.pad = config._pad_token_tensor if any(hasattr(each, "eos_token_id") for each in criteria) else None
        self.recorded = not self.criteria and all(type(each) in RECORDED for each in processors)
        self.ids = input_ids.new_zeros(batch, length)
        self.ids[:, : input_ids.shape[1]] = input_ids
        self.place = torch.tensor([input_ids.shape[1]], device=device)
        self.token = input_ids.new_zeros(batch, 1)
        self.goes_on = torch.ones(batch, dtype=torch.bool, device=device)
        self.well = torch.ones((), dtype=torch.bool, device=device)
        self.report = input_ids.new_zeros(batch + 2)

    def __call__(self, logits: Tensor, length: int) -> None:
        """``length``: of the sequences with the tokens to choose; counts only where this is not recorded."""
        scores = self.processors(self.ids[:, : length - 1], logits.to(torch.float32, copy=True))
        if self.sample:
            probabilities = scores.softmax(-1)
            # As torch.multinomial draws, which reads back whether they are probabilities.
            best, token = (probabilities / torch.empty_like(probabilities).exponential_()).max(-1)
            self.well &= (best > 0).all()
        else:
            token = scores.argmax(-1)
        if self.pad is not None:
            token = torch.where(self.goes_on, token, self.pad)
        self.token.copy_(token[:, None])
        self.ids.index_copy_(1, self.place, self.token)
        self.place += 1
        self.goes_on &= (self.token != self.eos).all(-1)
        if self.criteria:
            self.goes_on &= ~self.criteria(self.ids[:, :length], None)
        self.report.copy_(torch.cat([token, self.goes_on.any()[None], self.well[None]]))


class _Reports:
    """Tokens on the host, ``ahead`` steps after they were launched: it waits for none but the oldest."""

    def __init__(self, ahead: int, batch: int, streamer):
        self.ahead, self.batch, self.streamer = ahead, batch, streamer
        self.pending, self.read, self.ended = deque(), 0, False

    def add(self, report: Tensor) -> None:
        """Takes what was launched last, and looks at what was launched ``ahead`` steps before."""
        copy = report.to("cpu", non_blocking=report.is_cuda, copy=True)
        self.pending.append((copy, torch.cuda.current_stream().record_event() if report.is_cuda else None))
        if len(self.pending) > self.ahead:
            self._look()

    def finish(self) -> int:
        """How many tokens there are to each sequence."""
        while self.pending and not self.ended:
            self._look()
        return self.read

    def _look(self) -> None:
        report, event = self.pending.popleft()
        if event is not None:
            event.synchronize()
        if not report[-1]:
            raise ValueError("hf_kbit.decode: found probabilities that are NaN or all 0, expected finite logits")
        if self.streamer is not None:
            self.streamer.put(report[: self.batch])
        self.read += 1
        self.ended = not report[-2]


# --- a step ----------------------------------------------------------------------------------------


class _Step:
    """Logits of the last tokens, and the next ones made of them. The first call compiles, the second one records."""

    def __init__(self, model, outputs, model_kwargs, choice: _Choice, steps: int, way: "Way", plain: bool):
        self.model, self.choice, self.way = model, choice, way
        self.position = torch.tensor(int(model_kwargs["past_key_values"].get_seq_length()), device=model.device)
        model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
        cache = _with_room(model_kwargs.pop("past_key_values"), steps, self.position)
        self.inputs = _inputs(model, choice, cache, model_kwargs)
        self.forward = _logits
        quantizer = getattr(model, "hf_quantizer", None)
        if way.compile is not None and not plain and (quantizer is None or quantizer.is_compileable):
            self.forward = way.compile()
            _any_length(self.inputs)
        self.run = self._forward
        self.calls = 0

    def __call__(self, length: int) -> None:
        self.calls += 1
        if self.calls == 2 and self.way.record is not None:
            self._record()
        logits = self.run()
        if not self.choice.recorded:
            self.choice(logits, length)

    def _record(self) -> None:
        try:
            self.run = self.way.record(self._forward)
        except RuntimeError as error:
            raise ValueError(
                f"hf_kbit.decode: found that {type(self.model).__name__} cannot be recorded in a CUDA graph, expected "
                f"a forward that reads nothing back from the GPU: {error}"
            ) from error

    def _forward(self) -> Tensor:
        logits = self.forward(self.model, self.inputs)
        self.position += 1
        if "position_ids" in self.inputs:
            self.inputs["position_ids"] += 1
        if self.choice.recorded:
            self.choice(logits, 1)
        return logits


def _inputs(model, choice: _Choice, cache: Cache, model_kwargs: dict) -> dict[str, Any]:
    """Of a step's forward: those that ``generate`` would pass, but with tensors that can be changed in place, and a
    mask of padding as long as the cache, of which the model makes the mask of each position."""
    inputs = model.prepare_inputs_for_generation(
        choice.token, next_sequence_length=1, past_key_values=cache, **model_kwargs
    )
    unknown = [name for name, value in inputs.items() if isinstance(value, Tensor) and name not in KNOWN]
    if unknown:
        raise ValueError(
            f"hf_kbit.decode: found that a step of {type(model).__name__} takes {', '.join(unknown)}, expected no "
            f"tensors but {', '.join(KNOWN)}"
        )
    if "attention_mask" in inputs:
        # Also without padding: some models look for padding themselves where they are given none.
        inputs["attention_mask"] = choice.token.new_ones(len(choice.token), cache.get_max_length())
        if (mask := model_kwargs.get("attention_mask")) is not None:
            inputs["attention_mask"][:, : mask.shape[1]] = mask
    if "position_ids" in inputs:
        inputs["position_ids"] = inputs["position_ids"].clone()
    return inputs | {"input_ids": choice.token, "past_key_values": cache}


# What a step may take; the last ones stay what they are at the end of the prompt.
KNOWN = ("input_ids", "position_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def _logits(model, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs, return_dict=True).logits[:, -1]


def _any_length(inputs: dict[str, Any]) -> None:
    """Has torch.compile make one code for caches of all lengths."""
    from torch._dynamo import maybe_mark_dynamic

    for layer in inputs["past_key_values"].layers:
        if layer.keys is not None:
            maybe_mark_dynamic(layer.keys, 2)
            maybe_mark_dynamic(layer.values, 2)
    if "attention_mask" in inputs:
        maybe_mark_dynamic(inputs["attention_mask"], 1)


# --- how steps are run ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How steps are run on a type of device.

    Attributes:
        compile: returns ``_logits``, compiled; None leaves that out.
        record: makes of a function without arguments one that repeats what it launched, by the same tensors.
        ahead: how many steps are launched before the first of them is looked at.
    """

    compile: Callable[[], Callable] | None = None
    record: Callable[[Callable], Callable] | None = None
    ahead: int = 0


def _inductor() -> Callable:
    # A batch of its own size each time: products of a known number of tokens are the faster ones.
    return torch.compile(_logits, dynamic=False)


def _cuda_graph(function: Callable) -> Callable:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


WAYS = {"cuda": Way(_inductor, _cuda_graph, ahead=2)}  # on others steps are called as they are


# --- what generate keeps from it ---------------------------------------------------------------------


def pass_all_on(extract: Callable) -> Callable:
    """Wraps ``GenerationMixin._extract_generation_mode_kwargs``, which keeps streamers, tokenizers and assistants from
    callables."""

    @wraps(extract)
    def passing(self, custom_generate, *args, **kwargs):
        return extract(self, None if custom_generate is decode else custom_generate, *args, **kwargs)

    return passing
