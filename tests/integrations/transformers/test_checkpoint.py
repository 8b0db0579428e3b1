"""A damaged checkpoint is refused with an error that names the tensor, file or key at fault, found and expected.

Each case takes a saved quantized model and changes one thing in it. Nothing here is random.
"""

import copy
import inspect
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, core_model_loading
from transformers.distributed import DistributedConfig

from hf_kbit import KbitConfig
from hf_kbit.integrations.transformers.checkpoint import saved_class

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
WEIGHT = "model.layers.0.self_attn.q_proj.weight"  # [64, 64] in 3 bits
ABSMAX = WEIGHT + "_absmax"
COLUMNS = WEIGHT + "_columns"
OTHER_WEIGHT = "model.layers.2.self_attn.q_proj.weight"  # of a layer that the model has not
OTHER_ABSMAX = OTHER_WEIGHT + "_absmax"
DOWN_PROJ = "model.layers.0.mlp.down_proj"  # [64, 96] in 5 bits
TOKENS = torch.arange(12).reshape(2, 6)


def quantized(directory, **settings):
    """A Llama of two layers, 3 bits except for ``down_proj`` in 5; ``directory`` is for its 16-bit checkpoint."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )
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


@pytest.fixture
def sharded(model, tmp_path):
    """The saved model in several files."""
    directory = tmp_path / "sharded"
    model.save_pretrained(directory, max_shard_size="20KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 2
    return directory


# --- how to damage a checkpoint: functions of its directory ---------------------------------------


def edit_tensors(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def tensors(change):
    """``change`` edits the dict of the tensors."""
    return lambda directory: edit_tensors(directory / "model.safetensors", change)


def without(*names):
    return tensors(lambda stored: [stored.pop(name) for name in names])


def store(name, make):
    """``make`` computes from the dict of the tensors what is stored under ``name``."""
    return tensors(lambda stored: stored.update({name: make(stored).contiguous()}))


def config(change):
    """``change`` edits the quantization_config."""

    def damage(directory):
        file = directory / "config.json"
        content = json.loads(file.read_text())
        change(content["quantization_config"])
        file.write_text(json.dumps(content))

    return damage


def key(name, value):
    return config(lambda entries: entries.update({name: value}))


def levels(bits, change):
    """``change`` computes the levels of a width from those saved."""
    return config(lambda entries: entries["levels"].update({bits: change(entries["levels"][bits])}))


def layer(**entry):
    """Changes what config.json says of the one layer ``DOWN_PROJ``."""
    return config(lambda entries: entries["layers"][DOWN_PROJ].update(entry))


def contents(change):
    """``change`` computes the bytes of the file from those saved."""

    def damage(directory):
        file = directory / "model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return damage


def header(change):
    """``change`` edits the dict in the safetensors header, or returns what stands in its place."""

    def damage(data):
        end = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:end])
        text = json.dumps(change(entries) or entries).encode()
        return len(text).to_bytes(8, "little") + text + data[end:]

    return contents(damage)


def entry(name, **fields):
    """Changes what the safetensors header says of one tensor."""
    return header(lambda entries: entries[name].update(fields))


def as_pytorch_file(directory):
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


# --- one file -------------------------------------------------------------------------------------

FILE = "model.safetensors"

FILES = {
    "cut in the data": (
        contents(lambda data: data[:-1]),
        FILE,
        "cut short at tensor model.layers.1",
        " bytes, expected ",
    ),
    "cut to half": (contents(lambda data: data[: len(data) // 2]), FILE, "cut short at tensor ", " bytes, expected "),
    "cut in the header": (contents(lambda data: data[:100]), FILE, "damaged or cut short"),
    "cut in the length": (contents(lambda data: data[:5]), FILE, "damaged or cut short"),
    "empty": (contents(lambda data: b""), FILE, "damaged or cut short"),
    "length garbage": (contents(lambda data: b"\xff" * 8 + data[8:]), FILE, "damaged or cut short"),
    "header garbage": (contents(lambda data: data[:8] + b"\xff" * len(data)), FILE, "damaged or cut short"),
    "header no JSON": (contents(lambda data: data[:8] + b"{" * len(data)), FILE, "damaged or cut short"),
    "header deep": (
        contents(lambda data: (10**6).to_bytes(8, "little") + b"[" * 10**6),
        FILE,
        "damaged or cut short",
    ),
    "header a list": (header(lambda entries: [1]), FILE),
    "header without an entry": (header(lambda entries: entries.update({WEIGHT: None})), FILE),
    "header without offsets": (header(lambda entries: entries[WEIGHT].pop("data_offsets") and None), FILE),
    "header without dtype": (header(lambda entries: entries[WEIGHT].pop("dtype") and None), FILE),
    "header with a number for a shape": (entry(WEIGHT, shape=384), FILE),
    "header with an unknown dtype": (entry(NORM, dtype="I3"), FILE),
    "offsets too close": (entry(WEIGHT, data_offsets=[0, 4]), FILE),
    "bytes of no tensor": (contents(lambda data: data + b"\0" * 4), FILE),
    "PyTorch file": (as_pytorch_file, "pytorch_model.bin: found another format", "expected safetensors"),
}

TENSORS = {
    "no weight": (without(WEIGHT), f"{WEIGHT}: missing, expected beside {ABSMAX}"),
    "no absmax": (without(ABSMAX), f"{ABSMAX}: missing, expected beside {WEIGHT}, which is I32 [64, 6]"),
    "no pair": (without(WEIGHT, ABSMAX), f"{WEIGHT}: missing, expected "),
    "no pair of another width": (
        without(f"{DOWN_PROJ}.weight", f"{DOWN_PROJ}.weight_absmax"),
        f"{DOWN_PROJ}.weight: missing, expected ",
    ),
    "no norm": (without(NORM), f"{NORM}: missing, expected shape [64]"),
    "no output embedding": (without("lm_head.weight"), "lm_head.weight: missing, expected shape [96, 64]"),
    "extra float tensor": (
        store("model.layers.0.extra.weight", lambda stored: torch.zeros(3)),
        "model.layers.0.extra.weight: left over",
    ),
    "extra bias": (
        store("model.layers.0.self_attn.q_proj.bias", lambda stored: torch.zeros(64)),
        "model.layers.0.self_attn.q_proj.bias: left over",
    ),
    "extra pair": (
        tensors(lambda stored: stored.update({OTHER_WEIGHT: stored[WEIGHT] + 0, OTHER_ABSMAX: stored[ABSMAX] + 0})),
        f"{OTHER_WEIGHT}: left over",
        f"{OTHER_ABSMAX}: left over",
    ),
    "extra weight": (store(OTHER_WEIGHT, lambda stored: stored[WEIGHT] + 0), f"{OTHER_ABSMAX}: missing"),
    "extra absmax": (store(OTHER_ABSMAX, lambda stored: stored[ABSMAX] + 0), f"{OTHER_WEIGHT}: missing"),
    "extra absmax of a norm": (store(f"{NORM}_absmax", lambda stored: stored[ABSMAX] + 0), f"{NORM}_absmax"),
    "extra absmax of a float layer": (
        store("lm_head.weight_absmax", lambda stored: torch.zeros(96, 2, dtype=torch.uint8)),
        "lm_head.weight: found BF16 [96, 64], expected I32 [96, 6]",
    ),
    "narrow weight": (
        store(WEIGHT, lambda stored: stored[WEIGHT][:, :-1]),
        f"{WEIGHT}: found I32 [64, 5], expected I32 [64, 6]",
    ),
    "transposed weight": (
        store(WEIGHT, lambda stored: stored[WEIGHT].T),
        f"{WEIGHT}: found I32 [6, 64], expected I32 [64, 6]",
    ),
    "flat weight": (
        store(WEIGHT, lambda stored: stored[WEIGHT].flatten()),
        f"{WEIGHT}: found I32 [384], expected I32 [64, 6]",
    ),
    "short absmax": (
        store(ABSMAX, lambda stored: stored[ABSMAX][:-1]),
        f"{ABSMAX}: found U8 [63, 2], expected U8 [64, 2]",
    ),
    "short norm": (store(NORM, lambda stored: stored[NORM][:32]), f"{NORM}: found BF16 [32], expected ", "[64]"),
    "float weight": (
        store(WEIGHT, lambda stored: stored[WEIGHT].float()),
        f"{WEIGHT}: found F32 [64, 6], expected I32 [64, 6]",
    ),
    "int64 weight": (
        store(WEIGHT, lambda stored: stored[WEIGHT].long()),
        f"{WEIGHT}: found I64 [64, 6], expected I32 [64, 6]",
    ),
    "int8 absmax": (
        store(ABSMAX, lambda stored: stored[ABSMAX].view(torch.int8)),
        f"{ABSMAX}: found I8 [64, 2], expected U8 [64, 2]",
    ),
    "no columns": (without(COLUMNS), f"{COLUMNS}: found none, expected U8 [64] for a [64, 64] weight in 3 bits"),
    "columns alone": (without(WEIGHT, ABSMAX), f"{WEIGHT}: missing, expected ", f"{COLUMNS}: "),
    "extra columns of a float layer": (
        store("lm_head.weight_columns", lambda stored: stored[COLUMNS] + 0),
        "lm_head.weight.columns: left over",
    ),
    "short columns": (
        store(COLUMNS, lambda stored: stored[COLUMNS][:-1]),
        f"{COLUMNS}: found U8 [63], expected U8 [64]",
    ),
    "columns of each row": (
        store(COLUMNS, lambda stored: stored[COLUMNS].repeat(64, 1)),
        f"{COLUMNS}: found U8 [64, 64], expected U8 [64]",
    ),
    "float columns": (
        store(COLUMNS, lambda stored: stored[COLUMNS].float()),
        f"{COLUMNS}: found F32 [64], expected U8 [64]",
    ),
    "int8 columns": (
        store(COLUMNS, lambda stored: stored[COLUMNS].view(torch.int8)),
        f"{COLUMNS}: found I8 [64], expected U8 [64]",
    ),
    "int64 norm": (store(NORM, lambda stored: stored[NORM].long()), f"{NORM}: found I64 [64], expected "),
    "int64 embedding": (
        store(EMBEDDING, lambda stored: stored[EMBEDDING].long()),
        f"{EMBEDDING}: found I64 [96, 64], expected ",
    ),
}

CONFIGS = {
    "bits": (key("bits", 5), f"{WEIGHT}: found I32 [64, 6], expected I32 [64, 10]"),
    "bits without levels": (key("bits", 4), ": found ", ", expected "),
    "bits out of range": (key("bits", 6), "bits: found 6, expected one of 2, 3, 4, 5"),
    "no bits": (config(lambda entries: entries.pop("bits")), ": found ", ", expected "),
    "bits of a layer": (layer(bits=3), f"{DOWN_PROJ}.weight: found I32 [64, 15], expected I32 [64, 9]"),
    "no entry of a layer": (
        config(lambda entries: entries["layers"].pop(DOWN_PROJ)),
        f"{DOWN_PROJ}.weight: found I32 [64, 15], expected I32 [64, 9]",
    ),
    "format_version": (key("format_version", 3), "format_version: found 3, expected one of [1, 2]"),
    "format_version as text": (key("format_version", "1"), "format_version: found '1', expected one of [1, 2]"),
    "format_version of old": (key("format_version", 1), f"{COLUMNS}: found U8 [64], expected none"),
    "transform": (key("transform", "none"), f"{COLUMNS}: found U8 [64], expected none for a [64, 64] weight"),
    "unknown transform": (key("transform", "whitened"), "transform: found 'whitened', expected one of"),
    "transform of a layer": (layer(transform="none"), f"{DOWN_PROJ}.weight_columns: found U8 [96], expected none"),
    "unknown transform of a layer": (layer(transform=1), f"layers['{DOWN_PROJ}'].transform: found 1, expected one of"),
    "levels of another count": (
        levels("3", lambda table: table[:-1]),
        "levels[3]: found 7 levels, expected 2**bits = 8",
    ),
    "NaN in levels": (levels("3", lambda table: [*table[:-1], float("nan")]), "levels[3]: found", "nan", "finite"),
    "text in levels": (levels("3", lambda table: "abcdefgh"), "levels[3]: found"),
    "a number for levels": (levels("3", lambda table: 1.0), "levels[3]: found"),
    "levels in another order": (levels("3", lambda table: table[::-1]), "levels[3]: found", "expected"),
    "levels of another scale": (levels("3", lambda table: [2 * x for x in table]), "levels[3]: found", "expected"),
    "levels of no width": (config(lambda entries: entries["levels"].update({"x": [1.0]})), "levels", "'x'"),
    "no levels": (config(lambda entries: entries.pop("levels")), "levels: found", "expected"),
    "null for levels": (key("levels", None), "levels: found", "expected"),
    "no levels of a width": (config(lambda entries: entries["levels"].pop("5")), "levels: found", "expected", "5"),
    "levels a list": (key("levels", [1.0]), "levels: found [1.0], expected"),
    "unknown key": (key("group_size", 64), "group_size", "expected"),
    "unknown layer": (
        config(lambda entries: entries["layers"].update({"model.layers.7.mlp.up_proj": {"bits": 4}})),
        "model.layers.7.mlp.up_proj: in layers of the quantization config, not in the checkpoint",
    ),
    "layer that is not quantized": (
        config(lambda entries: entries["layers"].update({"lm_head": {"exponent": 1}})),
        "lm_head: in layers of the quantization config, not in the checkpoint",
    ),
    "no layers, of the wrong type": (key("layers", False), "layers: found False, expected"),
    "layers a list": (key("layers", [DOWN_PROJ]), f"layers: found ['{DOWN_PROJ}'], expected"),
    "layer without an entry": (
        config(lambda entries: entries["layers"].update({DOWN_PROJ: None})),
        f"layers['{DOWN_PROJ}']: found None, expected",
    ),
    "unknown key of a layer": (layer(group=1), f"layers['{DOWN_PROJ}']: found ['group'], expected"),
    "fractional exponent": (layer(exponent=1.5), f"layers['{DOWN_PROJ}'].exponent: found 1.5, expected"),
    "huge exponent": (layer(exponent=5000), f"layers['{DOWN_PROJ}'].exponent: found 5000, expected"),
    "levels of a layer": (layer(levels=[1, 2]), DOWN_PROJ, "found 2 levels, expected 2**bits = 32"),
}


@pytest.mark.parametrize("damage", [pytest.param(case, id=name) for name, case in (FILES | TENSORS | CONFIGS).items()])
def test_a_damaged_checkpoint_is_refused(checkpoint, damage):
    apply, *parts = damage
    apply(checkpoint)
    for options in ({}, {"ignore_mismatched_sizes": True}):
        with pytest.raises(ValueError) as error:
            AutoModelForCausalLM.from_pretrained(checkpoint, **options)
        for part in parts:
            assert part in str(error.value)


def test_all_that_is_wrong_is_named_at_once(checkpoint):
    without(NORM)(checkpoint)
    store(WEIGHT, lambda stored: stored[WEIGHT].long())(checkpoint)
    store("model.extra", lambda stored: torch.zeros(3))(checkpoint)
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(checkpoint)
    assert all(f"\n  {name}: " in str(error.value) for name in (NORM, WEIGHT, "model.extra"))


@pytest.mark.parametrize(
    "damage",
    [
        store("x" * 100_000, lambda stored: torch.zeros(3)),
        tensors(lambda stored: stored.update({f"{name}.{'x' * 1000}": torch.zeros(3) for name in range(1000)})),
        config(lambda entries: entries["layers"].update({"x" * 100_000: {"bits": 4}})),
    ],
    ids=["a long name", "many names", "a long name in the config"],
)
def test_errors_are_of_bounded_length(checkpoint, damage):
    damage(checkpoint)
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(checkpoint)
    assert "xxx" in str(error.value) and len(str(error.value)) < 12_000


def test_a_checkpoint_holds_three_tensors_for_a_quantized_layer_and_no_more(model, saved):
    stored = load_file(saved / FILE)
    dense = load_file(model.name_or_path + "/" + FILE)
    scales = {name for name in stored if name.endswith(("_absmax", "_columns"))}
    assert len(scales) == 28 and stored.keys() - scales == dense.keys()
    for name, tensor in stored.items():
        packed = torch.uint8 if name in scales else torch.int32 if f"{name}_absmax" in scales else torch.bfloat16
        assert tensor.dtype == packed, name


def test_an_undamaged_checkpoint_loads(model, checkpoint):
    edit_tensors(checkpoint / FILE, lambda stored: None)
    config(lambda entries: None)(checkpoint)
    for ignore_mismatched_sizes in (False, True):
        reloaded = AutoModelForCausalLM.from_pretrained(checkpoint, ignore_mismatched_sizes=ignore_mismatched_sizes)
        assert torch.equal(reloaded(TOKENS).logits, model(TOKENS).logits)


# --- another class than the one that was saved ----------------------------------------------------

OTHER_CLASSES = ["LlamaModel", "LlamaForSequenceClassification"]


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_a_model_of_another_class_takes_what_it_needs(model, checkpoint, name):
    other = getattr(transformers, name).from_pretrained(checkpoint)
    hidden = getattr(other, "model", other)(TOKENS).last_hidden_state
    assert torch.equal(hidden, model.model(TOKENS).last_hidden_state)


@pytest.mark.parametrize("damage", ["no weight", "no absmax", "no pair", "no norm", "narrow weight", "int8 absmax"])
@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_a_model_of_another_class_does_not_make_up_what_is_missing(checkpoint, name, damage):
    apply, *parts = TENSORS[damage]
    apply(checkpoint)
    with pytest.raises(ValueError) as error:
        getattr(transformers, name).from_pretrained(checkpoint)
    for part in parts:
        assert part in str(error.value)


def test_a_missing_tensor_is_seen_without_architectures_in_the_config(checkpoint):
    file = checkpoint / "config.json"
    content = json.loads(file.read_text())
    del content["architectures"]
    file.write_text(json.dumps(content))
    assert AutoModelForCausalLM.from_pretrained(checkpoint)
    without(NORM)(checkpoint)
    with pytest.raises(ValueError, match=f"{re.escape(NORM)}: missing"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


def test_a_tied_weight_is_missing_when_no_name_of_it_is_stored(tmp_path):
    quantized(tmp_path / "dense", tie_word_embeddings=True).save_pretrained(tmp_path / "saved")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert "lm_head.weight" not in load_file(tmp_path / "saved" / FILE)
    without(EMBEDDING)(tmp_path / "saved")
    with pytest.raises(ValueError, match=f"{re.escape(EMBEDDING)}: missing, expected"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


# --- another config than the one that was saved ---------------------------------------------------


@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_layers(model, checkpoint, layers):
    """As with any checkpoint: what is too much is left, what is missing is made, and Transformers reports both."""
    other, info = AutoModelForCausalLM.from_pretrained(checkpoint, num_hidden_layers=layers, output_loading_info=True)
    named = info["unexpected_keys" if layers == 1 else "missing_keys"]
    assert named and all(f"layers.{min(layers, 2)}." in name for name in named)
    hidden, expected = (m.model(TOKENS, output_hidden_states=True).hidden_states[1] for m in (other, model))
    if layers > 1:  # else the norm at the end comes at once
        assert torch.equal(hidden, expected)


@pytest.mark.parametrize("damage", ["no weight", "no norm", "narrow weight", "extra pair", "int64 norm"])
def test_damage_is_seen_all_the_same(checkpoint, damage):
    apply, *parts = TENSORS[damage]
    apply(checkpoint)
    with pytest.raises(ValueError) as error:
        AutoModelForCausalLM.from_pretrained(checkpoint, num_hidden_layers=1, ignore_mismatched_sizes=True)
    assert all(part in str(error.value) for part in parts)


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
    for ignore_mismatched_sizes in (False, True):
        with pytest.raises(
            ValueError, match=r"score.weight: found I32 \[3, 6\], expected I32 \[5, 6\] for a \[5, 64\]"
        ):
            transformers.LlamaForSequenceClassification.from_pretrained(
                classifiers / "packed", num_labels=5, ignore_mismatched_sizes=ignore_mismatched_sizes
            )


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
    with pytest.raises(ValueError, match=rf"{FILE}: found no packed tensor, expected those that quantization_config"):
        AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.mark.parametrize("value", [5, [5], {}, "LlamaForCausalLM", [None]], ids=repr)
def test_architectures_must_be_names(value):
    with pytest.raises(
        ValueError, match=r"architectures: found .* in config\.json, expected a list of names of classes"
    ):
        saved_class(value)


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (None, None),
        ([], None),
        (["NoSuchModel"], None),
        (["pipeline"], None),
        (["LlamaConfig"], None),
        (["LlamaModel"], transformers.LlamaModel),
    ],
)
def test_only_classes_of_models_are_taken(names, found):
    assert saved_class(names) is found


# --- quantizing on several processes ----------------------------------------------------------------


@pytest.fixture
def unread(monkeypatch):
    """Several processes that are not there, and do not come to read a weight."""

    def prepare(cls, config, device_map=None, **kwargs):
        return config, device_map, None

    monkeypatch.setattr(transformers.PreTrainedModel, "prepare_distribute_model", classmethod(prepare))
    monkeypatch.setattr(transformers.PreTrainedModel, "_load_pretrained_model", None)


def test_parts_of_a_pipeline_are_refused(model, unread):
    plan = DistributedConfig(pp_size=2)
    with pytest.raises(ValueError, match="distributed_config: found pp_size=2, expected none while quantizing"):
        AutoModelForCausalLM.from_pretrained(
            model.name_or_path, distributed_config=plan, quantization_config=KbitConfig()
        )


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"fsdp_size": 2}], ids=str)
def test_a_weight_that_each_process_would_draw_is_refused(tmp_path, unread, sizes):
    """A head that the checkpoint has not: one process leaves it in 16 bits, to be trained."""
    config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
    transformers.LlamaModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lm_head\.weight: not in the checkpoint"):
        LlamaForCausalLM.from_pretrained(
            tmp_path,
            distributed_config=DistributedConfig(**sizes),
            quantization_config=KbitConfig(skip_default_modules=False),
        )


def test_a_tensor_of_which_one_part_is_quantized_is_refused(tmp_path, unread):
    """It would be read whole for q_proj, and in parts for k_proj."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.NomicBertModel(transformers.NomicBertConfig(vocab_size=96, **sizes)).save_pretrained(tmp_path)
    complaint = r"k_proj\.weight: found it left in 16 bits, expected it quantized as what is in .*Wqkv\.weight with it"
    with pytest.raises(ValueError, match=complaint):
        transformers.NomicBertModel.from_pretrained(
            tmp_path,
            distributed_config=DistributedConfig(tp_size=2),
            quantization_config=KbitConfig(modules_to_not_convert=["k_proj"]),
        )


