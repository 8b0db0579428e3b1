"""vLLM as ``vllm serve`` runs it: in processes of its own, on several, and compiled."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import serving

SCRIPT = Path(serving.__file__)
ON_TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
BIND = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # or vLLM wants a NUMA node for each process


def run(folder: Path, environment=None, **options):
    """What ``serving.generate`` gives in a new process."""
    everything = os.environ | serving.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | (environment or {})
    command = [sys.executable, SCRIPT, folder, json.dumps(options)]
    done = subprocess.run(command, env=everything, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed widths", "qwen3_moe"])
def test_compiled(name, tmp_path):
    """Saved again in the same folder with other widths, of which vLLM's cache of what it compiled knows nothing."""
    folder = serving.make(name, tmp_path)
    environment = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    serving.assert_same(run(folder, environment, enforce_eager=False), serving.load(folder))
    serving.make("llama" if name == "mixed widths" else "experts in 16 bits", tmp_path)
    serving.assert_same(run(folder, environment, enforce_eager=False), serving.load(folder))


TENSOR_PARALLEL = "mixed widths", "tied", "positions", "one on disk", "packed head", "mixtral", "gpt_oss"


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        pytest.param("qwen3_moe", {}, {}, id="one process, which finds the plugin by its entry point"),
        *(pytest.param(name, {}, ON_TWO, marks=pytest.mark.slow) for name in TENSOR_PARALLEL),
        pytest.param("mixed widths", {"num_key_value_heads": 1}, ON_TWO, id="shared keys", marks=pytest.mark.slow),
        *(
            pytest.param(name, {}, {**ON_TWO, "enable_expert_parallel": True}, marks=pytest.mark.slow)
            for name in ("qwen3_moe", "gpt_oss")
        ),
        pytest.param("mixed widths", {}, {"model_impl": "transformers"}, marks=pytest.mark.slow),
    ],
)
def test_as_transformers(name, changes, options, tmp_path):
    folder = serving.make(name, tmp_path, **changes)
    environment = BIND if "tensor_parallel_size" in options else {}
    serving.assert_same(run(folder, environment, **options), serving.load(folder))
