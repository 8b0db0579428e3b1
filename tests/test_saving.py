"""Modules that are nobody's, saved and loaded: the same in every byte, or refused by name and as they were."""

import resource
import shutil

import cases
import pytest
import torch
from killing import in_a_child, killed, killed_everywhere
from kinds import Attention
from safetensors import SafetensorError
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitLinear, load_into, quantize_model, save
from hf_kbit.files.saving import CONFIG

IDS = torch.arange(10).view(2, 5)


def build(seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    model = Attention().eval()
    model.qkv.weight.data *= 2.0**12  # so that it has an exponent
    return model


SETTINGS = {
    "plain": {"bits": 4},
    "widths": {"bits": 2, "module_bits": {"proj": 5}},
    "version 1": {"bits": 3, "transform": "none", "codebook": "int"},
    "levels of each": {"bits": 2},
    "table": {"bits": 4, "embedding_bits": 5},
}


@pytest.fixture
def saved(tmp_path):
    """A quantized module, and the folder it is saved in."""
    quantize_model(model := build(), **SETTINGS["widths"])
    save(model, tmp_path)
    return model, tmp_path


def alike(one: nn.Module, other: nn.Module) -> None:
    found, expected = one.state_dict(), other.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), expected[name].cpu()) for name in expected)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_saved_and_loaded(name, device, tmp_path):
    model = build()
    done = quantize_model(model, **SETTINGS[name])
    if name == "levels of each":
        cases.give_own_levels(model)
    save(model, tmp_path, max_shard_size="3KB")
    assert len(list(tmp_path.glob("kbit-*-of-*.safetensors"))) > 2
    with torch.device(device if device == "meta" else "cpu"):
        fresh = Attention().eval()
    fresh = fresh if device == "meta" else fresh.to(device)
    fresh.norm.weight.requires_grad_(False)
    load_into(fresh, tmp_path)
    assert ("embed" in done.bits) == (name == "table")
    alike(fresh, model)
    assert fresh.head.weight is fresh.embed.weight and fresh.again is fresh.proj
    assert {name: fresh.get_submodule(name).bits for name in done.bits} == dict(done.bits)
    assert fresh.qkv.bias.requires_grad and not fresh.norm.weight.requires_grad and not fresh.proj.training
    if device == "meta":  # else it has its own, of another seed
        torch.testing.assert_close(fresh.top, model.top, rtol=0, atol=0)
    fresh.mask, fresh.top = model.mask.to(fresh.mask.device), model.top.to(fresh.mask.device)
    close = {"rtol": 0, "atol": 0} if device != "cuda" else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(fresh.cpu()(IDS), model(IDS), **close)


def test_the_same_bytes_each_time(saved, tmp_path):
    """And what an earlier save has left is gone, nobody else's files are."""
    model, folder = saved
    again = tmp_path / "again"
    again.mkdir()
    (again / "kbit_notes.safetensors").write_text("mine")
    save(build_of(folder), again, max_shard_size="3KB")
    save(build_of(folder), again)
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    assert files.keys() == {CONFIG, "kbit.safetensors"}
    assert files["kbit.safetensors"][8:].startswith(b'{"__metadata__":{"format":')  # an order left to chance
    assert {file.name: file.read_bytes() for file in again.iterdir()} == files | {"kbit_notes.safetensors": b"mine"}
    load_into(fresh := Attention(), again)
    save(fresh, again)  # over the files that it is mapped from
    alike(fresh, model)


def build_of(folder) -> Attention:
    load_into(model := build(1), folder)
    model.mask, model.top = build().mask, build().top
    return model


def test_a_part_of_transformers_is_no_model_of_it(tmp_path):
    shape = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 99}
    one, other = (nn.ModuleDict({"lm": LlamaForCausalLM(LlamaConfig(**shape))}) for _ in range(2))
    quantize_model(one, bits=3)
    save(one, tmp_path)
    load_into(other, tmp_path)
    alike(other, one)
    with pytest.raises(TypeError, match=r"LlamaForCausalLM, a model of Transformers; call its save_pretrained"):
        save(one["lm"], tmp_path)
    with pytest.raises(TypeError, match=r"call its from_pretrained"):
        load_into(LlamaForCausalLM(LlamaConfig(**shape)), tmp_path)