# --- no file at all --------------------------------------------------------------------------------


def test_a_state_dict_in_memory(tmp_path):
    """Widths and exponents of single layers come from the config alone; a forgotten one would be silent garbage."""
    dense = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=2))
    with torch.no_grad():
        dense.model.layers[1].mlp.up_proj.weight *= 2.0**-12
    dense.save_pretrained(tmp_path)
    options = KbitConfig(bits=3, module_bits={"layers.0": None, "down_proj": 5, "o_proj": None})
    model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=options)
    assert model.model.layers[1].mlp.up_proj.exponent < 0
    model.save_pretrained(tmp_path / "saved")
    config = LlamaConfig.from_pretrained(tmp_path / "saved")  # JSON sorts keys, but the order of patterns decides
    for other in (LlamaForCausalLM, transformers.LlamaModel):
        loaded = other.from_pretrained(None, config=config, state_dict=model.state_dict())
        hidden = getattr(loaded, "model", loaded)(TOKENS).last_hidden_state
        assert torch.equal(hidden, model.model(TOKENS).last_hidden_state)


# --- several files --------------------------------------------------------------------------------


def shard_of(directory, name):
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return directory / index["weight_map"][name]


def test_an_undamaged_sharded_checkpoint_loads(model, sharded):
    assert torch.equal(AutoModelForCausalLM.from_pretrained(sharded)(TOKENS).logits, model(TOKENS).logits)


