"""KbitEmbedding: an ``nn.Embedding`` whose table is quantized and frozen, also of a class with a look-up of its own.

Many models have such a class: Gemma's multiplies what is looked up by a number, OPT's counts positions itself. A table
of such a class becomes one of a class derived from it and from ``KbitEmbedding``, which its ``super().forward``
reaches. That it can, ``is_table`` reads in the code of the class.
"""

import dis
import functools
import inspect
import re
from collections.abc import Iterable
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from hf_kbit.nn.packed import DEFAULT_TRANSFORM
from hf_kbit.nn.weight import DEFAULT_CODEBOOK, DEFAULT_SCALE, KbitWeight, local

MEMBERS = ("_parameters", "_buffers", "_modules")
# What code may ask of a weight that it does not read, and names of methods that prepare weights rather than use them.
ASKED = ("device", "dtype")
PREPARES = re.compile(r"(^|_)(init|reset|resized?|tie)(_|$)|^set_")


class KbitEmbedding(KbitWeight, nn.Embedding):
    """A table with rows of 2, 3, 4 or 5 bits: ``y = W[ids]``, of which the rows asked for are decoded and no others.

    It is an ``nn.Embedding`` to ``isinstance``, but its parameters are those of ``KbitWeight``, which also says how
    they decode and move: the rows are N out_features, their length is K in_features. There is no gradient to the
    table, so ``padding_idx`` means nothing besides what it is.

    Where it is transformed without data, its column scales are all 1. Scales that balance columns, as of a linear
    layer, would store large ones less exactly, and with these a tied head multiplies its largest inputs: with
    SmolLM2-135M's head in 5 bits the divergence was .224 with them, .022 without a transform, and .009 so.

    On a GPU its rows stay in the stored form, where each is in one piece; a table that is tied to the head of its
    model is there in the tiles that the product reads (``tie_to``).

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
        super().__init__(embedding_dim, num_embeddings, bits, codebook, exponent, device, dtype, scale, transform)
        self.balances = False
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False

    @classmethod
    def empty_like(cls, embedding: nn.Embedding, bits: int = 4, **settings: Any) -> "KbitEmbedding":
        """One on the meta device that does what ``embedding`` does, with all that this has besides its table.

        Args:
            embedding: one for which ``is_table`` holds.
            bits: 2 to 5.
            settings: ``codebook``, ``exponent``, ``scale`` and ``transform``.
        """
        table = _new(type(embedding))
        rows, dtype = embedding.num_embeddings, embedding.weight.dtype
        size = rows, embedding.embedding_dim, embedding.padding_idx
        KbitEmbedding.__init__(table, *size, bits, device="meta", dtype=dtype, **settings)
        table.take_besides(embedding)
        return table

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, bits: int = 4, **settings: Any) -> "KbitEmbedding":
        """Quantizes a table where it is; ``embedding`` stays as it was.

        Args:
            embedding: one for which ``is_table`` holds, float32, float16 or bfloat16 ``[N, K]``.
            bits: 2 to 5.
            settings: ``codebook``, ``exponent``, ``scale`` and ``transform``.

        Raises:
            TypeError: the table has another dtype.
            ValueError: it renormalises its rows, has sparse gradients or a class that reads it in a way of its own; or
                it holds NaN or infinity, or a setting is out of range.

        >>> KbitEmbedding.from_embedding(nn.Embedding(10, 64), bits=2).weight.shape
        torch.Size([10, 4])
        """
        if not is_table(embedding):
            raise ValueError(
                f"embedding: found {embedding}, expected one without max_norm, scale_grad_by_freq and sparse, whose "
                "class calls nn.Embedding's forward"
            )
        table = cls.empty_like(embedding, bits, **settings)
        table.load_dense(embedding.weight)
        return table

    def to_embedding(self, dtype: torch.dtype | None = None, weight: nn.Parameter | None = None) -> nn.Embedding:
        """What it was before it was quantized, of its decoded rows, or of ``weight`` if that is given."""
        plain = plain_class(type(self))
        embedding = plain.__new__(plain)
        nn.Embedding.__init__(embedding, self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        embedding.weight = nn.Parameter(self.dequantize(dtype)) if weight is None else weight
        KbitEmbedding.take_besides(embedding, self)
        return embedding

    def take_besides(self, other: nn.Embedding) -> None:
        """Takes over what a table of the same class has besides its weight: a scale, an offset, a norm."""
        taken = vars(other).keys() - _names_of_ours()
        self.__dict__.update({name: vars(other)[name] for name in taken})
        for kept in MEMBERS:
            taken = getattr(other, kept).keys() - _names_of_ours()
            getattr(self, kept).update({name: getattr(other, kept)[name] for name in taken})
        self._non_persistent_buffers_set |= other._non_persistent_buffers_set - _names_of_ours()
        self.train(other.training)

    @property
    def stand_in(self) -> torch.Tensor:
        """An empty tensor with the device and the dtype of the weight before it was quantized."""
        return torch.empty(0, dtype=self.dense_dtype, device=self.codebook.device)

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
            return self._rows(ids) if self.local_shape is None else self._gathered(ids)
        except (TypeError, ValueError) as error:
            return self.recover(error, ids)

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows, or a part of each, of what this process has of the table; ids count from the first that it has."""
        own = self._parameters if "weight" in self._parameters else self.__dict__  # a copy of nn.DataParallel
        size, columns = self.local_shape or (self.out_features, self.in_features), own.get("weight_columns")
        return torch.ops.hf_kbit.embed(
            ids,
            local(own["weight"]),
            local(own["weight_absmax"]),
            self._buffers["codebook"],
            list(size),
            self.dense_dtype,
            None if columns is None else local(columns),
            columns is not None,
        )

    def _gathered(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table that several processes share, by rows or by parts of each; all look up the same ids."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # which not every torch has

        mesh, (rows, width) = self.weight.device_mesh, self.local_shape
        mesh = mesh[mesh.mesh_dim_names[-1]] if mesh.ndim > 1 else mesh
        if width < self.in_features:
            found = DTensor.from_local(self._rows(ids), mesh, [Shard(-1)], run_check=False)
        else:
            # Ids that no process has stay out of range.
            elsewhere = (ids >= 0) & (ids < self.out_features) & (ids // rows != mesh.get_local_rank())
            own = self._rows((ids - mesh.get_local_rank() * rows).masked_fill(elsewhere, 0))
            own = own.masked_fill(elsewhere[..., None], 0)
            found = DTensor.from_local(own, mesh, [Partial()], run_check=False)
        return found.redistribute(placements=[Replicate()]).to_local()

    def to_tiles(self) -> None:
        """Does something for a table alone that is tied to a head, whose product reads tiles."""
        if self.tied:
            super().to_tiles()

    def reset_parameters(self) -> None:
        """Does nothing: a quantized table has no random initialisation."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bits={self.bits}"

    def __reduce_ex__(self, protocol):
        if type(self) is KbitEmbedding:
            return super().__reduce_ex__(protocol)
        return _new, (plain_class(type(self)),), self.__getstate__()


# --- tables of classes of their own ---------------------------------------------------------------


def is_table(module: nn.Module) -> bool:
    """Whether a ``KbitEmbedding`` can stand in for the module: an ``nn.Embedding`` that is a look-up in a table.

    That is one which neither renormalises its rows nor asks for sparse or scaled gradients, of ``nn.Embedding`` itself
    or of a class that calls its forward, asks no weight but its own, and that for ``ASKED`` at most, and has no
    attribute that we have.
    """
    return (
        isinstance(module, nn.Embedding)
        and not isinstance(module, KbitEmbedding)
        and module.max_norm is None
        and not (module.scale_grad_by_freq or module.sparse)
        and module.weight.dim() == 2
        and module.weight.numel() > 0
        and _looks_up(type(module))
        and not (_names(module) - _names(nn.Embedding(1, 1, device="meta"))) & _names_of_ours()
    )


def _names(module: nn.Module) -> set[str]:
    """Of the attributes of a module itself, whatever they are."""
    return set(vars(module)).union(*(getattr(module, kept) for kept in MEMBERS))


@functools.cache
def _names_of_ours() -> frozenset[str]:
    return frozenset(_names(KbitEmbedding(1, 1, device="meta")) | set(dir(KbitEmbedding)))


@functools.cache
def _looks_up(plain: type[nn.Embedding]) -> bool:
    if plain is nn.Embedding:
        return True
    own = vars(plain)
    overridden = own.keys() & vars(KbitWeight).keys() - {"__init__", "__module__", "__doc__"}
    return (
        plain.__bases__ == (nn.Embedding,)
        and not overridden
        and _calls_super(own.get("forward"))
        and all(asked in ASKED for method in _methods(plain).values() for asked in _asked_of_weight(method))
    )


def _methods(plain: type) -> dict[str, FunctionType]:
    """The functions of a class itself that use a weight."""
    methods = {name: inspect.unwrap(method) for name, method in vars(plain).items() if callable(method)}
    return {name: m for name, m in methods.items() if isinstance(m, FunctionType) and not PREPARES.search(name)}


def _calls_super(forward) -> bool:
    """Whether it is there and calls the forward of its class's base."""
    return forward is None or "forward" in inspect.unwrap(forward).__code__.co_names


def _asked_of_weight(method: FunctionType) -> list[str]:
    """What a method asks of each ``self.weight``; "" where it takes the weight as such or sets it, or where it may be
    that of another module, or in a function inside."""
    steps = [step for step in dis.get_instructions(method) if step.opname not in ("EXTENDED_ARG", "CACHE")]
    code, inside = method.__code__, [step.argval for step in steps if isinstance(step.argval, CodeType)]
    return ["" for function in inside if "weight" in function.co_names] + [
        then.argval if then.opname == "LOAD_ATTR" and _loads(before, code.co_varnames[:1]) else ""
        for before, step, then in zip(steps, steps[1:], steps[2:], strict=False)
        if step.argval == "weight" and step.opname.endswith("_ATTR")
    ]


def _loads(step: dis.Instruction, variable: tuple[str, ...]) -> bool:
    """Whether an instruction loads a variable, perhaps after another."""
    loaded = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return "LOAD_FAST" in step.opname and loaded[-1:] == variable


@functools.cache
def embedding_class(plain: type[nn.Embedding]) -> type[KbitEmbedding]:
    """The class of quantized tables that were of class ``plain``."""
    if plain is nn.Embedding:
        return KbitEmbedding
    asking = {name: _of_stand_in(m) for name, m in _methods(plain).items() if _asked_of_weight(m)}
    return type(f"Kbit{plain.__name__}", (plain, KbitEmbedding), {"__module__": __name__, **asking})


def _of_stand_in(method: FunctionType) -> FunctionType:
    """The method with ``self.stand_in`` for each ``self.weight``, whose dtype is an integer one when it is packed."""
    names = tuple("stand_in" if name == "weight" else name for name in method.__code__.co_names)
    code = method.__code__.replace(co_names=names)
    changed = FunctionType(code, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    changed.__kwdefaults__ = method.__kwdefaults__
    return changed


def plain_class(kind: type[KbitEmbedding]) -> type[nn.Embedding]:
    """The inverse of ``embedding_class``."""
    return next(base for base in kind.__mro__ if not issubclass(base, KbitWeight))


def _new(plain: type[nn.Embedding]) -> KbitEmbedding:
    """An empty one, for copies and pickles too: the derived classes are in no module, where pickle would look."""
    kind = embedding_class(plain)
    return kind.__new__(kind)
