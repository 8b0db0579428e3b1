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


@pytest.mark.parametrize(
    "code",
    [
        "import hf_kbit; import transformers",
        "import hf_kbit; hf_kbit.KbitConfig",
        "import hf_kbit.nn.linear",
        "import torch; import hf_kbit; torch.ops.hf_kbit.quantize",
    ],
)
def test_registered_however_it_is_imported(code):
    """Before there is a quantized layer, and before Transformers is used."""
    done = "'hf_kbit.integrations.transformers.quantizer' in sys.modules, fully_shard._is_hook_of_hf_kbit"
    code = f"{code}\nimport sys\nfrom torch.distributed.fsdp import fully_shard\nprint({done})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout == "True True\n", run.stderr


def test_what_takes_seconds_is_not_imported_at_once():
    code = "import sys, hf_kbit; print({'torch', 'transformers', 'peft'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout == "set()\n", run.stderr


def test_public_names():
    """Each is there, for type checkers too."""
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    typed = next(node for node in body if isinstance(node, ast.If))
    names = {alias.name for node in typed.body for alias in node.names}
    assert names == set(hf_kbit.__all__) and all(hasattr(hf_kbit, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'kbit_config'"):
        getattr(hf_kbit, "kbit_" + "config")


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
    "triton_kernels",
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
