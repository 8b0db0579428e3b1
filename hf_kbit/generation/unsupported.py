"""What ``hf_kbit.fast_generate`` does not support: each is named before anything runs."""

import inspect
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig, GenerationMode

from hf_kbit.generation.attention import NAME as ONE_TOKEN
from hf_kbit.generation.static_cache import CACHE, SUPPORTED_LAYERS


class Unsupported(ValueError):
    """Raised before a token was handed on: ``generate`` without ``fast_generate`` may do what was asked for."""

    @classmethod
    def of(cls, *problems: tuple[str, str]):
        """``problems``: what was found, and what was expected."""
        told = "; ".join(f"found {found}, expected {expected}" for found, expected in problems)
        return cls(f"hf_kbit.fast_generate: {told}")


def check_supported(
    model, input_ids: Tensor, config: GenerationConfig, synced_gpus, assistant_model, model_kwargs
) -> None:
    """Raises an ``Unsupported`` with all problems of a call."""
    problems = [*_of_settings(config, synced_gpus, assistant_model, model_kwargs), *_of_model(model, input_ids)]
    if problems:
        raise Unsupported.of(*problems)


def check_cache(model, cache: Cache, tokens: int) -> None:
    """Raises an ``Unsupported`` if the model has kept anything but keys and values of each token of the prompt."""
    if (kept := cache.get_seq_length()) != tokens:
        found = f"that {type(model).__name__} kept keys and values of {kept} tokens of a prompt of {tokens}"
        raise Unsupported.of((found, "those of all of them and no others"))


def check_processes(config: GenerationConfig, group: ProcessGroup, device: torch.device) -> None:
    """Raises an ``Unsupported`` if processes that share a model would come to different tokens or ends."""
    if config.max_time is not None:
        why = "one of them would end before another, which would wait for it"
        raise Unsupported.of(("max_time", f"none for a model that processes share: {why}"))
    if not config.do_sample:
        return
    own = (torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()).numpy().tobytes()
    states = [None] * group.size()
    dist.all_gather_object(states, own, group=group)
    if len(set(states)) > 1:
        expected = "one state: call torch.manual_seed with the same number in all of them before"
        raise Unsupported.of(("random generators in different states in the processes that share the model", expected))


def _of_settings(config: GenerationConfig, synced_gpus, assistant_model, model_kwargs) -> Iterator[tuple[str, str]]:
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        yield f"generation mode {mode.value}", "greedy decoding or sampling"
    if config.return_dict_in_generate:
        yield "return_dict_in_generate=True", "False, for it returns token ids alone"
    if config.use_cache is False:
        yield "use_cache=False", "True"
    if config.cache_implementation not in (None, "dynamic", "static", "hybrid"):
        yield f"cache_implementation={config.cache_implementation!r}", "none, for it makes its own cache"
    if getattr(model_kwargs.get(CACHE), "_is_user_defined", False):
        yield CACHE, "none, for it makes its own cache"
    if config.compile_config is not None:
        yield "a compile_config", "none, for it compiles in its own way, or not at all with disable_compile=True"
    if synced_gpus:
        yield "synced_gpus=True", "a model that is not sharded"


def _of_model(model, input_ids: Tensor) -> Iterator[tuple[str, str]]:
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        yield f"{name}, an encoder-decoder", "a decoder"
        return
    plain = "attention alone, whose keys and values stay as they are"
    for layer in {type(layer) for layer in DynamicCache(config=config).layers}.difference(SUPPORTED_LAYERS):
        yield f"{name}, whose cache has a {layer.__name__}", plain
    if not model._supports_default_dynamic_cache() or CACHE not in inspect.signature(model.forward).parameters:
        yield f"{name}, whose forward takes no {CACHE} of keys and values", plain
    if config._attn_implementation not in ("sdpa", "eager", ONE_TOKEN):  # the last while another thread compiles
        yield f"attn_implementation={config._attn_implementation!r}", "'sdpa' or 'eager'"
    devices = sorted(set(map(str, (getattr(model, "hf_device_map", None) or {}).values())))
    if len(devices) > 1:
        yield f"a model on {', '.join(devices)}", "one device"
    if input_ids.device != model.device:
        yield f"input_ids on {input_ids.device}", f"them on {model.device}, where the model is"
    rope = str(getattr(config, "rope_parameters", None))
    for kind in ("dynamic", "longrope"):
        if model.device.type == "cuda" and f"'{kind}'" in rope:
            yield f"rope_type={kind!r}", "positions whose rotation does not depend on the longest sequence"
