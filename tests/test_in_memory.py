"""Models that are quantized in memory: as if they had been while they loaded, and modules that are nobody's."""

import copy
from pathlib import Path

import architectures
import peft
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kbit
from hf_kbit import KbitConfig, KbitLinear, quantize_model

NAMES = ["llama", "gpt2", "t5", "qwen3_moe"]
MODELS = [architecture for architecture in architectures.ARCHITECTURES if architecture.name in NAMES]


class Twice(nn.Module):
    """Calls a layer twice, has one in two places, ties two weights, and reads that of another."""

    def __init__(self):
        super().__init__()
        self.first, self.read = nn.Linear(64, 96), nn.Linear(96, 96, bias=False)
        self.again = self.first
        self.into, self.out = nn.Linear(96, 64, bias=False), nn.Linear(96, 64, bias=False)
        self.out.weight = self.into.weight
        self.blocks = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])
        self.norm = nn.LayerNorm(64)

    def forward(self, x):
        x = self.first(x) @ self.read.weight.T
        x = self.into(x) + self.out(self.again(self.into(x)))
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix in (".safetensors", ".json")}


@pytest.mark.parametrize("architecture", MODELS, ids=str)
@pytest.mark.parametrize("settings", [{"bits": 3}, {"bits": 3.3, "transform": "none"}], ids=str)
def test_like_a_model_that_was_quantized_while_it_loaded(architecture, settings, tmp_path):
    model, config = architecture.build(), KbitConfig(**settings)
    model.save_pretrained(tmp_path / "dense")
    loaded = architecture.cls.from_pretrained(tmp_path / "dense", quantization_config=config)
    done = quantize_model(model, config)
    loaded.save_pretrained(tmp_path / "loaded")
    model.save_pretrained(tmp_path / "in memory")
    assert files(tmp_path / "in memory") == files(tmp_path / "loaded")
    layers = {name for name, module in loaded.named_modules() if isinstance(module, hf_kbit.nn.weight.KbitWeight)}
    assert done.bits.keys() == layers and done.bytes_after < done.bytes_before
    again = architecture.cls.from_pretrained(tmp_path / "in memory")
    inputs = architecture.inputs()
    torch.testing.assert_close(again(**inputs)[0], model(**inputs)[0], rtol=0, atol=0)


def test_training_with_adapters():
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, hidden_size=64, intermediate_size=96, vocab_size=99))
    quantize_model(model, bits=4)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    ids = torch.arange(20)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert gradients and all(gradient is not None for gradient in gradients)


def test_a_module_of_anybody():
    model, x = Twice(), torch.randn(5, 64)
    dense = copy.deepcopy(model)
    done = quantize_model(model, bits=5, device="cpu")
    assert dict(done.bits) == {"first": 5, "blocks.0": 5, "blocks.1": 5}
    assert dict(done.left) == {"read": "read", "into": "fixed", "out": "fixed"}
    assert model.first is model.again and model.out.weight is model.into.weight
    for name in done.bits:
        dense.get_submodule(name).weight.data = model.get_submodule(name).dequantize()
    dense.again = dense.first
    torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-4)
    sizes = [sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for m in (dense, model)]
    assert [done.bytes_before, done.bytes_after] == sizes


def test_its_state_dict_loads_into_another(tmp_path):
    torch.manual_seed(0)
    one, other, x = Twice(), Twice(), torch.randn(5, 64)
    one.blocks[0].weight.data *= 2.0**12  # has an exponent
    for model in (one, other):
        quantize_model(model, bits=3)
    torch.save(one.state_dict(), tmp_path / "state")
    other.load_state_dict(torch.load(tmp_path / "state"))
    torch.testing.assert_close(other(x), one(x), rtol=0, atol=0)


def test_what_somebody_put_on_a_layer_stays():
    model, seen = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).eval(), []
    model[0].register_forward_hook(lambda module, args, output: seen.append(type(module)))
    model[0].register_forward_pre_hook(lambda module, args, kwargs: ((2 * args[0],), kwargs), with_kwargs=True)
    model[0].register_full_backward_hook(lambda module, grads, _: (3 * grads[0],))
    quantize_model(model, bits=4)
    x = torch.randn(3, 64, requires_grad=True)
    (grad,) = torch.autograd.grad(model[0](x).sum(), x)
    torch.testing.assert_close(grad[0], 3 * 2 * model[0].dequantize().sum(0), rtol=1e-4, atol=1e-4)
    seen.clear()
    torch.testing.assert_close(model[0](x), 2 * x @ model[0].dequantize().T + model[0].bias, rtol=1e-4, atol=1e-4)
    assert seen == [KbitLinear] and not model[0].training


def test_widths_and_patterns_of_the_config():
    model = Twice()
    done = quantize_model(model, KbitConfig(bits=2, module_bits={"blocks.1": 5}, modules_to_not_convert=["first"]))
    assert dict(done.bits) == {"blocks.0": 2, "blocks.1": 5} and done.left["first"] == "asked for"
    sizes = {"first": 64 * 96, "blocks.0": 64 * 64, "blocks.1": 64 * 64}
    mean = quantize_model(Twice(), bits=3.5).bits
    assert 3 < sum(bits * sizes[name] for name, bits in mean.items()) / sum(sizes.values()) <= 3.5


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda model: model.blocks[1].weight.data.fill_(float("nan")), "blocks.1.weight: found NaN or infinite"),
        (lambda model: model.blocks[1].to("meta"), "blocks.1.weight: found it on the meta device"),
        (lambda model: model.blocks[1].double(), "blocks.1.weight: found torch.float64"),
        (lambda model: model.blocks.append(KbitLinear(64, 64)), "blocks.2: found it quantized already"),
    ],
    ids=["NaN", "meta", "float64", "quantized"],
)
def test_refused_before_anything_changes(change, message):
    model = Twice()
    change(model)
    kinds = [type(module) for module in model.modules()]
    with pytest.raises((TypeError, ValueError), match=message):
        quantize_model(model, bits=3)
    assert [type(module) for module in model.modules()] == kinds


def test_refused_arguments():
    with pytest.raises(ValueError, match="found one linear layer"):
        quantize_model(nn.Linear(64, 64), bits=3)
    with pytest.raises(ValueError, match="found no linear layer to quantize in ReLU"):
        quantize_model(nn.ReLU(), bits=3)
    with pytest.raises(TypeError, match="config: found dict"):
        quantize_model(Twice(), {"bits": 3})
    with pytest.raises(TypeError, match="config: found it and"):
        quantize_model(Twice(), KbitConfig(), bits=3)
    with pytest.raises(TypeError, match=r"hf_kbit\.quantize_model"):
        hf_kbit.quantize(Twice())
