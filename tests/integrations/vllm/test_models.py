"""Quantized models in vLLM: what Transformers generates from the same folder. ``make test-vllm`` runs these tests."""

import pytest
import serving
import torch


@pytest.mark.parametrize("name", serving.MODELS)
def test_same_as_transformers(name, tmp_path):
    folder = serving.make(name, tmp_path)
    found = serving.generate(folder, distributed_executor_backend="uni")
    serving.assert_same(found, serving.load(folder))


@pytest.mark.parametrize("name", ["mixed widths", "tied"])
def test_an_adapter(name, tmp_path):
    peft = pytest.importorskip("peft")
    folder = serving.make(name, tmp_path)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=8, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(serving.load(folder), config)
    model.save_pretrained(tmp_path / "adapter")
    found = serving.generate(
        folder, tmp_path / "adapter", distributed_executor_backend="uni", enable_lora=True, max_lora_rank=8
    )
    serving.assert_same(found, model.eval())
