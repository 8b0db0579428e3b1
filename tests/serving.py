"""Tiny quantized models for vLLM, what it makes of them, and what Transformers does.

    python tests/serving.py FOLDER '{"tensor_parallel_size": 2}'

prints as JSON what vLLM generates, in processes of its own; the tests call ``generate`` in theirs.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

# Before vLLM is imported: no telemetry, little memory.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    # FlashInfer would compile its sampler first, and needs nvcc; multicast memory is not there on every machine; a
    # process that was forked cannot use a GPU that was asked for before.
    ENVIRONMENT |= {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
IN_THIS_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
PROMPTS = [[5, 17, 99, 3], [200, 4, 8, 15, 16, 23, 42], [77]]
# vLLM for CPUs runs on these alone, and vLLM for GPUs on those: a test of both has one dtype for each.
ON_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU")
DTYPES = [pytest.param("float32", marks=ON_CPU), pytest.param("bfloat16", marks=pytest.mark.gpu)]
TOKENS = 24
# How far log-probabilities may be from Transformers' own. Measured in bfloat16: up to .07, with adapters .20.
TOLERANCES = {"float32": 2e-4, "bfloat16": 0.3, "float16": 0.02}
MOST = 0.9
# Sizes that vLLM's attention takes on a CPU, and that two processes can divide in blocks; 250 is no multiple of 64.
SIZES = {
    "vocab_size": 250,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MIXED_WIDTHS = {"k_proj": 3, "v_proj": 5, "up_proj": 2, "layers.0.self_attn.o_proj": None}
# {name: (model type, settings of its configuration, settings of KbitConfig)}
MODELS = {
    "llama": ("llama", {}, {"bits": 4}),
    "tied": ("llama", {"tie_word_embeddings": True}, {"bits": 3, "embedding_bits": 5}),
    "mixed widths": ("llama", {}, {"bits": 4, "embedding_bits": 5, "module_bits": MIXED_WIDTHS}),
    "some in 16 bits": ("llama", {}, {"bits": 4, "module_bits": {"k_proj": None, "gate_proj": None}}),
    "own levels": ("llama", {}, {"bits": 3, "transform": "none"}),
    "packed head": ("llama", {}, {"bits": 4, "embedding_bits": 4, "module_bits": {"lm_head": 5}}),
    "odd widths": ("llama", {"intermediate_size": 72}, {"bits": 2}),
    "biases": ("qwen2", {"tie_word_embeddings": True}, {"bits": 2, "embedding_bits": 3, "transform": "none"}),
    "one on disk": ("phi3", {}, {"bits": 4}),
    "gemma": ("gemma2", {"head_dim": 32, "initializer_range": 0.05}, {"bits": 4}),
    "scaled table": ("gemma2", {"head_dim": 32, "initializer_range": 0.05}, {"bits": 4, "embedding_bits": 4}),
    "positions": ("opt", {"ffn_dim": 128}, {"bits": 4, "embedding_bits": 5}),
    "qwen3_moe": ("qwen3_moe", {"head_dim": 32, **MIXTURE}, {"bits": 4, "module_bits": {"gate_up_proj": 3}}),
    "shared expert": ("qwen2_moe", {"shared_expert_intermediate_size": 96, **MIXTURE}, {"bits": 5}),
    "mixtral": ("mixtral", {"num_local_experts": 4}, {"bits": 4}),
    "granitemoe": ("granitemoe", {"num_local_experts": 4}, {"bits": 4, "transform": "none"}),
    "gpt_oss": ("gpt_oss", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2}, {"bits": 4}),
    "experts in 16 bits": (
        "qwen3_moe",
        {"head_dim": 32, **MIXTURE},
        {"bits": 4, "modules_to_not_convert": ["experts"]},
    ),
}


def make(name: str, folder: Path, **changes) -> Path:
    """Saves a quantized model of the table, some of whose weights need an exponent, and returns its folder."""
    from cases import give_own_levels
    from transformers import AutoConfig, AutoModelForCausalLM

    from hf_kbit import KbitConfig

    model_type, settings, quantized = MODELS[name]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(SIZES | settings | changes)))
    with torch.no_grad():
        for own, parameter in model.float().named_parameters():
            if own.endswith("bias"):
                parameter.normal_(0, 0.2)
            if own.endswith("v_proj.weight"):
                parameter *= 2.0**-9
                if name == "some in 16 bits":  # and some not transformed, for which this row is too small
                    parameter[0] *= 2.0**-12
    model.save_pretrained(folder / "dense")
    config = KbitConfig(**quantized)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=config, dtype=torch.float32)
    if name == "own levels":
        give_own_levels(model)
    model.save_pretrained(folder / "quantized")
    return folder / "quantized"


def save_exl3(model_type: str, folder: Path, **changes) -> None:
    """Saves a model of random trellises, as exllamav3 would."""
    from exl3 import save_random
    from transformers import AutoConfig

    save_random(AutoConfig.for_model(model_type, **(SIZES | {"vocab_size": 384, "head_dim": 128} | changes)), folder)


def load(folder: Path, dtype: str = "float32"):
    """The same model in Transformers, the reference."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype)
    # Transformers leaves routers under another name than the file's in the file's dtype, float32.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map=DEVICE).to(dtype)


