"""Leads data through a model one layer at a time."""

import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_kbit.calibration import passes
from hf_kbit.calibration.objects import mapped
from hf_kbit.plan.allocation import elements


class _Finished(BaseException):
    """Ends a forward pass from the inside; no ``except Exception`` in a model holds it up."""


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


def stream(
    model: nn.Module,
    names: Iterable[str],
    batches: Sequence[torch.Tensor],
    device: torch.device,
    visit: Callable[[str, Callable[..., Any]], Iterable[Any]],
) -> None:
    """A forward pass for each of the ``batches`` of token ids, all of which wait at each layer, where
    ``visit(name, run)`` takes the place of the layer's forward: so the model's own code prepares what a layer is
    given, whatever that is, and each batch has its own.

    ``run(number)`` computes the layer, as it is by then, on what a batch has given it. That is as it was after it, in
    objects too, so a layer may be computed often. ``run(number, last=True)`` is for the outputs of all batches in
    their order, which ``visit`` returns: what the layer leaves in objects stays there for those that follow.

    Layers are ``names`` and the other elements of module lists; each is on ``device``, in the dtype to compute in
    there, while it is visited, and what it gives and leaves is where and as the model has it. After the last of
    ``names`` all passes end, before its outputs are computed.
    """
    waiting, dtype, home = set(names), model.dtype, model.device

    def forward(name, original, *args, **kwargs):
        own = passes.current()  # none where a layer is computed, from the inside of a visit
        return original(*args, **kwargs) if own is None else own.wait(name, args, kwargs)

    with _walked(model, names, forward), without_cache(model):
        with passes.leading(partial(_forward, model, ids) for ids in batches) as led:
            while (name := _place(model, led)) is not None:

                def run(number: int, last: bool = False, name=name):
                    given = led[number].call[1:]
                    if not last:
                        given = mapped(given, partial(_there, device=device, copy=True), copying=True)
                    return _computed(model.get_submodule(name), given, device, home if last else device, dtype)

                with placed(model, name, device):
                    outputs = visit(name, run)
                    waiting.discard(name)
                    if not waiting:
                        return
                    for each, output in zip(led, outputs, strict=True):
                        each.go_on(output)


def run_whole(model: nn.Module, names: Iterable[str], ids: torch.Tensor, device: torch.device) -> None:
    """As ``stream``, all sequences at once, each layer once, by its own forward."""
    waiting, dtype, home = set(names), model.dtype, model.device

    def forward(name, original, *args, **kwargs):
        with placed(model, name, device):
            output = _computed(original, (args, kwargs), device, home, dtype)
        waiting.discard(name)
        if not waiting:
            raise _Finished
        return output

    with _walked(model, names, forward), suppress(_Finished):
        forward_pass(model, ids)


def _place(model: nn.Module, led: Sequence[passes.Pass]) -> str | None:
    """The layer where all passes wait; None after the end."""
    places = [None if each.call is None else each.call[0] for each in led]
    if len(set(places)) > 1:
        name = next(place for place in places if place is not None)
        other = next(place for place in places if place != name) or "none"
        raise passes.Parted(
            f"{name}: found that {places.count(name)} of {len(led)} batches of sequences go through it, and others "
            f"through {other} then, expected all to go one way through {type(model).__name__}; quantize it while "
            "loading, without data"
        )
    return places[0]


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
def recomputed(model: nn.Module, names: Iterable[str], device: torch.device | None) -> Iterator[None]:
    """Inside, the layers of ``stream`` keep nothing for a backward pass but what they are given: they are computed
    again, on ``device``, when the gradient of their output is there. So one of them is needed there at a time. None:
    where they are, and in the dtype that they have."""
    home, dtype = model.device, model.dtype

    def forward(name, original, *args, **kwargs):
        first, later = (args, kwargs), mapped((args, kwargs), lambda x: x, copying=True)

        def compute():
            nonlocal first
            given, first = first or mapped(later, lambda x: x, copying=True), None
            if device is None:
                return original(*given[0], **given[1])
            with placed(model, name, device):
                return _computed(original, given, device, home, dtype)

        return checkpoint(compute, use_reentrant=False)

    with _walked(model, names, forward):
        yield


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Inside, the model keeps no keys and values, or states, for tokens to come."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    caching = [config for config in configs if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def forward_pass(model: nn.Module, ids: torch.Tensor) -> Any:
    """A forward pass without a cache; an encoder-decoder reads the same tokens on both sides."""
    with without_cache(model):
        return _forward(model, ids)


def _forward(model: nn.Module, ids: torch.Tensor) -> Any:
    return model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))


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


def _there(value, device: torch.device, copy: bool = False):
    """A tensor on a device, in the dtype to compute in there; anything else as it is."""
    return value.to(device, dtype_on(device, value.dtype), copy=copy) if isinstance(value, torch.Tensor) else value


def _computed(
    call: Callable, given: tuple[tuple, dict], device: torch.device, home: torch.device, dtype: torch.dtype
) -> Any:
    """What a layer makes on a device of ``given``, its args and kwargs: on ``home``, in the dtype that the model has
    between two layers. What it leaves in objects that it is given is so, too."""
    moved, computing = {}, dtype_on(device, dtype)

    def there(x: torch.Tensor) -> torch.Tensor:
        found = _there(x, device)
        moved[id(found)] = found, x
        return found

    def back(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in moved:
            return x.to(home, dtype if x.dtype == computing else x.dtype)
        found, original = moved[id(x)]
        if found is not original and found._version:  # written into
            original.copy_(found)
        return original

    args, kwargs = mapped(given, there, copying=False)
    output, *_ = mapped((call(*args, **kwargs), args, kwargs), back, copying=False)
    return output
