"""KbitConfig: what it takes, refuses and says of each module."""

import copy
import json
import re

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from hf_kbit import KbitConfig, codebooks
from hf_kbit.format.model import ModelFormat
from hf_kbit.plan.config import config_or

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
    KbitConfig(inputs="int8"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=repr)
def test_json_round_trip(config, tmp_path):
    text = config.to_json_string()
    again = KbitConfig.from_dict(json.loads(text))
    assert again == config and again.to_json_string() == text
    assert list(again.module_bits) == list(config.module_bits), "the first pattern that matches decides"
    assert json.loads(text).keys().isdisjoint({"levels", "layers", "format_version", "stored"})
    LlamaConfig(num_hidden_layers=1, quantization_config=config.to_dict()).save_pretrained(tmp_path)
    assert AutoQuantizationConfig.from_dict(AutoConfig.from_pretrained(tmp_path).quantization_config) == config
    assert copy.deepcopy(config) == config and KbitConfig(**dict(config)) == config
    assert config.get("quant_method") == "kbit" and config.get("load_in_4bit", False) is False


@pytest.mark.parametrize("name", ["modules_to_not_convert", "module_bits"])
@pytest.mark.parametrize("empty", [False, 0, 0.0, ""], ids=repr)
def test_only_none_stands_for_nothing(name, empty):
    assert KbitConfig(**{name: None}) == KbitConfig()
    with pytest.raises(ValueError, match=f"{name}: found {empty!r}, expected"):
        KbitConfig(**{name: empty})


def test_repr():
    with pytest.raises(TypeError, match="unexpected keyword argument 'bit'"):
        KbitConfig(bit=3)
    assert repr(KbitConfig()) == "KbitConfig(bits=4)"
    assert repr(KbitConfig(transform="none")) == "KbitConfig(bits=4, transform='none')"
    assert repr(KbitConfig(bits=3, module_bits={"a": None})) == "KbitConfig(bits=3, module_bits={'a': None})"
    config = KbitConfig(bits=2, modules_to_not_convert=("x",), skip_default_modules=False)
    assert eval(repr(config)) == config


