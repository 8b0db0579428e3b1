"""KbitConfig: what it takes, refuses and says of each module."""

import copy
import json
import re

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from hf_kbit import KbitConfig, codebooks
from hf_kbit.config import config_or
from hf_kbit.stored import Stored

CONFIGS = [
    KbitConfig(),
    KbitConfig(bits=2, modules_to_not_convert=["mlp"], skip_default_modules=False),
    KbitConfig(bits=3, module_bits={"down_proj": 5, "vision_tower": None}),
    KbitConfig(bits=2, codebook=[3, -1, 0.5, 7]),
    KbitConfig(bits=4, codebook="normal_float", scale="absmax"),
    KbitConfig(bits=2, codebook={2: [1, 2, 3, 4], 3: range(8)}, module_bits={"down_proj": 3}),
    KbitConfig(bits=3, module_bits={"layers.0": None, "down_proj": 4}),
    KbitConfig(bits=3, transform="none"),
    KbitConfig(bits=3, embedding_bits=5),
    KbitConfig(bits=3.25, module_bits={"layers.0": None}),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_json_round_trip(config, tmp_path):
    text = config.to_json_string()
    again = KbitConfig.from_dict(json.loads(text))
    assert again == config and again.to_json_string() == text
    assert list(again.module_bits.items()) == list(config.module_bits.items()), (
        "the first pattern that matches decides"
    )
    assert json.loads(text).keys().isdisjoint({"levels", "layers", "format_version", "stored"})
    LlamaConfig(num_hidden_layers=1, quantization_config=config.to_dict()).save_pretrained(tmp_path)
    assert AutoQuantizationConfig.from_dict(AutoConfig.from_pretrained(tmp_path).quantization_config) == config
    assert copy.deepcopy(config) == config and KbitConfig(**dict(config)) == config


@pytest.mark.parametrize("name", ["modules_to_not_convert", "module_bits"])
@pytest.mark.parametrize("empty", [False, 0, 0.0, ""], ids=repr)
def test_only_none_stands_for_nothing(name, empty):
    assert KbitConfig(**{name: None}) == KbitConfig()
    with pytest.raises(ValueError, match=f"{name}: found {empty!r}, expected"):
        KbitConfig(**{name: empty})


def test_repr():
    assert repr(KbitConfig()) == "KbitConfig(bits=4)"
    assert repr(KbitConfig(transform="none")) == "KbitConfig(bits=4, transform='none')"
    assert repr(KbitConfig(bits=3, module_bits={"a": None})) == "KbitConfig(bits=3, module_bits={'a': None})"
    config = KbitConfig(bits=2, modules_to_not_convert=("x",), skip_default_modules=False)
    assert eval(repr(config)) == config


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bit": 3}, TypeError, "unexpected keyword argument 'bit'"),
        ({"bits": 1}, ValueError, "bits: found 1, expected one of 2, 3, 4, 5"),
        ({"bits": 4.0}, ValueError, "bits: found 4.0"),
        ({"bits": 5.5}, ValueError, "bits: found 5.5"),
        ({"bits": 3.3, "module_bits": {"a": None, "b": 4}}, ValueError, "bits: found the mean 3.3"),
        ({"bits": 3.3, "codebook": codebooks.integer(3)}, ValueError, "codebook: found one table"),
        ({"bits": 3.3, "codebook": {3: codebooks.integer(3)}}, ValueError, r"expected one for \[2, 4, 5\]"),
        ({"bits": True}, ValueError, "bits: found True"),
        ({"embedding_bits": 6}, ValueError, "embedding_bits: found 6, expected one of 2, 3, 4, 5"),
        ({"embedding_bits": 3.3}, ValueError, "embedding_bits: found 3.3"),
        ({"bits": 2, "codebook": [1, 2, 3, 4], "embedding_bits": 5}, ValueError, r"widths \[2, 5\]"),
        ({"scale": "mse"}, ValueError, r"scale: found 'mse', expected one of \['absmax', 'search'\]"),
        ({"codebook": "fp4", "bits": 3}, ValueError, "found 'fp4' for 3 bits"),
        ({"bits": "4"}, ValueError, "bits: found '4'"),
        ({"codebook": "nf"}, ValueError, r"codebook: found 'nf', expected one of \['fp4', 'int'"),
        ({"bits": 3, "codebook": [1, 2, 3, 4]}, ValueError, "codebook: found 4 levels, expected 2\\*\\*bits = 8"),
        ({"bits": 2, "codebook": [0, 0, 0, 0]}, ValueError, "codebook: found only zeros"),
        ({"bits": 2, "codebook": [1, 2, 3, 4], "module_bits": {"a": 3}}, ValueError, r"widths \[2, 3\]"),
        ({"bits": 3, "codebook": {2: [1, 2, 3, 4]}}, ValueError, r"codebook: found tables for \[2\] bits.*\[3\]"),
        ({"module_bits": {"a": 6}}, ValueError, r"module_bits\['a'\]: found 6"),
        ({"module_bits": ["a"]}, ValueError, "module_bits: found"),
        (
            {"modules_to_not_convert": "lm_head"},
            ValueError,
            "modules_to_not_convert: found 'lm_head', expected a list",
        ),
        ({"modules_to_not_convert": [3]}, ValueError, "modules_to_not_convert: found"),
        ({"module_bits": {"": 3}}, ValueError, "module_bits: found pattern '', expected"),
        ({"module_bits": [["a", 3], ["a", 4]]}, ValueError, "module_bits: found .*, expected each pattern once"),
        ({"module_bits": [["a", 3], ["b"]]}, ValueError, "module_bits: found"),
        ({"bits": 2, "codebook": [10**400, 1, 0, 2]}, ValueError, "codebook: found .*, expected a table of numbers"),
        ({"codebook": {"x": [1, 2]}}, ValueError, r"codebook: found tables for \['x'\] bits"),
        ({"codebook": {"99": [1, 2]}}, ValueError, r"codebook: found tables for \['99'\] bits"),
        ({"codebook": {"4": "0123456789012345"}}, ValueError, r"codebook\[4\]: found .*, expected a table of numbers"),
        (
            {"modules_to_not_convert": ["(a"]},
            ValueError,
            r"modules_to_not_convert: found pattern '\(a', expected a reg",
        ),
        ({"module_bits": {"[": 3}}, ValueError, r"module_bits: found pattern '\[', expected a regular expression"),
        (
            {"modules_to_not_convert": ["a"], "module_bits": {"a": 3}},
            ValueError,
            "'a': found in modules_to_not_convert",
        ),
        ({"skip_default_modules": None}, ValueError, "skip_default_modules: found None"),
        ({"quant_method": "gptq"}, ValueError, "quant_method: found 'gptq'"),
        ({"transform": "hadamard"}, ValueError, r"transform: found 'hadamard', expected one of \['rotated', 'none'\]"),
        ({"transform": None}, ValueError, "transform: found None"),
        ({"transform": ["none"]}, ValueError, r"transform: found \['none'\]"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        KbitConfig(**arguments)


def test_bits_for():
    config = KbitConfig(
        bits=3,
        modules_to_not_convert=["visual", r"model\.layers\.0\..*"],
        module_bits={"layers.1.mlp": None, "down_proj": 5, r"model\.layers\.\d+\.self_attn": 2},
    )
    assert config.bits_for("model.layers.2.mlp.up_proj") == 3
    assert config.bits_for("model.layers.2.mlp.down_proj") == 5
    assert config.bits_for("model.layers.2.self_attn.q_proj") == 2
    assert config.bits_for("model.layers.1.mlp") is None
    assert config.bits_for("model.visual") is None and config.bits_for("visual.blocks.0.fc1") is None
    assert config.bits_for("model.layers.0.input") is None
    with pytest.raises(
        ValueError, match=re.escape("model.layers.0.mlp.down_proj: module_bits['down_proj'] asks for 5")
    ):
        config.bits_for("model.layers.0.mlp.down_proj")


def test_bits_for_tables():
    config = KbitConfig(
        bits=3,
        embedding_bits=5,
        modules_to_not_convert=["visual"],
        module_bits={"encoder": 2, "decoder": None, "embed_positions": 4},
    )
    found = {
        name: config.bits_for(name, table=True) for name in ("embed", "encoder.embed", "decoder.embed", "visual.a")
    }
    assert found == {"embed": 5, "encoder.embed": 5, "decoder.embed": None, "visual.a": None}
    assert config.bits_for("encoder.embed_positions", table=True) == 4, "by its own name"
    assert config.bits_for("encoder.embed_positions") == 2, "as a layer by the first that matches"
    assert KbitConfig(bits=3).bits_for("embed", table=True) is None


def test_the_first_matching_pattern_decides():
    assert KbitConfig(module_bits={"mlp.down_proj": 5, "down_proj": 2}).bits_for("x.mlp.down_proj") == 5
    assert KbitConfig(module_bits={"down_proj": 2, "mlp.down_proj": 5}).bits_for("x.mlp.down_proj") == 2


def test_levels_for():
    assert KbitConfig(bits=3).levels_for(3) == codebooks.optimal(3, signed=True)
    assert KbitConfig(bits=3, transform="none").levels_for(3) == codebooks.optimal(3)
    table = torch.tensor([4.0, 1.0, -4.0, 0.0])
    assert KbitConfig(bits=2, codebook=table).levels_for(2) == (-1.0, 0.0, 0.25, 1.0)
    stored = Stored(2, {2: (-1.0, -0.5, 0.5, 1.0)}, {})
    assert KbitConfig(bits=2, stored=stored).levels_for(2) == stored.levels[2], "what was recorded wins"


def test_what_files_say_of_one_model_is_not_asked_of_another():
    """Neither by functions that quantize nor in the text of a config."""
    wish = KbitConfig(bits=3, module_bits={"a": None})
    config = KbitConfig(bits=3, module_bits={"a": None}, stored=Stored(3, {3: codebooks.integer(3)}, {}))
    assert config_or(config, {}) == wish and config.stored and repr(config) == repr(wish)
    assert config.levels_for(3) == codebooks.integer(3) != config_or(config, {}).levels_for(3)


def test_get_looks_like_the_dict_in_config_json():
    config = KbitConfig(bits=3)
    assert config.get("quant_method") == "kbit" and config.get("load_in_4bit", False) is False


def test_updated_as_if_it_were_new():
    """Checked as a whole, and as it was after an error; what it has no argument for is returned."""
    config = KbitConfig(bits=3, module_bits={"a": 4})
    for wrong, message in [
        ({"bits": 7}, "bits: found 7"),
        ({"bits": 4, "module_bits": {"(": 3}}, r"module_bits: found pattern '\('"),
        ({"modules_to_not_convert": ["a"]}, "'a': found in modules_to_not_convert and in module_bits"),
    ]:
        with pytest.raises(ValueError, match=message):
            config.update(**wrong)
        with pytest.raises(ValueError, match=message):
            KbitConfig.from_dict(config.to_dict(), **wrong)
        assert config == KbitConfig(bits=3, module_bits={"a": 4})
    assert config.update(bits=5, to_dict=1, other=2) == {"to_dict": 1, "other": 2}
    assert config == KbitConfig(bits=5, module_bits={"a": 4})
    assert KbitConfig.from_dict({"bits": 2}, True, bits=3, other=2) == (KbitConfig(bits=3), {"other": 2})
