"""KbitWeight: what every layer with a packed weight has in common."""

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_kbit.format import codebooks
from hf_kbit.format.decoding import DEFAULT_TRANSFORM, Decoding, ScalarDecoding, check_transform, lopsided
from hf_kbit.format.kinds import NAMES
from hf_kbit.format.spec import PLAIN, TRANSFORMED, TRELLIS, check_bits
from hf_kbit.format.trellis import TrellisDecoding
from hf_kbit.hooks.setting import arm
from hf_kbit.nn.classes import MEMBERS, Changed, change, changed
from hf_kbit.nn.offload import read_kept
from hf_kbit.ops import native
from hf_kbit.weight.packing import DEFAULT_CODEBOOK, DEFAULT_SCALE, Recipe, check_scale
from hf_kbit.weight.tensor import HOW, WEIGHT, KbitTensor, Packed, as_parameter
from hf_kbit.weight.tensor_ops import moving

# Whether state dicts have packed weights as one value each, whoever asks for them.
AS_ONE_VALUE: ContextVar[bool] = ContextVar("state dicts of packed weights as one value", default=False)
# Attributes of a layer that its plain class does not have.
OWN = ("recipe", "qualified_name", "awaits_dense", "tied", "parts", "inputs")
DECODING = "kbit"  # in the metadata of state dicts that hold a weight by its stored tensors


