"""A checkpoint that does not fit is refused: the error names the tensor or key at fault, found and expected. Into
another class or shape what fits is loaded."""

import copy
import inspect
import json
import os
import re
import shutil

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, core_model_loading
from transformers.distributed import DistributedConfig

from hf_kbit import KbitConfig
from hf_kbit.format.model import ModelFormat
from hf_kbit.integrations.transformers.fit import saved_class

FILE = "model.safetensors"
NORM, EMBEDDING, HEAD = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"  # [64, 64] in 3 bits
ABSMAX, COLUMNS = WEIGHT + "_absmax", WEIGHT + "_columns"
TOKENS = torch.arange(12).reshape(2, 6)


def quantized(directory, **settings):
    """A Llama of two layers, 3 bits except for ``down_proj`` in 5; ``directory`` is for its 16-bit checkpoint."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=96, num_hidden_layers=2, **shape, **settings)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=KbitConfig(bits=3, module_bits={"down_proj": 5})
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return quantized(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of the saved model, to be damaged."""
    return shutil.copytree(saved, tmp_path / "checkpoint")


def tensors(change, sealed: bool = False):
    """What edits the dict of the tensors in a folder, and takes off the seal."""

    def damage(directory):
        found = load_file(directory / FILE)
        change(found)
        with safe_open(directory / FILE, "pt") as file:
            metadata = file.metadata() if sealed else {"format": "pt"}
        save_file(found, directory / FILE, metadata)

    return damage


def without(*names):
    return tensors(lambda stored: [stored.pop(name) for name in names])


DAMAGES = {
    "no weight": (without(WEIGHT), f"{WEIGHT}: missing, expected beside {ABSMAX}"),
    "no absmax": (without(ABSMAX), f"{ABSMAX}: missing, expected beside {WEIGHT}, which is I32 [64, 6]"),
    "narrow weight": (
        tensors(lambda stored: stored.update({WEIGHT: stored[WEIGHT][:, :-1].clone()})),
        f"{WEIGHT}: found I32 [64, 5], expected I32 [64, 6]",
    ),
    "absmax of a float layer": (
        tensors(lambda stored: stored.update({f"{HEAD}_absmax": torch.zeros(96, 2, dtype=torch.uint8)})),
        f"{HEAD}: found BF16 [96, 64], expected I32 [96, 6]",
    ),
    "columns of a float layer": (
        tensors(lambda stored: stored.update({f"{HEAD}_columns": stored[COLUMNS].clone()})),
        f"{HEAD}_absmax: missing, expected beside {HEAD}_columns",
    ),
}


def refused(folder, parts, kind=AutoModelForCausalLM, **options):
    with pytest.raises(ValueError) as error:
        kind.from_pretrained(folder, **options)
    assert all(part in str(error.value) for part in parts) and len(str(error.value)) < 12_000, error.value


@pytest.mark.parametrize("damage", [damage for damage in DAMAGES if "float layer" in damage])
def test_packed_tensors_of_what_is_not_packed_are_refused(checkpoint, damage):
    apply, *parts = DAMAGES[damage]
    apply(checkpoint)
    refused(checkpoint, parts)


def test_an_undamaged_checkpoint_loads(model, checkpoint, tmp_path):
    """Also without digests, and from several files, of which a missing one is named."""
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    tensors(lambda stored: None)(checkpoint)
    for folder in (checkpoint, tmp_path / "sharded"):
        reloaded = AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)
        assert torch.equal(reloaded(TOKENS).logits, model(TOKENS).logits)
    index = json.loads((tmp_path / "sharded" / f"{FILE}.index.json").read_text())
    (shard := tmp_path / "sharded" / index["weight_map"][WEIGHT]).unlink()
    with pytest.raises((OSError, ValueError), match=re.escape(shard.name)):
        AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")


# --- another class or config than the one that was saved -------------------------------------------

OTHER_CLASSES = ["LlamaModel", "LlamaForSequenceClassification"]


@pytest.mark.parametrize("damage", ["none", "no weight", "no absmax", "narrow weight", "sealed"])
@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_a_model_of_another_class_takes_what_it_needs(model, checkpoint, name, damage):
    """And does not make up what is missing of packed layers, or of a checkpoint with a seal."""
    if damage == "none":
        other = getattr(transformers, name).from_pretrained(checkpoint)
        hidden = getattr(other, "model", other)(TOKENS).last_hidden_state
        assert torch.equal(hidden, model.model(TOKENS).last_hidden_state)
        return
    lost = tensors(lambda stored: stored.pop(NORM), sealed=True), "found kbit_tensors", "or a tensor changed"
    apply, *parts = DAMAGES[damage] if damage in DAMAGES else lost
    apply(checkpoint)
    refused(checkpoint, parts, getattr(transformers, name))


