"""Models that are quantized in memory: as if they had been while they loaded, and modules that are nobody's."""

import copy

import pytest
import small
import torch
from byte_tokenizer import byte_tokenizer
from torch import nn
from transformers import BertConfig, BertLMHeadModel, LlamaForCausalLM

import hf_kbit
from hf_kbit import KbitConfig, KbitEmbedding, KbitLinear, quantize_model
from hf_kbit.calibration import trellis
from hf_kbit.calibration.post_training import MEASURED
from hf_kbit.calibration.writing import write
from hf_kbit.plan import allocation


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


# --- with data, and to a memory -------------------------------------------------------------------

SHAPE = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
ROWS = [f"{n} bottles hang on the wall; take one away." for n in range(9)]


def llama() -> LlamaForCausalLM:
    return small.llama(max_position_embeddings=48, initializer_range=0.2, **SHAPE).bfloat16()


def bert() -> BertLMHeadModel:
    return BertLMHeadModel(BertConfig(vocab_size=256, **SHAPE))


def of_another_library() -> LlamaForCausalLM:
    model = llama()
    model.hf_quantizer = object()
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    return small.same(one.state_dict(), other.state_dict())


@pytest.mark.parametrize("data", [ROWS, None], ids=["data", "own text"])
@pytest.mark.parametrize("way", [{"method": "weighted", "tune": 3}, {"method": "feedback"}], ids=["tuned", "feedback"])
def test_with_data_it_calibrates(way, data, tmp_path):
    """As ``calibrate`` does, with all of its settings, which the record of a run has a digest of."""
    settings = {"sequences": 3, "length": 20, "batch": 2, "bits": 3, "tokenizer": byte_tokenizer(), **way}
    done = quantize_model(model := llama(), data=data, calibrate=True, resume=tmp_path / "one", **settings)
    expected = hf_kbit.calibrate(llama(), data, resume=tmp_path / "other", **settings)
    assert same(model, expected) and set(done.bits.values()) == {3}
    assert done.left == {"lm_head": "head", "model.embed_tokens": "table"}
    assert model.config.quantization_config == expected.config.quantization_config
    records = [(tmp_path / folder / "run.json").read_text() for folder in ("one", "other")]
    assert records[0] == records[1]
    quantize_model(plain := llama(), bits=3)
    assert not same(model, plain)


@pytest.mark.parametrize(
    ("method", "codebook"), [(None, "optimal"), ("weighted", "optimal"), (None, "trellis"), ("feedback", "trellis")]
)
def test_a_mean_with_data_is_measured(method, codebook, monkeypatch):
    """The widths are those of ``choose_widths`` for the method, if any, and calibrating keeps them."""
    monkeypatch.setattr(trellis, "left", lambda hessian, *_: len(hessian) ** -4.0)  # real ones change none so small
    model, ids = llama(), torch.randint(256, (4, 40), generator=torch.Generator().manual_seed(0))
    calibrate = method is not None
    how = {"calibrate": calibrate, "method": method or "feedback", "codebook": codebook}
    done = quantize_model(model, bits=3.5, data=ids, **how)
    config = hf_kbit.choose_widths(llama(), ids, 3.5, method=method, codebook=codebook)
    assert done.bits == {name: config.bits_for(name) for name in done.bits} and len(set(done.bits.values())) > 1
    expected = llama()
    if calibrate:
        hf_kbit.calibrate(expected, ids, config=config, method=method)
    else:
        quantize_model(expected, config)
    assert same(model, expected)
    others = [quantize_model(llama(), bits=3.5, codebook=codebook).bits]
    if method == "feedback":
        others.append(quantize_model(llama(), bits=3.5, data=ids, **how | {"calibrate": False}).bits)
    assert done.bits not in others, "other ways give the same: this tests nothing"


def test_a_mean_is_measured_on_text_that_the_model_writes():
    """If that is asked for; the amount is small, for it is not calibrated."""
    lines, model = [], llama()
    done = quantize_model(model, bits=3.5, measure=True, report=lambda *line: lines.append(line))
    written = write(llama(), *MEASURED)
    assert done.bits == quantize_model(llama(), bits=3.5, data=written, calibrate=False).bits
    where = "384 tokens of text that the model wrote, on cpu"
    assert lines[0] == ("measuring", f"what few bits in each layer cost on {where}")
    assert [label for label, _ in lines] == ["measuring", "widths", "", "", ""]


