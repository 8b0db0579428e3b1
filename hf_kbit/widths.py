"""Mixed widths: which layers get more bits and which fewer, so that all together take a given size.

The file is long, for the mean that a memory leaves for the weights belongs here, and with it how much a cache takes.
"""

import copy
import inspect
import math
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_outputs import BaseModelOutput
from transformers.pytorch_utils import Conv1D

from hf_kbit.calibration import stream
from hf_kbit.calibration.data import token_ids
from hf_kbit.calibration.experts import DenseProjection, opened
from hf_kbit.calibration.writing import draw, write
from hf_kbit.config import KbitConfig, config_or
from hf_kbit.evaluation import check
from hf_kbit.format import BITS
from hf_kbit.integrations.transformers import selection
from hf_kbit.integrations.transformers.report import USUAL_FOR_TABLES
from hf_kbit.mixing import (
    SCALE_BITS,
    Layer,
    by_rule,
    column_bytes,
    config_of,
    left,
    packed_bytes,
    spend,
    stored_weights,
    units,
)
from hf_kbit.nn.experts import is_projection
from hf_kbit.nn.weight import KbitWeight

ASKED = 8  # tokens that a model reads to tell what it keeps of them
CACHES = ("cache", "past_key_values", "cache_params", "state", "mems")  # names of the cache among a model's outputs
LOGITS = 1 << 27  # as many at once, with their gradients
SEED = 0  # of the tokens that are drawn
SEQUENCES = 8  # of a text, unless others are asked for
ENOUGH_FOR_LAYERS = 4  # bits on average, with which tables may take 16
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def choose_widths(
    model: PreTrainedModel,
    data: torch.Tensor | str | Path | Iterable[str] | None,
    bits: float,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    sequences: int = SEQUENCES,
    window: int = 512,
    device: torch.device | str | None = None,
    progress: bool = False,
    config: KbitConfig | None = None,
    **arguments: Any,
) -> KbitConfig:
    """A config that gives each layer a width of its own, ``bits`` on average, so that the model loses least.

    What a width costs a layer is estimated from the errors that it makes in its weights and from the gradients of what
    the model predicts on ``data`` (``measure``). Costs of layers are taken to add up. Bits go where one for each
    weight lowers the cost most, until none are left. The model is as before when this returns.

    Args:
        model: a causal language model that is not quantized, in eval mode or not.
        data: what the model is for, some hundred tokens of it: all that ``calibrate`` takes, also None, for text that
            the model writes by itself; or int64 ``[length]``, the ids of one text.
        bits: mean width of the weights of the layers to quantize, 2 to 5, with padding; their scales take 0.25 more.
        tokenizer: for all but token ids. Default: that of the model's folder or name.
        sequences: so many of a text at most, evenly spread over it. Token ids are all taken.
        window: tokens that the model sees at once, of a text or of the ids of one; gradients are squared for each
            window by itself. Sequences of ids are taken as they are.
        device: where each layer computes, as for ``calibrate``: a model on a CPU can be larger than the GPU.
        progress: shows a bar on stderr.
        config: which layers, levels and scales; of ``module_bits`` only what stays in 16 bits is kept.
        arguments: of ``KbitConfig``, such as ``codebook="int"``, instead of ``config``.

    Returns:
        A copy of ``config`` with other ``bits`` and ``module_bits``.

    Raises:
        TypeError: ``data`` is neither token ids nor text nor rows of text, or ``config`` and ``arguments`` are not as
            for ``calibrate``.
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
    if not BITS[0] <= bits <= BITS[-1]:
        raise ValueError(f"bits: found {bits}, expected {BITS[0]} to {BITS[-1]}")
    config = config_or(config, arguments)
    if data is None:
        data = write(model, sequences, window, device=device, progress=progress)
    if not isinstance(data, torch.Tensor):
        data = token_ids(data, tokenizer, model, sequences, window)
    layers = measure(model, data, config, window=window, device=device, progress=progress)
    return config_of(config, spend(layers, bits * sum(layer.weights for layer in layers.values())))


def measure(
    model: PreTrainedModel,
    ids: torch.Tensor,
    config: KbitConfig,
    *,
    window: int = 512,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> dict[str, Layer]:
    """What each width costs each layer that ``config`` would quantize, by name, in nats for all of ``ids``, int64
    ``[length]``, which are cut into windows, or ``[sequences, length]``, which are not.

    Widths that ``config`` gives do not matter, but for None. Arguments and errors are those of ``choose_widths``. The
    costs are estimates of the divergence of what the model predicts with the layer quantized, half the quadratic form
    of the weight's error with the Fisher matrix, of which the diagonal is taken: half the sum of the squares of each
    weight's error times the gradient of the logarithms of the probabilities of tokens that are drawn as the model
    predicts them, one for each place of a window. One backward pass gives that for all layers. A projection of experts
    is one layer: an expert that no token goes to adds nothing to its costs.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError("model: found a quantized one, expected one that is not")
    config, window = _of_layers(config), ids.shape[1] if ids.dim() > 1 else window
    check({"model": model.config}, ids, window, window)
    window = min(window, ids.shape[-1])
    names = list(selection.Packable(model).choose(config))
    if not names:
        raise ValueError(f"model: found no linear layer to quantize in {type(model).__name__}")
    device, ids = stream.resolve(device, model), ids.to(model.device)
    together = max(LOGITS // (window * model.config.get_text_config().vocab_size), 1)
    pieces = [piece for piece in _windows(ids, window, together) if piece.shape[1] > 1]
    costs = {name: dict.fromkeys(BITS, 0.0) for name in names}
    weights = {name: stored_weights(model, [name]) for name in names}
    generator = torch.Generator(device).manual_seed(SEED)
    bar = tqdm(total=len(names) * len(pieces), desc="measuring", disable=not progress)
    with stream.evaluating(model), opened(model, [name for name in names if is_projection(model, name)]), bar:
        with torch.no_grad():
            stream.check(model, units(model, names), pieces[0], device)
        for piece in pieces:
            _add_costs(model, piece, config, device, generator, costs, bar)
    for name, found in costs.items():
        if not all(map(math.isfinite, found.values())):
            raise ValueError(f"{name}: found NaN or infinite gradients, expected finite ones")
    return {name: Layer(weights[name], costs[name]) for name in names}


def _of_layers(config: KbitConfig) -> KbitConfig:
    """Which layers get a width of their own: all that it quantizes but tables, which have ``embedding_bits``."""
    return replace(config, bits=BITS[0], module_bits=left(config), embedding_bits=None)


def _windows(ids: torch.Tensor, window: int, together: int) -> Iterator[torch.Tensor]:
    """``[n, window]``, so many at once, and what is left over; sequences as they are."""
    whole = len(ids) // window * window
    if ids.dim() > 1:
        yield from ids.split(together)
    else:
        if whole:
            yield from ids[:whole].view(-1, window).split(together)
        yield ids[None, whole:]


def _add_costs(model, ids: torch.Tensor, config: KbitConfig, device, generator, costs: dict, bar: tqdm) -> None:
    """Adds what the layers' widths cost on ``ids``, ``[sequences, length]``, to ``costs``."""
    head = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)

    def watch(name, module, args, keywords, output):
        if output.requires_grad:  # the second of two times that it is computed
            given = [x.detach() if isinstance(x, torch.Tensor) else x for x in (args or keywords.values())]
            output.register_hook(lambda gradient: add(name, module, given, gradient))

    def add(name: str, module: nn.Module, given: list, gradient: torch.Tensor) -> None:
        if isinstance(module, DenseProjection):
            weight, fisher = module.matrices, _fisher_of_experts(*given[:3], gradient)
        else:
            weight = module.weight.T if isinstance(module, Conv1D) else module.weight
            fisher = _fisher(given[0], gradient, len(ids))
        for width in costs[name]:
            error = _decoded(weight, width, config).sub_(weight).square_()  # in place: experts are large
            costs[name][width] += error.mul_(fisher).sum(dtype=torch.float64).item() / 2
        bar.update()

    hooks = [model.get_submodule(name).register_forward_hook(partial(watch, name), with_kwargs=True) for name in costs]
    try:
        parts = (*units(model, list(costs)), *([head] if head else []))
        with torch.enable_grad(), stream.recomputed(model, parts, device) as anchor:
            logits = stream.forward_pass(model, ids).logits
            probabilities = logits.detach().to(device).float().softmax(-1).flatten(0, -2)
            # The gradient of the logarithm of a probability by logits: 1 at the token, less all probabilities.
            drawn = draw(probabilities, generator)
            gradient = probabilities.neg_().scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32))
            torch.autograd.grad(logits, anchor, gradient.view_as(logits).to(logits))
    finally:
        for hook in hooks:
            hook.remove()


