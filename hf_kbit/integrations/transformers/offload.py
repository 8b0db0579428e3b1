"""Quantized layers on disk: each weight is read from the checkpoint whenever its layer runs.

accelerate keeps what is offloaded as arrays of numbers, by the names of parameters. A packed weight is several tensors
of a checkpoint, so its layer gets a source of weights of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from hf_kbit.integrations.transformers.tying import tied
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.weight.tensor import WEIGHT, Packed


def is_on_disk(device_map: object, name: str) -> bool:
    """Whether a device map puts a tensor on disk."""
    if not isinstance(device_map, Mapping):
        return False
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next((device_map[prefix] for prefix in prefixes if prefix in device_map), None) == "disk"


class PackedOnDisk(Mapping):
    """What ``weights_map`` of accelerate's hook is, tensors of a layer by their names: the weight from the checkpoint,
    as ``read`` gives its tensors, and ``others`` from accelerate's own."""

    def __init__(self, others: Mapping, layer: KbitWeight, read: Callable[[], Mapping[str, torch.Tensor]]):
        self._others, self._layer, self._read = others, layer, read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name != WEIGHT:
            return self._others[name]
        return self._layer.as_tensor(Packed(self._read(), self._layer.decoding))

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)


def read_from_disk(model: nn.Module, read: Callable[[str], Mapping[str, torch.Tensor]]) -> None:
    """Has layers on disk read their weights from the files of the checkpoint, as ``read`` does by a layer's name."""
    ties = tied(model)
    for name, layer in model.named_modules():
        hook = getattr(layer, "_hf_hook", None)
        if isinstance(layer, KbitWeight) and layer.weight.is_meta and getattr(hook, "weights_map", None) is not None:
            hook.weights_map = PackedOnDisk(hook.weights_map, layer, partial(read, ties.get(name, name)))
