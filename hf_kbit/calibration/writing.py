"""Calibration data that needs no data: text that the model itself writes, as token ids."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging
from transformers.utils.logging import tqdm

from hf_kbit.calibration import stream, tuning
from hf_kbit.calibration.data import Text, amount, check_ids, positions, size_of, spread, text_of, tokenizer_of
from hf_kbit.plan.config import KbitConfig
from hf_kbit.plan.plan import quantize_layers
from hf_kbit.plan.selection import Packable

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
SEED = 0
# Sequences, and tokens of each, unless others are asked for, by the type of the device that computes; "" is any other.
AMOUNTS = {"cpu": (64, 256), "": (128, 640)}
TRELLIS_SEQUENCES = {"cpu": 64, "": 512}  # where layers get a trellis, and nothing else is to be read or tuned
OWN = "text that the model wrote"
SHARE = 1 / 3  # at least, that a text has of the moments, where it is filled up
OPENING = 40  # tokens of a sequence that are not written, but the first of a text of the built-in set
TOGETHER = 1024  # sequences that are written at once, if the device is large enough for what the model keeps of them
WRITER_BITS = 4  # of a model that is larger than the memory
ROOM = 0.4  # of the device's memory beside the weights, so much is for that: caches grow by being copied


@torch.no_grad()
def write(
    model: PreTrainedModel,
    sequences: int | None = None,
    length: int | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    tune: int | bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
    **source: Any,
) -> torch.Tensor | None:
    """int64 ``[sequences, length]`` on the model's device: what it writes, each token drawn with the probability that
    the model gives it; the same each time on the same machine.

    A sequence starts at the beginning-of-text token; where a model has none, at the end-of-text token, after which
    a text starts too, as GPT-2 has it; without either at a random token. It goes on after an end of text: another
    follows. On ``device`` the model is as a whole while it writes, and then where it was; one that is larger than its
    memory is there in 4 bits. Defaults are those of ``data.Text``.

    By itself a model may write one kind of text alone, such as chats, or one language. So it goes on from the first
    words of a text of the built-in set, if there is a ``tokenizer``, by default that of the model's folder or name
    (``source`` is of ``tokenizer_of``). Half of what is to ``tune`` goes on from a random token instead.

    Returns:
        None where the model cannot write: it is no decoder that reads tokens; or, after a warning, it is larger than
        the memory of ``device`` in 4 bits too, or its ``generate`` fails.

    Raises:
        ValueError: a number is less than 1, the tokenizer has tokens that the model lacks, or the model predicts NaN.
        MemoryError, torch.OutOfMemoryError: there is memory enough on ``device``, but too little of it is free.

    Source: the data of LLM-QAT (arXiv:2305.17888), which showed that text sampled from a model stands in for its
    training data.
    """
    if model.config.is_encoder_decoder or not model.can_generate() or not stream.reads_tokens(model):
        return None
    device = stream.resolve(device, model)
    sequences, length = _usual(model, (sequences, length), device, tune)
    opening, random = min(OPENING, length // 4), sequences // 2 if tune else 0
    generator = torch.Generator().manual_seed(SEED)
    groups = [
        torch.cat([_starts(model, random, generator), _random(model, random, generator)[:, :opening]], 1),
        _starts(model, sequences - random, generator),
    ]
    if opening and (tokenizer := tokenizer or tokenizer_of(model.name_or_path, **source)):
        groups[1] = torch.cat([groups[1], _openings(model, tokenizer, len(groups[1]), opening)], 1)
    # Steps take sequences that lie together, and the last are held out: any share is to have some of both.
    order = torch.randperm(sequences, generator=torch.Generator().manual_seed(SEED))
    try:
        writer = model
        if not (together := _together(model, device, length)):
            writer = _in_few_bits(model, device)
            together = _together(writer, device, length)
        if together:
            _check_free(writer, device)
            with stream.evaluating(writer), stream.whole(writer, device):
                text = _written(writer, [starts.to(device) for starts in groups], together, length, progress)
                return text.to(groups[0].device)[order]
        reason = f"its weights take more memory than there is for {device}"
    except FloatingPointError as error:
        raise ValueError(str(error)) from None
    except (MemoryError, torch.OutOfMemoryError):
        raise  # another text would give other bytes, and what is free may be other each time
    except Exception as error:  # whatever the code of a model does
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(
        f"{type(model).__name__} cannot write a text to calibrate on ({reason}): it reads what it is given, or the "
        "built-in text; a text like what the model is for is better, see docs/calibration.md",
        stacklevel=2,
    )
    return None


def chosen(
    model: PreTrainedModel,
    text: Text,
    little: bool,
    asked: tuple[int | None, int | None],
    *,
    trellis: bool = False,
    tune: int | bool = False,
    device: torch.device | str | None = None,
    progress: bool = False,
    **source: Any,
) -> tuple[Text, str, list[float] | None]:
    """What is read, what reports call it, and how much tokens of each sequence count, if not alike: the data, or,
    without any, so much that the model writes, or if a little does, that of the built-in set. A text of which no
    amount is asked for is filled up, where it is short, with what the model writes; then its tokens count the more,
    so that it has its ``SHARE``."""
    how = {"tokenizer": text.tokenizer, "device": device, "progress": progress, **source}
    if text.data is None:
        if little:
            return text.little(), text.name, None
        sequences, length = asked
        if sequences is None and trellis and not tune:
            sequences = stream.usual(TRELLIS_SEQUENCES, stream.resolve(device, model))
        own = write(model, sequences, length, tune=tune, **how)
        return replace(text, data=own), text.name if own is None else OWN, None
    if little or asked[0] is not None or not text.needs_tokenizer:
        return text, text.name, None
    rows, (sequences, length) = text.ids(model, **source), _usual(model, asked, stream.resolve(device, model))
    missing = sequences - -(-sum(map(len, rows)) // length)
    name, own = text.name, write(model, missing, length, **how) if missing > 0 else None
    counts = None
    if own is not None:
        name = f"{name} ({size_of(rows)}) and {OWN} ({size_of(own)})"
        count = max(SHARE / (1 - SHARE) * own.numel() / sum(map(len, rows)), 1.0)
        counts = [count] * len(rows) + [1.0] * len(own)
        rows += own
        # Any share is to have some of both: what is held out to tune are the last ones.
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED)).tolist()
        rows, counts = [rows[place] for place in order], [counts[place] for place in order]
    return replace(text, data={"input_ids": rows, "attention_mask": list(map(torch.ones_like, rows))}), name, counts


def _usual(
    model: PreTrainedModel, asked: tuple[int | None, int | None], device: torch.device, tune: int | bool = False
) -> tuple[int, int]:
    """Sequences to write, and tokens of each, where not so many are asked for."""
    sequences, length = amount(*asked, stream.usual(tuning.AMOUNTS if tune else AMOUNTS, device))
    return sequences, min(length, positions(model.config.get_text_config()) or length)


def draw(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[rows, 1]``: an index of each row of ``probabilities``, float32 ``[rows, n]``, drawn by them: by their
    running sum, in a tenth of ``torch.multinomial``'s time on a CPU."""
    sums = probabilities.cumsum(-1)
    # Below the total, so that what is drawn has a probability.
    places = torch.rand(len(sums), 1, generator=generator, device=sums.device) * sums[:, -1:]
    return torch.searchsorted(sums, places, right=True).clamp(max=sums.shape[-1] - 1)


