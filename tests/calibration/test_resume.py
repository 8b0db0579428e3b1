"""A calibration that was killed goes on where it was, and gives the same bytes."""

import json
import multiprocessing
import os
import signal

import pytest
import torch
from calibration.test_layerwise import IDS, architecture, llama, same, tensors
from safetensors import safe_open
from safetensors.torch import save_file

import hf_kbit
from hf_kbit.calibration import feedback
from hf_kbit.calibration.layerwise import METHODS
from hf_kbit.calibration.resume import Finished, remove
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
    choices = {"bits": 3, "embedding_bits": 5, "codebook": "int", "method": "feedback", "batch": 4}

    def build():
        model = architecture(name).to(device)
        first = next(iter(selection.Packable(model).choose(hf_kbit.KbitConfig())))
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


def calibrate_until_killed(folder) -> None:
    """Killed while the second layer of the model is being written, and not yet renamed."""
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    replace = os.replace

    def killed(*files):
        if files[1].name == "model.layers.1.safetensors":
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*files)

    os.replace = killed
    hf_kbit.calibrate(llama(), IDS, bits=2, method="weighted", device="cpu", resume=folder)


def test_killed_while_it_writes(tmp_path):
    run = multiprocessing.get_context("fork").Process(target=calibrate_until_killed, args=(tmp_path / "run",))
    run.start()
    run.join(timeout=300)
    assert run.exitcode == -signal.SIGKILL
    names = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert names == ["model.layers.0.safetensors", "model.layers.1.safetensors.part", "run.json"]
    choices = {"bits": 2, "method": "weighted", "device": "cpu"}
    model = hf_kbit.calibrate(llama(), IDS, resume=tmp_path / "run", **choices)
    assert same(tensors(model), tensors(hf_kbit.calibrate(llama(), IDS, **choices)))


def test_killed_before_anything_was_finished(tmp_path):
    (tmp_path / "run.json.part").write_text("{")
    Finished(tmp_path, "a" * 64)
    assert len(json.loads((tmp_path / "run.json").read_text())["digest"]) == 64


def changed_weight():
    model = llama()
    model.model.embed_tokens.weight.data[3, 5] += 1
    return model


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that has finished all layers."""
    folder = tmp_path_factory.mktemp("finished")
    hf_kbit.calibrate(llama(), IDS, method="weighted", bits=2, resume=folder)
    return folder


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 3},
        {"method": "feedback"},
        {"batch": 2},
        {"data": IDS.flip(0)},
        {"codebook": "normal_float"},
        {"module_bits": {"k_proj": 4}},
        {"model": changed_weight},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_another_run_finished_is_refused(change, finished):
    choices = {"model": llama, "data": IDS, "bits": 2, "method": "weighted"} | change
    model = choices.pop("model")()
    before = tensors(model)
    with pytest.raises(ValueError, match=f"{finished}: found what a run with another model"):
        hf_kbit.calibrate(model, resume=finished, **choices)
    assert same(tensors(model), before)


# --- files that were damaged since ----------------------------------------------------------------

UNIT = "layers.0"
OTHER = {"layers.1.down": (4, 40)}
LAYERS = {"layers.0.up": (40, 4), "layers.0.down": (4, 40)}


def some_layers(shapes=LAYERS, bits=3) -> dict[str, hf_kbit.KbitLinear]:
    torch.manual_seed(len(shapes))
    dense = {name: torch.nn.Linear(*shape, bias=False) for name, shape in shapes.items()}
    return {name: hf_kbit.KbitLinear.from_linear(layer, bits) for name, layer in dense.items()}


@pytest.fixture
def kept(tmp_path):
    """The folder of a run that has finished one unit."""
    Finished(tmp_path, "of this run").save(UNIT, some_layers())
    return tmp_path


def edited(change):
    """Rewrites a unit's file with other tensors or metadata, as a safetensors file that is whole."""

    def damage(file):
        with safe_open(file, "pt") as stored:
            metadata, found = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}
        described = json.loads(metadata["others"])
        change(found, described)
        save_file(found, file, metadata | {"others": json.dumps(described)})

    return damage


