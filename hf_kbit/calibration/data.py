"""Calibration data: the token ids that a model reads while it is calibrated."""

import os
from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
SEQUENCES, LENGTH = 128, 2048  # of a text, and tokens of each, unless others are asked for
LITTLE = (16, 256)  # the same, where few tell what counts
CHARACTERS = 16  # of a text for each token that is read: more than any usual text has for one
# What configs call how many tokens are read at once, at most.
POSITIONS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
PROMPTS = Path(__file__).with_name("prompts.txt")  # the built-in set


@dataclass(frozen=True)
class Text:
    """What a model reads while it is calibrated or measured.

    Attributes:
        data: what the model is for, some 64,000 tokens of it. A text; a ``pathlib.Path``, of a file in UTF-8; rows of
            text, such as ``load_dataset(...)["text"]``, all of which are read, with an empty line between two; or
            int64 ``[sequences, tokens]``, none of them padding; or what a tokenizer returns, a mapping with
            ``input_ids`` and ``attention_mask``, whose zeros leave padding out. None: text that the model writes,
            going on from the first words of a small set of texts of many kinds, the same each time; one that cannot,
            such as an encoder, reads these texts. So does any for the method ``"weighted"``, unless it is to ``tune``.
        tokenizer: for all but token ids. Default: that of the model's folder or name.
        sequences: so many of a text at most, evenly spread over it. Token ids are taken as they are. Default: 128 of a
            text, and a short one is filled up by what the model writes; that alone is 128 sequences, for a trellis
            512, 64 on a CPU, and for ``tune`` 4096, or 256 on a CPU; what ``"weighted"`` reads without data is 16.
        length: tokens of each at most, or what the model or the tokenizer has positions for. Best as many as the model
            will read at once: some ten if it reads sentences. Default: 2048 of a text; 640 of what the model writes,
            256 on a CPU; 256 of what ``"weighted"`` reads without data.
    """

    data: torch.Tensor | Mapping[str, Any] | str | Path | Iterable[str] | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    sequences: int | None = None
    length: int | None = None

    @property
    def tokens(self) -> int | None:
        """Of the longest sequence, if that is known before anything is read."""
        given = self.data["input_ids"] if is_tokenized(self.data) else self.data
        known = is_tokenized(self.data) or (isinstance(given, torch.Tensor) and given.dim() == 2)
        return max(map(len, given), default=None) if known else self.length

    def little(self) -> "Text":
        """As much of it as tells how large inputs are on average."""
        sequences, length = amount(self.sequences, self.length, LITTLE)
        return replace(self, sequences=sequences, length=length)

    @property
    def name(self) -> str:
        """Of the data, for reports: a file by its name, other data by one that it has."""
        if self.data is None:
            return "the built-in text"
        name = str(self.data) if isinstance(self.data, Path) else getattr(self.data, "name", None)
        return name if isinstance(name, str) else "the data"

    @property
    def needs_tokenizer(self) -> bool:
        return not isinstance(self.data, torch.Tensor) and not is_tokenized(self.data)

    def tokenizer_for(self, model: PreTrainedModel, **source: Any) -> PreTrainedTokenizerBase:
        """That of the data, or of the model; a ValueError if there is none."""
        tokenizer = self.tokenizer or tokenizer_of(model.name_or_path, **source)
        if tokenizer is None:
            what = "what is read without data" if self.data is None else "the data"
            raise ValueError(f"tokenizer: found none, expected one, for {what} is a text; token ids need none")
        return tokenizer

    def ids(self, model: PreTrainedModel, **source: Any) -> list[torch.Tensor]:
        """Sequences, int64 ``[tokens]`` each, on the model's device, of the built-in set where there is no data;
        ``source`` is of ``tokenizer_of``.

        Raises:
            TypeError, ValueError: as ``calibrate``.
        """
        sequences, length = amount(self.sequences, self.length, (SEQUENCES, LENGTH))
        limit = positions(model.config.get_text_config())
        if not self.needs_tokenizer:
            data = self.data if is_tokenized(self.data) else {"input_ids": self.data}
            found = unpadded(data, [model.config.get_text_config(), self.tokenizer])
        else:
            text, tokenizer = text_of(self.data), self.tokenizer_for(model, **source)
            found = _cut(text, tokenizer, min(length, limit or length, tokenizer.model_max_length), sequences)
        if not (longest := max(map(len, found), default=0)):
            shape = list(found.shape) if isinstance(found, torch.Tensor) else [len(found), 0]
            raise ValueError(f"data: found shape {shape}, expected [sequences, tokens], 1 or more of each")
        if limit is not None and longest > limit:
            raise ValueError(f"data: found sequences of {longest} tokens, expected at most {limit}, its positions")
        check_ids(torch.cat(list(found)), {"model": model.config})
        return [row.to(model.device) for row in found if len(row)]