def _fisher(x: torch.Tensor, gradient: torch.Tensor, sequences: int) -> torch.Tensor:
    """float32 ``[N, K]``: squares of a weight's gradients, by what its layer was given and the gradient of what it
    made of that, added up over sequences."""
    sequences = sequences if x.dim() > 2 and len(x) == sequences else 1  # else tokens of all are read together
    fisher = torch.zeros((gradient.shape[-1], x.shape[-1]), device=x.device)
    for g, each in zip(
        gradient.reshape(sequences, -1, len(fisher)), x.reshape(sequences, -1, x.shape[-1]), strict=True
    ):
        fisher += (g.float().T @ each.float()).square_()
    return fisher


def _fisher_of_experts(x: torch.Tensor, rows: torch.Tensor | None, offsets, gradient: torch.Tensor) -> torch.Tensor:
    """float32 ``[E, N, K]``: that of each expert, for what ``ops.gemm_experts`` takes. Sequences are together: what
    the gradients of two have in common is 0 on average."""
    x, bounds = x if rows is None else x[rows], offsets.tolist()
    shares = [slice(*pair) for pair in pairwise(bounds)]
    return torch.stack([(gradient[own].float().T @ x[own].float()).square_() for own in shares])


@torch.no_grad()
def _decoded(weight: torch.Tensor, width: int, config: KbitConfig) -> torch.Tensor:
    """float32, as the weight ``[N, K]`` or ``[E, N, K]``: that weight after quantizing."""
    *lead, out_features, in_features = weight.shape
    how = {"codebook": config.levels_for(width), "scale": config.scale, "transform": config.transform}
    layer = KbitWeight(in_features, out_features, width, device="meta", lead=tuple(lead), **how)
    layer.load(layer.quantize(weight))
    return layer.dequantize(torch.float32)


