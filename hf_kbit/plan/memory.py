"""What a model and its KV cache take, and the widths with which they fit into a memory."""

import inspect
import re
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from hf_kbit.plan import selection
from hf_kbit.plan.allocation import packed_bytes, side_bytes, stored_weights, usual_decoding
from hf_kbit.plan.config import KbitConfig, config_or
from hf_kbit.plan.selection import check_any

USUAL_FOR_TABLES = 5  # bits: in 4, a tied head costs nearly as much as all layers in 4 bits (docs/quality.md)
ENOUGH_FOR_LAYERS = 4  # bits on average, with which tables may take 16
UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


@dataclass(frozen=True)
class Footprint:
    """What a quantized model takes.

    Attributes:
        weights: number of those that get a width, with padding.
        scale_bits: what scales take of each of them.
        widest: of the widths.
        parts: ``{what: bytes}`` of everything else.
    """

    weights: int
    scale_bits: float
    widest: int
    parts: dict[str, int]

    @classmethod
    def of(cls, model: nn.Module, context: int, config: KbitConfig) -> "Footprint":
        """Of a model that keeps ``context`` tokens, quantized as a config says, but for the width of its layers."""
        packable = selection.Packable(model)
        chosen = packable.choose(config)
        tables = packable.tables_in(chosen)
        sites = packable.sites
        layers = [sites[name] for name in chosen if name not in tables]
        check_any(model, layers)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        parts = {
            "what is not quantized": whole - sum(sites[name].weight.nbytes for name in chosen),
            "tables of embeddings": packed_bytes({sites[name]: bits for name, bits in tables.items()}, config),
            "scales of rows and columns": side_bytes(layers, config),
            f"what is kept of {context:,} tokens": cache_bytes(model, context),
        }
        of_scales = usual_decoding(layers[0], config).scale_bits
        return cls(stored_weights(layers, config), of_scales, config.widths[-1], parts)

    def weight_bytes(self, bits: float) -> float:
        """Of weights of so many bits on average, and their scales."""
        return self.weights * (bits + self.scale_bits) / 8

    def bits_in(self, memory: float) -> float:
        """The mean width with which all of it takes so many bytes, the widest at most."""
        bits = (memory - sum(self.parts.values())) * 8 / self.weights - self.scale_bits
        return min(bits, float(self.widest))


def bits_for_memory(
    model: nn.Module,
    memory: int | str,
    *,
    context: int = 0,
    config: KbitConfig | None = None,
    **arguments: Any,
) -> float:
    """The mean width, 2 to 5, with which a model and its KV cache take ``memory`` bytes, for ``choose_widths``; 5
    where there is memory to spare. What computing takes comes on top: about one layer's activations.

    Args:
        model: on any device, also meta, in the dtype that it will have: float16 or bfloat16, as a rule. One that is
            not of Transformers keeps no tokens.
        memory: bytes, or a size such as ``"20GB"`` or ``"800MiB"``.
        context: tokens of the sequence that the cache has room for. Several sequences of so many tokens together take
            as much; more, where layers keep a window or a state of each.
        config: which layers are quantized, and how; its widths do not matter.
        arguments: of ``KbitConfig``, such as ``transform="none"``, instead of ``config``.

    Raises:
        TypeError: as for ``calibrate``.
        ValueError: ``memory`` is no size, or not even 2 bits fit; the message says what is needed. Or the model's
            config does not say what it keeps of tokens.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_hidden_layers": 2}
    >>> with torch.device("meta"):
    ...     model = LlamaForCausalLM(LlamaConfig(vocab_size=1000, **shape)).bfloat16()
    >>> round(bits_for_memory(model, "1.6MB", context=64), 2)
    2.42
    """
    config, memory = config_or(config, arguments), parse_size(memory)
    footprint = Footprint.of(model, context, config)
    bits = footprint.bits_in(memory)
    if bits < (fewest := config.widths[0]):
        least = sum(footprint.parts.values()) + footprint.weight_bytes(fewest)
        raise ValueError(
            f"memory: found {memory:,} bytes, expected {least:,.0f} or more, for what is not "
            f"quantized, tables, scales, the cache of {context:,} tokens and weights of {fewest} bits"
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
    embeddings in 16 bits. Arguments and errors are those of ``bits_for_memory``; a memory that is too small for both
    is an error there alone.

    That is 5 where the other layers would have fewer than 4 bits on average beside tables in 16: what tables take is
    better spent on these then (docs/quality.md). It is what a config says of it, and None if the model has no tables
    to quantize, or there are no levels for them.

    >>> import torch
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
    return USUAL_FOR_TABLES if Footprint.of(model, context, config).bits_in(memory) < ENOUGH_FOR_LAYERS else None


def parse_size(size: int | str, name: str = "memory") -> int:
    """Bytes; errors begin with ``name``.

    >>> parse_size("20GB"), parse_size("1.5 MiB"), parse_size(7)
    (20000000000, 1572864, 7)
    """
    if not isinstance(size, str):
        return size
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kMGT]|[KMGT]i)?B", size)
    if not match:
        raise ValueError(f"{name}: found {size!r}, expected a size such as 20GB or 800MiB")
    return int(float(match[1]) * UNITS[match[2] or ""])