def test_a_missing_tensor_is_seen_without_architectures_in_the_config(checkpoint):
    file = checkpoint / "config.json"
    content = json.loads(file.read_text())
    del content["architectures"]
    file.write_text(json.dumps(content))
    assert AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    without(NORM)(checkpoint)
    refused(checkpoint, [f"{NORM}: missing"], dtype=torch.float32, attn_implementation="eager")


def test_a_tied_weight_is_missing_when_no_name_of_it_is_stored(tmp_path):
    quantized(tmp_path / "dense", tie_word_embeddings=True).save_pretrained(tmp_path / "saved")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / FILE)
    without(EMBEDDING)(tmp_path / "saved")
    refused(tmp_path / "saved", [f"{EMBEDDING}: missing, expected"])


@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_layers(model, checkpoint, layers):
    """As with any checkpoint: what is too much is left, what is missing is made, and Transformers reports both. Packed
    layers must be whole all the same."""
    other, info = AutoModelForCausalLM.from_pretrained(checkpoint, num_hidden_layers=layers, output_loading_info=True)
    named = info["unexpected_keys" if layers == 1 else "missing_keys"]
    assert named and all(f"layers.{min(layers, 2)}." in name for name in named)
    hidden, expected = (m.model(TOKENS, output_hidden_states=True).hidden_states[1] for m in (other, model))
    if layers > 1:  # else the norm at the end comes at once
        assert torch.equal(hidden, expected)
    apply, *parts = DAMAGES["narrow weight"]
    apply(checkpoint)
    refused(checkpoint, parts, num_hidden_layers=layers, ignore_mismatched_sizes=True)


@pytest.fixture(scope="module")
def classifiers(model, tmp_path_factory):
    """Two quantized classifiers of three labels, the head in 16 and in 3 bits."""
    directory = tmp_path_factory.mktemp("classifiers")
    kind, source = transformers.LlamaForSequenceClassification, model.name_or_path
    kind.from_pretrained(source, num_labels=3).save_pretrained(directory / "dense")
    for name, options in (("plain", {}), ("packed", {"module_bits": {"score": 3}})):
        config = KbitConfig(bits=3, **options)
        kind.from_pretrained(directory / "dense", quantization_config=config).save_pretrained(directory / name)
    return directory


HONOURED = "param_needs_quantization" in inspect.getsource(core_model_loading.set_param_for_module)  # not in 5.17


@pytest.mark.parametrize("options", [{}, {"quantization_config": KbitConfig(bits=3)}], ids=["quantized", "quantizing"])
def test_ignore_mismatched_sizes(classifiers, options):
    load = transformers.LlamaForSequenceClassification.from_pretrained
    path, options = classifiers / ("dense" if options else "plain"), {"num_labels": 5, **options}
    with pytest.raises((RuntimeError, ValueError), match="ignore_mismatched_sizes"):
        load(path, **options)
    if HONOURED:
        other = load(path, ignore_mismatched_sizes=True, **options)
        assert other.score.weight.shape == (5, 64) and type(other.score) is torch.nn.Linear
        assert torch.equal(other.model(TOKENS)[0], load(classifiers / "plain").model(TOKENS)[0])
    else:
        with pytest.raises(ValueError, match=r"score.weight: found shape \[3, 64\], expected \[5, 64\]"):
            load(path, ignore_mismatched_sizes=True, **options)


def test_packed_tensors_must_fit(classifiers):
    """And those that are to be packed."""
    kind, config = transformers.LlamaForSequenceClassification, KbitConfig(bits=3, module_bits={"score": 3})
    for options in ({"num_labels": 5}, {"num_labels": 5, "ignore_mismatched_sizes": True}):
        refused(classifiers / "packed", ["score.weight: found I32 [3, 6], expected I32 [5, 6] for"], kind, **options)
        found = ["score.weight: found shape [3, 64], expected [5, 64]"]
        refused(classifiers / "dense", found, kind, quantization_config=config, **options)


def test_a_config_in_the_config_of_the_model_quantizes(model):
    """Only a quantizer writes levels: without them the config says what is to be done, not what was done."""
    config = transformers.AutoConfig.from_pretrained(model.name_or_path)
    config.quantization_config = KbitConfig(bits=3, module_bits={"down_proj": 5})
    other = AutoModelForCausalLM.from_pretrained(model.name_or_path, config=config)
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)
    with pytest.raises(ValueError, match="device_map: found layers on disk"):
        AutoModelForCausalLM.from_pretrained(model.name_or_path, config=config, device_map={"": "disk"})


def test_16_bit_tensors_under_a_quantized_config_are_refused(model, checkpoint):
    shutil.copy(os.path.join(model.name_or_path, FILE), checkpoint)
    refused(checkpoint, [f"{FILE}: found no packed tensor, expected those that quantization_config"])


