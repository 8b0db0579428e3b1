"""``hf-kbit chat``: what it is told, what it answers, and how fast."""

import re

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from hf_kbit import cli

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture
def chat(folder, monkeypatch, tmp_path):
    """Runs ``hf-kbit chat`` on the packed model of the folder; with or without a chat template."""

    def run(*arguments, said=None, template=TEMPLATE):
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        model = AutoModelForCausalLM.from_pretrained(folder / "packed")
        model.generation_config = GenerationConfig(do_sample=False)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        command = ["chat", str(tmp_path), "--device", "cpu", "--max-new-tokens", "6", *arguments]
        return CliRunner().invoke(cli.app, command, input=said)

    return run


@torch.inference_mode()
def answer(folder, prompt: str) -> str:
    """Six bytes, each the likeliest."""
    ids = torch.tensor([list(prompt.encode())])
    model = AutoModelForCausalLM.from_pretrained(folder)
    for _ in range(6):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return byte_tokenizer().decode(ids[0, len(prompt.encode()) :])


def test_a_prompt_is_answered(chat, tmp_path):
    result = chat("--prompt", "Hi")
    assert result.exit_code == 0, result.output
    assert result.stdout == answer(tmp_path, "<user>Hi<assistant>") + "\n"
    assert re.search(r"^\[6 tokens, \d+\.\d tokens/s\]$", result.stderr, flags=re.MULTILINE)


def test_what_was_said_before_counts(chat, tmp_path):
    """Lines until the end of the input, empty ones left out."""
    result = chat(said="Hi\n\nMore\n")
    assert result.exit_code == 0, result.output
    first = answer(tmp_path, "<user>Hi<assistant>")
    second = answer(tmp_path, f"<user>Hi<assistant>{first}<user>More<assistant>")
    assert result.stdout == f"> {first}\n> > {second}\n> "


def test_a_model_without_a_template_continues(chat, tmp_path):
    assert chat("--prompt", "One", template=None).stdout == answer(tmp_path, "One") + "\n"


def test_one_token_has_no_speed(chat):
    assert "[1 tokens]" in chat("--prompt", "Hi", "--max-new-tokens", "1").stderr
