"""``hf-kbit run``: other programs on quantized models, lm-eval's harness above all, with a task of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from command import hf_kbit_command, refuse, succeed
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_kbit
from hf_kbit import cli

pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"{n} plus {n} is", "choices": [str(2 * n), str(2 * n + 1), "no"]} for n in range(12)]
# YAML reads JSON too. The first choice is the right one.
TASK = {
    "task": "sums",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "rows.jsonl"}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``packed``, a model in 3 bits with its tokenizer, and a task."""
    folder = tmp_path_factory.mktemp("lm_eval")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, initializer_range=0.2, **shape))
    model.save_pretrained(folder / "dense")
    config = hf_kbit.KbitConfig(bits=3)
    packed = AutoModelForCausalLM.from_pretrained(folder / "dense", quantization_config=config)
    packed.save_pretrained(folder / "packed")
    byte_tokenizer().save_pretrained(folder / "packed")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "tasks").mkdir()
    (folder / "tasks" / "sums.yaml").write_text(json.dumps(TASK))
    return folder


@torch.no_grad()
def is_right(model, row) -> bool:
    """Whether the first choice is the likeliest after the question and a space."""
    found = []
    for choice in row["choices"]:
        question, answer = row["question"].encode(), f" {choice}".encode()
        ids = torch.tensor([list(question + answer)])
        logs = model(ids).logits[0, len(question) - 1 : -1].float().log_softmax(-1)
        found.append(logs.gather(-1, ids[0, len(question) :, None]).sum())
    return max(found) == found[0]


@pytest.mark.slow
def test_lm_eval(folder, monkeypatch):
    """As docs/evaluation.md has it, on a saved model."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [])  # put back afterwards
    arguments = "--model hf --model_args pretrained=packed --device cpu --include_path tasks --tasks sums"
    assert hf_kbit_command("run", "lm-eval", *arguments.split(), "--output_path", "results").code is None
    (file,) = (folder / "results").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["sums"]
    model = AutoModelForCausalLM.from_pretrained(folder / "packed")
    right = sum(is_right(model, row) for row in ROWS)
    assert 0 < right < len(ROWS) and found["acc,none"] == right / len(ROWS)


def test_a_program_and_its_arguments(monkeypatch):
    """Options too, also those that are our own; the program's result is the command's."""
    seen = []
    main = SimpleNamespace(load=lambda: lambda: seen.append(sys.argv) or 7)
    monkeypatch.setattr(cli.run, "entry_points", lambda group, name: [main] if name == "program" else [])
    monkeypatch.setattr(sys, "argv", [])
    given = ["program", "--help", "-x", "3", "file", "--version"]
    assert hf_kbit_command("run", *given).code == 7 and seen == [given]


def test_processes_of_a_program_know_quantized_models(monkeypatch, tmp_path):
    """Also where the environment has a sitecustomize of its own, which counts as before; not Python -I, nor others."""
    (tmp_path / "sitecustomize.py").write_text("print('its own', end=' ')")
    printed = []

    def program():
        code = "import sys; print('hf_kbit' in sys.modules, getattr(sys.modules.get('sitecustomize'), '__file__', ''))"
        printed.append(subprocess.check_output([sys.executable, "-c", code], text=True, cwd=tmp_path))

    monkeypatch.delenv("PYTHONPATH", raising=False)
    program()
    of_python = printed.pop().split()[1:] or [f"{cli.run.CHILDREN}/sitecustomize.py"]  # Debian's own has one

    main = SimpleNamespace(load=lambda: program)
    monkeypatch.setattr(cli.run, "entry_points", lambda group, name: [main])
    monkeypatch.setattr(sys, "argv", [])
    for path in ("", str(tmp_path)):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), path])))
        hf_kbit_command("run", "program")
    assert printed[0].split() == ["True", *of_python]
    assert printed[1] == f"its own True {tmp_path}/sitecustomize.py\n"


@pytest.mark.slow
def test_accelerate_launch(folder, monkeypatch, tmp_path):
    """A script that does not import hf_kbit, in a process that accelerate starts."""
    script = tmp_path / "script.py"
    load = f"AutoModelForCausalLM.from_pretrained({str(folder / 'packed')!r})"
    script.write_text(
        f"from transformers import AutoModelForCausalLM\nprint(type({load}.model.layers[0].mlp.up_proj))"
    )
    command = [sys.executable, "-m", "hf_kbit.cli", "run", "accelerate", "launch", "--cpu", "--num_processes", "1"]
    run = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert "hf_kbit.nn.linear.KbitLinear" in run.stdout, run.stderr


def test_a_program_that_is_not_there():
    assert "found no program 'no-such-program'" in refuse("run", "no-such-program")
    assert "usage: hf-kbit run [-h] program" in succeed("run", "--help").stdout
