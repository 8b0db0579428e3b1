"""Checkpoints damaged at random: each is refused with an error that names what is wrong, or loads to the same model.

A case is a number: it seeds the choice of a model and of a damage below and all that is random in it. Damaged tensors
are those of ``test_fit.py`` and of ``tests/test_checkpoint.py``. Damages that no
header and no digest can tell, in the data itself, are marked ``PAYLOAD``; they may change the model, and no more.

``HF_KBIT_DAMAGES=100000 pytest -m slow tests/integrations/transformers/test_damaged.py`` tries more.
"""

import json
import os
import random
import re
import traceback
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory

import cases
import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from hf_kbit import KbitConfig
from hf_kbit.stored import ENTRIES

TOKENS = torch.arange(12).reshape(2, 6)
FEW, MANY = 60, int(os.environ.get("HF_KBIT_DAMAGES", "4000"))

Files = dict[str, bytes]


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


def save_model(directory: Path, model_type: str, shape: dict, settings: dict) -> None:
    """A model of several widths, one layer of which has an exponent, in one file and in several; of experts all have
    levels of their own."""
    torch.manual_seed(0)
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **shape)).bfloat16()
    with torch.no_grad():
        dense.model.layers[1].self_attn.v_proj.weight *= 2.0**12
    dense.save_pretrained(directory / "dense")
    config = KbitConfig(bits=3, module_bits={"q_proj": 4, "down_proj": 5}, **settings)
    model = AutoModelForCausalLM.from_pretrained(directory / "dense", quantization_config=config)
    if model_type == "qwen3_moe":
        cases.give_own_levels(model.model.layers)
    model.save_pretrained(directory / "one")
    model.save_pretrained(directory / "several", max_shard_size="6KB")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> list[tuple[Files, torch.Tensor]]:
    """The files of each model, in one file and in several, and its output."""
    found = []
    for number, model in enumerate(MODELS):
        directory = tmp_path_factory.mktemp(f"model{number}")
        save_model(directory, *model)
        for name in ("one", "several"):
            files = {file.name: file.read_bytes() for file in (directory / name).iterdir()}
            found.append((files, outcome(directory / name)))
    return found


# --- damages: functions that change some bytes of some file ---------------------------------------


def weights(files: Files) -> list[str]:
    return sorted(name for name in files if name.endswith(".safetensors"))


def header_of(data: bytes) -> tuple[dict, int]:
    """The header and where the data begins."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end


def of_header(change):
    """A damage by what changes the header of a file."""

    @wraps(change)
    def damage(files, pick):
        name = pick.choice(weights(files))
        header, end = header_of(files[name])
        change(header, pick)
        text = json.dumps(header).encode()
        files[name] = len(text).to_bytes(8, "little") + text + files[name][end:]

    return damage


def of_json(name: str):
    """A damage by what changes a file of JSON, if there is one."""

    def decorate(change):
        @wraps(change)
        def damage(files, pick):
            if name in files:
                content = json.loads(files[name])
                change(content, pick)
                files[name] = json.dumps(content).encode()

        return damage

    return decorate


def of_bytes(change):
    """A damage by what changes the bytes of a file, and is told where its data begins."""

    @wraps(change)
    def damage(files, pick):
        name = pick.choice(weights(files))
        data = bytearray(files[name])
        change(data, header_of(files[name])[1], pick)
        files[name] = bytes(data)

    return damage


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


@of_bytes
def flip_a_bit_of_the_data(data, begin, pick):
    data[pick.randrange(begin, len(data))] ^= 1 << pick.randrange(8)


@of_bytes
def change_a_byte_of_the_header(data, begin, pick):
    data[pick.randrange(begin)] = pick.randrange(256)


def cut(files, pick):
    name = pick.choice(sorted(files))
    files[name] = files[name][: pick.randrange(len(files[name]))]


@of_header
def put_something_odd_into_the_header(header, pick):
    entry = header[pick.choice(sorted(header))]
    entry[pick.choice(sorted(entry))] = pick.choice(ODD)


def replace_a_file_by_another(files, pick):
    files[pick.choice(weights(files))] = files[pick.choice(weights(files))]


def lose_a_file(files, pick):
    del files[pick.choice(weights(files))]


@of_json("model.safetensors.index.json")
def change_the_index(index, pick):
    name, places = pick.choice(sorted(index["weight_map"])), index["weight_map"]
    if pick.random() < 0.5:
        places[name] = pick.choice([*places.values(), "x.safetensors", ""])
    else:
        del places[name]


@of_json("config.json")
def put_something_odd_into_the_config(content, pick):
    entries = content["quantization_config"]
    key = pick.choice([*sorted(entries), "new"])
    if pick.random() < 0.1:
        entries, key = content, "architectures"
    if pick.random() < 0.1:
        entries.pop(key, None)
    else:
        entries[key] = pick.choice([*ODD, ["LlamaModel"], ["pipeline"], ["LlamaConfig"], ["NoSuch"]])


@of_json("config.json")
def change_what_decodes(content, pick):
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


PAYLOAD = [flip_a_bit_of_the_data]
HEADER = [change_a_byte_of_the_header, put_something_odd_into_the_header]
FILES = [cut, replace_a_file_by_another, lose_a_file, change_the_index]
CONFIG = [put_something_odd_into_the_config, change_what_decodes]
DAMAGES = [*PAYLOAD, *HEADER, *FILES, *(3 * CONFIG)]


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
def test_a_damaged_checkpoint_is_refused_or_loads_the_same(saved, tmp_path, cases):
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(50)
    wrong = []
    try:
        for case in cases:
            source, expected = saved[case % len(saved)]
            pick, files = random.Random(case), dict(source)
            damage = pick.choice(DAMAGES)
            damage(files, pick)
            with TemporaryDirectory(dir=tmp_path) as directory:
                for name, data in files.items():
                    Path(directory, name).write_bytes(data)
                found = outcome(directory)
            if isinstance(found, Exception):
                if raised_here(found) and not names_the_cause(found):
                    wrong.append(f"{case} {damage.__name__}: {type(found).__name__}: {str(found)[:200]}")
            elif damage not in PAYLOAD and not torch.equal(found, expected):
                wrong.append(f"{case} {damage.__name__}: loads and differs")
    finally:
        transformers.logging.set_verbosity(verbosity)
    assert not wrong, "\n".join(wrong[:30])
