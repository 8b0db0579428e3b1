"""Headers and configs damaged at random: a checkpoint is refused with an error that names what is wrong, or loads to
the same model.

A case is a number: it seeds the choice of a model and of a damage below and all that is random in it. Files that are
cut, lost or of another save are those of ``tests/test_checkpoint.py``, changed tensors those of ``test_fit.py``.

``HF_KBIT_DAMAGES=100000 pytest -m slow tests/integrations/transformers/test_damaged.py`` tries more.
"""

import json
import os
import random
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import cases
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from hf_kbit import KbitConfig
from hf_kbit.files.checkpoint import PACKED_SUFFIXES
from hf_kbit.format.model import ENTRIES

TOKENS = torch.arange(12).reshape(2, 6)
FEW, MANY = 60, int(os.environ.get("HF_KBIT_DAMAGES", "4000"))
WEIGHTS, CONFIG = "model.safetensors", "config.json"

SHAPE = dict(vocab_size=72, hidden_size=32, intermediate_size=48, num_attention_heads=2, num_hidden_layers=2)
EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=40, num_key_value_heads=2, head_dim=16)
TIED = {"tie_word_embeddings": True}
# Types of models, their shapes, and how they are quantized: format 2 and 1, tables, tied heads, experts.
MODELS = [
    ("llama", SHAPE, {}),
    ("llama", SHAPE, {"transform": "none"}),
    ("llama", SHAPE | TIED, {"embedding_bits": 5}),
    ("qwen3_moe", SHAPE | EXPERTS, {"embedding_bits": 4}),
]


@pytest.fixture(scope="module", params=range(len(MODELS)))
def saved(request, tmp_path_factory) -> tuple[int, dict[str, bytes], torch.Tensor]:
    """A number, the files and the output of a model of several widths, one layer of which has an exponent; of experts
    all have levels of their own."""
    model_type, shape, settings = MODELS[request.param]
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape)).bfloat16()
    with torch.no_grad():
        dense.model.layers[1].self_attn.v_proj.weight *= 2.0**12
    dense.save_pretrained(directory / "dense")
    config = KbitConfig(bits=3, module_bits={"q_proj": 4, "down_proj": 5}, **settings)
    model = AutoModelForCausalLM.from_pretrained(directory / "dense", quantization_config=config)
    if model_type == "qwen3_moe":
        cases.give_own_levels(model.model.layers)
    model.save_pretrained(directory)
    files = {name: (directory / name).read_bytes() for name in (WEIGHTS, CONFIG)}
    return request.param, files, outcome(directory)


# --- one damage after another ---------------------------------------------------------------------


def changed_tensors(files) -> Iterator[tuple[str, dict[str, bytes]]]:
    """What each error names, and the files, with what the header says of one tensor of each kind changed."""
    data = files[WEIGHTS]
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])

    def written(entries) -> dict[str, bytes]:
        text = json.dumps(entries).encode()
        return files | {WEIGHTS: len(text).to_bytes(8, "little") + text + data[end:]}

    for name in (
        *(f"model.layers.0.mlp.up_proj{own}" for own in PACKED_SUFFIXES),
        "model.norm.weight",
        "lm_head.weight",
    ):
        entry = header[name]
        rest = {other: own for other, own in header.items() if other != name}
        yield name, written(rest | {f"{name}_other": entry})
        yield (
            name,
            written(rest | {name: entry | {"dtype": {"BF16": "I16", "I32": "F32", "U8": "I8"}[entry["dtype"]]}}),
        )
        yield name, written(rest | {name: entry | {"shape": [*entry["shape"], 1]}})


def changed_entries(files) -> Iterator[tuple[str, dict[str, bytes]]]:
    """Of all that decides how tensors decode, but the exponent of a layer, which no tensor contradicts."""
    content = json.loads(files[CONFIG])
    for name in sorted(content["quantization_config"].keys() & set(ENTRIES)):
        for value in (None, 5, "x", [], {"x": 1}, True):
            entries = content["quantization_config"] | {name: value}
            yield name, files | {CONFIG: json.dumps(content | {"quantization_config": entries}).encode()}
    for layer in content["quantization_config"]["layers"]:
        for entry in ({"bits": 2}, {"transform": "x"}, {"levels": [1]}, {"exponent": 0.5}, None):
            changed = json.loads(files[CONFIG])
            changed["quantization_config"]["layers"][layer] = entry
            yield layer if entry != {"bits": 2} else "bits", files | {CONFIG: json.dumps(changed).encode()}


