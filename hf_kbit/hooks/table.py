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

from dataclasses import dataclass

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
        why: which public way is missing.
        wrapper: ``module:name`` of what is called with the original, and returns what takes its place; a class method
            is one with ``cls`` for both.
        everywhere: whether it is replaced in each module that has it by name, not only where it is defined.
        without: what there is not without the hook, as the rest of a sentence; empty if nothing works without it.
    """

    place: str
    parameters: tuple[str, ...]
    why: str
    wrapper: str
    everywhere: bool = False
    without: str = ""


_LOADING, _QUANTIZER = "transformers.core_model_loading", "transformers.quantizers.base:HfQuantizer"
TRANSFORMERS_NAMES = (
    Name(f"{_LOADING}:ConversionOps.convert", ("self", "input_dict")),
    Name(f"{_LOADING}:WeightConverter"),
    Name(f"{_LOADING}:WeightConverter.convert", ("self", "layer_name", "model", "config")),
    Name(f"{_LOADING}:WeightConverter.reverse_transform", ("self",)),
    Name(f"{_LOADING}:WeightRenaming"),
    Name(f"{_LOADING}:WeightTransform"),
    Name(f"{_LOADING}:WeightTransform.add_tensor", ("self", "target_key", "source_key", "source_pattern", "future")),
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
    Name(f"{_QUANTIZER}.update_device_map", ("self", "device_map")),
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
        "generate(custom_generate=...) drops what it knows itself, such as a streamer",
        "hf_kbit.generation.fast_generate:pass_all_on",
        without="hf_kbit.fast_generate gets no streamer, and no tokenizer for stop strings",
    ),
)

TORCH_NAMES = (
    Name("torch.autograd.forward_ad:_current_level"),
    Name("torch._C:_dispatch_key_parse"),
    Name("torch._C:_set_throw_on_mutable_data_ptr"),
)

# Set with the method in the registry of Transformers: it has to be there before a model is made.
REGISTRATION_HOOKS = (
    Hook(
        "transformers.quantizers.auto:AutoHfQuantizer.merge_quantization_configs",
        ("quantization_config", "quantization_config_from_args"),
        "a checkpoint in MXFP4 is refused by the names of two config classes, before a quantizer is asked",
        "hf_kbit.integrations.transformers.mxfp4:wrap_merge",
        without="a KbitConfig is refused for checkpoints in MXFP4",
    ),
)

TRANSFORMERS_HOOKS = (
    Hook(
        "transformers.modeling_utils:PreTrainedModel.save_pretrained",
        ("self", "save_directory", "is_main_process", "state_dict"),
        "no method of a quantizer is called once files are written, and a part of a model has no quantizer",
        "hf_kbit.integrations.transformers.save_pretrained:wrap",
        without="saved files are not sealed, and parts of quantized models cannot be saved",
    ),
    Hook(
        "transformers.modeling_utils:PreTrainedModel.maybe_distribute_model",
        ("model", "distributed_config"),
        "a quantizer can name rules for shards, and not what a rule does to a weight of several tensors",
        "hf_kbit.integrations.transformers.parallel:shard_packed",
        without="quantized models fail, or go wrong, under tensor and expert parallelism",
    ),
    Hook(
        "transformers.modeling_utils:PreTrainedModel.gather_sharded_state_dict_for_save",
        ("self", "model_to_save", "state_dict", "distributed_config"),
        "what get_state_dict_and_metadata has gathered is gathered again",
        "hf_kbit.integrations.transformers.parallel:gather_once",
        without="quantized models that FSDP2 has sharded cannot be saved",
    ),
)

ACCELERATE_HOOKS = (
    Hook(
        "accelerate.utils.modeling:compute_module_sizes",
        ("model", "dtype", "special_dtypes", "buffers_only"),
        "a tensor cannot say what it takes: numbers of elements are multiplied by the bytes of a dtype",
        "hf_kbit.integrations.accelerate:count_packed",
        everywhere=True,
        without="accelerate takes packed weights for dense ones when it makes device maps",
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
    Hook(
        f"{_TUNER}.inject_adapter",
        ("self", "model", "adapter_name"),
        "_custom_modules is asked for a layer, not for a weight that an initialisation changes, or for experts",
        f"{_GLUE}.create:wrap_inject_adapter",
    ),
    Hook(
        f"{_TUNER}.merge_adapter",
        ("self",),
        "a QuantizationBackend merges one layer, and none is called before and after a model",
        f"{_GLUE}.merge:report_once",
    ),
    Hook(
        f"{_TUNER}.merge_and_unload",
        ("self",),
        "a QuantizationBackend merges one layer, and none is called before and after a model",
        f"{_GLUE}.merge:report_once",
    ),
    Hook(
        "peft.peft_model:PeftModel.save_pretrained",
        ("self", "save_directory"),
        "PEFT looks for the embedding of an adapted table by the class of its weight",
        f"{_GLUE}.save:wrap_save_pretrained",
        without="save_pretrained fails on adapters of packed tables, and on what FSDP2 has sharded",
    ),
    Hook(
        "peft.utils.other:prepare_model_for_kbit_training",
        ("model", "use_gradient_checkpointing", "gradient_checkpointing_kwargs"),
        "methods are told from others by attributes of the model (is_loaded_in_4bit), which mean bitsandbytes",
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
    Name(f"{_OF_EXPERTS}.supports_internal_mk"),
    Name(f"{_LAYERS}.linear:LinearMethodBase.apply", ("self", "layer", "x", "bias")),
    Name(
        f"{_LAYERS}.linear:LinearMethodBase.create_weights",
        ("self", "layer", "input_size_per_partition", "output_partition_sizes", "input_size", "output_size"),
    ),
    Name(f"{_LAYERS}.quantization:QUANTIZATION_METHODS"),
    Name(f"{_LAYERS}.quantization:register_quantization_config", ("quantization",)),
    Name(f"{_LAYERS}.quantization.base_config:QuantizationConfig.apply_vllm_mapper", ("self", "hf_to_vllm_mapper")),
    Name(f"{_LAYERS}.quantization.base_config:QuantizationConfig.get_quant_method", ("self", "layer", "prefix")),
    Name(
        f"{_LAYERS}.quantization.base_config:QuantizationConfig.maybe_update_config",
        ("self", "model_name", "hf_config", "revision"),
    ),
    Name(f"{_LAYERS}.logits_processor:LogitsProcessor"),
    Name(f"{_LAYERS}.vocab_parallel_embedding:ParallelLMHead"),
    Name(f"{_LAYERS}.vocab_parallel_embedding:VocabParallelEmbedding"),
    Name("vllm.config:get_current_vllm_config_or_none", ()),
    Name("vllm.distributed:get_ep_group", ()),
    Name("vllm.model_executor.models.utils:PPMissingLayer"),
)
VLLM_HOOKS = (
    Hook(
        "vllm.model_executor.model_loader.base_loader:initialize_model",
        ("vllm_config", "prefix"),
        "tables and heads are made without a name, or without asking the quantization config",
        "hf_kbit.integrations.vllm.loading:wrap_initialize_model",
        without="packed tables, heads and experts cannot be loaded",
    ),
    Hook(
        "vllm.model_executor.model_loader.reload.layerwise:initialize_layerwise_reload",
        ("model",),
        "a quantization method is not told that weights come anew",
        "hf_kbit.integrations.vllm.loading:wrap_initialize_layerwise_reload",
        everywhere=True,
        without="weights that are loaded into a running model are not refused",
    ),
)
# In processes that run models alone, for the import takes seconds.
VLLM_WORKER_HOOKS = (
    Hook(
        "vllm.v1.worker.gpu_worker:Worker.sleep",
        ("self", "level"),
        "a quantization method is not told that its tensors are thrown away",
        "hf_kbit.integrations.vllm.loading:wrap_sleep",
        without="a sleep that throws packed weights away is not refused",
    ),
)
