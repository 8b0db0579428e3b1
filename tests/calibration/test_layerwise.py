"""Calibrated models: like those quantized while loading, better than they are, the same each time."""

import copy
import json
import math
import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from architectures import BY_NAME
from byte_tokenizer import byte_tokenizer
from small import SHAPE, llama, same, tensors
from torch import nn
from trained_lm import batches, held_out, mean_loss, trained_lm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

import hf_kbit
from hf_kbit import KbitConfig, KbitLinear
from hf_kbit.calibration import layerwise, sensitivity, solving, writing
from hf_kbit.calibration.data import PROMPTS
from hf_kbit.calibration.loading import class_to_load, load
from hf_kbit.calibration.moments import add_products
from hf_kbit.calibration.solving import METHODS
from hf_kbit.calibration.writing import write

IDS = torch.randint(5, 90, (6, 12), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def outputs(model) -> torch.Tensor:
    ids = IDS.to(model.device)
    return model(ids, decoder_input_ids=ids)[0] if model.config.is_encoder_decoder else model(ids)[0]


@pytest.mark.parametrize(
    ("name", "method"), [("llama", "feedback"), ("gpt2", "weighted"), ("bert-masked", "feedback"), ("t5", "weighted")]
)
def test_like_a_model_quantized_while_loading(name, method, device, tmp_path):
    """Its layers, what it says of itself, and what it is after saving and loading; some layers have an exponent."""
    model = BY_NAME[name].build().to(device)
    choices = {"bits": 3, "module_bits": {r"\w+\.0.*(q|k|query|key|c_attn)(_proj)?": 5}, "codebook": "int"}
    model.save_pretrained(tmp_path / "dense")
    loaded = type(model).from_pretrained(tmp_path / "dense", quantization_config=KbitConfig(**choices)).to(device)
    assert hf_kbit.calibrate(model, IDS, method=method, batch=4, **choices) is model
    layers = {n: m.bits for n, m in loaded.named_modules() if isinstance(m, KbitLinear)}
    found = {n: m.bits for n, m in model.named_modules() if isinstance(m, KbitLinear)}
    assert found == layers and any(model.get_submodule(n).decoding.exponent for n in found)
    for attribute in ("is_quantized", "quantization_method", "dtype"):
        assert getattr(model, attribute) == getattr(loaded, attribute)
    of_both = (each.config.quantization_config.to_dict() for each in (model, loaded))
    ours, theirs = ({key: value for key, value in entries.items() if key != "layers"} for entries in of_both)
    assert ours == theirs
    assert not same(tensors(model), tensors(loaded))
    for name in found:
        ours, theirs = (each.get_submodule(name).dequantize(torch.float32) for each in (model, loaded))
        assert (ours - theirs).norm() < 0.6 * theirs.norm(), name

    model.save_pretrained(tmp_path / "packed")
    again = type(model).from_pretrained(tmp_path / "packed").to(device)
    assert same(tensors(again), tensors(model)) and torch.equal(outputs(again), outputs(model))
    assert not any(isinstance(module, KbitLinear) for module in model.dequantize().modules())


@pytest.mark.parametrize("method", METHODS)
def test_same_bytes_each_time(method, device):
    models = [llama().to(device), llama().to(device)]  # both before, for a seed goes with each
    first, second = (hf_kbit.calibrate(model, IDS, method=method, bits=2) for model in models)
    assert same(tensors(first), tensors(second))


def test_sequences_go_through_a_layer_as_many_as_have_so_many_tokens(device, monkeypatch):
    monkeypatch.setitem(solving.TOGETHER, "cpu" if device == "cpu" else "", 30)
    sizes = []
    monkeypatch.setattr(layerwise.Calibration, "run", lambda self: sizes.append([len(x) for x in self.batches]))
    rows = [IDS[0, :5], *IDS[1:], IDS[0, :7]]
    for batch in (None, 3):
        hf_kbit.calibrate(llama().to(device), {"input_ids": rows}, bits=3, batch=batch)
    assert sizes == [[1, 2, 2, 1, 1], [1, 3, 2, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
def test_products_of_rounded_rows(scale):
    """They are as precise as TF32 where a GPU has it, and no other product is rounded so afterwards."""
    x, y = scale * torch.randn(2, 4096, 256, device="cuda", dtype=torch.float64)
    total = torch.zeros(256, 256, device="cuda")
    add_products(total, x.float(), y.float())
    add_products(total, x.float(), x.float())
    expected = x.T @ (x + y)
    error = (total - expected).norm() / expected.norm()
    assert error < 2e-4 and (error > 1e-5) == (torch.cuda.get_device_capability() >= (8, 0))
    assert (x.float().T @ x.float() - x.T @ x).norm() < 1e-6 * (x.T @ x).norm()


@pytest.fixture
def counted(monkeypatch):
    """Makes a model for which sequences count so much."""

    def make(places, counts=None, **how):
        monkeypatch.setattr(layerwise, "chosen_text", lambda model, text, *_, **__: (text, "the data", counts))
        return hf_kbit.calibrate(llama(), IDS[list(places)], bits=3, device="cpu", **how)

    return make


def test_a_sequence_that_counts_twice_is_as_one_that_is_read_twice(counted, monkeypatch):
    """But for rounding. Gradients are left out, since those of a second reading draw other tokens."""
    monkeypatch.setattr(sensitivity, "BLEND", 0)
    twice, once, alike = (
        counted(*how).model.layers[0].self_attn.q_proj.weight.dequantize()
        for how in (((0, 0, 1, 2),), ((0, 1, 2), [2.0, 1.0, 1.0]), ((0, 1, 2),))
    )
    assert (twice == once).double().mean() > 0.99 > (alike == once).double().mean()


def test_sequences_that_are_left_out_to_tune_take_what_they_count_with_them(counted, monkeypatch):
    monkeypatch.setattr(layerwise, "SEQUENCES", 3)
    how = {"tune": 5, "tune_whole": False}
    some, all_of_them = counted((0, 2, 4), **how), counted(range(6), [1.0, 5.0, 1.0, 5.0, 1.0, 5.0], **how)
    assert same(tensors(some), tensors(all_of_them))


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert-masked", "t5", "qwen3_moe"])
def test_without_data_weighted_reads_a_little_of_the_built_in_set(name, monkeypatch):
    """Any model that reads tokens; nothing is written."""
    model, other, free = (BY_NAME[name].build(vocab_size=256) for _ in range(3))
    how = {"method": "weighted", "bits": 3, "tokenizer": byte_tokenizer()}
    hf_kbit.calibrate(other, PROMPTS, sequences=16, length=256, **how)
    monkeypatch.setattr(writing, "write", None)
    assert same(tensors(hf_kbit.calibrate(model, **how)), tensors(other))
    hf_kbit.quantize_model(free, bits=3)
    assert not same(tensors(model), tensors(free))


@pytest.mark.parametrize("how", [{"method": "weighted", "tune": 2}, {"method": "feedback"}])
def test_without_data_a_text_is_written(how):
    how = {"bits": 3, "sequences": 4, "length": 8, "tokenizer": byte_tokenizer(), **how}
    ids = write(llama(), 4, 8, tokenizer=how["tokenizer"], tune=how.get("tune", 0))
    assert same(tensors(hf_kbit.calibrate(llama(), **how)), tensors(hf_kbit.calibrate(llama(), ids, **how)))


def test_what_is_left_stays():
    """Tied weights and what the config names; a head that it asks for is quantized."""
    model = llama(tie_word_embeddings=True)
    dense = copy.deepcopy(model)
    hf_kbit.calibrate(model, IDS, bits=3, modules_to_not_convert=["k_proj"], module_bits={"layers.1.mlp": None})
    stay = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
    mlp = {f"model.layers.1.mlp.{part}_proj" for part in ("down", "gate", "up")}
    assert stay == {"lm_head", *(f"model.layers.{i}.self_attn.k_proj" for i in (0, 1))} | mlp
    assert all(torch.equal(model.get_submodule(name).weight, dense.get_submodule(name).weight) for name in stay)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model = hf_kbit.calibrate(llama(), IDS, bits=3, module_bits={"lm_head": 5})
    assert model.lm_head.bits == 5 and model.model.layers[0].mlp.up_proj.bits == 3


def test_modes_and_flags_are_as_before():
    """And dropout is off meanwhile; the dtype stays."""
    torch.manual_seed(0)
    model = BertForMaskedLM(BertConfig(**{**SHAPE, "num_hidden_layers": 1}, vocab_size=256, hidden_dropout_prob=0.5))
    model.half().train().bert.encoder.layer[0].attention.eval()
    first, second = (hf_kbit.calibrate(copy.deepcopy(model), IDS, bits=2) for _ in range(2))
    assert same(tensors(first), tensors(second)) and first.dtype == torch.float16
    modes = [[part.training for part in each.modules()] for each in (model, first)]
    assert modes[0] == modes[1] and first.bert.embeddings.LayerNorm.weight.requires_grad and first.config.use_cache


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_model_on_the_cpu_goes_through_the_gpu(name, method):
    """Layer by layer, also without being told to; what is not quantized is where it was, and not copied."""
    model = BY_NAME[name].build()
    places = {key: tensor.data_ptr() for key, tensor in model.named_parameters()}
    torch.cuda.reset_peak_memory_stats()
    hf_kbit.calibrate(model, IDS, method=method, bits=5, batch=4)
    assert torch.cuda.max_memory_allocated() > 0
    layers = {key for key, module in model.named_modules() if isinstance(module, KbitLinear)}
    for key, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor.device.type == "cpu", key
        if key in places and not (key.endswith(".weight") and key.removesuffix(".weight") in layers):
            assert tensor.data_ptr() == places[key], key
    # Not the same bytes: a CPU computes what precedes the first layer, such as sines of positions, a bit otherwise.
    dense = outputs(BY_NAME[name].build())
    there = hf_kbit.calibrate(BY_NAME[name].build().to("cuda"), IDS, method=method, bits=5, batch=4)
    errors = [(outputs(each).cpu() - dense).norm() for each in (model, there)]
    assert errors[0] < 1.2 * errors[1] < 1.2 * 0.2 * dense.norm()


# --- models that are loaded -----------------------------------------------------------------------


def test_from_a_folder(tmp_path):
    """By its path or its name, with a config or the arguments of one."""
    model, arguments = BertForMaskedLM(BertConfig(**SHAPE, vocab_size=256)), {"bits": 2, "codebook": "int"}
    model.save_pretrained(tmp_path)
    config = KbitConfig(**arguments)
    loaded, other = hf_kbit.calibrate(tmp_path, IDS, **arguments), hf_kbit.calibrate(str(tmp_path), IDS, config=config)
    assert type(loaded) is type(model) and loaded.dtype == model.dtype and config == KbitConfig(**arguments)
    expected = tensors(hf_kbit.calibrate(model, IDS, **arguments))
    assert same(tensors(loaded), expected) and same(tensors(other), expected)


def test_the_tokenizer_of_a_folder(tmp_path):
    text, choices = "What a model reads while it is calibrated. " * 20, {"bits": 2, "method": "weighted"}
    llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tokenizer: found none"):
        hf_kbit.calibrate(tmp_path, text)
    byte_tokenizer().save_pretrained(tmp_path)
    model = hf_kbit.calibrate(tmp_path, text, **choices)
    assert same(tensors(model), tensors(hf_kbit.calibrate(llama(), text, tokenizer=byte_tokenizer(), **choices)))


def test_the_class_that_was_saved(tmp_path):
    config = LlamaConfig(architectures=["LlamaForSequenceClassification"])
    assert class_to_load(config) is LlamaForSequenceClassification
    for name in (None, [], ["LLaMAForCausalLM"]):  # the last was the class's name once
        assert class_to_load(LlamaConfig(architectures=name)) is AutoModelForCausalLM
    places = {"AutoConfig": "a.OwnConfig", "AutoModelForMaskedLM": "a.Own"}
    assert class_to_load(LlamaConfig(architectures=["Own"], auto_map=places)) is AutoModelForMaskedLM
    for architectures, message in (
        (["pipeline"], "found 'pipeline', expected the name of a model class"),
        (["LlamaConfig"], "found 'LlamaConfig', expected the name of a model class"),
        (["PreTrainedModel"], "found 'PreTrainedModel', expected the name of a model class"),
        (["BertForMaskedLM"], "found BertForMaskedLM, expected a model class for a LlamaConfig"),
        ([5], r"found \[5\] in config.json, expected a list of names"),
        (5, r"found 5 in config.json, expected a list of names"),
    ):
        object.__setattr__(config, "architectures", architectures)
        with pytest.raises(ValueError, match=f"^architectures: {message}"):
            class_to_load(config)
    LlamaConfig().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": ["pipeline"]}))
    with pytest.raises(ValueError, match=f"{tmp_path}: architectures: found 'pipeline'"):
        hf_kbit.calibrate(tmp_path, IDS)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("method", METHODS)  # of which one reads a text here, and the other has one written
def test_revision_and_code_reach_all_that_is_loaded(method, loaded, monkeypatch, tmp_path):
    llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    asked = []
    for loader in (AutoConfig, LlamaForCausalLM, AutoTokenizer):

        def recorded(*arguments, loader=loader, load=loader.from_pretrained, **keywords):
            asked.append((loader.__name__, keywords["revision"], keywords["trust_remote_code"]))
            return load(*arguments, **keywords)

        monkeypatch.setattr(loader, "from_pretrained", recorded)
    text = "What a model reads while it is calibrated. " * 5 if method == "weighted" else None
    source = {"revision": "v1", "trust_remote_code": True}
    model = LlamaForCausalLM.from_pretrained(tmp_path, **source) if loaded else tmp_path
    hf_kbit.calibrate(model, text, method=method, length=8, **source)
    assert set(asked) == {(name, "v1", True) for name in ("AutoConfig", "LlamaForCausalLM", "AutoTokenizer")}


def own_memory() -> float:
    """MiB of memory that is no file's."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024


def load_and_read(folder, found) -> None:
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    before, model = own_memory(), load(folder)
    # Read by what makes no tensor of a weight's size, whose memory a process may keep.
    assert all(extreme.isfinite() for parameter in model.parameters() for extreme in parameter.aminmax())
    found.send((own_memory() - before, sum(parameter.nbytes for parameter in model.parameters()) / 2**20))


def test_weights_stay_mapped_from_their_file(tmp_path):
    """A model that is loaded and read takes little memory besides its files' pages, which the kernel may drop."""
    llama(hidden_size=512, intermediate_size=8192, num_hidden_layers=5).bfloat16().save_pretrained(tmp_path)
    (read, found), context = multiprocessing.Pipe(duplex=False), multiprocessing.get_context("fork")
    process = context.Process(target=load_and_read, args=(tmp_path, found))
    process.start()
    process.join(timeout=300)
    taken, weights = read.recv()
    assert weights > 120 and taken < 0.25 * weights


# --- refusals -------------------------------------------------------------------------------------

BAD = {
    "method: found 'gptq', expected one of \\['feedback', 'weighted'\\]": {"method": "gptq"},
    "batch: found 0": {"batch": 0},
    "bits: found 7": {"bits": 7},
    "bits: found 3.5, .* hf_kbit.choose_widths": {"bits": 3.5},
    "scale: found 'absmax', expected 'search'": {"scale": "absmax"},
    "module_bits\\['nothing'\\]": {"module_bits": {"nothing": 3}},
    "config: found it and \\['bits'\\], expected one": {"config": KbitConfig(), "bits": 3},
    "config: found dict, expected a KbitConfig": {"config": {"bits": 3}},
    "unexpected keyword argument 'sequence'": {"sequence": 3},
    "tokenizer: found none": {"data": "a text"},
    "data: found sequences of 12 tokens, expected at most 8": {"build": lambda: llama(max_position_embeddings=8)},
    "data: found ids from 5 to 300, expected 0 to 255": {"data": torch.tensor([[5, 300]])},
    "data: found shape \\[4\\]": {"data": torch.zeros(4, dtype=torch.int64)},
    "data: found shape \\[0, 4\\]": {"data": torch.zeros(0, 4, dtype=torch.int64)},
    "no linear layer to quantize": {"modules_to_not_convert": [".*"]},
    "found Sequential, expected a model that reads token": {"build": lambda: nn.Sequential(nn.Linear(64, 64))},
    "layers.0.self_attn.q_proj: found it quantized": {"build": lambda: hf_kbit.calibrate(llama(), IDS, bits=2)},
    "found ViT.*, expected a model that reads token ids": {"build": BY_NAME["vit"].build},
    "found WhisperFor.*, expected a model that reads token ids": {"build": BY_NAME["whisper"].build},
    "found that CLIPModel does not run on token ids alone": {"build": BY_NAME["clip"].build},
    "found that tokens do not go through it": {"build": BY_NAME["llava"].build},
}


@pytest.mark.parametrize("message", BAD)
def test_refused_before_anything_changes(message):
    arguments = {"data": IDS, **BAD[message]}
    model = arguments.pop("build", llama)()
    before, kinds = tensors(copy.deepcopy(model)), [type(module) for module in model.modules()]
    with pytest.raises((TypeError, ValueError), match=message):
        hf_kbit.calibrate(model, **arguments)
    assert same(tensors(model), before) and [type(module) for module in model.modules()] == kinds


def test_what_is_not_finite_is_refused():
    """A weight before anything changes, inputs where they are met."""
    model = llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = math.nan
    before = [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"layers.1.mlp.up_proj.weight: found NaN"):
        hf_kbit.calibrate(model, IDS)
    assert [type(module) for module in model.modules()] == before
    model = llama()
    model.model.layers[1].input_layernorm.weight.data[:] = math.inf
    with pytest.raises(ValueError, match=r"layers.1.\S+: found NaN or infinite inputs"):
        hf_kbit.calibrate(model, IDS)


def test_the_rest_of_a_model_that_sees():
    left = ["vision_tower", "multi_modal_projector"]
    model = hf_kbit.calibrate(BY_NAME["llava"].build(), IDS, modules_to_not_convert=left)
    layers = [name for name, module in model.named_modules() if isinstance(module, KbitLinear)]
    assert layers and all("language_model" in name for name in layers)


# --- quality --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_loses_less_than_without_data():
    """Of trained weights, on held-out text, at 2 bits: the loss above the float model's, over that without data.

    Measured on 2026-11-22 (torch 2.13 CPU, Transformers 5.23): 0.76 and 0.16.
    """
    data = torch.cat(list(batches(16)))
    dense = mean_loss(AutoModelForCausalLM.from_pretrained(trained_lm()), held_out())
    config = KbitConfig(bits=2)
    free = mean_loss(AutoModelForCausalLM.from_pretrained(trained_lm(), quantization_config=config), held_out())
    for method, bound in (("weighted", 1.0), ("feedback", 0.4)):
        model = AutoModelForCausalLM.from_pretrained(trained_lm())
        loss = mean_loss(hf_kbit.calibrate(model, data, bits=2, method=method, batch=32), held_out())
        assert loss - dense < bound * (free - dense)


def test_tables_are_quantized_without_data():
    model, other = llama(), llama()
    hf_kbit.calibrate(model, IDS, bits=3, embedding_bits=5)
    hf_kbit.quantize_model(other, bits=3, embedding_bits=5)
    table, expected = model.model.embed_tokens, other.model.embed_tokens
    assert table.bits == 5 and all(map(torch.equal, table.packed.values(), expected.packed.values()))


TIED = [(name, "feedback", 0.6) for name in ("llama", "bert-masked")]
TIED += [(name, "weighted", 1.05) for name in ("llama", "t5")]


@pytest.mark.parametrize(("name", "method", "bound"), TIED)
def test_a_tied_table_is_calibrated_for_the_head(name, method, bound, device, tmp_path):
    """The errors of logits are smaller than without data, but of ``weighted``, for inputs that are all alike; those of
    rows that are looked up are no larger by far."""
    ids = torch.randint(5, 90, (12, 12), generator=torch.Generator().manual_seed(2))
    model, other = (
        (llama(tie_word_embeddings=True) if name == "llama" else BY_NAME[name].build()).to(device) for _ in range(2)
    )
    dense = model.get_output_embeddings().weight.detach().clone()
    hf_kbit.calibrate(model, ids, bits=2, embedding_bits=4, method=method)
    hf_kbit.quantize_model(other, bits=2, embedding_bits=4)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight is table.weight and table.bits == head.bits == 4
    assert not torch.equal(head.weight, other.get_output_embeddings().weight)
    assert torch.equal(table(torch.arange(9, device=device)), head.dequantize()[:9])
    inputs = []
    head.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        model(ids.to(device), **({"decoder_input_ids": ids.to(device)} if model.config.is_encoder_decoder else {}))
    errors = [layer.dequantize() - dense for layer in (head, other.get_output_embeddings())]
    of_logits, of_rows = ([part.square().sum() for part in of] for of in ([inputs[0] @ e.T for e in errors], errors))
    assert of_logits[0] < bound * of_logits[1] and of_rows[0] < 1.7 * of_rows[1]
    model.save_pretrained(tmp_path)
    assert same(tensors(type(model).from_pretrained(tmp_path)), tensors(model))