def without_digests(files) -> dict[str, bytes]:
    return files | {WEIGHTS: files[WEIGHTS].replace(b"kbit_digest", b"xbit_digest").replace(b"kbit_ten", b"xbit_ten")}


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "without digests"])
@pytest.mark.parametrize("saved", [0], indirect=True)
def test_what_was_changed_is_named(saved, sealed, tmp_path):
    """Every tensor and every entry, also without a digest that would tell that something was changed."""
    _, whole, expected = saved
    wrong, named = [], 0
    for name, files in (*changed_tensors(whole), *changed_entries(whole)):
        for file, data in (files if sealed else without_digests(files)).items():
            (tmp_path / file).write_bytes(data)
        found = outcome(tmp_path)
        if isinstance(found, ValueError | TypeError) and re.search(rf"(?<![.\w]){re.escape(name)}\b", str(found)):
            named += 1
        elif isinstance(found, Exception) or not torch.equal(found, expected):
            wrong.append(f"{name}: {found!r:.300}")
    assert not wrong and named > 50, "\n".join(wrong[:30])


# --- damages: functions that change some bytes of some file ---------------------------------------

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
    key = pick.choice([*sorted(entries), "new"])
    if pick.random() < 0.1:
        entries, key = content, "architectures"
    if pick.random() < 0.1:
        entries.pop(key, None)
    else:
        entries[key] = pick.choice([*ODD, ["LlamaModel"], ["pipeline"], ["LlamaConfig"], ["NoSuch"]])
    files[CONFIG] = json.dumps(content).encode()


def change_what_decodes(files, pick):
    content = json.loads(files[CONFIG])
    levels, layers = (content["quantization_config"][key] for key in ("levels", "layers"))
    layer = pick.choice([*sorted(layers), "model.layers.0.mlp.up_proj", "lm_head", "x"])
    width = pick.choice(sorted(levels))
    match pick.randrange(5):
        case 0:
            levels[width][pick.randrange(1, 4)] *= pick.choice([0.5, 0.999, 1.001])
        case 1:
            layers.setdefault(layer, {})["exponent"] = pick.choice([*ODD, *range(-8, 8)])
        case 2:
            key = pick.choice(["bits", "levels", "x"])
            layers.setdefault(layer, {})[key] = pick.choice([*ODD, 2, 4, 5])
        case 3:
            layers.pop(layer, None)
        case 4:
            levels[pick.choice([width, "2", "9"])] = pick.choice([*ODD, levels["3"]])
    files[CONFIG] = json.dumps(content).encode()


DAMAGES = [change_a_byte_of_the_header, put_something_odd_into_the_header]
DAMAGES += 2 * [put_something_odd_into_the_config, change_what_decodes]


# --- what may come of it --------------------------------------------------------------------------


@torch.no_grad()
def outcome(directory: Path | str):
    """The output of the model, or the error."""
    try:
        return AutoModelForCausalLM.from_pretrained(directory)(TOKENS).logits
    except Exception as error:
        return error


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
def test_a_damaged_checkpoint_is_refused_or_loads_the_same(saved, cases):
    number, whole, expected = saved
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(50)
    wrong = []
    try:
        for case in cases[number :: len(MODELS)]:
            pick, files = random.Random(case), dict(whole)
            damage = pick.choice(DAMAGES)
            damage(files, pick)
            with TemporaryDirectory() as directory:
                for name, data in files.items():
                    Path(directory, name).write_bytes(data)
                found = outcome(directory)
            if isinstance(found, Exception):
                if raised_here(found) and not names_the_cause(found):
                    wrong.append(f"{case} {damage.__name__}: {type(found).__name__}: {str(found)[:200]}")
            elif not torch.equal(found, expected):
                wrong.append(f"{case} {damage.__name__}: loads and differs")
    finally:
        transformers.logging.set_verbosity(verbosity)
    assert not wrong, "\n".join(wrong[:30])
