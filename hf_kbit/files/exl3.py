"""EXL3 folders, as exllamav3 writes them: what their configs and headers say.

Each layer has a trellis, and scales or, in old files, signs (``docs/format.md``). Of these the headers are told as the
format has them (``as_ours``), so that they are compared with a model as those of any quantized checkpoint.

Source: read in exllamav3 1.4.1 (MIT), https://github.com/turboderp-org/exllamav3.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hf_kbit.files.checkpoint import TensorHeader
from hf_kbit.format.errors import brief, refuse
from hf_kbit.format.trellis import BITS, CODES, ROTATED, TILE, TrellisDecoding, unpack_signs

SIGNS = {"suh": "su", "svh": "sv"}  # what old files have in the place of scales
MARKS = tuple(code for code in CODES if code != "3inst")
NAMES = ("trellis", *SIGNS, *SIGNS.values(), *MARKS)
STORAGE = "quantization_config.json"


def packed_modules(tensors: Mapping[str, TensorHeader]) -> dict[str, TrellisDecoding]:
    """How each layer decodes that has a trellis, by its name.

    Raises:
        ValueError: tensors are missing, of other dtypes or shapes than a trellis has, or of two codes; the message
            names all there are.
    """
    found, problems = {}, []
    for name, header in tensors.items():
        module, _, own = name.rpartition(".")
        if own in NAMES[1:] and f"{module}.trellis" not in tensors:
            problems.append(f"{module}.trellis: missing, expected beside {name}")
        if own != "trellis":
            continue
        bits, rest = divmod(header.shape[-1], TILE) if len(header.shape) == 3 else (0, 1)
        sides = [TILE * count for count in header.shape[:2]]
        if header.dtype != "I16" or rest or bits not in BITS or any(side % ROTATED or not side for side in sides):
            expected = f"I16 [K / 16, N / 16, 16 * bits] of 1 to 8 bits, K and N multiples of {ROTATED}"
            problems.append(f"{name}: found {header}, expected {expected}")
            continue
        marks = [mark for mark in MARKS if f"{module}.{mark}" in tensors]
        if len(marks) > 1:
            problems.append(f"{module}: found tensors {marks}, expected one of them, which marks the code")
        problems += [_misshapen(module, scale, side, tensors) for scale, side in zip(SIGNS, sides, strict=True)]
        found[module] = TrellisDecoding(bits, marks[0] if marks else "3inst")
    refuse([problem for problem in problems if problem])
    return found


def _misshapen(module: str, scale: str, side: int, tensors: Mapping[str, TensorHeader]) -> str:
    expected = {scale: TensorHeader("F16", (side,)), SIGNS[scale]: TensorHeader("I16", (side // 16,))}
    given = {own: tensors[f"{module}.{own}"] for own in expected if f"{module}.{own}" in tensors}
    if len(given) != 1:
        return f"{module}.{scale}: found {list(given) or 'none'}, expected it or {SIGNS[scale]}"
    ((own, header),) = given.items()
    return "" if header == expected[own] else f"{module}.{own}: found {header}, expected {expected[own]}"


def as_ours(module: str, tensors: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """Headers of a layer, by the names and with the shapes that our files have."""
    layout = tensors[f"{module}.trellis"]
    sides = [TILE * count for count in layout.shape[:2]]
    scales = {own: TensorHeader("F16", (side,), layout.file) for own, side in zip(SIGNS, sides, strict=True)}
    return {f"{module}.{own}": header for own, header in {"trellis": layout, **scales}.items()}


def is_whole(given: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are all tensors of a layer, by our names or by those of a folder."""
    return "trellis" in given and all(own in given or old in given for own, old in SIGNS.items())


def tensors_as_ours(given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of a layer by our names."""
    scales = {own: given[own] if own in given else unpack_signs(given[old]) for own, old in SIGNS.items()}
    return {"trellis": given["trellis"], **scales}


def check_config(
    entries: Mapping[str, Any], folder: Path, decodings: Mapping[str, TrellisDecoding], head: str | None
) -> None:
    """Refuses configs that say other widths or another code than the tensors have, ``head`` being the output
    embedding's name.

    Raises:
        ValueError: names the layer or the entry.
    """
    problems, rest = [], {name: each for name, each in decodings.items() if name != head} or decodings
    widths = sorted({each.bits for each in rest.values()})
    if not isinstance(bits := entries.get("bits"), int | float) or not widths[0] <= bits <= widths[-1]:
        problems.append(f"bits: found {bits!r} in quantization_config, expected {widths}, as the tensors have")
    if head in decodings and entries.get("head_bits", decodings[head].bits) != decodings[head].bits:
        found = entries["head_bits"]
        problems.append(f"{head}: found {decodings[head].bits} bits, expected head_bits {found!r} of the config")
    if (code := entries.get("codebook")) is not None and code not in list(CODES):
        problems.append(f"codebook: found {code!r} in quantization_config, expected one of {list(CODES)}")
    for name, storage in _storage(folder).items():
        said = storage.get("bits_per_weight") if isinstance(storage, Mapping) else None
        if name in decodings and said is not None and said != decodings[name].bits:
            problems.append(f"{name}: found {decodings[name].bits} bits, expected {said!r}, as {STORAGE} says")
    refuse(problems, "the config does not fit the tensors")


def _storage(folder: Path) -> Mapping[str, Any]:
    file = folder / STORAGE
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("tensor_storage") or {}
    except (ValueError, AttributeError, RecursionError) as error:
        found = f"found no JSON object ({brief(str(error))})"
        raise ValueError(f"{file}: {found}, expected what exllamav3 writes") from None
    return found if isinstance(found, Mapping) else {}
