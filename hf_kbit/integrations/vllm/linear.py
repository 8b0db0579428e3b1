"""Linear layers in vLLM, which makes one of several that have their input in common, such as q, k and v.

These may differ in width, levels and transform, or stand in 16 bits. So the parameters of the layer are only places
where tensors arrive, to be collected; when all are there, those of each source become a part: a ``KbitLinear`` or an
``nn.Linear`` of the rows and columns that this process has of it.
"""

from collections.abc import Callable
from types import MethodType

import torch
from torch import nn
from torch.nn import functional as F
from vllm.model_executor.layers.linear import LinearMethodBase

from hf_kbit.format.decoding import WORDS, Decoding, ScalarDecoding
from hf_kbit.format.spec import BLOCK_SIZE
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.weight.tensor import Packed

PACKED, DTYPES = ScalarDecoding.names, (torch.int32, torch.uint8, torch.uint8)
SHARDS = {"q": 0, "k": 1, "v": 2}


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
        self.dtype = params_dtype
        check_columns(next(iter(self.decodings)), self.columns, self.all_columns)
        self.arrived: dict[tuple[int, int], dict[str, torch.Tensor]] = {}  # of sources from one on, before another
        for name, dtype in zip(PACKED, DTYPES, strict=True):
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
        if name != "weight_columns":
            loaded = self._own_rows(layer, loaded, sources)
        rank = getattr(layer, "tp_rank", 0)  # a head, which has all columns, has none in vLLM 0.26
        loaded = own_columns(loaded, rank, self.columns, self.all_columns)
        here = loaded.to(place.device, copy=True).contiguous()
        self.arrived.setdefault((sources[0], sources[-1] + 1), {})[name] = here

    def _own_rows(self, layer: nn.Module, tensor: torch.Tensor, sources: tuple[int, ...]) -> torch.Tensor:
        """Those that this process has of each source."""
        sizes = [len(tensor)]
        if len(sources) > 1:
            # What vLLM calls the rows of all processes; keys and values that several have in common count as often.
            copies = getattr(layer, "num_kv_head_replicas", 1)
            sizes = [layer.output_sizes[source] // (copies if source > 0 else 1) for source in sources]
        parts = []
        for source, whole in zip(sources, tensor.split(sizes), strict=True):
            own = self.rows[source]
            shards = len(whole) // own  # fewer than processes where several have the same
            parts.append(whole.narrow(0, layer.tp_rank * shards // layer.tp_size * own, own))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not self.decodings:
            return
        ranges, names = sorted(self.arrived), list(self.decodings)
        if [0, *(end for _, end in ranges)] != [*(first for first, _ in ranges), len(self.rows)]:
            raise ValueError(f"{names}: found weights {ranges} of {len(self.rows)}, expected all")
        if len(names) == 1:  # one on disk
            names *= len(ranges)
        layer.parts = nn.ModuleList(
            self._part(name, self.arrived.pop(sources)) for name, sources in zip(names, ranges, strict=True)
        )
        for name in PACKED:
            del layer._parameters[name]
        layer.weight = whose_device(layer.parts[0])

    def _part(self, name: str, tensors: dict[str, torch.Tensor]) -> nn.Linear:
        if (decoding := self.decodings[name]) is not None:
            packed = packed_of(name, tensors, decoding)
            part = KbitLinear(self.columns, len(packed.tensors[WORDS]), False, decoding.bits, device="meta")
            part.load(packed)
            part.take_inputs(self.inputs)
        else:
            part = nn.Linear(self.columns, len(tensors["weight"]), False, device="meta")
            part.weight = nn.Parameter(tensors["weight"].to(self.dtype), requires_grad=False)
        return part

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = [part.out_features for part in layer.parts]
        biases = [None] * len(rows) if bias is None else bias.split(rows)
        parts = list(zip(layer.parts, biases, strict=True))
        of_packed = [_operands(part, own) for part, own in parts if isinstance(part, KbitLinear)]
        packed = torch.ops.hf_kbit.gemm_group(x, *map(list, zip(*of_packed, strict=True))) if of_packed else []
        packed = iter(packed)
        products = [
            next(packed) if isinstance(part, KbitLinear) else F.linear(x, part.weight, own) for part, own in parts
        ]
        return products[0] if len(products) == 1 else torch.cat(products, dim=-1)


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


def check_columns(name: str, columns: int, all_columns: int) -> None:
    """Refuses to divide the columns of a weight among processes but in whole blocks."""
    if columns < all_columns and columns % BLOCK_SIZE:
        raise ValueError(
            f"{name}: found {all_columns} columns for {all_columns // columns} processes, expected a multiple of "
            f"{BLOCK_SIZE} for each"
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
