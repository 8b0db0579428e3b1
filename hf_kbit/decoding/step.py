"""A step of decoding, and how steps are run on a type of device: compiled, recorded, ahead of what is looked at."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from hf_kbit.decoding.attention import of_one_token
from hf_kbit.decoding.cache import CACHE, with_room
from hf_kbit.decoding.choice import Choice
from hf_kbit.decoding.refusals import Refusal

# Tensors that a step may take. Types of tokens stay what the last one of the prompt has.
INPUTS = ("input_ids", "position_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Way:
    """How steps are run on a type of device.

    Attributes:
        compile: returns ``logits_of``, compiled; None leaves that out.
        attend: of a model, makes a context in which its attention is of one token; steps are run inside.
        record: of a function without arguments, makes one that repeats what that launched, on the same tensors.
        ahead: how many steps are launched before the first of them is looked at.
    """

    compile: Callable[[], Callable] | None = None
    attend: Callable[[Any], AbstractContextManager] = nullcontext
    record: Callable[[Callable], Callable] | None = None
    ahead: int = 0


class Step:
    """Takes the last tokens to the next ones. Its first call compiles, the second one records, others repeat that."""

    def __init__(self, model, choice: Choice, tokens: int, way: Way, compiled: bool, model_kwargs: dict):
        """``tokens``: how many are to come. ``model_kwargs``: as they are after the prompt; its cache is emptied."""
        self.model, self.choice, self.way, self.calls = model, choice, way, 0
        past = model_kwargs.pop(CACHE)
        self.position = choice.token.new_tensor(past.get_seq_length())
        self.inputs = _inputs(model, choice, with_room(past, tokens, self.position), model_kwargs)
        choice.counters.append(self.position)
        if "position_ids" in self.inputs:
            choice.counters.append(self.inputs["position_ids"])
        self.forward = logits_of
        if way.compile is not None and compiled and _can_be_compiled(model):
            self.forward = way.compile()
            _any_length(self.inputs)
        self.replay: Callable[[], Tensor] | None = None

    def __call__(self, length: int) -> None:
        """``length``: of the sequences with the tokens of this step."""
        self.calls += 1
        if self.calls == 2 and self.way.record is not None:
            self._record()
        logits = self.replay() if self.replay else self._run()
        if not self.choice.recorded:
            self.choice(logits, length)

    def _run(self) -> Tensor:
        with self.way.attend(self.model):
            logits = self.forward(self.model, self.inputs)
        if self.choice.recorded:
            self.choice(logits, length=1)
        return logits

    def _record(self) -> None:
        try:
            self.replay = self.way.record(self._run)
        except RuntimeError as error:
            raise Refusal(
                f"hf_kbit.decode: found that {type(self.model).__name__} cannot be recorded in a CUDA graph, expected "
                f"a forward that reads nothing back from the GPU: {error}"
            ) from error


def logits_of(model, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs, return_dict=True).logits[:, -1]


def _can_be_compiled(model) -> bool:
    quantizer = getattr(model, "hf_quantizer", None)
    return quantizer is None or quantizer.is_compileable


def _inputs(model, choice: Choice, cache: Cache, model_kwargs: dict) -> dict[str, Any]:
    """What ``generate`` would pass to the model, but in tensors that change in place, and with a mask of padding as
    long as the cache, of which the model makes that of each position."""
    padding = model_kwargs.pop("attention_mask", None)
    inputs = model.prepare_inputs_for_generation(
        choice.token, next_sequence_length=1, **{CACHE: cache}, **model_kwargs
    )
    unknown = [name for name, value in inputs.items() if isinstance(value, Tensor) and name not in INPUTS]
    if unknown:
        raise Refusal(
            f"hf_kbit.decode: found that a step of {type(model).__name__} takes {', '.join(unknown)}, expected no "
            f"tensors but {', '.join(INPUTS)}"
        )
    if "attention_mask" in inspect.signature(model.forward).parameters:
        # Also where nothing is padded: some models, given no mask, look for padding themselves.
        inputs["attention_mask"] = choice.token.new_ones(len(choice.token), cache.get_max_length())
        if padding is not None:
            inputs["attention_mask"][:, : padding.shape[1]] = padding
    return inputs | {"input_ids": choice.token, CACHE: cache}


def _any_length(inputs: dict[str, Any]) -> None:
    """Has torch.compile make one code for caches of all lengths."""
    from torch._dynamo import maybe_mark_dynamic

    for layer in inputs[CACHE].layers:
        if layer.keys is not None:
            maybe_mark_dynamic(layer.keys, 2)
            maybe_mark_dynamic(layer.values, 2)
    if "attention_mask" in inputs:
        maybe_mark_dynamic(inputs["attention_mask"], 1)


@cache
def _inductor() -> Callable:
    # Each size of a batch for itself: products of a number of tokens that is known are the faster ones.
    return torch.compile(logits_of, dynamic=False)


_recording = Lock()  # all threads record on one stream


def _cuda_graph(function: Callable) -> Callable:
    graph = torch.cuda.CUDAGraph()
    with _recording, torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = function()

    def replay():
        graph.replay()
        return result

    return replay


# By type of device; on others steps are merely called.
WAYS = {"cuda": Way(_inductor, of_one_token, _cuda_graph, ahead=2)}
