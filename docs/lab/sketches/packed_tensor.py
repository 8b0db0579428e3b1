"""Prototype: the packed weight as one tensor of logical shape and computing dtype (a wrapper subclass)."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils._python_dispatch import return_and_correct_aliasing

from hf_kbit import ops, reference  # noqa: F401  (registers the ops)
from hf_kbit.format import absmax_shape, weight_shape
from hf_kbit.nn.packed import Decoding, Packed, quantize_weight
from hf_kbit.nn.weight import reads_tiles
from hf_kbit.ops import product

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
TRACE = bool(__import__("os").environ.get("KTRACE"))
REPACK = False  # whether `weight.data = dense` packs it; else it is refused
FROZEN = (
    "weight: found {} writing into a packed weight, expected reads: it is frozen. Load another weight, or dequantize "
    "the layer first"
)
INNER = ("words", "absmax", "codebook", "columns")


class Form:
    """What a packed weight is besides its tensors; equal ones are one object, so that comparing takes no time."""

    _known: dict = {}

    def __new__(cls, decoding, matrix, dtype, columns):
        key = decoding, matrix, dtype, columns
        if key not in cls._known:
            self = cls._known[key] = object.__new__(cls)
            self.decoding, self.matrix, self.dtype = decoding, matrix, dtype
            self.names = [*INNER[:3], "columns"] if columns else [*INNER[:3]]
        return cls._known[key]

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return Form, (self.decoding, self.matrix, self.dtype, len(self.names) == 4)


class KbitTensor(torch.Tensor):
    """A frozen weight ``[N, K]`` of 2 to 5 bits: to others a tensor of the dtype that it computes in."""

    matrix = property(lambda self: self.parts["matrix"], lambda self, value: self.parts.__setitem__("matrix", value))
    words = property(lambda self: self.parts["words"])
    absmax = property(lambda self: self.parts["absmax"])
    codebook = property(
        lambda self: self.parts["codebook"], lambda self, value: self.parts.__setitem__("codebook", value)
    )
    columns = property(
        lambda self: self.parts["columns"], lambda self, value: self.parts.__setitem__("columns", value)
    )

    @staticmethod
    def __new__(
        cls,
        words,
        absmax=None,
        codebook=None,
        columns=None,
        decoding=None,
        shape=None,
        dtype=None,
        *,
        requires_grad=False,
    ):
        if isinstance(words, KbitTensor):  # accelerate: type(parameter)(value, requires_grad=...)
            return as_parameter(words)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=words.device, requires_grad=False)

    def __init__(
        self,
        words,
        absmax=None,
        codebook=None,
        columns=None,
        decoding=None,
        shape=None,
        dtype=None,
        *,
        requires_grad=False,
    ):
        if isinstance(words, KbitTensor):
            return
        # One object with the layer's, whose compiled code reads it; Dynamo's guards see writes into a dictionary.
        matrix = tuple(shape) if len(shape) == 2 else None  # [N, K]; kept while FSDP2 has it flat
        self.parts = {"words": words, "absmax": absmax, "codebook": codebook, "columns": columns, "matrix": matrix}
        self.decoding = decoding

    # --- made ---

    @classmethod
    def of(cls, packed: Packed, shape, dtype) -> "KbitTensor":
        device = packed.planes.device
        codebook = packed.decoding.codebook(device)
        made = cls(packed.planes, packed.absmax, codebook, packed.columns, packed.decoding, torch.Size(shape), dtype)
        return made.tiled() if reads_tiles(device) else made

    @classmethod
    def empty(cls, shape, decoding, dtype, device="meta") -> "KbitTensor":
        words = torch.zeros(weight_shape(*shape, decoding.bits), dtype=torch.int32, device=device)
        absmax = torch.zeros(absmax_shape(*shape), dtype=torch.uint8, device=device)
        columns = torch.zeros(shape[1], dtype=torch.uint8, device=device) if decoding.transformed else None
        return cls(words, absmax, decoding.codebook(device), columns, decoding, torch.Size(shape), dtype)

    def like(self, words=None, absmax=None, columns=None, codebook=None, shape=None, dtype=None) -> "KbitTensor":
        made = KbitTensor(
            self.words if words is None else words,
            self.absmax if absmax is None else absmax,
            self.codebook if codebook is None else codebook,
            self.columns if columns is None else columns,
            self.decoding,
            self.size0 if shape is None else torch.Size(shape),
            dtype or self.dtype0,
        )
        if made.matrix is None:
            made.matrix = self.matrix
        return made

    @property
    def size0(self):
        with torch._C.DisableTorchFunctionSubclass():
            return self.shape

    @property
    def dtype0(self):
        with torch._C.DisableTorchFunctionSubclass():
            return self.dtype

    def each(self, fn, **kwargs) -> "KbitTensor":
        columns = None if self.columns is None else fn(self.columns)
        return self.like(fn(self.words), fn(self.absmax), columns, fn(self.codebook), **kwargs)

    # --- forms ---

    @property
    def is_tiled(self) -> bool:
        return reference.is_tiled(self.words, self.absmax, self.decoding.bits)

    def tiled(self) -> "KbitTensor":
        made = torch.ops.hf_kbit.repack(self.words, self.absmax, self.decoding.bits, list(self.matrix), False)
        return self.like(*made)

    def planes(self) -> "KbitTensor":
        if not self.is_tiled:
            return self
        made = torch.ops.hf_kbit.repack(self.words, self.absmax, self.decoding.bits, list(self.matrix), True)
        return self.like(*made)

    def dequantize(self, dtype=None) -> torch.Tensor:
        how = self.codebook, list(self.matrix), dtype or self.dtype0, self.columns, self.columns is not None
        return torch.ops.hf_kbit.dequantize(self.words, self.absmax, *how).view(self.size0)

    def moved(self, device, dtype) -> "KbitTensor":
        device = torch.device(device)
        if device == self.words.device:
            return self.like(dtype=dtype)
        planes = self.planes()
        to = lambda t: t.to(device)  # noqa: E731
        made = planes.each(to, dtype=dtype)
        if self.words.device.type == "meta":
            made.codebook = self.decoding.codebook(device)
        made.__dict__.pop("_form", None)
        return made.tiled() if reads_tiles(device) else made

    # --- protocols ---

    def __tensor_flatten__(self):
        form = self.form
        return form.names, form

    @property
    def form(self):
        found = self.__dict__.get("_form")
        if found is None:
            found = self._form = Form(self.decoding, self.matrix, self.dtype0, self.columns is not None)
        return found

    @staticmethod
    def __tensor_unflatten__(inner, form, outer_size, outer_stride):
        made = KbitTensor(
            inner["words"],
            inner["absmax"],
            inner["codebook"],
            inner.get("columns"),
            form.decoding,
            outer_size,
            form.dtype,
        )
        made.matrix = form.matrix
        return made

    def __repr__(self):
        what = f"shape={tuple(self.size0)}, dtype={self.dtype0}, device={self.words.device}"
        return f"KbitTensor({what}, bits={self.decoding.bits})"

    def __reduce_ex__(self, protocol):
        stored = self.planes()
        how = stored.decoding
        is_param = bool(getattr(self, "_is_param", False))
        args = stored.words, stored.absmax, stored.columns, list(how.levels), how.exponent, how.transform
        return _rebuild, (*args, tuple(self.matrix), self.dtype0, is_param)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            made = self.each(torch.clone)
            memo[id(self.parts)] = made.parts
            memo[id(self)] = as_parameter(made) if getattr(self, "_is_param", False) else made
        return memo[id(self)]

    # FSDP2

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        if self.is_tiled:
            raise ValueError("found tiles, expected planes")
        if outer_size[0] % mesh.size():  # FSDP2 would stop in the last process alone, and the others would wait
            raise ValueError(f"weight: found {outer_size[0]} rows, expected a multiple of the {mesh.size()} processes")
        words, absmax = self.words, self.absmax
        dtype = mp_policy.param_dtype or self.dtype0
        return (words, absmax), (outer_size, dtype, self.columns, self.codebook, absmax)

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        size, dtype, columns, codebook, absmax = metadata
        words, absmax = gathered if len(gathered) > 1 else (*gathered, absmax)  # one process gathers the first alone
        words, absmax = words[: size[0]], absmax[: size[0]]
        if out is not None:
            return None
        return self.like(words, absmax, columns, codebook, shape=size, dtype=dtype), (words, absmax)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (own := _FUNCTIONS.get(func)) is not None:
            return own(func, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (own := _OPS.get(func)) is not None:
            found = own(func, *args, **kwargs)
            if found is not NotImplemented:
                return found
        if func._schema.is_mutable:
            arguments = func._schema.arguments
            given = [
                *zip(arguments, args, strict=False),
                *((a, kwargs[a.name]) for a in arguments if a.name in kwargs),
            ]
            for argument, value in given:
                written = argument.alias_info is not None and argument.alias_info.is_write
                if written and any(
                    isinstance(t, KbitTensor) for t in (value if isinstance(value, (list, tuple)) else [value])
                ):
                    raise TypeError(FROZEN.format(func))
        if TRACE:
            print("decodes for", func, flush=True)
        dense = lambda x: x.dequantize() if isinstance(x, KbitTensor) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(dense, (args, kwargs))
        return func(*args, **kwargs)


def as_parameter(weight):
    made = nn.Parameter(weight, requires_grad=False)
    made.parts = weight.parts
    return made


def _rebuild(words, absmax, columns, levels, exponent, transform, shape, dtype, is_param):
    made = KbitTensor.of(Packed(words, absmax, Decoding(tuple(levels), exponent, transform), columns), shape, dtype)
    return nn.Parameter(made, requires_grad=False) if is_param else made


torch.serialization.add_safe_globals([_rebuild, KbitTensor])

# --- functions that are more than their decomposition ---

_FUNCTIONS, _OPS = {}, {}


def function(*names):
    return lambda fn: [_FUNCTIONS.__setitem__(name, fn) for name in names] and fn


def op(*names):
    return lambda fn: [_OPS.__setitem__(name, fn) for name in names] and fn


def multiply(x, weight, bias):
    x = autocast(x)
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    columns = weight.columns
    return product(
        x, weight.words, weight.absmax, weight.codebook, bias, weight.matrix[0], columns, columns is not None
    )


def autocast(x):
    if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


@function(F.linear)
def _(func, x, weight, bias=None):
    if not isinstance(weight, KbitTensor) or isinstance(x, KbitTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return func(x, weight, bias)
    return multiply(x, weight, bias)


@function(F.embedding)
def _(func, indices, weight, padding_idx=None, max_norm=None, *args, **kwargs):
    how = weight.codebook, list(weight.matrix), weight.dtype0, weight.columns, weight.columns is not None
    return torch.ops.hf_kbit.embed(indices, weight.words, weight.absmax, *how)


@function(torch.Tensor.data_ptr)
def _(func, weight):
    return -weight.words.data_ptr()  # tells weights apart (accelerate), and is no address of floats


@function(torch.Tensor.share_memory_)
def _(func, weight):
    for name in INNER:
        if getattr(weight, name) is not None:
            getattr(weight, name).share_memory_()
    return weight


@function(torch.Tensor.__setitem__)
def _(func, weight, index, value):
    if isinstance(weight, KbitTensor):
        raise TypeError(FROZEN.format("an assignment"))
    with torch._C.DisableTorchFunctionSubclass():
        func(weight, index, value)


@function(torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)
def _(func, weight, wanted=True):
    if wanted and getattr(weight, "_is_param", False):  # nn.Parameter asks for it first
        raise TypeError("weight: found requires_grad=True, expected False: a packed weight is frozen; train adapters")
    with torch._C.DisableTorchFunctionSubclass():
        return func(weight, wanted)


@function(torch.Tensor.data.__set__)
def _(func, weight, value):
    if REPACK and isinstance(weight, KbitTensor) and not isinstance(value, KbitTensor):
        value = pack(value, weight.decoding.bits).to(weight.dtype0)
    if not isinstance(weight, KbitTensor) or not isinstance(value, KbitTensor):
        raise TypeError(f"weight: found data of type {type(value).__name__}, expected a packed weight")
    with torch._C.DisableTorchFunctionSubclass():
        func(weight, value)
    weight.__dict__.pop("_form", None)
    weight.parts.update(value.parts)  # in place: layers have the same dictionary
    weight.decoding = value.decoding


# --- ops that keep it packed ---


@op(aten.detach.default, aten.alias.default)
def _(func, weight):
    return return_and_correct_aliasing(func, (weight,), {}, weight.each(func))


@op(aten.clone.default)
def _(func, weight, **kwargs):
    return weight.each(torch.clone)


@op(aten._to_copy.default)
def _(func, weight, *, dtype=None, device=None, **kwargs):
    dtype = dtype or weight.dtype0
    if not dtype.is_floating_point:
        return NotImplemented
    made = weight.moved(device or weight.words.device, dtype)
    return made.each(torch.clone) if made.words is weight.words else made


@op(aten.record_stream.default)
def _(func, weight, stream):
    for name in weight.form.names:
        func(getattr(weight, name), stream)


@op(aten._pin_memory.default)
def _(func, weight, *args):
    return weight.each(lambda t: t.pin_memory())


@op(aten.is_pinned.default)
def _(func, weight, *args):
    return weight.words.is_pinned()


@op(aten.empty_like.default, aten.zeros_like.default)
def _(func, weight, *, dtype=None, device=None, **kwargs):
    if dtype is not None and dtype != weight.dtype0:
        return NotImplemented
    return weight.each(lambda t: torch.zeros_like(t, device=device))


@op(aten.new_zeros.default, aten.new_empty.default)
def _(func, weight, size, *, dtype=None, device=None, **kwargs):
    if len(size) != 2 or size[1] != weight.matrix[1] or dtype not in (None, weight.dtype0) or weight.is_tiled:
        with torch._C.DisableTorchFunctionSubclass():
            return func(weight.codebook, size, dtype=dtype or weight.dtype0, device=device)
    made = KbitTensor.empty(size, weight.decoding, weight.dtype0, device or weight.words.device)
    made.columns = weight.columns
    return made


@op(aten.copy_.default)
def _(func, into, source, non_blocking=False):
    if isinstance(into, KbitTensor) and isinstance(source, KbitTensor):
        source = source.planes() if not into.is_tiled else source
        if into.is_tiled != source.is_tiled:
            source = source.tiled()
        if into.decoding != source.decoding or into.matrix != source.matrix:
            raise ValueError(f"weight: found {source}, expected {into}")
        for name in INNER:
            if getattr(into, name) is not None:
                getattr(into, name).copy_(getattr(source, name))
        return into
    if not isinstance(into, KbitTensor):
        return func(into, source.dequantize(into.dtype), non_blocking)
    if into.is_tiled is None or torch.equal(into.dequantize(), source.to(into.dtype0)):
        return into  # DDP's broadcast of what is there already
    return NotImplemented


def _rows(weight, start, stop):
    words, absmax = weight.words[start:stop], weight.absmax[start:stop]
    return weight.like(words, absmax, shape=(len(words), weight.matrix[1]))


def _columns(weight, start, stop):
    """A part of the in_features, of whole blocks."""
    width, bits = weight.matrix[1], weight.decoding.bits
    start, stop = start or 0, min(width if stop is None else stop, width)
    if start % 32 or (stop % 32 and stop != width):
        raise ValueError(f"weight: found in_features {start} to {stop}, expected multiples of 32 to part at")
    first, last = start // 32, -(-stop // 32)
    words, absmax = weight.words[:, first * bits : last * bits], weight.absmax[:, first:last]
    columns = None if weight.columns is None else weight.columns[start:stop]
    return weight.like(words, absmax, columns, shape=(len(words), stop - start))


@op(aten.split.Tensor)
def _(func, weight, size, dim=0):
    if dim in (1, -1) and not weight.is_tiled:
        return [_columns(weight, start, start + size) for start in range(0, weight.matrix[1], size)]
    if dim not in (0, -2) or weight.is_tiled:
        return NotImplemented
    return [_rows(weight, start, start + size) for start in range(0, weight.matrix[0], size)]


@op(aten.slice.Tensor)
def _(func, weight, dim=0, start=None, stop=None, step=1):
    if step != 1 or weight.is_tiled or len(weight.size0) != 2:
        return NotImplemented
    if dim in (1, -1):
        whole = (start or 0) % 32 == 0 and (stop is None or stop >= weight.matrix[1] or stop % 32 == 0)
        return _columns(weight, start, stop) if whole else NotImplemented
    return _rows(weight, start, stop)


@op(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _(func, weight, size):
    if tuple(size) in ((-1,), (math.prod(weight.matrix),)):
        return weight.like(shape=(math.prod(weight.matrix),))
    if tuple(size) == weight.matrix:
        return weight.like(shape=weight.matrix)
    return NotImplemented


@op(aten.as_strided.default)
def _(func, weight, size, stride, offset=None):
    if tuple(size) == tuple(weight.matrix) and tuple(stride) == (size[1], 1) and not offset:
        return weight.like(shape=weight.matrix)
    return NotImplemented


@op(c10d.all_gather_into_tensor.default)
def _(func, weight, group_size, group_name):
    rows = weight.planes()
    words, absmax = (func(t.contiguous(), group_size, group_name) for t in (rows.words, rows.absmax))
    return rows.like(words, absmax, shape=(len(rows.words) * group_size, weight.matrix[1]))


@op(c10d.wait_tensor.default, c10d._wrap_tensor_autograd.default)
def _(func, weight):
    return weight.like(func(weight.words), func(weight.absmax))


@op(aten.cat.default)
def _(func, tensors, dim=0):
    if dim not in (0, -2) or not all(
        isinstance(t, KbitTensor) and len(t.size0) == 2 and t.decoding == tensors[0].decoding for t in tensors
    ):
        return NotImplemented
    words, absmax = (func([getattr(t, name) for t in tensors]) for name in ("words", "absmax"))
    return tensors[0].like(words, absmax, shape=(len(words), tensors[0].matrix[1]))


@op(torch.ops.c10d.scatter_.default)
def _(func, outputs, inputs, *args, **kwargs):
    for name in INNER:
        if getattr(outputs[0], name) is not None:
            given = [[getattr(t, name).contiguous() for t in part] for part in inputs]
            work = func([getattr(t, name) for t in outputs], given, *args, **kwargs)[1]
            work.wait()
    return outputs, work


@op(torch.ops.c10d.broadcast_.default)
def _(func, tensors, *args, **kwargs):
    flat = []
    for t in tensors:
        flat += [t.words, t.absmax, *([] if t.columns is None else [t.columns])] if isinstance(t, KbitTensor) else [t]
    works = [func([t], *args, **kwargs)[1] for t in flat]
    return tensors, works[-1]


# --- the layer ---


class KbitLinear(nn.Linear):
    _hf_quantized_needs_local_tp = True
    """``forward`` hands the inner tensors to the op. ``FLATTEN``: state dicts have planes, scales and columns."""

    FLATTEN = bool(__import__("os").environ.get("KFLAT"))

    def __init__(self, weight: KbitTensor, bias=None):
        nn.Module.__init__(self)
        self.out_features, self.in_features = weight.matrix
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(cls, linear, bits=4, **how):
        return cls(pack(linear.weight, bits), linear.bias).train(linear.training)

    def forward(self, x):
        if not x.is_floating_point():
            raise TypeError(f"x: found dtype {x.dtype}, expected a floating one")
        if is_dynamo_compiling():  # Dynamo's guards on a tensor's class and metadata are slow
            parts, bias = self.parts, self.bias
        else:
            own = self._parameters if "weight" in self._parameters else self.__dict__
            parts, bias = own["weight"].parts, own["bias"]
            self.__dict__["parts"] = parts
        rows, width = parts["matrix"]
        if x.shape[-1:] != (width,):
            raise ValueError(f"x: found shape {list(x.shape)}, expected [*, {width}], the in_features of the layer")
        if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        columns = parts["columns"]
        rotated = columns is not None
        return product(x, parts["words"], parts["absmax"], parts["codebook"], bias, rows, columns, rotated)

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "weight" and isinstance(value, KbitTensor):
            self.__dict__["parts"] = value.parts

    def __setstate__(self, state):
        super().__setstate__(state)
        self.__dict__["parts"] = self.weight.parts

    def dequantize(self, dtype=None):
        return self.weight.dequantize(dtype)

    def reset_parameters(self):
        pass

    def _apply(self, fn, recurse=True):
        weight = self._parameters.pop("weight")
        super()._apply(fn, recurse)
        made = fn(weight)
        if made is not weight and made.is_meta == weight.is_meta:
            weight.data = made  # in place: ties stay
        elif made is not weight:
            weight = as_parameter(made)
        self.__dict__["parts"] = weight.parts
        self._parameters = {"weight": weight, **self._parameters}
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.FLATTEN:
            flatten(destination, prefix + "weight", destination.pop(prefix + "weight"))
            if hasattr(destination, "_metadata"):
                destination._metadata[prefix[:-1]]["kbit"] = self.weight.decoding.to_dict()

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        name = prefix + "weight"
        given = state_dict.get(name)
        if given is not None and not isinstance(given, KbitTensor) and name + "_absmax" in state_dict:
            how = self.weight.decoding
            if "kbit" in local_metadata:
                how = Decoding.from_dict(local_metadata["kbit"], how.bits, name)
            packed = Packed(given, state_dict.pop(name + "_absmax"), how, state_dict.pop(name + "_columns", None))
            given = state_dict[name] = KbitTensor.of(packed, self.weight.matrix, self.weight.dtype)
        if isinstance(given, KbitTensor) and given.decoding != self.weight.decoding:
            self.weight.data = given.to(self.weight.device)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)


def flatten(destination, name, weight):
    stored = weight.planes()
    destination[name], destination[name + "_absmax"] = stored.words, stored.absmax
    if stored.columns is not None:
        destination[name + "_columns"] = stored.columns


def pack(weight, bits=4) -> KbitTensor:
    from hf_kbit import codebooks
    from hf_kbit.nn.packed import lopsided

    levels = codebooks.resolve("optimal", bits, lopsided("rotated", "search"))
    with torch.no_grad():
        return KbitTensor.of(
            quantize_weight(weight.detach(), levels, True, False, "rotated"), weight.shape, weight.dtype
        )


def quantize_model(model, bits=4, skip=()):
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name not in skip:
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, KbitLinear.from_linear(module, bits))
    return model