def is_tokenized(data: Any) -> bool:
    """Whether it is what a tokenizer returns: a mapping, such as a ``BatchEncoding``."""
    return isinstance(data, Mapping | UserDict) and "input_ids" in data


def unpadded(data: Mapping[str, Any], padded_by: Iterable[Any] = ()) -> list[torch.Tensor]:
    """Each sequence without its padding, int64 ``[tokens]``, of ``input_ids`` and an ``attention_mask``, if there is
    one: tensors or lists of rows. Without a mask what looks like the padding of one of ``padded_by``, tokenizers or
    configs, is warned of."""
    ids, mask = data["input_ids"], data.get("attention_mask")
    if isinstance(ids, torch.Tensor) and (ids.dim() != 2 or ids.numel() == 0):
        raise ValueError(f"data: found shape {list(ids.shape)}, expected [sequences, tokens], 1 or more of each")
    rows = [torch.as_tensor(row) for row in ids]
    if mask is None:
        for padding in {getattr(own, "pad_token_id", None) for own in padded_by} - {None}:
            _warn_of_padding(rows, padding)
        return rows
    masks = [torch.as_tensor(row, device=rows[0].device).bool() for row in mask]
    if [len(row) for row in rows] != [len(row) for row in masks]:
        raise ValueError(
            f"data: found {size_of(rows)} in input_ids, {size_of(masks)} in attention_mask, expected as many"
        )
    return [row[own] for row, own in zip(rows, masks, strict=True)]


def _warn_of_padding(rows: Sequence[torch.Tensor], padding: int) -> None:
    """Where rows begin or end with this token twice: one may be the end of a text."""
    ends = [end for row in rows for end in (row[:2], row[-2:]) if len(row) > 2]
    if count := sum(bool((end == padding).all()) for end in ends):
        logger.warning(
            "hf_kbit: data: found %d sequences that begin or end with padding (token %d), which is read like any "
            "other token; pass all that the tokenizer returns, with its attention_mask, and padding is left out",
            count,
            padding,
        )


def size_of(sequences: Sequence[torch.Tensor]) -> str:
    """In words, how many sequences there are, and tokens of each, or of all if not each has as many."""
    lengths = {len(row) for row in sequences}
    if len(lengths) == 1:
        return f"{len(sequences):,} x {lengths.pop():,} tokens"
    return f"{sum(map(len, sequences)):,} tokens in {len(sequences):,} sequences"


def batches_of(sequences: Iterable[torch.Tensor], size: int) -> list[torch.Tensor]:
    """``[n, tokens]`` each: sequences of one length together, at most so many, in the order of their first ones.

    >>> [len(batch) for batch in batches_of([torch.zeros(n) for n in (3, 5, 3, 3)], 2)]
    [2, 1, 1]
    """
    found, begun = [], {}
    for row in sequences:
        own = begun.get(len(row))
        if own is None or len(own) == size:
            own = begun[len(row)] = []
            found.append(own)
        own.append(row)
    return [torch.stack(own) for own in found]


def positions(config: PreTrainedConfig) -> int | None:
    """Tokens that a model reads at once; None where its config sets no limit, as XLNet's -1."""
    limits = [getattr(config, name, None) for name in POSITIONS]
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=None)


def check_ids(ids: torch.Tensor, configs: Mapping[str, PreTrainedConfig]) -> None:
    """Refuses what are no token ids of models, which errors call by the keys of ``configs``."""
    if ids.dtype != torch.int64:
        raise TypeError(f"data: found {ids.dtype}, expected token ids, a tensor of int64, or a text")
    lowest, highest = (extreme.item() for extreme in ids.aminmax())
    for name, config in configs.items():
        size = config.get_text_config().vocab_size
        if lowest < 0 or highest >= size:
            raise ValueError(f"data: found ids from {lowest} to {highest}, expected 0 to {size - 1}, as {name} has")


