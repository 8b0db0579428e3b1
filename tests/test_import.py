"""Importing the package: what it registers, what it exports, and what it does without."""

import ast
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_kbit

PACKAGE = Path(hf_kbit.__file__).parent


def python(code: str) -> str:
    """What code prints in a process in which nothing was imported before, which takes seconds; see ``fresh`` too."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_registered_however_it_is_imported(fresh):
    """Before a model of Transformers is made, also without optional packages; hooks are set by the first layer, and by
    no wish for one."""
    after = """
import sys, torch, transformers.modeling_utils as models
hooked = lambda: hasattr(models.PreTrainedModel.save_pretrained, "_is_hook_of_hf_kbit")
print("hf_kbit.integrations.transformers.quantizer" in sys.modules, hooked())
import hf_kbit
"""
    by_layer = f"{after}hf_kbit.KbitLinear(8, 8)\nprint(hooked())"
    by_wish = f"{after}hf_kbit.KbitConfig()\nprint(hooked())"
    first = "import torch, hf_kbit; torch.ops.hf_kbit.quantize; from transformers import LlamaForCausalLM"
    second = "from transformers import LlamaForCausalLM; import hf_kbit"
    alone = "import sys; sys.modules.update(peft=None, accelerate=None); from hf_kbit.plan.config import KbitConfig"
    found = [python(first + by_layer), python(alone + by_wish), fresh.run(second + by_layer)]
    found += [fresh.run(f"import sys; sys.modules.update(peft=None); {second}{by_wish}")]
    assert found == ["True False\nTrue", "True False\nFalse"] * 2


def test_a_config_is_data():
    """Making one imports no layer, and changes nothing in other libraries."""
    code = """
import sys, transformers.quantizers.auto as auto
before = dict(vars(auto.AutoHfQuantizer))
from hf_kbit.plan.config import KbitConfig
KbitConfig(bits=3, embedding_bits=5)
print([name for name in sys.modules if name.startswith(("hf_kbit.nn", "hf_kbit.integrations"))])
print(before == dict(vars(auto.AutoHfQuantizer)))
"""
    assert python(code).splitlines() == ["[]", "True"]


MODELS = "transformers.modeling_utils"
SLOW = {"torch", "transformers", MODELS, "peft", "torch._inductor", "hf_kbit.generation.fast_generate"}


@pytest.mark.parametrize("others", ["sys", "torch, transformers"], ids=["alone", "with torch"])
def test_what_takes_seconds_is_not_imported_at_once(others):
    code = f"import sys, {others}\nbefore = {SLOW} & sys.modules.keys()\nimport hf_kbit\n"
    assert python(f"{code}print(before == {SLOW} & sys.modules.keys(), {MODELS!r} in before)") == "True False"


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


def test_names_of_the_time_when_an_integration_was_one_file():
    for package, home, name in (
        ("hf_kbit.integrations.transformers", "quantizer", "KbitHfQuantizer"),
        ("hf_kbit.integrations.peft", "layer", "KbitTunerLayer"),
        ("hf_kbit.integrations.peft", "merge", "merge_and_unload"),
        ("hf_kbit.integrations.peft", "prepare", "prepare_model_for_kbit_training"),
    ):
        assert pkgutil.resolve_name(f"{package}:{name}") is pkgutil.resolve_name(f"{package}.{home}:{name}")
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


def test_format_needs_the_standard_library_only():
    tree = ast.parse((PACKAGE / "format/spec.py").read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= sys.stdlib_module_names


def test_imports_run_one_way():
    """A module imports only what is before it in the order that CONTRIBUTING.md gives, or itself."""
    text = " ".join((PACKAGE.parent / "CONTRIBUTING.md").read_text().split())
    order = re.search(r"Imports run one way: ([\w, ]+)\.", text)[1].split(", ")
    for file in PACKAGE.rglob("*.py"):
        module = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        imports = re.findall(r"^ *from hf_kbit(?:\.(\w+)[\w.]*)? import (.*)$", file.read_text(), flags=re.MULTILINE)
        for home, names in imports if module != "__init__" else ():
            for name in [home] if home else re.findall(r"(\w+)(?: as \w+)?", names):
                assert order.index(name) <= order.index(module), f"{file.name}: {name}"