# --- without data ---------------------------------------------------------------------------------


def widths_by_rule(model: PreTrainedModel, bits: float, *, config: KbitConfig | None = None) -> KbitConfig:
    """A config with ``bits`` on average, as ``choose_widths``, by a rule that looks at names and shapes alone.

    More bits get keys and values that several heads share, the first layers of the model, and what is no attention in
    the last ones. It costs nothing, and needs no weights; ``KbitConfig(bits=3.3)`` takes it while a model loads.

    Args:
        model: on any device, also meta.
        bits: 2 to 5, as for ``choose_widths``.
        config: as for ``choose_widths``.

    Raises:
        ValueError: ``bits`` is out of range, or the model has no layer to quantize.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_hidden_layers=8, **shape))
    >>> config = widths_by_rule(model, 3.5)
    >>> [config.bits_for(f"model.layers.4.self_attn.{name}_proj") for name in "qkvo"]
    [3, 4, 4, 3]
    """
    if not BITS[0] <= bits <= BITS[-1]:
        raise ValueError(f"bits: found {bits}, expected {BITS[0]} to {BITS[-1]}")
    config = config or KbitConfig()
    names = list(selection.Packable(model).choose(_of_layers(config)))
    if not names:
        raise ValueError(f"model: found no linear layer to quantize in {type(model).__name__}")
    return config_of(config, by_rule(model, names, bits))


# --- memory ---------------------------------------------------------------------------------------


