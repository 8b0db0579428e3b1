"""What ``save_pretrained`` saves: the model's own tensors, sealed, also of parts and of layers put in by hand."""

import copy

import pytest
import torch
from accelerate import Accelerator
from architectures import BY_NAME, text
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM

import hf_kbit
from hf_kbit.files import checkpoint


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


def test_files_are_sealed(model, tmp_path):
    """The same bytes each time; nothing by a process that does not save, nor beside adapters or dense weights."""
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
    files = sorted((tmp_path / "one").glob("*.safetensors"))
    assert len(files) > 1 and all(f.read_bytes() == (tmp_path / "two" / f.name).read_bytes() for f in files)
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata()[checkpoint.TENSORS] == checkpoint.tensors_digest(files)
    model.save_pretrained(tmp_path / "none", is_main_process=False)
    assert not list((tmp_path / "none").glob("*"))


def test_a_copy_writes_its_own_tensors(model, tmp_path):
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.norm.weight.fill_(7)
    for name, saved in (("model", model), ("twin", twin)):
        saved.save_pretrained(tmp_path / name)
        found = load_file(tmp_path / name / "model.safetensors")["model.norm.weight"]
        torch.testing.assert_close(found, saved.model.norm.weight, equal_nan=True, rtol=0, atol=0)


# --- models without a quantizer of their own ------------------------------------------------------


def test_a_part_of_a_quantized_model_is_saved_under_its_own_names(tmp_path):
    BY_NAME["llama"].build().save_pretrained(tmp_path / "dense")
    config = hf_kbit.KbitConfig(bits=3, module_bits={r"layers\.0\.mlp\.down_proj": 5})
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.model.save_pretrained(tmp_path)
    reloaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(reloaded(**text()).last_hidden_state, model.model(**text()).last_hidden_state)
    part, whole = (each.config.quantization_config.stored.layers for each in (reloaded, model))
    assert part["layers.0.mlp.down_proj"].bits == 5
    assert whole == {f"model.{name}": layer for name, layer in part.items()}, "as it was"
    assert not hasattr(model.model, "hf_quantizer")


def test_layers_made_by_hand_are_saved(tmp_path):
    model = BY_NAME["llama"].build()
    mlp = model.model.layers[0].mlp
    mlp.up_proj = hf_kbit.KbitLinear.from_linear(mlp.up_proj, bits=2, codebook="normal_float")
    mlp.down_proj = hf_kbit.KbitLinear.from_linear(mlp.down_proj, bits=5, codebook="int")
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(reloaded(**text()).logits, model(**text()).logits)
    assert type(reloaded.model.layers[0].mlp.gate_proj) is torch.nn.Linear
    assert not hasattr(model.config, "quantization_config")
