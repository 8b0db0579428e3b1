"""Leads data through a model one layer at a time."""

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_kbit.allocation import elements


class _Finished(Exception):
    pass


def resolve(device: torch.device | str | None, model) -> torch.device:
    """Where layers compute: ``device``, or where the model is; if that is a CPU, the GPU, where there is one."""
    if device is None:
        device = "cuda" if model.device.type == "cpu" and torch.cuda.is_available() else model.device
    return torch.empty(0, device=device).device  # with the number of a GPU


def dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """In which dtype to compute there what is kept in ``dtype``: 16 bits become float32 on a CPU, for many CPUs lack
    instructions for them: on one with AVX2 bfloat16 takes three times as long."""
    halves = (torch.bfloat16, torch.float16)
    return torch.float32 if device.type == "cpu" and dtype in halves else dtype


def usual(of_types: Mapping[str, Any], device: torch.device) -> Any:
    """What is usual on a device, of a table by types of devices in which "" is any other."""
    return of_types.get(device.type, of_types[""])


def memory_of(device: torch.device) -> tuple[int, int]:
    """Bytes of it that are free, those that torch keeps for its next tensors among them, and all."""
    if device.type == "cuda":
        free, memory = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device), memory
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def moved_bytes(model: nn.Module, device: torch.device) -> int:
    """What a model takes on a device beside what is there already in the dtype to compute in."""
    tensors = [(x, dtype_on(device, x.dtype)) for x in (*model.parameters(), *model.buffers())]
    return sum(x.numel() * dtype.itemsize for x, dtype in tensors if (x.device, x.dtype) != (device, dtype))


def is_causal(config: PreTrainedConfig) -> bool:
    """Whether the model reads none of the tokens after a token."""
    encoder = config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    return not config.is_encoder_decoder and not encoder


def reads_tokens(model: nn.Module) -> bool:
    return "input_ids" in inspect.signature(model.forward).parameters


def predicts_tokens(model: nn.Module) -> bool:
    """Whether it is a causal language model of Transformers."""
    if not isinstance(model, PreTrainedModel):
        return False
    return is_causal(model.config) and model.can_generate() and reads_tokens(model)


def check(model: nn.Module, layers: dict[str, list[str]], ids: torch.Tensor, device: torch.device) -> None:
    """Runs two short sequences, and refuses a model that needs more than tokens, or one of whose layers to quantize
    reads none of them."""
    called, everything = set(), slice(None)
    modules = {name: model.get_submodule(name) for unit, names in layers.items() for name in (unit, *names)}
    try:
        with hooked(modules, lambda name, *_: called.add(name)):
            stream(model, layers, ids[:2, :16], device, lambda _, run: [(everything, run(everything))], to_end=True)
    except Exception as error:  # whatever a forward does without what it needs, such as pixels
        raise ValueError(
            f"model: found that {type(model).__name__} does not run on token ids alone "
            f"({type(error).__name__}: {error}), so nothing can be measured of its layers; quantize it while loading, "
            "without data"
        ) from error
    if missed := sorted(modules.keys() - called):
        raise ValueError(
            f"{missed[0]}: found that tokens do not go through it ({len(missed)} such modules), so nothing can "
            "be measured of it; name what stays in 16 bits in modules_to_not_convert, or quantize while loading, "
            "without data"
        )


