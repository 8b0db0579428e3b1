"""Quantized models in vLLM: what Transformers generates from the same folder. ``make test-vllm`` runs these tests."""

import gc
from contextlib import nullcontext

import pytest
import serving
import torch

from hf_kbit.nn.weight import KbitWeight

ALONE = {"distributed_executor_backend": "uni"}


@pytest.mark.parametrize("dtype", [*serving.DTYPES, pytest.param("float16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", serving.MODELS)
def test_same_as_transformers(name, dtype, tmp_path):
    if serving.MODELS[name][0] in ("gemma2", "gpt_oss") and dtype == "float16":
        pytest.skip("vLLM has these models in bfloat16 alone")
    folder = serving.make(name, tmp_path)
    found = serving.generate(folder, **ALONE, dtype=dtype)
    serving.assert_same(found, serving.load(folder, dtype))


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
@pytest.mark.parametrize("name", ["mixed widths", "tied"])
def test_two_adapters_in_one_batch(name, dtype, tmp_path):
    """Beside a prompt without one on a GPU: on a CPU vLLM gives that the last adapter."""
    folder = serving.make(name, tmp_path)
    model, (first, second) = adapters(tmp_path, serving.load(folder, dtype), 2)
    settings = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
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
