"""What becomes of a model of vLLM before its tensors come, and what is refused once it serves.

vLLM has a loader for each way to read files. All of them make the model by one function and give it tensors by
``model.load_weights``, so what is ours hangs on these two.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import wraps

import torch
from torch import nn

from hf_kbit.hooks import setting, table
from hf_kbit.integrations.vllm.config import KbitVllmConfig
from hf_kbit.integrations.vllm.embedding import make_room
from hf_kbit.integrations.vllm.fused_moe import KbitExpertsMethod
from hf_kbit.integrations.vllm.linear import KbitLinearMethod

METHODS = KbitLinearMethod, KbitExpertsMethod
AGAIN = "found weights to load into a model that has its packed ones, expected one load: start vLLM again instead"


def wrap_initialize_model(original: Callable) -> Callable:
    @wraps(original)
    def initialize_model(vllm_config, *, prefix="", model_config=None, **settings):
        config = vllm_config.quant_config
        # What drafts is made under the configuration of the model that it drafts for.
        own = model_config is None or model_config is vllm_config.model_config
        ours = own and isinstance(config, KbitVllmConfig)
        if ours:
            setting.install("vllm", table.VLLM_WORKER_HOOKS)
            config.prefix = f"{prefix}." if prefix else ""
        model = original(vllm_config=vllm_config, prefix=prefix, model_config=model_config, **settings)
        if ours:
            make_room(model, config)
            load_once(model, config.biases)
        elif isinstance(config, KbitVllmConfig) and model_config.model == vllm_config.model_config.model:
            if config.further and not _has_packed(model):
                raise ValueError(
                    f"{config.further}: found it packed, expected it in 16 bits, for {type(model).__name__} of vLLM "
                    "has no layer of that name: name it in modules_to_not_convert"
                )
            one_stage = vllm_config.parallel_config.pipeline_parallel_size == 1  # else vLLM gives the head alone
            load_once(model, config.biases, config.shared if one_stage else ())
        return model

    return initialize_model


def load_once(model: nn.Module, biases: Mapping[str, int], left: Collection[str] = ()) -> None:
    """Has ``model.load_weights`` take packed experts out of what it is given, and the padding off ``biases``, leave
    out the tensors of layers that another model gives it, and refuse to be called again."""
    load, loaded = model.load_weights, False

    def load_weights(weights):
        nonlocal loaded
        if loaded:
            raise ValueError(f"{type(model).__name__}: {AGAIN}")
        loaded = True
        needed = ((name, tensor) for name, tensor in weights if name.rpartition(".")[0] not in left)
        others = _without_experts(model, needed)
        return load((name, tensor[: biases[name]] if name in biases else tensor) for name, tensor in others)

    model.load_weights = load_weights


def _without_experts(model: nn.Module, weights) -> Iterator[tuple[str, torch.Tensor]]:
    experts = {
        f"{module.quant_method.name}.": module
        for module in model.modules()
        if isinstance(getattr(module, "quant_method", None), KbitExpertsMethod)
    }
    for name, tensor in weights:
        prefix = next(filter(name.startswith, experts), None)
        if prefix is None:
            yield name, tensor
        else:
            experts[prefix].quant_method.load(experts[prefix], name.removeprefix(prefix), tensor)


def _has_packed(model: nn.Module) -> bool:
    return any(isinstance(getattr(module, "quant_method", None), METHODS) for module in model.modules())


def wrap_initialize_layerwise_reload(original: Callable) -> Callable:
    @wraps(original)
    def initialize_layerwise_reload(model):
        if _has_packed(model):
            raise ValueError(f"{type(model).__name__}: {AGAIN}")  # before anything of it has changed
        return original(model)

    return initialize_layerwise_reload


def wrap_sleep(original: Callable) -> Callable:
    @wraps(original)
    def sleep(self, level=1):
        if level > 1 and isinstance(self.vllm_config.quant_config, KbitVllmConfig):
            raise ValueError(f"level: found {level}, which throws packed weights away, expected 1, which keeps them")
        return original(self, level)

    return sleep
