"""Files and state dicts that are damaged, cut short or of something else: refused with an error that names the tensor,
the file or the entry at fault, found and expected, and nothing has changed; or they load to the same model."""

import functools
import json
import os
import random
import re
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import kinds
import pytest
import torch
import transformers
from kinds import Attention
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import hf_kbit
from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.format.model import ENTRIES

# --- files that were changed in one place ---------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """A way to save and load.

    Attributes:
        config, file: names in the folder.
        weight: a packed layer, of the width of most.
        other: one with an entry of its own in the config.
        norm: a tensor that is not packed.
        load: loads what is in a folder.
    """

    config: str
    file: str
    weight: str
    other: str
    norm: str
    load: Callable[[Path], object]

    def entries(self, content: dict) -> dict:
        return content.get("quantization_config", content)


def load_attention(folder: Path) -> None:
    """A module that cannot be loaded stays as it was."""
    torch.manual_seed(1)
    module = Attention().eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    try:
        hf_kbit.load_into(module, folder)
    except Exception:
        assert not kinds.weights(module)
        assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
        raise


CAUSAL = "config.json", "model.safetensors"
PLACES = {
    "model": Place(
        *CAUSAL,
        "model.layers.1.self_attn.v_proj",
        "model.layers.1.mlp.down_proj",
        "model.norm.weight",
        AutoModelForCausalLM.from_pretrained,
    ),
    "experts": Place(
        *CAUSAL,
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.embed_tokens",
        "model.norm.weight",
        AutoModelForCausalLM.from_pretrained,
    ),
    "module": Place("kbit_config.json", "kbit.safetensors", "qkv", "proj", "norm.weight", load_attention),
}


@pytest.fixture(params=PLACES)
def damaged(request, tmp_path, tmp_path_factory) -> tuple[Place, Path]:
    """A copy of what was saved, to be damaged."""
    if request.param == "module":
        torch.manual_seed(0)
        hf_kbit.quantize_model(module := Attention().eval(), bits=2, module_bits={"proj": 5})
        hf_kbit.save(module, tmp_path / "saved")
    else:
        name = {"model": "mixed widths", "experts": "experts"}[request.param]
        shutil.copytree(kinds.life(name, tmp_path_factory).folder / "saved", tmp_path / "saved")
    return PLACES[request.param], tmp_path / "saved"


def tensors(change, sealed: bool = False):
    """What edits the tensors in a folder, and takes off the seal, which would tell of any change."""

    def damage(place: Place, folder: Path) -> None:
        found = load_file(folder / place.file)
        with safe_open(folder / place.file, "pt") as file:
            metadata = file.metadata() if sealed else {"format": "pt"}
        change(place, found)
        save_file(found, folder / place.file, metadata)

    return damage


def without(*own: str):
    return tensors(lambda place, found: [found.pop(place.weight + name) for name in own])


def changed(own: str, change):
    """Of the packed layer."""

    def edit(place: Place, found: dict) -> None:
        found[place.weight + own] = change(found[place.weight + own]).contiguous().clone()

    return tensors(edit)


def norm(change, sealed: bool = False):
    return tensors(lambda place, found: found.update({place.norm: change(found[place.norm]).clone()}), sealed)


def config(change):
    """What edits the entries of the quantization config."""

    def damage(place: Place, folder: Path) -> None:
        content = json.loads((folder / place.config).read_text())
        change(place, place.entries(content))
        (folder / place.config).write_text(json.dumps(content))

    return damage


def key(**entries):
    return config(lambda place, found: found.update(entries))


def layer(**entry):
    return config(lambda place, found: found["layers"].setdefault(place.other, {}).update(entry))


def cut(size: int):
    def damage(place: Place, folder: Path) -> None:
        (folder / place.file).write_bytes((folder / place.file).read_bytes()[:size])

    return damage


def add_a_layer(place: Place, found: dict) -> None:
    for own in (".weight", ".weight_absmax"):
        found["another" + own] = found[place.weight + own].clone()


LEVELS = {"4": [level / 8 for level in (*range(-8, 0), *range(1, 9))]}
SHAPE = r"\[[\d, ]+\]"
MISSING = "{weight}.weight: missing, expected beside {weight}.weight_absmax"
FITS = r" for a \[[\d, ]+\] weight in \d bits"
DAMAGES = {
    "no words": (without(".weight"), MISSING),
    "no scales": (without(".weight_absmax"), "{weight}.weight_absmax: missing, expected beside {weight}.weight"),
    "no columns": (without(".weight_columns"), "{weight}.weight_columns: found none, expected U8 " + SHAPE + FITS),
    "no layer": (without(".weight", ".weight_absmax", ".weight_columns"), "{weight}.weight: (missing|left over)|"),
    "narrow words": (
        changed(".weight", lambda words: words[..., :-1]),
        "{weight}.weight: found I32 " + SHAPE + ", expected I32 " + SHAPE + FITS,
    ),
    "fewer rows": (changed(".weight", lambda words: words[..., 1:, :]), "{weight}.weight: found I32 "),
    "words of floats": (changed(".weight", torch.Tensor.float), "{weight}.weight: found F32 "),
    "words of 64 bits": (changed(".weight", torch.Tensor.long), "{weight}.weight: found I64 "),
    "short scales": (changed(".weight_absmax", lambda scales: scales[..., :-1]), "{weight}.weight_absmax: found U8 "),
    "signed scales": (
        changed(".weight_absmax", lambda scales: scales.view(torch.int8)),
        "{weight}.weight_absmax: found I8 " + SHAPE + ", expected U8",
    ),
    "columns of floats": (changed(".weight_columns", torch.Tensor.float), "{weight}.weight_columns: found F32"),
    "no norm": (tensors(lambda place, found: found.pop(place.norm)), "{norm}: missing, expected "),
    "short norm": (norm(lambda x: x[:32]), "{norm}: found .*32], expected "),
    "norm of 64 bits": (norm(torch.Tensor.long), "{norm}: found .*64 "),
    "another tensor": (tensors(lambda place, found: found.update(more=torch.zeros(3))), "more: left over"),
    "another layer": (tensors(add_a_layer), r"another(\.weight)?: left over"),
    "all at once": (
        lambda *where: [DAMAGES[name][0](*where) for name in ("no norm", "narrow words", "another tensor")],
        r"(?=(?s:.*)\n  {norm}: )(?=(?s:.*)\n  {weight}.weight: )(?s:.*)\n  more: ",
    ),
    "a norm of other numbers": (norm(lambda x: x + 1, sealed=True), "expected files of one save.*or a tensor changed"),
    "other bits": (
        config(lambda place, found: found.update(bits=4, levels=found["levels"] | LEVELS)),
        "{weight}.weight: found I32 " + SHAPE + ", expected I32 " + SHAPE,
    ),
    "no such width": (key(bits=7), "bits: found 7"),
    "no entry of a layer": (
        config(lambda place, found: found["layers"].pop(place.other)),
        "{other}.weight: found I32 " + SHAPE + ", expected I32 " + SHAPE + "|" + "kbit_digest",
    ),
    "an exponent": (layer(exponent=1), r"tensors saved with this config, of kbit_digest \w+; was a save cut short"),
    "a version": (key(format_version=1), r"{weight}.weight_columns: found U8 " + SHAPE + ", expected none"),
    "a transform": (layer(transform="none"), r"{other}.weight_columns: found U8 " + SHAPE + ", expected none"),
    "no levels": (config(lambda place, found: (found.pop("levels"), found.pop("layers"))), "found no(ne|) ?"),
    "an entry that nobody knows": (key(group_size=64), r"quantization_config: found \['group_size'\], expected"),
    "a layer that is not there": (
        config(lambda place, found: found["layers"].update({"x" * 100_000: {"exponent": 1}})),
        r"xxx\.\.\. \(100,0",
    ),
    "a layer that is not packed": (
        config(lambda place, found: found["layers"].update({place.norm[:-7]: {"exponent": 1}})),
        "norm: in layers of the quantization config, not in the checkpoint",
    ),
    "a file cut short": (cut(-1), "{file}: damaged or cut short at tensor"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_named(damaged, damage):
    """In a few words, whatever stands in it; also where other sizes are asked to be ignored."""
    place, folder = damaged
    apply, message = DAMAGES[damage]
    apply(place, folder)
    names = {name: re.escape(getattr(place, name)) for name in ("weight", "other", "norm", "file")}
    message = re.sub(r"\{(weight|other|norm|file)\}", lambda match: names[match[1]], message)
    ignored = place.load is not load_attention and damage in ("narrow words", "short norm", "no norm", "other bits")
    for load in (place.load, ignoring_sizes) if ignored else (place.load,):
        with pytest.raises(ValueError, match=message) as error:
            load(folder)
        assert len(str(error.value)) < 12_000


def ignoring_sizes(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True)


ONLY_MODULES = {
    "embed.weight: missing, expected float32": {"embed.weight": None},
    "scale: missing": {"scale": None},
    "head.weight: left over": {"head.weight": torch.zeros(50, 64)},
    "norm.weight: found bfloat16": {"norm.weight": torch.zeros(64, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("message", ONLY_MODULES)
@pytest.mark.parametrize("damaged", ["module"], indirect=True)
def test_tensors_of_a_module_that_do_not_fit_are_named(damaged, message):
    """What is tied, buffers and dtypes."""
    place, folder = damaged
    changes = ONLY_MODULES[message]
    found = {name: tensor for name, tensor in (load_file(folder / place.file) | changes).items() if tensor is not None}
    save_file({name: tensor.clone() for name, tensor in found.items()}, folder / place.file)
    with pytest.raises(ValueError, match=message):
        place.load(folder)


# --- one file -------------------------------------------------------------------------------------


def header(change):
    """Edits the dict in the header of a file, or what stands in its place."""

    def damage(data: bytes) -> bytes:
        end = 8 + int.from_bytes(data[:8], "little")
        entries = json.loads(data[8:end])
        text = json.dumps(change(entries) or entries).encode()
        return len(text).to_bytes(8, "little") + text + data[end:]

    return damage


NORM = "norm.weight"
CUT = r"damaged or cut short at tensor \S+: found \d+ bytes, expected \d+ \("
FILES = {
    "one byte cut": (lambda data: data[:-1], CUT),
    "cut to half": (lambda data: data[: len(data) // 2], CUT),
    "cut in the header": (lambda data: data[:100], r"damaged or cut short \("),
    "cut in the length": (lambda data: data[:5], r"damaged or cut short \("),
    "empty": (lambda data: b"", r"damaged or cut short \("),
    "length": (lambda data: b"\xff" * 8 + data[8:], "damaged"),
    "garbage": (lambda data: data[:8] + b"\xff" * len(data), "damaged"),
    "deep": (lambda data: (10**6).to_bytes(8, "little") + b"[" * 10**6, "damaged"),
    "a list": (header(lambda entries: [1]), "damaged"),
    "no entry": (header(lambda entries: entries.update({NORM: None})), "damaged"),
    "no offsets": (header(lambda entries: entries[NORM].pop("data_offsets") and None), "damaged"),
    "a number for a shape": (header(lambda entries: entries[NORM].update(shape=384)), "damaged"),
    "unknown dtype": (header(lambda entries: entries[NORM].update(dtype="I3")), "damaged"),
    "too much": (lambda data: data + b"\0" * 4, "damaged"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damaged", ["module"], indirect=True)
def test_a_damaged_file_is_named(damaged, name):
    place, folder = damaged
    damage, message = FILES[name]
    (folder / place.file).write_bytes(damage((folder / place.file).read_bytes()))
    with pytest.raises(ValueError, match=rf"{place.file}: {message}"):
        place.load(folder)


@pytest.mark.parametrize("damaged", ["module"], indirect=True)
def test_a_damaged_config_is_named(damaged):
    place, folder = damaged
    text = (folder / place.config).read_text()
    for change, message in (
        (lambda file: file.write_text(text[:40]), "kbit_config.json: Expecting"),
        (lambda file: file.write_text("[" * 100_000), "kbit_config.json: "),
        (Path.unlink, "found no kbit_config.json, expected a folder that"),
    ):
        change(folder / place.config)
        with pytest.raises(ValueError, match=message):
            place.load(folder)


# --- state dicts ----------------------------------------------------------------------------------


def as_floats(change):
    """Of what says how a weight decodes."""
    return lambda bits: change(bits.view(torch.float64)).contiguous().view(torch.int64)


STATE_DICTS = [
    ("weight", torch.Tensor.float, r"0\.weight: found dtype torch.float32 .*, expected dtype torch.int32"),
    ("weight_absmax", torch.Tensor.float, r"weight_absmax: found dtype torch.float32 .*, expected dtype torch.uint8"),
    ("weight", lambda t: t[:5], r"weight: found .*shape \[5, 16\], expected .*shape \[48, 16\]"),
    ("weight_columns", lambda t: t[:5], r"weight_columns: found .*shape \[5\], expected .*shape \[100\]"),
    ("weight_columns", None, r"weight_columns: found none, expected .*shape \[100\]"),
    ("weight_absmax", None, "0.weight_absmax: found none, expected dtype torch.uint8"),
    ("weight", None, r'Missing key.*"0.weight"'),
    ("weight_decoding", torch.Tensor.float, r"0\.weight_decoding.*: found dtype torch.float32"),
    ("weight_decoding", lambda t: t[1:], r"0\.weight_decoding.*: found .*shape \[17\], expected .*shape \[18\]"),
    ("weight_decoding", as_floats(lambda t: t.flip(0)), r"0\.weight_decoding.*: found"),
    ("weight_decoding", as_floats(lambda t: t + 0.5), r"0\.weight_decoding.*: found"),
    ("weight_decoding", as_floats(lambda t: t * torch.nan), r"0\.weight_decoding.*: found"),
]
METADATA = [
    (None, "0.weight: found None, expected levels, exponent and perhaps transform"),
    ({"levels": [-1.0, 0.0, 1.0], "exponent": 0}, "0.weight.levels: found 3 levels"),
    ({"levels": [1.0, 0.5, 0.0, -1.0], "exponent": 0}, "0.weight.levels: found .*, expected them ascending"),
    ({"levels": [-1.0, 0.0, 0.5, 1.0], "exponent": 500}, "0.weight.exponent: found 500"),
    ({"levels": [-1.0, 0.0, 0.5, 1.0], "exponent": 0, "transform": "x"}, "0.weight.transform: found 'x'"),
    ({"levels": [-1.0, 0.0, 0.5, 1.0], "transform": "none"}, "0.weight: found .*, expected levels, exponent"),
]


def linear(bits: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(KbitLinear.from_linear(nn.Linear(100, 48), bits))


def state_dict_is_refused(made: nn.Module, state: dict, message: str) -> None:
    before = made[0].dequantize()
    with pytest.raises(RuntimeError, match=message):
        made.load_state_dict(state)
    assert torch.equal(made[0].dequantize(), before)


@pytest.mark.parametrize("name, damage, message", STATE_DICTS)
def test_a_damaged_state_dict_is_refused(name, damage, message, form):
    state = (made := linear()).state_dict()
    tensor = state.pop(f"0.{name}")
    state_dict_is_refused(made, state if damage is None else state | {f"0.{name}": damage(tensor)}, message)


@pytest.mark.parametrize("stored, message", METADATA)
def test_damaged_metadata_of_a_state_dict_of_0_1_is_refused(stored, message):
    """Which says in it how weights decode."""
    state = (made := linear(2)).state_dict()
    del state["0.weight_decoding"]
    state._metadata = {"0": {"version": 1, "kbit": stored}}
    state_dict_is_refused(made, state, message)


def test_state_dicts_of_other_layers_are_refused():
    dense, others = nn.Sequential(nn.Linear(100, 48)).state_dict(), linear().state_dict()
    state_dict_is_refused(linear(), dense, r"weight: found dtype torch\.float32 .* expected dtype torch\.int32")
    narrow = nn.Sequential(KbitLinear(96, 48))
    state_dict_is_refused(narrow, others, r"weight: found .* shape \[48, 16\], expected .* shape \[48, 12\]")


def test_a_decoding_that_is_not_the_configs_is_refused(tmp_path, tmp_path_factory):
    """In files that another library has written of a state dict."""
    life = kinds.life("packed head", tmp_path_factory)
    state = dict(life.model.state_dict())
    name = "model.layers.0.mlp.up_proj.weight_decoding"
    state[name] = life.model.state_dict()[name].clone()
    state[name].view(torch.float64)[-2] += 1
    save_file(state, tmp_path / "model.safetensors")
    life.model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}: found .*, expected"):
        life.cls.from_pretrained(tmp_path, config=AutoConfig.from_pretrained(tmp_path))


# --- headers and configs damaged at random --------------------------------------------------------
# A case is a number: it seeds the choice of a model and of a damage, and all that is random in it.
# ``HF_KBIT_DAMAGES=100000 pytest -m slow tests/test_damaged.py`` tries more.

FEW, MANY = 60, int(os.environ.get("HF_KBIT_DAMAGES", "2500"))
CONFIG, WEIGHTS = CAUSAL
# Format 2 and 1, levels of each layer, tied heads, experts, format 3; some layer of most has an exponent.
MODELS = "mixed widths", "version 1", "layers that differ", "tied", "experts", "trellis", "EXL3"
EXL3 = Path(__file__).parent / "data" / "exl3" / "llama"


@functools.cache
def of_exl3() -> SimpleNamespace:
    """A folder of exllamav3, as if it were a life."""
    inputs = {"input_ids": torch.arange(8)[None]}
    return SimpleNamespace(inputs=inputs, expected=kinds.run(AutoModelForCausalLM.from_pretrained(EXL3), inputs))


@pytest.fixture(params=MODELS)
def saved(request, tmp_path_factory) -> tuple[kinds.Life, dict[str, bytes]]:
    if request.param == "EXL3":
        return of_exl3(), {name: (EXL3 / name).read_bytes() for name in CAUSAL}
    life = kinds.life(request.param, tmp_path_factory)
    return life, {name: (life.folder / "saved" / name).read_bytes() for name in CAUSAL}


def changed_entries(files) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Of all that decides how tensors decode, but the exponent of a layer, which no tensor contradicts."""
    content = json.loads(files[CONFIG])
    for name in sorted(content["quantization_config"].keys() & set(ENTRIES)):
        for value in (None, 5, "x", [], {"x": 1}, True):
            entries = content["quantization_config"] | {name: value}
            yield name, files | {CONFIG: json.dumps(content | {"quantization_config": entries}).encode()}
    for layer in content["quantization_config"]["layers"]:
        for entry in ({"bits": 4}, {"transform": "x"}, {"levels": [1]}, {"exponent": 0.5}, None):
            changed = json.loads(files[CONFIG])
            changed["quantization_config"]["layers"][layer] = entry
            yield layer if entry != {"bits": 4} else "bits", files | {CONFIG: json.dumps(changed).encode()}


