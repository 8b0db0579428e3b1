"""What has to be on the disk is waited for, and an error of the disk is one."""

import errno
import os

import pytest
import torch
from torch import nn

from hf_kbit import quantize_model, save
from hf_kbit.cli.folder import claim
from hf_kbit.files.durable import settle


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSPC, errno.EIO])
def test_errors(code, monkeypatch, tmp_path):
    """Some file systems cannot wait for a folder, which is no reason to stop."""

    def failing(_):
        raise OSError(code, os.strerror(code))

    (file := tmp_path / "file").write_text("")
    settle(file, tmp_path)
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match=os.strerror(code)):
        settle(file)
    if code in (errno.EINVAL, errno.ENOTSUP):
        settle(tmp_path)
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            settle(tmp_path)


def by_save(folder):
    quantize_model(model := nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), bits=3)
    save(model, folder, max_shard_size="2KB")


def by_the_command(folder):
    with claim(folder) as output:
        output.model.mkdir(parents=True)
        for name in ("config.json", "model.safetensors"):
            (output.model / name).write_text(name)
        output.publish()


@pytest.mark.parametrize("write", [by_save, by_the_command])
def test_all_is_on_the_disk_before_it_is_the_model(write, monkeypatch, tmp_path):
    """If the power fails, what has been renamed may be there without its content."""
    torch.manual_seed(0)
    replace, fsync, settled = os.replace, os.fsync, set()

    def waited(descriptor):
        settled.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def moved(source, target):
        inside = [source] if source.is_file() else [source, *source.iterdir()]
        assert {path.stat().st_ino for path in inside} <= settled
        replace(source, target)

    monkeypatch.setattr(os, "fsync", waited)
    monkeypatch.setattr(os, "replace", moved)
    write(tmp_path)
    assert tmp_path.stat().st_ino in settled and any(tmp_path.glob("*.safetensors"))
