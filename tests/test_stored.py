"""What files say of decoding: read as it was written, with the digest that docs/format.md defines, or refused."""

import hashlib
import json
import re
import struct
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kbit import KbitConfig, codebooks
from hf_kbit.format.decoding import TRANSFORMS, ScalarDecoding
from hf_kbit.format.model import ModelFormat

TABLES = {bits: [codebooks.normal_float(bits), codebooks.integer(bits)] for bits in (2, 3, 4, 5)}


@st.composite
def stored(draw) -> ModelFormat:
    """All that can be said, of one version or the other."""
    version = draw(st.sampled_from([1, 2]))
    transforms = st.sampled_from(TRANSFORMS if version == 2 else ["none"])
    bits = draw(st.sampled_from([2, 3, 4, 5]))
    levels = {width: draw(st.sampled_from(TABLES[width])) for width in {bits, *draw(st.sets(st.integers(2, 5)))}}
    tables = st.sampled_from([table for both in TABLES.values() for table in both])
    layer = st.builds(ScalarDecoding, tables, st.integers(-122, 122), transforms)
    layers = draw(st.dictionaries(st.text("ab.é\ud800", min_size=1), layer, max_size=4))
    embedding_bits = draw(st.sampled_from([None, 2, 5]))
    return ModelFormat(bits, levels, layers, embedding_bits, draw(transforms), version)


def digest_of(entries: dict) -> str:
    """As the documentation has it, of what a file says."""
    new, bits = entries["format_version"] > 1, entries["bits"]
    transform = entries.get("transform", "rotated" if new else "none")

    def digits(levels):
        return b"".join(struct.pack("<f", level) for level in levels).hex()

    lines = [f"bits {bits}", *([f"transform {transform}"] if new else [])]
    lines += [f"levels {width} {digits(table)}" for width, table in sorted(entries["levels"].items())]
    for name, own in sorted(entries["layers"].items()):
        width = own.get("bits", bits)
        levels = digits(own.get("levels") or entries["levels"][str(width)])
        lines.append(f"layer {name} {width} {own.get('exponent', 0)} {levels}")
        lines[-1] += f" {own.get('transform', transform)}" if new else ""
    return hashlib.sha256("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")).hexdigest()


@given(stored())
@settings(max_examples=100, deadline=None)
def test_written_and_read(found):
    """Through JSON, alone and in the config of a model, with nothing said that need not be said."""
    entries = json.loads(json.dumps(found.to_dict(), sort_keys=True))
    assert ModelFormat.from_dict(entries) == found and digest_of(entries) == found.digest()
    assert ("transform" in entries) == (found.transform != ("rotated" if found.format_version == 2 else "none"))
    assert ("embedding_bits" in entries) == (found.embedding_bits is not None)
    for name, layer in found.layers.items():
        usual = ScalarDecoding(found.levels.get(layer.bits, ()), 0, found.transform)
        differs = {"bits"} if layer.bits != found.bits else set()
        differs |= {key for key in ("exponent", "levels", "transform") if getattr(layer, key) != getattr(usual, key)}
        assert entries["layers"][name].keys() == differs and found.decoding(name) == layer
    assert found.decoding("another") == ScalarDecoding(found.levels[found.bits], 0, found.transform)
    config = KbitConfig(bits=found.bits, stored=found, codebook="int", module_bits={"b": None, "a": 3})
    again = KbitConfig.from_dict(json.loads(config.to_json_string()))
    assert again.stored == found and again.to_json_string() == config.to_json_string()
    assert again.transform == found.transform and again.levels_for(found.bits) == found.levels[found.bits]


def test_the_digest_is_not_of_what_a_user_wants():
    digest = ModelFormat(3, {3: TABLES[3][0]}, {}).digest()
    assert digest == ModelFormat(3, {3: TABLES[3][0]}, {}, embedding_bits=5).digest()
    assert digest == digest_of({"bits": 3, "format_version": 2, "levels": {"3": TABLES[3][0]}, "layers": {}})


def test_a_file_of_the_first_release_says_neither_transform_nor_how_it_was_made():
    entries = {"quant_method": "kbit", "bits": 2, "format_version": 1, "levels": {"2": TABLES[2][1]}, "layers": {}}
    config = KbitConfig.from_dict(entries)
    assert (config.codebook, config.scale, config.transform) == ("normal_float", "absmax", "none")
    assert config.stored == ModelFormat(2, {2: TABLES[2][1]}, {}, None, "none", 1)


