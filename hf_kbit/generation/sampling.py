"""From logits to tokens, as ``generate`` does it, by few and capturable operations on tensors at fixed addresses."""

import math

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

MOST_ROW = 512  # numbers of a vocabulary that are compared with each other first

# Processors of scores alone, which read nothing back: part of a captured step. Others are called between steps.
CAPTURABLE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class Sampler:
    """Processors, sampling, padding and stopping.

    Attributes:
        token: int64 ``[batch, 1]``, the last of each sequence.
        reports: int64 ``[length, 3, batch]``, for each place of the sequences: its tokens, whether each sequence is
            unfinished, whether its probabilities were finite.
        capturable: whether a CUDA graph can have it.
        counters: int64 tensors that each call adds one to; others may be appended.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ):
        batch, self.prompt = input_ids.shape
        self.processors, self.sample = processors, config.do_sample
        self.criteria = StoppingCriteriaList(
            each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        ends = [each.eos_token_id.to(input_ids.device) for each in criteria if type(each) is EosTokenCriteria]
        self.ends = torch.cat([input_ids.new_empty(0), *ends])
        self.pad = None if config.pad_token_id is None else input_ids.new_tensor(config.pad_token_id)
        if self.pad is None and len(self.ends):
            self.pad = self.ends[0]
        if not any(hasattr(each, "eos_token_id") for each in criteria):
            self.pad = None  # as in generate
        self.capturable = not self.criteria and all(type(each) in CAPTURABLE for each in processors)
        self.may_end = len(self.ends) > 0 or len(self.criteria) > 0
        self.ids = input_ids.new_zeros(batch, criteria.max_length)  # what processors and criteria see
        self.ids[:, : self.prompt] = input_ids
        self.place = input_ids.new_full((1,), self.prompt)
        self.counters = [self.place]
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=input_ids.device)
        self.reports = input_ids.new_zeros(criteria.max_length, 3, batch)
        self.report = input_ids.new_ones(1, 3, batch)
        self.token = self.report[0, 0, :, None]

    def __call__(self, logits: Tensor, length: int) -> None:
        """``logits``: ``[batch, vocabulary]``. ``length``: of the sequences with the new tokens, if not captured."""
        if self.processors or self.sample:
            logits = self.processors(self.ids[:, : length - 1], logits.to(torch.float32, copy=True))
        if self.sample:
            probabilities = logits.softmax(-1)
            # The draw of torch.multinomial, which would also read back whether they are probabilities.
            best, token = largest(probabilities / torch.empty_like(probabilities).exponential_())
            self.report[0, 2].mul_(best > 0)
        else:
            token = largest(logits)[1]
        if self.may_end and self.pad is not None:
            torch.where(self.unfinished, token, self.pad, out=self.report[0, 0])
        else:
            self.report[0, 0] = token
        if not self.capturable:
            self.ids.index_copy_(1, self.place, self.token)
        if len(self.ends) == 1:
            self.unfinished &= self.report[0, 0] != self.ends
        elif len(self.ends) > 1:
            self.unfinished &= (self.token != self.ends).all(-1)
        if self.criteria:
            self.unfinished &= ~self.criteria(self.ids[:, :length], None)
        if self.may_end:
            self.report[0, 1] = self.unfinished
        self.reports.index_copy_(0, self.place, self.report)
        torch._foreach_add_(self.counters, 1)

    def sequences(self, length: int) -> Tensor:
        """int64 ``[batch, length]``: prompts and new tokens."""
        self.ids[:, self.prompt : length] = self.reports[self.prompt : length, 0].T
        return self.ids[:, :length].clone()


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """``scores.max(-1)`` of ``[batch, vocabulary]`` in two steps, of parts of a row and of their largest ones: in one
    step a GPU gives each sequence only a processor or two."""
    row_size = math.gcd(scores.shape[-1], MOST_ROW)
    if row_size < MOST_ROW // 8:
        row_size = MOST_ROW
        scores = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % row_size), value=-torch.inf)
    values, places = scores.unflatten(-1, (-1, row_size)).max(-1)
    best, row = values.max(-1, keepdim=True)
    return best[:, 0], places.gather(-1, row).add_(row, alpha=row_size)[:, 0]
