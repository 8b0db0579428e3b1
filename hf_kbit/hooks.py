"""Every hook into another library: what it is, the parameters it is expected to have, what is lost where it moved.

There are two tables for each library, and for parts that little needs. ``..._NAMES`` are private names that our code
imports or overrides: without them nothing of it works, and the import of the library goes on. ``..._HOOKS`` are
functions and methods that we replace, each by what a *wrapper* makes of it. They are set once a process makes its
first quantized layer, or wishes for one (``arm``).

A hook holds if the thing is there and its first parameters have the expected names. A version of a library in which
one moved is met with one message that says which, what is lost by it, and what to do. A function is replaced once,
however often a library or this package is imported or reloaded.

Besides these tables there are agreements with other code that no signature can tell: the attributes
``_is_hf_initialized`` and ``_weight_conversions`` of Transformers, ``_device_mesh`` of its models,
``_is_user_defined`` of its caches, ``_attn_implementation_internal`` of its configurations, and ``_custom_modules`` of
PEFT's configurations; ``num_experts``, ``parameter_name`` and ``_did_swap_in_out_features`` of its ``ParamWrapper``;
``_hf_hook`` of accelerate's layers, and ``_shared_state`` of its ``AcceleratorState``; that modules of
``torch.distributed`` make room for shards;
``is_loaded_in_4bit``, set for the time of a call of PEFT (``peft/prepare.py``); and the pass of Inductor that
``ops.inductor`` installs where no other is.
"""

import importlib
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib.abc import MetaPathFinder

OLDEST_PEFT = "0.20"


@dataclass(frozen=True)
class Name:
    """A private name that our code imports, calls or overrides, and its first parameters; None if it has none."""

    place: str
    parameters: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Hook:
    """A function or method that we replace.

    Attributes:
        place: ``module:name`` or ``module:Class.name``.
        parameters: names of its first ones.
        wrapper: ``module:name`` of what is called with the original, and returns what takes its place; a class method
            is one with ``cls`` for both.
        everywhere: whether it is replaced in each module that has it by name, not only where it is defined.
        lost: what there is not without the hook, as the rest of a sentence; empty if nothing works without it.
    """

    place: str
    parameters: tuple[str, ...]
    wrapper: str
    everywhere: bool = False
    lost: str = ""


_LOADING, _QUANTIZER = "transformers.core_model_loading", "transformers.quantizers.base:HfQuantizer"
TRANSFORMERS_NAMES = (
    Name(f"{_LOADING}:ConversionOps.convert", ("self", "input_dict")),
    Name(f"{_LOADING}:WeightConverter"),
    Name(f"{_LOADING}:WeightConverter.reverse_transform", ("self",)),
    Name(f"{_LOADING}:WeightRenaming"),
    Name(f"{_LOADING}:WeightTransform"),
    Name(f"{_LOADING}:dot_natural_key", ("s",)),
    Name(f"{_LOADING}:rename_source_key", ("source_key", "weight_renamings", "weight_converters")),
    Name(f"{_LOADING}:revert_weight_conversion", ("model", "state_dict")),
    Name("transformers.conversion_mapping:get_model_conversion_mapping", ("model",)),
    Name("transformers.integrations.accelerate:load_offloaded_parameter", ("model", "param_name")),
    Name("transformers.integrations.deepspeed:is_deepspeed_zero3_enabled", ()),
    Name("transformers.modeling_utils:PreTrainedModel.should_save_on_this_rank", ("self", "is_main_process")),
    Name("transformers.pytorch_utils:Conv1D"),
    Name("transformers.quantizers.auto:register_quantization_config", ("method",)),
    Name("transformers.quantizers.auto:register_quantizer", ("name",)),
    Name("transformers.quantizers.quantizers_utils:get_module_from_name", ("module", "tensor_name")),
    Name(f"{_QUANTIZER}._dequantize", ("self", "model")),
    Name(f"{_QUANTIZER}._process_model_after_weight_loading", ("self", "model")),
    Name(f"{_QUANTIZER}._process_model_before_weight_loading", ("self", "model")),
    Name(f"{_QUANTIZER}.get_quantize_ops", ("self",)),
    Name(f"{_QUANTIZER}.get_state_dict_and_metadata", ("self", "model")),
    Name(f"{_QUANTIZER}.param_element_size", ("self", "model", "param_name", "param")),
    Name(f"{_QUANTIZER}.param_needs_quantization", ("self", "model", "param_name")),
    Name(f"{_QUANTIZER}.postprocess_model", ("self", "model")),
    Name(f"{_QUANTIZER}.update_weight_conversions", ("self", "weight_conversions")),
    Name(f"{_QUANTIZER}.validate_environment", ("self",)),
)

