"""What errors of linear layers' outputs cost the model: gradients of its predictions, and how much a token counts.

A layer's squared errors are summed over tokens, though at one token an error may change the predictions many times as
much as at another. The square of the gradient by an output, times half the squared error, estimates by how much, as
in ``calibration.widths``; here one number for each layer and token is kept of it. A few tokens have most of that, so
by it alone the others would hardly count: it is a share of a token's weight, and the rest is alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel
from transformers.utils import logging
from transformers.utils.logging import tqdm

from hf_kbit.calibration import stream, tuning
from hf_kbit.calibration.check import limit_of, rows_of, sample_of
from hf_kbit.calibration.moments import add_products
from hf_kbit.calibration.writing import draw
from hf_kbit.plan.allocation import units

logger = logging.get_logger("transformers.hf_kbit")  # as integrations/transformers/report.py
BLEND = 0.25  # of a token's weight, what gradients say; the rest is alike. 0: no gradients are needed
# Of a token for each place, whose squared gradients are added up, by the type of the device; "" is any other.
DRAWS = {"cpu": 1, "": 2}
SEED = 0  # of the tokens that are drawn
# Of the device's memory beside the model, what logits of the sequences that go through it at once take, with their
# gradients, or probabilities of a layer's attention; bytes for each of these numbers, of all that is there.
ROOM, NUMBER_BYTES = 1 / 8, 16
CHUNK = 1 << 27  # of these logits, in float32
SAMPLE = (2, 16)  # sequences, and tokens of each, whose gradients are computed in two ways, and compared
QUANTILE, MOST = 0.99, 10  # a token counts at most so many times as much as one at this place of the order
ORDERED = 1 << 18  # tokens of which that is looked up, or up to twice as many
ROWS = 5 << 16  # gradients at most, whose products are summed: what errors of outputs cost together
BLOCK = 2048  # outputs of which that is known; a multiple of the blocks that a trellis is rotated in
COPIES = 8  # of float32 [N, N] for N outputs, that are in memory while it is used


def gradients(
    model: PreTrainedModel,
    names: Iterable[str],
    ids: torch.Tensor,
    device: torch.device,
    choose: Callable[[torch.Tensor], torch.Tensor],
    take: Callable[..., object],
    draws: int = 1,
    layers: Callable[..., AbstractContextManager] = stream.recomputed,
) -> None:
    """Calls ``take(name, module, given, gradient)`` for linear layers, or opened projections of experts: ``gradient``
    is that of the logarithms of the probabilities of tokens, by what the module made of ``given``.

    There is one token for each of ``ids``, ``[sequences, tokens]``, which ``choose`` draws by the probabilities; so
    many times, each by itself. Layers compute on ``device``, in the context of ``layers``, by default one at a time.
    Parameters get no gradients.
    """
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    # Takes part in all of the outputs: for its gradient, which is 0, the way back goes through them all, whatever of
    # the model needs a gradient.
    anchor = torch.zeros((), requires_grad=True)

    def watch(name, module, args, keywords, output):
        tell = partial(take, name, module)
        return _Watched.apply(tell, output, anchor, *(args or keywords.values()))

    parts = (*units(model, list(names)), *([head] if head else []))
    with ExitStack() as hooks, torch.enable_grad(), layers(model, parts, device):
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
                drawn = choose(probabilities)
                own.copy_(probabilities.neg_().scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32)))
            torch.autograd.grad(logits, anchor, gradient, retain_graph=turn + 1 < draws)


class _Watched(torch.autograd.Function):
    """An output of a module, with a function that is told of its gradient, and of what the module was given: that is
    saved as autograd saves tensors, so a layer that is computed again has it again."""

    @staticmethod
    def forward(ctx, tell, output, anchor, *given):
        ctx.tell = tell
        ctx.others = [None if isinstance(x, torch.Tensor) else x for x in given]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in given))
        return output.clone()  # what follows may write into it

    @staticmethod
    def backward(ctx, gradient):
        given = [x if saved is None else saved for x, saved in zip(ctx.others, ctx.saved_tensors, strict=True)]
        ctx.tell(given, gradient)
        return None, gradient, torch.zeros(()), *[None] * len(given)


def weigh(
    model: PreTrainedModel,
    dimensions: Mapping[str, int | None],
    batches: Sequence[torch.Tensor],
    device: torch.device,
    progress: bool = False,
    outputs: Mapping[str, int] | None = None,
) -> tuple[dict[str, list[torch.Tensor]], dict[str, list[torch.Tensor]]]:
    """``{name: [float32 [sequences, tokens] on the CPU of each batch]}``: how much tokens count for linear layers of a
    causal language model, some 1 on average; the same each time on the same machine. All of the model is on ``device``
    meanwhile, or, where that is too small for it, one layer after another, which goes there and back for each few
    sequences. ``dimensions`` says which one is that of sequences in what a layer is given (``check.rows_of``).

    And ``{name: [float32 [n, n] on the CPU]}``, what errors of the outputs cost together, of layers whose out_features
    ``outputs`` tells: the sum of ``g @ g.T`` over gradients by what they make of tokens, no ``g`` much longer than
    most; blocks of its diagonal, for up to ``BLOCK`` outputs each. Only so many layers have it, those with few
    out_features first, as half of the memory has room for.

    Layers are left out that make another number of rows than there are tokens, or whose gradients overflow. There are
    none of another model, or of one whose code has no way back.

    Raises:
        MemoryError, torch.OutOfMemoryError: there is memory enough on ``device``, but too little of it is free.

    Source: squared gradients by outputs as weights of a layer's errors are those of GuidedQuant (arXiv:2505.07004),
    there of the loss on a text, several groups of outputs apart. What errors of outputs cost together is a factor of
    YAQA's Hessian (arXiv:2505.22988), which is that of the divergence too.
    """
    longest, most = max(ids.shape[1] for ids in batches), max(len(ids) for ids in batches)
    if not (BLEND and dimensions and longest > 1 and stream.predicts_tokens(model)):
        return {}, {}
    try:
        config, names = model.config.get_text_config(), list(dimensions)
        numbers = longest * max(config.vocab_size, getattr(config, "num_attention_heads", 0) * longest)
        elsewhere, (free, memory) = model.device != device, stream.memory_of(device)
        beside = memory - sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
        together = max(min(int(ROOM * beside) // (NUMBER_BYTES * numbers), most), 1)
        needed = NUMBER_BYTES * together * numbers + (stream.moved_bytes(model, device) if elsewhere else 0)
        if not (fits := needed <= memory) and not elsewhere:
            logger.warning("hf_kbit: all tokens count alike, for %s is too small for gradients of the model", device)
            return {}, {}
        if not fits:
            logger.info("hf_kbit: %s is too small for the model: its layers go there one after another", device)
        sums = _with_room(outputs or {}, memory - needed, device)
        needed += 4 * sum(size * size for sizes in sums.values() for size in sizes)
        if fits and needed > free:  # layer by layer would give other bytes, and what is free may be other each time
            raise MemoryError(
                f"calibrate: found {free / 1e9:,.1f} GB free on {device}, expected {needed / 1e9:,.1f} for gradients "
                f"of {type(model).__name__}, which weigh the tokens; make room, or take another device"
            )
        generator, draws = torch.Generator(device).manual_seed(SEED), stream.usual(DRAWS, device)
        squares = [torch.zeros((len(names), *ids.shape), device=device) for ids in batches]
        moments = {name: [torch.zeros(n, n, device=device) for n in sizes] for name, sizes in sums.items()}
        apart = -(-draws * sum(ids.numel() for ids in batches) // ROWS)
        pieces = [
            piece
            for ids, own in zip(batches, squares, strict=True)
            for piece in zip(ids.split(together), own.split(together, 1), strict=True)
        ]
        # Gradients of other kinds of attention differ in the last bits each time.
        where = stream.whole(model, device) if elsewhere and fits else nullcontext()
        with where, tuning.reproducible(), sdpa_kernel(SDPBackend.MATH):
            check_gradients(model, names, batches)
            choose = partial(draw, generator=generator)
            for place, (piece, own) in enumerate(tqdm(pieces, desc="weighing", disable=not progress)):
                parts = dict(zip(names, own, strict=True))
                add = partial(_add, parts, moments if place % apart == 0 else {}, dimensions)
                gradients(model, names, piece.to(model.device), device, choose, add, draws)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the code of a model does
        logger.warning("hf_kbit: all tokens count alike, for gradients fail (%s: %s)", type(error).__name__, error)
        return {}, {}
    found = {name: _weights([own[place].cpu() for own in squares]) for place, name in enumerate(names)}
    found = {name: own for name, own in found.items() if own is not None}
    if len(found) < len(names):
        logger.warning("hf_kbit: all tokens count alike for %d of %d layers", len(names) - len(found), len(names))
    known = {name: [block.cpu() for block in own] for name, own in moments.items() if name in found}
    return found, {name: own for name, own in known.items() if all(block.isfinite().all() for block in own)}


def _with_room(outputs: Mapping[str, int], memory: int, device: torch.device) -> dict[str, list[int]]:
    """Sizes of the blocks of those of ``outputs`` whose moments fit into half of so much memory of ``device``, and of
    the CPU's, where they are kept; the smallest first."""
    room, found = min(memory, stream.memory_of(torch.device("cpu"))[1]) // 2, {}
    for name, size in sorted(outputs.items(), key=lambda each: each[1]):
        blocks = [min(BLOCK, size - start) for start in range(0, size, BLOCK)]
        room -= 4 * sum(n * n for n in blocks)
        if room < 0 or COPIES * 4 * size * size > memory:
            logger.warning(
                "hf_kbit: errors of outputs count alike for %d of %d layers: %s or the CPU has too little memory for "
                "what they cost together",
                len(outputs) - len(found),
                len(outputs),
                device,
            )
            break
        found[name] = blocks
    return found


