"""Two processes on this machine, for tests of models that are spread over several; and the models."""

import importlib.util
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from adapters import lora, relative, train
from packaging.version import Version
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import multiprocessing
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

from hf_kbit import KbitConfig
from hf_kbit.nn.weight import KbitWeight, local
from hf_kbit.weight import scalar
from hf_kbit.weight.tensor import KbitTensor

SIZE = 2
OLD = Version(transformers.__version__) < Version("5.21")  # Transformers, with other settings for experts
IDS = torch.arange(2 * 9).reshape(2, 9) + 5
# Sizes are whole blocks of 32 in each of two processes.
SETTINGS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXTURE = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS = {
    "llama": ("llama", {"attention_bias": True}),
    "qwen3_moe": ("qwen3_moe", MIXTURE),
    "half": ("qwen3_moe", MIXTURE),
    "tied": ("llama", {"tie_word_embeddings": True}),
    # A class of table with a look-up of its own.
    "scaled": ("gemma3_text", {"head_dim": 16, "sliding_window": 4, "tie_word_embeddings": True}),
    # Turned around, with biases and a gate of its own.
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 4, "head_dim": 16, "sliding_window": 4, "rope_parameters": {"rope_type": "default"}},
    ),
    # Turned around, and every expert gets all tokens.
    "llama4": (
        "llama4_text",
        {"intermediate_size": 64, "intermediate_size_mlp": 128, "num_local_experts": 4, "head_dim": 16},
    ),
}
# Beside 3 bits.
CONFIGS = {
    "half": {"modules_to_not_convert": ["gate_up_proj"], "embedding_bits": 5},
    "tied": {"embedding_bits": 5},
    "scaled": {"embedding_bits": 5},
}


# --- processes ------------------------------------------------------------------------------------


def run(function: Callable, folder: Path, device: str = "cpu") -> list:
    """What ``function(rank, folder)`` returns in each process of a group, of gloo or, with a GPU for each, of NCCL; an
    error of one is raised here.

    The function is looked up by its name in its file, for pytest has test files in no module that others could import.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["ranks"])  # imported once for all
    place = function.__code__.co_filename, function.__name__, folder, device
    multiprocessing.start_processes(_in_group, place, SIZE, start_method="forkserver")
    return [torch.load(folder / f"found{rank}.pt", map_location="cpu") for rank in range(SIZE)]


def _in_group(rank: int, file: str, name: str, folder: Path, device: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(SIZE), "LOCAL_WORLD_SIZE": str(SIZE)}
    torch.set_num_threads(1)
    backend, patience = "gloo", timedelta(seconds=60)
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend, patience = "nccl", timedelta(seconds=300)  # compiling takes longer in one process than in another
    dist.init_process_group(backend, f"file://{folder}/group", timeout=patience, world_size=SIZE, rank=rank)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    torch.save(getattr(module, name)(rank, folder), folder / f"found{rank}.pt")
    dist.destroy_process_group()


def complaint(function: Callable, *args, **kwargs) -> str:
    """What the ValueError says that a call raises."""
    try:
        function(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return "none"


def complaint_before_reading(function: Callable, *args, **kwargs) -> str:
    """``complaint``, of a call that reads no weight before."""
    with patch.object(PreTrainedModel, "_load_pretrained_model", side_effect=AssertionError):
        return complaint(function, *args, **kwargs)


# --- models ---------------------------------------------------------------------------------------


def save_quantized(model: str, folder: Path, name: str = "", **settings) -> None:
    """A model of random weights in 3 bits into ``folder / name``, its 16-bit one into ``folder / name / dense``."""
    name, (kind, own) = name or model, MODELS[model]
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SETTINGS | own | settings)))
    with torch.no_grad():
        for parameter in dense.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    dense.save_pretrained(folder / name / "dense")
    load(folder / name / "dense", quantization_config=config(model)).save_pretrained(folder / name)


def config(model: str, **settings) -> KbitConfig:
    """How ``save_quantized`` quantizes a model, but for what is given."""
    return KbitConfig(**({"bits": 3} | CONFIGS.get(model, {}) | settings))


def load(path: Path, **kwargs) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs)


def expert_parallel() -> DistributedConfig:
    if OLD:
        return DistributedConfig(tp_size=SIZE, enable_expert_parallel=True)
    return DistributedConfig(tp_size=SIZE, ep_size=SIZE)


def where_tiles_are_read(wanted: bool = True):
    """Inside, kernels of CPUs read tiles, as those of GPUs do."""
    return patch.object(scalar, "reads_tiles", lambda device: wanted and device.type == "cpu")


def as_on_a_gpu(model: torch.nn.Module) -> torch.nn.Module:
    """The model after an arrival where kernels read tiles."""
    with where_tiles_are_read():
        for layer in quantized_layers(model):
            local(layer.weight).replace(local(layer.weight).settled())
    return model


def quantized_layers(model: torch.nn.Module) -> list[KbitWeight]:
    return [layer for layer in model.modules() if isinstance(layer, KbitWeight)]


def all_tiled(model: torch.nn.Module) -> bool:
    """Whether all layers hold tiles but tables that are tied to no head, which never do."""
    layers = quantized_layers(model)
    return all(local(layer.weight).is_tiled for layer in layers if layer.tied or layer.reads_tiles)


def sizes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """For each quantized layer, how often its words, scales and column scales have what this process has of them."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, KbitWeight):
            whole = KbitTensor.empty(layer.weight.shape, layer.decoding, layer.dense_dtype, "meta").file_tensors()
            own = local(layer.weight).file_tensors()
            found[name] = tuple(whole[part].numel() // tensor.numel() for part, tensor in own.items())
    return found


def kept_besides(model: torch.nn.Module) -> set[int]:
    """Bytes of memory that packed tensors keep besides what this process has of them, as views of whole ones do."""
    parts = [tensor for layer in quantized_layers(model) for tensor in local(layer.weight).file_tensors().values()]
    return {part.untyped_storage().nbytes() - part.nbytes for part in parts}


def logits(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return {"logits": model(IDS.to(model.device)).logits}


def outcome(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Logits, and the gradient of what goes into the first layer."""
    found = logits(model)  # FSDP2 wants to see the whole model run before a part of it
    embeddings = model.get_input_embeddings()(IDS.to(model.device)).detach().requires_grad_()
    model(inputs_embeds=embeddings).logits.square().sum().backward()
    return found | {"gradient": embeddings.grad}


def assert_saved_as(found: Path, expected: Path) -> None:
    """That a folder has the very bytes of another."""
    for file in ("model.safetensors", "config.json"):
        assert (found / file).read_bytes() == (expected / file).read_bytes(), file


# --- training on parts of a batch -----------------------------------------------------------------

BATCH = torch.randint(5, 90, (2 * SIZE, 9), generator=torch.Generator().manual_seed(1))
STEPS = 3


def part_of_batch(rank: int) -> torch.Tensor:
    return BATCH.chunk(SIZE)[rank]


def adapt(model: PreTrainedModel) -> PeftModel:
    """Adapters on linear layers and on experts, no factor of them zero."""
    torch.manual_seed(3)
    targets = {"target_modules": ["q_proj", "v_proj", "o_proj"], "target_parameters": ["gate_up_proj", "down_proj"]}
    return get_peft_model(model, lora(**targets, init_lora_weights=False)).train()


def trained(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The losses of some steps, by SGD: AdamW would not tell a sum of gradients from their mean."""
    return torch.tensor(train(model, ids, STEPS, 0.1, torch.optim.SGD))


def saved_adapters(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def assert_close_adapters(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Up to the order of sums."""
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert relative(found[name], wanted) < 1e-5, name
