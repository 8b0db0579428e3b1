"""Files are loaded as one save has left them: shards of two saves, and tensors that were relabelled, are refused."""

import json
import shutil

import pytest
import torch
from architectures import BY_NAME
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hf_kbit
from hf_kbit.integrations.transformers import sealing

NORM = "model.norm.weight"


def save(folder, change=None, **options):
    """Llama in 3 bits, of which ``change`` makes another model with the same config."""
    model = BY_NAME["llama"].build(torch.bfloat16)
    hf_kbit.quantize_model(model, bits=3)
    if change is not None:
        with torch.no_grad():
            change(model)
    model.save_pretrained(folder, **options)
    return model


def shards(folder):
    return sorted(folder.glob("*.safetensors"))


def metadata(file) -> dict[str, str]:
    with safe_open(file, "pt") as stored:
        return stored.metadata()


def load(folder):
    return BY_NAME["llama"].cls.from_pretrained(folder)


def test_every_file_has_one_digest_and_it_does_not_depend_on_files(tmp_path):
    for folder, size in (("one", "5GB"), ("several", "8KB"), ("again", "8KB")):
        save(tmp_path / folder, max_shard_size=size)
    (seal,) = {metadata(file)["kbit_tensors"] for name in ("one", "several") for file in shards(tmp_path / name)}
    assert seal == sealing.tensors_digest(shards(tmp_path / "several")) != sealing.NOT_SEALED
    for file in shards(tmp_path / "several"):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.lm_head.weight.mul_(2),
        lambda model: model.model.embed_tokens.weight[-1].zero_(),
        lambda model: model.model.layers[0].mlp.down_proj.weight.copy_(model.model.layers[1].mlp.down_proj.weight),
    ],
    ids=["trained head", "one token", "packed words"],
)
def test_a_shard_of_another_save_is_refused(tmp_path, change):
    save(tmp_path / "one", max_shard_size="8KB")
    save(tmp_path / "other", change, max_shard_size="8KB")
    assert load(tmp_path / "one") and load(tmp_path / "other")
    differ = [f for f in shards(tmp_path / "one") if load_bytes(f) != load_bytes(tmp_path / "other" / f.name)]
    assert differ
    for file in differ:
        folder = shutil.copytree(tmp_path / "one", tmp_path / file.stem)
        shutil.copy(tmp_path / "other" / file.name, folder)
        with pytest.raises(
            ValueError, match=r"expected files of one save, .*\n  \S+safetensors: found kbit_tensors \w+"
        ):
            load(folder)


def load_bytes(file) -> bytes:
    """The data alone."""
    content = file.read_bytes()
    return content[8 + int.from_bytes(content[:8], "little") :]


def test_a_save_that_was_killed_between_two_files_is_refused(tmp_path, monkeypatch):
    """Over a model with the same config, and so with the same digest of it."""
    save(tmp_path, max_shard_size="8KB")
    files = shards(tmp_path)
    other = save(tmp_path / "other", lambda model: model.lm_head.weight.mul_(2))

    def killed(*args, **kwargs):
        save_file(*args, **kwargs)
        if "00002-of" in str(args[1]):
            raise KeyboardInterrupt

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", killed)
    with pytest.raises(KeyboardInterrupt):
        other.save_pretrained(tmp_path, max_shard_size="8KB")
    assert metadata(files[1])["kbit_tensors"] == sealing.NOT_SEALED
    with pytest.raises(
        ValueError, match=r"(?s)was a save cut short.*\n  \S+00003-of-\d+\.safetensors: found kbit_tensors"
    ):
        load(tmp_path)


def test_a_save_that_was_killed_before_it_was_sealed_loads(tmp_path, monkeypatch):
    """All of it is there."""
    monkeypatch.setattr(sealing, "seal", lambda folder: None)
    model = save(tmp_path, max_shard_size="8KB")
    assert {metadata(file)["kbit_tensors"] for file in shards(tmp_path)} == {sealing.NOT_SEALED}
    assert torch.equal(load(tmp_path).lm_head.weight, model.lm_head.weight)


def test_a_relabelled_tensor_is_refused(tmp_path):
    """BF16 read as F16 are other numbers of the same size."""
    save(tmp_path)
    (file,) = shards(tmp_path)
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header[NORM]["dtype"] = "F16"
    text = json.dumps(header, separators=(",", ":")).encode().ljust(end - 8)
    file.write_bytes(content[:8] + text + content[end:])
    with pytest.raises(
        ValueError, match=r"expected files of one save, .* was a save cut short, or a tensor changed\?"
    ):
        load(tmp_path)


def test_files_of_old_and_files_of_others_are_left_alone(tmp_path):
    """Those without a seal are taken as they are; what else lies in the folder is not touched."""
    model = save(tmp_path)
    (file,) = shards(tmp_path)
    digest = {"format": "pt", "kbit_digest": metadata(file)["kbit_digest"]}
    save_file(load_file(file), file, digest)
    assert torch.equal(load(tmp_path).lm_head.weight, model.lm_head.weight)
    others = {
        "notes.safetensors": b"mine",
        "adapter.safetensors": file.read_bytes().replace(b"kbit_digest", b"tbit_digest"),
    }
    for name, content in others.items():
        (tmp_path / name).write_bytes(content)
    sealing.seal(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in others} == others


def test_modules_of_nobody_are_sealed_too(tmp_path):
    module, fresh = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in "ab")
    hf_kbit.quantize_model(module, bits=3)
    hf_kbit.save(module, tmp_path)
    (file,) = shards(tmp_path)
    assert metadata(file)["kbit_tensors"] == sealing.tensors_digest([file])
    tensors = load_file(file)
    save_file(tensors | {"0.bias": tensors["1.bias"] + 1}, file, metadata(file))
    with pytest.raises(ValueError, match="expected files of one save"):
        hf_kbit.load_into(fresh, tmp_path)