class _Draw(LogitsProcessor):
    """Leaves one token of each row, drawn with its probability by a generator of our own."""

    def __init__(self, device: torch.device, drawn: Callable[[int], object]):
        self.generator = torch.Generator(device).manual_seed(SEED)
        self.drawn = drawn

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        probabilities = scores.softmax(-1)
        if not probabilities.isfinite().all():
            raise FloatingPointError("logits: found NaN where the model writes a text, expected finite ones")
        self.drawn(len(scores))
        return torch.full_like(scores, -torch.inf).scatter_(1, draw(probabilities, self.generator), 0.0)


def _written(
    model: PreTrainedModel, groups: list[torch.Tensor], together: int, length: int, progress: bool
) -> torch.Tensor:
    """The sequences that start so, so many at once: starts of a group are of one length."""
    own = model.generation_config
    # What is left out here would be taken from the model's own, such as an end that stops a sequence.
    model.generation_config = GenerationConfig(max_length=length, do_sample=False, use_cache=True)
    try:
        total = sum(len(starts) * (length - starts.shape[1]) for starts in groups)
        with tqdm(total=total, desc="writing", unit="token", disable=not progress) as bar:
            how = {"logits_processor": LogitsProcessorList([_Draw(groups[0].device, bar.update)])}
            parts = [part for starts in groups if len(starts) for part in starts.split(together)]
            return torch.cat([model.generate(part, attention_mask=torch.ones_like(part), **how) for part in parts])
    finally:
        model.generation_config = own


