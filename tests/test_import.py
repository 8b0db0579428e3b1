"""Importing the package: what it registers, what it exports, and what it does without."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_kbit

PACKAGE = Path(hf_kbit.__file__).parent


@pytest.mark.parametrize("absent", [[], ["peft"], ["accelerate"], ["peft", "accelerate"]], ids=str)
def test_import_without_optional_packages(absent):
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); import hf_kbit; print(hf_kbit.KbitConfig(bits=3))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "KbitConfig(bits=3)", run.stderr


def test_public_names():
    assert all(hasattr(hf_kbit, name) for name in hf_kbit.__all__)


def test_format_needs_the_standard_library_only():
    tree = ast.parse((PACKAGE / "format.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


ORDER = [
    "format",
    "codebooks",
    "patterns",
    "transforms",
    "reference",
    "_native",
    "inductor",
    "ops",
    "balance",
    "refine",
    "nn",
    "config",
    "mixing",
    "decoding",
    "integrations",
    "calibration",
    "evaluation",
    "widths",
    "in_memory",
    "saving",
    "cli",
]


@pytest.mark.parametrize("module", ORDER)
def test_imports_run_one_way(module):
    """A module imports only what is before it in ``ORDER``, or itself."""
    files = sorted((PACKAGE / module).rglob("*.py")) or [PACKAGE / f"{module}.py"]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("hf_kbit"):
                names = [node.module.split(".")[1]] if "." in node.module else [alias.name for alias in node.names]
                assert all(ORDER.index(name) <= ORDER.index(module) for name in names), f"{file.name}: {names}"