# Those that quantizing into shards alone relies on, and hf_kbit.fast_generate alone: the rest works without them.
_SHARDING = "transformers.distributed.sharding_utils"
SHARDING_NAMES = (
    Name(f"{_SHARDING}:DtensorShardOperation", ("param",)),
    Name(f"{_SHARDING}:DtensorShardOperation.shard_tensor", ("self", "source")),
    Name(f"{_SHARDING}:_dtensor_from_local_like", ("local_tensor", "ref")),
)
_GENERATION = "transformers.generation.utils:GenerationMixin"
GENERATION_NAMES = (
    Name(f"{_GENERATION}._prefill", ("self", "input_ids", "generation_config", "model_kwargs")),
    Name(f"{_GENERATION}._supports_default_dynamic_cache", ()),
    Name(f"{_GENERATION}._update_model_kwargs_for_generation", ("self", "outputs", "model_kwargs")),
    Name(f"{_GENERATION}.prepare_inputs_for_generation", ("self", "input_ids", "next_sequence_length")),
)
GENERATION_HOOKS = (
    Hook(
        f"{_GENERATION}._extract_generation_mode_kwargs",
        ("self", "custom_generate", "kwargs", "synced_gpus", "assistant_model", "streamer"),
        "hf_kbit.generation.fast_generate:pass_all_on",
        lost="hf_kbit.fast_generate gets no streamer, and no tokenizer for stop strings",
    ),
)

TORCH_NAMES = (
    Name("torch.autograd.forward_ad:_current_level"),
    Name("torch._C:_dispatch_key_parse"),
    Name("torch._C:_set_throw_on_mutable_data_ptr"),
)

TRANSFORMERS_HOOKS = (
    Hook(
        "transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs",
        ("quantization_config", "quantization_config_from_args"),
        "hf_kbit.integrations.transformers.mxfp4:wrap_merge",
        lost="a KbitConfig is refused for checkpoints in MXFP4",
    ),
    Hook(
        "transformers.modeling_utils:PreTrainedModel.save_pretrained",
        ("self", "save_directory", "is_main_process", "state_dict"),
        "hf_kbit.integrations.transformers.save_pretrained:wrap",
        lost="saved files are not sealed, and parts of quantized models cannot be saved",
    ),
    Hook(
        "transformers.modeling_utils:PreTrainedModel.maybe_distribute_model",
        ("model", "distributed_config"),
        "hf_kbit.integrations.transformers.parallel:shard_packed",
        lost="quantized models fail, or go wrong, under tensor and expert parallelism",
    ),
    Hook(
        "transformers.modeling_utils:PreTrainedModel.gather_sharded_state_dict_for_save",
        ("self", "model_to_save", "state_dict", "distributed_config"),
        "hf_kbit.integrations.transformers.parallel:gather_once",
        lost="quantized models that FSDP2 has sharded cannot be saved",
    ),
    Hook(
        "transformers.modeling_utils:PreTrainedModel.set_use_kernels",
        ("self", "use_kernels", "kernel_config"),
        "hf_kbit.integrations.transformers.kernels:refuse_packed_experts",
        lost="use_kernels=True on packed experts fails in a kernel",
    ),
)

ACCELERATE_HOOKS = (
    Hook(
        "accelerate.utils.modeling:compute_module_sizes",
        ("model", "dtype", "special_dtypes", "buffers_only"),
        "hf_kbit.integrations.accelerate:count_packed",
        everywhere=True,
        lost="accelerate takes packed weights for dense ones when it makes device maps",
    ),
)

