"""KbitConfig: what to quantize, to how many bits, with which levels; also what ``config.json`` keeps of it."""

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_kbit import codebooks
from hf_kbit.format import BITS, FORMAT_VERSIONS, check_bits, check_exponent
from hf_kbit.nn.packed import DEFAULT_TRANSFORM, check_transform, lopsided
from hf_kbit.nn.weight import DEFAULT_CODEBOOK, DEFAULT_SCALE, check_scale
from hf_kbit.patterns import Patterns, shown


def _mapping(value: object, name: str, expected: str) -> Mapping:
    """``value``, or an empty one for None; nothing else that is empty will do, as 0, false and "" in a damaged file.

    Raises:
        ValueError: it is something else.
    """
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"{name}: found {shown(value)}, expected {expected}")
    return value or {}


def _hex(levels: Sequence[float]) -> str:
    """The bytes of levels as little-endian float32, in hexadecimal digits."""
    return struct.pack(f"<{len(levels)}f", *levels).hex()


def _by_width(tables: Mapping, name: str) -> dict[int, Any]:
    """Tables of levels with integers for keys: JSON has string keys only."""
    widths = {str(bits): bits for bits in BITS}
    if unknown := [key for key in tables if str(key) not in widths]:
        raise ValueError(f"{name}: found tables for {shown(unknown)} bits, expected widths of {list(BITS)}")
    return {widths[str(key)]: table for key, table in tables.items()}


def _recorded(table, bits: int, name: str) -> list[float]:
    """Levels as a quantizer wrote them: they must be canonical, for to make them so would change the model."""
    levels = list(codebooks.canonical(table, bits, name))
    if levels != list(table):
        raise ValueError(f"{name}: found {list(table)}, expected ascending float32 levels with largest magnitude 1")
    return levels


def _transform_of(version: object) -> str:
    """What holds for a quantized model of a format version whose config does not say it."""
    return "none" if version == 1 else "rotated"


