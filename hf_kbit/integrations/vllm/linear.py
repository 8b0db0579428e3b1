"""Linear layers in vLLM, which makes one of several that have their input in common, such as q, k and v.

These may differ in kind, width, levels and transform, or stand in 16 bits. So the parameters of the layer are only
places where tensors arrive, to be collected; when all are there, those of each source become a part: a ``KbitLinear``
or an ``nn.Linear`` of the rows and columns that this process has of it. The tensors of a trellis are cut together, as
soon as all of a source are there.
"""

from collections.abc import Callable
from types import MethodType

import torch
from torch import nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import LinearMethodBase

from hf_kbit.files import exl3
from hf_kbit.format.decoding import WORDS, Decoding, ScalarDecoding
from hf_kbit.format.spec import BLOCK_SIZE
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.weight.tensor import KbitTensor, Packed, as_parameter

PACKED, DTYPES = ScalarDecoding.names, (torch.int32, torch.uint8, torch.uint8)
SHARDS = {"q": 0, "k": 1, "v": 2}


class KbitRows(KbitLinear):
    """What a process has of a weight that decodes in blocks of rows: these blocks, whose outputs from ``first`` on are
    its own, ``count`` of them."""

    def __init__(self, weight: KbitTensor, first: int, count: int):
        rows, columns = weight.matrix
        super().__init__(columns, rows, bias=False, device="meta")
        self.weight = as_parameter(weight)
        self.first, self.count = first, count

    is_whole = property(lambda self: self.count == self.parts["matrix"][0])

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        parts = self.parts
        multiply = parts["kind"].product_int8 if self.inputs else parts["kind"].product
        return self.own(multiply(x, parts, bias if self.is_whole else None), bias)

    def own(self, y: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Of outputs of all rows this process's; bias is in them where they are all its own."""
        if self.is_whole:
            return y
        y = y[..., self.first : self.first + self.count].contiguous()
        return y if bias is None else y + bias


class KbitLinearMethod(LinearMethodBase):
    """Loads and runs a layer. ``decodings`` are by names of sources, in order: None for one in 16 bits, and none at
    all for a head to which a table gives its weight. ``inputs`` are those of ``KbitProduct``."""

    def __init__(self, decodings: dict[str, Decoding | None], inputs: str | None = None):
        super().__init__()
        self.decodings, self.inputs = decodings, inputs

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **settings,
    ) -> None:
        self.rows, self.columns, self.all_columns = output_partition_sizes, input_size_per_partition, input_size
        self.dtype, self.all_rows = params_dtype, output_size
        for name, decoding in self.decodings.items():
            check_columns(name, self.columns, self.all_columns, decoding)
        # Of sources from one on, before another: tensors, or what has become of them.
        self.arrived: dict[tuple[int, int], dict[str, torch.Tensor] | list[KbitRows]] = {}
        self.places = dict(zip(PACKED, DTYPES, strict=True))
        if any(map(read_whole, self.decodings.values())):
            self.places |= dict.fromkeys(exl3.NAMES, torch.int16)
        for name, dtype in self.places.items():
            place = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            # vLLM keeps what it can load again for as long as the layer lives, and knows bound methods of it alone.
            place.weight_loader = MethodType(self._loader(name), layer)
            layer.register_parameter(name, place)

    def _loader(self, name: str) -> Callable:
        def arrive(layer, place, loaded, shard=None):
            self._arrive(layer, name, place, loaded, shard)

        return arrive

    def _arrive(self, layer: nn.Module, name: str, place: nn.Parameter, loaded: torch.Tensor, shard=None) -> None:
        """Keeps what this process has of a tensor; ``shard`` is its source, or those that are one on disk."""
        if shard is None:
            shard = tuple(range(len(self.rows)))
        sources = shard if isinstance(shard, tuple) else (SHARDS.get(shard, shard),)
        if not all(isinstance(source, int) for source in sources):
            raise ValueError(f"{list(self.decodings)}: found the part {shard!r}, expected a number or {list(SHARDS)}")
        key = sources[0], sources[-1] + 1
        if name in exl3.MARKS:  # which headers were asked for
            return
        if name in exl3.NAMES:
            arrived = self.arrived.setdefault(key, {})
            arrived[name] = loaded.to(place.device, copy=True)
            if exl3.is_whole(arrived):
                self.arrived[key] = self._parts_of(layer, sources, exl3.tensors_as_ours(arrived))
            return
        if name != "weight_columns":
            loaded = self._own_rows(layer, loaded, sources)
        rank = getattr(layer, "tp_rank", 0)  # a head, which has all columns, has none in vLLM 0.26
        loaded = own_columns(loaded, rank, self.columns, self.all_columns)
        here = loaded.to(place.device, copy=True).contiguous()
        self.arrived.setdefault(key, {})[name] = here

    def _name(self, sources: tuple[int, ...]) -> str:
        """What these are called on disk, where several may be one."""
        names = list(self.decodings)
        if len(names) == len(self.rows):
            return names[sources[0]]
        if len(names) > 2:
            raise ValueError(f"{names}: found trellises of {len(self.rows)} parts, expected one each, or two in all")
        return names[0 if sources[0] == 0 else -1]

    def _spans(self, layer: nn.Module, sources: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        """How many rows sources have on disk, and between which places this process has them; those that follow each
        other are one span."""
        # In vLLM keys and values that several processes have in common count as often.
        processes, copies = self.all_rows // sum(self.rows), getattr(layer, "num_kv_head_replicas", 1)
        end, spans = 0, []
        for source in sources:
            shards, own = processes // (copies if source > 0 else 1), self.rows[source]
            start = end + layer.tp_rank * shards // layer.tp_size * own
            if spans and spans[-1][1] == start:
                spans[-1] = spans[-1][0], start + own
            else:
                spans.append((start, start + own))
            end += shards * own
        return end, spans

    def _own_rows(self, layer: nn.Module, tensor: torch.Tensor, sources: tuple[int, ...]) -> torch.Tensor:
        """Those that this process has of each source."""
        rows, spans = self._spans(layer, sources)
        if len(tensor) != rows:
            raise ValueError(f"{list(self.decodings)}: found a tensor of {len(tensor)} rows, expected {rows}")
        parts = [tensor[start:stop] for start, stop in spans]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _parts_of(
        self, layer: nn.Module, sources: tuple[int, ...], tensors: dict[str, torch.Tensor]
    ) -> list[KbitRows]:
        """What this process has of a weight that was read whole."""
        name, (rows, spans) = self._name(sources), self._spans(layer, sources)
        decoding = self.decodings[name]
        packed, unit = whole_of(name, tensors, decoding, (rows, self.all_columns)), decoding.units[0]
        parts = []
        for start, stop in spans:
            first = start // unit * unit
            if (start, stop) == (0, rows):
                weight = KbitTensor.of(packed, (rows, self.all_columns), self.dtype)
            else:
                whole = KbitTensor.of(packed, (-(-rows // unit) * unit, self.all_columns), self.dtype)
                weight = whole.rows(0, first, -(-stop // unit) * unit).each(torch.clone)
            if self.columns != self.all_columns:
                place = layer.tp_rank * self.columns
                weight = weight.cut_columns(place, place + self.columns).each(torch.clone)
            part = KbitRows(weight, start - first, stop - start)
            part.take_inputs(self.inputs)
            parts.append(part)
        return parts

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not self.decodings:
            return
        ranges, names = sorted(self.arrived), list(self.decodings)
        if [0, *(end for _, end in ranges)] != [*(first for first, _ in ranges), len(self.rows)]:
            raise ValueError(f"{names}: found weights {ranges} of {len(self.rows)}, expected all")
        if len(names) == 1:  # one on disk
            names *= len(ranges)
        layer.parts = nn.ModuleList()
        for name, sources in zip(names, ranges, strict=True):
            arrived = self.arrived.pop(sources)
            layer.parts.extend(arrived if isinstance(arrived, list) else [self._part(name, arrived)])
        for name in self.places:
            del layer._parameters[name]
        layer.weight = whose_device(layer.parts[0])

    def _part(self, name: str, tensors: dict[str, torch.Tensor]) -> nn.Linear:
        if read_whole(decoding := self.decodings[name]):
            raise ValueError(f"{name}: found {sorted(tensors)} alone, expected {list(decoding.names)}")
        if decoding is not None:
            packed = packed_of(name, tensors, decoding)
            part = KbitLinear(self.columns, len(packed.tensors[WORDS]), False, decoding.bits, device="meta")
            part.load(packed)
            part.take_inputs(self.inputs)
        else:
            part = nn.Linear(self.columns, len(tensors["weight"]), False, device="meta")
            part.weight = nn.Parameter(tensors["weight"].to(self.dtype), requires_grad=False)
        return part

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = [part.count if isinstance(part, KbitRows) else part.out_features for part in layer.parts]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        parts = list(zip(layer.parts, biases, strict=True))
        group = iter(_group_products(x, [(part, own) for part, own in parts if _is_of_group(part)]))
        of_rows = iter(_rows_products(x, [(part, own) for part, own in parts if isinstance(part, KbitRows)]))
        products = []
        for part, own in parts:
            if isinstance(part, KbitRows):
                products.append(next(of_rows))
            else:
                products.append(next(group) if _is_of_group(part) else F.linear(x, part.weight, own))
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


def _is_of_group(part: nn.Linear) -> bool:
    """Whether ``gemm_group`` multiplies by it."""
    return isinstance(part, KbitLinear) and not isinstance(part, KbitRows)


def _group_products(x: torch.Tensor, parts: list[tuple]) -> list[torch.Tensor]:
    """Of parts and their biases."""
    of_each = [_operands(part, bias) for part, bias in parts]
    return torch.ops.hf_kbit.gemm_group(x, *map(list, zip(*of_each, strict=True))) if parts else []


def _rows_products(x: torch.Tensor, parts: list[tuple]) -> list[torch.Tensor]:
    """The same of weights that have a trellis, at once if there are several that decode alike."""
    if len({part.parts["how"] for part, _ in parts}) != 1 or len(parts) == 1:
        return [part.product(x, bias) for part, bias in parts]
    fused = [bias if part.is_whole else None for part, bias in parts]
    weights = [part.parts for part, _ in parts]
    of_all = weights[0]["kind"].products(x, fused, weights, parts[0][0].inputs is not None)
    return [part.own(y, bias) for y, (part, bias) in zip(of_all, parts, strict=True)]


def _operands(part: KbitLinear, bias: torch.Tensor | None) -> tuple:
    """What ``gemm_group`` wants of a weight."""
    weight = part.weight.parts
    columns = weight["columns"]
    packed = weight["words"], weight["absmax"], weight["codebook"]
    inverses = part.find_inverses(weight) if part.inputs else None
    return *packed, bias, part.out_features, columns, int(columns is not None), inverses


def whose_device(part: nn.Module) -> nn.Parameter:
    """A tensor of a layer, for vLLM wants to know the device, and may move what it finds: no packed weight."""
    return nn.Parameter(getattr(part.weight, "words", part.weight.data), requires_grad=False)


def read_whole(decoding: Decoding | None) -> bool:
    """Whether the tensors of a weight are cut together: those of one that has a trellis."""
    return decoding is not None and decoding.read_whole


def check_columns(name: str, columns: int, all_columns: int, decoding: Decoding | None) -> None:
    """Refuses to divide the columns of a weight among processes but in whole blocks."""
    unit = BLOCK_SIZE if decoding is None else decoding.units[1]
    if columns < all_columns and columns % unit:
        raise ValueError(
            f"{name}: found {all_columns} columns for {all_columns // columns} processes, expected a multiple of "
            f"{unit} for each"
        )


def own_columns(tensor: torch.Tensor, rank: int, columns: int, all_columns: int) -> torch.Tensor:
    """Of planes, scales of blocks or of columns, or 16-bit weights, those of the columns that a process has."""
    if columns == all_columns:
        return tensor
    of_block = tensor.shape[-1] * BLOCK_SIZE // all_columns
    blocks = columns // BLOCK_SIZE
    return tensor.narrow(-1, rank * blocks * of_block, blocks * of_block)


def packed_of(name: str, tensors: dict[str, torch.Tensor], decoding: Decoding) -> Packed:
    """The tensors of a packed weight as one; raises if one is missing, or of another dtype."""
    expected = dict(zip(PACKED, DTYPES if decoding.transformed else DTYPES[:2], strict=False))
    found = {own: tensor.dtype for own, tensor in tensors.items()}
    if found != expected:
        raise ValueError(f"{name}: found {found}, expected {expected}")
    return Packed(tensors, decoding)


def whole_of(name: str, tensors: dict[str, torch.Tensor], decoding: Decoding, shape: tuple[int, ...]) -> Packed:
    """The tensors of a weight that is read whole as one; raises if they are not those of its shape and width, as where
    vLLM has cut them."""
    found = {own: (tensor.dtype, tuple(tensor.shape)) for own, tensor in tensors.items()}
    if found != (expected := decoding.layout(shape)):
        raise ValueError(f"{name}: found {found}, expected {expected}")
    if wrong := decoding.fault(tensors):
        raise ValueError(f"{name}.{wrong}")
    return Packed(tensors, decoding)