TABLE = codebooks.integer(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 1}, "bits: found 1, expected one of 2, 3, 4, 5"),
        ({"bits": 4.0}, "bits: found 4.0"),
        ({"bits": 5.5}, "bits: found 5.5"),
        ({"bits": True}, "bits: found True"),
        ({"bits": "4"}, "bits: found '4'"),
        ({"bits": 3.3, "module_bits": {"a": None, "b": 4}}, "bits: found the mean 3.3"),
        ({"embedding_bits": 3.3}, "embedding_bits: found 3.3, expected one of 2, 3, 4, 5"),
        ({"scale": "mse"}, r"scale: found 'mse', expected one of \['absmax', 'search'\]"),
        ({"skip_default_modules": None}, "skip_default_modules: found None"),
        ({"quant_method": "gptq"}, "quant_method: found 'gptq'"),
        ({"transform": "hadamard"}, r"transform: found 'hadamard', expected one of \['rotated', 'none'\]"),
        ({"transform": None}, "transform: found None"),
        ({"inputs": "fp8"}, r"inputs: found 'fp8', expected one of \[None, 'int8'\]"),
        ({"inputs": ["int8"]}, r"inputs: found \['int8'\]"),
        ({"inputs": "int8", "transform": "none"}, "inputs: found 'int8' and transform 'none', expected transformed"),
        ({"transform": ["none"]}, r"transform: found \['none'\]"),
        # --- levels
        ({"codebook": "nf"}, r"codebook: found 'nf', expected one of \['fp4', 'int'"),
        ({"codebook": "fp4", "bits": 3}, "found 'fp4' for 3 bits"),
        ({"codebook": TABLE, "bits": 3}, "codebook: found 4 levels, expected 2\\*\\*bits = 8"),
        ({"codebook": [0, 0, 0, 0], "bits": 2}, "codebook: found only zeros"),
        ({"codebook": [10**400, 1, 0, 2], "bits": 2}, "codebook: found .*, expected a table of numbers"),
        ({"codebook": TABLE, "bits": 2, "module_bits": {"a": 3}}, r"widths \[2, 3\]"),
        ({"codebook": TABLE, "bits": 2, "embedding_bits": 5}, r"widths \[2, 5\]"),
        ({"codebook": codebooks.integer(3), "bits": 3.3}, "codebook: found one table"),
        ({"codebook": {3: codebooks.integer(3)}, "bits": 3.3}, r"expected one for \[2, 4, 5\]"),
        ({"codebook": {2: TABLE}, "bits": 3}, r"codebook: found tables for \[2\] bits.*\[3\]"),
        ({"codebook": {"x": [1, 2]}}, r"codebook: found tables for \['x'\] bits"),
        ({"codebook": {"4": "0123456789012345"}}, r"codebook\[4\]: found .*, expected a table of numbers"),
        # --- patterns
        ({"module_bits": {"a": 6}}, r"module_bits\['a'\]: found 6"),
        ({"module_bits": ["a"]}, "module_bits: found"),
        ({"module_bits": [["a", 3], ["b"]]}, "module_bits: found"),
        ({"module_bits": [["a", 3], ["a", 4]]}, "module_bits: found .*, expected each pattern once"),
        ({"module_bits": {"": 3}}, "module_bits: found pattern '', expected"),
        ({"module_bits": {"[": 3}}, r"module_bits: found pattern '\[', expected a regular expression"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert: found 'lm_head', expected a list"),
        ({"modules_to_not_convert": [3]}, "modules_to_not_convert: found"),
        ({"modules_to_not_convert": ["(a"]}, r"modules_to_not_convert: found pattern '\(a', expected a reg"),
        ({"modules_to_not_convert": ["a"], "module_bits": {"a": 3}}, "'a': found in modules_to_not_convert"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        KbitConfig(**arguments)


def test_bits_for():
    """The first pattern of ``module_bits`` that matches decides."""
    config = KbitConfig(
        bits=3,
        modules_to_not_convert=["visual", r"model\.layers\.0\..*"],
        module_bits={"layers.1.mlp": None, "down_proj": 5, r"model\.layers\.\d+\.self_attn": 2},
    )
    expected = {
        "model.layers.2.mlp.up_proj": 3,
        "model.layers.2.mlp.down_proj": 5,
        "model.layers.2.self_attn.q_proj": 2,
        "model.layers.1.mlp": None,
        "model.visual": None,
        "visual.blocks.0.fc1": None,
        "model.layers.0.input": None,
    }
    assert {name: config.bits_for(name) for name in expected} == expected
    assert KbitConfig(module_bits={"mlp.down_proj": 5, "down_proj": 2}).bits_for("x.mlp.down_proj") == 5
    assert KbitConfig(module_bits={"down_proj": 2, "mlp.down_proj": 5}).bits_for("x.mlp.down_proj") == 2
    asked = re.escape("model.layers.0.mlp.down_proj: module_bits['down_proj'] asks for 5")
    with pytest.raises(ValueError, match=asked):
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


def test_levels_for():
    assert KbitConfig(bits=3).levels_for(3) == codebooks.optimal(3, signed=True)
    assert KbitConfig(bits=3, transform="none").levels_for(3) == codebooks.optimal(3)
    table = torch.tensor([4.0, 1.0, -4.0, 0.0])
    assert KbitConfig(bits=2, codebook=table).levels_for(2) == (-1.0, 0.0, 0.25, 1.0)
    stored = ModelFormat(2, {2: (-1.0, -0.5, 0.5, 1.0)}, {})
    assert KbitConfig(bits=2, stored=stored).levels_for(2) == stored.levels[2], "what was recorded wins"


def test_what_files_say_of_one_model_is_not_asked_of_another():
    """Neither by functions that quantize nor in the text of a config."""
    wish = KbitConfig(bits=3, module_bits={"a": None})
    config = KbitConfig(bits=3, module_bits={"a": None}, stored=ModelFormat(3, {3: codebooks.integer(3)}, {}))
    assert config_or(config, {}) == wish and config.stored and repr(config) == repr(wish)
    assert config.levels_for(3) == codebooks.integer(3) != config_or(config, {}).levels_for(3)


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