GOOD = {"bits": 2, "levels": {"2": [-1, -0.5, 0.5, 1]}, "layers": {}}
NO_TRANSFORM = "format_version: found 1, expected 2 with transformed layers"
BAD = [
    ({"bits": 3.5}, "bits: found 3.5"),
    ({"embedding_bits": 6}, "embedding_bits: found 6, expected one of 2, 3, 4, 5"),
    ({"format_version": True}, "format_version: found True"),
    ({"format_version": "1"}, "format_version: found '1'"),
    ({"format_version": 4}, r"format_version: found 4, expected .*\[1, 2, 3\].*pip install -U hf_kbit"),
    ({"format_version": 1, "transform": "rotated"}, NO_TRANSFORM),
    ({"format_version": 1, "layers": {"a": {"transform": "rotated"}}}, NO_TRANSFORM),
    ({"layers": None}, "layers: found none in the quantization config, expected an object"),
    ({"transform": ["none"]}, r"transform: found \['none'\]"),
    *(
        ({name: empty}, re.escape(f"{name}: found {empty!r}, expected"))
        for name in ("levels", "layers")
        for empty in (0, "", [])
    ),
    ({"levels": {3: [0, 1]}}, "found 2 levels"),
    ({"levels": {"x": [1]}}, r"levels: found tables for \['x'\] bits"),
    ({"levels": {"2": [1, 0.5, -0.5, -1]}}, r"levels\[2\]: found .*, expected ascending float32 levels"),
    ({"levels": {"2": [-2, -1, 1, 2]}}, r"levels\[2\]: found .*, expected ascending float32 levels"),
    ({"levels": {"2": [-1, 0, 1, float("nan")]}}, r"levels\[2\]: found .*finite"),
    ({"levels": {"2": "abcd"}}, r"levels\[2\]: found 'abcd'"),
    ({"levels": {"2": 1.0}}, r"levels\[2\]: found 1.0"),
    ({"layers": {"a": {"bits": 3}}}, r"levels: found \[2\] in the quantization config, expected 3 too"),
    ({"layers": {"a": []}}, r"layers\['a'\]: found \[\], expected an object"),
    ({"layers": {"a": None}}, r"layers\['a'\]: found None, expected an object"),
    ({"layers": {"a": {"width": 3}}}, r"layers\['a'\]: found \['width'\]"),
    ({"layers": {"a": {"transform": None}}}, r"layers\['a'\].transform: found None"),
    ({"layers": {"a": {"bits": 9}}}, r"layers\['a'\].bits: found 9"),
    ({"layers": {"a": {"exponent": 0.5}}}, r"layers\['a'\].exponent: found 0.5"),
    ({"layers": {"a": {"exponent": 5000}}}, r"layers\['a'\].exponent: found 5000"),
    ({"layers": {"a": {"levels": [1, 2]}}}, r"layers\['a'\].levels: .*found 2 levels"),
    ({"levels": None, "layers": {"a": {}}}, r"levels: found \[\] in the quantization config, expected 2 too"),
]


@pytest.mark.parametrize(("entries", "message"), BAD, ids=str)
def test_damaged(entries, message):
    with pytest.raises(ValueError, match=message):
        KbitConfig.from_dict(GOOD | entries)


def test_a_width_without_levels():
    """May be said, for no layer need have it."""
    found = KbitConfig.from_dict(GOOD | {"bits": 3}).stored
    with pytest.raises(ValueError, match=r"levels: found \[2\] in the quantization config, expected 3 too"):
        found.decoding("a")


def test_many_layers_hold_nobody_up():
    """And what is wrong with so many entries is said in a few words."""
    levels = list(codebooks.optimal(2))
    layers = {f"model.layers.{i}.q_proj": {"exponent": 1, "levels": levels} for i in range(20_000)}
    start = time.process_time()
    found = KbitConfig.from_dict({"bits": 2, "levels": {"2": levels}, "layers": layers})
    assert len(found.stored.digest()) == 64 and len(found.to_dict()["layers"]) == len(layers)
    assert time.process_time() - start < 4.0
    for entries, message in [
        ({"module_bits": [["a", 3]] * 100_000}, "module_bits: found 'a' more than once"),
        ({"module_bits": [*[["a", 3]] * 100_000, "b"]}, "module_bits: found "),
        ({"layers": [*layers]}, "layers: found "),
        ({"modules_to_not_convert": dict.fromkeys(layers, 3)}, "modules_to_not_convert: found "),
        ({"more" * 100_000: 1}, "quantization_config: found "),
        ({"layers": {"a": {"more" * 100_000: 1}}}, "layers"),
        ({"layers": {"a": [1] * 100_000}}, "layers"),
        ({"levels": {"7" * 100_000: levels}}, "levels: found tables for "),
    ]:
        with pytest.raises(ValueError, match=message) as error:
            KbitConfig.from_dict(entries)
        assert len(str(error.value)) < 1000
