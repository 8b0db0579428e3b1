"""Calibration data: the token ids that a model reads while it is calibrated."""

import torch
from transformers import PreTrainedModel

LENGTH = 2048  # tokens of a sequence that is cut from a text, at most


def token_ids(data: torch.Tensor | str, tokenizer, model: PreTrainedModel, sequences: int) -> torch.Tensor:
    """int64 ``[n, length]`` on the model's device: ids as they are given, or a text cut into sequences.

    Raises:
        TypeError, ValueError: as ``calibrate``.
    """
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)  # where there is no such number, no limit
    if isinstance(data, str):
        if tokenizer is None:
            raise ValueError("tokenizer: found none, expected one, for the data is a text")
        ids = torch.tensor(tokenizer(data, verbose=False)["input_ids"], dtype=torch.int64)
        length = min(LENGTH, limit or LENGTH, len(ids))
        data = ids[: len(ids) // max(length, 1) * length].view(-1, length)
    if not isinstance(data, torch.Tensor) or data.dtype != torch.int64:
        found = data.dtype if isinstance(data, torch.Tensor) else type(data).__name__
        raise TypeError(f"data: found {found}, expected token ids, a tensor of int64, or a text")
    if data.dim() != 2 or data.numel() == 0:
        raise ValueError(f"data: found shape {list(data.shape)}, expected [sequences, tokens], 1 or more of each")
    if limit is not None and data.shape[1] > limit:
        raise ValueError(f"data: found sequences of {data.shape[1]} tokens, expected at most {limit}, its positions")
    lowest, highest = (extreme.item() for extreme in data.aminmax())
    if lowest < 0 or highest >= config.vocab_size:
        raise ValueError(f"data: found ids from {lowest} to {highest}, expected 0 to {config.vocab_size - 1}")
    return data.to(model.device)
