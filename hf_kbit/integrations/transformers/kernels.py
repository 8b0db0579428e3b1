"""``use_kernels=True`` on packed experts: refused."""

from functools import wraps

from hf_kbit.nn.experts import KbitExperts


def refuse_packed_experts(set_use_kernels):
    """``set_use_kernels`` that refuses a model of which a kernel of the Hub would run a module with packed experts: it
    reads their weights itself, as GPT-OSS's ``MegaBlocksMoeMLP`` does."""

    @wraps(set_use_kernels)
    def wrapped(self, use_kernels, *args, **kwargs):
        for name, module in self.named_modules() if use_kernels else ():
            # What the library's decorator leaves on a class; without the library Transformers says that it is missing.
            kernel = getattr(type(module), "kernel_layer_name", None)
            if kernel is not None and any(isinstance(child, KbitExperts) for child in module.modules()):
                raise ValueError(
                    f"{name}: found packed experts, expected 16-bit ones for the kernel {kernel!r}, which reads their "
                    "weights: leave out use_kernels, hf_kbit has kernels of its own, or leave experts in 16 bits by "
                    'KbitConfig(modules_to_not_convert=["experts"])'
                )
        return set_use_kernels(self, use_kernels, *args, **kwargs)

    return wrapped
