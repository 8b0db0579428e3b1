"""A decode step: compiled, captured in a CUDA graph, and launched ahead of the host."""

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_kbit.generation.attention import NAME as ONE_TOKEN
from hf_kbit.generation.sampling import Sampler
from hf_kbit.generation.static_cache import CACHE, static_cache
from hf_kbit.generation.unsupported import Unsupported

# Tensors that a step may take. Types of tokens stay what the last one of the prompt has.
INPUTS = ("input_ids", "position_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


class Backend(NamedTuple):
    """How a type of device runs steps."""

    compile: Callable[[], Callable] | None = None  # returns ``logits_of``, compiled
    prepare: Callable[[Any], AbstractContextManager] = nullcontext  # of a model; its forward is called inside
    capture: Callable[[Callable], Callable] | None = None  # makes of a function one that repeats its launches
    ahead: int = 0  # the number of steps launched before the first of them is looked at


class DecodeStep:
    """Takes the last tokens to the next ones. The first call compiles, the second one captures, others replay."""

    def __init__(self, model, sampler: Sampler, new_tokens: int, backend: Backend, compiled: bool, model_kwargs: dict):
        """``new_tokens``: still to come. ``model_kwargs``: those after the prompt; their cache is emptied."""
        self.model, self.sampler, self.backend, self.calls = model, sampler, backend, 0
        past = model_kwargs.pop(CACHE)
        position = sampler.token.new_tensor(past.get_seq_length())
        self.inputs = _inputs(model, sampler.token, static_cache(past, new_tokens, position), model_kwargs)
        sampler.counters += position, *(self.inputs[name] for name in ("position_ids",) if name in self.inputs)
        self.forward, quantizer = logits_of, getattr(model, "hf_quantizer", None)
        if backend.compile is not None and compiled and (quantizer is None or quantizer.is_compileable):
            self.forward = backend.compile()
            _allow_any_length(self.inputs)
        self.replay: Callable[[], Tensor] | None = None

    def __call__(self, length: int) -> None:
        """``length``: of the sequences with the tokens of this step."""
        self.calls += 1
        if self.calls == 2 and self.backend.capture is not None:
            self._capture()
        logits = self.replay() if self.replay else self._run()
        if not self.sampler.capturable:
            self.sampler(logits, length)

    def _run(self) -> Tensor:
        with self.backend.prepare(self.model):
            logits = self.forward(self.model, self.inputs)
        if self.sampler.capturable:
            self.sampler(logits, length=1)
        return logits

    def _capture(self) -> None:
        try:
            self.replay = self.backend.capture(self._run)
        except RuntimeError as error:
            found = f"that {type(self.model).__name__} cannot be recorded in a CUDA graph"
            raise Unsupported.of((found, f"a forward that reads nothing back from the GPU: {error}")) from error


def logits_of(model, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs, return_dict=True).logits[:, -1]


def _inputs(model, token: Tensor, cache: Cache, model_kwargs: dict) -> dict[str, Any]:
    """What ``generate`` would pass to the model, in tensors that change in place, and with a mask of padding as long
    as the cache."""
    padding = model_kwargs.pop("attention_mask", None)
    inputs = model.prepare_inputs_for_generation(token, next_sequence_length=1, **{CACHE: cache}, **model_kwargs)
    unknown = [name for name, value in inputs.items() if isinstance(value, Tensor) and name not in INPUTS]
    if unknown:
        found = f"that a step of {type(model).__name__} takes {', '.join(unknown)}"
        raise Unsupported.of((found, f"no tensors but {', '.join(INPUTS)}"))
    if "attention_mask" in inspect.signature(model.forward).parameters:
        # Also where nothing is padded: some models, given no mask, look for padding themselves.
        inputs["attention_mask"] = token.new_ones(len(token), cache.get_max_length())
        if padding is not None:
            inputs["attention_mask"][:, : padding.shape[1]] = padding
    return inputs | {"input_ids": token, CACHE: cache}


# --- CUDA -----------------------------------------------------------------------------------------


@cache
def _inductor() -> Callable:
    # Each size of a batch for itself: products of a number of tokens that is known are the faster ones.
    return torch.compile(logits_of, dynamic=False)


def _allow_any_length(inputs: dict[str, Any]) -> None:
    """Has torch.compile make one code for caches of all lengths."""
    from torch._dynamo import maybe_mark_dynamic

    for layer in inputs[CACHE].layers:
        if layer.keys is not None:
            maybe_mark_dynamic(layer.keys, 2)
            maybe_mark_dynamic(layer.values, 2)
    if "attention_mask" in inputs:
        maybe_mark_dynamic(inputs["attention_mask"], 1)


_preparing, _capturing = Lock(), Lock()
_inside: Counter = Counter()  # threads, by the id of the model that they run
_undo: dict[int, ExitStack] = {}  # what the first of them changed


@contextmanager
def for_one_token(model) -> Iterator[None]:
    """Inside, the forward of one token is fast and compiles as a whole; the last of several threads undoes that."""
    with _preparing:
        _inside[id(model)] += 1
        if id(model) not in _undo:
            _undo[id(model)] = _prepare(model)
    try:
        yield
    finally:
        with _preparing:
            _inside[id(model)] -= 1
            if not _inside[id(model)]:
                del _inside[id(model)]
                _undo.pop(id(model)).close()


def _prepare(model) -> ExitStack:
    undo, config = ExitStack(), model.config.get_text_config(decoder=True)
    if config._attn_implementation == "sdpa":
        config._attn_implementation_internal = ONE_TOKEN  # the property would change sub-configs too
        undo.callback(setattr, config, "_attn_implementation_internal", "sdpa")
    experts = model.get_experts_implementation()
    if "grouped_mm" in experts.values():  # which generate changes for decoding too
        model.set_experts_implementation(
            {part: "batched_mm" if how == "grouped_mm" else how for part, how in experts.items()}
        )
        undo.callback(model.set_experts_implementation, experts)
    for module in model.modules():
        if hooks := module._backward_hooks:  # plans of tensor parallelism set some, which break graphs
            module._backward_hooks = OrderedDict()
            undo.callback(setattr, module, "_backward_hooks", hooks)
    return undo


def _cuda_graph(function: Callable) -> Callable:
    graph = torch.cuda.CUDAGraph()
    with _capturing, torch.cuda.graph(graph, capture_error_mode="thread_local"):  # all threads on one stream
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


# By type of device; on others steps are merely called.
BACKENDS = {"cuda": Backend(_inductor, for_one_token, _cuda_graph, ahead=2)}
