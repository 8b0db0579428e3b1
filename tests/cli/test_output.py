"""How commands end: with one line for what can go wrong, with a traceback for what should not."""

import errno

import pytest
import torch
import typer
from safetensors import SafetensorError
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import cli
from hf_kbit.cli.output import in_one_line

FULL = "the disk is full, or a file must not be so large"
SHORT = "memory is too small"


def ended_by(error: BaseException, cause: BaseException | None = None):
    """What a command does that ends with the error."""

    def command():
        raise error from cause

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(in_one_line("test", command, "interrupted; go on"))
    return CliRunner().invoke(app, [])


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("bits: found 7"), "bits: found 7"),
        (TypeError("data: found int"), "data: found int"),
        (ImportError("pip install datasets"), "pip install datasets"),
        (PermissionError(errno.EACCES, "Permission denied", "out"), "[Errno 13] Permission denied: 'out'"),
        (OSError(errno.ENOSPC, "No space left", "out"), f"{FULL} ([Errno 28] No space left: 'out'); make room"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), FULL),
        (SafetensorError("I/O error: No space left on device (os error 28)"), FULL),
        (SafetensorError("I/O error: File too large (os error 27)"), FULL),
        (SafetensorError("header too large"), "found a damaged safetensors file (header too large)"),
        (MemoryError(), f"{SHORT} (MemoryError)"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), SHORT),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"), SHORT),
        (RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)"), SHORT),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried"), "the GPU's memory is too small (CUDA out of memory.)"),
    ],
    ids=repr,
)
def test_one_line(error, message):
    result = ended_by(error)
    (line,) = result.stderr.splitlines()
    assert result.exit_code == 1 and line.startswith(f"hf-kbit test: {message}") and not result.stdout


def test_the_cause_counts():
    """Of an error that was taken for another one on its way, such as a model's that does not run."""
    result = ended_by(ValueError("the model does not run on token ids alone"), MemoryError("no room"))
    assert result.stderr == f"hf-kbit test: {SHORT} (no room); free some, or take a machine with more\n"


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shapes differ"), AssertionError()], ids=repr)
def test_what_is_not_expected_keeps_its_traceback(error):
    first, *_, last = ended_by(error).stderr.splitlines()
    assert first.startswith("Traceback")
    assert last.startswith(f"hf-kbit test: found an error that is not expected, {type(error).__name__}: ")
    assert "it is a bug of hf_kbit: please report" in last


def test_interrupted():
    result = ended_by(KeyboardInterrupt())
    assert (result.exit_code, result.stderr) == (130, "hf-kbit test: interrupted; go on\n")


def test_other_ways_to_end():
    assert ended_by(typer.Exit(5)).exit_code == 5


@pytest.mark.parametrize("command", ["info", "eval", "quantize"])
def test_all_commands_end_so(monkeypatch, command):
    """Here by an error of the first thing that each does."""

    def short(*_, **__):
        raise MemoryError

    monkeypatch.setattr(cli.info._native, "build_info", short)
    monkeypatch.setattr(cli.eval, "resolve_device", short)
    monkeypatch.setattr(cli.quantize, "resolve_device", short)
    result = CliRunner().invoke(cli.app, [command, *{"info": [], "eval": ["a"], "quantize": ["a", "b"]}[command]])
    assert result.exit_code == 1 and result.stderr.startswith(f"hf-kbit {command}: {SHORT}")


def test_version_and_help():
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"{hf_kbit.__version__}\n"
    for arguments in ([], ["quantize"], ["eval"], ["info"], ["run"]):
        assert "Usage: " in CliRunner().invoke(cli.app, [*arguments, "-h"]).stdout
