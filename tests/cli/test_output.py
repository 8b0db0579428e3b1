"""What commands say of their options, and how they end: with a line for what can go wrong, else with a traceback."""

import argparse
import errno
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from command import hf_kbit_command, refuse, succeed
from safetensors import SafetensorError

import hf_kbit
from hf_kbit import cli, codebooks
from hf_kbit.calibration import tuning
from hf_kbit.calibration.data import LENGTH, LITTLE, SEQUENCES
from hf_kbit.calibration.solving import METHODS
from hf_kbit.calibration.writing import AMOUNTS, TRELLIS_SEQUENCES
from hf_kbit.plan.config import TRELLIS

FULL = "the disk is full, or a file must not be so large"
SHORT = "memory is too small"


@pytest.fixture
def ended_by(monkeypatch):
    """How ``hf-kbit test`` ends, a command that ends with an error."""

    def run(error: BaseException, cause: BaseException | None = None, arguments=()):
        def command(given):
            """Fail."""
            raise error from cause

        def add_options(parser):
            parser.set_defaults(interrupted="interrupted; go on")

        monkeypatch.setitem(cli.COMMANDS, "test", SimpleNamespace(command=command, add_options=add_options))
        return hf_kbit_command("test", *arguments)

    return run


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
def test_one_line(ended_by, error, message):
    ended = ended_by(error)
    (line,) = ended.stderr.splitlines()
    assert ended.code == 1 and line.startswith(f"hf-kbit test: {message}") and not ended.stdout
    first, *_, last = ended_by(error, arguments=["--traceback"]).stderr.splitlines()
    assert first.startswith("Traceback") and last == line


def test_the_cause_counts(ended_by):
    """Of an error that was taken for another one on its way, such as a model's that does not run."""
    ended = ended_by(ValueError("the model does not run on token ids alone"), MemoryError("no room"))
    assert ended.stderr == f"hf-kbit test: {SHORT} (no room); free some, or take a machine with more\n"


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shapes differ"), AssertionError()], ids=repr)
def test_what_is_not_expected_keeps_its_traceback(ended_by, error):
    first, *_, last = ended_by(error).stderr.splitlines()
    assert first.startswith("Traceback")
    assert last.startswith(f"hf-kbit test: found an error that is not expected, {type(error).__name__}: ")
    assert "it is a bug of hf_kbit: please report" in last


def test_interrupted(ended_by):
    ended = ended_by(KeyboardInterrupt())
    assert (ended.code, ended.stderr) == (130, "hf-kbit test: interrupted; go on\n")
    assert cli.parser().parse_args(["quantize", "a", "b"]).interrupted == cli.quantize.INTERRUPTED


def test_help_is_there_at_once():
    """Without the imports that take seconds, in a process of its own; and what there is without any argument."""
    code = f"""
import sys
from hf_kbit import cli
for command in {[[], *([name, "-h"] for name in cli.COMMANDS)]}:
    try:
        cli.main(command)
    except SystemExit as end:
        assert end.code == 0
print({{"torch", "transformers", "numpy", "huggingface_hub"}} & sys.modules.keys())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.count("usage: ") == 1 + len(cli.COMMANDS) and run.stdout.endswith("\nset()\n"), run.stderr
    assert succeed("--version").stdout == f"{hf_kbit.__version__}\n"
    assert "argument --dtype: invalid choice" in refuse("chat", "x", "--dtype", "int8")


def options() -> dict[tuple[str, str], argparse.Action]:
    """Of all commands, by the command and the name in Python."""
    (commands,) = (action.choices for action in cli.parser()._actions if action.choices)
    return {
        (command, action.dest): action
        for command, parser in commands.items()
        for action in parser._actions
        if action.option_strings and action.dest != "help"
    }


def help_of(command: str, name: str) -> str:
    action = options()[command, name]
    return (action.help % {"default": action.default}).removesuffix(" (default: True)")  # which Python 3.10 adds


@pytest.mark.parametrize("command, name", options())
def test_options_say_what_they_are_and_their_default(command, name):
    """In sentences, and with a unit where they are a number."""
    option, about = options()[command, name], help_of(command, name)
    assert re.fullmatch(r"[A-Z\d-].*\.", about)
    if not isinstance(option, argparse.BooleanOptionalAction) and name not in ("text", "dataset"):
        assert "Default: " in about
    if option.default not in (None, False, True):
        assert f"Default: {option.default}" in about
    if option.type is not None and name not in ("text", "png"):
        assert re.search("[nN]umber of ", about)


def test_help_has_the_figures_and_names_of_the_code():
    """They stand in it as text, for the code takes seconds to import."""
    assert set(options()["quantize", "method"].choices) == set(METHODS)
    names = re.search(r"rounded to: (.*?)\.", help_of("quantize", "codebook"))[1]
    assert set(re.split(", | or ", names)) == {*codebooks.NAMED, TRELLIS}
    config = hf_kbit.KbitConfig()
    for command, name, default in [
        (
            "quantize",
            "codebook",
            f"{TRELLIS} for fewer than 4 bits by feedback, on a GPU that has kernels for it and for up to "
            f"{cli.quantize.MOST / 1e9:.0f} billion weights; else {config.codebook}",
        ),
        ("eval", "codebook", config.codebook),
        ("eval", "scale", config.scale),
        ("quantize", "bits", config.bits),
        ("quantize", "steps", f"{tuning.STEPS['']}, or {tuning.STEPS['cpu']} on a CPU"),
        (
            "quantize",
            "sequences",
            f"{SEQUENCES}; if the model writes them, {TRELLIS_SEQUENCES['']} for a trellis, {AMOUNTS['cpu'][0]} on a "
            f"CPU; with --tune {tuning.AMOUNTS[''][0]}, or {tuning.AMOUNTS['cpu'][0]} on a CPU; {LITTLE[0]} with "
            "--method weighted and no text",
        ),
        (
            "quantize",
            "length",
            f"{LENGTH} of a text, {AMOUNTS[''][1]} if the model writes them, {AMOUNTS['cpu'][1]} if it does so on a "
            "CPU, or with --method weighted and no text",
        ),
    ]:
        assert help_of(command, name).endswith(f"Default: {default}."), (command, name)
    assert TRELLIS_SEQUENCES["cpu"] == AMOUNTS["cpu"][0]
    assert AMOUNTS[""][0] == SEQUENCES and AMOUNTS["cpu"][1] == LITTLE[1]