def test_only_classes_of_models_are_taken():
    for value in (5, [5], {}, "LlamaForCausalLM", [None]):
        with pytest.raises(ValueError, match=r"architectures: found .* in config\.json, expected a list of names"):
            saved_class(value)
    for names in (None, [], ["NoSuchModel"], ["pipeline"], ["LlamaConfig"]):
        assert saved_class(names) is None
    assert saved_class(["LlamaModel"]) is transformers.LlamaModel


# --- quantizing on several processes ----------------------------------------------------------------

SIZES = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "complaint"),
    [
        ("LlamaForCausalLM", {"pp_size": 2}, {}, "distributed_config: found pp_size=2, expected none"),
        # A head that the checkpoint has not, and each process would draw: one process leaves it, to be trained.
        *(
            ("LlamaForCausalLM", sizes, {"skip_default_modules": False}, r"lm_head\.weight: not in the checkpoint")
            for sizes in ({"tp_size": 2}, {"fsdp_size": 2})
        ),
        # A tensor that would be read whole for q_proj, and in parts for k_proj.
        (
            "NomicBertModel",
            {"tp_size": 2},
            {"modules_to_not_convert": ["k_proj"]},
            r"k_proj\.weight: found it left in 16 bits, expected it quantized as what is in .*Wqkv\.weight with it",
        ),
    ],
)
def test_what_processes_cannot_share_is_refused(kind, sizes, options, complaint, monkeypatch, tmp_path):
    """Before a weight is read, here by processes that are not there."""
    base = transformers.LlamaModel if kind == "LlamaForCausalLM" else transformers.NomicBertModel
    base(base.config_class(**SIZES, num_attention_heads=2)).save_pretrained(tmp_path)

    def prepare(cls, config, device_map=None, **kwargs):
        return config, device_map, None

    monkeypatch.setattr(transformers.PreTrainedModel, "prepare_distribute_model", classmethod(prepare))
    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", None)
    options = {"quantization_config": KbitConfig(**options), "distributed_config": DistributedConfig(**sizes)}
    with pytest.raises(ValueError, match=complaint):
        getattr(transformers, kind).from_pretrained(tmp_path, **options)


# --- no file at all --------------------------------------------------------------------------------


def test_a_state_dict_in_memory(tmp_path):
    """Widths and exponents of single layers come from the config alone; a forgotten one would be silent garbage."""
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2))
    with torch.no_grad():
        dense.model.layers[1].mlp.up_proj.weight *= 2.0**-12
    dense.save_pretrained(tmp_path)
    options = KbitConfig(bits=3, module_bits={"layers.0": None, "down_proj": 5, "o_proj": None})
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=options)
    assert model.model.layers[1].mlp.up_proj.decoding.exponent < 0
    model.save_pretrained(tmp_path / "saved")
    config = LlamaConfig.from_pretrained(tmp_path / "saved")  # JSON sorts keys, but the order of patterns decides
    for other in (LlamaForCausalLM, transformers.LlamaModel):
        loaded = other.from_pretrained(None, config=config, state_dict=model.state_dict())
        hidden = getattr(loaded, "model", loaded)(TOKENS).last_hidden_state
        assert torch.equal(hidden, model.model(TOKENS).last_hidden_state)


# --- saving again ---------------------------------------------------------------------------------


def test_another_config_object_is_saved_with_what_decodes(model, tmp_path):
    model = copy.deepcopy(model)
    model.config = copy.deepcopy(model.config)
    model.config.quantization_config.stored = ModelFormat(3, {}, {})
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits, model(TOKENS).logits)


def test_what_files_say_of_a_model_is_not_taken_to_quantize_another(model, saved, tmp_path):
    """Though the config of a quantized model is; the user's own stays as it is."""
    wish = copy.deepcopy(AutoModelForCausalLM.from_pretrained(saved).config.quantization_config)
    levels = wish.stored.levels
    object.__setattr__(wish.stored, "levels", {3: (-1.0,) * 7 + (1.0,), 5: (-1.0,) * 31 + (1.0,)})
    other = AutoModelForCausalLM.from_pretrained(model.name_or_path, quantization_config=wish)
    assert other.config.quantization_config.stored.levels == levels != wish.stored.levels
    assert torch.equal(other(TOKENS).logits, model(TOKENS).logits)


# --- without hf_kbit ------------------------------------------------------------------------------


def test_without_the_import_loading_stops(saved, fresh):
    """What the documentation and the model card promise to those who forget ``import hf_kbit``."""
    printed = fresh.run(f"""
import os
os.environ["COLUMNS"] = "200"
os.dup2(1, 2)
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained({str(saved)!r})
except RuntimeError as error:
    print(error)
""")
    assert "Unknown quantization type, got kbit" in printed
    # The load report lists every scale as UNEXPECTED and every packed weight as MISMATCH.
    assert re.search(r"self_attn\.q_proj\.weight_absmax\S* *\| *UNEXPECTED", printed), printed
    assert re.search(r"self_attn\.q_proj\.weight *\| *MISMATCH", printed), printed
    assert "You set `ignore_mismatched_sizes` to `False`" in printed
