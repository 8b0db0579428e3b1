"""KbitWeight: what every layer with a packed weight has in common, and in what forms it holds it."""

import copy
import itertools
import math
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_kbit import codebooks, reference
from hf_kbit.format import absmax_shape, check_bits, encode_e4m4, weight_shape
from hf_kbit.nn.packed import DEFAULT_TRANSFORM, Decoding, Packed, check_transform, lopsided, quantize_weight
from hf_kbit.ops import native

SCALES = ("absmax", "search")
DEFAULT_CODEBOOK, DEFAULT_SCALE = "optimal", "search"  # made for each other
PACKED = ("weight", "weight_absmax", "weight_columns")  # the last where there are column scales
DECODING = "kbit"  # in the metadata of a state dict


class _Thread(threading.local):
    """What this thread is at: saving or loading a model, one layer after the other.

    Layers that are tied have their parameters in common, and so has what is saved of them. ``put`` says, by the words
    of tiles, where their planes were put last in a state dict, ``pickled`` which planes a pickler has that is at work.
    ``warned`` is the list of errors of the ``load_state_dict`` that was warned of.
    """

    def __init__(self):
        self.put, self.pickled, self.warned = WeakTensorKeyDictionary(), WeakTensorKeyDictionary(), None


_THREAD = _Thread()
_LEFT_OUT = ContextVar("packed weights are left out of state dicts", default=False)


def _warn_of_lost_decoding(name: str, errors: list[str]) -> None:
    """Once in a ``load_state_dict``, whose layers all get the same list of errors."""
    if _THREAD.warned is errors:
        return
    _THREAD.warned = errors
    warnings.warn(
        f"{name}: found a state dict without metadata, which says how packed words decode, and kept the layer's own "
        "levels, exponent and transform: right only if the words were quantized with the same. Load the state dict "
        "that torch has made or saved, with its metadata, or load by from_pretrained or hf_kbit.load_into",
        stacklevel=2,
    )


@contextmanager
def without_packed_weights() -> Iterator[None]:
    """State dicts made inside have no packed weights: for saving what a model has besides."""
    token = _LEFT_OUT.set(True)
    try:
        yield
    finally:
        _LEFT_OUT.reset(token)


def distinct(layers: Iterable["KbitWeight"]) -> list["KbitWeight"]:
    """Of layers that are tied to one another only the first."""
    return list({id(layer.weight): layer for layer in reversed(list(layers))}.values())[::-1]


def check_scale(scale: object) -> str:
    """Returns ``scale`` if it is one of ``SCALES``.

    Raises:
        ValueError: it is not.
    """
    if scale not in SCALES:
        raise ValueError(f"scale: found {scale!r}, expected one of {list(SCALES)}")
    return scale


def reads_tiles(device: torch.device) -> bool:
    """Whether the kernels of a device read tiles."""
    return device.type == "cuda" and native.library("cuda").loaded


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this process has a shard."""
    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; of one that is sharded, all processes have to ask for it."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def _sharded_like(shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A DTensor of shards of one size, along the dimension of that of ``whole``, which has it for the same things."""
    shape = list(shard.shape)
    for processes, placement in zip(whole.device_mesh.shape, whole.placements, strict=True):
        if hasattr(placement, "dim"):
            shape[placement.dim] *= processes
    stride, place = torch.empty(shape, device="meta").stride(), (whole.device_mesh, whole.placements)
    return type(whole).from_local(shard, *place, run_check=False, shape=torch.Size(shape), stride=stride)


def _frozen(tensor: torch.Tensor | None) -> nn.Parameter | None:
    return None if tensor is None else nn.Parameter(tensor, requires_grad=False)


