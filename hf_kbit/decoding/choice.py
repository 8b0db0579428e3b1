"""From logits to tokens, as ``generate`` does it, in tensors that stay where they are."""

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

ROW = 512  # numbers of a vocabulary that are compared with each other first

# Processors that read scores alone, and nothing back, can be part of a recorded step. Others are called between steps.
RECORDED = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class Choice:
    """Processors, sampling, padding and stopping.

    Attributes:
        ids: int64 ``[batch, length]``, the tokens so far, then zeros.
        token: int64 ``[batch, 1]``, the last of each sequence.
        reports: int64 ``[length, batch + 2]``, for each place of ``ids`` that has come to be: the tokens there,
            whether any sequence goes on, whether all was well.
        recorded: whether it can be recorded: it reads no tokens but the last ones, and nothing back.
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
        self.ids = input_ids.new_zeros(batch, criteria.max_length)
        self.ids[:, :prompt] = input_ids
        self.place = input_ids.new_full((1,), prompt)
        self.token = input_ids.new_zeros(batch, 1)
        self.goes_on = torch.ones(batch, dtype=torch.bool, device=device)
        self.well = torch.ones(1, dtype=torch.bool, device=device)
        self.reports = input_ids.new_zeros(criteria.max_length, batch + 2)

    def __call__(self, logits: Tensor, length: int) -> None:
        """``logits``: ``[batch, vocabulary]``. ``length``: of sequences with these tokens, for what looks at all."""
        scores = self.processors(self.ids[:, : length - 1], logits.to(torch.float32, copy=True))
        if self.sample:
            probabilities = scores.softmax(-1)
            # The draw of torch.multinomial, which would also read back whether they are probabilities.
            best, token = largest(probabilities / torch.empty_like(probabilities).exponential_())
            self.well &= (best > 0).all()
        else:
            token = largest(scores)[1]
        if self.pad is not None:
            token = torch.where(self.goes_on, token, self.pad)
        self.token.copy_(token[:, None])
        self.ids.index_copy_(1, self.place, self.token)
        self.goes_on &= (self.token != self.ends).all(-1)
        if self.criteria:
            self.goes_on &= ~self.criteria(self.ids[:, :length], None)
        report = torch.cat([token, self.goes_on.any()[None], self.well])
        self.reports.index_copy_(0, self.place, report[None])
        self.place += 1


def largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """What ``scores.max(-1)`` returns, of ``[batch, vocabulary]``: first of each row of some numbers, then of rows,
    for a GPU gives each sequence only a processor or two otherwise."""
    rows = -(-scores.shape[-1] // ROW)
    padded = torch.nn.functional.pad(scores, (0, rows * ROW - scores.shape[-1]), value=-torch.inf)
    values, places = padded.unflatten(-1, (rows, ROW)).max(-1)
    best, row = values.max(-1)
    return best, row * ROW + places.gather(-1, row[:, None])[:, 0]
