"""What ``hf_kbit.decode`` cannot do: each is named before anything runs."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationConfig, GenerationMode

from hf_kbit.decoding.attention import NAME as ONE_TOKEN
from hf_kbit.decoding.cache import CACHE, GROWING


class Refusal(ValueError):
    """What ``hf_kbit.decode`` cannot do, found before a token was handed on: ``generate`` without it may do it."""


def refuse(model, input_ids: Tensor, config: GenerationConfig, synced_gpus, assistant_model, model_kwargs) -> None:
    """Raises a ``Refusal`` that says what was found of all that the loop cannot do, and what was expected."""
    problems = [*_of_settings(config, synced_gpus, assistant_model, model_kwargs), *_of_model(model, input_ids)]
    if problems:
        told = "; ".join(f"found {found}, expected {expected}" for found, expected in problems)
        raise Refusal(f"hf_kbit.decode: {told}")


def refuse_cache(model, cache: Cache, tokens: int) -> None:
    """Raises a ``Refusal`` if the model has kept anything but keys and values of each token of the prompt."""
    if (kept := cache.get_seq_length()) != tokens:
        raise Refusal(
            f"hf_kbit.decode: found that {type(model).__name__} kept keys and values of {kept} tokens of a prompt of "
            f"{tokens}, expected those of all of them and no others"
        )


def refuse_in_processes(config: GenerationConfig, group: ProcessGroup, device: torch.device) -> None:
    """Raises a ``Refusal`` if processes that share a model would come to different tokens, or to different ends."""
    if config.max_time is not None:
        raise Refusal(
            "hf_kbit.decode: found max_time, expected none for a model that processes share: one of them would end "
            "before another, which would wait for it"
        )
    if not config.do_sample:
        return
    own = (torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()).numpy().tobytes()
    states = [None] * group.size()
    dist.all_gather_object(states, own, group=group)
    if len(set(states)) > 1:
        raise Refusal(
            "hf_kbit.decode: found random generators in different states in the processes that share the model, "
            "expected one state: call torch.manual_seed with the same number in all of them before"
        )


def _of_settings(config: GenerationConfig, synced_gpus, assistant_model, model_kwargs) -> Iterator[tuple[str, str]]:
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        yield f"generation mode {mode.value}", "greedy decoding or sampling"
    if config.return_dict_in_generate:
        yield "return_dict_in_generate=True", "False, for token ids are all that it gives"
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
    for layer in {type(layer) for layer in DynamicCache(config=config).layers}.difference(GROWING):
        yield f"{name}, whose cache has a {layer.__name__}", "attention alone, whose keys and values stay as they are"
    if not model._supports_default_dynamic_cache():
        yield f"{name}, which has a cache of its own", "attention alone, whose keys and values stay as they are"
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
