"""Tiny quantized models to put adapters on, the same with decoded weights to compare with, and what to put on."""

import copy
import functools
import inspect
import re
import tempfile
import warnings

import peft
import pytest
import torch
import transformers
from accelerate.hooks import attach_align_device_hook
from packaging.version import Version
from peft import LoraConfig
from peft.tuners.lora.layer import ParamWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.integrations.peft.layer import KbitTunerLayer
from hf_kbit.weight.tensor import KbitTensor

TARGETS = ["q_proj", "v_proj", "down_proj"]  # [72, 72], [36, 72] and [72, 100]: no block of 32 fits
IDS = torch.arange(2 * 9).reshape(2, 9)
# Sums in float32 in another order, through two layers: 2e-6 were found on a CPU.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}

through_transformers = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION),
    reason=f"the models of this Transformers take adapters by PEFT {MIN_PEFT_VERSION}, found {peft.__version__}",
)

SHAPE = dict(hidden_size=72, intermediate_size=100, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
SHAPE |= dict(vocab_size=128)
MIXTURE = dict(hidden_size=64, intermediate_size=40, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
MIXTURE |= dict(vocab_size=96, pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64)
MIXTURE |= dict(num_experts_per_tok=2, head_dim=16)
LOCAL = MIXTURE | dict(num_local_experts=4)
# {name: (what the class begins with, settings)}
MODELS = {
    "llama": ("Llama", SHAPE | dict(attention_bias=True)),
    "tied": ("Llama", SHAPE | dict(tie_word_embeddings=True)),
    "gemma": ("Gemma3", SHAPE | dict(head_dim=18, tie_word_embeddings=False)),
    "tied gemma": ("Gemma3", SHAPE | dict(head_dim=18, tie_word_embeddings=True)),
}
MIXTURES = {
    "qwen3_moe": ("Qwen3Moe", MIXTURE | dict(num_experts=6, moe_intermediate_size=40)),
    "mixtral": ("Mixtral", LOCAL),
    "gpt_oss": ("GptOss", LOCAL),  # transposed, with bias, gate and up interleaved
    "nemotron_h": (  # without a gate
        "NemotronH",
        MIXTURE
        | dict(layers_block_type=["moe", "attention"], n_routed_experts=4, n_shared_experts=1, n_groups=1, n_group=1)
        | dict(moe_intermediate_size=40, moe_shared_expert_intermediate_size=40, topk_group=1)
        | dict(mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16),
    ),
    # Not decorated; transposed, but PEFT does not know.
    "llama4": ("Llama4", LOCAL | dict(intermediate_size_mlp=40, interleave_moe_layer_step=1, num_experts_per_tok=1)),
}


def load(dense: PreTrainedModel, device="cpu", **settings) -> PreTrainedModel:
    """The model, quantized while loading with these settings of KbitConfig."""
    with tempfile.TemporaryDirectory() as folder:
        dense.save_pretrained(folder)
        config = KbitConfig(**settings)
        model = type(dense).from_pretrained(folder, dtype=dense.dtype, device_map=device, quantization_config=config)
    model.name_or_path = ""  # PEFT would look for the folder when it saves adapters, and then on the Hub
    return model


@functools.cache
def dense(name: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of the tables with random weights, the same ones each time."""
    prefix, settings = (MODELS | MIXTURES)[name]
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    text = f"{prefix}TextConfig"  # of families that see images too
    config_class = getattr(transformers, text) if hasattr(transformers, text) else model_class.config_class
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class(config_class(**settings))
        for own, parameter in model.named_parameters():
            if own.endswith("bias") and name == "llama":
                nn.init.normal_(parameter, std=0.02)
            elif parameter.dim() > 1 and name in MIXTURES:
                nn.init.normal_(parameter, std=0.1)
    return model.to(dtype)


_loaded: dict[str, PreTrainedModel] = {}  # loading takes many times what copying does


def quantized(device="cpu", dtype=torch.float32, bits=3, name="llama", **settings) -> PreTrainedModel:
    """A model of the tables, quantized."""
    key = repr((device, dtype, bits, name, settings))
    if key not in _loaded:
        _loaded[key] = load(dense(name, dtype), device, bits=bits, **settings)
    return copy.deepcopy(_loaded[key])


def decoded(*args, **kwargs) -> PreTrainedModel:
    """The model with plain layers that have the decoded weights."""
    return quantized(*args, **kwargs).dequantize()


def both(*configs, device="cpu", **kwargs) -> list[peft.PeftModel]:
    """The same adapters on the quantized model and on the decoded one."""
    return [adapted(make(device, **kwargs), *configs) for make in (quantized, decoded)]


def logits(model, **kwargs) -> torch.Tensor:
    return model(input_ids=IDS.to(model.device), **kwargs).logits


def gradients(model) -> dict[str, torch.Tensor]:
    """Of what is trained, and of what the layers are given."""
    ids = IDS.to(model.device)
    embedded = model.get_input_embeddings()(ids)
    embedded = embedded if embedded.requires_grad else embedded.requires_grad_()
    embedded.retain_grad()
    model(inputs_embeds=embedded, labels=ids).loss.backward()
    return {name: parameter.grad for name, parameter in trainable(model).items()} | {"input": embedded.grad}


def adapted(model, *configs, seed: int = 0) -> peft.PeftModel:
    """The model with adapters "default", "1", "2" ..., all trainable tensors moved away from where they start."""
    torch.manual_seed(seed)
    model = peft.get_peft_model(model, configs[0])
    for number, config in enumerate(configs[1:], start=1):
        model.add_adapter(str(number), config)
    prefix = model.base_model.prefix
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if prefix in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model.eval()


def packed_state(model) -> dict[str, torch.Tensor]:
    """Copies of all that is no adapter, in the stored form, by names without what PEFT puts into them."""
    layers = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        name, tensor = re.sub(r"\.(base_layer|original_module|token_adapter)(?=\.)", "", name), tensor.detach()
        if isinstance(tensor, KbitTensor):
            layers |= {name.removesuffix("weight") + own: part for own, part in tensor.file_tensors().items()}
        else:
            layers[name] = tensor
    prefix = getattr(getattr(model, "base_model", None), "prefix", None)
    return {
        name.removeprefix("base_model.model."): tensor.cpu().clone()
        for name, tensor in layers.items()
        if not (prefix and prefix in name)
    }


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def kbit_layers(model) -> dict[str, KbitLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, KbitLinear)}


def tuner_layers(model) -> dict[str, KbitTunerLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, KbitTunerLayer)}


def trainable(model) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def warned(run) -> list[str]:
    """What this package warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if str(warning.message).startswith("hf_kbit")]


def merge(model, **kwargs) -> list[str]:
    """Merges, and returns what this package warns of."""
    return warned(lambda: model.merge_adapter(**kwargs))


def expected_state(reference, model) -> dict[str, torch.Tensor]:
    """What quantizing the weights of the merged reference gives, as the layers of the model are quantized: with the
    column scales that they have."""
    state = {}
    for name, layer in tuner_layers(model).items():
        merged, own, (before, _) = reference.get_submodule(name), layer.quantized, layer.unmerged
        if isinstance(merged, ParamWrapper):
            weight, bias = getattr(merged.get_base_layer(), merged.parameter_name), None
        else:
            weight, bias = merged.base_layer.weight, getattr(merged.base_layer, "bias", None)
        weight = (weight.mT if own.transposed else weight).detach().cpu()
        other, before = copy.deepcopy(own).cpu(), before.moved("cpu")
        if torch.equal(before.dequantize(), weight):  # adapters of biases
            other.weight.data = before
        else:
            other.load(other.quantize(weight, columns=before.columns))
        tensors = other.packed if bias is None else other.packed | {"bias": bias.detach().cpu()}
        state |= {f"{layer.name}.{key}": tensor for key, tensor in tensors.items()}
    return state


def offload(layer: nn.Module, device: str) -> None:
    """Leaves the layer's tensors in CPU memory and has them brought to the device for each call."""
    tensors = {name: tensor.cpu() for name, tensor in layer.state_dict().items()}
    attach_align_device_hook(layer, device, offload=True, weights_map=tensors)


def train(model: nn.Module, ids: torch.Tensor, steps: int, rate: float, optimizer=torch.optim.AdamW) -> list[float]:
    """The losses of some steps on the same tokens, each before it is taken."""
    optimizer = optimizer(model.parameters(), lr=rate, weight_decay=0.1)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def lora(**kwargs) -> LoraConfig:
    return LoraConfig(**{"target_modules": TARGETS, "r": 4, "task_type": "CAUSAL_LM"} | kwargs)


def lora_on_parameters(**kwargs) -> LoraConfig:
    """On the weights of some layers by the names of parameters, and on another layer."""
    targets = {"target_parameters": ["q_proj.weight", "down_proj.weight"], "target_modules": ["v_proj"]}
    return lora(**targets | kwargs)


WITHIN = {"nemotron_h": "mixer", "llama4": "feed_forward"}  # elsewhere mlp


def lora_on_experts(name="qwen3_moe", **kwargs) -> LoraConfig:
    """On all projections of experts, and q_proj."""
    experts, up = f"{WITHIN.get(name, 'mlp')}.experts", "up_proj" if name == "nemotron_h" else "gate_up_proj"
    targets = {"target_parameters": [f"{experts}.{up}", f"{experts}.down_proj"], "target_modules": ["q_proj"]}
    return lora(**(targets | {"lora_alpha": 6} | kwargs))


# What methods need besides names of layers and a rank, to fit the tiny model; None for those that fit no linear layer
# of it, or need more than tokens. All other methods of the installed PEFT that take target_modules are tried too.
SETTINGS = {
    "ADAPTION_PROMPT": None,
    "ADALORA": {"target_modules": TARGETS, "total_step": 10},
    "BEFT": {"target_modules": ["q_proj"]},
    "BOFT": {"target_modules": ["q_proj", "v_proj"], "boft_block_size": 4, "boft_block_num": 0},
    "C3A": {"target_modules": ["q_proj"], "block_size": 12},
    "FOURIERFT": {"n_frequency": 20},
    "IA3": {"target_modules": TARGETS, "feedforward_modules": ["down_proj"]},
    "OFT": {"target_modules": TARGETS, "oft_block_size": 4, "r": 0},
    "POLY": None,
    "ROAD": {"group_size": 4},
    "SHADOW": None,
    "TRAINABLE_TOKENS": None,
    "VBLORA": {"num_vectors": 8, "vector_length": 4, "topk": 2},
    "VERA": {"target_modules": ["q_proj"], "r": 4},
    "XLORA": None,
}


def _config(method: str, config_class: type) -> peft.PeftConfig:
    known = {"target_modules": ["q_proj", "up_proj"], "r": 4} | SETTINGS.get(method, {})
    return config_class(**{key: value for key, value in known.items() if key in _parameters(config_class)})


def _parameters(config_class: type) -> set[str]:
    return set(inspect.signature(config_class).parameters)


METHODS = {
    method.value: functools.partial(_config, method.value, config_class)
    for method, config_class in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()
    if "target_modules" in _parameters(config_class) and SETTINGS.get(method.value, {}) is not None
}
# A configuration of each method, and of LoRA's that are code of their own in PEFT.
CONFIGS = METHODS | {
    "LORA": lora,
    "LoRA, rank-stabilized, patterns": lambda: lora(
        use_rslora=True, rank_pattern={"down_proj": 6}, alpha_pattern={"v_proj": 3}
    ),
    "LoRA, bias": lambda: lora(target_modules=["q_proj", "v_proj"], lora_bias=True, bias="lora_only"),
    "DoRA": lambda: lora(use_dora=True),
    "orthogonal": lambda: lora(init_lora_weights="orthogonal"),
    "gaussian": lambda: lora(init_lora_weights="gaussian"),
    "MiCA": lambda: lora(init_lora_weights="mica"),
    "MiSS, bat": lambda: peft.MissConfig(target_modules=["q_proj", "v_proj"], r=4, init_weights="bat"),
}