def check_gradients(model: PreTrainedModel, names: Iterable[str], batches: Sequence[torch.Tensor]) -> None:
    """Refuses a model whose ``gradients`` are not those that it has when nothing is computed again, but by autograd
    alone: both where the model is and in its dtype, for another one's rounding changes them by up to a quarter."""
    sequences, tokens = SAMPLE
    ids, ways = sample_of(batches)[:sequences, :tokens].to(model.device), []

    def choose(probabilities: torch.Tensor) -> torch.Tensor:  # the same both times, whatever rounding does
        rows, size = probabilities.shape
        return (torch.arange(rows, device=probabilities.device) % size)[:, None]

    for layers in (lambda model, parts, _: stream.recomputed(model, parts, None), lambda *_: nullcontext()):
        sizes = {}

        def add(name, module, given, gradient, sizes=sizes):
            sizes.setdefault(name, []).append(gradient.float().square().flatten(0, -2).sum(0).sqrt().cpu())

        gradients(model, names, ids, model.device, choose, add, layers=layers)
        ways.append(sizes)
    found, expected = ways
    for name in names:
        pairs = zip(found.get(name, ()), expected.get(name, ()), strict=True)
        error = max((((x - y).norm() / y.norm().clamp(min=tuning.TINY)).item() for x, y in pairs), default=0.0)
        if error > limit_of(torch.float32):
            raise ValueError(
                f"{name}: found gradients that differ by {error:.1%} where layers of {type(model).__name__} are "
                "computed again on the way back, expected those of one pass"
            )


