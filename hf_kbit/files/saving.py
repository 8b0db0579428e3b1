"""``save`` and ``load_into``: quantized modules that are nobody's, in a folder.

A folder has ``kbit_config.json``, which says how the tensors decode, and ``kbit.safetensors``, or several such files.
Nothing of it is read into a module before all of it was checked.

A save is written into a folder inside, ``UNFINISHED``, and is the one to load from the moment that this has become
``WHOLE``. The files of an earlier save are then removed, the folder becomes ``MOVING``, and its files move out.
Whenever a process ends, one of the two saves is whole.
"""

import json
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from hf_kbit.files import checkpoint
from hf_kbit.files.checkpoint import PACKED_SUFFIXES
from hf_kbit.files.durable import move_out, settle
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.format.errors import refuse
from hf_kbit.format.model import ModelFormat
from hf_kbit.nn.site import Site
from hf_kbit.nn.weight import KbitWeight, distinct, is_sharded, packed_layers, said_of
from hf_kbit.plan import selection
from hf_kbit.plan.config import KbitConfig
from hf_kbit.weight.tensor import Packed

CONFIG = "kbit_config.json"
FILES = "kbit{suffix}.safetensors"
SHARD = re.compile(r"kbit(-\d{5}-of-\d{5})?\.safetensors")
UNFINISHED, WHOLE, MOVING = ".kbit-unfinished", ".kbit-whole", ".kbit-moving"


@torch.no_grad()
def save(module: nn.Module, folder: str | os.PathLike, *, max_shard_size: int | str = "5GB") -> None:
    """Saves a quantized module that is not of Transformers, for ``load_into``: its parameters and buffers.

    The same module gives the same bytes, wherever it is. What an earlier call has saved in the folder is replaced once
    all is written, for which the disk needs room for both; until then, and after an error, that is what is loaded.
    Other files stay.

    Args:
        module: has layers that ``quantize_model`` has quantized, or a ``KbitLinear`` put there by hand.
        folder: made where it is missing.
        max_shard_size: of a file: bytes, or a text such as ``"5GB"``.

    Raises:
        TypeError: the module is a model of Transformers, which ``save_pretrained`` saves with all that belongs to it,
            or keeps state that is no tensor.
        ValueError: it has no quantized layer, or a tensor is not all in this process's memory.
        OSError, safetensors.SafetensorError: the disk is full, or the folder cannot be written.

    >>> import tempfile, hf_kbit
    >>> model, fresh = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU()) for _ in "ab")
    >>> done = hf_kbit.quantize_model(model, bits=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(model, folder)
    ...     load_into(fresh, folder)
    >>> x = torch.randn(2, 64)
    >>> torch.equal(fresh(x), model(x))
    True
    """
    _refuse_transformers(module, "save_pretrained")
    layers = packed_layers(module)
    first = set(map(id, distinct(layers.values())))  # of those that are tied
    layers = {name: layer for name, layer in layers.items() if id(layer) in first}
    if not layers or "" in layers:
        found = "a quantized layer alone" if layers else "no quantized layer"
        raise ValueError(f"module: found {found} in {type(module).__name__}, expected a module that has some")
    tensors, folder, stored = _tensors(module, layers), Path(folder), _common(layers)
    shards = split_torch_state_dict_into_shards(tensors, filename_pattern=FILES, max_shard_size=max_shard_size)
    files = {name: {own: tensors[own] for own in names} for name, names in shards.filename_to_tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    _move_out(folder)
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        _write(unfinished, files, stored)
        os.replace(unfinished, folder / WHOLE)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _move_out(folder)


@torch.no_grad()
def load_into(module: nn.Module, folder: str | os.PathLike) -> None:
    """Makes a module that is not quantized what ``save`` has saved: quantizes its layers, and fills all of it.

    Args:
        module: built as the saved one was, before it was quantized; on any devices, and it stays there, or on the meta
            device: then it is in CPU memory afterwards.
        folder: what ``save`` has written.

    Raises:
        TypeError: the module is a model of Transformers, which ``from_pretrained`` loads.
        ValueError: the module is quantized already; a file is missing, damaged or of another save; a tensor is
            missing, left over, or of another shape or dtype. The message names all there are, and the module is as it
            was.
    """
    _refuse_transformers(module, "from_pretrained")
    if quantized := next(iter(packed_layers(module)), None):
        raise ValueError(f"{quantized}: found it quantized already, expected a module as it was before quantizing")
    folder = Path(folder)
    file, files = _saved(folder)
    config = _read_config(file)
    headers = checkpoint.read_headers(files)
    packed = checkpoint.packed_modules(headers)
    plan = selection.Packable(module).stored(config, {name: name for name in packed})
    expected, optional = _dense(module, [plan.sites[each] for name in plan.decodings for each in plan.group(name)])
    tensors = checkpoint.read(files)
    rest = tensors.keys() - {name + suffix for name in packed for suffix in PACKED_SUFFIXES}
    problems = [
        f"{name}: left over, the module has no such linear layer" for name in packed if name not in plan.decodings
    ]
    for name, decoding in plan.decodings.items():
        problems += checkpoint.compare_packed(name, headers, plan.sites[name].shape, decoding)
    left_over = sorted(rest - expected.keys() - optional)
    problems += [f"{name}: left over, the module has no such tensor" for name in left_over]
    for name, tensor in expected.items():
        if name not in rest or _kind(tensors[name]) != _kind(tensor):
            found = f"found {_kind(tensors[name])}" if name in rest else "missing"
            problems.append(f"{name}: {found}, expected {_kind(tensor)}")
    refuse(problems, f"{folder}: what is saved there does not fit the module ({type(module).__name__})")
    checkpoint.check_save(files, config.stored, packed)
    for name, decoding in plan.decodings.items():
        own = {own: tensors[f"{name}.{own}"] for own in decoding.layout(plan.sites[name].shape)}
        plan.put(name, Packed(own, decoding))
    _fill(module, {tensor: tensors[name] for name, tensor in expected.items()})


def _refuse_transformers(module: nn.Module, method: str) -> None:
    if isinstance(module, PreTrainedModel):
        # Its config, generation config and card belong to it, and its checkpoints have names of their own.
        raise TypeError(f"module: found {type(module).__name__}, a model of Transformers; call its {method}(folder)")


def _saved(folder: Path) -> tuple[Path, list[Path]]:
    """The config and the files with tensors of what is saved, some of which may not have moved out."""
    places = [folder / WHOLE] if (folder / WHOLE).is_dir() else [folder / MOVING, folder]
    config = next((place / CONFIG for place in places if (place / CONFIG).is_file()), folder / CONFIG)
    files = [file for place in places for file in place.glob("*.safetensors") if SHARD.fullmatch(file.name)]
    return config, sorted(files, key=lambda file: file.name)


def _write(folder: Path, files: dict[str, dict[str, torch.Tensor]], stored: ModelFormat) -> None:
    """Writes files with tensors, by their names, and the config."""
    metadata = {"format": "pt", **checkpoint.unsealed(stored)}
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata)
    checkpoint.seal(folder)
    entries = {"quant_method": "kbit", **stored.to_dict()}
    (folder / CONFIG).write_text(json.dumps(entries, indent=2, sort_keys=True) + "\n")
    settle(*folder.iterdir(), folder)


