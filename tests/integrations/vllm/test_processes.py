"""vLLM as ``vllm serve`` runs it: in processes of its own, on several, and compiled."""

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import server as servers
import serving
import torch
from byte_tokenizer import byte_tokenizer

SCRIPT = Path(serving.__file__)
ON_TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # or vLLM wants a NUMA node for each process
N_GRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
GPU = pytest.mark.gpu
GPUS = [GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")]


def run(folder: Path, environment=None, **options):
    """What ``serving.generate`` gives in a new process."""
    everything = os.environ | serving.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {})
    command = [sys.executable, SCRIPT, folder, json.dumps(options)]
    done = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[[[")))


@pytest.mark.slow
@serving.ON_CPU
@pytest.mark.parametrize("name", ["mixed widths", "qwen3_moe"])
def test_compiled(name, tmp_path):
    """Saved again in the same folder with other widths, of which vLLM's cache of what it compiled knows nothing."""
    folder = serving.make(name, tmp_path)
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    serving.assert_same(run(folder, environment, enforce_eager=False), serving.load(folder))
    serving.make("llama" if name == "mixed widths" else "experts in 16 bits", tmp_path)
    serving.assert_same(run(folder, environment, enforce_eager=False), serving.load(folder))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in serving.MODELS),
        ("tied", {"speculative_config": N_GRAMS}),
        ("mixed widths", {"dtype": "float16"}),
        ("mixtral", {"dtype": "float16"}),
    ],
)
def test_compiled_with_graphs(name, options, tmp_path):
    """Each in a process of its own, as users start them."""
    folder = serving.make(name, tmp_path)
    found = run(folder, {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}, enforce_eager=False, **options)
    serving.assert_same(found, serving.load(folder, options.get("dtype", "bfloat16")))


@pytest.mark.gpu
def test_compiled_with_an_adapter(tmp_path):
    peft = pytest.importorskip("peft")
    folder = serving.make("mixed widths", tmp_path)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(serving.load(folder, "bfloat16"), config, autocast_adapter_dtype=False)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "adapter")
    settings = {"enable_lora": True, "max_lora_rank": 8, "enforce_eager": False}
    found = run(
        folder, {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}, adapters=3 * [str(tmp_path / "adapter")], **settings
    )
    serving.assert_same(found, model.eval())


TENSOR_PARALLEL = "mixed widths", "tied", "positions", "one on disk", "packed head", "mixtral", "gpt_oss"
IN_PARALLEL = [
    *((name, {}, ON_TWO) for name in TENSOR_PARALLEL),
    ("mixed widths", {"num_key_value_heads": 1}, ON_TWO),
    *((name, {}, {**ON_TWO, "enable_expert_parallel": True}) for name in ("qwen3_moe", "gpt_oss")),
]


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        pytest.param("qwen3_moe", {}, {}, id="one process, which finds the plugin by its entry point"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in IN_PARALLEL),
        pytest.param("tied", {}, {"speculative_config": N_GRAMS}, marks=pytest.mark.slow),
        pytest.param("mixed widths", {}, {"model_impl": "transformers"}, marks=pytest.mark.slow),
    ],
)
@serving.ON_CPU
def test_as_transformers(name, changes, options, tmp_path):
    folder = serving.make(name, tmp_path, **changes)
    environment = BIND if "tensor_parallel_size" in options else {}
    serving.assert_same(run(folder, environment, **options), serving.load(folder))


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        *(pytest.param(*case, marks=GPUS) for case in IN_PARALLEL),
        pytest.param("mixed widths", {}, {**ON_TWO, "enforce_eager": False}, marks=GPUS),
        pytest.param("qwen3_moe", {}, {**ON_TWO, "enforce_eager": False}, marks=GPUS),
        pytest.param("mixed widths", {}, {"model_impl": "transformers"}, marks=GPU),
    ],
)
def test_as_transformers_on_gpus(name, changes, options, tmp_path):
    folder = serving.make(name, tmp_path, **changes)
    found = run(folder, {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}, **options)
    serving.assert_same(found, serving.load(folder, "bfloat16"))


def of_trellises(folder: Path, name: str, changes: dict, form: str) -> Path:
    """Two processes have 192 rows each of the head, and one matrix for keys and values in common if it is alone."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2}
    serving.save_exl3(name, folder / "exl3", **(sizes | changes))
    if form == "saved":
        serving.load(folder / "exl3").save_pretrained(folder / "saved")
    return folder / form


ONE_KEY, EXPERTS = (
    {"num_key_value_heads": 1},
    {"moe_intermediate_size": 256, "num_experts": 4, "num_experts_per_tok": 2},
)
TRELLISES = [
    ("llama", ONE_KEY, "exl3", ON_TWO),
    ("llama", {}, "saved", ON_TWO),
    ("phi3", ONE_KEY, "exl3", ON_TWO),
    ("qwen3_moe", EXPERTS, "exl3", ON_TWO),
    ("qwen3_moe", EXPERTS, "saved", ON_TWO),
    ("qwen3_moe", EXPERTS, "exl3", {**ON_TWO, "enable_expert_parallel": True}),
    ("qwen3_moe", EXPERTS, "saved", {**ON_TWO, "enable_expert_parallel": True}),
    ("llama", {}, "exl3", {"enforce_eager": False}),
    ("qwen3_moe", EXPERTS, "saved", {"enforce_eager": False}),
]


@pytest.mark.slow
@serving.ON_CPU
@pytest.mark.parametrize(("name", "changes", "form", "options"), TRELLISES)
def test_trellises(name, changes, form, options, tmp_path):
    folder = of_trellises(tmp_path, name, changes, form)
    environment = BIND if "tensor_parallel_size" in options else {}
    found = run(folder, environment | {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}, **options)
    serving.assert_same(found, serving.load(folder))


@pytest.mark.parametrize(
    ("name", "changes", "form", "options"),
    [pytest.param(*case, marks=GPUS if "tensor_parallel_size" in case[-1] else GPU) for case in TRELLISES],
)
def test_trellises_on_gpus(name, changes, form, options, tmp_path):
    folder = of_trellises(tmp_path, name, changes, form)
    found = run(folder, {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}, **options)
    serving.assert_same(found, serving.load(folder, "bfloat16"))


@pytest.mark.parametrize(
    ("name", "options"), [("llama", []), ("qwen3_moe", []), ("qwen3_moe", ["--enable-expert-parallel"])]
)
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_data_parallel(name, options, tmp_path):
    folder = serving.make(name, tmp_path, vocab_size=256)
    byte_tokenizer().save_pretrained(folder)
    options = ["--enforce-eager", "--max-model-len", 128, "--data-parallel-size", 2, *servers.SMALL, *options]
    body = {
        "model": str(folder),
        "prompt": serving.PROMPTS,
        "max_tokens": serving.TOKENS,
        "temperature": 0,
        "logprobs": 1,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    environment = serving.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with servers.started(servers.vllm(folder, *options), tmp_path / "log", environment) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        choices = json.load(urllib.request.urlopen(request, timeout=120))["choices"]
    found = [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]
    serving.assert_same(found, serving.load(folder, "bfloat16"))
