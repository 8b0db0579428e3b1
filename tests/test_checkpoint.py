"""Files are read as one save has left them; damaged ones, and files of two saves, are refused by name."""

import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_kbit import KbitLinear, codebooks
from hf_kbit.files import checkpoint
from hf_kbit.files.checkpoint import DIGEST, NOT_SEALED, TENSORS
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.format.model import ModelFormat

LEVELS = codebooks.normal_float(3)
STORED = ModelFormat(3, {3: LEVELS}, {"b": ScalarDecoding(LEVELS, 1, "rotated")})
NORM = "norm.weight"


def contents(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two packed layers, ``a`` and ``b``, and a norm, some of them longer than what a digest samples."""
    torch.manual_seed(seed)
    found = {NORM: torch.rand(1500).bfloat16(), "empty": torch.zeros(0)}
    for name in "ab":
        layer = KbitLinear.from_linear(torch.nn.Linear(96, 64), bits=3)
        found |= {f"{name}.{own}": tensor.detach().clone() for own, tensor in layer.packed.items()}
    return found


def write(folder, tensors, files: int = 3, stored: ModelFormat = STORED, sealed: bool = True) -> list:
    """A save in so many files."""
    folder.mkdir(exist_ok=True)
    names, paths = sorted(tensors), [folder / f"m-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    for i, path in enumerate(paths):
        save_file({name: tensors[name] for name in names[i::files]}, path, checkpoint.unsealed(stored))
    if sealed:
        checkpoint.seal(folder)
    return paths


def check(files, stored: ModelFormat = STORED) -> None:
    checkpoint.check_save(files, stored, checkpoint.packed_modules(checkpoint.read_headers(files)))


def metadata(file) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return opened.metadata()


# --- one save -------------------------------------------------------------------------------------


def test_the_same_bytes_and_digest_however_a_model_is_saved(tmp_path):
    seals = set()
    for number, files in enumerate((1, 3, 3)):
        paths = write(tmp_path / str(number), contents(), files)
        check(paths)
        seals |= {metadata(path)[TENSORS] for path in paths}
        assert {metadata(path)[DIGEST] for path in paths} == {STORED.digest()}
        found, expected = checkpoint.read(paths), contents()
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    assert seals == {checkpoint.tensors_digest(paths)} != {NOT_SEALED}
    for path in paths:
        assert path.read_bytes() == (tmp_path / "1" / path.name).read_bytes()


def test_files_of_two_saves_are_refused(tmp_path):
    """Whichever tensor differs, in its first or its last bytes; the files of one save are not."""
    for name, tensor in contents().items():
        for place in (0, -1) if tensor.numel() else ():
            other = contents()
            other[name].view(-1)[place] += 1
            one, two = write(tmp_path / "one", contents()), write(tmp_path / "two", other)
            check(two)
            (differing,) = [f for f, g in zip(one, two, strict=True) if not same(load_file(f), load_file(g))]
            shutil.copy(tmp_path / "two" / differing.name, differing)
            with pytest.raises(ValueError, match=r"files of one save.*, or a tensor changed.*\n  \S+: found kbit"):
                check(one)


def same(one, other) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_changed_file_is_refused(tmp_path):
    def retyped(file):
        """BF16 read as F16 are other numbers of the same size."""
        file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"F16" '))

    def reversed_shapes(file):
        found = {name: tensor.reshape(tensor.shape[::-1]) for name, tensor in load_file(file).items()}
        save_file(found, file, metadata(file))

    def without_metadata(file):
        save_file(load_file(file), file)

    for damage, message in (
        (retyped, "expected files of one save"),
        (reversed_shapes, "expected files of one save"),
        (without_metadata, "safetensors: found kbit_digest None$"),
    ):
        files = write(tmp_path, contents())
        damage(next(file for file in files if NORM in load_file(file)))
        with pytest.raises(ValueError, match=message):
            check(files)


def test_a_save_that_was_killed(tmp_path):
    """Between two files over an earlier save it is refused; before it was sealed it loads, for all is there."""
    unsealed = write(tmp_path / "new", contents(1), sealed=False)
    assert {metadata(file)[TENSORS] for file in unsealed} == {NOT_SEALED}
    check(unsealed)
    files = write(tmp_path / "old", contents())
    shutil.copy(unsealed[0], files[0])
    with pytest.raises(ValueError, match="expected files of one save"):
        check(files)


def test_files_of_old_and_of_others_are_left_alone(tmp_path):
    for known in ({}, {DIGEST: STORED.digest()}):
        save_file(contents(), tmp_path / "old.safetensors", known)
        check([tmp_path / "old.safetensors"])
    write(tmp_path, contents())
    others = {"notes.safetensors": b"mine", "old.safetensors": (tmp_path / "old.safetensors").read_bytes()}
    (tmp_path / "notes.safetensors").write_bytes(b"mine")
    checkpoint.seal(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in others} == others


# --- one file -------------------------------------------------------------------------------------


def test_files_that_are_none_of_a_checkpoint(tmp_path):
    one, *_ = write(tmp_path, contents())
    with pytest.raises(ValueError, match=r"\S+: found in \S+00001-of\S+ and in \S+twice.\S+, expected it in one"):
        checkpoint.read_headers([one, shutil.copy(one, tmp_path / "twice.safetensors")])
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: found another format, expected safetensors"):
        checkpoint.read_headers([tmp_path / "pytorch_model.bin"])


# --- packed tensors -------------------------------------------------------------------------------


def test_errors_are_of_bounded_length():
    """Whatever a file calls its tensors, and however many there are."""
    with pytest.raises(ValueError, match=r"(?s)does not fit the model:\n  0 xxx.*\.\.\. and 980 more") as error:
        checkpoint.refuse([f"{number} {'x' * 100_000}" for number in range(1000)])
    assert len(str(error.value)) < 12_000
