"""What quantization costs a causal language model: perplexity, and divergence from the model it was made of."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from hf_kbit.calibration.data import (
    check_ids,
    is_tokenized,
    positions,
    text_of,
    tokenize,
    tokenizer_of,
    unpadded,
)
from hf_kbit.calibration.stream import evaluating, is_causal
from hf_kbit.calibration.writing import write

# Logits that are looked at together: 32 MiB in float32, of which up to ten copies are alive at a time.
CHUNK = 1 << 23
Ids = torch.Tensor | Sequence[torch.Tensor]  # int64: of one text, [length]; or of sequences, all or each by itself


@dataclass(frozen=True)
class Evaluation:
    """What ``evaluate`` measured. Without a reference model the last five are None.

    Attributes:
        perplexity: ``exp`` of the mean negative log-likelihood of a predicted token; 1 or more, lower is better.
        tokens: number of predicted tokens, which all means are over.
        window, stride: tokens that a model sees at once, at most, and from the start of a window to that of the next.
        reference_perplexity: that of the reference model.
        kl_divergence: mean of KL(reference || model) over the predicted tokens, in nats; 0 for equal distributions.
        kl_p99, kl_p999: what that of 99% and of 99.9% of the predicted tokens does not exceed. They tell of rare
            tokens that a mean hides.
        top1_agreement: fraction of the predicted tokens for which both models find the same token most probable.
    """

    perplexity: float
    tokens: int
    window: int
    stride: int
    reference_perplexity: float | None = None
    kl_divergence: float | None = None
    kl_p99: float | None = None
    kl_p999: float | None = None
    top1_agreement: float | None = None


def evaluate(
    model: torch.nn.Module,
    data: torch.Tensor | Mapping[str, Any] | str | Path | Iterable[str] | None,
    *,
    reference: torch.nn.Module | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    window: int = 2048,
    stride: int | None = None,
    progress: bool = False,
) -> Evaluation:
    """Perplexity of a causal language model on a text and, with a reference model, its divergence from that one.

    With p(t | before) the probability of token t after those before it in its window of tokens, q that of the
    reference, and means over all predicted tokens,

        perplexity     = exp(-mean log p(t | before))
        kl_divergence  = mean sum_v q(v | before) * (log q(v | before) - log p(v | before))
        top1_agreement = mean [argmax_v q(v | before) = argmax_v p(v | before)]

    Windows are disjoint, as in published tables, unless ``stride`` is smaller: the first token of each is not
    predicted. Overlapping windows predict every token but the first once, each with ``window - stride`` tokens before
    it, or all that there are. The last window may be shorter. GPTQ's script drops it; for its figure cut the ids of
    the text: ``ids[: len(ids) // window * window]``. The first window alone begins with what the tokenizer puts before
    a text, as in GPTQ's script. A model that needs it, such as gemma, has more perplexity in short windows without:
    give ids then, ``[sequences, length]``, each of which begins with it. Logarithms of probabilities are float32,
    their sums float64. Memory holds the logits of one window from each model, in its dtype, and up to half a GiB.

    Args:
        model: a causal language model of Transformers, quantized or not, or one with PEFT adapters.
        data: what ``calibrate`` takes, all of it: None is text that the reference, or without one the model, writes.
            Or int64 ``[length]``, the ids of one text.
        reference: the model to compare with, of the same vocabulary; usually the 16-bit one, on any device.
        tokenizer: for all but token ids. Default: that of the model's folder or name, or of the reference's.
        window: 2 or more, at most the positions that the models have.
        stride: 1 to ``window``; None is ``window``.
        progress: shows a bar on stderr, unless Transformers' bars are disabled.

    Raises:
        TypeError: ``data`` is of another type.
        ValueError: an argument is out of range, a model is no causal language model, the vocabularies differ, or a
            model's logits hold NaN or infinity.

    Source: https://huggingface.co/docs/transformers/perplexity (overlapping windows),
    https://github.com/IST-DASLab/gptq (disjoint ones).

    >>> import hf_kbit
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> reference = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape)).to(torch.bfloat16)
    >>> weights, config = reference.state_dict(), hf_kbit.KbitConfig(bits=4)
    >>> quantized = LlamaForCausalLM.from_pretrained(
    ...     None, config=reference.config, state_dict=weights, quantization_config=config
    ... )
    >>> ids = torch.tensor(list("Any text, as the ids of its tokens.".encode()))
    >>> found = evaluate(quantized, ids, reference=reference, window=16)
    >>> found.tokens, found.kl_divergence > 0, 0 < found.top1_agreement <= 1
    (32, True, True)
    """
    models = {"model": model} if reference is None else {"model": model, "reference": reference}
    stride = window if stride is None else stride
    ids = _ids(data, tokenizer, list(models.values()), progress)
    check({name: each.config for name, each in models.items()}, ids, window, stride)
    return summary(of_tokens(models, ids, window, stride, progress), window, stride)


def of_tokens(models: dict, ids: Ids, window: int, stride: int, progress: bool = False) -> torch.Tensor:
    """float32 ``[1 or 4, predicted tokens]``, of ``model`` and, if there is one, ``reference``: the negative
    log-likelihood by either, KL(reference || model), and 1 where both find the same token most probable, else 0."""
    texts = [ids] if is_text(ids) else ids
    pieces = [(text, *place) for text in texts for place in _windows(len(text), window, stride)]
    found = []
    with ExitStack() as stack, torch.no_grad():
        for each in models.values():
            stack.enter_context(evaluating(each))
        for text, begin, end, first in tqdm(pieces, desc="evaluating", unit="window", disable=not progress):
            seen = text[begin:end]
            rows = slice(first - begin - 1, -1)  # the logits after a token are those of the next one
            # Without a name for the logits, which would keep them while those of the next window are made.
            found += _of_window(
                {name: logits_of(each, seen)[rows] for name, each in models.items()}, text[first:end], first
            )
    return torch.cat(found, dim=1)


def summary(found: torch.Tensor, window: int, stride: int) -> Evaluation:
    """Of what ``of_tokens`` found; means are float64."""
    predicted, means = found.shape[1], found.double().mean(1).tolist()
    if len(found) == 1:
        return Evaluation(_exp(means[0]), predicted, window, stride)
    nll, reference_nll, divergence, agreed = means
    tails = (found[2].kthvalue(math.ceil(part * predicted / 1000)).values.item() for part in (990, 999))
    return Evaluation(_exp(nll), predicted, window, stride, _exp(reference_nll), divergence, *tails, agreed)


def _ids(data, tokenizer: PreTrainedTokenizerBase | None, models: list, progress: bool) -> Ids:
    if isinstance(data, torch.Tensor):
        return data
    if is_tokenized(data):
        return unpadded(data)
    found = (tokenizer or tokenizer_of(each.name_or_path) for each in models)
    tokenizer = next((each for each in found if each is not None), None)
    if data is None and (written := write(models[-1], tokenizer=tokenizer, progress=progress)) is not None:
        return written
    if tokenizer is None:
        raise ValueError("tokenizer: found none, expected one, for the data is a text")
    return tokenize(text_of(data), tokenizer)[0]


def is_text(ids: Ids) -> bool:
    """Whether it is one text, rather than sequences."""
    return isinstance(ids, torch.Tensor) and ids.dim() == 1


def check(configs: dict[str, PreTrainedConfig], ids: Ids, window: int, stride: int) -> None:
    """Raises what ``evaluate`` would, as far as configs tell; errors call the models by the keys of ``configs``."""
    rows = [ids] if is_text(ids) else ids
    if (isinstance(ids, torch.Tensor) and ids.dim() not in (1, 2)) or max(map(len, rows), default=0) < 2:
        found = f"shape {list(ids.shape)}" if isinstance(ids, torch.Tensor) else "no sequence of 2 tokens"
        raise ValueError(f"data: found {found}, expected [length] or [sequences, length] of 2 or more")
    if window < 2:
        raise ValueError(f"window: found {window}, expected 2 or more")
    if not 1 <= stride <= window:
        raise ValueError(f"stride: found {stride}, expected 1 to {window}, the window")
    for name, config in configs.items():
        kind, seen = config.model_type, min(window, max(map(len, rows)))
        if config.is_encoder_decoder:
            raise ValueError(
                f"{name}: found {kind}, which has an encoder and a decoder, expected a causal language model"
            )
        if not is_causal(config):
            raise ValueError(
                f"{name}: found {kind}, an encoder, expected a causal language model: an encoder reads the tokens "
                "after a token too, so that its perplexity is not defined"
            )
        most = positions(config.get_text_config()) or seen
        if seen > most:
            raise ValueError(f"window: found {seen} tokens, expected at most {most}, the positions of {name}")
    check_ids(torch.cat([*rows]), configs)


def _windows(length: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """For each window: where it begins and ends, and the first token that it predicts.

    >>> list(_windows(10, 4, 4)), list(_windows(9, 4, 2))
    ([(0, 4, 1), (4, 8, 5), (8, 10, 9)], [(0, 4, 1), (2, 6, 4), (4, 8, 6), (6, 9, 8)])
    """
    end = 0
    for begin in range(0, length, stride):
        first, end = max(end, begin + 1), min(begin + window, length)
        if first < end:
            yield begin, end, first
        if end == length:
            return


def logits_of(model, ids: torch.Tensor) -> torch.Tensor:
    """``[length, vocabulary]`` on the model's device, in its dtype."""
    output = model(input_ids=ids[None].to(model.device), use_cache=False)
    if getattr(output, "logits", None) is None:
        raise ValueError(f"{type(model).__name__}: found an output without logits, expected a causal language model")
    return output.logits[0]


