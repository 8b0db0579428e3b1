"""``use_kernels=True`` on packed experts: refused before anything is replaced."""

from functools import wraps

from torch import nn

from hf_kbit.nn.experts import KbitExperts


def refuse_packed_experts(set_use_kernels):
    """``set_use_kernels`` that refuses a model with packed experts in a module which a kernel would run instead."""

    @wraps(set_use_kernels)
    def wrapped(self, use_kernels, *args, **kwargs):
        if use_kernels:
            check(self)
        return set_use_kernels(self, use_kernels, *args, **kwargs)

    return wrapped


def check(model: nn.Module) -> None:
    """Raises if a kernel of the Hub would take the place of what calls packed experts: it reads their weights itself,
    as GPT-OSS's ``MegaBlocksMoeMLP`` does, and would read packed words.

    Raises:
        ValueError: there is such a module.
    """
    for name, module in model.named_modules():
        # What the library's decorator leaves on a class; without the library Transformers says that it is missing.
        kernel = getattr(type(module), "kernel_layer_name", None)
        if kernel is not None and any(isinstance(child, KbitExperts) for child in module.modules()):
            raise ValueError(
                f"{name}: found packed experts, expected 16-bit ones for the kernel {kernel!r}, which reads their "
                "weights: leave out use_kernels, hf_kbit has kernels of its own, or leave experts in 16 bits by "
                'KbitConfig(modules_to_not_convert=["experts"])'
            )