_TUNER, _GLUE = "peft.tuners.tuners_utils:BaseTuner", "hf_kbit.integrations.peft"
PEFT_NAMES = (
    Name(f"{_TUNER}Layer._cast_input_dtype", ("self", "x", "dtype")),
    Name(f"{_TUNER}Layer._move_adapter_to_device_of_base_layer", ("self", "adapter_name")),
    Name(f"{_TUNER}Layer.delete_adapter", ("self", "adapter_name")),
    Name(f"{_TUNER}Layer.get_base_layer", ("self",)),
    Name(f"{_TUNER}Layer.quantization_backend"),
    Name("peft.tuners.tuners_utils:check_adapters_to_merge", ("module", "adapter_names")),
    Name(f"{_TUNER}._create_and_replace", ("self",)),
    Name("peft.tuners.lora.layer:Linear.forward", ("self", "x")),
    Name("peft.tuners.lora.layer:ParamWrapper._check_forward_args", ("self", "x")),
    Name("peft.tuners.lora.layer:ParamWrapper.forward", ("self", "x")),
    Name("peft.tuners.lora.layer:ParamWrapper.get_param", ("self",)),
    Name("peft.tuners.trainable_tokens:TrainableTokensLayer._check_overlapping_tokens", ("self", "adapter_names")),
    Name("peft.tuners.trainable_tokens:TrainableTokensLayer.forward_adapters", ("self", "x", "active_adapters")),
    Name(f"{_TUNER}Layer._get_embed_scale", ("self",)),
    Name("peft.utils.quantization_utils:QuantizationBackend"),
)
PEFT_HOOKS = (
    Hook(f"{_TUNER}.inject_adapter", ("self", "model", "adapter_name"), f"{_GLUE}.create:wrap_inject_adapter"),
    Hook(f"{_TUNER}.merge_adapter", ("self",), f"{_GLUE}.merge:report_once"),
    Hook(f"{_TUNER}.merge_and_unload", ("self",), f"{_GLUE}.merge:report_once"),
    Hook(
        "peft.peft_model:PeftModel.save_pretrained",
        ("self", "save_directory"),
        f"{_GLUE}.save:wrap_save_pretrained",
        lost="save_pretrained fails on adapters of packed tables, and on what FSDP2 has sharded",
    ),
    Hook(
        "peft.utils.other:prepare_model_for_kbit_training",
        ("model", "use_gradient_checkpointing", "gradient_checkpointing_kwargs"),
        f"{_GLUE}.prepare:wrap_prepare",
        everywhere=True,
    ),
)