def _add(
    squares: dict[str, torch.Tensor],
    moments: dict[str, list[torch.Tensor]],
    dimensions: Mapping[str, int | None],
    name: str,
    module,
    given,
    gradient: torch.Tensor,
) -> None:
    """Adds those of one layer's outputs up, in place; NaN where its rows are not the tokens. And their products, if
    the layer has ``moments``."""
    own = squares[name]
    rows = rows_of(gradient, dimensions[name], len(own))
    if rows is None or rows.shape[:-1] != own.shape:
        own += torch.nan
        return
    rows = rows.float().to(own.device)
    found = rows.square().sum(-1)
    own += found
    if name in moments:
        rows = without_peaks(rows, found)
        for block, part in zip(moments[name], rows.split(BLOCK, 1), strict=True):
            add_products(block, part, part)


def without_peaks(rows: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """``[rows, N]`` of gradients ``[sequences, tokens, N]``, none of which is much longer than most; ``squares`` are
    those of their lengths."""
    limit = MOST * torch.quantile(squares[:, min(1, squares.shape[1] - 1) :], QUANTILE)
    return (rows * torch.where(squares > limit, limit / squares, 1.0).sqrt()[..., None]).flatten(0, -2)


def _weights(squares: list[torch.Tensor]) -> list[torch.Tensor] | None:
    """By squared gradients, ``[sequences, tokens]`` of each batch; None where they are not finite. The first token of
    a sequence, which many models attend to for want of another, is unlike all others: it has 1, and is in no
    statistic."""
    others = torch.cat([own[:, 1:].flatten() for own in squares])
    if not all(own.isfinite().all() for own in squares):
        return None
    limit = MOST * torch.quantile(others[:: max(len(others) // ORDERED, 1)], QUANTILE)
    mean = others.clamp(max=limit).mean()
    found = []
    for own in squares:
        weights = 1 - BLEND + BLEND * torch.where(mean > 0, own.clamp(max=limit) / mean, 1.0)
        weights[:, 0] = 1
        found.append(weights)
    return found