def _move_out(folder: Path) -> None:
    """Puts a whole save, if there is one that has not moved out, in the place of an earlier one."""
    whole, moving = folder / WHOLE, folder / MOVING
    if whole.is_dir():
        settle(folder)
        # The config first: without it, versions that do not know WHOLE load nothing.
        for file in (folder / CONFIG, *folder.glob("*.safetensors")):
            if file.name == CONFIG or SHARD.fullmatch(file.name):
                file.unlink(missing_ok=True)
        settle(folder)
        os.replace(whole, moving)
    if moving.is_dir():
        move_out(moving, folder, last=CONFIG)


def _tensors(module: nn.Module, layers: dict[str, KbitWeight]) -> dict[str, torch.Tensor]:
    """All that is to be saved, by its first name, none of it in memory that it shares."""
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, layer in layers.items():
        if not is_sharded(layer.weight):
            del tensors[f"{name}.weight"]
            tensors |= {f"{name}.{own}": part for own, part in layer.packed.items()}
    for name, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            raise TypeError(f"{name}: found extra state in {type(part).__name__}, expected tensors alone")
    storages = set()
    for name, tensor in tensors.items():
        if tensor.is_meta or is_sharded(tensor):
            found = "on the meta device" if tensor.is_meta else "sharded over several processes"
            raise ValueError(f"{name}: found it {found}, expected it in this process's memory")
        whole = tensor.detach().contiguous()
        storage = whole.untyped_storage()
        shared = storage.nbytes() != whole.nbytes or (storage.data_ptr() in storages and whole.numel() > 0)
        storages.add(storage.data_ptr())
        tensors[name] = whole.clone() if shared else whole
    return tensors


def _common(layers: dict[str, KbitWeight]) -> ModelFormat:
    """What layers have in common, and what sets others apart."""
    levels, (decodings, tables, version) = {}, said_of(layers)
    for decoding in decodings.values():
        if isinstance(decoding, ScalarDecoding):
            levels.setdefault(decoding.bits, decoding.levels)
    (bits, _), *_ = Counter(decoding.bits for decoding in decodings.values()).most_common(1)
    embedding_bits = next((decodings[name].bits for name in tables), None)
    return ModelFormat.of(decodings, bits, levels, embedding_bits, version)


def _read_config(file: Path) -> KbitConfig:
    if not file.is_file():
        raise ValueError(f"{file.parent}: found no {file.name}, expected a folder that hf_kbit.save has written")
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(entries, dict) or not (entries.get("levels") or entries.get("code")):
            raise ValueError("found no levels, expected those of a quantized module")
        return KbitConfig.from_dict(entries)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: {error}") from error


def _dense(module: nn.Module, packed: list[Site]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """What is to be filled besides ``packed``, by its first name, and the names of what need not be: buffers that no
    state dict holds, unless the module waits for them on the meta device."""
    packed, names = {(site.home, site.own) for site in packed}, {}
    for prefix, part in module.named_modules():
        for own, tensor in (part._parameters | part._buffers).items():
            if tensor is not None and (part, own) not in packed:
                names.setdefault(tensor, f"{prefix}.{own}".removeprefix("."))
    kept = module.state_dict().keys()
    tensors = {name: tensor for tensor, name in names.items() if name in kept or tensor.is_meta}
    return tensors, set(names.values()) - tensors.keys()


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _fill(module: nn.Module, tensors: dict[torch.Tensor, torch.Tensor]) -> None:
    """Puts values into the module's tensors; of one on the meta device, in its place wherever it is."""
    new = {}
    for tensor, value in tensors.items():
        if not tensor.is_meta:
            tensor.copy_(value)
        elif isinstance(tensor, nn.Parameter):
            new[tensor] = nn.Parameter(value, requires_grad=tensor.requires_grad)
        else:
            new[tensor] = value
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            own |= {name: new[tensor] for name, tensor in own.items() if tensor in new}
