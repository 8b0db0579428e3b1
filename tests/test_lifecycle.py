"""The life of a model, whatever its kind: each step leaves what a user had before, or says in an error why not.

``KINDS`` and ``ROWS`` of ``kinds.py`` are the rows; each test is a column: a step of a life.
"""

import copy
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import accelerate
import huggingface_hub
import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from adapters import assert_same_state, merge, packed_state, relative, trainable, tuner_layers
from kinds import (
    KINDS,
    ROWS,
    Kind,
    Life,
    assert_tied,
    life,
    pickled,
    run,
    same_outputs,
    same_tensors,
    weights,
)
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import load_peft_weights
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers.pytorch_utils import Conv1D

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.weight.scalar import ScalarTensor
from hf_kbit.weight.tensor import KbitTensor


@pytest.fixture
def kind(request, tmp_path_factory) -> Life:
    return life(request.param, tmp_path_factory)


def of(*names: str):
    return pytest.mark.parametrize("kind", names, indirect=True)


def is_among_kinds(row: Kind) -> bool:
    """Whether one of ``KINDS`` is of that architecture and dtype, and has more to it."""
    return any(kind.row is row.row and kind.build.args == row.build.args for kind in KINDS.values())


each_kind, each_row = of(*KINDS), of(*KINDS, *(name for name, row in ROWS.items() if not is_among_kinds(row)))
# One of a sort, where a step takes long.
MIXTURES = [name for name in KINDS if name.startswith("experts")]
of_each_sort = of("mixed widths", "bfloat16", "tied", "8-bit inputs", "Conv1D", "encoder", "speech", *MIXTURES)


# --- quantized, saved, loaded ---------------------------------------------------------------------


@each_kind
def test_quantized_in_memory_it_is_what_loading_makes(kind, tmp_path):
    """To the same bytes; and no second time."""
    model = kind.load("dense")
    done = hf_kbit.quantize_model(model, KbitConfig(**kind.kind.config))
    kind.kind.change(model)
    packed = weights(kind.model)
    names = {name.removesuffix(".weight") for name in packed}
    assert done.bits.keys() <= names and len(done.bits) == len(packed) - len(kind.kind.tied)
    assert done.bytes_after < done.bytes_before
    kind.assert_same(model, "in memory")
    kind.assert_saved_as_before(model, tmp_path)
    with pytest.raises(ValueError, match="found it quantized already"):
        hf_kbit.quantize_model(model, bits=3)
    kind.assert_same(model, "after another try")


@each_row
def test_saved_and_loaded(kind, tmp_path):
    """The same model, and to the same bytes again; each weight is stored once."""
    model = kind.load()
    kind.assert_same(model, "loaded")
    assert model.config.quantization_config == kind.model.config.quantization_config
    assert {p.requires_grad for p in weights(model).values()} == {False} and not model.training
    kind.assert_saved_as_before(model, tmp_path)
    model.tie_weights()
    model.init_weights()
    kind.assert_same(model, "initialised once more")
    stored = load_file(kind.folder / "saved/model.safetensors").values()
    words = sum(tensor.numel() for tensor in stored if tensor.dtype in (torch.int32, torch.int16))
    assert words == sum(weight.words.numel() for weight in {id(w): w for w in weights(model).values()}.values())


@of_each_sort
def test_saved_in_several_files_and_in_none(kind, tmp_path):
    kind.model.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    kind.assert_same(kind.cls.from_pretrained(tmp_path), "several files")
    kind.kind.build().save_pretrained(tmp_path / "dense", max_shard_size="40KB")
    model = kind.cls.from_pretrained(tmp_path / "dense", quantization_config=KbitConfig(**kind.kind.config))
    kind.kind.change(model)
    kind.assert_same(model, "quantized from several files")
    config = kind.cls.config_class.from_pretrained(tmp_path)
    state = kind.model.state_dict()  # with both names of what is tied
    kind.assert_same(kind.cls.from_pretrained(None, config=config, state_dict=state), "a state dict")


@pytest.mark.parametrize("form", ["tiles"], indirect=True)
@each_kind
def test_as_a_gpu_holds_it(kind, form, tmp_path):
    """It computes the same, and is saved and copied as any."""
    model = kind.load()
    scalar = [weight for weight in weights(model).values() if isinstance(weight, ScalarTensor)]
    assert any(weight.is_tiled for weight in scalar) == bool(scalar)
    assert_close(run(model, kind.inputs), kind.expected, kind)
    output = run(model, kind.inputs)
    for made in (model, copy.deepcopy(model), pickled(model)):
        assert_tied(made, kind.kind)
        same_outputs(run(made, kind.inputs), output, "a copy")
        kind.assert_saved_as_before(made, tmp_path)


