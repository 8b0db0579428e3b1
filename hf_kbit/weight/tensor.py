"""KbitTensor: a packed weight as one value, which code that knows nothing of it takes for a dense one.

To others it has the shape ``[*lead, N, K]`` of the weight, and the dtype that it is computed in. Inside there are the
packed words, scales, codebook and column scales, which kernels read. ``tensor_ops.py`` says what the functions of
torch do with it: some keep it packed, others get the decoded weight, and what would write into it is refused.
"""

import hashlib
import itertools
import math
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_kbit.format import reference
from hf_kbit.format.decoding import Decoding
from hf_kbit.format.reference import TILE_ROWS
from hf_kbit.format.spec import absmax_shape, num_blocks, weight_shape
from hf_kbit.ops import native
from hf_kbit.weight.decoded import OF_MEMORY, Decoded, plain, refuse_writes, wrapper
from hf_kbit.weight.packing import Packed

INNER = ("words", "absmax", "codebook", "columns")
PACKED = ("weight", "weight_absmax", "weight_columns")  # what files call words, scales and column scales
HOW = "weight_decoding"  # in state dicts besides: how they decode, which files of save_pretrained have in their config
MARK = 8  # bytes in front of a row that is sent as floats
# What functions and ops of torch do with a packed weight; tensor_ops.py fills both.
FUNCTIONS: dict[Any, Any] = {}
OPS: dict[Any, Any] = {}


def reads_tiles(device: torch.device) -> bool:
    """Whether the kernels of a device read tiles."""
    return device.type == "cuda" and native.library("cuda").loaded


class Form:
    """What a packed weight is besides its tensors. Equal ones are one object, so that comparing them takes no time."""

    _known: dict[tuple, "Form"] = {}

    def __new__(cls, decoding: Decoding, matrix: tuple[int, int], dtype: torch.dtype, tiles: bool):
        key = decoding, matrix, dtype, tiles
        if key not in cls._known:
            self = cls._known[key] = object.__new__(cls)
            self.decoding, self.matrix, self.dtype, self.tiles = key
            self.names = list(INNER if decoding.transformed else INNER[:3])
        return cls._known[key]

    def __reduce__(self):
        return Form, (self.decoding, self.matrix, self.dtype, self.tiles)