# --- what is refused ------------------------------------------------------------------------------


def refused(model, folder, message):
    """And the module is as it was."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(part) for part in model.modules()]
    with pytest.raises(ValueError, match=message):
        load_into(model, folder)
    assert [type(part) for part in model.modules()] == kinds
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_modules_that_it_does_not_fit(saved):
    model, folder = saved
    refused(Attention(32), folder, r"qkv.weight: found I32 \[192, 4\], expected I32 \[96, 2\]")
    other = build()
    other.proj = nn.Identity()
    refused(other, folder, "proj: left over, the module has no such linear layer")
    (untied := build()).head.weight = nn.Parameter(torch.zeros(50, 64))
    refused(untied, folder, "head.weight: missing")
    refused(build().bfloat16(), folder, "qkv.bias: found float32")
    refused(model, folder, "qkv: found it quantized already")
    without = build()
    without.register_buffer("mask", None)
    refused(without, folder, "mask: left over, the module has no such tensor")


def test_what_cannot_be_saved(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"a": 1}

    quantize_model(model := build(), bits=3)
    for broken, message in [
        (build(), "found no quantized layer in Attention"),
        (KbitLinear(64, 64), "found a quantized layer alone"),
        (nn.ModuleList([model, Extra(3, 3)]), "1: found extra state in Extra"),
        (nn.ModuleList([model, nn.Linear(3, 3, device="meta")]), "1.weight: found it on the meta device"),
    ]:
        with pytest.raises((TypeError, ValueError), match=message):
            save(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# --- a save over another --------------------------------------------------------------------------


def contents(folder) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_whenever_a_save_is_killed_one_of_two_is_whole(tmp_path):
    """The model before, until the new one is; it is loaded as it is, and the next save leaves nothing else."""
    models, sizes = {"old": build(), "new": build(1)}, {"old": "30KB", "new": "9KB"}
    for name, model in models.items():
        quantize_model(model, **SETTINGS["widths"])
        save(model, tmp_path / name, max_shard_size=sizes[name])
    saves = {name: contents(tmp_path / name) for name in models}
    assert saves["old"].keys() - saves["new"].keys() and saves["new"].keys() - saves["old"].keys()

    def old(folder):
        shutil.copytree(tmp_path / "old", folder)
        (folder / "notes.txt").write_text("mine")

    def save_new(folder):
        save(models["new"], folder, max_shard_size=sizes["new"])

    def loaded(folder) -> str:
        load_into(fresh := Attention(), folder)
        name = next(name for name in models if torch.equal(fresh.qkv.weight, models[name].qkv.weight))
        alike(fresh, models[name])
        return name

    found = []
    for number, folder in enumerate(killed_everywhere(tmp_path, old, save_new)):
        found.append(loaded(folder))
        killed(number % 7 + 1, folder, lambda folder=folder: save_new(folder))  # once more, somewhere else
        assert loaded(folder) == "new" or found[-1] == "old"
        save_new(folder)
        assert contents(folder) == saves["new"] | {"notes.txt": b"mine"}
        assert not [part for part in folder.iterdir() if part.is_dir()]
    assert found == sorted(found, reverse=True) and set(found) == {"old", "new"}, "the old one, and then the new one"


def test_a_full_disk_leaves_the_save_before(saved, tmp_path):
    """With nothing of the new one beside it."""
    model, folder = saved
    before = contents(folder)
    quantize_model(other := Attention(512), bits=5)

    def save_where_files_may_not_be_large():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises((OSError, SafetensorError), match="File too large"):
            save(other, folder, max_shard_size="200KB")

    assert in_a_child(save_where_files_may_not_be_large) == 0
    assert contents(folder) == before and not [part for part in folder.iterdir() if part.is_dir()]
    load_into(fresh := Attention(), folder)
    alike(fresh, model)
