"""How commands end: with one line for what can go wrong, with a traceback for what should not."""

import errno
import inspect
import re
import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, get_args, get_origin

import pytest
import torch
import typer
from safetensors import SafetensorError
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import cli, codebooks
from hf_kbit.calibration import tuning
from hf_kbit.calibration.data import LENGTH, SEQUENCES
from hf_kbit.calibration.layerwise import METHODS
from hf_kbit.calibration.writing import AMOUNTS
from hf_kbit.cli.output import in_one_line

FULL = "the disk is full, or a file must not be so large"
SHORT = "memory is too small"


def ended_by(error: BaseException, cause: BaseException | None = None, arguments=()):
    """What a command does that ends with the error."""

    def command():
        raise error from cause

    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(in_one_line("test", command, "interrupted; go on"))
    return CliRunner().invoke(app, list(arguments))


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


def test_an_error_where_its_traceback_is_asked_for():
    first, *_, last = ended_by(ValueError("bits: found 7"), arguments=["--traceback"]).stderr.splitlines()
    assert first.startswith("Traceback") and last == "hf-kbit test: bits: found 7"


def test_interrupted():
    result = ended_by(KeyboardInterrupt())
    assert (result.exit_code, result.stderr) == (130, "hf-kbit test: interrupted; go on\n")


def test_other_ways_to_end():
    assert ended_by(typer.Exit(5)).exit_code == 5


COMMANDS = {"quantize": ["a", "b"], "chat": ["a"], "bench": ["a"], "eval": ["a"], "info": []}


@pytest.mark.parametrize("command", COMMANDS)
def test_all_commands_end_so(monkeypatch, command):
    """Here by an error of the first thing that each does."""

    def short(*_, **__):
        raise MemoryError

    monkeypatch.setattr("hf_kbit.ops.native.build_info", short)
    for module in (cli.quantize, cli.chat, cli.bench, cli.eval):
        monkeypatch.setattr(module, "resolve_device", short)
    result = CliRunner().invoke(cli.app, [command, *COMMANDS[command]])
    assert result.exit_code == 1 and result.stderr.startswith(f"hf-kbit {command}: {SHORT}")


def test_version():
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"{hf_kbit.__version__}\n"


def test_help_is_there_at_once():
    """Without the imports that take seconds, in a process of its own."""
    code = f"""
import sys
from typer.testing import CliRunner
from hf_kbit import cli
for command in {[[], *([name] for name in (*COMMANDS, "run"))]}:
    assert "Usage: " in CliRunner().invoke(cli.app, [*command, "-h"]).stdout, command
print({{"torch", "transformers", "numpy", "huggingface_hub"}} & sys.modules.keys())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout == "set()\n", run.stderr


@dataclass(frozen=True)
class Option:
    command: str
    name: str
    kind: object  # its type, as annotated
    default: object
    help: str


def options() -> list[Option]:
    """Of all commands."""
    found = []
    for command in cli.app.registered_commands:
        for name, parameter in inspect.signature(command.callback).parameters.items():
            if get_origin(parameter.annotation) is Annotated:
                kind, details = get_args(parameter.annotation)
                if isinstance(details, typer.models.OptionInfo):
                    found.append(Option(command.name, name, kind, parameter.default, details.help))
    return found


@pytest.mark.parametrize("option", options(), ids=lambda option: f"{option.command} {option.name}")
def test_options_say_what_they_are_and_their_default(option):
    """In sentences, and with a unit where they are a number; typer adds defaults other than none."""
    assert re.fullmatch(r"[A-Z\d-].*\.", option.help)
    if option.default in (None, False) and option.name not in ("text", "dataset", "calibrate", "tune"):
        assert "Default: " in option.help
    if option.kind in (int, int | None, float | None):
        assert re.search("[nN]umber of ", option.help)


def test_help_has_the_figures_and_names_of_the_code():
    """They stand in it as text, for the code takes seconds to import."""
    help_of = {(option.command, option.name): option.help for option in options()}
    names = re.search(r"chosen, by (.*?)\.", help_of["quantize", "method"])[1]
    assert set(re.split(", | or ", names)) == set(METHODS)
    names = re.search(r"rounded to: (.*?)\.", help_of["quantize", "codebook"])[1]
    assert set(re.split(", | or ", names)) == set(codebooks.NAMED)
    config = hf_kbit.KbitConfig()
    for command in ("quantize", "eval"):
        assert help_of[command, "codebook"].endswith(f"Default: {config.codebook}.")
    assert help_of["eval", "scale"].endswith(f"Default: {config.scale}.")
    assert help_of["quantize", "bits"].endswith(f"Default: {config.bits}.")
    default = f"Default: {SEQUENCES}, or {AMOUNTS['cpu'][0]} if the model writes them on a CPU; "
    default += f"with --tune {tuning.AMOUNTS[''][0]} and {tuning.AMOUNTS['cpu'][0]}."
    assert help_of["quantize", "sequences"].endswith(default) and AMOUNTS[""][0] == SEQUENCES
    assert help_of["quantize", "steps"].endswith(f"Default: {tuning.STEPS['']}, or {tuning.STEPS['cpu']} on a CPU.")
    of_a_text, written, on_cpu = LENGTH, AMOUNTS[""][1], AMOUNTS["cpu"][1]
    default = f"Default: {of_a_text} of a text, {written} if the model writes them, {on_cpu} if it does so on a CPU."
    assert help_of["quantize", "length"].endswith(default)
