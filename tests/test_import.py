"""Importing the package: what it registers, what it exports, and what it does without."""

import ast
import pkgutil
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
        "import hf_kbit; from transformers import LlamaForCausalLM",
        "from transformers import LlamaForCausalLM; import hf_kbit",
        "import hf_kbit; hf_kbit.KbitConfig",
        "import hf_kbit.nn.linear",
        "import torch; import hf_kbit; torch.ops.hf_kbit.quantize; from transformers import LlamaForCausalLM",
    ],
)
def test_registered_however_it_is_imported(code):
    """Before a model of Transformers is made; hooks are set by the first layer, or wish for one."""
    code += """
import sys, torch, transformers.modeling_utils as models
hooked = lambda: hasattr(models.PreTrainedModel.save_pretrained, "_is_hook_of_hf_kbit")
print("hf_kbit.integrations.transformers.quantizer" in sys.modules, hooked())
import hf_kbit
"""
    for made in ("hf_kbit.KbitLinear(8, 8)", "hf_kbit.KbitConfig()"):
        run = subprocess.run([sys.executable, "-c", f"{code}{made}; print(hooked())"], capture_output=True, text=True)
        assert run.stdout == "True False\nTrue\n", run.stderr


MODELS = "transformers.modeling_utils"
SLOW = {"torch", "transformers", MODELS, "peft", "torch._inductor", "hf_kbit.generation.fast_generate"}


@pytest.mark.parametrize("others", ["sys", "transformers", "torch, transformers"], ids=["alone", "lazy", "with torch"])
def test_what_takes_seconds_is_not_imported_at_once(others):
    code = f"import sys, {others}\nbefore = {SLOW} & sys.modules.keys()\nimport hf_kbit\n"
    code += f"print(before == {SLOW} & sys.modules.keys(), {MODELS!r} in before)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout == "True False\n", run.stderr


def test_models_that_are_not_quantized_are_compiled_as_without_us(fresh):
    """Inductor has our pass from the first quantized layer on that is traced, where a library joins products."""
    code = """
import os, sys, torch
import hf_kbit, transformers.modeling_utils
from torch import nn
from torch._inductor import config
from hf_kbit.ops import native
native.group_limits = lambda: (16, 4)
print("hf_kbit.generation.fast_generate" in sys.modules)
dense = nn.Linear(64, 64)
layers = dense, hf_kbit.KbitLinear.from_linear(dense).requires_grad_(False)
for layer in layers:
    layer(torch.ones(1, 64))
    print(config.post_grad_custom_pre_pass)
for layer in layers:
    torch.compile(layer, backend="aot_eager")(torch.ones(1, 64))
    print(type(config.post_grad_custom_pre_pass).__name__)
"""
    assert fresh.run(code).split() == ["False", "None", "None", "NoneType", "JoinProducts"]


@pytest.mark.parametrize(
    "place, home",
    [
        ("hf_kbit.integrations.transformers:KbitHfQuantizer", "quantizer"),
        ("hf_kbit.integrations.peft:KbitTunerLayer", "layer"),
        ("hf_kbit.integrations.peft:merge_and_unload", "merge"),
        ("hf_kbit.integrations.peft:prepare_model_for_kbit_training", "prepare"),
    ],
)
def test_names_of_the_time_when_an_integration_was_one_file(place, home):
    package, name = place.split(":")
    assert pkgutil.resolve_name(place) is pkgutil.resolve_name(f"{package}.{home}:{name}")
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        pkgutil.resolve_name(f"{package}:nothing")


def test_public_names():
    """Each is there, for type checkers too."""
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    typed = next(node for node in body if isinstance(node, ast.If))
    names = {alias.name for node in typed.body for alias in node.names}
    assert names == set(hf_kbit.__all__) and all(hasattr(hf_kbit, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'kbit_config'"):
        getattr(hf_kbit, "kbit_" + "config")


def test_old_names_warn():
    for old, new in hf_kbit._RENAMED.items():
        with pytest.warns(DeprecationWarning, match=f"hf_kbit.{old} is {new} now"):
            assert getattr(hf_kbit, old) is pkgutil.resolve_name(new)


def test_format_needs_the_standard_library_only():
    tree = ast.parse((PACKAGE / "format.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


ORDER = [
    "hooks",
    "format",
    "codebooks",
    "patterns",
    "durable",
    "transforms",
    "reference",
    "ops",
    "balance",
    "dynamic_range",
    "packed",
    "tensor",
    "tensor_ops",
    "nn",
    "stored",
    "config",
    "allocation",
    "checkpoint",
    "generation",
    "integrations",
    "calibration",
    "evaluation",
    "memory",
    "widths",
    "post_training",
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
