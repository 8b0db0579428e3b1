"""What code gets that takes a packed weight for memory: a view of it, which cannot be written into, or an error.

A view of a dense weight, such as ``weight.t()``, is the same memory. Of a packed weight it is decoded, so that a write
into it would be lost without a word: ``Decoded`` refuses it.

torch hands the inside of one tensor to another where no class is asked (``dense.data = packed``). The other would then
read at the address 0. So packed weights have a dispatch key that no tensor of torch has, below that of their class:
whatever computes with the other finds it, and raises.
"""

import torch
from torch.utils import _pytree as pytree

FROZEN = (
    "{}: found {}, which writes into a packed weight, expected reads: it is frozen. Load another weight, dequantize "
    "the layer first, or leave it in 16 bits (modules_to_not_convert)"
)
# Functions that hand out the memory of a tensor, or what is in it: they get the decoded weight's.
OF_MEMORY = frozenset(
    {
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.__cuda_array_interface__.__get__,
    }
)
# What errors of torch say where memory is missing, or where that key is taken for one of a device.
SIGNS = ("Cannot access data pointer", "its data is not allocated yet", "CustomRNGKeyId")
KEYS = torch._C.DispatchKeySet(torch._C._dispatch_key_parse("CustomRNGKeyId"))


def _refuse(*args, **kwargs):
    raise RuntimeError(
        "weight: found the inside of a packed weight in a dense tensor, as after .data = packed, expected floats: "
        "assign the decoded weight (packed.dequantize()), or give the layer the packed weight as its parameter"
    )


_FALLBACK, _ATEN = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
_FALLBACK.fallback(_refuse, "CustomRNGKeyId")
_ATEN.impl("copy_", _refuse, "CustomRNGKeyId")  # has a kernel for every key, on which others rely


def plain(func, *args, **kwargs):
    """The function as it is for any tensor. What torch says of one without memory is said of a packed weight."""
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    except RuntimeError as error:
        if any(sign in str(error) for sign in SIGNS):
            raise RuntimeError(
                f"weight: found {func}, which reads memory of floats, expected what reads tensors: take the decoded "
                "weight (.dequantize())"
            ) from error
        raise


class NoMemory(torch.UntypedStorage):
    """The storage of a packed weight: there is nothing in it."""

    def data_ptr(self, *args):
        raise RuntimeError(
            "weight: found a use of its memory (untyped_storage()), expected none, for a packed weight has none of "
            "floats: save a model by save_pretrained, its state_dict() or hf_kbit.save, or take the decoded weight "
            "(.dequantize())"
        )

    __getitem__ = __setitem__ = __iter__ = tolist = clone = cpu = resize_ = data_ptr

    def __repr__(self):
        return "NoMemory()"


def wrapper(kind: type, *args, **kwargs) -> torch.Tensor:
    """A tensor of that kind without memory, arguments as of torch's own function for it.

    It is none of inference mode, also where it is made inside: torch hands on to it what it knows of a weight from
    outside, as of any view of that.
    """
    with torch.inference_mode(False):
        self = torch.Tensor._make_wrapper_subclass(kind, *args, _extra_dispatch_keys=KEYS, **kwargs)
    torch._C._set_throw_on_mutable_data_ptr(self)  # an error, in place of the address 0
    return self


class Decoded(torch.Tensor):
    """A view of a packed weight: a dense tensor ``dense``, decoded from it, that refuses writes. What is computed of
    it is plain, and a view of it is another one."""

    qualified_name = "weight"  # of the packed weight, in messages

    @staticmethod
    def __new__(cls, dense: torch.Tensor):
        self = wrapper(cls, dense.size(), strides=dense.stride(), dtype=dense.dtype, device=dense.device)
        self.dense = dense
        return self

    def __tensor_flatten__(self):
        return ["dense"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, outer_size, outer_stride):
        return Decoded(inner["dense"])

    def __repr__(self, *, tensor_contents=None):
        return f"Decoded({self.dense!r})"

    def __reduce_ex__(self, protocol):
        return self.dense.clone().__reduce_ex__(protocol)  # without what it is a part of

    def __deepcopy__(self, memo):
        return memo.setdefault(id(self), self.dense.clone())

    def dequantize(self) -> torch.Tensor:
        return self.dense

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in OF_MEMORY or func in _OWN_MEMORY:
            args = args[0].dequantize(), *args[1:]
        return plain(func, *args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        refuse_writes(cls, func, args, kwargs)
        decoded = pytree.tree_map_only(cls, cls.dequantize, (args, kwargs))
        made = func(*decoded[0], **decoded[1])
        return cls.views(made, args[0]) if func.is_view else made

    @classmethod
    def views(cls, made, of: torch.Tensor):
        """What a function has made of a packed weight, or of a view of it, as views."""

        def view(dense: torch.Tensor) -> "Decoded":
            found = cls(dense)
            found.qualified_name = of.qualified_name
            return found

        return pytree.tree_map_only(torch.Tensor, view, made)


# Those that a view, which is a copy, answers by its own memory.
_OWN_MEMORY = frozenset(
    getattr(torch.Tensor, name) for name in ("data_ptr", "untyped_storage", "storage", "new_tensor", "new")
)


def refuse_writes(kind: type, func, args: tuple, kwargs: dict) -> None:
    """Raises where an op would write into a tensor of that kind."""
    if not func._schema.is_mutable:
        return
    arguments = func._schema.arguments
    given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    for argument in arguments:
        for value in pytree.tree_leaves(given.get(argument.name)) if argument.is_write else ():
            if isinstance(value, kind):  # a TypeError would have Python try ``w + x`` for ``w += x``
                raise RuntimeError(FROZEN.format(value.qualified_name, func))
