"""The workflows of a public CI: what they run, and that nobody else can change what that is."""

import re
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