@of("mixed widths")
def test_loaded_where_levels_cannot_be_derived(kind, monkeypatch):
    """Files say them."""
    monkeypatch.setattr(hf_kbit.codebooks, "NAMED", {})
    kind.assert_same(kind.load(), "loaded")


def test_layers_keep_levels_of_their_own(tmp_path, tmp_path_factory):
    """Those of a model that hf_kbit 0.1.0 has made, whose codebook nobody derives any more, for another weight too."""
    kind = life("layers that differ", tmp_path_factory)
    shutil.copytree(kind.folder / "saved", tmp_path / "saved")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    layers = config["quantization_config"]["layers"].values()
    assert len({tuple(layer["levels"]) for layer in layers}) == len(weights(kind.model))
    config["quantization_config"]["codebook"] = "layer"
    (tmp_path / "saved/config.json").write_text(json.dumps(config))
    model = kind.cls.from_pretrained(tmp_path / "saved")
    kind.assert_same(model, "loaded")
    layer, levels = model.model.layers[1].mlp.up_proj, kind.model.model.layers[1].mlp.up_proj.decoding.levels
    layer.load_dense(torch.randn(layer.out_features, layer.in_features))
    assert layer.decoding.levels == levels


# --- copies, and files of other libraries ---------------------------------------------------------


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "cast and back": lambda model: copy.deepcopy(model).to(torch.float64).to(model.dtype),
}


@pytest.mark.parametrize("way", COPIES)
@each_kind
def test_copies_are_models_of_their_own(kind, way, tmp_path):
    model = kind.fresh()
    made = COPIES[way](model)
    if "cast" in way:  # to which buffers and what is kept in float32 are no exception
        assert_tied(made, kind.kind)
        assert_same_state(stored(made), stored(model))
    else:
        kind.assert_same(made, way)
        kind.assert_saved_as_before(made, tmp_path)
    before = run(made, kind.inputs)
    for parameter in model.parameters():
        (parameter.words if isinstance(parameter, KbitTensor) else parameter.data).zero_()
    same_outputs(run(made, kind.inputs), before, "the copy after the model was changed")
    assert not weights(made.dequantize()) and weights(model), "the copy alone is dequantized"


def stored(model: nn.Module) -> dict[str, torch.Tensor]:
    """What files hold of packed weights."""
    return {
        f"{name} {own}": part for name, weight in weights(model).items() for own, part in weight.file_tensors().items()
    }


def other(model: nn.Module) -> nn.Module:
    """A model of the same widths, all of whose tensors and exponents are to be replaced."""
    made = copy.deepcopy(model)
    for weight in {id(weight): weight for weight in weights(made).values()}.values():
        decoding = weight.decoding
        if isinstance(decoding, ScalarDecoding):
            decoding = replace(decoding, exponent=decoding.exponent + 1)
        weight.data = KbitTensor.empty(tuple(weight.shape), decoding, weight.dtype)
    for parameter in made.parameters():
        if not isinstance(parameter, KbitTensor):
            parameter.data.zero_()
    return made


def by_file(model, folder):
    tied = model.config.tie_word_embeddings  # then a file has one name of two
    state = {name: t for name, t in model.state_dict().items() if not (tied and name.startswith("lm_head."))}
    save_file(state, folder / "model.safetensors")
    (made := other(model)).load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    return made


def by_model(model, folder):
    save_model(model, str(folder / "model.safetensors"))
    load_model(made := other(model), folder / "model.safetensors")
    return made


def by_state_of_accelerate(model, folder, **how):
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model)
    accelerator.save_state(folder, **how)
    accelerator.free_memory()
    accelerator.prepare(made := other(model))
    accelerator.load_state(folder)
    accelerator.free_memory()
    return made


def by_model_of_accelerate(model, folder):
    """In several files, which are loaded one at a time: no border may go through the tensors of a layer."""
    Accelerator(cpu=True).save_model(model, folder, max_shard_size="10KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    accelerate.load_checkpoint_in_model(made := other(model), folder, strict=not model.config.tie_word_embeddings)
    return made


def by_from_pretrained(model, folder):
    """What another library has saved, beside the model's own config."""
    huggingface_hub.save_torch_model(model, folder, max_shard_size="10KB")
    model.config.save_pretrained(folder)
    return type(model).from_pretrained(folder)


def by_torch(model, folder):
    torch.save(model.state_dict(), folder / "model.pt")
    (made := other(model)).load_state_dict(torch.load(folder / "model.pt", weights_only=True, mmap=True))
    return made


def by_assigning(model, folder):
    """Onto the meta device; buffers that no state dict has come from the model."""
    torch.save(model.state_dict(), folder / "model.pt")
    made = other(model).to("meta")
    made.load_state_dict(torch.load(folder / "model.pt", weights_only=True), assign=True)
    for name, buffer in model.named_buffers():
        setattr(made.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], buffer.clone())
    made.tie_weights()
    return made


