"""Writes a quantized model as an EXL3 folder, which exllamav3 runs."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME

from hf_kbit.files.exl3 import STORAGE
from hf_kbit.format.errors import refuse
from hf_kbit.format.trellis import CODES, ROTATED, TILE, TrellisDecoding
from hf_kbit.integrations.transformers.conversions import unused_conversions
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.weight import KbitWeight, packed_layers
from hf_kbit.plan.config import EXL3

Tensors = dict[str, torch.Tensor]


@torch.no_grad()
def export_exl3(folder: str | os.PathLike, out: str | os.PathLike) -> None:
    """Writes a saved model whose layers have a trellis as a folder that exllamav3 loads.

    Trellises keep their bytes. All else, such as tables of embeddings, is in float16 there, as exllamav3 has it.

    Args:
        folder: what ``save_pretrained`` has written of a causal language model, with ``codebook="trellis"``.
        out: a new or empty folder.

    Raises:
        ValueError: a layer has scalar levels, or sides that are no multiples of 128; the message names all there are.
            Or there are files in ``out``.
    """
    folder, out = Path(folder), Path(out)
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out}: found files, expected a new folder or an empty one")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    layers = packed_layers(model)
    refuse(list(_unfit(model, layers)), f"{folder}: exllamav3 cannot load it")
    tensors = _tensors(model, layers)
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, out, max_shard_size="8GB")
    said = _config(model, layers)
    config = copy.deepcopy(model.config)
    config.quantization_config, config.dtype = said, torch.float16
    config.save_pretrained(out)
    file = out / CONFIG_NAME
    file.write_text(json.dumps(_with_old_names(json.loads(file.read_text()), config), indent=2) + "\n")
    (out / STORAGE).write_text(json.dumps(said | {"tensor_storage": _storage(tensors)}, indent=4) + "\n")
    for file in folder.iterdir():
        if file.is_file() and not file.name.startswith(("model", "config.json", "README")):
            shutil.copy(file, out / file.name)


def _with_old_names(saved: dict, config) -> dict:
    """A saved config that also has the names by which others read what Transformers has renamed."""
    names = {old: saved[new] for old, new in config.attribute_map.items() if new in saved}
    parts = {name: _with_old_names(saved[name], getattr(config, name)) for name in config.sub_configs if name in saved}
    return names | saved | parts


def _unfit(model, layers: dict[str, KbitWeight]) -> Iterator[str]:
    head = model.get_output_embeddings()
    if not any(isinstance(layer.decoding, TrellisDecoding) for layer in layers.values()):
        yield "found no layer with a trellis, expected codebook='trellis' in its quantization config"
    for name, layer in layers.items():
        decoding, sides = layer.decoding, layer.shape[-2:]
        if isinstance(decoding, TrellisDecoding):
            each = sides[0] // decoding.stacked, sides[1]
            if decoding.block != ROTATED:
                yield f"{name}: found sides {list(each)}, expected multiples of {ROTATED}"
        elif isinstance(layer, KbitProjection):
            yield f"{name}: found scalar levels, expected a trellis"
        elif layer is not head and not isinstance(layer, torch.nn.Embedding):
            yield f"{name}: found scalar levels, expected a trellis, or 16 bits"


def _tensors(model, layers: dict[str, KbitWeight]) -> Tensors:
    """All of the model, by exllamav3's names, in memory that nothing shares."""
    model._weight_conversions = [*model.hf_quantizer._all_weight_conversions, *unused_conversions(model)]
    dense, found, tied = (
        {},
        {},
        {id(layer.weight) for layer in layers.values() if isinstance(layer, torch.nn.Embedding)},
    )
    for name, layer in layers.items():
        if isinstance(layer, KbitProjection):
            found |= _experts(model, name, layer)
        elif isinstance(layer.decoding, TrellisDecoding):
            (stored,) = revert_weight_conversion(model, {f"{name}.weight": torch.empty(0)})
            found |= _layer(stored.removesuffix(".weight"), layer.packed, layer.decoding.code)
        elif isinstance(layer, torch.nn.Embedding) or id(layer.weight) not in tied:
            dense[f"{name}.weight"] = layer.dequantize(torch.float16)
    packed = {id(layer) for layer in layers.values()}
    for name, module in model.named_modules():
        for own, tensor in module.state_dict(keep_vars=True).items():
            if "." in own or (id(module) in packed and own != "bias"):
                continue
            if own == "bias" and id(module) in packed and isinstance(module.decoding, TrellisDecoding):
                tensor = pad(tensor, (0, module.decoding.padded(len(tensor)) - len(tensor)))
            dense[f"{name}.{own}"] = tensor.half() if tensor.is_floating_point() else tensor
    for name in model.all_tied_weights_keys:
        dense.pop(name, None)
    found |= revert_weight_conversion(model, dense)
    return {name: tensor.detach().clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}