class KbitTensor(torch.Tensor):
    """A frozen weight of 2, 3, 4 or 5 bits, of one matrix or of several that have their input in common.

    ``shape``, ``dtype``, ``device`` and ``numel()`` are those of the weight that it stands for. Reading functions of
    torch give what they give for the decoded weight; ``F.linear`` and ``F.embedding`` run the kernels. Writing raises.

    On a GPU the words and scales are the tiles that kernels read, made once when the weight arrives there, and turned
    back when it moves away. Copies, pickles and files have the stored form. A parameter of a table of embeddings stays
    in the stored form, unless a product reads it too (``tiles``).

    Attributes:
        parts: a dictionary, which the layer that has the weight reads too. Whatever replaces the weight changes it in
            place: ``words``, int32 ``[*lead, N, B * bits]`` or tiles; ``absmax``, uint8 ``[*lead, N, B]`` or tiles;
            ``codebook``, float32 ``[2**bits]``; ``columns``, uint8 ``[K]`` or None; ``matrix``, ``(N, K)``; where a
            layer has found it of these words and scales, ``inverses`` (``ops.int8_inverses``), which no copy has.
        decoding: levels, exponent, and whether the weight is transformed.
        tiles: whether a GPU holds tiles.

    >>> from hf_kbit import KbitLinear
    >>> weight = KbitLinear.from_linear(nn.Linear(100, 64), bits=3).weight
    >>> weight.shape, weight.dtype, weight.is_floating_point()
    (torch.Size([64, 100]), torch.float32, True)
    >>> weight.T.shape, (torch.ones(2, 100) @ weight.T).shape
    (torch.Size([100, 64]), torch.Size([2, 64]))
    """

    words = property(lambda self: self.parts["words"])
    absmax = property(lambda self: self.parts["absmax"])
    codebook = property(lambda self: self.parts["codebook"])
    columns = property(lambda self: self.parts["columns"])
    matrix = property(lambda self: self.parts["matrix"])
    qualified_name = "weight"  # in the model, where a layer has told it: errors begin with it

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

    @classmethod
    def of(cls, packed: Packed, in_features: int, dtype: torch.dtype, tiles: bool = True) -> "KbitTensor":
        """A weight ``[*lead, N, in_features]`` of packed tensors, where these are; on a GPU they become ``tiles``."""
        device, decoding = packed.planes.device, packed.decoding
        *lead, rows, _ = packed.planes.shape
        parts = {"words": packed.planes, "absmax": packed.absmax, "codebook": decoding.codebook(device)}
        parts |= {"columns": packed.columns, "matrix": (rows, in_features)}
        return cls((*lead, rows, in_features), parts, decoding, dtype, tiles).settled()

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        decoding: Decoding,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        tiles: bool = True,
    ) -> "KbitTensor":
        """A weight ``[*lead, N, K]`` of zeros."""
        *lead, rows, width = shape
        planes = torch.zeros((*lead, *weight_shape(rows, width, decoding.bits)), dtype=torch.int32, device=device)
        absmax = torch.zeros((*lead, *absmax_shape(rows, width)), dtype=torch.uint8, device=device)
        columns = torch.zeros(width, dtype=torch.uint8, device=device) if decoding.transformed else None
        return cls.of(Packed(planes, absmax, decoding, columns), width, dtype, tiles)

    def like(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, **parts) -> "KbitTensor":
        """Another weight that decodes as this one, with some of the ``parts`` replaced; it shares the others."""
        form = self.form
        parts = {**self.parts, **parts}
        parts.pop("inverses", None)
        made = KbitTensor(
            self.outer_shape if shape is None else shape, parts, form.decoding, dtype or form.dtype, form.tiles
        )
        made.qualified_name = self.qualified_name
        return made

    def each(self, fn, **parts) -> "KbitTensor":
        """``like``, of what a function makes of each of the tensors."""
        made = {name: fn(self.parts[name]) for name in self.form.names}
        return self.like(**made, **parts)

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
    def lead(self) -> tuple[int, ...]:
        return tuple(self.words.shape[: -5 if self.is_tiled else -2])

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """``[*lead, N, K]``, also while FSDP2 shows the weight flat."""
        return (*self.lead, *self.matrix)

    @property
    def nbytes_packed(self) -> int:
        """Of words and scales; the codebook is the same for many."""
        return sum(self.parts[name].nbytes for name in self.form.names if name != "codebook")

    # --- forms ---

    @property
    def is_tiled(self) -> bool:
        return reference.is_tiled(self.words, self.absmax, self.bits)

    def _repacked(self, inverse: bool) -> "KbitTensor":
        words, absmax = torch.ops.hf_kbit.repack(self.words, self.absmax, self.bits, list(self.matrix), inverse)
        return self.like(words=words, absmax=absmax)

    def settled(self) -> "KbitTensor":
        """The weight in the form that its device reads."""
        wanted = self.tiles and reads_tiles(self.words.device)
        return self._repacked(inverse=False) if wanted and not self.is_tiled else self

    def planes(self) -> "KbitTensor":
        """The weight in the stored form, where it is."""
        return self._repacked(inverse=True) if self.is_tiled else self

    @property
    def decoding_tensor(self) -> torch.Tensor:
        """``decoding.to_tensor()``, one for all layers that have this weight, as they have its other tensors."""
        known = getattr(self, "_decoding_tensor", None)
        if known is None or known[0] is not self.decoding:
            known = self._decoding_tensor = self.decoding, self.decoding.to_tensor()
        return known[1]

    def file_tensors(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """What files hold of it, by the names that they have there; on a device, or on its own."""
        planes = self.planes()
        tensors = planes.words, planes.absmax, planes.columns
        return {
            name: tensor if device is None else tensor.to(device)
            for name, tensor in zip(PACKED, tensors, strict=True)
            if tensor is not None
        }

    def copies(self) -> dict[str, torch.Tensor]:
        """``file_tensors``, copied into CPU memory, for a GPU may have no room for them; the same ones again for as
        long as somebody holds them."""
        words, kept = getattr(self, "_copies", (lambda: None, {}))
        held = {name: copy() for name, copy in kept.items()}
        if words() is not self.words or any(tensor is None for tensor in held.values()):
            held = self.planes().each(lambda tensor: tensor.to("cpu", copy=True)).file_tensors()
            copies = {name: weakref.ref(tensor) for name, tensor in held.items()}
            self._copies = weakref.ref(self.words), copies
        return held

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded weight, in ``dtype`` or in its own."""
        form, parts = self.form, self.parts
        if not math.prod(self.outer_shape):
            return torch.empty(self.outer_shape, dtype=dtype or form.dtype, device=parts["words"].device)
        how = parts["codebook"], list(parts["matrix"]), dtype or form.dtype, parts["columns"]
        made = torch.ops.hf_kbit.dequantize(parts["words"], parts["absmax"], *how, form.decoding.transformed)
        return made.view(self.outer_shape)

    def matrices(self, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """The decoded matrices ``[N, K]``, one after another, with memory for one."""
        for index in itertools.product(*map(range, self.lead)):
            yield self[index].dequantize(dtype)

    def moved(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "KbitTensor":
        """The weight on another device, in the form that is read there, or computed in another dtype."""
        device = torch.device(device)
        if device == self.words.device:
            return self.like(dtype=dtype)
        made = self.planes().each(lambda tensor: tensor.to(device), dtype=dtype)
        if self.words.is_meta:
            made.parts["codebook"] = self.decoding.codebook(device)
        return made.settled()

    def replace(self, other: "KbitTensor") -> None:
        """Takes over another weight in place: all that have this one have the other from now on."""
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
        parts = {"columns": None, **inner, "matrix": form.matrix}
        return KbitTensor(outer_size, parts, form.decoding, form.dtype, form.tiles)

    def __repr__(self, *, tensor_contents=None):
        form = self.form
        what = f"shape={tuple(self.outer_shape)}, dtype={form.dtype}, device={self.words.device}, bits={self.bits}"
        return f"KbitTensor({what})"

    def __reduce_ex__(self, protocol):
        planes, form = self.planes(), self.form
        how = list(form.decoding.levels), form.decoding.exponent, form.decoding.transform
        tensors = planes.words, planes.absmax, planes.columns
        is_parameter = isinstance(self, nn.Parameter)
        return _rebuild, (*tensors, *how, form.matrix[1], form.dtype, form.tiles, is_parameter)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            made = self.each(torch.clone)
            memo[id(self.parts)] = made.parts
            memo[id(self)] = as_parameter(made) if isinstance(self, nn.Parameter) else made
        return memo[id(self)]

    # --- several processes ---

    def bytes_of_rows(self) -> torch.Tensor:
        """uint8 ``[*lead, N, 4 * B * bits + B]``: the planes and scales of each row."""
        planes = self.planes()
        return torch.cat([planes.words.contiguous().view(torch.uint8), planes.absmax], -1)

    def as_floats(self) -> torch.Tensor:
        """The bytes of each row in as many floats as the row has: what goes from a process that has the weight to one
        that knows shape and dtype alone, as in ``broadcast``. ``of_floats`` reads it, and all others get nonsense.

        Raises:
            ValueError: rows are so short that their bytes do not fit.
        """
        form, rows = self.form, self.bytes_of_rows()
        parts = [self._mark.to(rows.device), *([] if self.columns is None else [self.columns]), rows]
        used = torch.cat([part.expand(*rows.shape[:-1], part.shape[-1]) for part in parts], -1)
        free = self.matrix[1] * form.dtype.itemsize - used.shape[-1]
        if free < 0:
            raise ValueError(f"weight: found rows of {self.matrix[1]} {form.dtype}, expected longer ones to send them")
        return nn.functional.pad(used, (0, free)).view(form.dtype)

    def of_floats(self, floats: torch.Tensor) -> "KbitTensor | None":
        """A weight that came by ``as_floats`` from one of this shape that decodes as this one; None if it did not."""
        form, width = self.form, self.matrix[1]
        if floats.dtype != form.dtype or floats.shape != self.outer_shape or floats.is_meta or not floats.numel():
            return None
        rows, columns = floats.contiguous().view(torch.uint8), None
        mark, rows = rows.tensor_split([MARK], -1)
        if not torch.equal(mark.flatten(0, -2)[0], self._mark.to(mark.device)):
            return None
        if form.decoding.transformed:
            columns, rows = rows.tensor_split([width], -1)
            columns = columns.flatten(0, -2)[0].clone()
        packed = Packed(*_of_bytes(rows, width, self.bits), form.decoding, columns)
        return KbitTensor.of(packed, width, form.dtype, form.tiles)

    @property
    def _mark(self) -> torch.Tensor:
        """uint8 ``[MARK]``: tells a row of ``as_floats``, and how it decodes."""
        digest = hashlib.sha256(repr(self.decoding).encode()).digest()
        return torch.frombuffer(bytearray(digest[:MARK]), dtype=torch.uint8)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        """Words and scales; where rows are no multiple of the processes the bytes of both, for then FSDP2 gathers
        nothing but tensors of the shape of a weight."""
        form, lead, processes = self.form, self.lead, mesh.size()
        dtype = mp_policy.param_dtype or form.dtype
        if outer_size[0] % processes:
            rows, width = self.bytes_of_rows(), outer_size[-1]
            missing = -(-outer_size[0] // processes) - len(rows)
            count = -(-rows.shape[-1] // width)
            padding = (0, count * width - rows.shape[-1], *(0,) * 2 * len(lead), 0, missing)
            parts = nn.functional.pad(rows, padding).split(width, -1)
            return tuple(part.contiguous() for part in parts), (outer_size, dtype, None)
        # The form that all processes find, whatever has come to this one.
        tiles = self.tiles and reads_tiles(self.words.device) and (lead or not outer_size[0] % (TILE_ROWS * processes))
        packed = self.settled() if tiles else self.planes()
        # With one process FSDP2 gathers the first tensor alone.
        return (packed.words.contiguous(), packed.absmax.contiguous()), (outer_size, dtype, packed.absmax)

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        size, dtype, rest = metadata
        if uneven := rest is None:
            gathered = _of_bytes(torch.cat(gathered, -1)[: size[0]], size[-1], self.bits)
        words, absmax = gathered if len(gathered) > 1 else (*gathered, rest)
        if out is None:
            made = self.like(size, dtype, words=words, absmax=absmax, matrix=tuple(size[-2:]))
            return made, gathered if uneven else ()  # what FSDP2 is to free, besides what it has gathered
        own = getattr(out, "_local_tensor", out)
        own.decoding = self.decoding  # which another state dict may have changed
        own.parts.update(codebook=self.codebook, columns=self.columns)
        own.parts.pop("inverses", None)
        if not uneven:  # the tensors that it has had before, but for one process
            own.parts.update(words=words, absmax=absmax)
            return None
        with torch.autograd._unsafe_preserve_version_counter((own.words, own.absmax)):
            torch._foreach_copy_((own.words, own.absmax), gathered)
        return None

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
        refuse_writes(cls, func, args, kwargs)
        # Under inference mode ops come here that are made of others, some of which keep it packed.
        if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
            return made
        decoded = pytree.tree_map_only(KbitTensor, KbitTensor.dequantize, (args, kwargs))
        made = func(*decoded[0], **decoded[1])
        return Decoded.views(made, args[0]) if func.is_view else made


def _of_bytes(rows: torch.Tensor, width: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Planes and scales, copied out of what ``bytes_of_rows`` has made of them; what is behind them is passed by."""
    blocks = num_blocks(width)
    parts = rows.tensor_split([4 * bits * blocks, (4 * bits + 1) * blocks], -1)[:2]
    words, absmax = (part.clone(memory_format=torch.contiguous_format) for part in parts)
    return words.view(torch.int32), absmax


def as_parameter(weight: KbitTensor) -> nn.Parameter:
    """A frozen parameter of the same tensors, and the same dictionary of them."""
    made = nn.Parameter(weight, requires_grad=False)
    made.parts = weight.parts
    return made


def _rebuild(planes, absmax, columns, levels, exponent, transform, in_features, dtype, tiles, is_parameter):
    """What a pickle makes a weight of."""
    decoding = Decoding(tuple(levels), exponent, transform)
    made = KbitTensor.of(Packed(planes, absmax, decoding, columns), in_features, dtype, tiles)
    return as_parameter(made) if is_parameter else made


torch.serialization.add_safe_globals([_rebuild, KbitTensor])
