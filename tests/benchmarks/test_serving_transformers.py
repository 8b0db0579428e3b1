"""The benchmark of ``transformers serve`` runs on a CPU, where its packages are, and makes a table of its lines."""

import os

import pytest
import server as servers
import torch
from transformers.utils.import_utils import is_serve_available


@pytest.mark.parametrize(("answers", "p95"), [(1, 1), (2, 2), (3, 3), (20, 19), (40, 38), (41, 39)])
def test_what_95_percent_of_answers_do_not_exceed(benched, monkeypatch, answers, p95):
    """Of few answers that is the longest, and of none less than the median."""
    module = benched("serving_transformers")
    monkeypatch.setattr(module, "ask", lambda port, folder, choose, vocab_size: (taken.pop() / 1e3, 4))
    taken = list(range(1, answers + 1))
    found = module.measure(0, None, answers, 0, 8)
    assert found["answers"] == answers and found["first_p95_ms"] == pytest.approx(p95)


@pytest.mark.slow
@pytest.mark.skipif(not is_serve_available(), reason="needs transformers[serving]")
def test_serving_transformers(benched, monkeypatch, capsys):
    module = benched("serving_transformers")
    monkeypatch.setattr("load.gpu_and_command", dict)
    monkeypatch.setattr(module, "PROMPT", 8)
    monkeypatch.setattr(module, "NEW_TOKENS", 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    paths = os.pathsep.join(filter(None, [str(servers.ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", paths)
    options = ["--shape", "tiny", "--model-layers", "1", "--clients", "1,3", "--seconds", "0.5", "--table"]
    lines = module.run_main(*options, "--device", "cpu", "--option=--cb-num-blocks=16")
    assert [(line["mode"], line["bits"], line["clients"]) for line in lines] == [
        (mode, bits, clients) for mode in module.WAYS for bits in (16, 4) for clients in (1, 3)
    ]
    assert all(line["tokens_per_s"] > 0 and 0 < line["first_ms"] <= line["first_p95_ms"] for line in lines)
    head, _, *rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert head.count("|") == 6 and len(rows) == 4 and all("|  |" not in row for row in rows)