@register_quantization_config("kbit")
@dataclass(repr=False)
class KbitConfig(QuantizationConfigMixin):
    """How a model is quantized: ``from_pretrained(name, quantization_config=KbitConfig(bits=3))``.

    Args:
        bits: 2, 3, 4 or 5: the width of every layer that ``module_bits`` does not name. A number between, such as 3.3,
            is the mean width of the weights: while a model loads, each layer gets a width of its own by a rule that
            looks at names and shapes (``hf_kbit.widths.widths_by_rule``); ``module_bits`` may then hold None alone.
        codebook: the levels. A name (``"optimal"``, ``"normal_float"``, ``"int"``, ``"fp4"``), a table of
            ``2**bits`` numbers in any order, or, for several widths, ``{bits: table}``.
        scale: how the scale of a block is found: ``"search"``, the one with the least squared error, for which
            ``"optimal"`` levels are made, or ``"absmax"``, from its largest magnitude: quicker, less accurate.
        transform: what is done to a weight first, and undone in the layer's input: ``"rotated"``, its columns balanced
            and its blocks of 32 rotated, with which a language model keeps far more of its quality, or ``"none"``,
            which every version of hf_kbit can read.
        modules_to_not_convert: patterns of modules to leave in 16 bits besides those left by default: the output
            embedding (``lm_head``) and other layers outside the base model, routers of mixtures of experts, tied
            weights, what the model keeps in float32, layers whose weight the model's code reads instead of calling
            them, and those with more to them than a weight and a bias. A pattern that matches nothing is refused.
        skip_default_modules: False quantizes the output embedding and other layers outside the base model too.
        module_bits: ``{pattern: bits}`` for layers that get another width, or None to leave them in 16 bits; the first
            pattern that matches decides. It overrides the default skips, so ``{"lm_head": 5}`` quantizes the head;
            a head that is tied goes with its table, and weights kept in float32 cannot be quantized. A table gets a
            width by a pattern for its own name, not for a part of the model that it is in. A list of pairs will do.
        embedding_bits: 2, 3, 4 or 5: the width of tables of embeddings that are looked up, and of heads tied to them;
            None leaves them in 16 bits.
        format_version: version of the stored format: 2 where a layer is transformed, else 1; written by the quantizer.
        levels: ``{bits: levels}`` that a quantized model was quantized with; written by the quantizer.
        layers: ``{module name in the checkpoint: {"bits", "exponent", "levels", "transform"}}``, only what differs
            from the model's ``bits``, 0, ``levels`` and ``transform``; written by the quantizer.
        quant_method: ``"kbit"``.

    A pattern is a regular expression for whole components of a module's name, or the end of a name. Names as they are,
    also escaped or between ^ and $, may be as many as layers. Other patterns that come to more than 100,000 letters
    with what repeats written out, or take longer than ten seconds on the names of a model, are refused.

    Raises:
        TypeError: an unknown argument.
        ValueError: an argument is out of range, or two contradict each other.

    >>> KbitConfig(bits=3, module_bits={"down_proj": 4})
    KbitConfig(bits=3, module_bits={'down_proj': 4})
    >>> KbitConfig.from_dict(KbitConfig(bits=3).to_dict()) == KbitConfig(bits=3)
    True
    """

    bits: int | float = 4
    codebook: str | Sequence[float] | Mapping[int, Sequence[float]] = DEFAULT_CODEBOOK
    scale: str = DEFAULT_SCALE
    transform: str = DEFAULT_TRANSFORM
    modules_to_not_convert: Sequence[str] | None = field(default_factory=list)
    skip_default_modules: bool = True
    module_bits: Mapping[str, int | None] | list | None = field(default_factory=dict)
    embedding_bits: int | None = None
    format_version: int = FORMAT_VERSIONS[-1]
    levels: Mapping[int, Sequence[float]] | None = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Any]] | None = field(default_factory=dict)
    quant_method: str = "kbit"

    def __post_init__(self):
        if self.quant_method != "kbit":
            raise ValueError(f"quant_method: found {self.quant_method!r}, expected 'kbit'")
        if type(self.format_version) is not int or self.format_version not in FORMAT_VERSIONS:
            raise ValueError(
                f"format_version: found {self.format_version!r}, expected one of {list(FORMAT_VERSIONS)}, all that "
                "this hf_kbit knows. A newer one may read the checkpoint: pip install -U hf_kbit"
            )
        if not (isinstance(self.bits, float) and self.bits % 1 and BITS[0] < self.bits < BITS[-1]):
            check_bits(self.bits)
        if self.embedding_bits is not None:
            check_bits(self.embedding_bits, "embedding_bits")
        if not isinstance(self.skip_default_modules, bool):
            raise ValueError(f"skip_default_modules: found {self.skip_default_modules!r}, expected True or False")
        check_scale(self.scale)
        check_transform(self.transform)
        self.modules_to_not_convert = self._patterns(self.modules_to_not_convert)
        self.module_bits = self._module_bits(self.module_bits)
        self.levels = self._levels(self.levels)
        self.codebook = self._codebook(self.codebook)
        self.layers = self._layers(self.layers)
        if self.bits % 1 and (self.levels or any(self.module_bits.values())):
            raise ValueError(
                f"bits: found the mean {self.bits} and widths of layers, in module_bits or of a quantized model; with "
                f"them expected one of {list(BITS)}"
            )
        if self.levels and self.format_version == 1 and self._is_transformed():
            raise ValueError("format_version: found 1, expected 2 with transformed layers")

    def _is_transformed(self) -> bool:
        """Whether a layer is, or may be."""
        return "rotated" in (self.transform, *(entry.get("transform") for entry in self.layers.values()))

    @staticmethod
    def _patterns(patterns) -> list[str]:
        patterns = () if patterns is None else patterns
        if isinstance(patterns, (str, Mapping)) or not isinstance(patterns, Iterable):
            raise ValueError(f"modules_to_not_convert: found {shown(patterns)}, expected a list of patterns")
        patterns = list(patterns)
        Patterns(patterns, "modules_to_not_convert")
        return patterns

    def _module_bits(self, module_bits) -> dict[str, int | None]:
        if isinstance(module_bits, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in module_bits):
            patterns = [pattern for pattern, _ in module_bits]
            Patterns(patterns, "module_bits")
            if len(pairs := dict(module_bits)) < len(module_bits):
                twice = Counter(patterns).most_common(1)[0][0]
                raise ValueError(f"module_bits: found {shown(twice)} more than once, expected each pattern once")
            module_bits = pairs
        module_bits = _mapping(module_bits, "module_bits", "{pattern: bits or None}")
        Patterns(module_bits, "module_bits")
        left = set(self.modules_to_not_convert)
        for pattern, bits in module_bits.items():
            if bits is None:
                continue
            check_bits(bits, f"module_bits[{shown(pattern)}]")
            if pattern in left:
                raise ValueError(f"{shown(pattern)}: found in modules_to_not_convert and in module_bits: choose one")
        return dict(module_bits)

    def _codebook(self, codebook):
        widths = {self.bits, self.embedding_bits, *self.module_bits.values()} - {None}
        if self.bits % 1:
            widths = set(BITS)
        if isinstance(codebook, str):
            for bits in widths - set(self.levels):  # of a quantized model nothing need be derived
                codebooks.named(codebook, bits)
            return codebook
        if isinstance(codebook, Mapping):
            tables = {
                bits: list(codebooks.canonical(table, bits, f"codebook[{bits}]"))
                for bits, table in _by_width(codebook, "codebook").items()
            }
            if missing := widths - set(tables):
                raise ValueError(
                    f"codebook: found tables for {sorted(tables)} bits, expected one for {sorted(missing)} too"
                )
            return tables
        if len(widths) > 1:
            raise ValueError(
                f"codebook: found one table, but bits, embedding_bits and module_bits name the widths "
                f"{sorted(widths)}; expected {{bits: table}} with a table for each"
            )
        return list(codebooks.canonical(codebook, self.bits))

    @staticmethod
    def _levels(levels) -> dict[int, list[float]]:
        tables = _by_width(_mapping(levels, "levels", "{bits: table}"), "levels")
        return {bits: _recorded(table, bits, f"levels[{bits}]") for bits, table in tables.items()}

    def _layers(self, layers) -> dict[str, dict[str, Any]]:
        layers = _mapping(layers, "layers", "{name: {'bits', 'exponent', 'levels', 'transform'}}")
        return {name: self._layer(entry, f"layers[{name!r}]") for name, entry in layers.items()}

    def _layer(self, entry: Mapping[str, Any], name: str) -> dict[str, Any]:
        if not isinstance(entry, Mapping):
            raise ValueError(
                f"{name}: found {shown(entry)}, expected an object of bits, exponent, levels and transform"
            )
        if unknown := set(entry) - {"bits", "exponent", "levels", "transform"}:
            raise ValueError(
                f"{name}: found {shown(sorted(unknown))}, expected bits, exponent, levels and transform alone"
            )
        bits = check_bits(entry.get("bits", self.bits), f"{name}.bits")
        transform = check_transform(entry.get("transform", self.transform), f"{name}.transform")
        check_exponent(entry.get("exponent", 0), transform != "none", f"{name}.exponent")
        if "levels" in entry:
            return {**entry, "levels": _recorded(entry["levels"], bits, f"{name}.levels")}
        return dict(entry)

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        """As in the base class; an entry that is no argument of ``KbitConfig`` is a ValueError.

        A quantized model's config that does not say how it was made was written before there was a choice: it was made
        with ``normal_float`` and ``absmax``. Of version 1 it has no transform; of version 2 it is ``"rotated"``.
        """
        expected = [f.name for f in fields(cls)]
        if unknown := [key for key in config_dict if key not in expected]:
            raise ValueError(f"quantization_config: found {shown(unknown)}, expected none but {expected}")
        if config_dict.get("levels"):
            transform = _transform_of(config_dict.get("format_version"))
            config_dict = {"codebook": "normal_float", "scale": "absmax", "transform": transform, **config_dict}
        config = cls(**config_dict)
        unused = config.update(**kwargs) if kwargs else {}
        return (config, unused) if return_unused_kwargs else config

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """As in the base class, and checked as a new config is: after an error it is as it was.

        >>> (config := KbitConfig(bits=3)).update(bits=4, other=1), config
        ({'other': 1}, KbitConfig(bits=4))
        """
        known = {f.name for f in fields(self)} & kwargs.keys()
        vars(self).update(vars(replace(self, **{name: kwargs[name] for name in known})))
        return {name: value for name, value in kwargs.items() if name not in known}

    def bits_for(self, module_name: str, table: bool = False) -> int | None:
        """Width of a layer, or the mean that ``bits`` may be, or None if ``module_bits`` or
        ``modules_to_not_convert`` leaves it in 16 bits; of a table ``embedding_bits`` if its name has no other.

        Raises:
            ValueError: ``module_bits`` gives it a width and ``modules_to_not_convert`` forbids it.

        >>> config = KbitConfig(bits=3, module_bits={"down_proj": 4, "layers.0": None})
        >>> [config.bits_for(f"layers.{name}") for name in ("0.q_proj", "1.q_proj", "0.down_proj")]
        [None, 3, 4]
        >>> KbitConfig(bits=3, embedding_bits=5, module_bits={"encoder": 4}).bits_for("encoder.embed", table=True)
        5
        """
        return Chooser(self).choose(module_name, table)[0]

    def levels_for(self, bits: int) -> codebooks.Levels:
        """The canonical codebook of a width: the one the model was quantized with, or the one ``codebook`` names."""
        if bits in self.levels:
            return tuple(self.levels[bits])
        codebook = self.codebook[bits] if isinstance(self.codebook, Mapping) else self.codebook
        return codebooks.resolve(codebook, bits, lopsided(self.transform, self.scale))

    def digest(self) -> str:
        """SHA-256 of what decides how the tensors decode, as hexadecimal digits: ``bits``, ``levels`` and ``layers``,
        and from version 2 on ``transform``.

        It is stored beside the tensors (docs/format.md says of what text), so that those of one model are not decoded
        with the config of another.

        >>> KbitConfig(bits=3).digest() == KbitConfig(bits=3, scale="absmax").digest()
        True
        >>> KbitConfig(bits=3).digest() == KbitConfig(bits=3, layers={"lm_head": {"exponent": 1}}).digest()
        False
        """
        lines = [f"bits {self.bits}"]
        lines += [f"transform {self.transform}"] if self.format_version > 1 else []
        lines += [f"levels {bits} {_hex(self.levels[bits])}" for bits in sorted(self.levels)]
        for name, entry in sorted(self.layers.items()):
            bits = entry.get("bits", self.bits)
            levels = entry.get("levels", self.levels.get(bits, ()))
            lines.append(f"layer {name} {bits} {entry.get('exponent', 0)} {_hex(levels)}")
            lines[-1] += f" {entry.get('transform', self.transform)}" if self.format_version > 1 else ""
        return hashlib.sha256("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """As in the base class; ``module_bits`` becomes a list of pairs where a dict would lose the order.

        JSON is written with sorted keys, and the first pattern that matches decides. The transform that a format
        version has is left out of a quantized model's config: version 1 does not know the entry, and an hf_kbit that
        knows version 1 alone shall refuse version 2 by its number.

        >>> KbitConfig(module_bits={"down_proj": 5, "layers.0": None}).to_dict()["module_bits"]
        {'down_proj': 5, 'layers.0': None}
        >>> KbitConfig(module_bits={"layers.0": None, "down_proj": 5}).to_dict()["module_bits"]
        [['layers.0', None], ['down_proj', 5]]
        """
        entries = super().to_dict()
        if self.embedding_bits is None:
            del entries["embedding_bits"]  # which a model without packed tables need not know of
        if list(self.module_bits) != sorted(self.module_bits):
            entries["module_bits"] = [[pattern, bits] for pattern, bits in self.module_bits.items()]
        if self.levels and self.transform == _transform_of(self.format_version):
            del entries["transform"]
        return entries

    def get(self, name: str, default: Any = None) -> Any:
        """Transformers asks a quantization config for its entries as if it were the dict in ``config.json``."""
        return getattr(self, name, default)

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default if f.default is not MISSING else f.default_factory() for f in fields(self)}
        shown = [f"{name}={value!r}" for name, value in given.items() if name == "bits" or value != defaults[name]]
        return f"{type(self).__name__}({', '.join(shown)})"


class Chooser:
    """What a config says of the modules of a model: ``KbitConfig.bits_for`` of many names. The patterns are compiled
    once, and what they may take together on all of the names is limited (``Patterns``)."""

    def __init__(self, config: KbitConfig):
        self._config = config
        self.left = Patterns(config.modules_to_not_convert, "modules_to_not_convert")
        self.widths = Patterns(config.module_bits, "module_bits")

    def choose(self, module_name: str, table: bool = False) -> tuple[int | None, bool]:
        """What ``KbitConfig.bits_for`` gives, and whether it is asked for, by a width in ``module_bits``."""
        config, excluded = self._config, next(self.left.naming(module_name), None)
        pattern = self._pattern_for(module_name, table)
        if pattern is None:
            return None if excluded is not None else config.embedding_bits if table else config.bits, False
        bits = config.module_bits[pattern]
        if bits is not None and excluded is not None:
            raise ValueError(
                f"{module_name}: module_bits[{shown(pattern)}] asks for {bits} bits, {shown(excluded)} in "
                "modules_to_not_convert for none: choose one"
            )
        return bits, bits is not None

    def _pattern_for(self, module_name: str, table: bool) -> str | None:
        """The pattern of ``module_bits`` that decides on a layer, or on a table: of those for a part of the model that
        a table is in, only one that leaves it in 16 bits."""
        part = module_name.rpartition(".")[0] if table else ""
        for_part = set(self.widths.naming(part)) if part else ()
        for pattern in self.widths.naming(module_name):
            if self._config.module_bits[pattern] is None or pattern not in for_part:
                return pattern
        return None


def config_or(config: KbitConfig | None, arguments: Mapping[str, Any]) -> KbitConfig:
    """``config``, or one of ``arguments``: what functions take that quantize a model.

    Raises:
        TypeError: both are given, or ``config`` is no ``KbitConfig``.
    """
    if config is not None and arguments:
        raise TypeError(f"config: found it and {sorted(arguments)}, expected one; put these into the config")
    if not isinstance(config, KbitConfig | None):
        raise TypeError(f"config: found {type(config).__name__}, expected a KbitConfig")
    return config or KbitConfig(**arguments)
