"""The hooks into other libraries: that they hold, and what happens where a library is too old or has moved one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import peft
import pytest

from hf_kbit import hooks

TABLES = (
    hooks.TORCH_NAMES,
    hooks.TRANSFORMERS_NAMES,
    hooks.SHARDING_NAMES,
    hooks.GENERATION_NAMES,
    hooks.TRANSFORMERS_HOOKS,
    hooks.GENERATION_HOOKS,
    hooks.PEFT_NAMES,
    hooks.PEFT_HOOKS,
)

# Code: in ``with caught():`` warnings of ours are printed.
CAUGHT = """
import contextlib, warnings
@contextlib.contextmanager
def caught():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    print(*(w.message for w in found if "hf_kbit" in str(w.message)))
"""


@pytest.mark.parametrize("entry", [entry for table in TABLES for entry in table], ids=repr)
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


def test_moved_names_of_transformers_are_one_error_for_who_wants_quantized_models(fresh):
    code = f"""
{CAUGHT}
import transformers.core_model_loading as loading, transformers.quantizers.base as base
del loading.dot_natural_key
del base.HfQuantizer.param_element_size
with caught():
    import hf_kbit
for _ in range(2):
    try:
        hf_kbit.KbitConfig
    except ImportError as error:
        print(error)
"""
    warned, *raised = fresh.run(code).splitlines()
    assert raised == 2 * [warned.removeprefix("hf_kbit: models can be neither quantized nor loaded: ")]
    assert raised[0].startswith("transformers ") and "newer hf_kbit, or an older transformers" in raised[0]
    assert "core_model_loading:dot_natural_key (found none)" in raised[0]
    assert "HfQuantizer.param_element_size (found none)" in raised[0]


@pytest.mark.parametrize("name", ["_current_level", "make_dual"], ids=["in the table", "public"])
def test_the_import_of_transformers_goes_on(name):
    """Whatever our files miss. The name is one that only they use."""
    code = f"""
{CAUGHT}
import hf_kbit
import torch.autograd.forward_ad as forward
del forward.{name}
with caught():
    from transformers import LlamaForCausalLM
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.stdout.count("hf_kbit: models can be neither") == (name == "_current_level"), process.stderr
    assert process.returncode == 0


def test_moved_names_for_shards_cost_quantizing_into_them(fresh, tmp_path):
    code = f"""
{CAUGHT}
import transformers.distributed.sharding_utils as sharding
del sharding._dtensor_from_local_like
with caught():
    import hf_kbit
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig
shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=64)
LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained({str(tmp_path)!r})
how = dict(quantization_config=hf_kbit.KbitConfig())
print(type(LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, **how).model.layers[0].mlp.up_proj).__name__)
try:
    LlamaForCausalLM.from_pretrained({str(tmp_path)!r}, distributed_config=DistributedConfig(tp_size=1), **how)
except ImportError as error:
    print(error)
"""
    loaded, refused = fresh.run(code).splitlines()
    assert loaded == "KbitLinear" and "_dtensor_from_local_like (found none)" in refused
    assert "found names moved that quantizing into shards relies on" in refused


def test_moved_names_for_decoding_cost_decoding(fresh):
    code = f"""
{CAUGHT}
from transformers import GenerationMixin
del GenerationMixin._prefill
with caught():
    import hf_kbit
    print(hf_kbit.KbitConfig().bits)
for _ in range(2):
    try:
        hf_kbit.fast_generate
    except ImportError as error:
        print(error)
"""
    bits, first, second = filter(None, fresh.run(code).splitlines())  # no warning
    assert bits == "4" and first == second and "names moved that hf_kbit.fast_generate relies on" in first
    assert "GenerationMixin._prefill (found none)" in first


def test_a_file_of_ours_that_fails_costs_what_it_is_for(fresh):
    code = f"""
{CAUGHT}
import sys
sys.modules["hf_kbit.integrations.transformers.save_pretrained"] = None
with caught():
    import hf_kbit
    bits = hf_kbit.KbitConfig().bits
print(bits)
"""
    warned, bits = fresh.run(code).splitlines()
    assert warned.startswith("hf_kbit: saved files are not sealed, and parts of quantized models cannot be saved, for")
    assert "save_pretrained:wrap does not go with it" in warned and bits == "4"


def test_a_class_method_stays_one(fresh):
    """It is called on the class, on an object and on a class derived from it."""
    code = """
from transformers.quantizers.auto import AutoHfQuantizer
import hf_kbit
from transformers import Mxfp4Config
class Derived(AutoHfQuantizer): ...
config = hf_kbit.KbitConfig(bits=3)
for place in AutoHfQuantizer, AutoHfQuantizer(), Derived, Derived():
    print(place.merge_quantization_configs(config, None).bits, end=" ")
    print(place.merge_quantization_configs(Mxfp4Config(), config).bits, place.merge_quantization_configs.__self__)
"""
    base, derived = "<class 'transformers.quantizers.auto.AutoHfQuantizer'>", "<class '__main__.Derived'>"
    assert fresh.run(code).splitlines() == [f"3 3 {owner}" for owner in (base, base, derived, derived)]


