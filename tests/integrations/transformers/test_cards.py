"""The model card: written on save and on push, right for whoever finds it, and careful with the user's own text."""

import ast
import copy
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.integrations.transformers import cards

TOKENS = torch.arange(12).reshape(2, 6)

USER_CARD = """---
license: mit
library_name: peft
tags:
- poetry
---

# My model

It writes sonnets. `bits` were saved: "quoted" & <b>all</b>.
"""


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    directory = tmp_path_factory.mktemp("dense")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def model(dense):
    return quantized(dense, 3)


def quantized(dense, bits):
    return AutoModelForCausalLM.from_pretrained(dense, quantization_config=KbitConfig(bits=bits))


def code(directory) -> str:
    """The only block of code in the card."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (directory / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return block


def test_widths_of_a_mixed_model(dense, tmp_path):
    """The mean is over weights, not over layers."""
    config = KbitConfig(bits=3, module_bits={"down_proj": 5, "q_proj": 2})
    AutoModelForCausalLM.from_pretrained(dense, quantization_config=config).save_pretrained(tmp_path)
    mean = (3 * 3 + 2 + 2 * 2 * 3 + 2 * 5) / 10  # in units of 32 x 32 weights
    assert f"quantized to 2 to 5 bits ({mean:.2f} on average) with" in (tmp_path / "README.md").read_text()


def test_the_three_lines_of_the_card_load_the_model(model, tmp_path):
    directory = tmp_path / "my-model"
    model.save_pretrained(directory)
    lines = code(directory)
    assert len(lines.splitlines()) == 3 and lines.count('"my-model"') == 1
    script = lines.replace('"my-model"', repr(str(directory)))
    script += (
        f"import torch; torch.save(model(torch.tensor({TOKENS.tolist()})).logits, {str(tmp_path / 'logits')!r})\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert torch.equal(torch.load(tmp_path / "logits"), model(TOKENS).logits)


def test_the_card_names_the_class_of_a_model_that_is_no_language_model(tmp_path):
    config = BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    BertModel(config).save_pretrained(tmp_path / "dense")
    model = BertModel.from_pretrained(tmp_path / "dense", quantization_config=KbitConfig(bits=2))
    model.save_pretrained(tmp_path / "saved")
    lines = code(tmp_path / "saved")
    assert "\nfrom transformers import BertModel\n" in lines and " = BertModel.from_pretrained(" in lines


def test_a_new_card_is_tagged(model, tmp_path):
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.tags == ["kbit"] and card.data.library_name == "transformers"
    assert "quantized to 3 bits" in card.text


def test_a_card_says_of_what_and_how_large(model, dense, tmp_path, monkeypatch):
    """The base by its name on the Hub, with the licence that its card has here; sizes are those of the file."""
    (dense / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    model.save_pretrained(tmp_path / "local")
    card = ModelCard.load(tmp_path / "local" / "README.md")
    assert card.data.license == "apache-2.0" and card.data.base_model is None, "a folder is no name on the Hub"
    megabytes, dense_megabytes = re.search(r"take ([\d.]+) MB, where they took ([\d.]+) in", card.text).groups()
    tensors = load_file(tmp_path / "local" / "model.safetensors")
    weights = sum(layer.num_weights for layer in model.modules() if isinstance(layer, KbitLinear))
    stored = sum(tensor.nbytes for tensor in tensors.values())
    others = sum(tensor.nbytes for name, tensor in tensors.items() if "_proj." not in name)
    assert megabytes == f"{stored / 1e6:.3g}" and dense_megabytes == f"{(others + 2 * weights) / 1e6:.3g}"

    monkeypatch.setattr(cards, "try_to_load_from_cache", lambda name, file: str(dense / file))
    model.name_or_path = "org/model-1.5"
    model.save_pretrained(tmp_path / "hub")
    card = ModelCard.load(tmp_path / "hub" / "README.md")
    assert (card.data.base_model, card.data.base_model_relation) == ("org/model-1.5", "quantized")
    assert card.data.license == "apache-2.0"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    again.name_or_path = "me/model-3bit"
    again.save_pretrained(tmp_path / "again")
    assert ModelCard.load(tmp_path / "again" / "README.md").data.base_model is None, "it is not its own base"
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "README.md").write_text("---\nbase_model: mine\nlicense: mit\n---\n")
    model.save_pretrained(tmp_path / "own")
    card = ModelCard.load(tmp_path / "own" / "README.md")
    assert (card.data.base_model, card.data.license) == ("mine", "mit")


def test_saving_asks_the_hub_for_nothing(model, tmp_path, monkeypatch):
    """Without a network that would take 24 s; and what a folder is called is nobody's business."""

    def ask(*_, **__):
        raise AssertionError("asked the Hub")

    monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", ask)
    monkeypatch.chdir(tmp_path)
    Path("base").mkdir()
    for base in ("base", "org/not-in-the-cache"):
        model.name_or_path = base
        model.save_pretrained(tmp_path / "saved")


