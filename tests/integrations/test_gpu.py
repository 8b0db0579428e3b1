"""Whole models on a GPU: the bytes of the CPU, logits that do not change by saving, generation, offloading."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig, KbitLinear

pytestmark = pytest.mark.gpu
IDS = torch.arange(2 * 9).reshape(2, 9)


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


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_same_bytes_wherever_it_was_quantized(dense, bits, tmp_path):
    config = KbitConfig(bits=bits)
    for device in ("cpu", "cuda"):
        load(dense, device, quantization_config=config).save_pretrained(tmp_path / device)
    on_cpu, on_gpu = (load_file(tmp_path / device / "model.safetensors") for device in ("cpu", "cuda"))
    assert on_cpu.keys() == on_gpu.keys()
    assert all(torch.equal(on_cpu[name], on_gpu[name]) for name in on_cpu)
    assert (tmp_path / "cpu" / "config.json").read_text() == (tmp_path / "cuda" / "config.json").read_text()


def test_reload_on_the_same_and_on_another_device(dense, tmp_path):
    model = load(dense, "cuda", quantization_config=KbitConfig(bits=3))
    assert all(m.weight.is_cuda and m.codebook.is_cuda for m in model.modules() if isinstance(m, KbitLinear))
    logits = model(IDS.cuda()).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path, "cuda")(IDS.cuda()).logits, logits)
    on_cpu = load(tmp_path, "cpu")
    torch.testing.assert_close(on_cpu(IDS).logits, logits.cpu(), rtol=0.05, atol=0.05)  # bfloat16, other kernels
    assert torch.equal(on_cpu.to("cuda")(IDS.cuda()).logits, logits)


def test_generate_eager_and_compiled(dense):
    model = load(dense, "cuda", quantization_config=KbitConfig(bits=4))
    kwargs = {"attention_mask": torch.ones_like(IDS).cuda(), "max_new_tokens": 8, "do_sample": False}
    eager = model.generate(IDS.cuda(), pad_token_id=0, **kwargs)
    assert eager.shape == (2, 17)
    compiled = model.generate(IDS.cuda(), pad_token_id=0, cache_implementation="static", **kwargs)
    assert compiled.shape == (2, 17)


def test_layers_on_gpu_cpu_and_disk(dense, tmp_path):
    model = load(dense, "cuda", quantization_config=KbitConfig(bits=3))
    logits = model(IDS.cuda()).logits
    model.save_pretrained(tmp_path / "packed")
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": "cpu", "model.norm": 0}
    places |= {"model.rotary_emb": 0, "lm_head": 0}
    offloaded = load(tmp_path / "packed", places)
    assert torch.equal(offloaded(IDS.cuda()).logits, logits)
    offloaded = load(tmp_path / "packed", places | {"model.layers.1": "disk"}, offload_folder=tmp_path / "offload")
    assert torch.equal(offloaded(IDS.cuda()).logits, logits)


def test_dequantize(dense):
    model = load(dense, "cuda", quantization_config=KbitConfig(bits=3))
    logits = model(IDS.cuda()).logits
    model.dequantize()
    assert not any(isinstance(module, KbitLinear) for module in model.modules())
    assert torch.equal(model(IDS.cuda()).logits, logits)


def test_training_reaches_what_is_not_frozen(dense):
    model = load(dense, "cuda", quantization_config=KbitConfig(bits=3)).train()
    model(IDS.cuda(), labels=IDS.cuda()).loss.backward()
    assert model.model.embed_tokens.weight.grad.abs().sum() > 0
