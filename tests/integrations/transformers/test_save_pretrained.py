"""``save_pretrained(state_dict=...)``: tensors of the model are taken, whoever made the dict; others are refused."""

import pytest
import torch
from accelerate import Accelerator
from architectures import BY_NAME
from safetensors.torch import load_file

import hf_kbit


@pytest.fixture(scope="module", params=["llama", "mixtral"])
def model(request):
    model = BY_NAME[request.param].build(tie_word_embeddings=True)
    hf_kbit.quantize_model(model, bits=3, embedding_bits=5)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    return model


def own(model):
    return model.state_dict()


def cloned(model):
    """Of another process, or gathered: a plain dict."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def of_accelerate(model):
    return Accelerator(cpu=True).get_state_dict(model)


@pytest.mark.parametrize("make", [own, cloned, of_accelerate, lambda model: {}, lambda model: None])
def test_the_own_state_dict_is_taken(model, tmp_path, make):
    """Trainers and accelerate hand it in; processes that do not save have an empty one."""
    model.save_pretrained(tmp_path / "expected")
    model.save_pretrained(tmp_path / "found", True, make(model))
    expected, found = (tmp_path / name / "model.safetensors" for name in ("expected", "found"))
    assert found.read_bytes() == expected.read_bytes() and load_file(found)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.q_proj.weight"])
def test_other_tensors_would_be_lost(model, tmp_path, name):
    """Such as averages of those that were trained."""
    state = cloned(model)
    state[name] = model.model.layers[0].self_attn.q_proj.weight if "proj" in name else state[name] + 1
    with pytest.raises(
        ValueError, match=rf"(?s)put others into the model first.*\n  {name}: found another tensor than"
    ):
        model.save_pretrained(tmp_path / "saved", state_dict=state)
    state = {**cloned(model), "extra.weight": torch.zeros(3)}
    with pytest.raises(ValueError, match=r"extra\.weight: found it in state_dict, not in the model"):
        model.save_pretrained(tmp_path / "saved", state_dict=state)
    assert not (tmp_path / "saved").exists()
