"""A calibration that was killed goes on where it was, and gives the same bytes."""

import json
import os
import signal
import subprocess
import sys

import pytest
from calibration.test_layerwise import IDS, architecture, llama, same, tensors

import hf_kbit
from hf_kbit.calibration import feedback
from hf_kbit.calibration.layerwise import METHODS
from hf_kbit.integrations.transformers import selection


class Killed(BaseException):
    pass


class Counting:
    """Error feedback that counts its layers, and stops at one of them."""

    DIAGONAL = False

    def __init__(self, stop: int | None = None):
        self.stop, self.calls = stop, 0

    def solve(self, *arguments):
        if self.calls == self.stop:
            raise Killed
        self.calls += 1
        return feedback.solve(*arguments)


@pytest.mark.parametrize(("name", "stop", "kept"), [("llama", 10, 7), ("gpt2", 4, 4), ("t5", 17, 12)])
def test_goes_on_with_the_layer_that_was_not_finished(name, stop, kept, device, monkeypatch, tmp_path):
    choices = {"bits": 3, "codebook": "layer", "method": "feedback", "batch": 4}

    def build():
        model = architecture(name).to(device)
        first = next(iter(selection.choose(model, hf_kbit.KbitConfig())))
        model.get_submodule(first).weight.data *= 2.0**-16  # so that it has an exponent
        return model

    whole = tensors(hf_kbit.calibrate(build(), IDS, **choices))
    config = hf_kbit.calibrate(build(), IDS, **choices).config.quantization_config.to_dict()
    for stop_at in (stop, None):
        solver = Counting(stop_at)
        monkeypatch.setitem(METHODS, "feedback", solver)
        try:
            model = hf_kbit.calibrate(build(), IDS, resume=tmp_path / "run", **choices)
        except Killed:
            assert solver.calls == stop
    layers = sum(isinstance(module, hf_kbit.KbitLinear) for module in model.modules())
    assert solver.calls == layers - kept
    assert same(tensors(model), whole) and model.config.quantization_config.to_dict() == config
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved").to(device)
    assert same(tensors(again), whole)


SCRIPT = """
import os, signal, sys
import torch
from calibration.test_layerwise import IDS, llama
import hf_kbit
from hf_kbit.calibration import resume

replace = os.replace
def killed(*files):  # while the second layer of the model is being written, and not yet renamed
    if files[1].name == "model.layers.1.safetensors":
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*files)
resume.os.replace = killed
hf_kbit.calibrate(llama(), IDS, bits=2, resume=sys.argv[1])
"""


def test_killed_while_it_writes(tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    run = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "run"], env=environment, timeout=300)
    assert run.returncode == -signal.SIGKILL
    names = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert names == ["model.layers.0.safetensors", "model.layers.1.safetensors.part", "run.json"]
    model = hf_kbit.calibrate(llama(), IDS, bits=2, resume=tmp_path / "run")
    assert same(tensors(model), tensors(hf_kbit.calibrate(llama(), IDS, bits=2)))


def test_killed_before_anything_was_finished(tmp_path):
    (tmp_path / "run.json.part").write_text("{")
    hf_kbit.calibrate(llama(), IDS, bits=2, resume=tmp_path)
    assert len(json.loads((tmp_path / "run.json").read_text())["digest"]) == 64


def changed_weight():
    model = llama()
    model.model.embed_tokens.weight.data[3, 5] += 1
    return model


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 3},
        {"method": "weighted"},
        {"batch": 2},
        {"data": IDS.flip(0)},
        {"codebook": "normal_float"},
        {"module_bits": {"k_proj": 4}},
        {"model": changed_weight},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_another_run_finished_is_refused(change, tmp_path):
    choices = {"model": llama, "data": IDS, "bits": 2}
    hf_kbit.calibrate(llama(), IDS, bits=2, resume=tmp_path)
    choices |= change
    model = choices.pop("model")()
    before = tensors(model)
    with pytest.raises(ValueError, match=f"{tmp_path}: found what a run with another model"):
        hf_kbit.calibrate(model, resume=tmp_path, **choices)
    assert same(tensors(model), before)


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="found other files, expected an empty folder"):
        hf_kbit.calibrate(llama(), IDS, resume=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
