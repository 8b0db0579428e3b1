"""examples/mixture.py: learns, and its adapter gives in 16 bits what it gave over packed experts."""

import re
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "mixture.py"


def test_losses(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--steps", "20"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out
    ((before, after, loaded, merged),) = re.findall(
        r"loss: (\S+) before training, (\S+) after it\n.* 16 bits: (\S+)\n.* 16 bits: (\S+)\n", printed
    )
    assert float(after) < float(before) - 1.2
    assert all(abs(float(loss) - float(after)) < 2e-4 for loss in (loaded, merged))  # printed with 4 digits
    (trained,) = re.findall(r"trainable params: (\S+) ", printed)
    experts = 2 * 8 * 4 * (64 + 192 + 96 + 64)
    attention = 2 * 4 * (64 + 64 + 2 * (64 + 32) + 64 + 64)
    assert int(trained.replace(",", "")) == experts + attention
