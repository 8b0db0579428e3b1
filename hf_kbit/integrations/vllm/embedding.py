"""Tables of embeddings in vLLM, and heads, which may be tied to them.

Many models of vLLM make these without a name, or without telling the quantization of them. So they become packed ones
when the whole model is there, in which all have names, and nothing has been loaded yet. What vLLM has tied by then is
tied to the packed table: one weight serves look-up and product.
"""

import torch
from torch import nn
from torch.nn import functional as F
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

from hf_kbit.format.decoding import Decoding
from hf_kbit.integrations.vllm.config import KbitVllmConfig
from hf_kbit.integrations.vllm.linear import PACKED, KbitLinearMethod, KbitRows, packed_of, whose_device
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.linear import KbitLinear
from hf_kbit.nn.site import empty, pack, site_of


class KbitHeadMethod(KbitLinearMethod):
    """Loads and runs a head. Of tokens that the model has not its results are zeros, for vLLM has a multiple of 64."""

    def _spans(self, layer: nn.Module, sources: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        indices = layer.shard_indices
        return layer.org_vocab_size, [(indices.org_vocab_start_index, indices.org_vocab_end_index)]

    def _own_rows(self, layer: nn.Module, tensor: torch.Tensor, sources: tuple[int, ...]) -> torch.Tensor:
        """Those of the tokens that this process has, then zeros."""
        ((first, end),) = self._spans(layer, sources)[1]
        return F.pad(tensor[first:end], (0, 0, 0, self.rows[0] - (end - first)))

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        (part,) = layer.parts
        if not isinstance(part, KbitRows) or part.count == self.rows[0]:
            return super().apply(layer, x, bias)
        y = super().apply(layer, x, None if bias is None else bias[: part.count])
        return F.pad(y, (0, self.rows[0] - part.count))


class KbitTableMethod(KbitHeadMethod):
    """Loads a table and looks it up, and gives its weight to ``heads``, which multiply by it where the head of the
    model is tied to it. The table is one of them, for some models of vLLM have no other."""

    def __init__(self, name: str, decoding: Decoding, heads: list[nn.Module], inputs: str | None = None):
        super().__init__({name: decoding}, inputs)
        self.name, self.decoding, self.heads = name, decoding, heads

    def _own_rows(self, layer: nn.Module, tensor: torch.Tensor, sources: tuple[int, ...]) -> torch.Tensor:
        whole = isinstance(layer, KbitEmbedding)  # in the place of an nn.Embedding, which each process has all of
        return tensor if whole else super()._own_rows(layer, tensor, sources)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        packed, size = packed_of(self.name, self.arrived.pop((0, 1), {}), self.decoding), (self.rows[0], self.columns)
        if isinstance(layer, KbitEmbedding):
            for own in PACKED[1:]:
                del layer._parameters[own]
            layer.make_room(self.decoding, self.dtype)  # in the place of the words that have arrived
            layer.load(packed)
            return
        for own in self.places:
            del layer._parameters[own]
        layer.table = KbitEmbedding(*size, bits=self.decoding.bits, device="meta", dtype=self.dtype)
        layer.table.load(packed)
        for head in self.heads:
            part = KbitLinear(*reversed(size), bias=False, bits=self.decoding.bits, device="meta")
            part.tie_to(layer.table)
            part.take_inputs(self.inputs)
            head.parts = nn.ModuleList([part])
        for each in {layer, *self.heads}:
            each.weight = whose_device(layer.table)
        self.heads.clear()  # vLLM remembers this layer for as long as a head that is tied to it lives

    def embedding(self, layer: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        return layer.table(ids)


def make_room(model: nn.Module, config: KbitVllmConfig) -> None:
    """Has the packed tables and heads of a new model wait for their tensors.

    Raises:
        ValueError: vLLM has no table where the checkpoint has a packed one, or one that does more than look up; or no
            head.
    """
    modules, inputs = dict(model.named_modules()), config.inputs
    untied = {name: (decoding, False) for name, decoding in config.layers.items()}
    for name, (decoding, tied) in {**untied, **config.tables}.items():
        layer = modules.get(name)
        if isinstance(layer, ParallelLMHead):
            method = KbitHeadMethod({name: decoding}, inputs)
            _await(layer, method, layer.num_embeddings_per_partition, layer.weight)
        elif isinstance(layer, VocabParallelEmbedding):
            dense = layer.weight
            heads = [head for head in model.modules() if tied and head._parameters.get("weight") is dense]
            for head in heads:
                head.quant_method, head.weight = KbitLinearMethod({}), None
            method = KbitTableMethod(name, decoding, heads, inputs)
            _await(layer, method, layer.num_embeddings_per_partition, dense)
            layer.use_fused_embedding = False  # a kernel for tables in 16 bits, chosen when the layer was made
        elif (site := site_of(model, name)) is not None and site.is_table:
            dense = layer.weight
            pack(site, empty(site, decoding))
            _await(layer, KbitTableMethod(name, decoding, []), layer.num_embeddings, dense)
        elif name in config.tables and not isinstance(layer, PPMissingLayer):
            raise ValueError(
                f"{name}: found a packed table of embeddings, for which vLLM has a layer of type "
                f"{type(layer).__name__}, expected one that only looks up: quantize the model with this name in "
                "modules_to_not_convert"
            )
    if config.head and any(isinstance(layer, LogitsProcessor) for layer in modules.values()):
        methods = [getattr(layer, "quant_method", None) for layer in modules.values()]
        elsewhere = any(isinstance(layer, PPMissingLayer) for layer in modules.values())  # in a pipeline
        if not elsewhere and not any(isinstance(method, KbitHeadMethod) for method in methods):
            raise ValueError(
                f"{config.head}: found tensors of its own, expected a head that is tied to the table of embeddings, "
                f"as {type(model).__name__} of vLLM has it; serve this model with Transformers"
            )


def _await(layer: nn.Module, method: KbitLinearMethod, rows: int, dense: torch.Tensor) -> None:
    """Gives a layer the method by which it gets its tensors, to be where ``dense`` is, which it replaces."""
    layer.quant_method, columns = method, layer.embedding_dim
    with dense.device:
        method.create_weights(layer, columns, [rows], columns, rows, dense.dtype)