def test_a_missing_shard_is_named(sharded):
    shard = shard_of(sharded, WEIGHT)
    shard.unlink()
    with pytest.raises((OSError, ValueError), match=re.escape(shard.name)):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_a_shard_cut_short_is_named(sharded):
    shard = shard_of(sharded, WEIGHT)
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{re.escape(shard.name)}: .*cut short at tensor \S+: found .* expected"):
        AutoModelForCausalLM.from_pretrained(sharded)


@pytest.mark.parametrize("name", [WEIGHT, ABSMAX, NORM, "lm_head.weight"])
def test_a_tensor_missing_from_a_shard_is_named(sharded, name):
    edit_tensors(shard_of(sharded, name), lambda stored: stored.pop(name))
    with pytest.raises(ValueError, match=f"{re.escape(name)}: missing, expected"):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_a_shard_in_place_of_another_is_refused(sharded):
    shard = shard_of(sharded, NORM)
    other = next(file for file in sorted(sharded.glob("model-*")) if file != shard)
    shutil.copy(other, shard)
    with pytest.raises(
        ValueError, match=rf"\S+: found in \S+ and in \S+{re.escape(max(other, shard).name)}, expected it in one"
    ):
        AutoModelForCausalLM.from_pretrained(sharded)


# --- of one save ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_save(tmp_path_factory):
    """A model of the same widths, one layer of which has another exponent."""
    directory = tmp_path_factory.mktemp("other")
    model = quantized(directory / "dense")
    with torch.no_grad():
        layer = model.model.layers[0].mlp.up_proj
        layer.load_dense(layer.dequantize() * 2.0**12)
    model.save_pretrained(directory, max_shard_size="20KB")
    return directory


