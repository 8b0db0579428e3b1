"""From logits to tokens, as ``generate`` does it, in tensors that stay where they are.

On a GPU each operation is a kernel of a microsecond or two, of which a step has few others that are so small: so there
is none for what cannot change, and tokens are written where they are looked at.
"""

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

# Processors that read scores alone, and nothing back, can be part of a recorded step. Others are called between steps.
RECORDED = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class Choice:
    """Processors, sampling, padding and stopping.

    Attributes:
        token: int64 ``[batch, 1]``, the last of each sequence.
        reports: int64 ``[length, 3, batch]``, for each place of the sequences that has come to be: the tokens there,
            whether each goes on, whether all was well with it.
        recorded: whether it can be recorded: it reads no tokens but the last ones, and nothing back.
        counters: int64 tensors, to each of which a call adds one: its own, and what is added to the list.
    """

    def __init__(
        self,
        input_ids: Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ):
        (batch, prompt), device = input_ids.shape, input_ids.device
        self.processors, self.sample = processors, config.do_sample
        self.criteria = StoppingCriteriaList(
            each for each in criteria if type(each) not in (MaxLengthCriteria, EosTokenCriteria)
        )
        ends = [each.eos_token_id.to(device) for each in criteria if type(each) is EosTokenCriteria]
        self.ends = torch.cat([input_ids.new_empty(0), *ends])
        self.pad = config._pad_token_tensor if any(hasattr(each, "eos_token_id") for each in criteria) else None
        self.recorded = not self.criteria and all(type(each) in RECORDED for each in processors)
        self.may_end = len(self.ends) > 0 or len(self.criteria) > 0
        self.prompt = prompt
        self.ids = input_ids.new_zeros(batch, criteria.max_length)  # tokens that the host has to see, then zeros
        self.ids[:, :prompt] = input_ids
        self.place = input_ids.new_full((1,), prompt)
        self.counters = [self.place]
        self.goes_on = torch.ones(batch, dtype=torch.bool, device=device)
        self.reports = input_ids.new_zeros(criteria.max_length, 3, batch)
        self.report = input_ids.new_ones(1, 3, batch)
        self.token = self.report[0, 0, :, None]

    def __call__(self, logits: Tensor, length: int) -> None:
        """``logits``: ``[batch, vocabulary]``. ``length``: of sequences with these tokens, for what looks at all."""
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
            torch.where(self.goes_on, token, self.pad, out=self.report[0, 0])
        else:
            self.report[0, 0] = token
        if not self.recorded:
            self.ids.index_copy_(1, self.place, self.token)
        if len(self.ends) == 1:
            self.goes_on &= self.report[0, 0] != self.ends
        elif len(self.ends) > 1:
            self.goes_on &= (self.token != self.ends).all(-1)
        if self.criteria:
            self.goes_on &= ~self.criteria(self.ids[:, :length], None)
        if self.may_end:
            self.report[0, 1] = self.goes_on
        self.reports.index_copy_(0, self.place, self.report)
        torch._foreach_add_(self.counters, 1)

    def tokens(self, length: int) -> Tensor:
        """int64 ``[batch, length]``: prompts, and what was chosen for all places up to there."""
        self.ids[:, self.prompt : length] = self.reports[self.prompt : length, 0].T
        return self.ids[:, :length].clone()


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """What ``scores.max(-1)`` returns, of ``[batch, vocabulary]``: first of each row of some numbers, then of rows,
    for a GPU gives each sequence only a processor or two otherwise."""
    row_size = math.gcd(scores.shape[-1], MOST_ROW)
    if row_size < MOST_ROW // 8:
        row_size = MOST_ROW
        scores = torch.nn.functional.pad(scores, (0, -scores.shape[-1] % row_size), value=-torch.inf)
    values, places = scores.unflatten(-1, (-1, row_size)).max(-1)
    best, row = values.max(-1, keepdim=True)
    return best[:, 0], places.gather(-1, row).add_(row, alpha=row_size)[:, 0]