@pytest.mark.parametrize(("bits", "read"), [(3, "16 x 48 tokens of the built-in text"), (3.5, "64 x 48 to")])
def test_without_data_weighted_reads_the_built_in_set(bits, read):
    """As ``calibrate`` does; but where widths are measured the model writes."""
    lines, model, how = [], llama(), {"method": "weighted", "bits": bits, "tokenizer": byte_tokenizer()}
    quantize_model(model, calibrate=True, report=lambda *line: lines.append(line), **how)
    assert dict(lines)["calibrating"].startswith(f"weighted, {read}")
    if bits == 3:
        assert same(model, hf_kbit.calibrate(llama(), **how))
    else:
        assert "of text that the model wrote" in dict(lines)["measuring"]


@pytest.mark.parametrize("kind", ["llama", "bert", "module"])
@pytest.mark.parametrize("measure", [None, False])
def test_to_a_memory(kind, measure):
    """As much of it as the weights leave; measured where a model predicts tokens, else by rule."""
    model = {"llama": llama, "bert": bert, "module": Twice}[kind]()
    size, lines = bits_bytes(model, 4.3), []
    settings = {"memory": f"{size}B", "context": 0, "measure": measure}
    done = quantize_model(model, **settings, report=lambda *line: lines.append(line))
    taken = sum(parameter.nbytes for parameter in model.parameters())
    assert size * 0.97 < taken <= size and len(set(done.bits.values())) > 1
    labels = [label for label, _ in lines if label]
    assert labels == ["memory", *(["measuring"] if kind == "llama" and measure is None else []), "widths"]
    assert ("by names and shapes" in dict(lines)["widths"]) == ("measuring" not in labels)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_to_a_memory_in_which_tables_are_packed(kind, tmp_path):
    """Where layers would have fewer than 4 bits otherwise; they get the bytes, and the config a plain number. Not if
    they are to stay."""
    build, lines = {"llama": llama, "bert": bert}[kind], []
    model, settings = build(), {"context": 0, "measure": False}
    size = bits_bytes(model, 3.3, embedding_bits=5)
    done = quantize_model(model, memory=size, **settings, report=lambda *line: lines.append(line))
    taken = sum(parameter.nbytes for parameter in model.parameters())
    assert size * 0.97 < taken <= size and isinstance(model.get_input_embeddings(), KbitEmbedding)
    fewer = "for beside tables in 16 the other layers would have fewer than 4"
    assert lines[0] == ("tables", f"of embeddings in 5 bits, {fewer}")
    assert "table" not in done.left.values() and model.config.quantization_config.embedding_bits == 5
    model.save_pretrained(tmp_path)
    assert same(type(model).from_pretrained(tmp_path), model)
    if kind == "llama":
        size = bits_bytes(build(), 3.3)
        done = quantize_model(build(), memory=size, modules_to_not_convert=["embed_tokens"], **settings)
        assert done.left["model.embed_tokens"] == "table" and 3 in done.bits.values()
        assert set(quantize_model(build(), memory="2MB").bits.values()) == {5}, "more than there is use for"


def bits_bytes(model: nn.Module, bits: float, **settings) -> int:
    """Of its parameters with a mean of so many bits, from a model of which all layers but tables have 3 bits."""
    three = copy.deepcopy(model)
    layers = map(three.get_submodule, quantize_model(three, bits=3, **settings).bits)
    weights = sum(32 * layer.weight.absmax.numel() for layer in layers if not isinstance(layer, KbitEmbedding))
    return int(sum(parameter.nbytes for parameter in three.parameters()) + weights * (bits - 3) / 8)


def test_what_is_called_by_its_name(tmp_path):
    lines, options = [], {"tokenizer": byte_tokenizer(), "method": "weighted", "bits": 3, "sequences": 2}
    (tmp_path / "rows.txt").write_text("".join(ROWS))
    for data in (tmp_path / "rows.txt", ROWS):
        quantize_model(llama(), data=data, report=lambda *line: lines.append(line), **options)
    assert lines[0] == ("calibrating", f"weighted, 2 x 48 tokens of {tmp_path / 'rows.txt'}, on cpu")
    assert lines[1] == ("calibrating", "weighted, 2 x 48 tokens of the data, on cpu")