def stream(
    model: nn.Module,
    names: Iterable[str],
    ids: torch.Tensor,
    device: torch.device,
    visit: Callable[[str, Callable[[slice], Any]], Iterable[tuple[slice, Any]]],
    to_end: bool = False,
) -> Any:
    """One forward pass of all sequences, in which ``visit(name, run)`` takes the place of each layer's forward: so the
    model's own code prepares the inputs of every layer, whatever they are.

    ``run(rows)`` computes the layer, as it is by then, on a part of the sequences; the outputs of all parts in their
    order, which ``visit`` returns, are what the next layer is given. Layers are ``names`` and the other elements of
    module lists; each is on ``device``, in the dtype to compute in there, while it is visited, and its inputs and
    outputs are where and as the model has them. After the last of ``names`` the pass ends, before its outputs are
    computed, and None is returned in place of the model's output, unless ``to_end``.
    """
    waiting, running, dtype = set(names), set(), model.dtype

    def forward(name, original, *args, **kwargs):
        if name in running:  # a part, from the inside of a call for all
            return original(*args, **kwargs)
        leaves, form = tree_flatten((args, kwargs))

        def run(rows: slice):
            given = [x[rows] if _of_all(x, len(ids)) else x for x in leaves]
            return _computed(model.get_submodule(name), given, form, device, dtype)

        running.add(name)
        with placed(model, name, device):
            outputs = visit(name, run)
            waiting.discard(name)
            if not waiting and not to_end:
                raise _Finished
            output = _join(outputs, len(ids), ids.device)
        running.remove(name)
        return output

    with _walked(model, names, forward):
        try:
            return forward_pass(model, ids)
        except _Finished:
            return None


def _walked(model: nn.Module, names: Iterable[str], forward: Callable) -> AbstractContextManager[None]:
    """Inside, ``forward(name, original, ...)`` is called in place of layers: ``names`` and all elements of lists."""
    modules = {name: model.get_submodule(name) for name in dict.fromkeys((*names, *elements(model)))}
    return forwards({module: partial(forward, name, module.forward) for name, module in modules.items()})


@contextmanager
def forwards(replaced: dict[nn.Module, Callable]) -> Iterator[None]:
    """Inside, each module has that forward; afterwards what it had, also one of its own."""
    own = {module: vars(module).get("forward") for module in replaced}
    for module, forward in replaced.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in own.items():
            del module.forward
            if forward is not None:
                module.forward = forward


@contextmanager
def hooked(modules: Mapping[str, nn.Module], take: Callable[..., object]) -> Iterator[None]:
    """Inside, ``take(name, x, ...)`` is called with what each of the modules is given, by position or keyword."""
    with ExitStack() as hooks:
        for name, module in modules.items():

            def tell(_, args, keywords, name=name) -> None:
                take(name, *(args or keywords.values()))

            hooks.enter_context(module.register_forward_pre_hook(tell, with_kwargs=True))
        yield


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout is off inside, and afterwards each module is in the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def recomputed(model: nn.Module, names: Iterable[str], device: torch.device) -> Iterator[torch.Tensor]:
    """Inside, the layers of ``stream`` keep nothing for a backward pass but what they are given: they are computed
    again, on ``device``, when the gradient of their output is there. So one of them is needed there at a time.

    What is yielded, a number on the model's device, takes part in all of them: for its gradient, which is 0, the
    backward pass goes through them all, whatever of the model needs a gradient. Parameters get none.
    """
    anchor, dtype = torch.zeros((), device=model.device, requires_grad=True), model.dtype

    def forward(name, original, *args, **kwargs):
        leaves, form = tree_flatten((args, kwargs))
        places = [index for index, leaf in enumerate(leaves) if _differentiable(leaf)]
        wanted = [index for index in places if leaves[index].requires_grad] or places

        def compute(*given):
            """All leaves of the output, from those at ``wanted``."""
            now = list(leaves)
            for index, leaf in zip(wanted, given, strict=True):
                now[index] = leaf
            found, shape = tree_flatten(_computed(original, now, form, device, dtype))
            return [_on(x, anchor.device) for x in found], shape

        def backward(given, gradients):
            given = [x.detach().requires_grad_() for x in given]
            with placed(model, name, device), torch.enable_grad():
                found, _ = compute(*given)
                pairs = zip(filter(_differentiable, found), gradients, strict=True)
                outputs, gradients = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
                return torch.autograd.grad(outputs, given, gradients, allow_unused=True)

        with placed(model, name, device), torch.no_grad():
            found, shape = compute(*(leaves[index] for index in wanted))
        outputs = [x for x in found if _differentiable(x)]
        joined = iter(_Recomputed.apply(backward, outputs, anchor, *(leaves[index] for index in wanted)))
        return tree_unflatten([next(joined) if _differentiable(x) else x for x in found], shape)

    with _walked(model, names, forward):
        yield anchor