def test_a_moved_hook_of_transformers_costs_what_it_is_for(fresh, tmp_path):
    code = f"""
{CAUGHT}
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
PreTrainedModel.set_use_kernels = lambda self, on, config=None: None
with caught():
    import hf_kbit
    hf_kbit.KbitConfig()
shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=64)
LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained({str(tmp_path / "dense")!r})
model = LlamaForCausalLM.from_pretrained({str(tmp_path / "dense")!r}, quantization_config=hf_kbit.KbitConfig())
model.save_pretrained({str(tmp_path / "kbit")!r})
"""
    printed = fresh.run(code)
    assert printed.startswith("hf_kbit: use_kernels=True on packed experts fails in a kernel, for in transformers ")
    assert (
        "set_use_kernels (found parameters self, on, config, expected " in printed and len(printed.splitlines()) == 1
    )
    assert {file.name for file in (tmp_path / "kbit").iterdir()} >= {"model.safetensors", "config.json"}


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
def test_an_older_peft_serves_models_without_quantized_layers(fresh, old_peft, first, second):
    code = f"""
import sys; sys.path.insert(0, {old_peft!r})
import {first}
import {second}
from transformers import Trainer
assert peft.__version__ == "0.19.1"
{ADAPT}"""
    adapted, refused = fresh.run(code).splitlines()
    assert adapted == "adapted"
    assert refused.startswith("0: found a quantized layer") and "found peft 0.19.1, expected 0.20 or newer" in refused


def test_a_moved_hook_of_peft_serves_models_without_quantized_layers(fresh):
    code = f"""
{CAUGHT}
import hf_kbit
from hf_kbit import hooks
hooks.PEFT_HOOKS = (*hooks.PEFT_HOOKS, hooks.Hook("peft:get_peft_mode", (), ""))
hf_kbit.KbitConfig()
with caught():
    import peft
{ADAPT}"""
    warned, adapted, refused = fresh.run(code).splitlines()
    assert warned.startswith("hf_kbit: adapters on quantized layers are refused") and "get_peft_mode (" in warned
    assert adapted == "adapted" and "get_peft_mode (found none)" in refused


def test_an_import_that_fails_is_tried_again_with_hooks(fresh, tmp_path):
    """A library whose import fails at first is hooked into when it succeeds."""
    (tmp_path / "fickle.py").write_text("import sys\nif not hasattr(sys, 'ready'): raise ImportError('not ready')\n")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from hf_kbit.hooks import after_import
after_import("fickle", lambda: print("hooked"))
try:
    import fickle
except ImportError as error:
    print(error)
sys.ready = True
import fickle
"""
    assert fresh.run(code).splitlines() == ["not ready", "hooked"]


def test_a_hook_of_peft_that_little_needs_is_left_out(fresh):
    """Adapters work, and one warning says what does not."""
    code = f"""
{CAUGHT}
import dataclasses
import hf_kbit
from hf_kbit import hooks
hooks.PEFT_HOOKS = tuple(
    dataclasses.replace(hook, parameters=("self", "moved")) if "save_pretrained" in hook.place else hook
    for hook in hooks.PEFT_HOOKS
)
hf_kbit.KbitConfig()
with caught():
    import peft
{ADAPT}
print(hf_kbit.prepare_model_for_kbit_training is peft.prepare_model_for_kbit_training)
"""
    warned, *rest = fresh.run(code).splitlines()
    assert warned.startswith("hf_kbit: save_pretrained fails on adapters of packed tables, and on what FSDP2 has ")
    assert warned.count("expected self, moved first") == 1
    assert rest == ["adapted", "adapted", "True"]


@pytest.mark.parametrize("first", ["hf_kbit", "peft"])
def test_either_import_may_come_first(fresh, first):
    """Also a function that was imported by name before is ours; and PEFT is imported by nobody but the program."""
    imports = ["import hf_kbit", "import peft; from peft import prepare_model_for_kbit_training as prepare"]
    if first == "hf_kbit":
        imports.insert(
            1, "import importlib.util, sys; importlib.util.find_spec('peft'); assert 'peft' not in sys.modules"
        )
    else:
        imports.reverse()
    code = "; ".join(imports)
    code += """
