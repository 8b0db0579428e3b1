"""The hooks into other libraries: that they hold, and what happens where a library is too old or has moved one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import peft
import pytest

from hf_kbit.integrations import hooks


def run(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize(
    "entry", [*hooks.TRANSFORMERS_NAMES, *hooks.TRANSFORMERS_HOOKS, *hooks.PEFT_NAMES, *hooks.PEFT_HOOKS], ids=repr
)
def test_the_installed_libraries_have_what_we_expect(entry):
    assert hooks.moved([entry]) == []


@pytest.mark.parametrize(
    "entry, found",
    [
        (hooks.Name("inspect:getsauce"), "inspect:getsauce (found none)"),
        (hooks.Name("no_such_module:f"), "no_such_module:f (found none)"),
        (
            hooks.Name("inspect:getsource", ("thing",)),
            "inspect:getsource (found parameters object, expected thing first)",
        ),
    ],
)
def test_what_moved_is_found(entry, found):
    assert hooks.moved([entry]) == [found]


def test_a_moved_name_of_transformers_is_one_import_error():
    code = """
import transformers.core_model_loading as loading, transformers.quantizers.base as base
del loading.dot_natural_key
del base.HfQuantizer.param_element_size
try:
    import hf_kbit
except ImportError as error:
    print(error)
"""
    message = run(code)
    assert message.startswith("transformers ") and "newer hf_kbit, or an older transformers" in message
    assert "core_model_loading:dot_natural_key (found none)" in message
    assert "HfQuantizer.param_element_size (found none)" in message


def test_a_moved_hook_of_transformers_costs_the_model_card_alone(tmp_path):
    code = f"""
import warnings
import transformers.utils.hub as hub
del hub.PushToHubMixin._upload_modified_files
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import hf_kbit
print([str(w.message) for w in caught if "hf_kbit" in str(w.message)])
from transformers import LlamaConfig, LlamaForCausalLM
shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=64)
LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained({str(tmp_path / "dense")!r})
model = LlamaForCausalLM.from_pretrained({str(tmp_path / "dense")!r}, quantization_config=hf_kbit.KbitConfig())
model.save_pretrained({str(tmp_path / "kbit")!r})
"""
    printed = run(code)
    assert "saved models get no model card" in printed and "_upload_modified_files (found none)" in printed
    saved = {file.name for file in (tmp_path / "kbit").iterdir()}
    assert "model.safetensors" in saved and "README.md" not in saved


@pytest.fixture(scope="module")
def old_peft(tmp_path_factory) -> str:
    """A folder with a copy of PEFT that says it is 0.19, of links to its files."""
    source = Path(importlib.util.find_spec("peft").origin).parent
    folder = tmp_path_factory.mktemp("old")
    (folder / "peft").mkdir()
    for file in source.iterdir():
        (folder / "peft" / file.name).symlink_to(file)
    text = (source / "__init__.py").read_text()
    (folder / "peft/__init__.py").unlink()
    (folder / "peft/__init__.py").write_text(
        text.replace(f'__version__ = "{peft.__version__}"', '__version__ = "0.19.1"')
    )
    return str(folder)


ADAPT = """
from torch import nn
def adapt(model):
    try:
        peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"]))
        print("adapted")
    except ImportError as error:
        print(error)
adapt(nn.Sequential(nn.Linear(64, 64)))
adapt(nn.Sequential(hf_kbit.KbitLinear.from_linear(nn.Linear(64, 64))))
"""


@pytest.mark.parametrize("first, second", [("hf_kbit", "peft"), ("peft", "hf_kbit")])
def test_an_older_peft_serves_models_without_quantized_layers(old_peft, first, second):
    code = f"""
import sys; sys.path.insert(0, {old_peft!r})
import {first}
import {second}
from transformers import Trainer
assert peft.__version__ == "0.19.1"
{ADAPT}"""
    adapted, refused = run(code).splitlines()
    assert adapted == "adapted"
    assert refused.startswith("0: found a quantized layer") and "found peft 0.19.1, expected 0.20 or newer" in refused


def test_a_moved_hook_of_peft_serves_models_without_quantized_layers():
    code = f"""
import sys, warnings
import hf_kbit
from hf_kbit.integrations import hooks
hooks.PEFT_HOOKS = (*hooks.PEFT_HOOKS, hooks.Hook("peft:get_peft_mode", (), ""))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import peft
print(*(w.message for w in caught if "hf_kbit" in str(w.message)))
{ADAPT}"""
    warned, adapted, refused = run(code).splitlines()
    assert warned.startswith("hf_kbit: adapters on quantized layers are refused") and "get_peft_mode (" in warned
    assert adapted == "adapted" and "get_peft_mode (found none)" in refused


def test_an_import_that_fails_is_tried_again_with_hooks(tmp_path):
    """A library whose import fails at first is hooked into when it succeeds."""
    (tmp_path / "fickle.py").write_text("import sys\nif not hasattr(sys, 'ready'): raise ImportError('not ready')\n")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from hf_kbit.integrations.hooks import after_import
after_import("fickle", lambda: print("hooked"))
try:
    import fickle
except ImportError as error:
    print(error)
sys.ready = True
import fickle
"""
    assert run(code).splitlines() == ["not ready", "hooked"]