# --- what a model keeps of tokens -----------------------------------------------------------------


def cache_bytes(model: nn.Module, context: int) -> int:
    """What the model keeps of one sequence of ``context`` tokens while it generates, as its config says; 0 if it does
    not generate. An encoder-decoder reads ``context`` tokens on both sides; an encoder that reads no tokens, as much
    as it has positions for."""
    if not context or not isinstance(model, PreTrainedModel) or not model.can_generate():
        return 0
    config, itemsize = model.config.get_text_config(decoder=True), model.dtype.itemsize
    try:
        if getattr(config, "block_types", None):  # recurrent layers, which some versions give ordinary caches
            raise TypeError("block_types name layers that keep no ordinary cache")
        layers = DynamicCache(config=config).layers
        configs = getattr(config, "per_layer_config", None) or [config] * len(layers)
        kept = sum(_kept(layer, own, context, itemsize) for layer, own in zip(layers, configs, strict=True))
        if model.config.is_encoder_decoder:
            reads_tokens = "input_ids" in inspect.signature(model.forward).parameters
            encoded = context if reads_tokens else config.max_source_positions
            kept += len(layers) * encoded * _of_token(config) * itemsize
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"context: found {context:,}, but the config of {type(model).__name__} does not say what the model keeps "
            f"of so many tokens ({type(error).__name__}: {error}); expected 0, and a memory without what its cache "
            "takes"
        ) from error
    return kept


def _kept(layer: object, config: PreTrainedConfig, context: int, itemsize: int) -> int:
    """Bytes that a layer of a cache keeps, by its kind."""
    match type(layer).__name__:
        case "DynamicLayer":
            return context * _of_token(config) * itemsize
        case "DynamicSlidingWindowLayer":
            return min(context, layer.sliding_window - 1) * _of_token(config) * itemsize
        case "DynamicIndexedLayer":
            return context * (_of_token(config) + config.index_head_dim) * itemsize
        case "LinearAttentionLayer":
            convolved, state = _of_state(config)
            return convolved * itemsize + state * 4  # in float32
        case "DummyLayer":
            return 0
        case other:
            raise TypeError(f"{other} is no kind of cache that hf_kbit knows")


def _of_token(config: PreTrainedConfig) -> int:
    """Numbers that a layer of attention keeps of a token: keys and values, or what they are made from."""
    if rank := getattr(config, "kv_lora_rank", None):
        return rank + config.qk_rope_head_dim
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if getattr(config, "multi_query", False):  # as Falcon says it
        heads = config.num_kv_heads if getattr(config, "new_decoder_architecture", False) else 1
    return 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _of_state(config: PreTrainedConfig) -> tuple[int, int]:
    """Numbers that a recurrent layer keeps: inputs of its convolution, and its state."""
    if size := getattr(config, "state_size", None):  # Mamba, Mamba 2
        inner = config.hidden_size * config.expand
        return (inner + 2 * getattr(config, "n_groups", 0) * size) * config.conv_kernel, inner * size
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return (2 * keys + values) * config.linear_conv_kernel_dim, values * config.linear_key_head_dim