def test_figures_on_a_card(model, tmp_path):
    """Those of the last measurement; another model that is saved there has none."""
    model.save_pretrained(tmp_path)
    for perplexity in ("12.5", "13.5"):
        cards.write_figures(tmp_path, {"text": "a|b <i>.txt", "perplexity": perplexity})
    text = (tmp_path / "README.md").read_text()
    assert "| perplexity | 13.5 |" in text and "12.5" not in text and r"| text | a\|b \<i\>.txt |" in text
    assert text.count(cards.FIGURES) == text.count(cards.HEADING) == 1 and "from_pretrained" in code(tmp_path)
    model.save_pretrained(tmp_path)
    assert cards.FIGURES not in (tmp_path / "README.md").read_text()


def test_what_the_user_wrote_is_kept(model, tmp_path):
    (tmp_path / "README.md").write_text(USER_CARD)
    model.save_pretrained(tmp_path)
    card, before = ModelCard.load(tmp_path / "README.md"), ModelCard(USER_CARD)
    assert card.text.startswith(before.text.rstrip())
    assert card.data.to_dict() == before.data.to_dict() | {"tags": ["poetry", "kbit"]}
    assert "from_pretrained" in code(tmp_path)


def test_a_card_without_metadata_is_kept(model, tmp_path):
    (tmp_path / "README.md").write_text("My own words.\n")
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.text.startswith("My own words.\n") and card.data.tags == ["kbit"]
    assert "from_pretrained" in code(tmp_path)


@pytest.mark.parametrize("text", [None, USER_CARD], ids=["new card", "user's card"])
def test_saving_again_changes_nothing(model, tmp_path, text):
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    cards = []
    for _ in range(3):
        model.save_pretrained(tmp_path)
        cards.append((tmp_path / "README.md").read_bytes())
    assert cards[0] == cards[1] == cards[2]


def test_the_card_follows_when_another_width_is_saved_over_it(dense, tmp_path):
    (tmp_path / "README.md").write_text(USER_CARD)
    for bits in (3, 2):
        quantized(dense, bits).save_pretrained(tmp_path)
        text = (tmp_path / "README.md").read_text()
        assert re.findall(r"quantized to (\d) bits", text) == [str(bits)] and "It writes sonnets." in text


def test_only_the_main_process_writes_the_card(model, tmp_path):
    model.save_pretrained(tmp_path, is_main_process=False)
    assert not (tmp_path / "README.md").exists()


def test_a_copy_writes_its_own_tensors(model, tmp_path):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.fill_(7)
    for name, saved in (("model", model), ("twin", twin)):
        saved.save_pretrained(tmp_path / name)
        assert torch.equal(load_file(tmp_path / name / "model.safetensors")["lm_head.weight"], saved.lm_head.weight)
        assert "from_pretrained" in code(tmp_path / name)


def test_a_dequantized_model_gets_no_card(model, tmp_path):
    model.dequantize().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists() and not (tmp_path / "README.md").exists()


# --- models without a quantizer of their own ------------------------------------------------------


