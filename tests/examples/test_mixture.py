"""examples/mixture.py: learns, and its adapter gives in 16 bits what it gave over packed experts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import hf_kbit

SCRIPT = Path(__file__).parents[2] / "examples" / "mixture.py"


def test_losses():
    path = os.pathsep.join([str(Path(hf_kbit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, SCRIPT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ((before, after, loaded, merged),) = re.findall(
        r"loss: (\S+) before training, (\S+) after it\n.* 16 bits: (\S+)\n.* 16 bits: (\S+)\n", done.stdout
    )
    assert float(after) < float(before) - 1.2
    assert all(abs(float(loss) - float(after)) < 2e-4 for loss in (loaded, merged))  # printed with 4 digits
    (trained,) = re.findall(r"trainable params: (\S+) ", done.stdout)
    experts = 2 * 8 * 4 * (64 + 192 + 96 + 64)
    attention = 2 * 4 * (64 + 64 + 2 * (64 + 32) + 64 + 64)
    assert int(trained.replace(",", "")) == experts + attention
