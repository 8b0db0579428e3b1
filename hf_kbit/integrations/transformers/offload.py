"""Quantized layers on disk, and tables in host memory.

accelerate moves what is offloaded to the GPU whenever its layer runs, and keeps it as arrays of numbers, by the names
of parameters. A packed weight on disk is several tensors of a checkpoint, so its layer gets a source of weights of its
own. Of a table on the CPU a GPU needs a few rows, so it stays where it is, and the GPU reads these.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from hf_kbit.integrations.transformers.tying import tied
from hf_kbit.nn.host import keep_on_host, tables
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.weight.tensor import WEIGHT, Packed


def place_of(device_map: object, name: str) -> object:
    """Where a device map puts a module or a tensor, if it says so."""
    if not isinstance(device_map, Mapping):
        return None
    parts = name.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), -1, -1))
    return next((device_map[prefix] for prefix in prefixes if prefix in device_map), None)


def is_on_disk(device_map: object, name: str) -> bool:
    """Whether a device map puts a tensor on disk."""
    return place_of(device_map, name) == "disk"


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


def keep_tables(model: nn.Module, asked: bool) -> None:
    """Keeps tables on the host that a GPU reads: all of them where ``asked``, else those that the device map has put
    on the CPU beside a GPU. These leave the map; if that is one GPU then, accelerate has nothing more to do."""
    places, given_back = getattr(model, "hf_device_map", None), False
    for name, table in tables(model).items():
        waits = place_of(places, name) in ("cpu", torch.device("cpu"))
        hooks = getattr(getattr(table, "_hf_hook", None), "hooks", [getattr(table, "_hf_hook", None)])
        device = next((hook.execution_device for hook in hooks if getattr(hook, "offload", False)), None)
        device = table.weight.device if device is None else torch.device(device)
        if device.type == "cuda" and (asked or waits):
            if waits:
                _without_hooks(table)  # which give it its weight back
                places[name], given_back = device.index, True
            keep_on_host(table, device)
    if given_back and len(set(places.values())) == 1:
        _without_hooks(model)


def _without_hooks(module: nn.Module) -> None:
    from accelerate.hooks import remove_hook_from_module  # which a model without a device map does not need

    remove_hook_from_module(module, recurse=True)
