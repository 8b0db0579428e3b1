"""lm-eval's harness on quantized models: a task of one's own, without a network."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_kbit

lm_eval = pytest.importorskip("lm_eval")

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
def log_likelihoods(model, row) -> list[float]:
    """Of each choice, after the question and a space."""
    found = []
    for choice in row["choices"]:
        question, answer = row["question"].encode(), f" {choice}".encode()
        ids = torch.tensor([list(question + answer)], device=model.device)
        logs = model(ids).logits[0, len(question) - 1 : -1].float().log_softmax(-1)
        found.append(logs.gather(-1, ids[0, len(question) :, None]).sum().item())
    return found


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_task_from_python(folder, monkeypatch, device):
    from lm_eval.models.huggingface import HFLM

    monkeypatch.chdir(folder)
    model = AutoModelForCausalLM.from_pretrained("packed", device_map=device)
    harness = HFLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=4)
    results = lm_eval.simple_evaluate(harness, tasks=[TASK], bootstrap_iters=0)
    right = 0
    for sample in results["samples"]["sums"]:
        expected = log_likelihoods(model, sample["doc"])
        assert [found for found, _ in sample["filtered_resps"]] == pytest.approx(expected, abs=1e-3)
        right += max(expected) == expected[0]
    assert len(results["samples"]["sums"]) == len(ROWS) and 0 < right < len(ROWS)
    assert results["results"]["sums"]["acc,none"] == right / len(ROWS)


def test_command(folder):
    """As docs/evaluation.md has it, on a saved model; its own command alone would not know the format."""
    arguments = "--model hf --model_args pretrained=packed --device cpu --include_path tasks --tasks sums"
    path = os.pathsep.join([str(Path(hf_kbit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "hf_kbit.cli", "lm-eval", *arguments.split(), "--output_path", "results"],
        cwd=folder,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    (file,) = (folder / "results").rglob("results_*.json")
    found = json.loads(file.read_text())["results"]["sums"]
    model = AutoModelForCausalLM.from_pretrained(folder / "packed")
    right = sum(max(logs) == logs[0] for logs in (log_likelihoods(model, row) for row in ROWS))
    assert found["acc,none"] == right / len(ROWS)