def by_dcp(model, folder):
    dcp.save(model.state_dict(), checkpoint_id=folder)
    state = (made := other(model)).state_dict()
    dcp.load(state, checkpoint_id=folder)
    made.load_state_dict(state)
    return made


def by_dcp_of_modules(model, folder):
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    state = {"model": get_model_state_dict(made := other(model))}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(made, state["model"])
    return made


LIBRARIES = {
    "save_file": by_file,
    "save_model": by_model,
    "Accelerator.save_state": by_state_of_accelerate,
    "Accelerator.save_state, torch": lambda m, f: by_state_of_accelerate(m, f, safe_serialization=False),
    "Accelerator.save_model": by_model_of_accelerate,
    "huggingface_hub": by_from_pretrained,
    "torch.save": by_torch,
    "assign": by_assigning,
    "DCP": by_dcp,
    "DCP, of modules": by_dcp_of_modules,
}


QUICK = [way for way in LIBRARIES if "Accelerator" not in way]


@pytest.mark.filterwarnings("ignore:.*process group:UserWarning")
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *(("tied", way) for way in LIBRARIES),
        *itertools.product(("layers that differ", "experts, transposed, with bias"), QUICK),
    ],
    indirect=["kind"],
)
def test_saved_by_another_library(kind, way, form, tmp_path):
    """State dicts are tensors that anything saves; files hold packed ones, in whatever form they are in memory."""
    model = kind.load()
    with torch.inference_mode(bool(kind.kind.tied)):
        made = LIBRARIES[way](model, tmp_path)
        same_outputs(run(made, kind.inputs), run(model, kind.inputs), way)
    same_tensors(made, model, way)
    assert_tied(made, kind.kind)
    size = sum(os.path.getsize(file) for file in tmp_path.rglob("*") if file.is_file())
    if not way.startswith("DCP"):
        assert size < 1.1 * model.get_memory_footprint() + 60_000, "packed, and what files say of themselves"


def test_a_state_dict_has_what_it_is_of(tmp_path_factory):
    """Plain tensors; the parameters themselves with ``keep_vars``."""
    model = life("mixed widths", tmp_path_factory).model
    state, values = model.state_dict(), model.state_dict(keep_vars=True)
    assert {type(tensor) for tensor in state.values()} == {torch.Tensor}
    layer, name = model.model.layers[1].mlp.up_proj, "model.layers.1.mlp.up_proj."
    own = {key.removeprefix(name) for key in state if key.startswith(name)}
    assert own == {*layer.decoding.layout(layer.shape), "weight_decoding"}
    assert values[f"{name}weight"] is layer.weight
    assert list(values) == [name for name, _ in model.named_parameters()]
    assert torch.equal(layer.weight_decoding, state[f"{name}weight_decoding"])


@each_kind
def test_a_state_dict_that_is_not_the_models_changes_nothing(kind):
    """What is missing, left over or dense is named."""
    model, state = kind.fresh(), kind.model.state_dict()
    name, weight = next(iter(weights(model).items()))
    name = name.removesuffix("weight") + weight.decoding.names[0]
    for damaged, message in (
        ({key: tensor for key, tensor in state.items() if key != name}, rf'Missing key.*"{name}"'),
        (state | {"extra.weight": torch.zeros(3)}, r'Unexpected key.*"extra\.weight"'),
        (state | {name: weight.dequantize()}, rf"{name}: found dtype \S+ and shape .*, expected dtype torch\.int"),
        (state | {name: state[name][..., 1:]}, rf"{name}: found .* shape .*, expected .* shape"),
    ):
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict(damaged)
        kind.assert_same(model, "after what was refused")


# --- moved, cast, offloaded -----------------------------------------------------------------------


@each_kind
def test_a_cast_changes_what_is_computed_and_not_what_is_stored(kind):
    """In all dtypes; and it goes to the meta device and back."""
    model = kind.fresh()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model.to(dtype)
        assert {weight.dtype for weight in weights(model).values()} == {dtype}
        assert_same_state(stored(model), stored(kind.model))
        assert_tied(model, kind.kind)
        found = run(model, kind.inputs)
        same = run(kind.load("dense").to(dtype), kind.inputs)
        assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in same.items()}
        assert all(relative(found[name], expected) < 0.1 for name, expected in kind.expected.items())
    model = kind.fresh().to("meta")
    assert all(weight.is_meta for weight in weights(model).values())
    model.to_empty(device="cpu").load_state_dict(kind.model.state_dict())
    same_tensors(model, kind.model, "from meta")