def _starts(model: PreTrainedModel, sequences: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[sequences, 1]``: the first token of each, on the model's device."""
    vocabulary = model.config.get_text_config().vocab_size
    for name in ("bos_token_id", "eos_token_id"):
        for config in (model.generation_config, model.config.get_text_config()):
            found = getattr(config, name, None)
            found = found[0] if isinstance(found, list | tuple) and found else found
            if isinstance(found, int) and 0 <= found < vocabulary:
                return torch.full((sequences, 1), found, device=model.device)
    return _random(model, sequences, generator)


def _random(model: PreTrainedModel, sequences: int, generator: torch.Generator) -> torch.Tensor:
    """int64 ``[sequences, 1]``: any tokens, on the model's device."""
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary, (sequences, 1), generator=generator).to(model.device)


def _openings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sequences: int, length: int) -> torch.Tensor:
    """int64 ``[sequences, length]`` on the model's device: the first tokens of texts of the built-in set, which are
    evenly spread over it."""
    texts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in text_of(None).split("\n\n")]
    openings = torch.tensor([ids[:length] for ids in texts if len(ids) >= length])
    check_ids(openings, {"model": model.config})
    return openings[torch.tensor(spread(len(openings) - 1, sequences))].to(model.device)


def _in_few_bits(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A copy that shares what is not quantized; quantizing goes by ``device``, and what comes of it is where the model
    is."""
    copy, config = tuning.sharing_copy(model), KbitConfig(bits=WRITER_BITS)
    packable = Packable(copy)
    plan = packable.plan(config, packable.choose(config))
    logger.info("hf_kbit: %s is too small for the model: it writes in %d bits", device, WRITER_BITS)
    quantize_layers(plan, plan.decodings, device)
    return copy


def _together(model: PreTrainedModel, device: torch.device, length: int) -> int:
    """How many sequences are written at once: as many as the device has memory for, whatever of that is free, since
    others at once would be other texts. 0 if its memory is less than the weights in the dtype to compute in."""
    config, itemsize = model.config.get_text_config(), stream.dtype_on(device, model.dtype).itemsize
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // (heads or 1)
    keys = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    kept = 2 * getattr(config, "num_hidden_layers", 0) * keys * itemsize * length
    logits = 4 * 4 * config.vocab_size  # some four of them, in float32
    weights = sum(x.nbytes // x.itemsize for x in (*model.parameters(), *model.buffers())) * itemsize
    _, memory = stream.memory_of(device)
    return min(max(int(ROOM * (memory - weights) / (kept + logits)), 1), TOGETHER) if weights <= memory else 0


def _check_free(model: PreTrainedModel, device: torch.device) -> None:
    """Refuses to write where the weights do not fit into what is free on the device."""
    needed, (free, _) = stream.moved_bytes(model, device), stream.memory_of(device)
    if needed > free:
        raise MemoryError(
            f"data: found less than is to be read, and {free / 1e9:,.1f} GB free on {device}, expected "
            f"{needed / 1e9:,.1f} for the weights of {type(model).__name__}, which is to write the rest; make room, "
            "or give it a text, and say how many sequences of it"
        )
