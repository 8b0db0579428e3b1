"""Quantized layers on disk: each weight is read from the checkpoint whenever its layer runs.

accelerate keeps what is offloaded as arrays of numbers, by the names of parameters. A packed weight is several tensors
of a checkpoint, so its layer gets a source of weights of its own.
"""

from collections.abc import Iterator, Mapping

import torch
from safetensors import safe_open
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
    where the layer is called ``stored``, and ``others`` from accelerate's own."""

    def __init__(self, others: Mapping, layer: KbitWeight, files: Mapping[str, str], stored: str):
        self._others, self._layer, self._files, self._stored = others, layer, files, stored

    def __getitem__(self, name: str) -> torch.Tensor:
        if name != WEIGHT:
            return self._others[name]
        decoding = self._layer.decoding
        tensors = {own: self._read(own) for own in decoding.layout(self._layer.shape)}
        return self._layer.as_tensor(Packed(tensors, decoding))

    def _read(self, own: str) -> torch.Tensor:
        name = f"{self._stored}.{own}"
        with safe_open(self._files[name], framework="pt") as stored:
            return stored.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)


def read_from_disk(model: nn.Module, files: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Has layers on disk read their weights from the files of the checkpoint, where ``stored`` says what each is
    called."""
    ties = tied(model)
    for name, layer in model.named_modules():
        hook = getattr(layer, "_hf_hook", None)
        if isinstance(layer, KbitWeight) and layer.weight.is_meta and getattr(hook, "weights_map", None) is not None:
            hook.weights_map = PackedOnDisk(hook.weights_map, layer, files, stored[ties.get(name, name)])