def by_a_device_map(kind: Life, folder: Path):
    yield kind.load(device_map={"": "disk"}, offload_folder=folder)


def by_parts(kind: Life, folder: Path):
    """Each second module on disk, of one layer too."""
    places = {name.rpartition(".")[0]: "cpu" for name, _ in kind.model.named_parameters()}
    places |= {name: "cpu" for name, module in kind.model.named_modules() if not next(module.children(), None)}
    places |= dict.fromkeys(list(places)[::2], "disk")
    yield kind.load(device_map=places, offload_folder=folder)


def by_cpu_offload(kind: Life, folder: Path):
    accelerate.cpu_offload(model := kind.fresh(), execution_device="cpu")
    yield model


def by_disk_offload(kind: Life, folder: Path):
    """And once more."""
    model = kind.fresh()
    for place in ("first", "second"):
        accelerate.disk_offload(model, folder / place, execution_device="cpu")
        yield model
        accelerate.hooks.remove_hook_from_module(model, recurse=True)
        same_tensors(model, kind.model, "taken back")
        same_outputs(run(model, kind.inputs), kind.expected, "taken back")


OFFLOADED: dict[str, Callable[[Life, Path], Iterator[nn.Module]]] = {
    "device_map": by_a_device_map,
    "cpu_offload": by_cpu_offload,
    "disk_offload": by_disk_offload,
    "in parts": by_parts,  # not for what is tied, in 16 bits either
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [*itertools.product(KINDS, ["device_map", "cpu_offload"]), ("tied", "disk_offload"), ("mixed widths", "in parts")],
    indirect=["kind"],
)
def test_offloaded(kind, way, tmp_path):
    """Each weight is brought for each call, saved to the same bytes, and cannot be decoded where it is not."""
    for model in OFFLOADED[way](kind, tmp_path / "offload"):
        assert (any if way == "in parts" else all)(weight.is_meta for weight in weights(model).values())
        if way in ("device_map", "in parts"):
            kind.assert_saved_as_before(model, tmp_path)
        exact = kind.model.dtype == torch.float32  # else the address of a weight may count
        same_outputs(run(model, kind.inputs), kind.expected, way, exact)
        with pytest.raises(ValueError, match=r"\S+\.weight: found it offloaded, expected"):
            model.dequantize()
        same_outputs(run(model, kind.inputs), kind.expected, "after what was refused", exact)


@pytest.mark.gpu
@of(*(name for name in KINDS if name != "layers that differ"))  # of which a part is made of decoded weights
def test_on_a_gpu(kind, tmp_path):
    """Quantized there to the same bytes; moved, copied, saved and brought back without a bit lost."""
    there = {name: x.cuda() for name, x in kind.inputs.items()}
    model = kind.load("dense", quantization_config=KbitConfig(**kind.kind.config), device_map="cuda")
    kind.assert_saved_as_before(model, tmp_path / "quantized there")
    found, tiled = run(model, there), {name: weight.is_tiled for name, weight in weights(model).items()}
    moved, filled = kind.fresh().cuda(), other(kind.model).cuda()
    filled.load_state_dict(moved.state_dict())
    for made in (moved, filled, kind.load(device_map="cuda"), copy.deepcopy(moved), pickled(moved)):
        assert_tied(made, kind.kind)
        assert {name: weight.is_tiled for name, weight in weights(made).items() if weight.is_cuda} == tiled
        same_outputs(run(made, there), found, "on a GPU", exact=False)
    assert all(relative(found[name].cpu(), expected) < 0.05 for name, expected in kind.expected.items())
    torch.save(moved, tmp_path / "model.pt")
    kind.assert_same(torch.load(tmp_path / "model.pt", map_location="cpu", weights_only=False), "loaded on a CPU")
    kind.assert_saved_as_before(moved, tmp_path / "moved")
    kind.assert_same(moved.cpu(), "brought back")


# --- compiled -------------------------------------------------------------------------------------


@of("8-bit inputs", "Conv1D")
def test_compiled_to_one_graph(kind):
    torch.compiler.reset()
    model = kind.fresh()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    same_outputs(run(compiled, kind.inputs), kind.expected, "compiled", exact=False)


# --- adapted, merged, dequantized -----------------------------------------------------------------


