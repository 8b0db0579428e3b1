"""Quantized models in vLLM: what Transformers generates from the same folder. ``make test-vllm`` runs these tests."""

import gc
import logging
from contextlib import nullcontext

import pytest
import serving
import torch

import hf_kbit
from hf_kbit.integrations.transformers.inputs import WISH
from hf_kbit.integrations.transformers.report import logger
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.ops import native

ALONE = {"distributed_executor_backend": "uni"}


@pytest.mark.parametrize("dtype", [*serving.DTYPES, pytest.param("float16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", serving.MODELS)
def test_same_as_transformers(name, dtype, tmp_path):
    if serving.MODELS[name][0] in ("gemma2", "gpt_oss") and dtype == "float16":
        pytest.skip("vLLM has these models in bfloat16 alone")
    folder = serving.make(name, tmp_path)
    found = serving.generate(folder, **ALONE, dtype=dtype)
    serving.assert_same(found, serving.load(folder, dtype))


@serving.ON_CPU
@pytest.mark.parametrize(
    ("name", "way"),
    [("tied", "saved"), ("packed head", "saved"), ("some in 16 bits", "given"), ("qwen3_moe", "given")],
)
def test_8_bit_inputs(name, way, tmp_path):
    """Of layers that are merged, of heads and of experts; layers that are not transformed keep 16-bit inputs."""
    folder = serving.make(name, tmp_path)
    plain, rounded = serving.load(folder), serving.load(folder)
    left = hf_kbit.set_inputs(rounded, "int8")
    assert {*left.values()} == ({"not transformed"} if name == "some in 16 bits" else set())
    settings = {"hf_overrides": {WISH: "int8"}}
    if way == "saved":
        folder, settings = tmp_path / "rounded", {}
        rounded.save_pretrained(folder)
    found = serving.generate(folder, **ALONE, **settings)
    serving.assert_same(found, rounded)
    assert serving.agreement(found, plain)[0] < 0.2


def test_8_bit_inputs_without_a_kernel(tmp_path, monkeypatch, caplog):
    """A server is not to be slower for a wish."""
    monkeypatch.setattr(native, "has_int8", lambda device_type: False)
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    folder = serving.make("qwen3_moe", tmp_path)
    found = serving.generate(folder, **ALONE, hf_overrides={WISH: "int8"})
    serving.assert_same(found, serving.load(folder, serving.options()["dtype"]))
    said = {record for record in caplog.records if "8-bit inputs" in record.getMessage()}
    (line,) = (record.getMessage() for record in said)  # each record comes by two loggers
    assert line.startswith("hf_kbit: 8-bit inputs in 0 of 10 layers; 16-bit ones stay in ")
    assert line.count(f": no kernel on {serving.DEVICE} (2 x)") == 5


def adapters(folder, model, count: int):
    """Saves LoRA adapters of a model, and returns it with them, and their folders."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(1)
    for number in range(count):
        name = f"adapter {number}"
        if number == 0:
            model = peft.get_peft_model(model, config, name, autocast_adapter_dtype=False)
        else:
            model.add_adapter(name, config, autocast_adapter_dtype=False)
        model.to(model.dtype)
    model.save_pretrained(folder)
    return model.eval(), [folder / f"adapter {number}" for number in range(count)]


@pytest.mark.parametrize("dtype", serving.DTYPES)
@pytest.mark.parametrize(("name", "inputs"), [("mixed widths", None), ("tied", "int8")])
def test_two_adapters_in_one_batch(name, inputs, dtype, tmp_path):
    """Beside a prompt without one on a GPU: on a CPU vLLM gives that the last adapter. Adapters get 16-bit inputs."""
    inputs, folder = inputs if serving.DEVICE == "cpu" else None, serving.make(name, tmp_path)
    hf_kbit.set_inputs(quantized := serving.load(folder, dtype), inputs)
    model, (first, second) = adapters(tmp_path, quantized, 2)
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "hf_overrides": {WISH: inputs}}
    third = None if serving.DEVICE == "cuda" else first
    found = serving.generate(folder, [first, second, third], **ALONE, **settings, dtype=dtype)
    for number in range(2):
        model.set_adapter(f"adapter {number}")
        serving.assert_same(found[number : number + 1], model, serving.PROMPTS[number : number + 1])
    model.set_adapter("adapter 0")
    with model.disable_adapter() if third is None else nullcontext():
        serving.assert_same(found[2:], model, serving.PROMPTS[2:])


@pytest.mark.parametrize("dtype", serving.DTYPES)
def test_a_model_is_freed(dtype, tmp_path):
    """vLLM remembers layers to load them again: what it remembers must not keep them alive."""
    before = sum(isinstance(each, KbitWeight) for each in gc.get_objects())
    serving.generate(serving.make("tied", tmp_path), **ALONE)
    gc.collect()
    assert sum(isinstance(each, KbitWeight) for each in gc.get_objects()) <= before
