"""KbitConfig: what to quantize, to how many bits, with which levels."""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from transformers.quantizers.auto import register_quantization_config
from transformers.utils.quantization_config import QuantizationConfigMixin

from hf_kbit.format import codebooks, trellis
from hf_kbit.format.decoding import DEFAULT_TRANSFORM, Decoding, ScalarDecoding, check_transform, lopsided
from hf_kbit.format.errors import shown
from hf_kbit.format.model import ENTRIES, Exl3, ModelFormat, by_width, check_version, mapping
from hf_kbit.format.spec import BITS, TRANSFORMED, check_bits
from hf_kbit.plan.patterns import Patterns
from hf_kbit.weight.packing import DEFAULT_CODEBOOK, DEFAULT_SCALE, check_scale

INPUTS = (None, "int8")
WORDS = ("weighted", "own")  # for which calibration finds a text itself
TRELLIS = "trellis"  # in the place of a codebook's name
EXL3 = "exl3"  # quant_method of what exllamav3 writes


def check_inputs(inputs: object) -> str | None:
    """Returns ``inputs`` if it is one of ``INPUTS``."""
    if inputs not in INPUTS:
        raise ValueError(f"inputs: found {inputs!r}, expected one of {list(INPUTS)}")
    return inputs


@register_quantization_config("kbit")
@register_quantization_config(EXL3)
@dataclass(repr=False)
class KbitConfig(QuantizationConfigMixin):
    """How a model is quantized: ``from_pretrained(name, quantization_config=KbitConfig(bits=3))``.

    Args:
        bits: 2, 3, 4 or 5, with a trellis 1 to 8: the width of each layer that ``module_bits`` does not name. A number
            between, such as 3.3, is a mean: each layer gets a width by a rule
            (``calibration.widths.widths_by_rule``). ``module_bits`` may then hold None alone.
        codebook: the levels: ``"optimal"``, ``"normal_float"``, ``"int"``, ``"fp4"``, a table of ``2**bits`` numbers
            in any order, or, for several widths, ``{bits: table}``. Or ``"trellis"``: better at each width, and slower
            to quantize; layers then have a trellis, and tables of embeddings scalar levels (docs/trellis.md).
        scale: how the scale of a block is found: ``"search"``, by the least squared error, for which ``"optimal"``
            levels are made, or ``"absmax"``, by the largest magnitude: quicker, less accurate.
        transform: ``"rotated"``: columns are balanced and blocks of 32 rotated, and the layer's input undoes both; or
            ``"none"``, less accurate, which every version of hf_kbit reads.
        modules_to_not_convert: patterns of modules to leave in 16 bits. Left by default are the output embedding
            (``lm_head``) and other layers outside the base model, routers of mixtures, tied weights, what the model
            keeps in float32, and layers with more than a weight and a bias. A pattern that matches nothing is refused.
        skip_default_modules: False quantizes the output embedding and other layers outside the base model too.
        module_bits: ``{pattern: bits}``, or a list of pairs, for layers of another width; None leaves a layer in 16
            bits. The first pattern that matches decides, over the default skips too: ``{"lm_head": 5}`` quantizes the
            head. A tied head goes with its table; a table gets a width by a pattern for its own name only.
        embedding_bits: 2, 3, 4 or 5: the width of tables of embeddings and of heads tied to them; None leaves them in
            16 bits.
        embedding_device: ``"cpu"``: tables of embeddings stay in the memory of the host, packed or not, and a GPU
            reads the rows that it looks up; not those that are tied to a head. For a model that is quantized on a GPU,
            in this process; a quantized one takes ``device_map={"": 0, "model.embed_tokens": "cpu"}``. None: they go
            where the model does.
        inputs: ``"int8"``: linear layers and experts round their inputs to 8 bits when the model runs
            (``hf_kbit.set_inputs``); quantizing is the same. Saved as a wish beside ``quantization_config``. None:
            inputs stay in 16 bits.
        calibrate: quantizes with data while the model loads (docs/calibration.md). ``"weighted"``: a little of a
            built-in text, in seconds on a GPU; ``"own"``: text that the model writes; or what the model is for: a list
            of texts, a ``pathlib.Path`` of a text file, token ids, or what else ``hf_kbit.calibrate`` takes as data.
            No file has the text. None: without data.
        tune: with ``calibrate``, then trains what is stored for so many steps; True: as many as are usual.
        resume: with ``calibrate``, a folder for what is finished: the same call goes on after an interruption.
        quant_method: ``"kbit"``.
        stored: what the files of a quantized model say of their tensors; the quantizer writes it.

    A pattern is a regular expression for whole components of a module's name, or the end of a name. Names may be as
    many as layers; other patterns are refused if they come to more than 100,000 letters with what repeats written out,
    or take longer than ten seconds on the names of a model.

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
    embedding_device: str | None = None
    inputs: str | None = None
    calibrate: Any = field(default=None, compare=False)  # tensors know no equality of one value
    tune: int | bool = 0
    resume: str | Path | None = None
    quant_method: str = "kbit"
    stored: ModelFormat | Exl3 | None = None

    def __post_init__(self):
        if self.quant_method != "kbit":
            raise ValueError(f"quant_method: found {self.quant_method!r}, expected 'kbit'")
        if not (isinstance(self.bits, float) and self.bits % 1 and self.widths[0] < self.bits < self.widths[-1]):
            check_bits(self.bits, among=self.widths)
        if self.embedding_bits is not None:
            check_bits(self.embedding_bits, "embedding_bits")
        if self.embedding_device not in (None, "cpu"):
            raise ValueError(f"embedding_device: found {self.embedding_device!r}, expected 'cpu' or None")
        if not isinstance(self.skip_default_modules, bool):
            raise ValueError(f"skip_default_modules: found {self.skip_default_modules!r}, expected True or False")
        check_scale(self.scale)
        check_transform(self.transform)
        if self.codebook == TRELLIS and (self.scale, self.transform) != (DEFAULT_SCALE, DEFAULT_TRANSFORM):
            found = f"scale {self.scale!r} and transform {self.transform!r}"
            raise ValueError(f"codebook: found {TRELLIS!r} with {found}, expected none: a trellis has one way")
        if check_inputs(self.inputs) and self.transform == "none":
            raise ValueError(f"inputs: found {self.inputs!r} and transform 'none', expected transformed layers for it")
        self._check_calibration()
        left = () if self.modules_to_not_convert is None else self.modules_to_not_convert
        if isinstance(left, (str, Mapping)) or not isinstance(left, Iterable):
            raise ValueError(f"modules_to_not_convert: found {shown(left)}, expected a list of patterns")
        self.modules_to_not_convert = list(left)
        Patterns(self.modules_to_not_convert, "modules_to_not_convert")
        self.module_bits = self._module_bits(self.module_bits)
        self.codebook = self._codebook(self.codebook)
        if self.bits % 1 and any(self.module_bits.values()):
            raise ValueError(
                f"bits: found the mean {self.bits} and widths of layers in module_bits; with them expected one of "
                f"{list(self.widths)}"
            )

    def _check_calibration(self) -> None:
        if isinstance(self.calibrate, Iterator):  # which could be read once
            self.calibrate = list(self.calibrate)
        if isinstance(self.calibrate, str) and self.calibrate not in WORDS:
            raise ValueError(
                f"calibrate: found {shown(self.calibrate)}, expected one of {list(WORDS)}, or data: [text] for a "
                "text, pathlib.Path(name) for a file"
            )
        if self.calibrate is None and (self.tune or self.resume is not None):
            name, value = ("tune", self.tune) if self.tune else ("resume", self.resume)
            raise ValueError(f"{name}: found {value!r} without calibrate, expected it too, such as calibrate='own'")

    def without_calibration(self) -> "KbitConfig":
        return replace(self, calibrate=None, tune=0, resume=None)

    @property
    def widths(self) -> tuple[int, ...]:
        """Those that layers may have."""
        return trellis.BITS if self.codebook == TRELLIS else BITS

    def _module_bits(self, module_bits) -> dict[str, int | None]:
        if isinstance(module_bits, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in module_bits):
            patterns = [pattern for pattern, _ in module_bits]
        else:
            module_bits = mapping(module_bits, "module_bits", "{pattern: bits or None}")
            patterns = list(module_bits)
        Patterns(patterns, "module_bits")
        found = dict(module_bits)
        if len(found) < len(patterns):
            twice = Counter(patterns).most_common(1)[0][0]
            raise ValueError(f"module_bits: found {shown(twice)} more than once, expected each pattern once")
        left = set(self.modules_to_not_convert)
        for pattern, bits in found.items():
            if bits is not None:
                check_bits(bits, f"module_bits[{shown(pattern)}]", self.widths)
                if pattern in left:
                    both = "in modules_to_not_convert and in module_bits"
                    raise ValueError(f"{shown(pattern)}: found {both}: choose one")
        return found

    def _codebook(self, codebook):
        if codebook == TRELLIS:
            return codebook
        widths = {self.bits, self.embedding_bits, *self.module_bits.values()} - {None}
        if self.bits % 1:
            widths = set(BITS)
        if isinstance(codebook, str):
            for bits in widths - set(self.stored.levels if self.stored else ()):
                codebooks.named(codebook, bits)
            return codebook
        if isinstance(codebook, Mapping):
            given = by_width(codebook, "codebook").items()
            tables = {bits: list(codebooks.canonical(table, bits, f"codebook[{bits}]")) for bits, table in given}
            if missing := widths - set(tables):
                also = f"expected one for {sorted(missing)} too"
                raise ValueError(f"codebook: found tables for {sorted(tables)} bits, {also}")
            return tables
        if len(widths) > 1:
            raise ValueError(
                f"codebook: found one table, but bits, embedding_bits and module_bits name the widths "
                f"{sorted(widths)}; expected {{bits: table}} with a table for each"
            )
        return list(codebooks.canonical(codebook, self.bits))

    @classmethod
    def from_dict(cls, config_dict, return_unused_kwargs=False, **kwargs):
        """As in the base class; an entry that is neither an argument nor written by the quantizer is a ValueError.

        A quantized model's config that does not say how it was made is of a time without a choice: it was made with
        ``normal_float`` and ``absmax``.
        """
        given = dict(config_dict)
        if given.get("quant_method") == EXL3:
            bits = given.get("bits")
            bits = int(bits) if isinstance(bits, float) and bits.is_integer() else bits
            given = {"bits": bits, "codebook": TRELLIS, "stored": Exl3(given)}
            return (cls(**given), kwargs) if return_unused_kwargs else cls(**given)
        expected = [*dict.fromkeys((*(f.name for f in fields(cls) if f.name != "stored"), *ENTRIES))]
        if unknown := [key for key in given if key not in expected]:
            raise ValueError(f"quantization_config: found {shown(unknown)}, expected none but {expected}")
        check_version(given.get("format_version", TRANSFORMED))
        if not all(given.get(name) in (None, {}) for name in ("levels", "layers", "code")):
            stored = ModelFormat.from_dict({"bits": cls.bits, **given})
            made = {"codebook": "normal_float", "scale": "absmax"}
            given = {**made, **given, "transform": stored.transform, "stored": stored}
        config = cls(**{f.name: given[f.name] for f in fields(cls) if f.name in given})
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
        """Width of a layer or table, perhaps the mean that ``bits`` is; None if it stays in 16 bits.

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
        if self.stored and bits in self.stored.levels:
            return self.stored.levels[bits]
        codebook = self.codebook[bits] if isinstance(self.codebook, Mapping) else self.codebook
        codebook = DEFAULT_CODEBOOK if codebook == TRELLIS else codebook
        return codebooks.resolve(codebook, bits, lopsided(self.transform, self.scale))

    def decoding(self, bits: int, shape: Sequence[int], is_table: bool) -> Decoding:
        """How a weight ``[*lead, N, K]`` is to decode in so many bits, before it is seen."""
        if self.codebook == TRELLIS and not is_table:
            return trellis.TrellisDecoding(bits, block=trellis.block_of(*shape[-2:]))
        return ScalarDecoding(self.levels_for(bits), 0, self.transform)

    def record(self, decodings: Mapping[str, Decoding], tables: Collection[str], version: int) -> None:
        """Writes into ``stored`` how layers decode, given by their names in the checkpoint, some of which are those of
        tables."""
        scalar = {each.bits for each in decodings.values() if isinstance(each, ScalarDecoding)}
        levels = {bits: self.levels_for(bits) for bits in sorted(scalar)}
        embedding_bits = self.embedding_bits or next((decodings[name].bits for name in tables), None)
        self.stored = ModelFormat.of(decodings, self.bits, levels, embedding_bits, version)

    def to_dict(self) -> dict[str, Any]:
        """As in the base class; ``module_bits`` becomes a list of pairs where JSON, which sorts keys, loses the order.

        >>> KbitConfig(module_bits={"down_proj": 5, "layers.0": None}).to_dict()["module_bits"]
        {'down_proj': 5, 'layers.0': None}
        >>> KbitConfig(module_bits={"layers.0": None, "down_proj": 5}).to_dict()["module_bits"]
        [['layers.0', None], ['down_proj', 5]]
        """
        entries = copy.deepcopy({name: value for name, value in vars(self).items() if name != "calibrate"})
        stored, tune = entries.pop("stored"), entries.pop("tune")
        del entries["resume"], entries["embedding_device"]
        if stored is None and isinstance(self.calibrate, str):
            entries |= {"calibrate": self.calibrate} | ({"tune": tune} if tune else {})
        if self.embedding_bits is None:
            del entries["embedding_bits"]  # of which an hf_kbit that knows no packed tables need not know
        if self.inputs is None or stored is not None:
            del entries["inputs"]  # which every hf_kbit before would refuse: a quantized model has it elsewhere
        if list(self.module_bits) != sorted(self.module_bits):
            entries["module_bits"] = [[pattern, bits] for pattern, bits in self.module_bits.items()]
        if stored is not None:
            del entries["transform"]
            entries |= stored.to_dict()
        return entries

    def __deepcopy__(self, memo: dict) -> "KbitConfig":
        copied = copy.copy(self)  # data may be large, and nobody writes into it
        own = {name: value for name, value in vars(self).items() if name != "calibrate"}
        vars(copied).update(copy.deepcopy(own, memo))
        return copied

    def get(self, name: str, default: Any = None) -> Any:
        """Transformers asks a quantization config for its entries as if it were the dict in ``config.json``."""
        return getattr(self, name, default)

    def __repr__(self) -> str:
        usual, given = vars(KbitConfig()), vars(self) | {"calibrate": None}
        if self.calibrate is not None:
            given["calibrate"] = self.calibrate if isinstance(self.calibrate, str) else type(self.calibrate)
        shown = [f"{k}={v!r}" for k, v in given.items() if k == "bits" or (k != "stored" and v != usual[k])]
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
        # Of a part of the model that a table is in, a pattern may leave the table in 16 bits, not give it a width.
        part = module_name.rpartition(".")[0] if table else ""
        for_part = set(self.widths.naming(part)) if part else ()
        for pattern in self.widths.naming(module_name):
            bits = config.module_bits[pattern]
            if bits is None:
                return None, False
            if pattern in for_part:
                continue
            if excluded is not None:
                raise ValueError(
                    f"{module_name}: module_bits[{shown(pattern)}] asks for {bits} bits, {shown(excluded)} in "
                    "modules_to_not_convert for none: choose one"
                )
            return bits, True
        usual = config.embedding_bits if table else config.bits
        return usual if excluded is None else None, False


def config_or(config: KbitConfig | None, arguments: Mapping[str, Any]) -> KbitConfig:
    """``config``, or one of ``arguments``, without what files said of another model: for functions that quantize one.

    Raises:
        TypeError: both are given, or ``config`` is no ``KbitConfig``.
    """
    if config is not None and arguments:
        raise TypeError(f"config: found it and {sorted(arguments)}, expected one; put these into the config")
    if not isinstance(config, KbitConfig | None):
        raise TypeError(f"config: found {type(config).__name__}, expected a KbitConfig")
    return replace(config, stored=None) if config else KbitConfig(**arguments)