def without_digests(files) -> dict[str, bytes]:
    return files | {WEIGHTS: files[WEIGHTS].replace(b"kbit_digest", b"xbit_digest").replace(b"kbit_ten", b"xbit_ten")}


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "without digests"])
@pytest.mark.parametrize("saved", MODELS[:1], indirect=True)
def test_every_entry_that_was_changed_is_named(saved, sealed, tmp_path):
    """Also without a digest that would tell that something was changed."""
    (life, whole), wrong, named = saved, [], 0
    for name, files in changed_entries(whole):
        for file, data in (files if sealed else without_digests(files)).items():
            (tmp_path / file).write_bytes(data)
        found = outcome(life, tmp_path)
        if isinstance(found, ValueError | TypeError) and re.search(rf"(?<![.\w]){re.escape(name)}\b", str(found)):
            named += 1
        elif isinstance(found, Exception) or not same(found, life):
            wrong.append(f"{name}: {found!r:.300}")
    assert not wrong and named > 40, "\n".join(wrong[:30])


ODD = [None, True, False, 0, 1, -1, 3, 7, 2.5, 1e300, 10**400, float("nan"), "", "x", "3", [], [1], [[]], {}, {"x": 1}]
ODD += [
    "optimal",
    "(",
    "(a*)*b",
    "a{99999999999}",
    "(" * 3000,
    {"3": []},
    {"4": [0.0] * 16},
    [None],
    [["a", 3], ["b"]],
]


