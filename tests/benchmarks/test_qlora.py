"""benchmarks/qlora.py: the step it times trains, on every way alike, and its plot is drawn from its lines."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from adapters import IDS, decoded, quantized

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def qlora(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("qlora_benchmark", BENCHMARKS / "qlora.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def losses(qlora, make, prepared: bool, device: str) -> list[float]:
    """Of steps of a model whose 14 layers all have adapters, and whose blocks are checkpointed."""
    torch.manual_seed(0)
    model = qlora.adapted(make(device, dtype=torch.bfloat16), prepared)
    assert model.is_gradient_checkpointing and model.training
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 14
    assert model.lm_head.weight.dtype == (torch.float32 if prepared else torch.bfloat16)
    optimizer = qlora.optimizer_of(model)
    return [qlora.step(model, optimizer, IDS.to(device)) for _ in range(20)]


@pytest.mark.parametrize(("make", "prepared"), [(decoded, False), (quantized, False), (quantized, True)])
def test_a_step_trains(make, prepared, device, qlora):
    """Losses fall, and are those of the decoded model in bfloat16 but for rounding."""
    found = losses(qlora, make, prepared, device)
    assert found[-1] < found[0] - 0.1
    assert found == pytest.approx(losses(qlora, decoded, False, device), abs=0.02)


def test_plot(qlora, tmp_path):
    pytest.importorskip("matplotlib")
    ways = [("bf16", 16, "no"), ("bitsandbytes", 4, "yes"), ("hf_kbit", 3, "no"), ("hf_kbit", 3, "yes")]
    context = {"shape": "llama-3-8b", "layers": 2, "sequences": 4, "tokens": 8, "gpu": "G", "date": "2026-11-21"}
    lines = [
        context | {"name": name, "bits": bits, "prepared": prepared, "ms": 1.0, "peak_GB": 2.0}
        for name, bits, prepared in ways
    ]
    qlora.plot(json.loads(json.dumps(lines)), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
