"""Keys and values in tensors of one length, at addresses that a CUDA graph can hold."""

import inspect

from torch import Tensor
from transformers import GenerationMixin, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

LENGTHS = 64  # of caches are multiples of it: attention kernels want aligned masks

# What models call their cache: past_key_values before Transformers 5.24.
CACHE = "cache"
if CACHE not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
    CACHE = "past_key_values"

# Layers of Transformers' caches that keep the keys and values of tokens, or none.
SUPPORTED_LAYERS = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    if hasattr(cache_utils, name)
)


class StaticLayer(CacheLayerMixin):
    """A layer's keys and values, ``[batch, heads, length, size]``, known up to ``position``.

    A layer with a window keeps all of them too: the model's mask, made for this length, leaves out what is too old.
    """

    is_compileable, is_sliding = True, False

    def __init__(self, keys: Tensor, values: Tensor, seen: int, length: int, position: Tensor):
        self.is_initialized = True
        self.position = position  # int64, a scalar that all layers share, counted up at the end of a step
        self.keys, self.values = (_padded(states, seen, length) for states in (keys, values))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        self.keys.index_copy_(2, self.position[None], key_states)
        self.values.index_copy_(2, self.position[None], value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> Tensor:
        return self.position

    def get_max_length(self) -> int:
        return self.keys.shape[2]


def _padded(states: Tensor, seen: int, length: int) -> Tensor:
    """``states`` of the last tokens of ``seen`` ones, all there are of a window, at their places among ``length``."""
    padded = states.new_zeros(*states.shape[:2], length, states.shape[3])
    padded[:, :, seen - states.shape[2] : seen] = states
    return padded


def static_cache(cache: Cache, new_tokens: int, position: Tensor) -> Cache:
    """Moves the keys and values of ``cache`` to one with room for new tokens, the first of them at ``position``."""
    seen = int(position)
    length = -(-(seen + new_tokens) // LENGTHS) * LENGTHS
    layers = []
    for layer in cache.layers:
        if layer.keys is not None:
            static = StaticLayer(layer.keys, layer.values, seen, length, position)
            layer.keys = layer.values = None  # so that no more than one layer is there twice
            layer = static
        layers.append(layer)
    return Cache(layers=layers)
