"""The hooks into other libraries: that they hold, and what happens where a library is too old or has moved one."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import peft
import pytest

from hf_kbit.hooks import setting, table

TABLES = (
    table.TORCH_NAMES,
    table.TRANSFORMERS_NAMES,
    table.SHARDING_NAMES,
    table.GENERATION_NAMES,
    table.REGISTRATION_HOOKS,
    table.TRANSFORMERS_HOOKS,
    table.GENERATION_HOOKS,
    table.ACCELERATE_HOOKS,
    table.PEFT_NAMES,
    table.PEFT_HOOKS,
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


@pytest.mark.parametrize("entry", [entry for each in TABLES for entry in each], ids=repr)
def test_the_installed_libraries_have_what_we_expect(entry):
    assert setting.moved([entry]) == []


@pytest.mark.parametrize(
    "entry, found",
    [
        (table.Name("inspect:getsauce"), "inspect:getsauce (found none)"),
        (table.Name("no_such_module:f"), "no_such_module:f (found none)"),
        (
            table.Name("inspect:getsource", ("thing",)),
            "inspect:getsource (found parameters object, expected thing first)",
        ),
    ],
)
def test_what_moved_is_found(entry, found):
    assert setting.moved([entry]) == [found]


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


def test_the_import_of_transformers_goes_on():
    code = f"""
{CAUGHT}
import hf_kbit
import torch.autograd.forward_ad as forward
del forward._current_level
with caught():
    from transformers import LlamaForCausalLM
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert process.stdout.count("hf_kbit: models can be neither") == 1 and not process.returncode, process.stderr


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


def test_hooks_of_transformers_that_moved_cost_what_they_are_for(fresh, tmp_path):
    """Also where it is a file of ours that fails; all else works, and there is one warning."""
    code = f"""
{CAUGHT}
import sys
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
gather = PreTrainedModel.gather_sharded_state_dict_for_save
def moved(self, of, *others, **more):
    return gather(self, of, *others, **more)
PreTrainedModel.gather_sharded_state_dict_for_save = moved
sys.modules["hf_kbit.integrations.transformers.save_pretrained"] = None
with caught():
    import hf_kbit
    hf_kbit.KbitLinear(8, 8)
shape = dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_hidden_layers=1, vocab_size=64)
LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained({str(tmp_path / "dense")!r})
model = LlamaForCausalLM.from_pretrained({str(tmp_path / "dense")!r}, quantization_config=hf_kbit.KbitConfig())
model.save_pretrained({str(tmp_path / "kbit")!r})
"""
    (warned,) = fresh.run(code).splitlines()
    assert warned.startswith(
        "hf_kbit: saved files are not sealed, and parts of quantized models cannot be saved; quant"
    )
    for what in (
        "save_pretrained:wrap does not go with it",
        "gather_sharded_state_dict_for_save (found parameters self, of, others, more, expected ",
    ):
        assert what in warned
    assert {file.name for file in (tmp_path / "kbit").iterdir()} >= {"model.safetensors", "config.json"}


ADAPT = """
import torch
from torch import nn
def adapt():
    model = nn.Sequential(hf_kbit.KbitLinear.from_linear(nn.Linear(64, 64)))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    adapted(torch.ones(2, 64)).sum().backward()
    assert all(parameter.grad.any() for parameter in adapted.parameters() if parameter.requires_grad)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted.merge_and_unload()
        print("merged")
    except RuntimeError as error:
        print(error)
adapt()
"""
WARNED = "hf_kbit: adapters on quantized layers cannot be merged, and their experts not adapted: found "
REFUSED = "weight: found aten.add_.Tensor, which writes into a packed weight, expected reads"


