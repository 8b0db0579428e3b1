"""KbitTensor: a packed weight as one value, which code that knows nothing of it takes for a dense one.

To others it has the shape ``[*lead, N, K]`` of the weight, and the dtype that it is computed in. Inside there are
tensors that kernels read. Which ones, and what is done with them, its class says: one for each kind of weight
(``scalar.py``, ``trellis.py``). ``tensor_ops.py`` says what the functions of torch do with it: some keep it packed,
others get the decoded weight, and what would write into it is refused.
"""

import hashlib
import itertools
import math
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_kbit.format.decoding import Decoding
from hf_kbit.weight.decoded import OF_MEMORY, Decoded, plain, refuse_writes, wrapper

WEIGHT = "weight"  # what layers call it
HOW = "weight_decoding"  # in state dicts besides: how it decodes, which files of save_pretrained have in their config
MARK = 8  # bytes that tell what is sent as floats
# What functions and ops of torch do with a packed weight; tensor_ops.py fills both.
FUNCTIONS: dict[Any, Any] = {}
OPS: dict[Any, Any] = {}
KINDS: dict[type[Decoding], type["KbitTensor"]] = {}


class Packed(NamedTuple):
    """A weight in the stored form: its tensors by their names in files (``Decoding.layout``), and how they decode.

    Of a weight that was quantized there is besides, in words and mostly empty: why it is not transformed as it was to
    be (``untransformed``), and what even so its scales do not hold (``lost``).
    """

    tensors: Mapping[str, torch.Tensor]
    decoding: Decoding
    untransformed: str = ""
    lost: str = ""


class Form:
    """What a packed weight is besides its tensors. Equal ones are one object, so that comparing them takes no time."""

    _known: dict[tuple, "Form"] = {}

    def __new__(cls, decoding: Decoding, matrix: tuple[int, int], dtype: torch.dtype, tiles: bool):
        key = decoding, matrix, dtype, tiles
        if key not in cls._known:
            self = cls._known[key] = object.__new__(cls)
            self.decoding, self.matrix, self.dtype, self.tiles = key
            self.kind = KINDS[type(decoding)]
            self.names = self.kind.inner(decoding)
        return cls._known[key]

    def __reduce__(self):
        return Form, (self.decoding, self.matrix, self.dtype, self.tiles)


