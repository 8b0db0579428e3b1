"""KbitConfig: what to quantize, to how many bits, with which levels; also what ``config.json`` keeps of it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_kbit import codebooks
from hf_kbit.format import BITS, FORMAT_VERSION, MAX_EXPONENT, check_bits
from hf_kbit.nn.linear import DEFAULT_CODEBOOK, DEFAULT_SCALE, check_scale


def matches(module_name: str, pattern: str) -> bool:
    """Whether a pattern names a module, or a part of the model that the module is in.

    A pattern is a regular expression for one or more whole components of a dotted name, or the end of a name. What the
    patterns of other Transformers quantizers match from the start of a name, these match anywhere in it.

    >>> matches("model.layers.0.mlp.down_proj", "down_proj"), matches("model.layers.10.mlp", "model.layers.1")
    (True, False)
    >>> matches("model.vision_tower.layers.3.fc1", "vision_tower"), matches("model.layers.2.mlp", r"layers\\.[0-3]")
    (True, True)
    """
    return re.search(rf"(^|\.)(?:{pattern})(\.|$)", module_name) is not None or module_name.endswith(pattern)


def _check_pattern(pattern: object, name: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(f"{name}: found pattern {pattern!r}, expected a regular expression ({error})") from None


def _recorded(table, bits: int, name: str) -> list[float]:
    """Levels as a quantizer wrote them: they must be canonical, for to make them so would change the model."""
    levels = list(codebooks.canonical(table, bits, name))
    if levels != list(table):
        raise ValueError(f"{name}: found {list(table)}, expected ascending float32 levels with largest magnitude 1")
    return levels


@register_quantization_config("kbit")
@dataclass(repr=False)
class KbitConfig(QuantizationConfigMixin):
    """How a model is quantized: ``from_pretrained(name, quantization_config=KbitConfig(bits=3))``.

    Args:
        bits: 2, 3, 4 or 5: the width of every layer that ``module_bits`` does not name.
        codebook: the levels. A name (``"optimal"``, ``"normal_float"``, ``"int"``, ``"fp4"``, or ``"layer"``: those of
            ``"optimal"``, refined on the weights of each layer), a table of ``2**bits`` numbers in any order, or, for
            several widths, ``{bits: table}``.
        scale: how the scale of a block is found: ``"search"``, the one with the least squared error, for which
            ``"optimal"`` levels are made, or ``"absmax"``, from its largest magnitude: quicker, less accurate.
        modules_to_not_convert: patterns of modules to leave in 16 bits besides those left by default: the output
            embedding (``lm_head``), a head at the end of the model, tied weights, what the model keeps in float32, and
            layers whose weight the model's code reads instead of calling them.
        skip_default_modules: False quantizes the output embedding and the head too.
        module_bits: ``{pattern: bits}`` for layers that get another width, or None to leave them in 16 bits; the first
            pattern that matches decides. It overrides the default skips, so ``{"lm_head": 5}`` quantizes the head;
            weights that are tied or kept in float32 cannot be quantized.
        format_version: version of the stored format; 1.
        levels: ``{bits: levels}`` that a quantized model was quantized with; written by the quantizer.
        layers: ``{module name in the checkpoint: {"bits", "exponent", "levels"}}``, only what differs from the model's
            ``bits``, 0 and ``levels``; written by the quantizer.
        quant_method: ``"kbit"``.

    A pattern is a regular expression for whole components of a module's name, or the end of a name.

    Raises:
        TypeError: an unknown argument.
        ValueError: an argument is out of range, or two contradict each other.

    >>> KbitConfig(bits=3, module_bits={"down_proj": 4})
    KbitConfig(bits=3, module_bits={'down_proj': 4})
    >>> KbitConfig.from_dict(KbitConfig(bits=3).to_dict()) == KbitConfig(bits=3)
    True
    """

    bits: int = 4
    codebook: str | Sequence[float] | Mapping[int, Sequence[float]] = DEFAULT_CODEBOOK
    scale: str = DEFAULT_SCALE
    modules_to_not_convert: Sequence[str] | None = field(default_factory=list)
    skip_default_modules: bool = True
    module_bits: Mapping[str, int | None] | None = field(default_factory=dict)
    format_version: int = FORMAT_VERSION
    levels: Mapping[int, Sequence[float]] | None = field(default_factory=dict)
    layers: Mapping[str, Mapping[str, Any]] | None = field(default_factory=dict)
    quant_method: str = "kbit"

    def __post_init__(self):
        if self.quant_method != "kbit":
            raise ValueError(f"quant_method: found {self.quant_method!r}, expected 'kbit'")
        if type(self.format_version) is not int or self.format_version != FORMAT_VERSION:
            raise ValueError(
                f"format_version: found {self.format_version!r}, expected {FORMAT_VERSION}, the only one that "
                "this hf_kbit knows. A newer one may read the checkpoint: pip install -U hf_kbit"
            )
        check_bits(self.bits)
        if not isinstance(self.skip_default_modules, bool):
            raise ValueError(f"skip_default_modules: found {self.skip_default_modules!r}, expected True or False")
        check_scale(self.scale)
        self.modules_to_not_convert = self._patterns(self.modules_to_not_convert)
        self.module_bits = self._module_bits(self.module_bits)
        self.levels = self._levels(self.levels)
        self.codebook = self._codebook(self.codebook)
        self.layers = self._layers(self.layers)

    @staticmethod
    def _patterns(patterns) -> list[str]:
        if isinstance(patterns, str) or not isinstance(patterns or (), Iterable):
            raise ValueError(f"modules_to_not_convert: found {patterns!r}, expected a list of patterns")
        for pattern in patterns or ():
            _check_pattern(pattern, "modules_to_not_convert")
        return list(patterns or ())

    def _module_bits(self, module_bits) -> dict[str, int | None]:
        if not isinstance(module_bits or {}, Mapping):
            raise ValueError(f"module_bits: found {module_bits!r}, expected {{pattern: bits or None}}")
        for pattern, bits in (module_bits or {}).items():
            _check_pattern(pattern, "module_bits")
            if bits is None:
                continue
            check_bits(bits, f"module_bits[{pattern!r}]")
            if pattern in self.modules_to_not_convert:
                raise ValueError(f"{pattern!r}: found in modules_to_not_convert and in module_bits: choose one")
        return dict(module_bits or {})

    def _codebook(self, codebook):
        widths = {self.bits, *(bits for bits in self.module_bits.values() if bits is not None)}
        if isinstance(codebook, str):
            for bits in widths - set(self.levels):  # of a quantized model nothing need be derived
                codebooks.named(codebook, bits)
            return codebook
        if isinstance(codebook, Mapping):
            tables = {int(bits): list(codebooks.canonical(table, int(bits))) for bits, table in codebook.items()}
            if missing := widths - set(tables):
                raise ValueError(
                    f"codebook: found tables for {sorted(tables)} bits, expected one for {sorted(missing)} too"
                )
            return tables
        if len(widths) > 1:
            raise ValueError(
                f"codebook: found one table, but bits and module_bits name the widths {sorted(widths)}; expected "
                "{bits: table} with a table for each"
            )
        return list(codebooks.canonical(codebook, self.bits))

    @staticmethod
    def _levels(levels) -> dict[int, list[float]]:
        levels = levels or {}
        if not isinstance(levels, Mapping):
            raise ValueError(f"levels: found {levels!r}, expected {{bits: table}}")
        widths = {str(bits): bits for bits in BITS}  # JSON has string keys only
        if unknown := [key for key in levels if str(key) not in widths]:
            raise ValueError(f"levels: found tables for {unknown} bits, expected widths of {list(BITS)}")
        return {
            widths[str(key)]: _recorded(table, widths[str(key)], f"levels[{key}]") for key, table in levels.items()
        }

    def _layers(self, layers) -> dict[str, dict[str, Any]]:
        if not isinstance(layers or {}, Mapping):
            raise ValueError(f"layers: found {layers!r}, expected {{name: {{'bits', 'exponent', 'levels'}}}}")
        return {name: self._layer(entry, f"layers[{name!r}]") for name, entry in (layers or {}).items()}

    def _layer(self, entry: Mapping[str, Any], name: str) -> dict[str, Any]:
        if not isinstance(entry, Mapping):
            raise ValueError(f"{name}: found {entry!r}, expected an object of bits, exponent and levels")
        if unknown := set(entry) - {"bits", "exponent", "levels"}:
            raise ValueError(f"{name}: found {sorted(unknown)}, expected bits, exponent and levels alone")
        bits = check_bits(entry.get("bits", self.bits), f"{name}.bits")
        exponent = entry.get("exponent", 0)
        if not isinstance(exponent, int) or isinstance(exponent, bool) or abs(exponent) > MAX_EXPONENT:
            raise ValueError(f"{name}.exponent: found {exponent!r}, expected an integer within +-{MAX_EXPONENT}")
        if "levels" in entry:
            return {**entry, "levels": _recorded(entry["levels"], bits, f"{name}.levels")}
        return dict(entry)

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        """As in the base class; an entry that is no argument of ``KbitConfig`` is a ValueError.

        A quantized model's config that does not say how it was made was written before there was a choice: it was made
        with ``normal_float`` and ``absmax``.
        """
        expected = [f.name for f in fields(cls)]
        if unknown := [key for key in config_dict if key not in expected]:
            raise ValueError(f"quantization_config: found {unknown}, expected none but {expected}")
        if config_dict.get("levels"):
            config_dict = {"codebook": "normal_float", "scale": "absmax", **config_dict}
        return super().from_dict(config_dict, return_unused_kwargs, **kwargs)

    def bits_for(self, module_name: str) -> int | None:
        """Width of a layer, or None if ``module_bits`` or ``modules_to_not_convert`` leaves it in 16 bits.

        Raises:
            ValueError: ``module_bits`` gives it a width and ``modules_to_not_convert`` forbids it.

        >>> config = KbitConfig(bits=3, module_bits={"down_proj": 4, "layers.0": None})
        >>> [config.bits_for(f"layers.{name}") for name in ("0.q_proj", "1.q_proj", "0.down_proj")]
        [None, 3, 4]
        """
        excluded = next((p for p in self.modules_to_not_convert if matches(module_name, p)), None)
        for pattern, bits in self.module_bits.items():
            if matches(module_name, pattern):
                if bits is not None and excluded is not None:
                    raise ValueError(
                        f"{module_name}: module_bits[{pattern!r}] asks for {bits} bits, {excluded!r} in "
                        "modules_to_not_convert for none: choose one"
                    )
                return bits
        return None if excluded is not None else self.bits

    def levels_for(self, bits: int) -> codebooks.Levels:
        """The canonical codebook of a width: the one the model was quantized with, or the one ``codebook`` names."""
        if bits in self.levels:
            return tuple(self.levels[bits])
        return codebooks.resolve(self.codebook[bits] if isinstance(self.codebook, Mapping) else self.codebook, bits)

    def get(self, name: str, default: Any = None) -> Any:
        """Transformers asks a quantization config for its entries as if it were the dict in ``config.json``."""
        return getattr(self, name, default)

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        defaults = {f.name: f.default if f.default is not MISSING else f.default_factory() for f in fields(self)}
        shown = [f"{name}={value!r}" for name, value in given.items() if name == "bits" or value != defaults[name]]
        return f"{type(self).__name__}({', '.join(shown)})"