def trained(model: nn.Module, inputs: dict) -> None:
    """One step, by an optimizer that is given everything, with weight decay."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    next(iter(model.eval()(**inputs).values())).float().square().mean().backward()
    optimizer.step()
    model.zero_grad()


@of_each_sort
def test_adapted(kind, tmp_path):
    """LoRA begins as nothing, trains without the base, is saved without it, and merged to 16 bits exactly."""
    config = LoraConfig(r=4, **kind.kind.lora)
    model, before = get_peft_model(kind.fresh(), config).eval(), packed_state(kind.model)
    kept = copy.deepcopy(model.get_base_model())
    dense = get_peft_model(kind.load("dense"), config)
    assert {n: (p.shape, p.dtype) for n, p in trainable(model).items()} == {
        n: (p.shape, p.dtype) for n, p in trainable(dense).items()
    }
    same_outputs(run(model, kind.inputs), kind.expected, "adapters that are new", exact=False)
    trained(model, kind.inputs)
    state = packed_state(model)
    assert_same_state({name: state[name] for name in before}, before)
    expected = run(model, kind.inputs)
    changed = [relative(expected[name], kind.expected[name]) for name in expected]
    assert max(changed) > 1e-3, "it learns nothing"

    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    assert all("lora_" in name for name in load_peft_weights(str(tmp_path / "adapter"), device="cpu"))
    loaded = PeftModel.from_pretrained(kind.load(), tmp_path / "adapter").eval()
    for made in (loaded, copy.deepcopy(model), pickled(model)):
        same_outputs(run(made, kind.inputs), expected, "a copy of adapters")

    (told,) = merge(model)
    assert "hf_kbit: merged into" in told
    merged = run(model, kind.inputs)
    assert not all(torch.equal(merged[name], expected[name]) for name in expected)
    copied = copy.deepcopy(model)
    same_outputs(run(copied, kind.inputs), merged, "a copy that is merged")
    copied.unmerge_adapter(), model.unmerge_adapter()
    for made in (model, copied):
        assert_close(run(made, kind.inputs), expected, kind)
        assert_same_state(stored(made.get_base_model()), stored(kept))

    # PEFT merges and takes back what is not packed by sums, and in 16 bits rounds each time.
    twice = copy.deepcopy(model)
    merge(twice)
    ours = tuner_layers(model)
    theirs = [n for n, layer in model.named_modules() if isinstance(layer, BaseTunerLayer) and n not in ours]
    exact = kind.model.dtype == torch.float32 or not theirs
    same_outputs(run(twice, kind.inputs), merged, "merged again", exact)
    exact = hf_kbit.merge_and_unload(copied, dequantize=True)
    assert not weights(exact) and classes(exact) == classes(kind.load("dense"))
    assert_close(run(exact, kind.inputs), expected, kind)
    with pytest.warns(UserWarning, match="hf_kbit: merged into"):
        packed = model.merge_and_unload()
    packed.save_pretrained(tmp_path / "merged")
    again = kind.cls.from_pretrained(tmp_path / "merged")
    same_outputs(run(again, kind.inputs), run(packed, kind.inputs), "merged and loaded")
    same_outputs(run(packed, kind.inputs), run(twice, kind.inputs), "merged and unloaded")


def assert_close(found: dict, expected: dict, kind: Life) -> None:
    """In the dtype of the model, by way of weights, or of inputs, that are rounded."""
    rounded = kind.model.dtype != torch.float32 or "inputs" in kind.kind.config
    assert all(relative(found[name], expected[name]) < (0.05 if rounded else 1e-4) for name in expected)


@each_row
def test_dequantized(kind, tmp_path):
    """It is the model that it was but for rounding: in its layers, its files and what is one weight."""
    model, dense = kind.fresh().dequantize(), kind.load("dense")
    assert not weights(model)
    for _ in ("dequantized", "saved and loaded"):
        assert classes(model) == classes(dense)
        assert all(model.get_parameter(name) is model.get_parameter(source) for name, source in kind.kind.tied.items())
        assert_close(run(model, kind.inputs), kind.expected, kind)
        model.save_pretrained(tmp_path)
        assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
        stored, expected = tensor_names(tmp_path), tensor_names(kind.folder / "dense")
        assert stored == expected, "other tensors than in a float checkpoint"
        model = kind.cls.from_pretrained(tmp_path)


def classes(model: nn.Module) -> dict[str, type]:
    """Of layers and tables; a class of linear layers that is nothing but a name need not come back."""
    kinds = nn.Linear, Conv1D
    return {
        name: next((kind for kind in kinds if isinstance(module, kind)), type(module))
        for name, module in model.named_modules()
        if isinstance(module, (*kinds, nn.Embedding))
    }


def tensor_names(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in safe_open(file, "pt").keys()}
