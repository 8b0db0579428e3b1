"""State dicts of quantized models, and the libraries that save them: what one has saved, another load gives back."""

import copy
import os
from dataclasses import replace
from pathlib import Path

import accelerate
import huggingface_hub
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hf_kbit
from hf_kbit.nn.weight import packed_layers
from hf_kbit.weight import tensor
from hf_kbit.weight.tensor import KbitTensor

IDS = torch.arange(12).view(2, 6)


def quantized(seed: int, tie: bool = True) -> LlamaForCausalLM:
    """A model with packed layers whose exponents are their own, a table, and a head that is tied to it."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_hidden_layers": 2}
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=96, tie_word_embeddings=tie, pad_token_id=0, **shape)).eval()
    with torch.no_grad():
        for number, parameter in enumerate(dense.parameters()):
            if parameter.dim() == 2:
                parameter *= 4.0 ** (number % 3)
    hf_kbit.quantize_model(dense, bits=3 if seed else 4, embedding_bits=4)
    return dense


def other(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Of the same widths, with other words and exponents, which are to be replaced."""
    made = copy.deepcopy(model)
    for layer in packed_layers(made).values():
        decoding = replace(layer.decoding, exponent=layer.exponent + 1)
        layer.weight.data = KbitTensor.empty(layer.weight.shape, decoding, layer.dense_dtype)
    return made


def by_file(model, folder):
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        state = {name: tensor for name, tensor in state.items() if not name.startswith("lm_head.")}
    save_file(state, folder / "model.safetensors")
    (made := other(model)).load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return made


def by_model(model, folder):
    save_model(model, str(folder / "model.safetensors"))
    load_model(made := other(model), folder / "model.safetensors")
    return made


def by_state_of_accelerate(model, folder, **how):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(folder, **how)
    accelerator.free_memory()
    accelerator.prepare(made := other(model))
    accelerator.load_state(folder)
    accelerator.free_memory()
    return made


def by_model_of_accelerate(model, folder):
    Accelerator(cpu=True).save_model(model, folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    accelerate.load_checkpoint_in_model(made := other(model), folder, strict=not model.config.tie_word_embeddings)
    return made


def by_from_pretrained(model, folder):
    """What another library has saved, beside the model's own config."""
    huggingface_hub.save_torch_model(model, folder, max_shard_size="30KB")
    model.config.save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder)


def by_torch(model, folder):
    torch.save(model.state_dict(), folder / "model.pt")
    (made := other(model)).load_state_dict(torch.load(folder / "model.pt", weights_only=True, mmap=True))
    return made


def by_assigning(model, folder):
    torch.save(model.state_dict(), folder / "model.pt")
    made = other(model).to("meta")
    made.load_state_dict(torch.load(folder / "model.pt", weights_only=True), assign=True)
    made.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    made.tie_weights()
    return made


def by_dcp(model, folder):
    dcp.save(model.state_dict(), checkpoint_id=folder)
    state = (made := other(model)).state_dict()
    dcp.load(state, checkpoint_id=folder)
    made.load_state_dict(state)
    return made


def by_dcp_of_modules(model, folder):
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    state = {"model": get_model_state_dict(made := other(model))}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(made, state["model"])
    return made


WAYS = {
    "save_file": by_file,
    "save_model": by_model,
    "Accelerator.save_state": by_state_of_accelerate,
    "Accelerator.save_state, torch": lambda m, f: by_state_of_accelerate(m, f, safe_serialization=False),
    "Accelerator.save_model": by_model_of_accelerate,
    "huggingface_hub": by_from_pretrained,
    "torch.save": by_torch,
    "assign": by_assigning,
    "DCP": by_dcp,
    "DCP, of modules": by_dcp_of_modules,
}