def amount(sequences: int | None, length: int | None, usual: tuple[int, int]) -> tuple[int, int]:
    """Both, or what is usual where they are None."""
    for name, value in (("sequences", sequences), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: found {value}, expected 1 or more")
    return (usual[0] if sequences is None else sequences), (usual[1] if length is None else length)


def place_of(name: str | Path) -> tuple[str | Path, dict[str, str]]:
    """What ``from_pretrained`` is to be given for a model: a GGUF file's folder, and its name there."""
    file = Path(name)
    return (file.parent, {"gguf_file": file.name}) if file.suffix == ".gguf" and file.is_file() else (name, {})


def tokenizer_of(name: str | Path, **source: Any) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a folder, of a model on the Hub or of a GGUF file, if it has one; ``source`` is of
    ``from_pretrained``."""
    name, place = place_of(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **source, **place)
    except (OSError, ValueError):
        return None
    # Where there is none, Transformers 5 makes one up for many kinds of models, which knows special tokens alone.
    known = {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens, "▁"}
    return tokenizer if known else None


def tokenize(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[torch.Tensor, list[int]]:
    """int64 ``[length]``: the whole text at once, with the special tokens that the tokenizer adds to any text; and 1
    for each of these, 0 for the others. A text that has no others has none at all."""
    found = tokenizer(text, verbose=False, return_special_tokens_mask=True)
    ids, added = torch.tensor(found["input_ids"], dtype=torch.int64), found["special_tokens_mask"]
    return (ids, added) if 0 in added else (ids[:0], [])


def read(file: Path) -> str:
    """The text of a file in UTF-8; a ValueError that names it if it is none."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: found bytes that are no UTF-8, expected text ({error})") from None


def text_of(data: str | Path | Iterable[str] | None) -> str:
    """The text itself, of a file, of the built-in set if there is none, or rows with an empty line between two."""
    if data is None:
        data = PROMPTS
    if isinstance(data, str):
        if os.path.isfile(data):
            raise ValueError(f"data: found the name of a file, {data!r}, expected a text, or pathlib.Path({data!r})")
        return data
    if isinstance(data, Path):
        return read(data)
    columns = getattr(data, "column_names", None)  # a datasets.Dataset, told without a need for the package
    if columns is not None and not isinstance(data, Mapping):
        if "text" not in columns:
            raise ValueError(
                f"data: found a dataset with the columns {columns}, expected one named 'text'; pass a column, as in "
                f"dataset[{columns[0]!r}]"
            )
        data = data["text"]
    if isinstance(data, Mapping) or not isinstance(data, Iterable):  # of a mapping, its keys would be read
        raise TypeError(f"data: found {type(data).__name__}, expected token ids, a tensor of int64, or a text")
    rows = list(data)
    for number, row in enumerate(rows):
        if not isinstance(row, str):
            raise TypeError(f"data: found {type(row).__name__} as row {number}, expected text in each")
    return "\n\n".join(row for row in rows if row.strip())


def _cut(text: str, tokenizer: PreTrainedTokenizerBase, length: int, sequences: int) -> torch.Tensor:
    """int64 ``[n, tokens]``, at most ``sequences`` of ``length`` tokens at most, all of the same. Each has what the
    tokenizer puts before and after any text: without their first token some models do not know what to do."""
    # Spread over all of it, since the beginning of a long text may be about one thing. What is not needed of a very
    # long one is left out before it is tokenized, which takes longest.
    piece = length * CHARACTERS
    if len(text) > sequences * piece:
        text = "".join(text[start : start + piece] for start in spread(len(text) - piece, sequences))
    ids, added = tokenize(text, tokenizer)
    if len(ids) <= length:
        return ids[None]
    first, last = added.index(0), len(ids) - added[::-1].index(0)
    before, body, after = ids[:first], ids[first:last], ids[last:]
    if (room := length - len(before) - len(after)) < 1:
        raise ValueError(f"length: found {length}, expected more than the {length - room} that the tokenizer adds")
    if (count := -(-len(body) // room)) <= sequences:
        room = len(body) // count  # so that next to nothing is left over
    rows = body[: len(body) // room * room].view(-1, room)
    rows = rows[spread(len(rows) - 1, sequences)] if len(rows) > sequences else rows
    return torch.cat([before.expand(len(rows), -1), rows, after.expand(len(rows), -1)], 1)


def spread(last: int, count: int) -> list[int]:
    """``count`` whole numbers from 0 to ``last``, evenly apart; the middle if it is one."""
    return [last // 2] if count == 1 else [index * last // (count - 1) for index in range(count)]
