"""Whole models on a GPU: the bytes of the CPU, logits that do not change by saving, generation, offloading."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig, KbitLinear

pytestmark = pytest.mark.gpu
IDS = torch.arange(2 * 9).reshape(2, 9)
# Of logits in bfloat16, by other kernels: what is not on the GPU in tiles is decoded and multiplied by cuBLAS.
AS_DECODED = {"rtol": 0.05, "atol": 0.01}


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 100, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=128, **shape)).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("dense")
    model.save_pretrained(folder)
    return folder


def load(folder, device, **kwargs):
    return LlamaForCausalLM.from_pretrained(folder, device_map=device, **kwargs)


def test_layers_on_gpu_cpu_and_disk(dense, tmp_path):
    model = load(dense, "cuda", quantization_config=KbitConfig(bits=3))
    logits = model(IDS.cuda()).logits
    model.save_pretrained(tmp_path / "packed")
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.norm": 0}
    places |= {"model.rotary_emb": 0, "lm_head": 0}
    offloaded = load(tmp_path / "packed", places)
    torch.testing.assert_close(offloaded(IDS.cuda()).logits, logits, **AS_DECODED)
    offloaded = load(tmp_path / "packed", places | {"model.layers.1": "disk"}, offload_folder=tmp_path / "offload")
    torch.testing.assert_close(offloaded(IDS.cuda()).logits, logits, **AS_DECODED)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_layers_on_two_gpus(dense, tmp_path):
    model = load(dense, "cuda:0", quantization_config=KbitConfig(bits=3))
    logits = model(IDS.cuda()).logits
    model.save_pretrained(tmp_path / "one")
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1}
    places |= {"model.rotary_emb": 0, "lm_head": 1}
    for source, kwargs in ((dense, {"quantization_config": KbitConfig(bits=3)}), (tmp_path / "one", {})):
        spread = load(source, places, **kwargs)
        found = spread(IDS.cuda()).logits
        assert torch.equal(found.cpu(), logits.cpu())
        devices = {module.weight.device.index for module in spread.modules() if isinstance(module, KbitLinear)}
        assert devices == {0, 1} and all(m.weight.is_tiled for m in spread.modules() if isinstance(m, KbitLinear))
        spread.save_pretrained(tmp_path / "two")
        ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("two", "one"))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert torch.equal(model.to("cuda:1")(IDS.to("cuda:1")).logits.cpu(), logits.cpu())


def test_saving_takes_no_second_copy_on_the_gpu(dense, tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "vocab_size": 128}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=6, **shape)).to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense", "cuda", quantization_config=KbitConfig(bits=4))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model.save_pretrained(tmp_path / "saved")
    assert torch.cuda.max_memory_allocated() - before < 0.2 * model.get_memory_footprint()
    assert torch.cuda.memory_allocated() == before


def test_training_reaches_what_is_not_frozen(dense):
    model = load(dense, "cuda", quantization_config=KbitConfig(bits=3)).train()
    model(IDS.cuda(), labels=IDS.cuda()).loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
