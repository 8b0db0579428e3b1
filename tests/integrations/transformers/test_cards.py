"""The model card: right for whoever finds it, and safe, whatever a model is called."""

import ast
import re

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import hf_kbit
from hf_kbit.integrations.transformers import cards

TOKENS = torch.arange(12).reshape(2, 6)
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=96, **SHAPE)).save_pretrained(folder := tmp_path_factory.mktemp("dense"))
    return folder


@pytest.fixture
def model(dense):
    config = hf_kbit.KbitConfig(bits=3, module_bits={"down_proj": 5, "q_proj": 2})
    return AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)


def code(text: str) -> str:
    """The only block of code in a card."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return block


def test_the_three_lines_of_the_card_load_the_model(model, tmp_path, fresh):
    model.save_pretrained(tmp_path)
    lines = code(hf_kbit.model_card(model, str(tmp_path)).text)
    assert len(lines.splitlines()) == 3
    lines += f"import torch; torch.save(model(torch.tensor({TOKENS.tolist()})).logits, {str(tmp_path / 'logits')!r})\n"
    fresh.run(lines)
    assert torch.equal(torch.load(tmp_path / "logits"), model(TOKENS).logits)


def test_what_a_card_says(model, dense, tmp_path, monkeypatch):
    """Class, width, size in files, tuning; and the base by its name on the Hub, with the licence of its card here."""
    (dense / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    card = hf_kbit.model_card(model, "me/small")
    assert (card.data.tags, card.data.library_name, card.data.license) == (["kbit"], "transformers", "apache-2.0")
    assert card.data.base_model is None, "a folder is no name on the Hub"
    mean = (3 * 3 + 2 + 2 * 2 * 3 + 2 * 5) / 10  # in units of 32 x 32 weights: the mean is over weights
    assert f"linear layers are quantized to 2 to 5 bits ({mean:.2f} on average) with" in card.text
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    others = sum(tensor.nbytes for name, tensor in tensors.items() if "_proj." not in name)
    weights = sum(layer.num_weights for layer in model.modules() if isinstance(layer, hf_kbit.KbitLinear))
    expected = sum(tensor.nbytes for tensor in tensors.values()), others + 2 * weights
    sizes = re.search(r"take ([\d.]+) MB, where they took ([\d.]+) in", card.text).groups()
    assert sizes == tuple(f"{size / 1e6:.3g}" for size in expected)
    model.hf_quantizer.outcome.tuned = "KL 1 to 0.5"
    assert "\nTuned after that on the model in 16 bits: KL 1 to 0.5.\n" in hf_kbit.model_card(model, "x").text

    # Without a network that would take 24 s.
    monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", lambda *_, **__: pytest.fail("asked the Hub"))
    model.name_or_path = "org/not-in-the-cache"
    assert hf_kbit.model_card(model, "x").data.license is None
    monkeypatch.setattr(cards, "try_to_load_from_cache", lambda name, file: str(dense / file))
    model.name_or_path = "org/model-1.5"
    data = hf_kbit.model_card(model, "me/small").data
    assert (data.base_model, data.base_model_relation, data.license) == ("org/model-1.5", "quantized", "apache-2.0")
    (dense / "README.md").write_text("---\nlicense: [\n---\n")
    assert hf_kbit.model_card(model, "me/small").data.license is None
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    again.name_or_path = "me/small"
    assert hf_kbit.model_card(again, "me/small").data.base_model is None, "it is not its own base"
    bert = BertModel(BertConfig(vocab_size=96, **SHAPE))
    hf_kbit.quantize_model(bert, bits=2, embedding_bits=5)
    text = hf_kbit.model_card(bert, "me/bert").text
    assert "linear layers and the embeddings are" in text and "model = BertModel.from_pretrained(" in code(text)


@pytest.mark.parametrize("name", ['x"); import os; os.abort() #', "a\\nb", "<b>bold [x](y)", "new\nline"])
def test_a_name_is_a_name_only(model, name):
    text = hf_kbit.model_card(model, name).text
    calls = [node for node in ast.walk(ast.parse(code(text))) if isinstance(node, ast.Call)]
    assert [[argument.value for argument in call.args] for call in calls] == [[name]]
    (heading,) = [line for line in text.splitlines() if line.startswith("# ")]
    assert not re.search(r"(?<!\\)[<>\[`]", heading)
    assert re.sub(r"\\(.)", r"\1", heading.removeprefix("# ")) == " ".join(name.split())


def test_figures_on_a_card(model, tmp_path):
    """Those of the last measurement; what else stands there stays."""
    file = tmp_path / "README.md"
    hf_kbit.model_card(model, "x").save(file)
    before = file.read_text()
    cards.write_figures(file, {"perplexity": "12.5"})
    file.write_text(file.read_text() + "\n## My own words\n")
    cards.write_figures(file, {"text": "a|b <i>.txt", "perplexity": "13.5"})
    text = file.read_text()
    assert text.startswith(before.rstrip()) and text.count(cards.FIGURES) == 1 and "12.5" not in text
    assert (
        text.endswith("|---|---|\n| text | a\\|b \\<i\\>.txt |\n| perplexity | 13.5 |\n") and "## My own words" in text
    )
    assert ModelCard(text).data.tags == ["kbit"]
