"""What the files of a quantized model say of its tensors: how each layer decodes."""

import hashlib
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hf_kbit.format import codebooks
from hf_kbit.format.decoding import Decoding, ScalarDecoding, check_transform
from hf_kbit.format.errors import shown
from hf_kbit.format.spec import BITS, FORMAT_VERSIONS, PLAIN, TRANSFORMED, TRELLIS, check_bits, check_exponent
from hf_kbit.format.trellis import TrellisDecoding

ENTRIES = ("format_version", "bits", "embedding_bits", "levels", "transform", "code", "layers")
OF_SCALAR = ("bits", "exponent", "levels", "transform")
OF_TRELLIS = ("bits", "code", "block", "stacked")


@dataclass(frozen=True)
class ModelFormat:
    """How the tensors of one quantized model decode, as ``quantization_config`` in its ``config.json`` says it.

    Attributes:
        bits: width of the layers that ``layers`` does not name.
        levels: canonical codebook of each width.
        layers: by its name in the checkpoint, each layer that differs from ``bits``, exponent 0, ``levels`` and
            ``transform`` or, where there is a ``code``, from a trellis of that and of ``bits``.
        embedding_bits: None in a model without packed tables; an hf_kbit that knows none refuses the entry.
        transform: of the layers that ``layers`` does not name.
        format_version: 3 where a layer has a trellis, 2 where one is transformed, an expert's or a table, else 1.
        code: of the layers that ``layers`` does not name, if these have a trellis.

    >>> levels, layers = {"2": [-1, 0, 0.5, 1]}, {"head": {"exponent": 3}}
    >>> stored = ModelFormat.from_dict({"bits": 2, "levels": levels, "layers": layers})
    >>> stored.decoding("head")
    ScalarDecoding(levels=(-1.0, 0.0, 0.5, 1.0), exponent=3, transform='rotated')
    >>> stored.to_dict()["layers"]
    {'head': {'exponent': 3}}
    """

    bits: int
    levels: Mapping[int, codebooks.Levels]
    layers: Mapping[str, Decoding]
    embedding_bits: int | None = None
    transform: str = "rotated"
    format_version: int = TRANSFORMED
    code: str | None = None

    @classmethod
    def of(
        cls,
        decodings: Mapping[str, Decoding],
        bits: int,
        levels: Mapping[int, codebooks.Levels],
        embedding_bits: int | None,
        version: int,
    ) -> "ModelFormat":
        """What to say of layers, given by their names in the checkpoint, most of which have this width and these
        codebooks."""
        codes = Counter(each.code for each in decodings.values() if isinstance(each, TrellisDecoding))
        code = codes.most_common(1)[0][0] if codes else None
        levels = {width: tuple(table) for width, table in levels.items()}
        said = cls(bits, levels, {}, embedding_bits, usual_transform(version), version, code)
        usual = said._usual if code or bits in levels else None
        return replace(said, layers={name: each for name, each in decodings.items() if each != usual})

    @classmethod
    def from_dict(cls, entries: Mapping[str, Any]) -> "ModelFormat":
        """The inverse of ``to_dict``, of what may come from anywhere; entries of other names are ignored."""
        version, code = check_version(entries.get("format_version", TRANSFORMED)), entries.get("code")
        bits, embedding_bits = entries.get("bits"), entries.get("embedding_bits")
        if code is None:
            check_bits(bits)
        else:
            TrellisDecoding.from_dict({"code": code}, bits, "quantization_config")  # refuses what does not fit
        if embedding_bits is not None:
            check_bits(embedding_bits, "embedding_bits")
        transform = check_transform(entries.get("transform", usual_transform(version)))
        tables = by_width(mapping(entries.get("levels"), "levels", "{bits: table}"), "levels")
        levels = {width: _recorded(table, width, f"levels[{width}]") for width, table in tables.items()}
        if (layers := entries.get("layers")) is None:
            raise ValueError("layers: found none in the quantization config, expected an object, {} if all are alike")
        layers = mapping(layers, "layers", "{name: {'bits', ...}}")
        usual = {"bits": bits, "transform": transform, "code": code}
        layers = {name: _layer(entry, usual, levels, f"layers[{name!r}]") for name, entry in layers.items()}
        if version == PLAIN and (transform != "none" or any(layer.transformed for layer in layers.values())):
            raise ValueError("format_version: found 1, expected 2 with transformed layers")
        if version != TRELLIS and (code or any(isinstance(layer, TrellisDecoding) for layer in layers.values())):
            raise ValueError(f"format_version: found {version}, expected {TRELLIS} with layers that have a trellis")
        return cls(bits, levels, layers, embedding_bits, transform, version, code)

    def to_dict(self) -> dict[str, Any]:
        """The entries of a file. The transform that is usual for the format version is left out: an hf_kbit that knows
        version 1 alone shall refuse version 2 by its number."""
        entries = {"format_version": self.format_version, "bits": self.bits}
        entries |= {} if self.embedding_bits is None else {"embedding_bits": self.embedding_bits}
        entries |= {} if self.transform == usual_transform(self.format_version) else {"transform": self.transform}
        entries |= {} if self.code is None else {"code": self.code}
        entries["levels"] = {bits: list(levels) for bits, levels in self.levels.items()}
        entries["layers"] = {name: self._differences(layer) for name, layer in self.layers.items()}
        return entries

    def _differences(self, layer: Decoding) -> dict[str, Any]:
        if isinstance(layer, TrellisDecoding):
            found = layer.to_dict()
            usual = {"bits": self.bits, "code": self.code}
            return {name: value for name, value in found.items() if value != usual.get(name)}
        usual = dict(zip(OF_SCALAR, (self.bits, 0, self.levels.get(layer.bits), self.transform), strict=True))
        found = {name: getattr(layer, name) for name in OF_SCALAR if getattr(layer, name) != usual[name]}
        found |= {"levels": list(layer.levels)} if "levels" in found else {}
        return found | ({} if self.code is None else {"code": None})

    @property
    def _usual(self) -> Decoding:
        if self.code is not None:
            return TrellisDecoding(self.bits, self.code)
        return ScalarDecoding(_levels_of(self.bits, self.levels), 0, self.transform)

    def decoding(self, name: str) -> Decoding:
        """How a layer decodes that has this name in the checkpoint; a ValueError without levels of its width."""
        return self.layers.get(name) or self._usual

    def digest(self) -> str:
        """SHA-256, as hexadecimal digits, of all that decides how tensors decode; docs/format.md defines the text.

        >>> stored = ModelFormat(2, {2: (-1.0, 0.0, 0.5, 1.0)}, {})
        >>> stored.digest() == ModelFormat(2, {2: (-1.0, 0.0, 0.5, 1.0)}, {}, embedding_bits=2).digest()
        True
        >>> stored.digest() == ModelFormat(2, {2: (-1.0, 0.0, 0.25, 1.0)}, {}).digest()
        False
        """
        said = self.format_version > PLAIN
        lines = [f"bits {self.bits}"] + ([f"transform {self.transform}"] if said else [])
        lines += [] if self.code is None else [f"code {self.code}"]
        lines += [f"levels {bits} {_hex(self.levels[bits])}" for bits in sorted(self.levels)]
        for name, layer in sorted(self.layers.items()):
            if isinstance(layer, TrellisDecoding):
                lines.append(f"layer {name} {layer.bits} {layer.code} {layer.block} {layer.stacked}")
                continue
            transform = f" {layer.transform}" if said else ""
            lines.append(f"layer {name} {layer.bits} {layer.exponent} {_hex(layer.levels)}{transform}")
        return hashlib.sha256("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Exl3:
    """What stands in the place of a ``ModelFormat`` until the headers of an EXL3 folder are read: what its config
    says."""

    entries: Mapping[str, Any]
    levels: Mapping[int, codebooks.Levels] = field(default_factory=dict)
    layers: Mapping[str, Decoding] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {}


def check_version(version: object) -> int:
    if type(version) is not int or version not in FORMAT_VERSIONS:
        raise ValueError(
            f"format_version: found {version!r}, expected one of {list(FORMAT_VERSIONS)}, all that this hf_kbit "
            "knows. A newer one may read the checkpoint: pip install -U hf_kbit"
        )
    return version


def usual_transform(version: int) -> str:
    """What holds for a quantized model of a format version whose config does not say it."""
    return "none" if version == 1 else "rotated"


def mapping(value: object, name: str, expected: str) -> Mapping:
    """``value``, or an empty one for None; anything else is a ValueError, also what is empty in a damaged file."""
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name}: found {shown(value)}, expected {expected}")
    return value or {}


