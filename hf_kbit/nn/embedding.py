"""KbitEmbedding: an ``nn.Embedding`` whose table is quantized and frozen, also of a class with a look-up of its own.

Many models have such a class: Gemma's multiplies what is looked up by a number, OPT's counts positions itself. A table
of such a class becomes one of a class derived from it and from ``KbitEmbedding``, whose own look-up then finds the
packed weight.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from hf_kbit.format.decoding import DEFAULT_TRANSFORM
from hf_kbit.nn.classes import twin
from hf_kbit.nn.weight import KbitWeight, is_sharded, local
from hf_kbit.weight.packing import DEFAULT_CODEBOOK, DEFAULT_SCALE, Recipe
from hf_kbit.weight.tensor import KbitTensor


class KbitEmbedding(KbitWeight, nn.Embedding):
    """A table with rows of 2, 3, 4 or 5 bits: ``y = W[ids]``, of which the rows asked for are decoded and no others.

    It is an ``nn.Embedding``. Its ``weight`` is a ``KbitTensor`` ``[N, K]`` of N rows of length K, frozen: so
    ``padding_idx`` means nothing besides what it is.

    Where it is transformed without data, its column scales are all 1. Scales that balance columns, as of a linear
    layer, would store large ones less exactly, and with these a tied head multiplies its largest inputs: with
    SmolLM2-135M's head in 5 bits the divergence was .224 with them, .022 without a transform, and .009 so.

    On a GPU its rows stay in the stored form, where each is in one piece; a table that is tied to the head of its
    model is there in the tiles that the product reads.

    Args:
        num_embeddings: rows, 1 or more.
        embedding_dim: length of a row, any of 1 or more.
        padding_idx: as in ``nn.Embedding``, to be asked for.
        bits: 2 to 5.
        codebook: name or table of ``2**bits`` numbers, as in ``KbitWeight``.
        exponent: power of two that multiplies the levels.
        device: of the parameters and the codebook.
        dtype: of what is looked up.
        scale: how ``load_dense`` finds the scale of a block: ``"search"`` or ``"absmax"``.
        transform: what ``load_dense`` does to the table first: ``"rotated"`` or ``"none"``.

    A new one holds zeros; load a state dict, or use ``from_embedding``.

    Raises:
        ValueError: bits, codebook or a size is out of range.

    >>> table = KbitEmbedding.from_embedding(nn.Embedding(1000, 64), bits=5)
    >>> table
    KbitEmbedding(1000, 64, bits=5)
    >>> table(torch.tensor([[3, 1, 999]])).shape
    torch.Size([1, 3, 64])
    """

    plain = nn.Embedding
    wraps = False  # a class's own look-up calls that of ours
    reads_tiles = False
    recipe = Recipe(balances=False)
    in_features = property(lambda self: self.embedding_dim)
    out_features = property(lambda self: self.num_embeddings)

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        bits: int = 4,
        codebook: str | Iterable[float] = DEFAULT_CODEBOOK,
        exponent: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scale: str = DEFAULT_SCALE,
        transform: str = DEFAULT_TRANSFORM,
    ):
        sizes = {"num_embeddings": num_embeddings, "embedding_dim": embedding_dim}
        super().__init__(sizes, bits, codebook, exponent, device, dtype, scale, transform)
        self.padding_idx, self.max_norm, self.norm_type = padding_idx, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, bits: int = 4, **settings: Any) -> "KbitEmbedding":
        """Quantizes a table where it is; ``embedding`` stays as it was.

        Args:
            embedding: one for which ``is_table`` holds, float32, float16 or bfloat16 ``[N, K]``.
            bits: 2 to 5.
            settings: ``codebook``, ``exponent``, ``scale`` and ``transform``.

        Raises:
            TypeError: the table has another dtype.
            ValueError: it renormalises its rows, has sparse gradients, or uses a name that ours uses; or it holds NaN
                or infinity, or a setting is out of range.

        >>> KbitEmbedding.from_embedding(nn.Embedding(10, 64), bits=2).weight
        KbitTensor(shape=(10, 64), dtype=torch.float32, device=cpu, bits=2)
        """
        if not is_table(embedding):
            raise ValueError(
                f"embedding: found {embedding}, expected one without max_norm, scale_grad_by_freq and sparse, whose "
                "class calls nn.Embedding's forward"
            )
        made = cls(*embedding.weight.shape, bits=bits, device="meta", dtype=embedding.weight.dtype, **settings)
        table = twin(embedding)
        cls.pack(table, made.weight, made.recipe)
        table.load_dense(embedding.weight)
        return table

    def to_embedding(self, dtype: torch.dtype | None = None) -> nn.Embedding:
        """What it was before it was quantized, of its decoded rows."""
        embedding = twin(self)
        embedding.unpack(nn.Parameter(self.dequantize(dtype)))
        return embedding

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids`` int64 or int32 ``[*]``, each 0 to N - 1, to ``[*, K]`` in the dtype of the table that it stands for.

        Raises:
            TypeError: ``ids`` has another dtype.
            ValueError: one of them is out of range, unless on a GPU, where a kernel stops with an assertion.
        """
        try:
            if ids.dtype not in (torch.int64, torch.int32):
                found = str(ids.dtype).removeprefix("torch.")
                raise TypeError(f"indices: found dtype {found}, expected int64 or int32")
            weight = self._parameters.get("weight")
            if not isinstance(local(weight), KbitTensor):  # somebody has put a dense weight into its place
                return nn.functional.embedding(ids, self.weight, self.padding_idx)
            gathers = is_sharded(weight) and not isinstance(weight.placements[-1], Replicate)
            return self._gathered(ids, weight) if gathers else local(weight).look_up(ids)
        except (TypeError, ValueError, RuntimeError) as error:
            self.fail(error)

    def _gathered(self, ids: torch.Tensor, weight: DTensor) -> torch.Tensor:
        """Rows of a table that several processes share, by rows or by parts of each; all look up the same ids. Ids
        count from the first row that this process has."""
        mesh, own = weight.device_mesh, weight._local_tensor
        mesh, (rows, width) = mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 else mesh, own.matrix
        if width < self.in_features:
            found = DTensor.from_local(own.look_up(ids), mesh, [Shard(-1)], run_check=False)
        else:
            # Ids that no process has stay out of range.
            elsewhere = (ids >= 0) & (ids < self.out_features) & (ids // rows != mesh.get_local_rank())
            found = own.look_up((ids - mesh.get_local_rank() * rows).masked_fill(elsewhere, 0))
            found = found.masked_fill(elsewhere[..., None], 0)
            found = DTensor.from_local(found, mesh, [Partial()], run_check=False)
        return found.redistribute(placements=[Replicate()]).to_local()

    def reset_parameters(self) -> None:
        """Does nothing: a quantized table has no random initialisation."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits if self.is_packed else None}"


def is_table(module: nn.Module) -> bool:
    """Whether a module is a table that can be packed: of ``nn.Embedding``, or of a class that is derived from that
    alone, without attributes of names that ours has."""
    return (
        isinstance(module, nn.Embedding)
        and not isinstance(module, KbitEmbedding)
        and module.max_norm is None
        and not (module.scale_grad_by_freq or module.sparse)
        and module.weight.dim() == 2
        and module.weight.numel() > 0
        and type(module).__bases__ in ((nn.Embedding,), nn.Embedding.__bases__)
        and not KbitEmbedding.names_taken(module)
    )