def packed_layers(model: nn.Module) -> dict[str, "KbitWeight"]:
    """Layers and projections of a model with a packed weight, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, KbitWeight)}


def said_of(layers: Mapping[str, "KbitWeight"]) -> tuple[dict[str, Decoding], list[str], int]:
    """What files say of layers: how each decodes, which are tables, and the least version of the format for them."""
    tables = [name for name, layer in layers.items() if isinstance(layer, nn.Embedding)]
    decodings = {name: layer.decoding for name, layer in layers.items()}
    newer = tables or any(layer.decoding.transformed or layer.lead for layer in layers.values())
    has_trellis = any(isinstance(each, TrellisDecoding) for each in decodings.values())
    return decodings, tables, TRELLIS if has_trellis else TRANSFORMED if newer else PLAIN


def distinct(layers: Iterable["KbitWeight"]) -> list["KbitWeight"]:
    """Of layers that are tied to one another only the first."""
    return list({id(layer.weight): layer for layer in reversed(list(layers))}.values())[::-1]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, of which this process has a shard."""
    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor._local_tensor if is_sharded(tensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor; of one that is sharded all processes have to ask for it."""
    if not is_sharded(tensor):
        return tensor
    return tensor.to(tensor.device_mesh.device_type).full_tensor()  # it may be offloaded


def _received(given: torch.Tensor, weight: KbitTensor) -> torch.Tensor:
    """What is in a state dict, but for shards that another process has sent as floats: those as a weight."""
    sent = weight.of_floats(given._local_tensor) if is_sharded(given) else None
    if sent is None:
        return given
    place = given.device_mesh, given.placements
    return DTensor.from_local(sent, *place, run_check=False, shape=given.shape, stride=given.stride())


def _accelerate_shards() -> bool:
    """Whether accelerate is to shard models by FSDP2 in this process: it sends what their state dicts have into places
    of the shapes and dtypes of parameters."""
    state = sys.modules.get("accelerate.state")
    plugin = None if state is None else state.AcceleratorState._shared_state.get("fsdp_plugin")
    return plugin is not None and plugin.fsdp_version == 2


def _kind(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else f"dtype {tensor.dtype} and shape {list(tensor.shape)}"


class KbitWeight(Changed, nn.Module):
    """A layer with a frozen weight of 2, 3, 4 or 5 bits, of one matrix or of several that have their input in common.

    Its parameter ``weight`` is a ``KbitTensor``: to others a tensor ``[*lead, N, K]`` of the dtype that it is computed
    in. How it decodes is one value, ``decoding``. Of a transform (``format.transforms``) nothing is seen from
    outside.

    A state dict has plain tensors, which anything saves: those that files have (``Decoding.layout``), and
    ``weight_decoding``, which says how they decode (``Decoding.to_tensor``). Those of a weight on a GPU are copies in
    CPU memory. ``load_state_dict`` takes them, and without the last one for a layer that decodes alike. With
    ``keep_vars=True``, on the meta device, and where FSDP2 shards the model, a state dict has the ``KbitTensor``
    itself, which is loaded too.

    A layer of another class becomes one in place (``pack``). Of one that is made by hand, ``sizes`` are those of its
    plain class, by their names, and the other arguments are those of ``KbitLinear``.
    """

    # OWN, by default.
    qualified_name: str | None = None  # in the model; errors of its forward begin with it
    recipe = Recipe()  # of a weight that ``load_dense`` is given
    awaits_dense = False  # whether a 16-bit weight is about to be loaded, and quantized
    tied = False  # whether its weight is that of other layers of the model too (tie_to)
    parts: dict | None = None  # those of its weight

    lead: tuple[int, ...] = ()
    transposed = False  # whether it stands for a weight [*lead, K, N]
    reads_tiles = True  # whether its kernels read tiles on a GPU

    def __init__(
        self,
        sizes: Mapping[str, int],
        bits: int = 4,
        codebook: str | Iterable[float] = DEFAULT_CODEBOOK,
        exponent: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        scale: str = DEFAULT_SCALE,
        transform: str = DEFAULT_TRANSFORM,
        lead: tuple[int, ...] = (),
    ):
        arm()
        nn.Module.__init__(self)  # nn.Linear's, which may come next, would allocate the dense weight
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: found {size}, expected 1 or more")
            setattr(self, name, size)
        if lead:
            self.lead = lead
        self.recipe = Recipe(check_scale(scale), check_transform(transform), self.recipe.balances)
        levels = codebooks.resolve(codebook, check_bits(bits), lopsided(transform, scale))
        self.make_room(ScalarDecoding(levels, exponent, transform), dtype or torch.get_default_dtype(), device)

    # --- a layer of another class becomes one, and back ---

    @classmethod
    def pack(cls, layer: nn.Module, weight: KbitTensor, recipe: Recipe) -> None:
        """Changes a dense layer, in place, into one with a packed weight ``[N, K]``."""
        arm()
        change(layer, changed(type(layer), cls))
        layer._parameters["weight"] = weight if isinstance(weight, nn.Parameter) else as_parameter(weight)
        layer.recipe = recipe
        layer._take(layer._parameters["weight"])

    def unpack(self, weight: nn.Parameter) -> None:
        """Changes the layer, in place, back into what it was before, with a weight in the order of the model."""
        self._parameters["weight"] = weight
        for name in OWN:
            vars(self).pop(name, None)
        change(self, type(self).plain)

    @classmethod
    def names_taken(cls, layer: nn.Module) -> set[str]:
        """What a dense layer, or its class, has that is called as what is ours."""
        kinds = type(layer).__mro__
        given = set(vars(layer)).union(*(getattr(layer, kept) for kept in MEMBERS))
        given = given.union(*map(vars, kinds[: kinds.index(cls.plain)]))
        ours = set(OWN).union(*(vars(kind) for kind in cls.__mro__ if issubclass(kind, KbitWeight | Changed)))
        return {name for name in given & ours - vars(cls.plain).keys() if not name.startswith("__")}

    @property
    def decoding(self) -> Decoding:
        weight = self.weight
        weight = local(getattr(weight, "stands_for", weight))  # before a shard has come (parallel.put_stand_in)
        if not isinstance(weight, KbitTensor):
            raise ValueError(self._not_packed(weight))
        return weight.decoding

    @property
    def is_packed(self) -> bool:
        """Whether its weight is packed; some put a dense one into its place, with which it computes as a dense layer
        would."""
        return isinstance(local(self.weight), KbitTensor)

    def _not_packed(self, weight) -> str:
        return (
            f"{self.qualified_name or type(self).__name__}.weight: found a dense one ({type(weight).__name__}, "
            f"{_kind(weight)}), expected a packed one: load_dense(weight) of the layer quantizes it; or put a dense "
            "layer in this one's place (dequantize)"
        )

    @property
    def bits(self) -> int:
        return self.decoding.bits

    @property
    def dense_dtype(self) -> torch.dtype:
        """Of the weight that the layer stands for."""
        return self.weight.dtype

    @property
    def num_weights(self) -> int:
        """Of the matrices that the layer stands for."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """``[*lead, N, K]``, of the matrices that the layer stands for."""
        return *self.lead, self.out_features, self.in_features

    @property
    def model_shape(self) -> tuple[int, ...]:
        """Of the weight that the layer stands for, in the order of the model."""
        *lead, rows, width = self.shape
        return (*lead, width, rows) if self.transposed else self.shape

    @property
    def packed(self) -> dict[str, torch.Tensor]:
        """What files hold of the weight, by the names that they have there."""
        return self.weight.file_tensors()

    # What a state dict has besides the weight torch looks up in the module; see the end of this file for the others.
    weight_decoding = property(lambda self: self.decoding.to_tensor())

    def refuse(self, x: torch.Tensor, width: int) -> None:
        """Says what is wrong with an ``x`` that is not floating ``[*, width]``."""
        if not x.is_floating_point():
            raise TypeError(f"x: found dtype {x.dtype}, expected a floating one")
        raise ValueError(f"x: found shape {list(x.shape)}, expected [*, {width}], the in_features of the layer")

    def fail(self, error: Exception) -> NoReturn:
        """Raises an error of the forward, which names the layer if it is about what the layer was given."""
        refused = native.refusal(error)
        if refused is None:
            raise error
        raise type(refused)(f"{self.qualified_name or type(self).__name__}: {refused}") from error

    # --- a weight comes in ---

    def quantize(self, weight: torch.Tensor, name: str = "weight", columns: torch.Tensor | None = None) -> Packed:
        """What ``load_dense`` would load of a weight ``[*lead, N, K]``, on its own device; the layer stays as it is.
        Arguments and errors are those of ``packing.quantize_weight``."""
        return self.recipe.quantize(weight, self.decoding, name, columns)

    def load_dense(self, weight: torch.Tensor, name: str = "weight", columns: torch.Tensor | None = None) -> None:
        """Replaces the weight by the quantized ``weight`` ``[*lead, N, K]``, which decides the device too; arguments
        and errors as of ``quantize``. Warns where it cannot be held as it was to be."""
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
        self.weight = as_parameter(self.as_tensor(packed))

    def as_tensor(self, packed: Packed) -> KbitTensor:
        """A packed weight as the layer would hold it."""
        return KbitTensor.of(packed, self.shape, self.dense_dtype, self.reads_tiles)

    def make_room(
        self, decoding: Decoding, dtype: torch.dtype | None = None, device: torch.device | str | None = "meta"
    ) -> None:
        """Makes the weight one of zeros that decodes so, until that is loaded which is to be there."""
        self.weight = as_parameter(
            KbitTensor.empty(self.shape, decoding, dtype or self.dense_dtype, device, self.reads_tiles)
        )

    def tie_to(self, other: "KbitWeight") -> None:
        """Takes over the weight of another layer of the same shape: both have the same parameter from now on."""
        self.weight = other.weight
        self.tied = other.tied = True

    def __setattr__(self, name, value):
        if name == "weight" and not isinstance(local(value), KbitTensor):
            own = self._parameters.get("weight")
            if isinstance(own, KbitTensor) and not own.is_meta:
                raise TypeError(self._not_packed(value))
        super().__setattr__(name, value)
        if name in ("weight", "qualified_name"):
            self._take(self.weight)
        elif name == "_hf_hook":  # where accelerate puts what moves the tensors of a layer
            read_kept(self, value)

    def _take(self, weight: torch.Tensor) -> None:
        """Keeps the dictionary of a weight where compiled code reads it: guards on the tensor itself are slow."""
        packed = local(weight)
        if isinstance(packed, KbitTensor):
            if self.qualified_name is not None:
                packed.qualified_name = f"{self.qualified_name}.weight"
            if self.reads_tiles and not packed.tiles:  # that of a table, which is tied to this layer
                packed.tiles = True
                packed.replace(packed.settled())
            self.__dict__["parts"] = packed.parts
        else:
            self.__dict__["parts"] = None

    # --- what it decodes to ---

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded weight ``[*lead, N, K]``, in ``dtype`` or in its own, of one that is all in this process."""
        return self._whole().dequantize(dtype)

    def matrices(self, dtype: torch.dtype | None = None) -> Iterator[torch.Tensor]:
        """The matrices ``[N, K]`` of ``dequantize``, one after another, with memory for one."""
        return self._whole().matrices(dtype)

    def _whole(self) -> KbitTensor:
        if is_sharded(self.weight):
            raise ValueError(
                "weight: found it sharded over several processes, expected all of it in this one to decode it: save "
                "the model, and load it in one process"
            )
        if not self.is_packed:
            raise ValueError(self._not_packed(self.weight))
        return self.weight

    # --- nn.Module's ways in and out ---

    @contextmanager
    def _without_weight(self) -> Iterator[torch.Tensor]:
        """Inside, the layer has all but its weight, which methods of nn.Module would take for any tensor."""
        weight = self._parameters.pop("weight")
        try:
            yield weight
        finally:
            self._parameters = {"weight": weight, **self._parameters}

    def _apply(self, fn, recurse=True):
        if not isinstance(local(self._parameters.get("weight")), KbitTensor):
            return super()._apply(fn, recurse)
        with self._without_weight() as weight:
            super()._apply(fn, recurse)
        with torch.no_grad(), moving():
            made = fn(weight)
            if not isinstance(local(made), KbitTensor):  # model.type() casts to integers
                made = weight.to(made.device)
        if made is not weight:
            if isinstance(made, KbitTensor) and made.is_meta == weight.is_meta:
                weight.data = made  # in place: layers that are tied stay so
            else:
                self._parameters["weight"] = nn.Parameter(made, requires_grad=False)
        self._take(self._parameters["weight"])
        return self

    def _is_one_value(self) -> bool:
        """Whether a state dict has the weight as one value: what reads it then goes by the shapes of parameters."""
        weight = self.weight
        return AS_ONE_VALUE.get() or not isinstance(weight, KbitTensor) or weight.is_meta or _accelerate_shards()

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        if keep_vars or self._is_one_value():
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        others = {}
        super()._save_to_state_dict(others, prefix, keep_vars)
        weight = others.pop(f"{prefix}weight")
        # Of layers that are tied the same tensors, by which others tell that they are.
        stored = self.weight.copies() if weight.is_tiled else weight.file_tensors()
        stored[HOW] = self.weight.decoding_tensor
        destination.update({prefix + name: tensor for name, tensor in stored.items()} | others)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        if any(prefix + own in state_dict for own in (WEIGHT, self.decoding.names[0])):
            try:
                value = self._weight_in(state_dict, prefix, local_metadata)
            except ValueError as error:
                errors.append(str(error))
            else:
                self._load_value(value, local_metadata.get("assign_to_params_buffers", False))
        elif strict:
            own = [WEIGHT] if self._is_one_value() else [*self.decoding.layout(self.shape), HOW]
            missing += [prefix + each for each in own]
        rest = {key: value for key, value in state_dict.items() if key.removeprefix(prefix) not in self._own_names}
        with self._without_weight():
            super()._load_from_state_dict(rest, prefix, local_metadata, strict, missing, unexpected, errors)

    def _weight_in(self, state_dict, prefix: str, metadata) -> torch.Tensor:
        """The weight that a state dict has whole, as shards, or as the tensors of a file."""
        name = f"{prefix}{WEIGHT}"
        given = _received(state_dict[name], local(self.weight)) if name in state_dict else None
        if given is not None and isinstance(local(given), KbitTensor):
            if given.shape != self.weight.shape:
                raise ValueError(f"{name}: found shape {list(given.shape)}, expected {list(self.weight.shape)}")
            return given
        if is_sharded(self.weight):
            raise ValueError(
                f"{name}: found the tensors of a whole weight, expected a packed weight (KbitTensor) for a layer that "
                "is sharded: load before sharding, or give set_model_state_dict a state_dict(keep_vars=True)"
            )
        decoding = self._decoding_in(state_dict, prefix, metadata)
        layout, tensors = (decoding or self.decoding).layout(self.weight.shape), {}
        for own in (decoding or self.decoding).names:
            tensor, expected = state_dict.get(prefix + own), layout.get(own)
            wanted = "none" if expected is None else f"dtype {expected[0]} and shape {[*expected[1]]}"
            if (found := _kind(tensor)) != wanted:
                # nn.Module would copy any dtype into ours: floats cut to integers, without a word.
                raise ValueError(f"{prefix + own}: found {found}, expected {wanted}")
            tensors |= {own: tensor} if expected else {}
        made = self.as_tensor(Packed(tensors, decoding or self.decoding))
        if decoding is None and not self._holds(made):
            # Of the same words for each layer: so it is shown once.
            warnings.warn(
                f"load_state_dict: found packed weights without {HOW}, which says how they decode, and kept the "
                "layers' own levels, exponents and transforms: right only if they were quantized with the same. Load "
                "a state dict that a quantized model has made, or load by from_pretrained or hf_kbit.load_into",
                stacklevel=2,
            )
        return made if self.weight.is_meta else made.moved(self.weight.device)

    def _decoding_in(self, state_dict, prefix: str, metadata) -> Decoding | None:
        """What a state dict says of how its tensors decode; one of hf_kbit 0.1.0 says it in its metadata."""
        how = state_dict.get(prefix + HOW)
        if how is not None and not how.is_meta:
            return type(self.decoding).from_tensor(how, self.bits, prefix + HOW)
        if DECODING in metadata:
            return ScalarDecoding.from_dict(metadata[DECODING], self.bits, f"{prefix}weight")
        return None

    @property
    def _own_names(self) -> tuple[str, ...]:
        """What a state dict may call what belongs to the weight."""
        return (WEIGHT, *self.decoding.names, HOW)

    def _holds(self, made: KbitTensor) -> bool:
        """Whether the weight is this one already, as where a training goes on, or may have been before it was moved to
        the meta device, as where accelerate shards a model."""
        own, words = local(self.weight), made.as_stored().words
        return own.is_meta or words.is_meta or torch.equal(own.as_stored().words, words.to(own.device))

    def _load_value(self, value: torch.Tensor, assign: bool) -> None:
        if assign or is_sharded(self.weight) or self.weight.is_meta != value.is_meta:
            self.weight = nn.Parameter(value.detach(), requires_grad=False)
        else:
            # A copy: parameters of somebody else would turn into tiles.
            made = value.detach().moved(self.weight.device, self.weight.dtype)
            self.weight.data = made.each(torch.clone)

    def _replicate_for_data_parallel(self):
        # nn.DataParallel asks each module so for its copy; tensors that it copies are plain, without a weight's parts.
        raise ValueError(
            "nn.DataParallel: found several GPUs in one process, among which a packed weight cannot be copied; "
            "expected a process for each GPU (accelerate launch, torchrun), or one GPU (CUDA_VISIBLE_DEVICES=0), for "
            "Trainer uses nn.DataParallel wherever a process sees several"
        )

    def __setstate__(self, state):
        arm()
        super().__setstate__(state)
        self._take(self.weight)


for _name in NAMES:
    if _name != WEIGHT:
        setattr(KbitWeight, _name, property(lambda self, name=_name: self.packed[name]))