def assert_same(found, model, prompts=PROMPTS) -> None:
    """That ``generate`` chose what a model in Transformers would choose, with its log-probabilities.

    In 16 bits a token that is as probable may be chosen, and a router sends some tokens to other experts; 8-bit inputs
    may differ by a step where 16-bit ones do in the last bit: most have to agree where the model has any of these.
    """
    routed = any(name.endswith(".experts") for name, _ in model.named_modules()) and model.dtype != torch.float32
    rounded = any(getattr(layer, "inputs", None) for layer in model.modules())
    close, worst = agreement(found, model, prompts)
    assert close >= (MOST if routed or rounded else 1), f"{close:.0%} of {len(worst)} tokens agree: {worst}"


def agreement(found, model, prompts=PROMPTS) -> tuple[float, list[float]]:
    """The share of tokens that are what a model in Transformers would choose, and how far each is from that."""
    tolerance, worst = TOLERANCES[str(model.dtype).removeprefix("torch.")], []
    for prompt, (tokens, log_probabilities) in zip(prompts, found, strict=True):
        assert len(tokens) == TOKENS
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens], device=model.device)).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1).cpu()
        own = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        far = (own - torch.tensor(log_probabilities)).abs()
        worst += torch.maximum(far, expected.amax(-1) - own).tolist()
    return sum(each <= tolerance for each in worst) / len(worst), worst


def options(**changes) -> dict:
    """Arguments of ``vllm.LLM``: of a GPU a little, for many tests may share one."""
    on_gpu = {"dtype": "bfloat16", "kv_cache_memory_bytes": 2**26, "gpu_memory_utilization": 0.02}
    return {
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        **(on_gpu if DEVICE == "cuda" else {"dtype": "float32"}),
        **changes,
    }


@contextmanager
def engine(folder: Path, **changes) -> Iterator:
    """A ``vllm.LLM``, which is gone afterwards."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    model = None
    try:
        model = LLM(str(folder), **options(**changes))
        yield model
    finally:
        del model
        cleanup_dist_env_and_memory()


def complete(model, prompts=PROMPTS, adapters=None) -> list[tuple[list[int], list[float]]]:
    """Of each prompt the most probable tokens that follow, and their log-probabilities; ``adapters`` are folders, or
    None for none, one for each prompt."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=1, detokenize=False, ignore_eos=True)
    numbers = {folder: number for number, folder in enumerate(filter(None, adapters or []), 1)}
    requests = adapters and [folder and LoRARequest(str(folder), numbers[folder], str(folder)) for folder in adapters]
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    results = [result.outputs[0] for result in model.generate(given, sampling, lora_request=requests, use_tqdm=False)]
    return [
        (
            list(result.token_ids),
            [step[token].logprob for token, step in zip(result.token_ids, result.logprobs, strict=True)],
        )
        for result in results
    ]


def generate(folder: Path, adapters=None, **changes) -> list[tuple[list[int], list[float]]]:
    """``complete`` by an ``engine`` of its own."""
    with engine(folder, **changes) as model:
        return complete(model, adapters=adapters)


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    print(json.dumps(generate(Path(sys.argv[1]), **json.loads(sys.argv[2]))))
