"""Generating text with a model, and the time that its tokens take: what ``chat`` and ``bench`` share."""

import time
from argparse import Namespace

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_kbit
from hf_kbit.cli import options
from hf_kbit.generation.unsupported import Unsupported


class Clock(BaseStreamer):
    """Takes the time of each token that ``generate`` hands on; ``to`` is a streamer that gets the tokens too."""

    def __init__(self, to: BaseStreamer | None = None):
        self.to, self.times = to, []
        self._prompt_seen = False
        self._start = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen and value.dim() > 1:
            return  # the prompt once more, by the second way that ``generate`` tries
        if self._prompt_seen:
            self.times.append(time.perf_counter() - self._start)
        self._prompt_seen = True
        if self.to is not None:
            self.to.put(value)

    def end(self) -> None:
        if self.to is not None:
            self.to.end()

    @property
    def tokens_per_second(self) -> float | None:
        """Of decoding: from the first new token to the last; None if there was only one."""
        return (len(self.times) - 1) / (self.times[-1] - self.times[0]) if len(self.times) > 1 else None


def load(given: Namespace, device: str) -> PreTrainedModel:
    """The causal language model that the command was given, ready to generate."""
    how = {"device_map": device, "dtype": given.dtype}
    model = AutoModelForCausalLM.from_pretrained(given.model, **how, **options.source(given)).eval()
    options.set_inputs(model, given)
    return model


def generate(model: PreTrainedModel, **options) -> torch.Tensor:
    """``model.generate``, on a GPU by ``hf_kbit.fast_generate``, or by Transformers' own loop where that refuses."""
    if model.device.type == "cuda":
        try:
            return model.generate(**options, custom_generate=hf_kbit.fast_generate)
        except Unsupported:
            pass
    return model.generate(**options)
