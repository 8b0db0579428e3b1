"""Mixed widths: which layers get more bits and which fewer, by what few bits in each cost the model."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import tqdm

from hf_kbit.calibration import stream
from hf_kbit.calibration.check import check as check_layers
from hf_kbit.calibration.check import rows_of
from hf_kbit.calibration.data import Text, batches_of
from hf_kbit.calibration.evaluation import check, is_text
from hf_kbit.calibration.routed import DenseProjection, opened
from hf_kbit.calibration.sensitivity import check_gradients, gradients
from hf_kbit.calibration.solving import METHODS
from hf_kbit.calibration.trellis_costs import TrellisCosts
from hf_kbit.calibration.writing import draw, write
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import Site
from hf_kbit.plan import selection
from hf_kbit.plan.allocation import Layer, by_rule, config_of, left, spend, stored_weights, units
from hf_kbit.plan.config import TRELLIS, KbitConfig, config_or
from hf_kbit.plan.selection import check_any
from hf_kbit.weight.packing import Recipe
from hf_kbit.weight.tensor import KbitTensor

LOGITS = 1 << 27  # as many at once, with their gradients
SEED = 0  # of the tokens that are drawn
SEQUENCES = 8  # of a text, unless others are asked for


def choose_widths(
    model: PreTrainedModel,
    data: torch.Tensor | Mapping[str, Any] | str | Path | Iterable[str] | None,
    bits: float,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sequences: int = SEQUENCES,
    window: int = 512,
    method: str | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    config: KbitConfig | None = None,
    **arguments: Any,
) -> KbitConfig:
    """A config that gives each layer a width of its own, ``bits`` on average, so that the model loses least.

    What a width costs a layer is estimated from the errors that it makes in its weights and from the gradients of what
    the model predicts on ``data`` (``measure``). Bits go where one for each weight lowers the sum of costs most, until
    none are left. The model is as before when this returns.

    Args:
        model: a causal language model that is not quantized.
        data: some hundred tokens of what ``calibrate`` takes; or int64 ``[length]``, the ids of one text.
        bits: mean width of the weights of the layers to quantize, 2 to 5, with padding; their scales take 0.25 more.
        tokenizer: for all but token ids. Default: that of the model's folder or name.
        sequences: so many of a text at most, evenly spread over it. Token ids are all taken.
        window: tokens that the model sees at once, of a text or of the ids of one; gradients are squared for each
            window by itself. Sequences of ids are taken as they are.
        method: that of ``calibrate``, if it is to follow. Of a trellis ``"feedback"`` takes far more of the errors off
            some layers than off others, so it wants other widths. Nothing changes for levels.
        device: where each layer computes, as for ``calibrate``: a model on a CPU can be larger than the GPU.
        progress: shows a bar on stderr, unless Transformers' bars are disabled.
        config: which layers, levels and scales; of ``module_bits`` only what stays in 16 bits is kept.
        arguments: of ``KbitConfig``, such as ``codebook="int"``, instead of ``config``.

    Returns:
        A copy of ``config`` with other ``bits`` and ``module_bits``.

    Raises:
        TypeError: as for ``calibrate``.
        ValueError: an argument is out of range, the model is quantized or no causal language model, or has no layer to
            quantize.

    Source: the greedy solution of a knapsack whose costs fall ever less (Fox 1966, Discrete optimization via marginal
    analysis); the diagonal of the Fisher matrix as sensitivity as in SqueezeLLM (arXiv:2306.07629), here with tokens
    that are drawn in place of those of the text, so that the divergence is what it estimates.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
    >>> config = choose_widths(model, torch.arange(64), bits=3.5)
    >>> sorted({config.bits, *config.module_bits.values()})[0] >= 2
    True
    """
    config = config_or(config, arguments)
    _check_mean(bits, config)
    if data is None:
        data = write(model, sequences, window, tokenizer=tokenizer, device=device, progress=progress)
    if not isinstance(data, torch.Tensor):
        data = Text(data, tokenizer, sequences, window).ids(model)
    layers = measure(model, data, config, window=window, method=method, device=device, progress=progress)
    return config_of(config, spend(layers, bits))


def _check_mean(bits: float, config: KbitConfig) -> None:
    fewest, *_, most = config.widths
    if not fewest <= bits <= most:
        raise ValueError(f"bits: found {bits}, expected {fewest} to {most}")


def measure(
    model: PreTrainedModel,
    ids: torch.Tensor | Sequence[torch.Tensor],
    config: KbitConfig,
    *,
    window: int = 512,
    method: str | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> dict[str, Layer]:
    """What each width costs each layer that ``config`` would quantize, by name, in nats for all of ``ids``, int64
    ``[length]``, which are cut into windows, or ``[sequences, length]``, or a sequence of ``[length]``, which are not.

    Widths that ``config`` gives do not matter, but for None; the rest is as for ``choose_widths``. The costs are
    estimates of the divergence of what the model predicts with the layer quantized, half the quadratic form of the
    weight's error with the Fisher matrix, of which the diagonal is taken: half the sum of the squares of each weight's
    error times the gradient of the logarithms of the probabilities of tokens that are drawn as the model predicts
    them, one for each place of a window. One backward pass gives that for all layers. Errors of a trellis are those of
    Gaussian weights, or what feedback leaves of them, if that is the ``method`` to follow; then first tokens of
    windows are left out. A projection of experts is one layer: an expert that no token goes to adds nothing to its
    costs.
    """
    if method not in (None, *METHODS):
        raise ValueError(f"method: found {method!r}, expected None or one of {sorted(METHODS)}")
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError("model: found a quantized one, expected one that is not")
    window = window if is_text(ids) else max(2, *map(len, ids))
    check({"model": model.config}, ids, window, window)
    sites, device = _layers(model, config), stream.resolve(device, model)
    names, projections = list(sites), [site for site in sites.values() if site.kind is KbitProjection]
    window = min(window, len(ids)) if is_text(ids) else window
    together = max(LOGITS // (window * model.config.get_text_config().vocab_size), 1)
    rows = ids.split(window) if is_text(ids) else ids
    pieces = batches_of([row.to(model.device) for row in rows if len(row) > 1], together)
    costs = {name: dict.fromkeys(config.widths, 0.0) for name in names}
    feedback = method is not None and not METHODS[method].DIAGONAL
    generator = torch.Generator(device).manual_seed(SEED)
    bar = tqdm(total=len(names) * len(pieces), desc="measuring", disable=not progress)
    with stream.evaluating(model), opened(projections), bar:
        dimensions = check_layers(model, units(model, names), pieces, device)
        check_gradients(model, names, pieces)
        trellises = {}
        if config.codebook == TRELLIS:
            weights = ((name, _weight_of(model.get_submodule(name)).to(device)) for name in names)
            trellises = {name: TrellisCosts(weight, config, feedback) for name, weight in weights}
        for piece in pieces:
            _add_costs(model, piece, config, device, generator, costs, trellises, dimensions, bar.update)
    costs |= {name: own.of_widths() for name, own in trellises.items()}
    for name, found in costs.items():
        if not all(map(math.isfinite, found.values())):
            raise ValueError(f"{name}: found NaN or infinite gradients, expected finite ones")
    return {name: Layer(stored_weights([sites[name]], config), found) for name, found in costs.items()}


def _layers(model: nn.Module, config: KbitConfig) -> dict[str, Site]:
    """Which layers get a width of their own: all that it quantizes but tables, which have ``embedding_bits``."""
    config = replace(config, bits=config.widths[0], module_bits=left(config), embedding_bits=None)
    packable = selection.Packable(model)
    names = packable.choose(config)
    check_any(model, names)
    return {name: packable.sites[name] for name in names}


def _add_costs(
    model, ids: torch.Tensor, config: KbitConfig, device, generator, costs, trellises, dimensions, advance
) -> None:
    """Adds what the layers' widths cost on ``ids``, ``[sequences, length]``, to ``costs``, or to those of
    ``trellises``; ``advance()`` for each."""

    def add(name: str, module: nn.Module, given: list, gradient: torch.Tensor) -> None:
        if isinstance(module, DenseProjection):
            x, rows, offsets = given[:3]
            x = x if rows is None else x[rows]
            fisher = _fisher_of_experts(x, offsets, gradient)
        else:
            x, gradient = (_by_sequences(each, dimensions[name], len(ids)) for each in (given[0], gradient))
            if name in trellises and trellises[name].feedback and x.shape[1] > 1:
                # Without the first token of a sequence, which is unlike all others, as ``sensitivity`` says: of
                # Qwen2.5-Coder-1.5B one gate had a fifth of all costs by it.
                x, gradient = x[:, 1:], gradient[:, 1:]
            fisher = _fisher(x, gradient)
        if name in trellises:
            trellises[name].add(fisher, x, gradient)
        else:
            weight = _weight_of(module).to(gradient.device)
            for width in costs[name]:
                error = _decoded(weight, width, config).sub_(weight).square_()  # in place: experts are large
                costs[name][width] += error.mul_(fisher).sum(dtype=torch.float64).item() / 2
        advance()

    gradients(model, list(costs), ids, device, partial(draw, generator=generator), add)


def _weight_of(module: nn.Module) -> torch.Tensor:
    """``[N, K]``, or ``[E, N, K]`` of experts."""
    if isinstance(module, DenseProjection):
        return module.matrices.detach()
    return (module.weight.T if isinstance(module, Conv1D) else module.weight).detach()


def _by_sequences(x: torch.Tensor, dimension: int | None, sequences: int) -> torch.Tensor:
    """``[sequences, rows, K]``; ``[1, rows, K]`` where tokens of all are read together."""
    rows = rows_of(x, dimension, sequences)
    return x.reshape(1, -1, x.shape[-1]) if rows is None else rows


def _fisher(x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """float32 ``[N, K]``: squares of a weight's gradients, by what its layer was given, ``[sequences, rows, K]``, and
    the gradient of what it made of that, added up over sequences."""
    fisher = torch.zeros((gradient.shape[-1], x.shape[-1]), device=x.device)
    for g, each in zip(gradient, x, strict=True):
        fisher += (g.float().T @ each.float()).square_()
    return fisher


def _fisher_of_experts(x: torch.Tensor, offsets: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """float32 ``[E, N, K]``: that of each expert, whose rows lie between two ``offsets``. Sequences are together: what
    the gradients of two have in common is 0 on average."""
    shares = [slice(*pair) for pair in pairwise(offsets.tolist())]
    return torch.stack([(gradient[own].float().T @ x[own].float()).square_() for own in shares])


@torch.no_grad()
def _decoded(weight: torch.Tensor, width: int, config: KbitConfig) -> torch.Tensor:
    """float32, as the weight ``[N, K]`` or ``[E, N, K]``: that weight after quantizing."""
    how = config.decoding(width, weight.shape, is_table=False)
    packed = Recipe(config.scale, config.transform).quantize(weight, how, "weight")
    return KbitTensor.of(packed, weight.shape, torch.float32).dequantize()


# --- without data ---------------------------------------------------------------------------------


def widths_by_rule(model: PreTrainedModel, bits: float, *, config: KbitConfig | None = None) -> KbitConfig:
    """A config as ``choose_widths`` returns, by the rule for names and shapes (``allocation.by_rule``) that
    ``KbitConfig(bits=3.3)`` takes while a model loads. The model may be on the meta device.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=8, **shape))
    >>> config = widths_by_rule(model, 3.5)
    >>> [config.bits_for(f"model.layers.4.self_attn.{name}_proj") for name in "qkvo"]
    [3, 4, 4, 3]
    """
    config = config or KbitConfig()
    _check_mean(bits, config)
    return config_of(config, by_rule(model, _layers(model, config), bits, config))