def change_a_byte_of_the_header(files, pick):
    data = bytearray(files[WEIGHTS])
    data[pick.randrange(8 + int.from_bytes(data[:8], "little"))] = pick.randrange(256)
    files[WEIGHTS] = bytes(data)


def put_something_odd_into_the_header(files, pick):
    data = files[WEIGHTS]
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    entry = header[pick.choice(sorted(header))]
    entry[pick.choice(sorted(entry))] = pick.choice(ODD)
    text = json.dumps(header).encode()
    files[WEIGHTS] = len(text).to_bytes(8, "little") + text + data[end:]


def put_something_odd_into_the_config(files, pick):
    content = json.loads(files[CONFIG])
    entries = content["quantization_config"]
    # Of an unknown method Transformers asks nobody: it warns, and draws what it does not find in 16 bits.
    key = pick.choice([*sorted(entries.keys() - ({"quant_method"} if "levels" not in entries else set())), "new"])
    if pick.random() < 0.1:
        entries, key = content, "architectures"
    if pick.random() < 0.1:
        entries.pop(key, None)
    else:
        entries[key] = pick.choice([*ODD, ["LlamaModel"], ["pipeline"], ["LlamaConfig"], ["NoSuch"]])
    files[CONFIG] = json.dumps(content).encode()


