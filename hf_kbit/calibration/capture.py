"""Leads data through a model one layer at a time, and adds up what the linear layers of each are given."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


class _Finished(Exception):
    pass


def units(model: nn.Module, names: list[str]) -> dict[str, list[str]]:
    """``{module: names in it}``: linear layers by the layer of the model that they are in, the outermost element of a
    ``ModuleList``; one that is in none stands for itself."""
    found = {}
    for name in names:
        parts = name.split(".")
        paths = (".".join(parts[:end]) for end in range(1, len(parts)))
        lists = (path for path in paths if isinstance(model.get_submodule(path), nn.ModuleList))
        outermost = next(lists, None)
        unit = name if outermost is None else ".".join(parts[: outermost.count(".") + 2])
        found.setdefault(unit, []).append(name)
    return found


def reads_tokens(model: nn.Module) -> bool:
    return "input_ids" in inspect.signature(model.forward).parameters


def run(model: nn.Module, ids: torch.Tensor) -> None:
    """A forward pass without a cache; an encoder-decoder reads the same tokens on both sides."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    finally:
        for config in caching:
            config.use_cache = True


def check(model: nn.Module, layers: dict[str, list[str]], ids: torch.Tensor) -> None:
    """Runs two short sequences, and refuses the model if a layer that is to be quantized reads nothing of them.

    Raises:
        ValueError: the model needs more than tokens, or a layer reads none of them.
    """
    called = set()
    hooked = {*layers, *(name for names in layers.values() for name in names)}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.add(name)) for name in hooked
    ]
    try:
        run(model, ids[:2, :16])
    except Exception as error:  # whatever a forward does without what it needs, such as pixels
        raise ValueError(
            f"model: found that {type(model).__name__} does not run on token ids alone "
            f"({type(error).__name__}: {error}), so it cannot be calibrated; quantize it while loading, without data"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    if missed := sorted(hooked - called):
        raise ValueError(
            f"{missed[0]}: found that tokens do not go through it ({len(missed)} such modules), so it cannot be "
            "calibrated; name what stays in 16 bits in modules_to_not_convert, or quantize while loading, without data"
        )


def stream(
    model: nn.Module,
    layers: dict[str, list[str]],
    ids: torch.Tensor,
    batch: int,
    visit: Callable[[str, Callable[[], None]], None],
) -> None:
    """One forward pass of all sequences, which stops at each layer.

    In place of a layer's forward, ``visit(name, forward)`` is called, where ``forward()`` runs the layer as it is on
    its inputs; after that the layer, as ``visit`` has left it, computes what the next one is given. So the model's own
    code prepares the inputs of every layer, whatever they are, and each sees the ones before it quantized. A layer
    takes ``batch`` sequences at a time.
    """
    waiting, running = set(layers), set()
    modules = {name: model.get_submodule(name) for name in layers}
    own = {name: vars(module).get("forward") for name, module in modules.items()}  # of the instance, if it has one
    originals = {name: module.forward for name, module in modules.items()}

    def forward(name, *args, **kwargs):
        if name in running:  # a part, from the inside of a call for all
            return originals[name](*args, **kwargs)
        running.add(name)
        if name in waiting:
            visit(name, lambda: _in_parts(model.get_submodule(name), len(ids), batch, args, kwargs, join=False))
            waiting.remove(name)
        if not waiting:
            raise _Finished
        output = _in_parts(model.get_submodule(name), len(ids), batch, args, kwargs)
        running.remove(name)
        return output

    for name, module in modules.items():
        module.forward = partial(forward, name)
    try:
        run(model, ids)
    except _Finished:
        pass
    finally:
        for name, module in modules.items():
            del module.forward
            if own[name] is not None:
                module.forward = own[name]


def _in_parts(module, sequences: int, batch: int, args, kwargs, join: bool = True):
    """What ``module`` makes of all sequences, ``batch`` at a time.

    Tensors of two or more dimensions whose first is the number of sequences are cut, others passed as they are; of the
    outputs those with a part's number of sequences are joined.
    """
    leaves, form = tree_flatten((args, kwargs))
    parts = []
    for start in range(0, sequences, batch):
        part = slice(start, start + batch)
        given = [x[part] if _of_all(x, sequences) else x for x in leaves]
        part_args, part_kwargs = tree_unflatten(given, form)
        output = module(*part_args, **part_kwargs)
        if join:
            parts.append(output)
    if join:
        size = min(batch, sequences)
        return tree_map(lambda *same: torch.cat(same) if _of_all(same[0], size) else same[0], *parts)
    return None


def _of_all(value, sequences: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == sequences


@contextmanager
def moments(linears: dict[str, nn.Module], diagonal: bool) -> Iterator[dict[str, torch.Tensor]]:
    """Adds up what goes into linear layers while it is open: float32 ``{name: sum of x @ x.T}``, ``[K, K]``, or only
    its diagonal, ``[K]``."""
    sums = {}

    def add(name, x):
        rows = x.flatten(0, -2).float()
        new = rows.square().sum(0) if diagonal else rows.T @ rows
        sums[name] = sums[name].add_(new) if name in sums else new

    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: add(name, args[0]))
        for name, module in linears.items()
    ]
    try:
        yield sums
    finally:
        for hook in hooks:
            hook.remove()
