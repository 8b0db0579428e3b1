"""Checkpoints damaged at random: each is refused with an error that names what is wrong, or loads to the same model.

A case is a number: it seeds the choice of a model and of a damage below and all that is random in it. Damages that no
header and no digest can tell, in the data itself, are marked ``PAYLOAD``; they may change the model, and no more.

``HF_KBIT_DAMAGES=100000 pytest -m slow tests/integrations/transformers/test_damaged.py`` tries more.
"""

import json
import os
import random
import re
import signal
import traceback
from pathlib import Path

import cases
import pytest
import torch
import transformers
from safetensors.torch import load, save
from transformers import AutoConfig, AutoModelForCausalLM

from hf_kbit import KbitConfig
from hf_kbit.stored import ENTRIES

TOKENS = torch.arange(12).reshape(2, 6)
SECONDS = 20  # a case that takes this long hangs; the usual one takes a twentieth of a second
FEW, MANY = 100, int(os.environ.get("HF_KBIT_DAMAGES", "4000"))

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


def edit_bytes(files: Files, name: str, start: int, stop: int, new: bytes) -> None:
    files[name] = files[name][:start] + new + files[name][stop:]


def header_of(data: bytes) -> tuple[dict, int]:
    """The header and where the data begins."""
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), end


def edit_header(files: Files, name: str, change) -> None:
    header, end = header_of(files[name])
    change(header)
    text = json.dumps(header).encode()
    files[name] = len(text).to_bytes(8, "little") + text + files[name][end:]


def edit_tensors(files: Files, name: str, change) -> None:
    tensors, metadata = load(files[name]), header_of(files[name])[0]["__metadata__"]
    change(tensors)
    files[name] = save({key: tensor.contiguous() for key, tensor in tensors.items()}, metadata)


def edit_json(files: Files, name: str, change) -> None:
    content = json.loads(files[name])
    change(content)
    files[name] = json.dumps(content).encode()


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


def flip_a_bit_of_the_data(files, pick):
    name = pick.choice(weights(files))
    _, end = header_of(files[name])
    place = pick.randrange(end, len(files[name]))
    edit_bytes(files, name, place, place + 1, bytes([files[name][place] ^ 1 << pick.randrange(8)]))


def swap_two_tensors_alike(files, pick):
    def swap(tensors):
        name = pick.choice(sorted(tensors))
        alike = [
            n
            for n in sorted(tensors)
            if tensors[n].shape == tensors[name].shape and tensors[n].dtype == tensors[name].dtype
        ]
        other = pick.choice(alike)
        tensors[name], tensors[other] = tensors[other], tensors[name]

    edit_tensors(files, pick.choice(weights(files)), swap)


def relabel_a_tensor(files, pick):
    def relabel(header):
        others = {"BF16": "F16", "U8": "I8", "I32": "F32"}
        name = pick.choice([name for name in sorted(header) if name != "__metadata__"])
        header[name]["dtype"] = others[header[name]["dtype"]]

    edit_header(files, pick.choice(weights(files)), relabel)


def change_a_byte_of_the_header(files, pick):
    name = pick.choice(weights(files))
    _, end = header_of(files[name])
    place = pick.randrange(end)
    edit_bytes(files, name, place, place + 1, bytes([pick.randrange(256)]))


def cut(files, pick):
    name = pick.choice(sorted(files))
    files[name] = files[name][: pick.randrange(len(files[name]))]


def append(files, pick):
    files[pick.choice(weights(files))] += pick.randbytes(pick.randrange(1, 40))


def zero_a_page(files, pick):
    """As a file system may leave it after a crash; here of the header alone."""
    name = pick.choice(weights(files))
    place = pick.randrange(header_of(files[name])[1])
    edit_bytes(files, name, place, place + 64, b"\0" * 64)


def put_something_odd_into_the_header(files, pick):
    def change(header):
        entry = header[pick.choice(sorted(header))]
        entry[pick.choice(sorted(entry))] = pick.choice(ODD)

    edit_header(files, pick.choice(weights(files)), change)


def nest_the_header(files, pick):
    depth = pick.choice([100, 3000, 200000])
    files[pick.choice(weights(files))] = depth.to_bytes(8, "little") + b"[" * depth


def drop_a_tensor(files, pick):
    edit_tensors(files, pick.choice(weights(files)), lambda tensors: tensors.pop(pick.choice(sorted(tensors))))


def rename_a_tensor(files, pick):
    def rename(tensors):
        name = pick.choice(sorted(tensors))
        place = pick.randrange(len(name))
        tensors[name[:place] + pick.choice("xyz.0") + name[place + 1 :]] = tensors.pop(name)

    edit_tensors(files, pick.choice(weights(files)), rename)


def reshape_a_tensor(files, pick):
    def change(tensors):
        name = pick.choice(sorted(tensors))
        tensor = tensors[name]
        ways = [tensor[:-1], tensor[..., :-1], tensor.flatten()[1:], tensor[None], torch.cat([tensor, tensor])]
        tensors[name] = pick.choice(ways)

    edit_tensors(files, pick.choice(weights(files)), change)


def change_a_kind(files, pick):
    """From integers to floats, or to integers of another kind."""

    def change(tensors):
        name = pick.choice(sorted(tensors))
        kinds = [torch.int8, torch.int16, torch.int64, torch.bool, torch.uint8, torch.int32, torch.float32]
        others = [kind for kind in kinds if kind.is_floating_point != tensors[name].is_floating_point()]
        others += [kind for kind in kinds[:4] if kind != tensors[name].dtype]
        tensors[name] = tensors[name].to(pick.choice(others))

    edit_tensors(files, pick.choice(weights(files)), change)