class _Recomputed(torch.autograd.Function):
    """Outputs that are known, of inputs whose gradients ``backward(inputs, gradients)`` gives."""

    @staticmethod
    def forward(ctx, backward, outputs, anchor, *inputs):
        ctx.way_back = backward
        ctx.save_for_backward(*inputs)
        return tuple(outputs)

    @staticmethod
    def backward(ctx, *gradients):
        return None, None, gradients[0].new_zeros(()), *ctx.way_back(ctx.saved_tensors, gradients)


def _differentiable(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def forward_pass(model: nn.Module, ids: torch.Tensor) -> Any:
    """A forward pass without a cache; an encoder-decoder reads the same tokens on both sides."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        return model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
    finally:
        for config in caching:
            config.use_cache = True


@contextmanager
def placed(model: nn.Module, name: str, device: torch.device) -> Iterator[None]:
    """The module of that name is on ``device``, in the dtype to compute in there, inside, and afterwards as it was;
    if another has its name by then, that one is where it was. What was there is put back rather than copied: the
    weights of a checkpoint are mapped from its file until they are changed, and take no memory."""
    module = model.get_submodule(name)
    parameters = [(parameter, parameter.data) for parameter in module.parameters()]
    buffers = [(part, dict(part._buffers)) for part in module.modules()]
    home = parameters[0][1].device if parameters else device
    try:
        if home != device:
            module.to(device)
        for parameter, _ in parameters:
            parameter.data = _there(parameter.data, device)
        for part, own in buffers:
            part._buffers.update({key: _there(part._buffers[key], device) for key in own})
        yield
    finally:
        for parameter, data in parameters:
            parameter.data = data
        for part, own in buffers:
            part._buffers.update(own)
        if home != device:
            model.get_submodule(name).to(home)


@contextmanager
def whole(model: nn.Module, device: torch.device) -> Iterator[None]:
    """All of the model is ``placed`` on ``device`` inside; afterwards what that took there is free for others."""
    try:
        with placed(model, "", device):
            yield
    finally:
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def _on(value, device: torch.device):
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _there(value, device: torch.device):
    """A tensor on a device, in the dtype to compute in there; anything else as it is."""
    return value.to(device, dtype_on(device, value.dtype)) if isinstance(value, torch.Tensor) else value


def _computed(call: Callable, leaves: list, form, device: torch.device, dtype: torch.dtype):
    """What a layer makes on a device of arguments ``leaves``, in the dtype that the model has between two layers."""
    args, kwargs = tree_unflatten([_there(x, device) for x in leaves], form)
    computing = dtype_on(device, dtype)
    return tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.dtype == computing else x, call(*args, **kwargs))


def _join(outputs: Iterable[tuple[slice, Any]], sequences: int, device: torch.device):
    """On ``device`` what a module makes of all sequences, from ``rows, output`` of all their parts. Tensors with a row
    for each sequence of the first part, the largest, are joined; of all else that of the last part is taken."""
    joined = None
    for rows, output in outputs:
        leaves, form = tree_flatten(output)
        if joined is None:
            size = len(range(*rows.indices(sequences)))
            joined = {
                index: leaf.new_empty((sequences, *leaf.shape[1:]), device=device)
                for index, leaf in enumerate(leaves)
                if _of_all(leaf, size)
            }
        for index, whole in joined.items():
            whole[rows] = leaves[index]
    return tree_unflatten([joined.get(index, _on(leaf, device)) for index, leaf in enumerate(leaves)], form)


def _of_all(value, sequences: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == sequences