def test_a_part_of_a_quantized_model_is_saved_under_its_own_names(dense, tmp_path):
    config = KbitConfig(bits=3, module_bits={"down_proj": 5})
    model = AutoModelForCausalLM.from_pretrained(dense, quantization_config=config)
    model.model.save_pretrained(tmp_path)
    assert "LlamaModel.from_pretrained(" in code(tmp_path)
    reloaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(reloaded(TOKENS).last_hidden_state, model.model(TOKENS).last_hidden_state)
    assert list(reloaded.config.quantization_config.layers) == ["layers.0.mlp.down_proj"]
    assert list(model.config.quantization_config.layers) == ["model.layers.0.mlp.down_proj"], "the whole is as it was"
    assert not hasattr(model.model, "hf_quantizer")


def test_layers_made_by_hand_are_saved(dense, tmp_path):
    model = LlamaForCausalLM.from_pretrained(dense)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = KbitLinear.from_linear(mlp.up_proj, bits=2, codebook=[-1, -0.2, 0.4, 1])
    mlp.down_proj = KbitLinear.from_linear(mlp.down_proj, bits=5, codebook="int")
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reloaded(TOKENS).logits, model(TOKENS).logits)
    assert type(reloaded.model.layers[0].mlp.gate_proj) is torch.nn.Linear
    assert not hasattr(model.config, "quantization_config")


# --- names and cards of others --------------------------------------------------------------------


@pytest.mark.parametrize("name", ['x"); import os; os.abort() #', "a\\nb", "<b>bold [x](y)", "new\nline"])
def test_the_name_of_the_folder_is_a_name_only(model, tmp_path, name):
    model.save_pretrained(tmp_path / name)
    calls = [node for node in ast.walk(ast.parse(code(tmp_path / name))) if isinstance(node, ast.Call)]
    assert [[argument.value for argument in call.args] for call in calls] == [[name]]
    (heading,) = [line for line in (tmp_path / name / "README.md").read_text().splitlines() if line.startswith("# ")]
    assert not re.search(r"(?<!\\)[<>\[`]", heading)
    assert re.sub(r"\\(.)", r"\1", heading.removeprefix("# ")) == " ".join(name.split())


@pytest.mark.parametrize(
    "head", ["tags: 5", "a: " + "[" * 3000, "tags: [", "- a"], ids=["number", "deep", "cut", "list"]
)
def test_a_card_that_is_none_is_refused_before_anything_is_written(model, tmp_path, head):
    (tmp_path / "README.md").write_text(f"---\n{head}\n---\nMy own words.\n")
    with pytest.raises(ValueError, match=r"README.md: found "):
        model.save_pretrained(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


@pytest.fixture
def uploads(monkeypatch):
    """Stands in for the Hub: takes each upload as ``(repository, {file name: bytes})``."""
    uploads = []

    class Api:
        def create_repo(self, repo_id, **kwargs):
            return SimpleNamespace(repo_id=f"someone/{repo_id}")

        def create_commit(self, repo_id, operations, **kwargs):
            files = {operation.path_in_repo: Path(operation.path_or_fileobj).read_bytes() for operation in operations}
            uploads.append((repo_id, files))

    class HubCard(ModelCard):
        @staticmethod
        def load(repo_id, **kwargs):
            return ModelCard(uploads[-1][1]["README.md"].decode() if uploads else USER_CARD)

    monkeypatch.setattr(transformers.modeling_utils, "hf_api", Api)
    monkeypatch.setattr(transformers.utils.hub, "hf_api", Api)
    monkeypatch.setattr(transformers.utils.hub, "ModelCard", HubCard)
    return uploads


def push(model, tmp_path):
    model.push_to_hub("sonnets")


def save_and_push(model, tmp_path):
    model.save_pretrained(tmp_path / "local", push_to_hub=True, repo_id="sonnets")


@pytest.mark.parametrize("publish", [push, save_and_push])
def test_the_card_on_the_hub_names_the_repository(model, tmp_path, uploads, publish):
    for _ in range(2):
        publish(model, tmp_path)
    assert [repository for repository, _ in uploads] == ["someone/sonnets"] * 2
    for _, files in uploads:
        text = files["README.md"].decode()
        assert {"model.safetensors", "config.json"} <= set(files)
        assert text.count('.from_pretrained("someone/sonnets")') == text.count("from_pretrained(") == 1
        assert ModelCard(text).text.startswith(ModelCard(USER_CARD).text.rstrip())
        assert ModelCard(text).data.tags == ["poetry", "kbit"]
