"""examples/embeddings.py: more bits, more alike; and what is loaded again gives the very same embeddings."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_kbit

SCRIPT = Path(__file__).parents[2] / "examples" / "embeddings.py"


@pytest.mark.slow
def test_embeddings():
    path = os.pathsep.join([str(Path(hf_kbit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(?:(\d) bits|unquantized) .* ([01]\.\d{4}) +\S+$", done.stdout, flags=re.MULTILINE)
    assert [bits for bits, _ in rows] == ["", "5", "4", "3", "2"]
    cosines = [float(cosine) for _, cosine in rows]
    assert cosines == sorted(cosines, reverse=True) and cosines[0] == 1
    assert done.stdout.endswith("(identical)\n")