def bits_for_memory(
    model: nn.Module,
    memory: int | str,
    *,
    context: int = 0,
    config: KbitConfig | None = None,
    **arguments: Any,
) -> float:
    """The mean width with which a model and its KV cache take ``memory`` bytes.

    Counted are the weights of the layers to quantize with their scales, everything else as the model has it, and what
    it keeps of ``context`` tokens, which it is asked for: keys and values, in the window of layers that have one, or
    states. What computing takes comes on top: about one layer's activations.

    Args:
        model: on any device, also meta, in the dtype that it will have: float16 or bfloat16, as a rule. One that is
            not of Transformers keeps no tokens.
        memory: bytes, or a size such as ``"20GB"`` or ``"800MiB"``.
        context: tokens of the sequence that the cache has room for. Several sequences of so many tokens together take
            as much; more, where layers keep a window or a state of each.
        config: which layers are quantized, and how; its widths do not matter.
        arguments: of ``KbitConfig``, such as ``transform="none"``, instead of ``config``.

    Returns:
        2 to 5, for ``choose_widths``; 5 where there is memory to spare.

    Raises:
        TypeError: ``config`` and ``arguments`` are not as for ``calibrate``.
        ValueError: ``memory`` is no size, or not even 2 bits fit; the message says what is needed. Or the model cannot
            be asked what it keeps.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape)).bfloat16()
    >>> round(bits_for_memory(model, "1.6MB", context=64), 2)
    2.42
    """
    config, memory = config_or(config, arguments), parse_size(memory)
    bits, least = _mean_and_least(model, selection.Packable(model), memory, cache_bytes(model, context), config)
    if bits < BITS[0]:
        raise ValueError(
            f"memory: found {memory:,} bytes, expected {least:,.0f} or more, for what is not quantized, tables, "
            f"column scales, the cache of {context:,} tokens and weights of {BITS[0]} bits"
        )
    return bits


def embedding_bits_for_memory(
    model: nn.Module,
    memory: int | str,
    *,
    context: int = 0,
    config: KbitConfig | None = None,
    **arguments: Any,
) -> int | None:
    """The ``embedding_bits`` with which a model and its KV cache best take ``memory`` bytes; None leaves tables of
    embeddings in 16 bits.

    That is 5 where the other layers would have fewer than 4 bits on average beside tables in 16: what tables take is
    better spent on these then (docs/quality.md). Arguments and errors are those of ``bits_for_memory``, which counts
    tables as a config has them; ``memory`` that is too small for both is an error there alone.

    Returns:
        Of a config that says it, its ``embedding_bits``. None if the model has no tables to quantize, or there are no
        levels for them.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape)).bfloat16()
    >>> [embedding_bits_for_memory(model, size) for size in ("1.6MB", "2MB")]
    [5, None]
    """
    config, memory = config_or(config, arguments), parse_size(memory)
    if config.embedding_bits is not None:
        return config.embedding_bits
    packable = selection.Packable(model)
    try:
        packed = replace(config, embedding_bits=USUAL_FOR_TABLES)
    except ValueError:  # levels of one's own, for another width
        return None
    if not packable.tables_in(packable.choose(packed)).keys() - packable.choose(config).keys():
        return None
    bits, _ = _mean_and_least(model, packable, memory, cache_bytes(model, context), config)
    return USUAL_FOR_TABLES if bits < ENOUGH_FOR_LAYERS else None


def _mean_and_least(
    model: nn.Module, packable: selection.Packable, memory: int, cache: int, config: KbitConfig
) -> tuple[float, float]:
    """The mean width of linear layers, 5 at most, and the bytes that all takes with 2 bits."""
    chosen = packable.choose(config)
    tables = packable.tables_in(chosen)
    layers = [name for name in chosen if name not in tables]
    if not layers:
        raise ValueError(f"model: found no linear layer to quantize in {type(model).__name__}")
    weights = stored_weights(model, layers)
    rest = rest_bytes(model, chosen) + packed_bytes(model, tables, config) + column_bytes(model, layers, config)
    rest += cache
    bits = (memory - rest) * 8 / weights - SCALE_BITS
    return min(bits, float(BITS[-1])), rest + weights * (BITS[0] + SCALE_BITS) / 8


def parse_size(size: int | str, name: str = "memory") -> int:
    """Bytes; errors begin with ``name``.

    Raises:
        ValueError: it is a text, and no size.

    >>> parse_size("20GB"), parse_size("1.5 MiB"), parse_size(7)
    (20000000000, 1572864, 7)
    """
    if not isinstance(size, str):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]|[KMGT]i)?B", size)
    if not match:
        raise ValueError(f"{name}: found {size!r}, expected a size such as 20GB or 800MiB")
    return int(float(match[1]) * UNITS[match[2] or ""])


def rest_bytes(model: nn.Module, chosen: Iterable[str]) -> int:
    """Of all parameters but the weights of these layers."""
    weights = sum(selection.dense_weight(model, name).nbytes for name in chosen)
    return sum(parameter.nbytes for parameter in model.parameters()) - weights