WRONG = [
    (llama, {"memory": "1MB", "bits": 3}, "memory: found it and bits"),
    (llama, {"config": {"bits": 3}}, "config: found dict"),
    (llama, {"config": KbitConfig(), "bits": 3}, "config: found it and"),
    (llama, {"memory": "1MB", "module_bits": {"k_proj": 3}}, "memory: found it and bits or widths in module_bits"),
    (llama, {"memory": "much"}, "memory: found 'much', expected a size"),
    (llama, {"memory": 9}, "memory: found 9 bytes, expected"),
    (llama, {"data": ROWS, "calibrate": False}, "data: found it, but neither calibrate nor measured widths need it"),
    (llama, {"data": ROWS, "calibrate": False, "memory": "1MB", "measure": False}, "data: found it, but neither"),
    (llama, {"resume": "layers", "bits": 3.5}, "resume: found 'layers', but nothing is calibrated"),
    (llama, {"tune": 5}, "tune: found 5, but nothing is calibrated"),
    (of_another_library, {"bits": 3}, "model: found it quantized already"),
    (llama, {"data": ROWS}, "tokenizer: found none"),
    (llama, {"data": ROWS, "method": "gptq"}, "method: found 'gptq'"),
    (llama, {"calibrate": True, "scale": "absmax"}, "scale: found 'absmax'"),
    (bert, {"bits": 3.5, "measure": True, "tokenizer": byte_tokenizer()}, "expected a causal language model"),
    (Twice, {"data": ROWS}, "model: found Twice, expected a model of Transformers to calibrate"),
    (Twice, {"measure": True}, "model: found Twice, expected a model of Transformers to calibrate or to measure"),
]


@pytest.mark.parametrize("build, arguments, message", WRONG, ids=[message for *_, message in WRONG])
def test_what_does_not_go_together(build, arguments, message, monkeypatch):
    model = build()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises((TypeError, ValueError), match=message):
        quantize_model(model, **arguments)
    assert [type(module) for module in model.modules()] == kinds


# --- what it becomes ------------------------------------------------------------------------------


def test_a_module_of_anybody():
    model, x = Twice(), torch.randn(5, 64)
    dense = copy.deepcopy(model)
    done = quantize_model(model, bits=5, device="cpu")
    assert dict(done.bits) == {"first": 5, "read": 5, "blocks.0": 5, "blocks.1": 5}
    assert dict(done.left) == {"into": "fixed", "out": "fixed"}
    assert model.first is model.again and model.out.weight is model.into.weight
    for name in done.bits:
        dense.get_submodule(name).weight.data = model.get_submodule(name).dequantize()
    dense.again = dense.first
    torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-4)
    sizes = [sum(t.nbytes for t in (*m.parameters(), *m.buffers())) for m in (dense, model)]
    assert [done.bytes_before, done.bytes_after] == sizes


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
    assert dict(done.bits) == {"read": 2, "blocks.0": 2, "blocks.1": 5} and done.left["first"] == "asked for"
    sizes = {"first": 64 * 96, "read": 96 * 96, "blocks.0": 64 * 64, "blocks.1": 64 * 64}
    # Though the name of one is the end, or the beginning, of another's.
    model = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64)))
    config = allocation.config_of(KbitConfig(), {"0": 5, "1.0": 2, "1.2": 2})
    assert quantize_model(model, config).bits == {"0": 5, "1.0": 2, "1.2": 2}
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


def test_what_is_no_module_with_layers():
    for model, error, message in (
        (nn.Linear(64, 64), ValueError, "found one linear layer"),
        (nn.ReLU(), ValueError, "found no linear layer to quantize in ReLU"),
        ("Qwen/Qwen3-0.6B", TypeError, r"found str, .* while it loads, by AutoModelForCausalLM.from_pretrained\("),
    ):
        with pytest.raises(error, match=message):
            quantize_model(model, bits=3)
    with pytest.raises(TypeError, match=r"hf_kbit\.quantize_model"):
        hf_kbit.ops.quantize(Twice())