def change_what_decodes(files, pick):
    content = json.loads(files[CONFIG])
    if "levels" not in content["quantization_config"]:
        return put_something_odd_into_the_config(files, pick)
    levels, layers = (content["quantization_config"][key] for key in ("levels", "layers"))
    layer = pick.choice([*sorted(layers), "model.layers.0.mlp.up_proj", "lm_head", "x"])
    width = pick.choice(sorted(levels))
    match pick.randrange(5):
        case 0:
            levels[width][pick.randrange(1, 4)] *= pick.choice([0.5, 0.999, 1.001])
        case 1:
            layers.setdefault(layer, {})["exponent"] = pick.choice([*ODD, *range(-8, 8)])
        case 2:
            key = pick.choice(["bits", "levels", "x", "code", "block", "stacked"])
            layers.setdefault(layer, {})[key] = pick.choice([*ODD, 2, 4, 5, 64, "mcg"])
        case 3:
            layers.pop(layer, None)
        case 4:
            levels[pick.choice([width, "2", "9"])] = pick.choice([*ODD, levels[width]])
    files[CONFIG] = json.dumps(content).encode()


RANDOM = [change_a_byte_of_the_header, put_something_odd_into_the_header]
RANDOM += 2 * [put_something_odd_into_the_config, change_what_decodes]