def by_width(tables: Mapping, name: str) -> dict[int, Any]:
    """Tables of levels with integers for keys: JSON has string keys only."""
    widths = {str(bits): bits for bits in BITS}
    if unknown := [key for key in tables if str(key) not in widths]:
        raise ValueError(f"{name}: found tables for {shown(unknown)} bits, expected widths of {list(BITS)}")
    return {widths[str(key)]: table for key, table in tables.items()}


def _layer(entry: object, usual: dict[str, Any], levels: Mapping[int, codebooks.Levels], name: str) -> Decoding:
    code = entry.get("code", usual["code"]) if isinstance(entry, Mapping) else None
    known = OF_SCALAR if code is None else OF_TRELLIS
    if not isinstance(entry, Mapping) or (left := set(entry).difference(known, ["code"])):
        found = shown(sorted(left) if isinstance(entry, Mapping) else entry)
        raise ValueError(f"{name}: found {found}, expected an object of {', '.join(known)} alone")
    if code is not None:
        return TrellisDecoding.from_dict({**entry, "code": code}, entry.get("bits", usual["bits"]), name)
    bits = check_bits(entry.get("bits", usual["bits"]), f"{name}.bits")
    transform = check_transform(entry.get("transform", usual["transform"]), f"{name}.transform")
    exponent = check_exponent(entry.get("exponent", 0), transform != "none", f"{name}.exponent")
    own = _recorded(entry["levels"], bits, f"{name}.levels") if "levels" in entry else _levels_of(bits, levels)
    return ScalarDecoding(own, exponent, transform)


def _levels_of(bits: int, levels: Mapping[int, codebooks.Levels]) -> codebooks.Levels:
    if bits not in levels:
        found = f"found {sorted(levels)} in the quantization config"
        raise ValueError(f"levels: {found}, expected {bits} too, which its bits or layers name")
    return levels[bits]


def _recorded(table: Any, bits: int, name: str) -> codebooks.Levels:
    """Levels as a quantizer wrote them: canonical ones, for to make them so would change the model."""
    levels = codebooks.canonical(table, bits, name)
    if list(levels) != list(table):
        raise ValueError(f"{name}: found {list(table)}, expected ascending float32 levels with largest magnitude 1")
    return levels


def _hex(levels: codebooks.Levels) -> str:
    """The bytes of levels as little-endian float32, in hexadecimal digits."""
    return struct.pack(f"<{len(levels)}f", *levels).hex()