def test_an_older_peft_trains_on_packed_weights_and_cannot_write_into_them(fresh, tmp_path):
    source = Path(importlib.util.find_spec("peft").origin).parent
    (tmp_path / "peft").mkdir()
    for file in source.iterdir():
        (tmp_path / "peft" / file.name).symlink_to(file)
    text = (source / "__init__.py").read_text().replace(f'"{peft.__version__}"', '"0.19.1"')
    (tmp_path / "peft/__init__.py").unlink()
    (tmp_path / "peft/__init__.py").write_text(text)
    code = f"""
{CAUGHT}
import sys; sys.path.insert(0, {str(tmp_path)!r})
with caught():
    import peft
    import hf_kbit
    hf_kbit.KbitLinear(8, 8)
from transformers import Trainer
assert peft.__version__ == "0.19.1"
{ADAPT}"""
    warned, refused = fresh.run(code).splitlines()
    assert warned == f"{WARNED}peft 0.19.1, expected 0.20 or newer: pip install -U peft" and REFUSED in refused


BROKEN = {
    "get_peft_mode (found none)": 'table.PEFT_HOOKS += (table.Hook("peft:get_peft_mode", (), "", ""),)',
    "our hf_kbit.integrations.peft.merge:report_once does not go": (
        'sys.modules["hf_kbit.integrations.peft.merge"] = type(sys)("hf_kbit.integrations.peft.merge")'
    ),
}


@pytest.mark.parametrize("found", BROKEN)
def test_a_moved_hook_of_peft_leaves_it_as_it_is(fresh, found):
    """Or a file of ours that does not suit it, whatever the error is."""
    code = f"""
{CAUGHT}
import sys
import hf_kbit
from hf_kbit.hooks import table
{BROKEN[found]}
hf_kbit.KbitLinear(8, 8)
with caught():
    import peft
{ADAPT}"""
    warned, refused = fresh.run(code).splitlines()
    assert warned.startswith(WARNED) and found in warned and REFUSED in refused


def test_an_import_that_fails_is_tried_again_with_hooks(fresh, tmp_path):
    """A library whose import fails at first is hooked into when it succeeds."""
    (tmp_path / "fickle.py").write_text("import sys\nif not hasattr(sys, 'ready'): raise ImportError('not ready')\n")
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from hf_kbit.hooks.importing import after_import
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
from hf_kbit.hooks import table
table.PEFT_HOOKS = tuple(
    dataclasses.replace(hook, parameters=("self", "moved")) if "save_pretrained" in hook.place else hook
    for hook in table.PEFT_HOOKS
)
hf_kbit.KbitLinear(8, 8)
with caught():
    import peft
{ADAPT}
print(hf_kbit.prepare_model_for_kbit_training is peft.prepare_model_for_kbit_training)
"""
    warned, *rest = fresh.run(code).splitlines()
    assert warned.startswith("hf_kbit: save_pretrained fails on adapters of packed tables, and on what FSDP2 has ")
    assert warned.count("expected self, moved first") == 1
    assert rest == ["merged", "True"]


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
for module in (hf_kbit, peft, hf_kbit.hooks.setting, hf_kbit):
    importlib.reload(module)
{RELOADED}
"""
    fresh.run(code)


def test_a_library_is_hooked_by_who_took_our_finder_out(fresh, tmp_path):
    """Another tool keeps the finders that it found, and asks them itself."""
    (tmp_path / "kept.py").touch()
    code = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r})
from hf_kbit.hooks.importing import after_import
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
{CAUGHT}
import importlib
import hf_kbit
from hf_kbit.hooks import table
oldest, table.OLDEST_PEFT = table.OLDEST_PEFT, "99"
hf_kbit.KbitLinear(8, 8)
with caught():
    import peft
    importlib.reload(peft)
{ADAPT}
table.OLDEST_PEFT = oldest
importlib.reload(peft)
adapt()
"""
    warned, refused, merged = fresh.run(code).splitlines()
    assert "expected 99 or newer" in warned and REFUSED in refused and merged == "merged"


@pytest.mark.parametrize("first", ["library", "hf_kbit"])
def test_threads_get_a_library_with_its_hooks(fresh, first, tmp_path):
    """Whether its import is under way when ours comes, or begins in two threads after it."""
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(0.2)\nhooked = False\n")
    code = f"""
import importlib, sys, threading; sys.path.insert(0, {str(tmp_path)!r})
from hf_kbit.hooks.importing import after_import
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