def outcome(life: kinds.Life, folder: Path | str) -> dict[str, torch.Tensor] | Exception:
    """What the model computes, or the error."""
    try:
        return kinds.run(AutoModelForCausalLM.from_pretrained(folder), life.inputs)
    except Exception as error:
        return error


def same(found: dict[str, torch.Tensor], life: kinds.Life) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in life.expected.items())


def raised_here(error: Exception) -> bool:
    """Whether the error comes out of this package, and not of Transformers before it is called."""
    return any("/hf_kbit/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def names_the_cause(error: Exception) -> bool:
    """Whether the error is one that is meant for users, and names a tensor, a file or an entry of config.json."""
    entries = ("architectures", "quantization_config", "config.json", *ENTRIES, *KbitConfig().to_dict())
    named = re.search(rf"model\.|lm_head|safetensors|\b({'|'.join(map(re.escape, entries))})\b", str(error))
    return isinstance(error, (TypeError, ValueError, OSError)) and named is not None


MARKS = [pytest.mark.slow, pytest.mark.timeout(60 + MANY // 5)]


@pytest.mark.timeout(60)  # a case that hangs fails so; the usual one takes a twentieth of a second
@pytest.mark.parametrize("cases", [range(FEW), pytest.param(range(FEW, FEW + MANY), marks=MARKS)], ids=["few", "many"])
def test_a_damaged_checkpoint_is_refused_or_loads_the_same(saved, cases, request):
    (life, whole), wrong = saved, []
    request.addfinalizer(functools.partial(transformers.logging.set_verbosity, transformers.logging.get_verbosity()))
    transformers.logging.set_verbosity(50)
    for case in cases[MODELS.index(request.node.callspec.params["saved"]) :: len(MODELS)]:
        pick, files = random.Random(case), dict(whole)
        damage = pick.choice(RANDOM)
        damage(files, pick)
        with TemporaryDirectory() as folder:
            for name, data in files.items():
                Path(folder, name).write_bytes(data)
            found = outcome(life, folder)
        if isinstance(found, Exception):
            if raised_here(found) and not names_the_cause(found):
                wrong.append(f"{case} {damage.__name__}: {type(found).__name__}: {str(found)[:200]}")
        elif not same(found, life):
            wrong.append(f"{case} {damage.__name__}: loads and differs")
    assert not wrong, "\n".join(wrong[:30])
