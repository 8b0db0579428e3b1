"""What the functions and ops of torch do with a packed weight (``tensor.py``): two tables.

``function`` says what a function of Python's torch does, before autograd. ``op`` says what an op does that keeps the
weight packed: copies, moves, casts, parts of rows and of whole blocks of columns, and what processes send each other.
All others read the decoded weight.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import torch
import torch.distributed.tensor  # the ops of _c10d_functional
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from hf_kbit.weight.decoded import FROZEN, NoMemory, plain
from hf_kbit.weight.tensor import FUNCTIONS, OPS, KbitTensor

# Whether weights are moved or cast, by a module or from process to process: then they stay packed, and what is made
# like them is. Others get a dense tensor, which they may write into.
MOVING: ContextVar[bool] = ContextVar("whether packed weights are moved", default=False)
COMPUTED_IN = (torch.float32, torch.float16, torch.bfloat16)
aten, c10d, functional_collectives = torch.ops.aten, torch.ops.c10d, torch.ops._c10d_functional


def function(*functions):
    """What takes the place of functions of torch: called with the function and its arguments."""
    return lambda own: [FUNCTIONS.__setitem__(func, own) for func in functions] and own


def op(*ops):
    """What takes the place of ops. Where it returns NotImplemented the op gets the decoded weight."""
    return lambda own: [OPS.__setitem__(func, own) for func in ops] and own


@contextmanager
def moving() -> Iterator[None]:
    token = MOVING.set(True)
    try:
        yield
    finally:
        MOVING.reset(token)


# --- functions ------------------------------------------------------------------------------------


def cast_for_autocast(x: torch.Tensor) -> torch.Tensor:
    """``x`` in the dtype that autocast wants for a product."""
    if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


@function(F.linear)
def _(func, x, weight, bias=None):
    packed = isinstance(weight, KbitTensor) and not isinstance(x, KbitTensor) and not weight.lead
    if not packed or not x.is_floating_point():
        return plain(func, x, weight, bias)
    x, parts = cast_for_autocast(x), weight.parts
    width = parts["matrix"][1]
    if x.shape[-1:] != (width,):
        raise ValueError(f"x: found shape {list(x.shape)}, expected [*, {width}], the in_features of the weight")
    return parts["kind"].product(x, parts, None if bias is None else bias.to(x.dtype))


@function(F.embedding)
def _(func, input, weight, padding_idx=None, max_norm=None, *args, **kwargs):
    if not isinstance(weight, KbitTensor) or weight.lead or max_norm is not None:
        return plain(func, input, weight, padding_idx, max_norm, *args, **kwargs)
    return weight.look_up(input)


@function(torch.Tensor.__getitem__)
def _(func, weight, index):
    rows = isinstance(index, torch.Tensor) and index.dtype in (torch.int64, torch.int32)
    if isinstance(weight, KbitTensor) and rows and not weight.lead and index.device == weight.words.device:
        return weight.look_up(torch.where(index < 0, index + weight.matrix[0], index))
    return plain(func, weight, index)


@function(torch.Tensor.element_size)
def _(func, weight):
    """Bytes of a weight on average, so that ``numel() * element_size()`` is the memory that it takes."""
    return weight.nbytes_packed / max(math.prod(weight.whole_shape), 1)


@function(torch.Tensor.nbytes.__get__)
def _(func, weight):
    return weight.nbytes_packed


@function(torch.Tensor.data_ptr, getattr(torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr))  # of torch 2.13
def _(func, weight):
    return -weight.words.data_ptr()  # tells weights apart (accelerate), and is no address of floats


@function(torch.Tensor.new_tensor, torch.Tensor.new)
def _(func, weight, *args, **kwargs):
    return func(weight.words.new_empty(0, dtype=weight.form.dtype), *args, **kwargs)


@function(torch.Tensor.__repr__)
def _(func, weight, **kwargs):
    return KbitTensor.__repr__(weight)


@function(torch.Tensor.untyped_storage)
def _(func, weight):
    storage = plain(func, weight)  # which torch.compile asks for, and tells weights apart by
    storage.__class__ = NoMemory
    return storage


@function(torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.double)
def _(func, weight, *args, **kwargs):
    if MOVING.get():
        return plain(func, weight, *args, **kwargs)
    return func(weight.dequantize(), *args, **kwargs)


@function(torch.Tensor.is_shared)
def _(func, weight):
    return weight.words.is_shared()


@function(torch.Tensor.share_memory_)
def _(func, weight):
    for name in weight.form.names:
        weight.parts[name].share_memory_()
    return weight


@function(torch.Tensor.__setitem__)
def _(func, tensor, index, value):
    if isinstance(tensor, KbitTensor):
        raise RuntimeError(FROZEN.format(tensor.qualified_name, "an assignment to a part"))
    plain(func, tensor, index, value)


@function(torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)
def _(func, weight, wanted=True):
    # ``nn.Parameter(weight)`` asks for it unless it is told not to, as in FSDP2's code: it gets a frozen one.
    if wanted and sys._getframe(2).f_code is not torch.nn.Parameter.__new__.__code__:
        raise TypeError("weight: found requires_grad=True, expected False: a packed weight is frozen; train adapters")
    return plain(func, weight, False)


@function(torch.Tensor.data.__set__)
def _(func, weight, value):
    if not isinstance(weight, KbitTensor) or not isinstance(value, KbitTensor):
        found = f"{type(value).__name__} of {value.dtype}"
        name = getattr(weight, "qualified_name", "weight")
        raise TypeError(
            f"{name}: found data of type {found}, expected a packed weight: {FROZEN.format(name, '.data =')}"
        )
    weight.replace(value)


# --- copies and moves -----------------------------------------------------------------------------


@op(aten.detach.default, aten.alias.default)
def _(func, weight):
    return return_and_correct_aliasing(func, (weight,), {}, weight.each(func))


@op(aten.clone.default)
def _(func, weight, **kwargs):
    return weight.each(torch.clone)


@op(aten._to_copy.default)
def _(func, weight, *, dtype=None, device=None, **kwargs):
    dtype = dtype or weight.form.dtype
    if dtype not in COMPUTED_IN:
        return NotImplemented
    made = weight.moved(device or weight.words.device, dtype)
    return made.each(torch.clone) if made.words is weight.words else made


@op(aten.record_stream.default)
def _(func, weight, stream):
    for name in weight.form.names:
        func(weight.parts[name], stream)


@op(aten._pin_memory.default)
def _(func, weight, *args):
    return weight.each(lambda tensor: tensor.pin_memory())


@op(aten.is_pinned.default)
def _(func, weight, *args):
    return weight.words.is_pinned()


@function(torch.empty_like, torch.zeros_like, torch.Tensor.new_zeros, torch.Tensor.new_empty)
def _(func, weight, *args, **kwargs):
    """A dense tensor, to be written into; for torch.distributed, which makes room for parts so, a packed one."""
    makes_room = sys._getframe(2).f_globals.get("__name__", "").startswith("torch.distributed.")
    with moving() if makes_room else nullcontext():
        return plain(func, weight, *args, **kwargs)


@op(*(getattr(aten, f"{kind}_like").default for kind in ("empty", "zeros", "ones", "full", "rand", "randn")))
def _(func, weight, *args, **kwargs):
    if MOVING.get():
        device = kwargs.get("device") or weight.words.device
        return KbitTensor.empty(weight.whole_shape, weight.decoding, weight.form.dtype, device, weight.tiles)
    return func(weight.words.new_empty((), dtype=weight.form.dtype).expand(weight.outer_shape), *args, **kwargs)


@op(aten.new_zeros.default, aten.new_empty.default)
def _(func, weight, size, *, dtype=None, device=None, **kwargs):
    same = len(size) == len(weight.whole_shape) and size[-1] == weight.matrix[1] and dtype in (None, weight.form.dtype)
    if MOVING.get() and same:
        return weight.room(size, device)
    return func(weight.words, size, dtype=dtype or weight.form.dtype, device=device)


@op(aten.copy_.default)
def _(func, into, source, non_blocking=False):
    if not isinstance(into, KbitTensor):
        return func(into, source.dequantize(into.dtype), non_blocking)
    if not isinstance(source, KbitTensor):
        sent = into.of_floats(source)
        if sent is None:
            # DDP broadcasts what all processes have already, and averages of equal weights are equal up to rounding.
            decoded, rounding = into.dequantize(), 4 * torch.finfo(into.form.dtype).eps
            same = into.is_meta or torch.allclose(source.to(decoded), decoded, rtol=rounding, atol=0)
            return into if same else NotImplemented
        source = sent
    alike = into.whole_shape == source.whole_shape and into.form.names == source.form.names
    if not alike or into.parts["kind"] is not source.parts["kind"]:
        raise ValueError(f"weight: found {source}, expected {into}")
    made = source.moved(into.words.device).as_stored()
    made = made.tiled() if into.is_tiled else made
    for name in into.form.names:
        into.parts[name].copy_(made.parts[name])
    into.parts.pop("inverses", None)
    into.parts.update(into.settings(source.decoding))
    into.decoding = source.decoding
    return into


# --- parts ----------------------------------------------------------------------------------------


def part(weight: KbitTensor, dim: int, start: int, stop: int) -> KbitTensor:
    """What is between two places along a dimension."""
    if weight.words.is_meta:  # a rule shards it, which is looked at later, when its layer is known
        return _sized(weight, dim, stop - start)
    return weight.cut_columns(start, stop) if dim == len(weight.lead) + 1 else weight.rows(dim, start, stop)


def _sized(weight: KbitTensor, dim: int, size: int) -> KbitTensor:
    """One on the meta device that has another size."""
    shape = list(weight.whole_shape)
    shape[dim] = size
    return KbitTensor.empty(tuple(shape), weight.decoding, weight.form.dtype, "meta", weight.tiles)


def _is_whole(weight: KbitTensor) -> bool:
    """Whether it is not shown flat, as FSDP2 does."""
    return len(weight.outer_shape) == len(weight.lead) + 2


def _can_part(weight: KbitTensor, dim: int, *places: int) -> bool:
    """Whether what is between such places along a dimension is packed: columns are cut between blocks."""
    unit, end = weight.decoding.units[1], weight.matrix[1]
    is_cut = dim == len(weight.lead) + 1 and any(place % unit for place in places if place != end)
    return _is_whole(weight) and (weight.words.is_meta or not is_cut)


@op(aten.split.Tensor, aten.split_with_sizes.default)
def _(func, weight, sizes, dim=0):
    dim %= len(weight.outer_shape)
    end = weight.outer_shape[dim]
    starts = range(0, end, sizes) if isinstance(sizes, int) else itertools.accumulate(sizes[:-1], initial=0)
    places = [*starts, end]
    if not _can_part(weight, dim, *places):
        return NotImplemented
    parts = [part(weight, dim, start, stop) for start, stop in itertools.pairwise(places)]
    return NotImplemented if any(each is NotImplemented for each in parts) else parts


@op(aten.slice.Tensor)
def _(func, weight, dim=0, start=None, stop=None, step=1):
    dim %= len(weight.outer_shape)
    start, stop, _ = slice(start, stop).indices(weight.outer_shape[dim])
    stop = max(stop, start)
    return part(weight, dim, start, stop) if step == 1 and _can_part(weight, dim, start, stop) else NotImplemented


@op(aten.select.int)
def _(func, weight, dim, index):
    """One matrix of several."""
    if not weight.lead or dim % len(weight.outer_shape) or not _is_whole(weight):
        return NotImplemented
    return weight.matrix_at(index)


@op(aten.index_select.default)
def _(func, weight, dim, index):
    """Rows or matrices in another order."""
    if not _is_whole(weight) or dim % len(weight.outer_shape) > len(weight.lead):
        return NotImplemented
    return weight.picked(dim % len(weight.outer_shape), index)


@op(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _(func, weight, size):
    count = math.prod(weight.whole_shape)
    if tuple(size) in ((-1,), (count,)):
        return weight.like((count,))
    return weight.like(weight.whole_shape) if tuple(size) == weight.whole_shape else NotImplemented


@op(aten.as_strided.default)
def _(func, weight, size, stride, offset=None):
    contiguous = torch.empty(weight.whole_shape, device="meta").stride()
    whole = tuple(size) == weight.whole_shape and tuple(stride) == contiguous and not offset
    return weight.like(weight.whole_shape) if whole else NotImplemented


@op(aten.cat.default)
def _(func, tensors, dim=0):
    """Rows, columns of whole blocks, or matrices put together again that decode alike."""
    first, *others = tensors
    alike = all(isinstance(t, KbitTensor) and _is_whole(t) and t.decoding == first.decoding for t in tensors)
    if not alike:
        return NotImplemented
    dim = dim % len(first.outer_shape)
    if first.words.is_meta:
        return _sized(first, dim, sum(tensor.outer_shape[dim] for tensor in tensors))
    return first.joined(others, dim)


@op(aten.constant_pad_nd.default)
def _(func, weight, pad, value=0):
    """Further rows or matrices behind those there are, as DTensor wants before it gathers."""
    *others, last = pad
    if value or any(others) or last < 0 or not _is_whole(weight) or len(pad) != 2 * len(weight.outer_shape):
        return NotImplemented
    return weight.padded(last)


# --- several processes ----------------------------------------------------------------------------


@op(functional_collectives.all_gather_into_tensor.default)
def _(func, weight, group_size, group_name):
    """What all processes have, one below the other."""

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        made = func(tensor.contiguous(), group_size, group_name)
        return functional_collectives.wait_tensor(made)

    return weight.gathered(gather)


@op(functional_collectives.wait_tensor.default, functional_collectives._wrap_tensor_autograd.default)
def _(func, weight):
    return weight


@op(c10d.scatter_.default)
def _(func, outputs, inputs, *args, **kwargs):
    """As floats, for the process that receives may have nothing else."""
    sent = [[part.as_floats() if isinstance(part, KbitTensor) else part for part in parts] for parts in inputs]
    return _receive(func, outputs, sent, *args, **kwargs)


@op(c10d.broadcast_.default)
def _(func, tensors, *args, **kwargs):
    return _receive(func, tensors, *args, **kwargs)


def _receive(func, outputs, *args, **kwargs):
    """Tensors into which a process writes what another sends, as floats where they are packed weights.

    Asynchronous in any case: otherwise NCCL gives a null pointer as its work, and to wait for that ends the process.
    """
    args = [True if argument is False else argument for argument in args]  # asyncOp is the only bool
    packed = [isinstance(output, KbitTensor) for output in outputs]
    floats = [o.as_floats() if is_packed else o for o, is_packed in zip(outputs, packed, strict=True)]
    work = func(floats, *args, **kwargs)[1]
    work.wait()
    for output, given, is_packed in zip(outputs, floats, packed, strict=True):
        if is_packed:
            output.copy_(given)
    return outputs, work