def digests(directory):
    found = []
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            found.append(stored.metadata()["kbit_digest"])
    return found


def test_each_file_has_the_digest_of_the_config(model, saved, sharded):
    digest = model.config.quantization_config.digest()
    assert digests(saved) == [digest] and set(digests(sharded)) == {digest}


def test_a_save_that_ended_after_the_config_is_refused(sharded, other_save):
    shutil.copy(other_save / "config.json", sharded)
    with pytest.raises(
        ValueError, match=r"(?s)this config, of kbit_digest \w+; .*model-00001-of-0000\d.safetensors: found kbit"
    ):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_a_save_that_ended_between_two_files_is_refused(sharded, other_save):
    first = min(other_save.glob("model-*"))
    shutil.copy(first, sharded)
    with pytest.raises(ValueError, match=rf"\n  \S+{first.name}: found kbit_digest \w+$"):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_a_file_without_a_digest_beside_others_is_refused(sharded):
    shard = shard_of(sharded, NORM)
    edit_tensors(shard, lambda stored: None)
    with pytest.raises(ValueError, match=rf"{shard.name}: found kbit_digest None"):
        AutoModelForCausalLM.from_pretrained(sharded)


def test_exponents_cannot_get_lost(other_save, tmp_path):
    directory = shutil.copytree(other_save, tmp_path / "copy")
    file = directory / "config.json"
    content = json.loads(file.read_text())
    layers = content["quantization_config"]["layers"]
    content["quantization_config"]["layers"] = {k: {"bits": v["bits"]} for k, v in layers.items() if "bits" in v}
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="expected tensors saved with this config"):
        AutoModelForCausalLM.from_pretrained(directory)


def test_another_config_object_is_saved_with_what_decodes(model, tmp_path):
    model = copy.deepcopy(model)
    model.config = copy.deepcopy(model.config)
    model.config.quantization_config.layers = {}
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(TOKENS).logits, model(TOKENS).logits)


# --- without hf_kbit ------------------------------------------------------------------------------


def test_without_the_import_loading_stops(saved):
    """What the documentation and the model card promise to those who forget ``import hf_kbit``."""
    script = "import sys; from transformers import AutoModelForCausalLM as Auto; Auto.from_pretrained(sys.argv[1])"
    process = subprocess.run(
        [sys.executable, "-c", script, saved], capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"}
    )
    printed = process.stdout + process.stderr
    assert process.returncode != 0, printed
    assert "Unknown quantization type, got kbit" in printed
    # The load report lists every scale as UNEXPECTED and every packed weight as MISMATCH.
    assert re.search(r"self_attn\.q_proj\.weight_absmax\S* *\| *UNEXPECTED", printed), printed
    assert re.search(r"self_attn\.q_proj\.weight *\| *MISMATCH", printed), printed
    assert "RuntimeError: You set `ignore_mismatched_sizes` to `False`" in printed
