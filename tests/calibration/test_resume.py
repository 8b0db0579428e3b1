"""A calibration that was killed goes on where it was, and gives the same bytes."""

import multiprocessing
import os
import signal

import pytest
import torch
from architectures import BY_NAME
from calibration.test_layerwise import IDS
from mapping import is_mapped
from safetensors import safe_open
from safetensors.torch import save_file
from small import llama, same, tensors

import hf_kbit
from hf_kbit.calibration import feedback
from hf_kbit.calibration.solving import METHODS
from hf_kbit.files.finished import Finished, remove
from hf_kbit.nn.site import site_of
from hf_kbit.nn.weight import packed_layers
from hf_kbit.plan import selection


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


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_goes_on_with_the_layer_that_was_not_finished(name, device, monkeypatch, tmp_path):
    """To the same bytes. One layer has an exponent, one cannot be transformed, and the result says so."""
    choices = {"bits": 3, "embedding_bits": 5, "codebook": "int", "method": "feedback", "batch": 4}

    def run(stop=None, **resume):
        model = BY_NAME[name].build().to(device)
        first, second, *_ = selection.Packable(model).choose(hf_kbit.KbitConfig())
        site_of(model, first).weight.data *= 2.0**-16
        weight = site_of(model, second).weight.data
        (weight.T if name == "gpt2" else weight)[..., 0, :] *= 2.0**-9
        monkeypatch.setitem(METHODS, "feedback", solver := Counting(stop))
        return hf_kbit.calibrate(model, IDS, **choices, **resume), solver.calls

    expected, solved = run()
    with pytest.raises(Killed):
        run(solved - 1, resume=tmp_path)
    model, again = run(resume=tmp_path)
    assert 0 < again < solved and same(tensors(model), tensors(expected))
    assert model.config.quantization_config.to_dict() == expected.config.quantization_config.to_dict()
    found, wanted = (each.hf_quantizer.outcome.untransformed for each in (model, expected))
    assert found == wanted and wanted


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_what_is_finished_is_mapped_from_its_file(name, tmp_path):
    """But for tables, which no file has."""
    model = hf_kbit.calibrate(BY_NAME[name].build(), IDS, bits=3, method="weighted", device="cpu", resume=tmp_path)
    layers = packed_layers(model).values()
    assert layers and all(is_mapped(x, tmp_path) for layer in layers for x in layer.weight.file_tensors().values())


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


@pytest.mark.gpu
def test_a_killed_run_on_the_gpu_goes_on(tmp_path):
    whole = tensors(hf_kbit.calibrate(llama(), IDS, bits=3))
    hf_kbit.calibrate(llama(), IDS, bits=3, resume=tmp_path)
    (tmp_path / "model.layers.1.safetensors").unlink()
    assert same(tensors(hf_kbit.calibrate(llama(), IDS, bits=3, resume=tmp_path)), whole)
    with pytest.raises(ValueError, match="found what a run with another model, data, device"):
        hf_kbit.calibrate(llama(), IDS, bits=3, resume=tmp_path, device="cpu")


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
        {"embedding_bits": 5},
        {"model": changed_weight},
        {"tune": 5},
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


# --- files ----------------------------------------------------------------------------------------

UNIT, KEPT, NUMBERS = "layers.0", {"up": torch.arange(6.0).view(2, 3), "down": torch.arange(9).byte()}, [1, 0.5]


@pytest.fixture
def run(tmp_path):
    """A run that has finished one unit."""
    found = Finished(tmp_path, "of this run")
    found.save(UNIT, KEPT, NUMBERS)
    return found


def edited(change):
    """Rewrites a unit's file with other tensors or metadata, as a safetensors file that is whole."""

    def damage(file):
        with safe_open(file, "pt") as stored:
            metadata, found = stored.metadata(), {name: stored.get_tensor(name) for name in stored.keys()}
        change(found, metadata)
        save_file(found, file, metadata)

    return damage


def flip_last_bit(file):
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def of_another_unit(file):
    Finished(file.parent, "of this run").save("layers.1", KEPT, NUMBERS)
    (file.parent / "layers.1.safetensors").replace(file)


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "cut in the header": lambda file: file.write_bytes(file.read_bytes()[:40]),
    "cut in the data": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "text": lambda file: file.write_text("mine"),
    "a bit of the payload": flip_last_bit,
    "another dtype": edited(lambda tensors, _: tensors.update(up=tensors["up"].view(torch.int32))),
    "another shape": edited(lambda tensors, _: tensors.update(up=tensors["up"].view(3, 2))),
    "a tensor less": edited(lambda tensors, _: tensors.pop("up")),
    "another number": edited(lambda _, metadata: metadata.update(others="[1, 0.25]")),
    "no metadata": edited(lambda _, metadata: metadata.clear()),
    "of another unit": of_another_unit,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(run, damage):
    tensors, others = run.load(UNIT)
    assert same(tensors, KEPT) and others == NUMBERS and run.load("layers.2") is None
    file = run.folder / f"{UNIT}.safetensors"
    DAMAGES[damage](file)
    with pytest.raises(ValueError, match=f"{file}: found it damaged .* remove this file"):
        run.load(UNIT)


@pytest.mark.parametrize("record", [b"", b'{"digest": "of th', b"[]", b"\xff\xfe\x00"])
def test_a_damaged_record_is_named(run, record):
    (run.folder / "run.json").write_bytes(record)
    with pytest.raises(ValueError, match=rf"{run.folder}: found .* a damaged run.json, .* remove the folder"):
        Finished(run.folder, "of this run")


def test_a_record_is_on_the_disk_before_it_has_its_name(monkeypatch, tmp_path):
    """What a run left that was killed before is no hindrance."""
    (tmp_path / "run.json.part").write_text("{")
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *given, name=name, real=real: (calls.append(name), real(*given)))
    Finished(tmp_path, "of this run")
    assert calls == ["fsync", "replace"] and [file.name for file in tmp_path.iterdir()] == ["run.json"]
    Finished(tmp_path, "of this run")


def test_files_of_others_stay(run):
    (run.folder / "notes.txt").write_text("mine")
    for _ in range(2):  # the second time it is no folder of a run any more
        remove(run.folder)
        assert [file.name for file in run.folder.iterdir()] == ["notes.txt"]
    with pytest.raises(ValueError, match="found other files, expected an empty folder"):
        hf_kbit.calibrate(llama(), IDS, resume=run.folder)
    assert [file.name for file in run.folder.iterdir()] == ["notes.txt"]