_LAYERS = "vllm.model_executor.layers"
_OF_EXPERTS = f"{_LAYERS}.fused_moe.fused_moe_method_base:FusedMoEMethodBase"
VLLM_NAMES = (
    Name(f"{_LAYERS}.fused_moe:RoutedExperts"),
    Name(f"{_LAYERS}.fused_moe.activation:apply_moe_activation", ("activation", "output", "input")),
    Name(f"{_OF_EXPERTS}.apply", ("self", "layer", "x", "topk_weights", "topk_ids", "shared_experts")),
    Name(f"{_OF_EXPERTS}.create_weights", ("self", "layer", "num_experts", "hidden_size")),
    Name(f"{_LAYERS}.linear:LinearMethodBase.apply", ("self", "layer", "x", "bias")),
    Name(
        f"{_LAYERS}.linear:LinearMethodBase.create_weights",
        ("self", "layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size"),
    ),
    Name(f"{_LAYERS}.quantization:register_quantization_config", ("quantization",)),
    Name(f"{_LAYERS}.quantization.base_config:QuantizationConfig.apply_vllm_mapper", ("self", "hf_to_vllm_mapper")),
    Name(f"{_LAYERS}.quantization.base_config:QuantizationConfig.get_quant_method", ("self", "layer", "prefix")),
    Name(
        f"{_LAYERS}.quantization.base_config:QuantizationConfig.maybe_update_config",
        ("self", "model_name", "hf_config", "revision"),
    ),
    Name(f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead"),
    Name(f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding"),
    Name("vllm.config:get_current_vllm_config_or_none", ()),
    Name("vllm.model_executor.models.utils:PPMissingLayer"),
)
VLLM_HOOKS = (
    Hook(
        "vllm.model_executor.model_loader.base_loader:initialize_model",
        ("vllm_config", "prefix"),
        "hf_kbit.integrations.vllm.loading:wrap_initialize_model",
        lost="packed tables, heads and experts cannot be loaded",
    ),
    Hook(
        "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
        ("model",),
        "hf_kbit.integrations.vllm.loading:wrap_initialize_layerwise_reload",
        everywhere=True,
        lost="weights that are loaded into a running model are not refused",
    ),
)
# In processes that run models alone, for the import takes seconds.
VLLM_WORKER_HOOKS = (
    Hook(
        "vllm.v1.worker.gpu_worker:Worker.sleep",
        ("self", "level"),
        "hf_kbit.integrations.vllm.loading:wrap_sleep",
        lost="a sleep that throws packed weights away is not refused",
    ),
)


# --- checking -------------------------------------------------------------------------------------


def moved(entries: Iterable[Name | Hook]) -> list[str]:
    """What of these is not as expected, a phrase for each; only libraries that are imported are looked at.

    >>> moved([Name("inspect:getsource", ("object",)), Name("inspect:getsauce")])
    ['inspect:getsauce (found none)']
    """
    problems = []
    for entry in entries:
        try:
            found = pkgutil.resolve_name(entry.place)
        except (ImportError, AttributeError):
            problems.append(f"{entry.place} (found none)")
            continue
        if entry.parameters is not None:
            parameters = tuple(inspect.signature(found).parameters)
            if parameters[: len(entry.parameters)] != entry.parameters:
                expected = ", ".join(entry.parameters)
                problems.append(f"{entry.place} (found parameters {', '.join(parameters)}, expected {expected} first)")
        if isinstance(entry, Hook):
            try:
                pkgutil.resolve_name(entry.wrapper)
            except Exception as error:  # whatever our file says of this library, importing that goes on
                problems.append(f"{entry.place} (found that our {entry.wrapper} does not go with it: {error!r})")
    return problems


def require(library: str, names: Iterable[Name], what: str = "this hf_kbit") -> None:
    """Raises one ImportError that lists all private names of a library that moved, and what relies on them."""
    if problems := moved(names):
        raise ImportError(
            f"{library} {sys.modules[library].__version__}: found names moved that {what} relies on: "
            f"{'; '.join(problems)}. Take a newer hf_kbit, or an older {library}"
        )


# --- hooking in -----------------------------------------------------------------------------------


def install(library: str, hooks: Iterable[Hook]) -> None:
    """Replaces what the hooks name. Those that moved are left out, with one warning that says what is lost by that."""
    gone = [hook for hook in hooks if moved([hook])]
    for hook in hooks:
        if hook not in gone:
            _install(hook)
    if gone:
        found = "; ".join(moved(gone))
        lost = "; ".join(dict.fromkeys(hook.lost for hook in gone))
        version = sys.modules[library].__version__
        warnings.warn(
            f"hf_kbit: {lost}, for in {library} {version} this moved: {found}. Take a newer hf_kbit",
            RuntimeWarning,
            stacklevel=3,
        )


def _install(hook: Hook) -> None:
    original = pkgutil.resolve_name(hook.place)
    if getattr(original, "_is_hook_of_hf_kbit", False):
        return
    wrap = pkgutil.resolve_name(hook.wrapper)
    if hook.everywhere:
        replacement = wrap(original)
        _replace_everywhere(original, replacement)
    else:
        place, _, name = hook.place.replace(":", ".").rpartition(".")
        owner = pkgutil.resolve_name(place)
        method = inspect.getattr_static(owner, name)
        if of_class := isinstance(method, classmethod | staticmethod):
            original = method.__func__
        replacement = wrap(original)
        setattr(owner, name, type(method)(replacement) if of_class else replacement)
    replacement._is_hook_of_hf_kbit = True


def _replace_everywhere(old: Callable, new: Callable) -> None:
    """``from library import function`` copies a name, so every module that has it by then gets the new one."""
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old and not module.__name__.startswith("hf_kbit."):
                setattr(module, name, new)


def register() -> None:
    """Makes Transformers know the method, by its registry. Where that fails, it stays as it is: the program may well
    use it for models that are not quantized."""
    try:
        importlib.import_module("hf_kbit.integrations.transformers.quantizer")  # registers itself
    except Exception as error:  # whatever our files say of this Transformers, importing it goes on
        warnings.warn(f"hf_kbit: models can be neither quantized nor loaded: {error}", RuntimeWarning, stacklevel=2)


@cache
def arm() -> None:
    """Sets the hooks in the libraries that are there, and in others when they are imported. What makes the first
    quantized layer of a process, or the first wish for one, calls it."""
    after_import("transformers.modeling_utils", lambda: install("transformers", TRANSFORMERS_HOOKS))
    after_import("accelerate.utils.modeling", lambda: install("accelerate", ACCELERATE_HOOKS))
    after_import("peft", install_peft)


def install_generation() -> None:
    """Makes ``generate`` pass all that it is given on to ``hf_kbit.fast_generate``."""
    require("transformers", GENERATION_NAMES, "hf_kbit.fast_generate")
    install("transformers", GENERATION_HOOKS)


def install_vllm() -> None:
    """Makes vLLM load quantized models."""
    import vllm.model_executor.model_loader  # noqa: F401  which the hook is in

    require("vllm", VLLM_NAMES)
    install("vllm", VLLM_HOOKS)


def install_peft() -> None:
    """Makes adapters do on quantized layers what PEFT alone cannot. Where that fails, PEFT stays as it is: it trains
    adapters on packed weights as on others, and what would write into these is refused."""
    if problem := _why_not_peft():
        warnings.warn(
            f"hf_kbit: adapters on quantized layers cannot be merged, and their experts not adapted: {problem}",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        install("peft", PEFT_HOOKS)


def _why_not_peft() -> str:
    from packaging.version import Version

    version = sys.modules["peft"].__version__
    if Version(version) < Version(OLDEST_PEFT):
        return f"found peft {version}, expected {OLDEST_PEFT} or newer: pip install -U peft"
    if problems := moved((*PEFT_NAMES, *(hook for hook in PEFT_HOOKS if not hook.lost))):
        return f"found that in peft {version} this moved: {'; '.join(problems)}. Take a newer hf_kbit"
    return ""


# --- a library that may be imported later ---------------------------------------------------------


_sought: ContextVar[str | None] = ContextVar("the library for which a finder of ours asks the others", default=None)


class _Finder(MetaPathFinder):
    """Finds a library as the other finders do, and calls ``then`` each time it has been imported or reloaded.

    It is never taken out of ``sys.meta_path``: another thread may be going through that list. It need not be in there
    itself: another tool may have taken it out, to ask it on its own.
    """

    def __init__(self, library: str, then: Callable[[], None]):
        self.library, self.then = library, then

    def find_spec(self, name, path=None, target=None):
        if name != self.library or _sought.get() == name:
            return None
        token = _sought.set(name)
        try:
            found = (finder.find_spec(name, path, target) for finder in list(sys.meta_path))
            spec = next(filter(None, found), None)
        finally:
            _sought.reset(token)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                self.then()  # still under the lock of this import: no thread gets the library without hooks

            spec.loader.exec_module = exec_module
        return spec


def after_import(library: str, then: Callable[[], None]) -> None:
    """Calls ``then`` after each import of ``library``, and now if there was one; ``then`` may find its work done."""
    sys.meta_path.insert(0, _Finder(library, then))  # first of all, for another thread may be about to import it
    if sys.modules.get(library) is not None:
        importlib.import_module(library)  # waits where another thread is importing it
        then()
