"""These tests need vLLM, for which ``make test-vllm`` has an environment of its own."""

import importlib.util
import os

import serving

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(serving.ENVIRONMENT | serving.IN_THIS_PROCESS)