class KbitTensor(torch.Tensor):
    """A frozen weight of few bits, of one matrix or of several that have their input in common.

    ``shape``, ``dtype``, ``device`` and ``numel()`` are those of the weight that it stands for. Reading functions of
    torch give what they give for the decoded weight; ``F.linear`` and ``F.embedding`` run the kernels. Writing raises.

    Copies, pickles and files have the stored form. A device may have another one, made once when the weight arrives
    there, and turned back when it moves away.

    A kind of weight is a class derived from this one, which says how its tensors lie, are cut, joined, sent, decoded
    and multiplied by.

    Attributes:
        parts: a dictionary, which the layer that has the weight reads too. Whatever replaces the weight changes it in
            place: ``words``, which hold the codes; other tensors of the kind; ``matrix``, ``(N, K)``; ``kind``, the
            class; and what a layer has found of these, which no copy has.
        decoding: how it decodes.
        tiles: whether a GPU may have a form of its own for products. A table of embeddings stays in the stored form,
            unless a product reads it too.

    >>> from hf_kbit import KbitLinear
    >>> weight = KbitLinear.from_linear(nn.Linear(100, 64), bits=3).weight
    >>> weight.shape, weight.dtype, weight.is_floating_point()
    (torch.Size([64, 100]), torch.float32, True)
    >>> weight.T.shape, (torch.ones(2, 100) @ weight.T).shape
    (torch.Size([100, 64]), torch.Size([2, 64]))
    """

    decodes: type[Decoding]
    files: Mapping[str, str]  # names that tensors have in files, by those that they have in ``parts``
    columns: torch.Tensor | None = None  # its scales of columns, if another weight can be quantized with them

    words = property(lambda self: self.parts["words"])
    matrix = property(lambda self: self.parts["matrix"])
    qualified_name = "weight"  # in the model, where a layer has told it: errors begin with it

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        KINDS[cls.decodes] = cls
        torch.serialization.add_safe_globals([cls])

    @staticmethod
    def __new__(cls, data, parts=None, decoding=None, dtype=None, tiles=True, *, requires_grad=False):
        # accelerate makes a parameter anew by ``type(parameter)(value, requires_grad=...)``.
        if isinstance(data, KbitTensor):
            return nn.Parameter(data, requires_grad=False)
        if parts is None:
            raise TypeError(
                f"weight: found {type(data).__name__}, expected a packed weight, as KbitLinear.from_linear makes one, "
                "or from_pretrained with a device_map"
            )
        self = wrapper(cls, data, dtype=dtype, device=parts["words"].device)
        self.parts, self.decoding, self.tiles = parts, decoding, tiles
        return self

    def __init__(self, *args, **kwargs):
        pass

    @staticmethod
    def of(packed: Packed, shape: Sequence[int], dtype: torch.dtype, tiles: bool = True) -> "KbitTensor":
        """A weight ``[*lead, N, K]`` of packed tensors, where these are, in the form that is read there."""
        kind = KINDS[type(packed.decoding)]
        decoding, parts = packed.decoding, {"kind": kind, "matrix": tuple(shape[-2:])}
        parts |= kind.parts_of(packed.tensors, decoding) | kind.settings(decoding)
        return kind(tuple(shape), parts, decoding, dtype, tiles).settled()

    @staticmethod
    def empty(
        shape: tuple[int, ...],
        decoding: Decoding,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        tiles: bool = True,
    ) -> "KbitTensor":
        """A weight ``[*lead, N, K]`` of zeros."""
        layout = decoding.layout(shape).items()
        tensors = {name: torch.zeros(size, dtype=own, device=device) for name, (own, size) in layout}
        return KbitTensor.of(Packed(tensors, decoding), shape, dtype, tiles)

    def like(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, **parts) -> "KbitTensor":
        """Another weight that decodes as this one, with some of the ``parts`` replaced; it shares the others."""
        form = self.form
        parts = {**self.parts, **parts}
        parts.pop("inverses", None)
        made = form.kind(
            self.outer_shape if shape is None else shape, parts, form.decoding, dtype or form.dtype, form.tiles
        )
        made.qualified_name = self.qualified_name
        return made

    def each(self, fn, **parts) -> "KbitTensor":
        """``like``, of what a function makes of each of the tensors."""
        made = {name: fn(self.parts[name]) for name in self.form.names}
        return self.like(**made, **parts)

    # --- what a kind says ---

    @classmethod
    @abstractmethod
    def inner(cls, decoding: Decoding) -> list[str]:
        """Names of the tensors in ``parts`` of a weight that decodes so."""

    @classmethod
    @abstractmethod
    def parts_of(cls, tensors: Mapping[str, torch.Tensor], decoding: Decoding) -> dict[str, torch.Tensor | None]:
        """These, of tensors as files have them."""

    @classmethod
    def settings(cls, decoding: Decoding) -> dict[str, Any]:
        """What ``parts`` has of a decoding, for products."""
        return {}

    @property
    @abstractmethod
    def lead(self) -> tuple[int, ...]:
        """Of the matrices."""

    @staticmethod
    @abstractmethod
    def quantize(weight: torch.Tensor, decoding: Decoding, recipe, name: str, columns=None) -> Packed:
        """A weight of floats ``[*lead, N, K]`` as one of this kind (``packing.Recipe``)."""

    @abstractmethod
    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight ``[*lead, N, K]``."""

    @staticmethod
    @abstractmethod
    def product(x: torch.Tensor, parts: dict, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ W.T + bias`` of a matrix, differentiable in both."""

    @staticmethod
    @abstractmethod
    def experts_product(x, parts: dict, bias, rows, offsets, swiglu: bool) -> torch.Tensor:
        """As of ``ops.gemm_experts``."""

    # The same of inputs that may be rounded to 8 bits. Scalars need more, which layers keep (``nn/product.py``).

    @classmethod
    def product_int8(cls, x: torch.Tensor, parts: dict, bias: torch.Tensor | None) -> torch.Tensor:
        return cls.product(x, parts, bias)

    @classmethod
    def experts_product_int8(cls, *args) -> torch.Tensor:
        return cls.experts_product(*args)

    @abstractmethod
    def look_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table, of which those asked for are decoded and no others."""

    @abstractmethod
    def rows(self, dim: int, start: int, stop: int) -> "KbitTensor":
        """Some of the matrices, or of the rows of each; NotImplemented where they cannot be cut there."""

    @abstractmethod
    def matrix_at(self, index: int) -> "KbitTensor":
        """One of the matrices."""

    @abstractmethod
    def cut_columns(self, start: int, stop: int) -> "KbitTensor":
        """A part of the in_features, between its units (``Decoding.units``)."""

    @abstractmethod
    def picked(self, dim: int, index: torch.Tensor) -> "KbitTensor":
        """Rows or matrices in another order; NotImplemented where they cannot be apart."""

    @abstractmethod
    def joined(self, others: Sequence["KbitTensor"], dim: int) -> "KbitTensor":
        """With other weights that decode alike behind it along a dimension; NotImplemented where that is none."""

    @abstractmethod
    def padded(self, missing: int) -> "KbitTensor":
        """With so many rows, or matrices, of zeros behind it."""

    @abstractmethod
    def room(self, size: Sequence[int], device: torch.device | None) -> "KbitTensor":
        """One for other rows or matrices, of which ``size`` is the shape."""

    @abstractmethod
    def gathered(self, gather) -> "KbitTensor":
        """What all processes have, one below the other; ``gather`` does that with a tensor."""

    # --- what it is; ``shape`` and ``dtype`` ask __torch_function__ each time ---

    @property
    def outer_shape(self) -> torch.Size:
        with torch._C.DisableTorchFunctionSubclass():
            return self.shape

    @property
    def form(self) -> Form:
        with torch._C.DisableTorchFunctionSubclass():
            return Form(self.decoding, self.parts["matrix"], self.dtype, self.tiles)

    @property
    def bits(self) -> int:
        return self.decoding.bits

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """``[*lead, N, K]``, also while FSDP2 shows the weight flat."""
        return (*self.lead, *self.matrix)

    @property
    def nbytes_packed(self) -> int:
        """Of what files have of it."""
        return sum(self.parts[name].nbytes for name in self.form.names if name in self.files)

    # --- forms ---

    @property
    def is_tiled(self) -> bool:
        """Whether it has a form of its device's own."""
        return False

    def settled(self) -> "KbitTensor":
        """The weight in the form that its device reads."""
        return self

    def as_stored(self) -> "KbitTensor":
        """The weight in the stored form, where it is."""
        return self

    @property
    def decoding_tensor(self) -> torch.Tensor:
        """``decoding.to_tensor()``, one for all layers that have this weight, as they have its other tensors."""
        known = getattr(self, "_decoding_tensor", None)
        if known is None or known[0] is not self.decoding:
            known = self._decoding_tensor = self.decoding, self.decoding.to_tensor()
        return known[1]

    def file_tensors(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """What files hold of it, by the names that they have there; on a device, or on its own."""
        stored = self.as_stored()
        tensors = {name: stored.parts[own] for own, name in self.files.items() if stored.parts[own] is not None}
        return {name: tensor if device is None else tensor.to(device) for name, tensor in tensors.items()}

    def copies(self) -> dict[str, torch.Tensor]:
        """``file_tensors``, copied into CPU memory, for a GPU may have no room for them; the same ones again for as
        long as somebody holds them."""
        words, kept = getattr(self, "_copies", (lambda: None, {}))
        held = {name: copy() for name, copy in kept.items()}
        if words() is not self.words or any(tensor is None for tensor in held.values()):
            held = self.as_stored().each(lambda tensor: tensor.to("cpu", copy=True)).file_tensors()
            copies = {name: weakref.ref(tensor) for name, tensor in held.items()}
            self._copies = weakref.ref(self.words), copies
        return held

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded weight, in ``dtype`` or in its own."""
        dtype = dtype or self.form.dtype
        if not math.prod(self.outer_shape):
            return torch.empty(self.outer_shape, dtype=dtype, device=self.words.device)
        return self.decoded(dtype).view(self.outer_shape)

    def matrices(self, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """The decoded matrices ``[N, K]``, one after another, with memory for one."""
        for index in itertools.product(*map(range, self.lead)):
            yield self[index].dequantize(dtype)

    def moved(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "KbitTensor":
        """The weight on another device, in the form that is read there, or computed in another dtype."""
        device = torch.device(device)
        if device == self.words.device:
            return self.like(dtype=dtype)
        return self.as_stored().each(lambda tensor: tensor.to(device), dtype=dtype).settled()

    def replace(self, other: "KbitTensor") -> None:
        """Takes over another weight in place: all that have this one have the other from now on."""
        if self.parts["kind"] is not other.parts["kind"]:
            raise ValueError(f"{self.qualified_name}: found {other}, expected {self}, a weight of the same kind")
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(self, other)
        self.parts.pop("inverses", None)
        self.parts.update(other.parts)
        self.decoding, self.tiles = other.decoding, other.tiles

    # --- protocols of torch ---

    def __tensor_flatten__(self):
        form = self.form
        return form.names, form

    @staticmethod
    def __tensor_unflatten__(inner, form, outer_size, outer_stride):
        others = dict.fromkeys(form.kind.files.keys() - inner.keys())
        parts = {"kind": form.kind, "matrix": form.matrix, **form.kind.settings(form.decoding), **others, **inner}
        return form.kind(outer_size, parts, form.decoding, form.dtype, form.tiles)

    def __repr__(self, *, tensor_contents=None):
        form = self.form
        what = f"shape={tuple(self.outer_shape)}, dtype={form.dtype}, device={self.words.device}, bits={self.bits}"
        return f"KbitTensor({what})"

    def __reduce_ex__(self, protocol):
        form, how = self.form, {"kind": self.decoding.kind, **self.decoding.to_dict()}
        settings = self.whole_shape, form.dtype, form.tiles, isinstance(self, nn.Parameter)
        return _rebuild, (self.file_tensors(), self.bits, how, *settings)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            made = self.each(torch.clone)
            memo[id(self.parts)] = made.parts
            memo[id(self)] = as_parameter(made) if isinstance(self, nn.Parameter) else made
        return memo[id(self)]

    # --- several processes ---

    @abstractmethod
    def rows_sent(self) -> torch.Tensor:
        """uint8 ``[*lead, N, n]``: a share of all stored bytes in each row, so that rows which can be cut off take
        theirs along."""

    @abstractmethod
    def of_rows_sent(self, rows: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The inverse: what files hold of a weight of so many rows."""

    def as_floats(self) -> torch.Tensor:
        """The bytes of each row in as many floats as the row has: what goes from a process that has the weight to one
        that knows shape and dtype alone, as in ``broadcast``. ``of_floats`` reads it, and all others get nonsense.

        Raises:
            ValueError: rows are so short that their bytes do not fit.
        """
        rows, width, dtype = self.rows_sent(), self.matrix[1], self.form.dtype
        mark = self._mark.to(rows.device).expand(*rows.shape[:-1], MARK)
        free = width * dtype.itemsize - rows.shape[-1] - MARK
        if free < 0:
            raise ValueError(f"weight: found rows of {width} {dtype}, expected longer ones to send them")
        return nn.functional.pad(torch.cat([mark, rows], -1), (0, free)).view(dtype)

    def of_floats(self, floats: torch.Tensor) -> "KbitTensor | None":
        """A weight that came by ``as_floats`` from one of this shape that decodes as this one; None if it did not."""
        form = self.form
        if (
            isinstance(floats, KbitTensor)
            or floats.dtype != form.dtype
            or floats.shape != self.outer_shape
            or floats.is_meta
            or not floats.numel()
        ):
            return None
        mark, rows = floats.contiguous().view(torch.uint8).tensor_split([MARK], -1)
        if not torch.equal(mark.flatten(0, -2)[0], self._mark.to(mark.device)):
            return None
        packed = Packed(self.of_rows_sent(rows), form.decoding)
        return KbitTensor.of(packed, self.whole_shape, form.dtype, form.tiles)

    @property
    def _mark(self) -> torch.Tensor:
        """uint8 ``[MARK]``: tells a row of ``as_floats``, and how it decodes."""
        digest = hashlib.sha256(repr(self.decoding).encode()).digest()
        return torch.frombuffer(bytearray(digest[:MARK]), dtype=torch.uint8)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (own := FUNCTIONS.get(func)) is not None:
            return own(func, *args, **kwargs)
        if func in OF_MEMORY:
            args = args[0].dequantize(), *args[1:]
        return plain(func, *args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (own := OPS.get(func)) is not None:
            found = own(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        refuse_writes(KbitTensor, func, args, kwargs)
        # Under inference mode ops come here that are made of others, some of which keep it packed.
        if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
            return made
        decoded = pytree.tree_map_only(KbitTensor, KbitTensor.dequantize, (args, kwargs))
        made = func(*decoded[0], **decoded[1])
        return Decoded.views(made, args[0]) if func.is_view else made


def as_parameter(weight: KbitTensor) -> nn.Parameter:
    """A frozen parameter of the same tensors, and the same dictionary of them."""
    made = nn.Parameter(weight, requires_grad=False)
    made.parts = weight.parts
    return made


def _rebuild(tensors, bits, how, shape, dtype, tiles, is_parameter):
    """What a pickle makes a weight of."""
    word = how.pop("kind")
    (kind,) = (each for each in KINDS if each.kind == word)
    made = KbitTensor.of(Packed(tensors, kind.from_dict(how, bits, WEIGHT)), shape, dtype, tiles)
    return as_parameter(made) if is_parameter else made


torch.serialization.add_safe_globals([_rebuild])
