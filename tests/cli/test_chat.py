"""``hf-kbit chat``: what it is told, what it answers, and how fast."""

import re

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from command import refuse, succeed
from transformers import AutoModelForCausalLM, GenerationConfig

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def speaker(made, tmp_path_factory):
    """A folder with the packed model, which takes the likeliest token, and its tokenizer."""
    folder = tmp_path_factory.mktemp("speaker")
    model = AutoModelForCausalLM.from_pretrained(made / "packed")
    model.generation_config = GenerationConfig(do_sample=False)
    model.save_pretrained(folder)
    return folder


def chat(folder, *arguments, said="", template=TEMPLATE):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    return succeed("chat", folder, "--device", "cpu", "--max-new-tokens", 6, *arguments, said=said)


@torch.inference_mode()
def answer(folder, prompt: str) -> str:
    """Six bytes, each the likeliest."""
    ids = torch.tensor([list(prompt.encode())])
    model = AutoModelForCausalLM.from_pretrained(folder)
    for _ in range(6):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    return byte_tokenizer().decode(ids[0, len(prompt.encode()) :])


def test_a_prompt_is_answered(speaker):
    """In the words of the template; without one it is continued. One token has no speed."""
    found = chat(speaker, "--prompt", "Hi")
    assert found.stdout == answer(speaker, "<user>Hi<assistant>") + "\n"
    assert re.search(r"^\[6 tokens, \d+\.\d tokens/s\]$", found.stderr, flags=re.MULTILINE)
    assert "[1 tokens]" in chat(speaker, "--prompt", "Hi", "--max-new-tokens", "1").stderr
    assert chat(speaker, "--prompt", "One", template=None).stdout == answer(speaker, "One") + "\n"


def test_8_bit_inputs(speaker, monkeypatch):
    taken = []
    monkeypatch.setattr(
        "hf_kbit.integrations.transformers.inputs.set_where_possible", lambda layers, inputs: taken.append(inputs)
    )
    for inputs in ("int8", "none"):
        chat(speaker, "--prompt", "Hi", "--inputs", inputs)
    chat(speaker, "--prompt", "Hi")
    assert taken == ["int8", None]


def test_what_was_said_before_counts(speaker):
    """Lines until the end of the input, empty ones left out."""
    found = chat(speaker, said="Hi\n\nMore\n")
    first = answer(speaker, "<user>Hi<assistant>")
    second = answer(speaker, f"<user>Hi<assistant>{first}<user>More<assistant>")
    assert found.stdout == f"> {first}\n> > {second}\n> "


def test_a_model_without_a_tokenizer_is_refused(made):
    found = refuse("chat", made / "packed", "--prompt", "Hi", "--device", "cpu")
    assert f"{made / 'packed'}: found no tokenizer, expected one" in found
