"""Keys and values in tensors that stay where they are: what a CUDA graph reads and writes."""

import inspect

from torch import Tensor
from transformers import GenerationMixin, cache_utils
from transformers.cache_utils import Cache, CacheLayerMixin

ROOM = 64  # lengths are multiples of it: attention kernels want aligned masks

# What models call their cache: past_key_values before Transformers 5.24.
CACHE = "cache"
if CACHE not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
    CACHE = "past_key_values"

# Layers of Transformers' caches whose keys and values are those of the tokens, or that have none.
GROWING = tuple(
    getattr(cache_utils, name)
    for name in ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
    if hasattr(cache_utils, name)
)


class Places(CacheLayerMixin):
    """A layer's keys and values, ``[batch, heads, length, size]``, of which those before ``position`` are known.

    A layer that sees a window has all of them too; its mask, which the model makes for this length, leaves out others.
    """

    is_compileable, is_sliding = True, False

    def __init__(self, keys: Tensor, values: Tensor, seen: int, length: int, position: Tensor):
        self.is_initialized = True
        self.position = position  # int64, a scalar that all layers share, of which a step's last kernel makes the next
        self.keys, self.values = (_widened(states, seen, length) for states in (keys, values))

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


def _widened(states: Tensor, seen: int, length: int) -> Tensor:
    """Of a window there are only the last ones, which go where they would be among all."""
    places = states.new_zeros(*states.shape[:2], length, states.shape[3])
    places[:, :, seen - states.shape[2] : seen] = states
    return places


def with_room(cache: Cache, tokens: int, position: Tensor) -> Cache:
    """The keys and values of ``cache``, which is emptied, with room for so many more; ``position`` is the next one."""
    seen = int(position)
    length = -(-(seen + tokens) // ROOM) * ROOM
    layers = []
    for layer in cache.layers:
        if layer.keys is not None:
            places = Places(layer.keys, layer.values, seen, length, position)
            layer.keys = layer.values = None  # so that no more than one layer is there twice
            layer = places
        layers.append(layer)
    return Cache(layers=layers)
