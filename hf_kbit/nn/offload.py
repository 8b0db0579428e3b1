"""What accelerate keeps of a layer that it offloads: the tensors of a state dict, of which one value is to be made."""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from hf_kbit.weight.tensor import WEIGHT, KbitTensor, Packed


class Kept(Mapping):
    """What accelerate keeps of a layer that it offloads, by the names of a state dict: with the weight as one value,
    which goes into the layer's parameter."""

    def __init__(self, kept: Mapping[str, torch.Tensor], layer: nn.Module):
        self._kept, self._layer = kept, layer

    def __getitem__(self, name: str) -> torch.Tensor:
        if name != WEIGHT or isinstance(self._kept.get(name), KbitTensor):
            return self._kept[name]
        decoding = self._layer.decoding
        tensors = {own: self._kept[own] for own in decoding.layout(self._layer.shape)}
        return self._layer.as_tensor(Packed(tensors, decoding))

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


def read_kept(layer: nn.Module, hook) -> None:
    """Has accelerate's hook of a layer read its weight as one value."""
    for each in getattr(hook, "hooks", [hook]):  # several are one, in sequence
        kept = getattr(each, "weights_map", None)
        if kept is not None and not isinstance(kept, Kept):
            each.weights_map = Kept(kept, layer)
