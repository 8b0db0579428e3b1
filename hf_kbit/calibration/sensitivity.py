"""What errors of linear layers' outputs cost the model: gradients of its predictions, and how much a token counts.

A layer's squared errors are summed over tokens, though at one token an error may change the predictions many times as
much as at another. The square of the gradient by an output, times half the squared error, estimates by how much, as
in ``hf_kbit.widths``; here one number for each layer and token is kept of it. A few tokens have most of that, so by it
alone the others would hardly count: it is a share of a token's weight, and the rest is alike.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm.auto import tqdm
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_kbit.allocation import units
from hf_kbit.calibration import stream, tuning
from hf_kbit.calibration.writing import draw

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
BLEND = 0.25  # of a token's weight, what gradients say; the rest is alike. 0: no gradients are needed
# Of a token for each place, whose squared gradients are added up, by the type of the device; "" is any other.
DRAWS = {"cpu": 1, "": 2}
SEED = 0  # of the tokens that are drawn
NUMBERS = 1 << 28  # logits at once, with their gradients, or probabilities of a layer's attention
CHUNK = 1 << 27  # of these logits, in float32
NUMBER_BYTES = 16  # for each of these numbers, of all that is on the device beside a model that is there
QUANTILE, MOST = 0.99, 10  # a token counts at most so many times as much as one at this place of the order
ORDERED = 1 << 18  # tokens of which that is looked up, or up to twice as many


def gradients(
    model: PreTrainedModel,
    names: Sequence[str],
    ids: torch.Tensor,
    device: torch.device,
    generator: torch.Generator,
    take: Callable[..., object],
    draws: int = 1,
) -> None:
    """Calls ``take(name, module, given, gradient)`` for linear layers, or opened projections of experts: ``gradient``
    is that of the logarithms of the probabilities of tokens, by what the module made of ``given``.

    The tokens are drawn as the model predicts them, one for each of ``ids``, ``[sequences, tokens]``; so many times,
    each by itself. Layers compute on ``device``, one at a time, and parameters get no gradients.
    """
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)

    def watch(name, module, args, keywords, output):
        if output.requires_grad:  # not the first time that it is computed, but on the way back
            given = [x.detach() if isinstance(x, torch.Tensor) else x for x in (args or keywords.values())]
            output.register_hook(lambda gradient: take(name, module, given, gradient))

    parts = (*units(model, list(names)), *([head] if head else []))
    with ExitStack() as hooks, torch.enable_grad(), stream.recomputed(model, parts, device) as anchor:
        for name in names:
            layer = model.get_submodule(name)
            hooks.enter_context(layer.register_forward_hook(partial(watch, name), with_kwargs=True))
        logits = stream.forward_pass(model, ids).logits
        for turn in range(draws):
            gradient = logits.new_empty(logits.shape)
            rows = max(CHUNK // logits.shape[-1], 1)
            pairs = (x.detach().flatten(0, -2).split(rows) for x in (logits, gradient))
            for part, own in zip(*pairs, strict=True):
                probabilities = part.to(device).float().softmax(-1)
                # The gradient of the logarithm of a probability by logits: 1 at the token, less all probabilities.
                drawn = draw(probabilities, generator)
                own.copy_(probabilities.neg_().scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32)))
            torch.autograd.grad(logits, anchor, gradient, retain_graph=turn + 1 < draws)


def token_weights(
    model: PreTrainedModel,
    names: Sequence[str],
    ids: torch.Tensor,
    device: torch.device,
    batch: int,
    progress: bool = False,
) -> dict[str, torch.Tensor]:
    """``{name: float32 [sequences, tokens] on the CPU}``: how much each of ``ids`` counts for linear layers of a
    causal language model, some 1 on average; the same each time on the same machine. All of the model is on ``device``
    meanwhile.

    Layers are left out that make another number of rows than there are tokens, or whose gradients overflow. There are
    none of another model, of one for which ``device`` is too small, or of one whose code has no way back.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is memory enough on ``device``, but too little of it is free.

    Source: squared gradients by outputs as weights of a layer's errors are those of GuidedQuant (arXiv:2505.07004),
    there of the loss on a text, several groups of outputs apart.
    """
    if not (BLEND and names and ids.shape[1] > 1 and stream.predicts_tokens(model)):
        return {}
    try:
        config, length = model.config.get_text_config(), ids.shape[1]
        numbers = length * max(config.vocab_size, getattr(config, "num_attention_heads", 0) * length)
        together = max(min(NUMBERS // numbers, batch), 1)
        elsewhere, (free, memory) = model.device != device, stream.memory_of(device)
        needed = NUMBER_BYTES * together * numbers + (stream.moved_bytes(model, device) if elsewhere else 0)
        if needed > memory:
            logger.warning("hf_kbit: all tokens count alike, for %s is too small for gradients of the model", device)
            return {}
        if needed > free:  # to weigh none would give other bytes, and what is free may be other each time
            raise MemoryError(
                f"calibrate: found {free / 1e9:,.1f} GB free on {device}, expected {needed / 1e9:,.1f} for gradients "
                f"of {type(model).__name__}, which weigh the tokens; make room, or take another device"
            )
        generator, draws = torch.Generator(device).manual_seed(SEED), stream.usual(DRAWS, device)
        squares = torch.zeros((len(names), *ids.shape), device=device)
        pieces = list(zip(ids.to(device).split(together), squares.split(together, 1), strict=True))
        # Gradients of other kinds of attention differ in the last bits each time.
        place = stream.whole(model, device) if elsewhere else nullcontext()
        with place, tuning.reproducible(), sdpa_kernel(SDPBackend.MATH):
            for piece, own in tqdm(pieces, desc="weighing", disable=not progress):
                parts = dict(zip(names, own, strict=True))
                gradients(model, names, piece, device, generator, partial(_add, parts), draws)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the code of a model does
        logger.warning("hf_kbit: all tokens count alike, for gradients fail (%s: %s)", type(error).__name__, error)
        return {}
    found = {name: _weights(own).cpu() for name, own in zip(names, squares, strict=True) if own.isfinite().all()}
    if len(found) < len(names):
        logger.warning("hf_kbit: all tokens count alike for %d of %d layers", len(names) - len(found), len(names))
    return found


def _add(squares: dict[str, torch.Tensor], name: str, module, given, gradient: torch.Tensor) -> None:
    """Adds those of one layer's outputs up, in place; NaN where its rows are not the tokens."""
    found, own = gradient.float().square().sum(-1), squares[name]
    own += found.view(own.shape) if found.shape in (own.shape, (own.numel(),)) else torch.nan


def _weights(squares: torch.Tensor) -> torch.Tensor:
    """By squared gradients, ``[sequences, tokens]``. The first token of a sequence, which many models attend to for
    want of another, is unlike all others: it has 1, and is in no statistic."""
    others = squares[:, 1:].flatten()
    limit = MOST * torch.quantile(others[:: max(len(others) // ORDERED, 1)], QUANTILE)
    mean = others.clamp(max=limit).mean()
    weights = 1 - BLEND + BLEND * torch.where(mean > 0, squares.clamp(max=limit) / mean, 1.0)
    weights[:, 0] = 1
    return weights
