"""Questions with four answers, made of a text: which of four endings goes on from what stands before?

The wrong endings are what follows the right one in the text. So all four are of one subject and one style, and a model
has to have read what stands before to tell them apart.
"""

import torch

BEFORE, ENDING, CHOICES = 48, 16, 4  # tokens, tokens and endings
AT_ONCE = 8  # questions


def questions(tokens: torch.Tensor, window: int, most: int) -> torch.Tensor:
    """int64 ``[questions, 4, 64 or 65]`` of a text ``[n]`` in windows, as ``held_out.safetensors`` has it: the token
    that all windows begin with, if there is one, what stands before and an ending, the right one first. At most so
    many that lie evenly in the text, none across windows."""
    size, windows = BEFORE + CHOICES * ENDING, tokens[: len(tokens) // window * window].view(-1, window)
    first = windows[:1, : int((windows[:, 0] == windows[0, 0]).all())]
    spans = windows[:, first.numel() :].unfold(1, size, size).flatten(0, 1)
    spans = spans[torch.linspace(0, len(spans) - 1, min(most, len(spans))).long()]
    before = torch.cat([first.expand(len(spans), -1), spans[:, :BEFORE]], 1)[:, None].expand(-1, CHOICES, -1)
    return torch.cat([before, spans[:, BEFORE:].unflatten(1, (CHOICES, ENDING))], -1)


@torch.inference_mode()
def right(model: torch.nn.Module, questions: torch.Tensor) -> torch.Tensor:
    """bool ``[questions]``: whether the model finds the right ending more probable than the others."""
    found = []
    for batch in questions.to(model.device).split(AT_ONCE):
        texts = batch.flatten(0, 1)
        logits = model(input_ids=texts, use_cache=False, logits_to_keep=ENDING + 1).logits[:, :-1].float()
        scores = logits.log_softmax(-1).gather(-1, texts[:, -ENDING:, None]).sum((1, 2)).view(-1, CHOICES)
        found.append(scores[:, 0] > scores[:, 1:].amax(1))
    return torch.cat(found).cpu()