from torch import nn
model = nn.Sequential(hf_kbit.KbitLinear(32, 32, bits=3))
assert prepare is peft.prepare_model_for_kbit_training is peft.utils.other.prepare_model_for_kbit_training
assert prepare is hf_kbit.prepare_model_for_kbit_training
print(type(peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"])).base_model.model[0]).__name__)
"""
    assert fresh.run(code) == "KbitLoraLinear"


def test_our_names_that_need_peft_import_it(fresh):
    assert fresh.run("import hf_kbit, sys; hf_kbit.merge_and_unload; print('peft' in sys.modules)") == "True"


RELOADED = """
model = peft.get_peft_model(
    nn.Sequential(hf_kbit.KbitLinear.from_linear(nn.Linear(64, 64, bias=False)), nn.Linear(64, 64)),
    peft.LoraConfig(target_modules=["0"], init_lora_weights=False),
)
assert type(model.base_model.model[0]).__name__ == "KbitLoraLinear"
assert model.get_nb_trainable_parameters() == (2 * 8 * 64, 2 * 8 * 64 + 64 * 64 + 64 * 64 + 64)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.merge_and_unload()
assert len([w for w in caught if "hf_kbit: merged" in str(w.message)]) == 1
assert peft.prepare_model_for_kbit_training is hf_kbit.prepare_model_for_kbit_training
"""


def test_hooks_are_installed_once_whatever_is_reloaded(fresh):
    code = f"""
import importlib, warnings
import hf_kbit, peft
from torch import nn
for module in (hf_kbit, peft, hf_kbit.hooks, hf_kbit):
    importlib.reload(module)
{RELOADED}
"""
    fresh.run(code)


def test_a_library_is_hooked_by_who_took_our_finder_out(fresh, tmp_path):
    """Another tool keeps the finders that it found, and asks them itself."""
    (tmp_path / "kept.py").touch()
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from hf_kbit.hooks import after_import
after_import("kept", lambda: print("hooked"))
class Tool:
    finders = list(sys.meta_path)
    def find_spec(self, *args):
        return next(filter(None, (finder.find_spec(*args) for finder in self.finders)), None)
sys.meta_path[:] = [Tool(), *sys.meta_path[-1:]]
import kept
"""
    assert fresh.run(code) == "hooked"


def test_a_peft_that_suits_gets_hooks_after_one_that_did_not(fresh):
    """As in a notebook, where one is installed and imported anew."""
    code = f"""
import importlib, warnings
import hf_kbit
from hf_kbit import hooks
warnings.simplefilter("ignore")
oldest, hooks.OLDEST_PEFT = hooks.OLDEST_PEFT, "99"
import peft
importlib.reload(peft)
{ADAPT}
hooks.OLDEST_PEFT = oldest
importlib.reload(peft)
adapt(nn.Sequential(hf_kbit.KbitLinear.from_linear(nn.Linear(64, 64))))
"""
    adapted, refused, adapted_quantized = fresh.run(code).splitlines()
    assert adapted == adapted_quantized == "adapted" and "expected 99 or newer" in refused


@pytest.mark.parametrize("first", ["library", "hf_kbit"])
def test_threads_get_a_library_with_its_hooks(fresh, first, tmp_path):
    """Whether its import is under way when ours comes, or begins in two threads after it."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.2)\nhooked = False\n")
    code = f"""
import importlib, sys, threading; sys.path.insert(0, {str(tmp_path)!r})
from hf_kbit.hooks import after_import
def hook():
    assert not sys.modules["slow"].hooked
    sys.modules["slow"].hooked = True
def use():
    sys.stdout.write(f"{{importlib.import_module('slow').hooked}}\\n")  # at once, for two threads do
if {first!r} == "library":
    thread = threading.Thread(target=importlib.import_module, args=["slow"])
    thread.start()
    while "slow" not in sys.modules:
        pass
    after_import("slow", hook)
    use()
else:
    after_import("slow", hook)
    threads = [threading.Thread(target=use) for _ in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
"""
    assert fresh.run(code).split() == ["True"] * (1 if first == "library" else 2)


def test_a_warning_that_is_an_error_leaves_no_peft_without_hooks(fresh, old_peft):
    """The import fails, as the program wants; where it goes on regardless, quantized layers are refused."""
    code = f"""
import sys; sys.path.insert(0, {old_peft!r})
import warnings
import hf_kbit
hf_kbit.KbitConfig()
with warnings.catch_warnings():
    warnings.simplefilter("error", RuntimeWarning)
    try:
        import peft
    except RuntimeWarning as error:
        print(error)
warnings.simplefilter("ignore")
import peft
{ADAPT}"""
    warned, adapted, refused = fresh.run(code).splitlines()
    assert warned.startswith("hf_kbit: adapters on quantized layers are refused")
    assert adapted == "adapted" and refused.startswith("0: found a quantized layer")


def test_glue_that_fails_does_not_fail_the_import(fresh):
    """Whatever the error is: here PEFT lacks a name that our files take from it."""
    code = f"""
import sys, types, warnings
warnings.simplefilter("ignore")
import hf_kbit
broken = types.ModuleType("hf_kbit.integrations.peft.merge")
sys.modules["hf_kbit.integrations.peft.merge"] = broken
import peft
{ADAPT}"""
    adapted, refused = fresh.run(code).splitlines()
    assert adapted == "adapted" and "found that our hf_kbit.integrations.peft.merge:report_once does not go" in refused