@pytest.mark.filterwarnings("ignore:.*process group:UserWarning")
@pytest.mark.parametrize("where", ["", "inference mode", "tiles"])
@pytest.mark.parametrize("tie", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("way", WAYS)
def test_saved_by_another_library(way, tie, where, tmp_path, monkeypatch):
    if where == "tiles":  # as on a GPU
        monkeypatch.setattr(tensor, "reads_tiles", lambda device: device.type == "cpu")
    model = quantized(0, tie)
    with torch.inference_mode(where == "inference mode"):
        made = WAYS[way](model, tmp_path)
        assert torch.equal(made(IDS).logits, model(IDS).logits)
    for name, layer in packed_layers(model).items():
        found = made.get_submodule(name)
        assert found.decoding == layer.decoding, name
        assert all(map(torch.equal, found.packed.values(), layer.packed.values())), name
    assert (made.lm_head.weight is made.model.embed_tokens.weight) == tie
    size = sum(os.path.getsize(file) for file in tmp_path.rglob("*") if file.is_file())
    if not way.startswith("DCP") and not tie:
        assert size < model.get_memory_footprint() + 60_000, "packed, and what files say of themselves"


def test_a_state_dict_has_what_it_is_of():
    """Plain tensors; the parameters themselves with ``keep_vars``."""
    model = quantized(0, tie=False)
    state, values = model.state_dict(), model.state_dict(keep_vars=True)
    assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
    layer = model.model.layers[0].mlp.up_proj
    own = {name for name in state if name.startswith("model.layers.0.mlp.up_proj.")}
    assert own == {f"model.layers.0.mlp.up_proj.{name}" for name in (*layer.packed, "weight_decoding")}
    assert values["model.layers.0.mlp.up_proj.weight"] is layer.weight
    assert list(values) == [name for name, _ in model.named_parameters()]
    assert torch.equal(layer.weight_decoding, state["model.layers.0.mlp.up_proj.weight_decoding"])


def as_floats(change):
    return lambda bits: change(bits.view(torch.float64)).contiguous().view(torch.int64)


DECODINGS = [
    (lambda t: t.float(), "found dtype torch.float32"),
    (lambda t: t[1:], r"found .*shape \[17\], expected .*shape \[18\]"),
    (as_floats(lambda t: t.flip(0)), "found"),
    (as_floats(lambda t: t + 0.5), "found"),
    (as_floats(lambda t: t * torch.nan), "found"),
]


@pytest.mark.parametrize("damage, message", DECODINGS)
def test_a_damaged_decoding_is_refused(damage, message):
    made = nn.Sequential(hf_kbit.KbitLinear.from_linear(nn.Linear(64, 32)))
    state, before = made.state_dict(), made[0].dequantize()
    with pytest.raises(RuntimeError, match=rf"0\.weight_decoding.*: {message}"):
        made.load_state_dict(state | {"0.weight_decoding": damage(state["0.weight_decoding"])})
    assert torch.equal(made[0].dequantize(), before)


def test_a_decoding_that_is_not_the_configs_is_refused(tmp_path):
    model = quantized(0, tie=False)
    state = model.state_dict()
    state["model.layers.0.mlp.up_proj.weight_decoding"].view(torch.float64)[-2] += 1
    save_file(state, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.mlp\.up_proj\.weight_decoding: found .*, expected"):
        AutoModelForCausalLM.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path))


@pytest.mark.parametrize("folder", ["disk", None])
def test_offloaded_again_and_again(folder, tmp_path):
    model = quantized(0)
    expected = model(IDS).logits
    for place in (tmp_path / "first", tmp_path / "second"):
        if folder is None:
            accelerate.cpu_offload(model, execution_device="cpu")
        else:
            accelerate.disk_offload(model, Path(place), execution_device="cpu")
        with torch.inference_mode():
            assert torch.equal(model(IDS).logits, expected)
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        assert torch.equal(model(IDS).logits, expected)


def test_accelerate_counts_what_is_packed():
    model = quantized(0).bfloat16()
    sizes = accelerate.utils.compute_module_sizes(model)
    assert sizes[""] == pytest.approx(model.get_memory_footprint(), rel=0.01)
    layer = model.model.layers[0].mlp.up_proj
    assert sizes["model.layers.0.mlp.up_proj"] == layer.weight.nbytes_packed
    room = {"cpu": int(sizes[""] * 1.3)}
    assert set(accelerate.infer_auto_device_map(model, max_memory=room).values()) == {"cpu"}
