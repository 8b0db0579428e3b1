"""Generating text with a model, and how fast it is: what ``chat`` and ``bench`` share."""

import statistics
import time
from argparse import Namespace
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import hf_kbit
from hf_kbit.cli.options import source
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


@dataclass(frozen=True)
class Speed:
    """What a model takes and does: its weights in bytes; tokens a second, of a prompt and new ones; on a GPU also the
    most bytes that torch held there meanwhile."""

    weights: int
    prefill: float
    decode: float
    peak: int | None


def load(given: Namespace, device: str) -> PreTrainedModel:
    """The causal language model that the command was given, ready to generate."""
    options = {"device_map": device, "dtype": given.dtype}
    return AutoModelForCausalLM.from_pretrained(given.model, **options, **source(given)).eval()


def generate(model: PreTrainedModel, **options) -> torch.Tensor:
    """``model.generate``, on a GPU by ``hf_kbit.fast_generate``, or by Transformers' own loop where that refuses."""
    if model.device.type == "cuda":
        try:
            return model.generate(**options, custom_generate=hf_kbit.fast_generate)
        except Unsupported:
            pass
    return model.generate(**options)


def measure(model: PreTrainedModel, prompt_tokens: int, new_tokens: int, repeats: int) -> Speed:
    """Medians of ``repeats`` answers to a prompt of random tokens, after one that does not count."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, prompt_tokens), generator=generator)
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(model.device)
    clocks = []
    for _ in range(repeats + 1):
        clocks.append(Clock())
        inputs = {"input_ids": ids.to(model.device), "attention_mask": torch.ones_like(ids).to(model.device)}
        length = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
        generate(model, **inputs, **length, do_sample=False, streamer=clocks[-1], pad_token_id=0)
    return Speed(
        model.get_memory_footprint(),
        prompt_tokens / statistics.median(clock.times[0] for clock in clocks[1:]),
        statistics.median(clock.tokens_per_second for clock in clocks[1:]),
        torch.cuda.max_memory_allocated(model.device) if on_gpu else None,
    )