def cache_bytes(model: nn.Module, context: int) -> int:
    """What the model keeps of one sequence of ``context`` tokens while it generates; 0 if it does not generate.

    The model is asked: one of its configuration, on the meta device, reads a few tokens, and each layer of the cache
    takes in the others by its own ``update``. So sliding windows, latent attention, recurrent states and layers
    without a cache count as what they keep. An encoder-decoder reads ``context`` tokens on both sides, or as much as
    its encoder has positions for, where that reads no tokens.

    Raises:
        ValueError: the model does not run on the meta device, or not on tokens alone.
    """
    if not context or not isinstance(model, PreTrainedModel) or not model.can_generate():
        return 0
    try:
        cache, states = _cache(model, min(context, ASKED), context)
        growing = getattr(cache, "self_attention_cache", cache)
        layers = getattr(growing, "layers", [])
        if all(type(part).__module__ == Cache.__module__ for part in (growing, *layers)):
            for layer in layers:
                _grow(layer, context - min(context, ASKED))
        else:  # a kind of its own, so all of the tokens are read: recurrent models do that one after another
            cache, states = _cache(model, context, context)
    except Exception as error:  # whatever a forward does on the meta device, or without what it needs
        raise ValueError(
            f"context: found {context:,}, but {type(model).__name__} cannot be asked what it keeps of so many tokens "
            f"({type(error).__name__}: {error}); expected 0, and a memory without what its cache takes"
        ) from error
    return _bytes_held([cache, states])


def _cache(model: PreTrainedModel, tokens: int, encoded: int) -> tuple[object, list[torch.Tensor]]:
    """The cache of a model like this one after so many tokens, and the states that its modules keep themselves; all
    on the meta device."""
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config)).to(model.dtype).eval()
        decoded = torch.zeros(1, tokens, dtype=torch.int64)
        given = {"input_ids": decoded}
        if twin.config.is_encoder_decoder:
            given = {"decoder_input_ids": decoded, "input_ids": torch.zeros(1, encoded, dtype=torch.int64)}
            if not stream.reads_tokens(model):
                states = torch.zeros(1, twin.config.max_source_positions, twin.config.hidden_size, dtype=model.dtype)
                given = {"decoder_input_ids": decoded, "encoder_outputs": BaseModelOutput(states)}
    twin.set_attn_implementation("eager")  # others need a GPU, or values
    for module in twin.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None  # it looks at values
    before = {id(state) for state in _own_states(twin)}
    while True:
        try:
            with torch.no_grad():
                outputs = twin(**given, use_cache=True)
        except (NotImplementedError, RuntimeError) as error:
            _pass_by(twin, error)
        else:
            break
    cache = next((outputs[name] for name in CACHES if outputs.get(name) is not None), None)
    return cache, [state for state in _own_states(twin) if id(state) not in before]


def _own_states(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules have as plain attributes."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]


def _pass_by(model: nn.Module, error: Exception) -> None:
    """Has modules of the class in which ``error`` arose return their input: routed experts, say, need values to run.
    Raises the error again if they have to do with the cache."""
    own = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    failed = [module for module in own if isinstance(module, nn.Module)]
    if not failed or {*CACHES, "past_key_value"} & set(inspect.signature(failed[-1].forward).parameters):
        raise error
    for module in model.modules():
        if type(module) is type(failed[-1]):
            module.forward = lambda *args, **kwargs: next(iter((*args, *kwargs.values())))


def _grow(layer: object, tokens: int) -> None:
    """Has a layer of a cache take in so many tokens more, if it keeps any."""

    def more(kept: torch.Tensor) -> torch.Tensor:
        return kept.new_empty(*kept.shape[:-2], tokens, kept.shape[-1])

    if getattr(layer, "keys", None) is not None:
        layer.update(more(layer.keys), more(layer.values))
    if getattr(layer, "indexer_keys", None) is not None:
        layer.update_indexer(more(layer.indexer_keys))


def _bytes_held(whole: object) -> int:
    """Of all tensors but single numbers that an object holds, however deep, each once."""
    waiting, seen, size = [whole], {}, 0
    while waiting:
        part = waiting.pop()
        if id(part) in seen:
            continue
        seen[id(part)] = part
        if isinstance(part, torch.Tensor):
            size += part.nbytes if part.dim() else 0
        elif isinstance(part, Mapping):
            waiting += part.values()
        elif isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, Cache) or type(part).__module__.startswith(Cache.__module__.partition(".")[0]):
            waiting += vars(part).values()
    return size