class KbitWeight(nn.Module):
    """A frozen weight of 2, 3, 4 or 5 bits, of one matrix or of several that have their input in common.

    Its parameters, after leading dimensions ``lead`` for the matrices if there are several:

    - ``weight``: int32 bit-planes ``[*lead, N, B * bits]``, no gradient,
    - ``weight_absmax``: uint8 scales ``[*lead, N, B]``, E4M4, or SE3M4 where the weight is transformed, no gradient,
    - ``weight_columns``: uint8 E4M4 column scales ``[K]``, no gradient, or None where the weight is not transformed.

    How they decode is one value, ``decoding``: levels, exponent, and whether the weight is transformed
    (``nn.packed.Decoding``). ``load`` sets all of them. Of a transform (``hf_kbit.transforms``) nothing is seen from
    outside: what goes in, and what ``dequantize`` gives, is the weight that multiplies the layer's input.

    On a GPU the first two hold the tiles that kernels read (``repack``): made once when the layer arrives there by
    ``to``, ``cuda``, quantizing or loading, and turned back when it moves away; also where it has a shard of tensor or
    expert parallelism (``local_shape``), but not where FSDP2 has sharded it. What others see is in the stored form:
    its state dict (in CPU memory, so that saving takes no second copy on the GPU), pickles and copies. The metadata of
    a state dict has the decoding, so that ``load_state_dict`` of another layer takes it over; a state dict that lost
    its metadata, such as a plain dict of its tensors, fits layers of the same levels, exponent and transform alone.

    The float32 buffer ``codebook`` ``[2**bits]``, ``levels * 2**exponent``, is in no state dict; it is made again from
    ``decoding`` whenever the module moves, so a cast to another dtype cannot round it.

    Args:
        in_features: K, any size of 1 or more.
        out_features: N, any size of 1 or more.
        bits: 2 to 5.
        codebook: name or table of ``2**bits`` numbers (``codebooks.resolve``).
        exponent: power of two that multiplies the levels.
        device: of the parameters and the codebook.
        dtype: of the weight that the layer stands for: what ``dequantize`` gives.
        scale: how ``load_dense`` finds the scale of a block: ``"search"``, by the squared error, or ``"absmax"``, from
            its largest magnitude (``hf_kbit.ops.quantize``).
        transform: what ``load_dense`` does to a weight first: ``"rotated"`` or ``"none"`` (``KbitConfig``).
        lead: how many matrices there are, in each leading dimension.

    A new one holds zeros in ``weight`` and ``weight_absmax``.

    Raises:
        ValueError: bits, codebook or a size is out of range.
    """

    # In the model that the layer was put into; errors of its forward begin with it.
    qualified_name: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bits: int = 4,
        codebook: str | Iterable[float] = DEFAULT_CODEBOOK,
        exponent: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scale: str = DEFAULT_SCALE,
        transform: str = DEFAULT_TRANSFORM,
        lead: tuple[int, ...] = (),
    ):
        nn.Module.__init__(self)  # nn.Linear's, which may come next, would allocate the dense weight
        for name, size in (("in_features", in_features), ("out_features", out_features)):
            if size < 1:
                raise ValueError(f"{name}: found {size}, expected 1 or more")
        self.lead, self.in_features, self.out_features = lead, in_features, out_features
        self.scale, self.transform = check_scale(scale), check_transform(transform)
        levels = codebooks.resolve(codebook, check_bits(bits), lopsided(transform, scale))
        self.dense_dtype = dtype or torch.get_default_dtype()
        self.transposed = False  # whether the layer stands for one whose weight is [*lead, K, N]
        self.balances = True  # whether column scales are found for a weight that is transformed; else all are 1
        self.untransformed = ""  # why its weight is not transformed, if it was to be (Packed)
        self.tied = False  # whether its parameters are those of other layers of the model too (tie_to)
        # [N, K] of what this process multiplies by, under tensor or expert parallelism; None: by whole matrices.
        self.local_shape: tuple[int, int] | None = None
        planes, absmax = weight_shape(out_features, in_features, bits), absmax_shape(out_features, in_features)
        self.weight = _frozen(torch.zeros((*lead, *planes), dtype=torch.int32, device=device))
        self.weight_absmax = _frozen(torch.zeros((*lead, *absmax), dtype=torch.uint8, device=device))
        self.register_parameter("weight_columns", None)
        self.decode_as(Decoding(levels, exponent, transform))
        self.register_buffer("codebook", self.decoding.codebook(self.weight.device), persistent=False)

    @property
    def num_weights(self) -> int:
        """Of the matrices that the layer stands for."""
        return math.prod((*self.lead, self.out_features, self.in_features))

    @property
    def levels(self) -> codebooks.Levels:
        return self.decoding.levels

    @property
    def exponent(self) -> int:
        return self.decoding.exponent

    @property
    def packed(self) -> dict[str, torch.Tensor]:
        """The packed parameters that there are, by name."""
        return {name: self._parameters[name] for name in PACKED if self._parameters[name] is not None}

    def refuse(self, x: torch.Tensor, width: int) -> None:
        """Says what is wrong with an ``x`` that is not floating ``[*, width]``."""
        if not x.is_floating_point():
            raise TypeError(
                f"x: found dtype {x.dtype}, expected a floating one. Some models cast to `weight.dtype`, an integer "
                "type here: name such a layer in `modules_to_not_convert`"
            )
        raise ValueError(f"x: found shape {list(x.shape)}, expected [*, {width}], the in_features of the layer")

    def recover(self, error: TypeError | ValueError, *args) -> torch.Tensor:
        """The result of a forward that has failed, if that can be mended; else its error, which names the layer."""
        if self.restore_columns():
            return self.forward(*args)
        raise type(error)(f"{self.qualified_name or type(self).__name__}: {error}") from error

    def restore_columns(self) -> bool:
        """Makes bytes again of column scales that a loop has cast that casts all vectors of a model for training;
        floats hold them exactly. Whether it had to."""
        columns = self.weight_columns
        if columns is None or columns.dtype == torch.uint8:
            return False
        columns.data = columns.data.to(torch.uint8)
        return True

    # --- a weight comes in ---

    def quantize(self, weight: torch.Tensor, name: str = "weight", columns: torch.Tensor | None = None) -> Packed:
        """What ``load_dense`` would load, on the weight's own device; the layer stays as it is. It says if that is not
        transformed as it was to be, or has lost rows (``Packed``).

        Args:
            weight: float32, float16 or bfloat16 ``[*lead, N, K]``.
            name: what errors call the weight.
            columns: uint8 ``[K]``, column scales to take if the weight is transformed, instead of finding some, or of
                1 where the layer does not balance.

        Raises:
            ValueError: the weight holds NaN or infinity, or magnitudes that float32 cannot decode.
        """
        columns = self.fixed_columns(weight.device) if columns is None else columns
        return quantize_weight(weight, self.levels, self.scale == "search", self.transform, name, columns)

    def fixed_columns(self, device: torch.device) -> torch.Tensor | None:
        """Column scales of 1, if that is what a transformed weight is to have."""
        if self.balances:
            return None
        return torch.full((self.in_features,), encode_e4m4(1.0), dtype=torch.uint8, device=device)

    def load_dense(self, weight: torch.Tensor, name: str = "weight", columns: torch.Tensor | None = None) -> None:
        """Replaces the weight by the quantized ``weight`` ``[*lead, N, K]``, which decides device and exponent too;
        arguments and errors as of ``quantize``. Warns where it cannot be held as it was to be."""
        packed = self.quantize(weight, name, columns)
        if packed.lost:
            warnings.warn(f"{name}: {packed.lost}, and are lost. Leave the layer in 16 bits", stacklevel=3)
        elif packed.untransformed:
            warnings.warn(f"{name}: {packed.untransformed}; quantized without a transform", stacklevel=3)
        self.load(packed)

    def load(self, packed: Packed) -> None:
        """Replaces the weight by a packed one, which also decides the device.

        Raises:
            ValueError: it is tied, and other layers would keep theirs.
        """
        if self.tied:
            raise ValueError(
                "weight: found it tied to that of another layer, expected one of its own to replace: undo the "
                "quantization first (dequantize), or leave this layer as it is"
            )
        for name, tensor in zip(PACKED, (packed.planes, packed.absmax, packed.columns), strict=True):
            setattr(self, name, _frozen(tensor))
        self.decode_as(packed.decoding)
        self.untransformed = packed.untransformed
        self.settle(packed.planes.device)

    def decode_as(self, decoding: Decoding) -> None:
        """Takes over how the weight decodes that is loaded, or that Transformers is about to put here."""
        self.decoding, self.bits = decoding, decoding.bits
        self._make_room_for_columns(decoding)

    def tie_to(self, other: "KbitWeight") -> None:
        """Takes over the weight of another layer of the same shape: both have the same parameters from now on."""
        for name in PACKED:
            self._parameters[name] = other._parameters[name]
        self.decode_as(other.decoding)
        self.tied = other.tied = True
        self.settle(other.codebook.device)

    def _make_room_for_columns(self, decoding: Decoding) -> None:
        """Column scales are there if they are to be: zeros, before a weight has come."""
        if not decoding.transformed:
            self.weight_columns = None
        elif self.weight_columns is None:
            empty = torch.zeros(self.in_features, dtype=torch.uint8, device=self.weight.device)
            self.weight_columns = _frozen(empty)

    def settle(self, device: torch.device) -> None:
        """Makes what is not stored: the codebook, on ``device``, and tiles on a GPU. Whatever has put tensors into
        the layer calls it last."""
        self.codebook = self.decoding.codebook(device)
        self.to_tiles()

    # --- the form of the weight ---

    @property
    def is_tiled(self) -> bool:
        """Whether ``weight`` and ``weight_absmax`` hold tiles rather than the stored planes."""
        return reference.is_tiled(self.weight, self.weight_absmax, self.bits)

    def to_tiles(self) -> None:
        """Repacks the weight in place into what GPU kernels read; does nothing if it is not on a GPU, or if FSDP2 has
        sharded it."""
        by_fsdp2 = is_sharded(self.weight) and (self.local_shape is None or self.weight.device_mesh.ndim > 1)
        if reads_tiles(self.weight.device) and not by_fsdp2 and not self.is_tiled:
            self._hold(self._repacked(inverse=False))

    def to_planes(self) -> None:
        """Turns tiles back into the stored planes, in place and where they are."""
        if self.is_tiled:
            self._hold(self._repacked(inverse=True))

    def _hold(self, tensors: tuple[torch.Tensor, torch.Tensor]) -> None:
        _THREAD.pickled.pop(self.weight, None)
        for name, tensor in zip(PACKED, tensors, strict=False):
            if is_sharded(tensor):  # a DTensor is more than its data
                self._parameters[name] = _frozen(tensor)
            else:
                self._parameters[name].data = tensor

    def _repacked(self, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = self.weight.data, self.weight_absmax.data
        if self.local_shape is not None:
            made = torch.ops.hf_kbit.repack(*map(local, tensors), self.bits, list(self.local_shape), inverse)
            return tuple(map(_sharded_like, made, tensors))
        # Tiles that FSDP2 has sharded are gathered: its shards are of row tiles, and no shards of rows.
        return torch.ops.hf_kbit.repack(
            *map(whole, tensors), self.bits, [self.out_features, self.in_features], inverse
        )

    def _stored(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Copies of the packed parameters in the stored form, of tiles."""
        made = *self._repacked(inverse=True), *(tensor.detach().clone() for tensor in list(self.packed.values())[2:])
        return {name: tensor.to(device) for name, tensor in zip(self.packed, made, strict=True)}

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded weight ``[*lead, N, K]``, in ``dtype``, or in that of the weight that was quantized.

        Raises:
            ValueError: it is sharded over several processes.
        """
        return self._decoded(self.weight, self.weight_absmax, dtype)

    def matrices(self, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """The matrices ``[N, K]`` of ``dequantize``, one after another, with memory for one; errors as there."""
        for index in itertools.product(*map(range, self.lead)):
            yield self._decoded(self.weight[index], self.weight_absmax[index], dtype)

    def _decoded(self, weight: torch.Tensor, absmax: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        if is_sharded(self.weight):
            raise ValueError(
                "weight: found it sharded over several processes, expected all of it in this one to decode it: save "
                "the model, and load it in one process"
            )
        self.restore_columns()
        shape, dtype = [self.out_features, self.in_features], dtype or self.dense_dtype
        how = self.codebook, shape, dtype, self.weight_columns, self.decoding.transformed
        return torch.ops.hf_kbit.dequantize(weight, absmax, *how)

    # --- nn.Module's ways in and out: always in the stored form ---

    def _apply(self, fn, recurse=True):
        def packed_kept(tensor):
            moved = fn(tensor)
            if tensor.dtype == moved.dtype or tensor.is_floating_point():
                return moved
            return tensor.to(moved.device)  # model.type() would cast packed words too

        self.to_planes()
        if self.codebook.is_meta and not self.weight.is_meta:  # weights were put into a skeleton
            self.codebook = self.decoding.codebook(self.weight.device)
        super()._apply(packed_kept, recurse)
        self.dense_dtype = fn(torch.empty(0, dtype=self.dense_dtype, device=self.codebook.device)).dtype
        self.settle(self.codebook.device)
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self.restore_columns()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if _LEFT_OUT.get():
            for name in PACKED:
                destination.pop(prefix + name, None)
            return
        if hasattr(destination, "_metadata"):
            destination._metadata[prefix[:-1]][DECODING] = self.decoding.to_dict()
        if self.is_tiled:
            # What is sharded stays on the GPU, for it will be gathered there.
            device = self.weight.device if self.local_shape else torch.device("cpu")
            self._put_planes(destination, prefix, device)

    def _put_planes(self, destination: dict, prefix: str, device: torch.device) -> None:
        """Into a state dict: those that it has of a layer that this one is tied to, or new ones."""
        first, put = _THREAD.put.get(self.weight, (prefix, {}))
        stored = {name: put.get(name) for name in self.packed}
        there = (tensor is not None and destination.get(first + name) is tensor for name, tensor in stored.items())
        if first == prefix or not all(there):
            stored = self._stored(device)
            _THREAD.put[self.weight] = prefix, WeakValueDictionary(stored)
        destination.update({prefix + name: tensor for name, tensor in stored.items()})

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        given = [name for name in PACKED if prefix + name in state_dict]
        # nn.Module would copy any dtype into ours: floats cut to integers, without a word.
        for name in given:
            found, expected = state_dict[prefix + name].dtype, torch.int32 if name == "weight" else torch.uint8
            if found != expected:
                errors.append(f"{prefix + name}: found dtype {found}, expected {expected}")
                return
        if not given:  # of adapters, say: what is packed need not be turned around
            super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
            return
        if self.is_tiled and is_sharded(self.weight) and self.local_shape is None:
            errors.append(f"{prefix}weight: found it sharded as tiles, expected a layer to load before it is sharded")
            return
        decoding, columns, faults = self.decoding, self.weight_columns, len(errors)
        if DECODING in local_metadata:
            try:
                decoding = Decoding.from_dict(local_metadata[DECODING], self.bits, f"{prefix}weight")
            except ValueError as error:
                errors.append(str(error))
                return
            self._make_room_for_columns(decoding)
        self.to_planes()
        if DECODING not in local_metadata and not self._holds(state_dict.get(prefix + PACKED[0])):
            _warn_of_lost_decoding(prefix + PACKED[0], errors)
        # Where parameters are assigned, those of somebody else would turn into tiles.
        own = {prefix + name: state_dict[prefix + name].detach() for name in given}
        state_dict = {**state_dict, **own}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)
        if decoding != self.decoding:
            if len(errors) == faults and not any(prefix + name in missing for name in PACKED):
                self.decode_as(decoding)
            else:
                self.weight_columns = columns
        self.settle(self.codebook.device if self.weight.is_meta else self.weight.device)

    def _holds(self, words: torch.Tensor | None) -> bool:
        """Whether the weight is this one already, as where a training goes on, or may have been before it was moved to
        the meta device, as where accelerate shards a model."""
        own, words = local(self.weight), self.weight if words is None else words
        return own.is_meta or words.is_meta or torch.equal(own, local(words).to(own.device))

    def __copy__(self):
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo):
        other = memo[id(self)] = type(self).__new__(type(self))
        other.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return other

    def __getstate__(self):
        self.restore_columns()
        if not self.is_tiled:
            return self.__dict__
        # The same for all layers that are tied.
        pickled = dict(_THREAD.pickled.get(self.weight, {}))
        if pickled.keys() != self.packed.keys():
            pickled = {name: _frozen(tensor) for name, tensor in self._stored(self.weight.device).items()}
            _THREAD.pickled[self.weight] = WeakValueDictionary(pickled)
        return {**self.__dict__, "_parameters": {**self._parameters, **pickled}}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.to_tiles()