def put_a_tensor_into_two_files(files, pick):
    source, target = pick.choice(weights(files)), pick.choice(weights(files))
    tensors = load(files[source])
    name = pick.choice(sorted(tensors))
    edit_tensors(
        files, target, lambda others: others.update({name: tensors[name].flip(0)} if source != target else {})
    )


def replace_a_file_by_another(files, pick):
    files[pick.choice(weights(files))] = files[pick.choice(weights(files))]


def put_a_file_of_another_save(files, pick):
    """Which differs in its floats, after a training say, and has the same config."""

    def change(tensors):
        for name, tensor in tensors.items():
            tensors[name] = tensor * 2 if tensor.is_floating_point() else tensor

    edit_tensors(files, pick.choice(weights(files)), change)


def lose_a_file(files, pick):
    del files[pick.choice(weights(files))]


def change_the_index(files, pick):
    def change(index):
        names = sorted(index["weight_map"])
        if pick.random() < 0.5:
            index["weight_map"][pick.choice(names)] = pick.choice([*index["weight_map"].values(), "x.safetensors", ""])
        else:
            index["weight_map"].pop(pick.choice(names))

    if "model.safetensors.index.json" in files:
        edit_json(files, "model.safetensors.index.json", change)


def put_something_odd_into_the_config(files, pick):
    def change(content):
        entries = content["quantization_config"]
        if pick.random() < 0.1:
            entries, key = content, "architectures"
        else:
            key = pick.choice([*sorted(entries), "new"])
        if pick.random() < 0.1:
            entries.pop(key, None)
        else:
            entries[key] = pick.choice([*ODD, ["LlamaModel"], ["pipeline"], ["LlamaConfig"], ["NoSuch"]])

    edit_json(files, "config.json", change)


def change_what_decodes(files, pick):
    def change(content):
        entries = content["quantization_config"]
        layer = pick.choice([*sorted(entries["layers"]), "model.layers.0.mlp.up_proj", "lm_head", "x"])
        width = pick.choice(sorted(entries["levels"]))
        kind = pick.randrange(5)
        if kind == 0:
            entries["levels"][width][pick.randrange(1, 4)] *= pick.choice([0.5, 0.999, 1.001])
        elif kind == 1:
            entries["layers"].setdefault(layer, {})["exponent"] = pick.choice([*ODD, *range(-8, 8)])
        elif kind == 2:
            entries["layers"].setdefault(layer, {})[pick.choice(["bits", "levels", "x"])] = pick.choice(
                [*ODD, 2, 4, 5]
            )
        elif kind == 3:
            entries["layers"].pop(layer, None)
        else:
            entries["levels"][pick.choice([width, "2", "9"])] = pick.choice([*ODD, entries["levels"]["3"]])

    edit_json(files, "config.json", change)


PAYLOAD = [flip_a_bit_of_the_data]
STRUCTURE = [
    swap_two_tensors_alike,
    relabel_a_tensor,
    put_a_file_of_another_save,
    change_a_byte_of_the_header,
    cut,
    append,
    zero_a_page,
    put_something_odd_into_the_header,
    nest_the_header,
    drop_a_tensor,
    rename_a_tensor,
    reshape_a_tensor,
    change_a_kind,
    put_a_tensor_into_two_files,
    replace_a_file_by_another,
    lose_a_file,
    change_the_index,
]
CONFIG = [put_something_odd_into_the_config, change_what_decodes]
DAMAGES = [*PAYLOAD, *STRUCTURE, *(5 * CONFIG)]


# --- what may come of it --------------------------------------------------------------------------


class Hangs(BaseException):
    pass


def _alarm(*args):
    raise Hangs


@torch.no_grad()
def outcome(directory: Path):
    """The output of the model, or the error."""
    previous = signal.signal(signal.SIGALRM, _alarm)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        return AutoModelForCausalLM.from_pretrained(directory)(TOKENS).logits
    except Exception as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def raised_here(error: Exception) -> bool:
    """Whether the error comes out of this package, and not of Transformers before it is called."""
    return any("/hf_kbit/" in frame.filename for frame in traceback.extract_tb(error.__traceback__))


def names_the_cause(error: Exception) -> bool:
    """Whether the error is one that is meant for users, and names a tensor, a file or an entry of config.json."""
    entries = ("architectures", "quantization_config", "config.json", *ENTRIES, *KbitConfig().to_dict())
    named = re.search(rf"model\.|lm_head|safetensors|\b({'|'.join(map(re.escape, entries))})\b", str(error))
    return isinstance(error, (TypeError, ValueError, OSError)) and named is not None


def damaged(files: Files, case: int) -> tuple[Files, object]:
    pick = random.Random(case)
    files, damage = dict(files), pick.choice(DAMAGES)
    damage(files, pick)
    return files, damage


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "cases", [range(FEW), pytest.param(range(FEW, FEW + MANY), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_damaged_checkpoint_is_refused_or_loads_the_same(saved, tmp_path, cases):
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(50)
    wrong = []
    try:
        for case in cases:
            source, expected = saved[case % len(saved)]
            files, damage = damaged(source, case)
            directory = tmp_path / str(case)
            directory.mkdir()
            for name, data in files.items():
                (directory / name).write_bytes(data)
            found = outcome(directory)
            if isinstance(found, Exception):
                if raised_here(found) and not names_the_cause(found):
                    wrong.append(f"{case} {damage.__name__}: {type(found).__name__}: {str(found)[:200]}")
            elif damage not in PAYLOAD and not torch.equal(found, expected):
                wrong.append(f"{case} {damage.__name__}: loads and differs")
            for file in directory.iterdir():
                file.unlink()
    finally:
        transformers.logging.set_verbosity(verbosity)
    assert not wrong, "\n".join(wrong[:30])