def _of_window(logits: dict[str, torch.Tensor], targets: torch.Tensor, first: int) -> Iterator[torch.Tensor]:
    """A part after the other of what ``of_tokens`` returns, by the logits ``[predictions, vocabulary]``. ``first`` is
    where in the text the first of the targets, the tokens that were to be predicted, stands."""
    vocabulary, device = logits["model"].shape[-1], logits["model"].device
    if (found := logits.get("reference", logits["model"]).shape[-1]) != vocabulary:
        raise ValueError(f"reference: found a vocabulary of {found} tokens, expected {vocabulary}, as the model has")
    rows = max(1, CHUNK // vocabulary)
    for start in range(0, len(targets), rows):
        target, logs = targets[start : start + rows, None].to(device), []
        for name, each in logits.items():
            values = each[start : start + rows].to(device, torch.float32)
            finite = values.isfinite().all(-1)
            if not finite.all():
                token = first + start + int(finite.logical_not().nonzero()[0])
                raise ValueError(
                    f"{name}: found NaN or infinite logits where it predicts token {token}, expected finite ones"
                )
            logs.append(values.log_softmax(-1))
        figures = [-each.gather(-1, target)[:, 0] for each in logs]
        if len(logs) == 2:
            p, q = logs
            figures += [
                (q.exp() * (q - p)).sum(-1, dtype=torch.float64).float(),
                (q.argmax(-1) == p.argmax(-1)).float(),
            ]
        yield torch.stack(figures).cpu()


def _exp(mean: float) -> float:
    """``exp``, infinite where a float64 cannot hold it: a broken model may have a mean of thousands of nats."""
    return math.exp(mean) if mean < 709 else math.inf