def _layer(name: str, tensors: Tensors, code: str) -> Tensors:
    if code != "3inst":
        factor = CODES[code][0]
        tensors = tensors | {code: torch.tensor(factor - 2**32 if factor >= 2**31 else factor, dtype=torch.int32)}
    return {f"{name}.{own}": tensor for own, tensor in tensors.items()}


def _experts(model, name: str, layer: KbitProjection) -> Tensors:
    """Each matrix by its own name, which a few numbers tell that are split as Transformers splits experts."""
    decoding, (experts, rows, _) = layer.decoding, layer.shape
    parts = max(decoding.stacked, 2 if name.endswith("gate_up_proj") else 1)
    places = torch.arange(experts * parts).view(experts, parts, 1)
    names = revert_weight_conversion(model, {name: places.mT if layer.transposed else places})
    found, tensors, size = {}, layer.packed, rows // parts
    for stored, place in names.items():
        if place.numel() != 1 or size % ROTATED:
            raise ValueError(
                f"{name}: found experts of {size} rows, expected multiples of {ROTATED}, and names for each"
            )
        expert, part = divmod(place.item(), parts)
        own = {key: tensor[expert] for key, tensor in tensors.items()}
        if decoding.stacked > 1:
            own = {key: tensor[part] for key, tensor in own.items()}
        elif parts > 1:
            rows = slice(part * size, (part + 1) * size)
            tiles = slice(rows.start // TILE, rows.stop // TILE)
            own |= {"trellis": own["trellis"][:, tiles], "svh": own["svh"][rows]}
        found |= _layer(stored.removesuffix(".weight"), own, decoding.code)
    return found


def _config(model, layers: dict[str, KbitWeight]) -> dict:
    head = model.get_output_embeddings()
    trellises = [layer for layer in layers.values() if isinstance(layer.decoding, TrellisDecoding)]
    others = [layer for layer in trellises if layer is not head] or trellises
    weights = sum(layer.num_weights for layer in others)
    bits = sum(layer.bits * layer.num_weights for layer in others) / weights
    return {
        "quant_method": EXL3,
        "version": "1.4.1",  # of the form
        "bits": round(bits, 2),
        "head_bits": head.bits if head in trellises else 16,
        "calibration": {"rows": 0, "cols": 0},
        "out_scales": "always",
        "codebook": others[0].decoding.code,
    }


def _storage(tensors: Tensors) -> dict:
    """What each module stores, as exllamav3 lists it."""
    found = {}
    for name, tensor in tensors.items():
        module, _, own = name.rpartition(".")
        entry = found.setdefault(module, {"stored_tensors": {}})
        said = {"shape": [*tensor.shape], "n_bytes": tensor.nbytes, "dtype": str(tensor.dtype)}
        entry["stored_tensors"][name] = said
        if own == "trellis":
            entry |= {"quant_format": EXL3, "bits_per_weight": tensor.shape[-1] // TILE}
    return found
