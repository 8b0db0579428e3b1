"""The workflows of a public CI: what they run, and that nobody else can change what that is."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_ci_runs_what_ci_run_runs():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    wanted = re.findall(r"^make (\S+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert jobs["make"]["strategy"]["matrix"]["target"] == wanted


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_and_containers_are_pinned(path):
    """By a digest: a tag may become something else."""
    text = path.read_text()
    used = re.findall(r"^\s*(?:- )?(?:uses|container): (\S+)", text, re.MULTILINE)
    assert used
    for name in used:
        assert re.search(r"@([0-9a-f]{40}|sha256:[0-9a-f]{64})$", name), name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_make_targets_exist(path):
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"run: make ([a-z-]+)", path.read_text())) <= made


def executable(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_try_wheel_finds_pythons_of_pyenv_and_names_what_did_not_pass(tmp_path):
    """With stand-ins for uv and for Pythons: one that runs, and two of pyenv's, whose commands on the PATH do not."""
    executable(tmp_path / ".ci" / "try-wheel", "")
    (tmp_path / ".ci" / "try-wheel").write_bytes((ROOT / ".ci" / "try-wheel").read_bytes())
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "hf_kbit-0-py3-none-manylinux_2_34_x86_64.whl").touch()
    programs, versions = tmp_path / "programs", tmp_path / "pyenv" / "versions"
    executable(programs / "python3.10", "exit 0")
    for minor in ("3.12", "3.13", "3.99"):
        executable(programs / f"python{minor}", "exit 127")
    executable(versions / "3.12.1" / "bin" / "python", "exit 0")
    executable(versions / "3.13.0" / "bin" / "python", "exit 0")
    # It makes environments whose Python, 3.13's excepted, passes whatever it is given; it has no Python 3.99.
    executable(
        programs / "uv",
        f"""echo "$@" >> {tmp_path / "calls"}
        case "$*" in
        *"--python 3.99"*) exit 2;;
        *venv*3.13*) mkdir -p environment/bin; ln -sf {shutil.which("false")} environment/bin/python;;
        *venv*) mkdir -p environment/bin; ln -sf {shutil.which("true")} environment/bin/python;;
        esac""",
    )
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv")}
    pairs = ["3.99:4", "3.13:3", "3.10:1", "3.12:2"]
    run = subprocess.run([tmp_path / ".ci" / "try-wheel", *pairs], env=environment, capture_output=True, text=True)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == "did not pass, for the reasons above: 3.99:4 3.13:3"
    used = [re.search(r"--python (\S+)", call)[1] for call in (tmp_path / "calls").read_text().splitlines()]
    assert [python for python in used if python != "environment"] == [
        "3.99",
        str(versions / "3.13.0" / "bin" / "python"),
        str(programs / "python3.10"),
        str(versions / "3.12.1" / "bin" / "python"),
    ]