def flip(place: int):
    def damage(file):
        data = bytearray(file.read_bytes())
        data[place] ^= 1
        file.write_bytes(data)

    return damage


def cut(length: int):
    return lambda file: file.write_bytes(file.read_bytes()[:length])


def metadata_of(found: dict | None):
    def damage(file):
        with safe_open(file, "pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}
        save_file(tensors, file, found)

    return damage


def first(described: dict) -> dict:
    return next(iter(described.values()))


OF_RECORDS = {
    "empty": lambda file: file.write_text(""),
    "cut": lambda file: file.write_text('{"digest": "of th'),
    "no digest": lambda file: file.write_text("{}"),
    "a list": lambda file: file.write_text("[]"),
    "null": lambda file: file.write_text("null"),
    "a number": lambda file: file.write_text('{"digest": 5}'),
    "no text": lambda file: file.write_bytes(b"\xff\xfe\x00"),
    "deep": lambda file: file.write_text("[" * 100_000),
}
OF_UNITS = {
    "empty": cut(0),
    "cut in the header": cut(40),
    "cut in the data": cut(-3),
    "text": lambda file: file.write_text("mine"),
    "a bit of the payload": flip(-1),
    "a bit of another tensor": edited(lambda tensors, _: tensors["layers.0.up.weight_absmax"].add_(1)),
    "another dtype": edited(lambda tensors, _: tensors.update({k: t.long() for k, t in tensors.items()})),
    "a tensor less": edited(lambda tensors, _: tensors.pop("layers.0.up.weight")),
    "another exponent": edited(lambda _, described: first(described).update(exponent=5000)),
    "levels reversed": edited(lambda _, described: first(described)["levels"].reverse()),
    "no levels": edited(lambda _, described: first(described).pop("levels")),
    "no metadata": metadata_of(None),
    "other metadata": metadata_of({"others": "{}"}),
}


@pytest.mark.parametrize("damage", OF_RECORDS)
def test_a_damaged_record_is_named(kept, damage):
    OF_RECORDS[damage](kept / "run.json")
    with pytest.raises(ValueError, match=f"{kept}/run.json: found it damaged .* remove the folder {kept} to start"):
        Finished(kept, "of this run")


@pytest.mark.parametrize("damage", OF_UNITS)
def test_a_damaged_file_of_a_layer_is_named(kept, damage):
    run, file = Finished(kept, "of this run"), kept / f"{UNIT}.safetensors"
    new = some_layers()
    assert run.load(UNIT, new, torch.device("cpu"))
    OF_UNITS[damage](file)
    with pytest.raises(ValueError, match=f"{file}: found it damaged .* remove this file"):
        run.load(UNIT, new, torch.device("cpu"))


def test_the_file_of_other_layers_is_named(kept):
    run = Finished(kept, "of this run")
    run.save("layers.1", some_layers(OTHER))
    (kept / "layers.1.safetensors").replace(kept / f"{UNIT}.safetensors")
    with pytest.raises(ValueError, match=r"it holds other layers, layers\.1\.down\.weight for one"):
        run.load(UNIT, some_layers(), torch.device("cpu"))


def test_a_file_is_on_the_disk_before_it_has_its_name(monkeypatch, tmp_path):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (calls.append(name), real(*given)))
    Finished(tmp_path, "of this run")
    assert calls == ["fsync", "replace"]


def test_removing_leaves_the_files_of_others(kept):
    (kept / "notes.txt").write_text("mine")
    remove(kept)
    assert [file.name for file in kept.iterdir()] == ["notes.txt"]
    remove(kept)  # no folder of a run any more
    assert (kept / "notes.txt").exists()


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="found other files, expected an empty folder"):
        hf_kbit.calibrate(llama(), IDS, resume=tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
