"""What accelerate counts of packed weights."""

from functools import wraps

from hf_kbit.weight.tensor import KbitTensor


def count_packed(compute_module_sizes):
    """``compute_module_sizes``, by which device maps are made, with what packed weights take. Alone it multiplies the
    number of their weights by the bytes of their dtype, as there is no way to tell it another size."""

    @wraps(compute_module_sizes)
    def wrapped(model, *args, **kwargs):
        sizes = compute_module_sizes(model, *args, **kwargs)
        packed = {name: x for name, x in model.named_parameters() if isinstance(x, KbitTensor) and name in sizes}
        for name, weight in packed.items():
            counted, parts = sizes[name], name.split(".")
            for length in range(len(parts) + 1):
                sizes[".".join(parts[:length])] += weight.nbytes_packed - counted
        return sizes

    return wrapped
