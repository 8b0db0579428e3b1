"""Tables of embeddings in models of Transformers: which are packed, and what is tied to them, all along."""

import copy
import re

import accelerate
import pytest
import torch
import transformers
from architectures import ARCHITECTURES
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel, LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig, KbitLinear, calibrate, merge_and_unload, quantize_model
from hf_kbit.format import reference
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.weight import KbitWeight, distinct
from hf_kbit.plan import selection
from hf_kbit.weight import tensor

BITS = 5
CONFIG = {"bits": 4, "embedding_bits": BITS}
# {name: the tables that are packed, what is tied to one of them}.
PACKED = {
    "llama": ({"model.embed_tokens"}, set()),
    "gemma3": ({"model.embed_tokens"}, {"lm_head"}),
    "opt": ({"model.decoder.embed_positions", "model.decoder.embed_tokens"}, {"lm_head"}),
    "gpt2": ({"transformer.wte", "transformer.wpe"}, {"lm_head"}),
    "bert-masked": (
        {"bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings"},
        {"cls.predictions.decoder"},
    ),
    "t5": ({"shared"}, {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head"}),
    "whisper": ({"model.decoder.embed_tokens"}, {"proj_out"}),  # positions are read
}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TOKENS = torch.tensor([[5, 6, 7, 40]])


@torch.no_grad()
def logits(model, inputs) -> torch.Tensor:
    return next(x for x in model(**inputs).values() if isinstance(x, torch.Tensor) and x.is_floating_point())


@pytest.fixture(scope="module", params=PACKED)
def case(request, tmp_path_factory):
    """Name, class, inputs, folder of the float model, and the model quantized while it was loaded."""
    architecture = next(a for a in ARCHITECTURES if a.name == request.param)
    folder = tmp_path_factory.mktemp(request.param)
    architecture.build().save_pretrained(folder / "dense")
    model = architecture.cls.from_pretrained(folder / "dense", quantization_config=KbitConfig(**CONFIG))
    return request.param, architecture, architecture.inputs(), folder, model


def of_tables(model) -> dict[str, KbitWeight]:
    return {name: m for name, m in model.named_modules() if isinstance(m, KbitEmbedding) or getattr(m, "tied", False)}


def assert_tied_as(model, name):
    """That the tables of that row are packed, and that what is tied has one memory."""
    tables, tied = PACKED[name]
    found = of_tables(model)
    assert {each for each in found} == tables | tied
    assert all(layer.bits == BITS for layer in found.values())
    first, *_ = (layer for name, layer in found.items() if layer.tied) if tied else (None,)
    for each in tied:
        assert found[each].weight is first.weight, each
        assert found[each].decoding == first.decoding


def test_tables_are_packed_and_tied(case):
    name, architecture, inputs, folder, model = case
    assert_tied_as(model, name)
    dense = architecture.cls.from_pretrained(folder / "dense")
    for own, layer in {n: m for n, m in model.named_modules() if isinstance(m, KbitWeight)}.items():
        plain = dense.get_submodule(own)
        weight = layer.dequantize()
        plain.weight.data = weight.T.contiguous() if layer.transposed else weight
    torch.testing.assert_close(logits(model, inputs), logits(dense, inputs), rtol=1e-3, atol=1e-4)
    assert model.num_parameters() == dense.num_parameters()


@pytest.mark.parametrize("how", ["loaded", "in memory", "feedback"])
def test_a_head_of_its_own_has_no_balanced_columns(how, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, **SMALL))
    config = KbitConfig(bits=4, module_bits={"lm_head": 5})
    if how == "loaded":
        model.save_pretrained(tmp_path)
        model = LlamaForCausalLM.from_pretrained(tmp_path, quantization_config=config)
    elif how == "in memory":
        quantize_model(model, config)
    else:
        calibrate(model, TOKENS.repeat(2, 8), config=config, method=how)
    assert set(reference.decode_e4m4(model.lm_head.weight.columns).tolist()) == {1.0}
    assert len(model.model.layers[0].mlp.up_proj.weight.columns.unique()) > 1


def test_saved_once_and_tied_again(case, tmp_path):
    name, architecture, inputs, _, model = case
    model.save_pretrained(tmp_path / "saved")
    tables, tied = PACKED[name]
    tensors = load_file(tmp_path / "saved/model.safetensors")
    packed = sum(layer.packed["weight"].numel() for layer in distinct(of_tables(model).values()))
    assert packed == sum(
        tensor.numel()
        for key, tensor in tensors.items()
        if tensor.dtype == torch.int32 and key.removesuffix(".weight") in tables | tied
    )
    reloaded = architecture.cls.from_pretrained(tmp_path / "saved")
    assert_tied_as(reloaded, name)
    assert torch.equal(logits(reloaded, inputs), logits(model, inputs))
    reloaded.tie_weights()
    assert_tied_as(reloaded, name)
    reloaded.save_pretrained(tmp_path / "again")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes(), file


@pytest.mark.gpu
def test_on_a_gpu(case, tmp_path):
    """What is tied is one set of tiles, which the look-up reads too; other tables stay planes; saved and moved."""
    name, architecture, inputs, folder, model = case
    on_gpu = architecture.cls.from_pretrained(
        folder / "dense", quantization_config=KbitConfig(**CONFIG), device_map="cuda"
    )
    moved = copy.deepcopy(model).cuda()
    for other in (on_gpu, moved):
        assert_tied_as(other, name)
        assert all(layer.weight.is_tiled == layer.tied for layer in of_tables(other).values())
    there = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    found = logits(on_gpu, there)
    torch.testing.assert_close(found.cpu(), logits(model, inputs), rtol=1e-2, atol=1e-3)
    assert torch.equal(logits(moved, there), found)
    on_gpu.save_pretrained(tmp_path / "gpu")
    model.save_pretrained(tmp_path / "cpu")
    file = "model.safetensors"
    assert (tmp_path / "gpu" / file).read_bytes() == (tmp_path / "cpu" / file).read_bytes()
    back = moved.cpu()
    assert_tied_as(back, name)
    assert torch.equal(logits(back, inputs), logits(model, inputs))


def test_in_memory_as_while_loading(case, tmp_path):
    name, architecture, inputs, folder, model = case
    other = architecture.cls.from_pretrained(folder / "dense")
    done = quantize_model(other, **CONFIG)
    assert {each for each, bits in done.bits.items() if bits == BITS} <= PACKED[name][0] | PACKED[name][1]
    assert_tied_as(other, name)
    assert torch.equal(logits(other, inputs), logits(model, inputs))
    for each, folder in ((model, tmp_path / "loaded"), (other, tmp_path / "in memory")):
        each.save_pretrained(folder)
    files = [(tmp_path / way / "model.safetensors").read_bytes() for way in ("loaded", "in memory")]
    assert files[0] == files[1]


def test_back_to_16_bits(case, tmp_path):
    name, architecture, inputs, _, model = case
    dense = copy.deepcopy(model)
    assert_tied_as(dense, name)
    expected = logits(dense, inputs)
    dense.dequantize()
    assert not any(isinstance(module, KbitWeight) for module in dense.modules())
    torch.testing.assert_close(logits(dense, inputs), expected, rtol=1e-3, atol=1e-4)
    dense.save_pretrained(tmp_path)
    again = architecture.cls.from_pretrained(tmp_path)
    for each in (dense, again):
        for own in PACKED[name][1]:
            assert any(each.get_submodule(own).weight is each.get_submodule(first).weight for first in PACKED[name][0])
    assert torch.equal(logits(again, inputs), logits(dense, inputs))


def test_what_is_nobodys_stays_tied_in_16_bits():
    model = nn.Sequential(nn.Embedding(96, 64), nn.Linear(64, 64), nn.Linear(64, 96, bias=False))
    model[2].weight = model[0].weight
    quantize_model(model, bits=4, embedding_bits=5)
    adapted = get_peft_model(model, LoraConfig(target_modules=["1"]))
    dense = merge_and_unload(adapted, dequantize=True)
    assert [type(layer) for layer in dense] == [nn.Embedding, nn.Linear, nn.Linear]
    assert dense[2].weight is dense[0].weight


# --- one model ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A Llama whose head is tied."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("tied")
    LlamaForCausalLM(LlamaConfig(vocab_size=99, tie_word_embeddings=True, **SMALL)).save_pretrained(folder)
    return folder


def load(folder, **config):
    return LlamaForCausalLM.from_pretrained(folder, quantization_config=KbitConfig(**(CONFIG | config)))


@pytest.fixture(scope="module")
def saved(dense, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    load(dense).save_pretrained(folder)
    return folder


@torch.no_grad()
def output(model) -> torch.Tensor:
    return model(TOKENS).logits


PLACES = {
    "on disk": {"": "disk"},
    "layers on disk": {
        **dict.fromkeys(("model.embed_tokens", "lm_head", "model.rotary_emb", "model.norm"), "cpu"),
        "model.layers": "disk",
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_offloaded_by_a_device_map(saved, tmp_path, place):
    expected = output(LlamaForCausalLM.from_pretrained(saved))
    model = LlamaForCausalLM.from_pretrained(saved, device_map=PLACES[place], offload_folder=tmp_path / "offload")
    assert torch.equal(output(model), expected)
    model.save_pretrained(tmp_path / "again")
    assert load_file(tmp_path / "again/model.safetensors").keys() == load_file(saved / "model.safetensors").keys()
    assert torch.equal(output(LlamaForCausalLM.from_pretrained(tmp_path / "again")), expected)


def test_offloaded_by_accelerate(saved):
    model = LlamaForCausalLM.from_pretrained(saved)
    expected = output(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(output(model), expected)


def test_a_head_of_tiles_serves_both_through_a_models_life(saved, tmp_path, monkeypatch):
    """As on a GPU, whose product reads tiles: the table reads the same, and both are saved once, as planes."""
    expected = output(LlamaForCausalLM.from_pretrained(saved))
    monkeypatch.setattr(tensor, "reads_tiles", lambda device: device.type == "cpu")
    model = LlamaForCausalLM.from_pretrained(saved)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.weight.is_tiled and head.weight is table.weight
    assert torch.equal(table(TOKENS), table.dequantize()[TOKENS])
    torch.testing.assert_close(output(model), expected)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    other = copy.deepcopy(model)
    assert other.get_output_embeddings().weight is other.get_input_embeddings().weight
    torch.testing.assert_close(output(other), expected)


def test_tiles_leave_the_bias_of_a_tied_head(monkeypatch):
    monkeypatch.setattr(tensor, "reads_tiles", lambda device: device.type == "cpu")
    model = BertForMaskedLM(BertConfig(vocab_size=99, **SMALL))
    quantize_model(model, **CONFIG)
    assert model.get_output_embeddings().weight.is_tiled
    model.tie_weights()
    assert model.get_output_embeddings().bias.shape == (99,)


def test_two_different_weights_in_a_checkpoint_stay_two(dense, tmp_path):
    """As in 16 bits, where Transformers warns and ties nothing."""
    tensors = load_file(dense / "model.safetensors")
    other = tensors["model.embed_tokens.weight"].flip(0) * 2.0**-9  # so small that it needs an exponent
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=LlamaConfig.from_pretrained(dense),
        state_dict=tensors | {"lm_head.weight": other},
        quantization_config=KbitConfig(**CONFIG),
    )
    assert not model.lm_head.tied and model.lm_head.decoding != model.model.embed_tokens.decoding
    torch.testing.assert_close(model.lm_head.dequantize(), other, rtol=0.3, atol=1e-5)
    model.save_pretrained(tmp_path)
    again = LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(output(again), output(model))


def test_a_base_model_of_a_tied_one(saved):
    base = transformers.LlamaModel.from_pretrained(saved)
    assert torch.equal(
        base(TOKENS).last_hidden_state, LlamaForCausalLM.from_pretrained(saved).model(TOKENS).last_hidden_state
    )


def test_a_config_names_tables(dense):
    assert isinstance(load(dense, embedding_bits=None).model.embed_tokens, nn.Embedding)
    assert not of_tables(load(dense, embedding_bits=None))
    assert not of_tables(load(dense, modules_to_not_convert=["embed_tokens"]))
    assert not of_tables(load(dense, module_bits={"embed_tokens": None}))
    assert load(dense, embedding_bits=None, module_bits={"embed_tokens": 3}).lm_head.bits == 3
    part = load(dense, module_bits={"model": 3})
    assert part.model.embed_tokens.bits == BITS and part.model.layers[0].mlp.up_proj.bits == 3
    mean = load(dense, bits=3.5)
    assert mean.lm_head.bits == BITS and {module.bits for module in mean.modules() if type(module) is KbitLinear} > {3}


def test_a_saved_model_says_that_it_has_tables(dense, tmp_path):
    """An hf_kbit that knows none refuses the entry by its name."""
    load(dense, embedding_bits=None, module_bits={"embed_tokens": 3}, transform="none").save_pretrained(tmp_path)
    entries = LlamaConfig.from_pretrained(tmp_path).quantization_config
    assert (entries["embedding_bits"], entries["format_version"]) == (3, 2)
    assert "embedding_bits" not in KbitConfig(bits=4).to_dict()


def test_the_report_says_what_tables_would_save(dense, caplog):
    logger = transformers.logging.get_logger("transformers.hf_kbit")
    logger.addHandler(caplog.handler)
    try:
        load(dense, embedding_bits=None)
        load(dense)
    finally:
        logger.removeHandler(caplog.handler)
    told = re.compile(r"embedding_bits=5 would bring .* from ([\d.]+) to ([\d.]+) MB")
    found = [match for line in {record.message for record in caplog.records} if (match := told.search(line))]
    assert len(found) == 1
    rows, width = 99, 64
    assert float(found[0][1]) == pytest.approx(4e-6 * rows * width, rel=0.01)
    assert float(found[0][2]) == pytest.approx((rows * width * 5.25 / 8 + width) / 1e6, rel=0.01)


def test_tables_that_are_left():
    with torch.device("meta"):
        bert = BertModel(BertConfig(vocab_size=99, **SMALL))
    assert selection.Packable(bert).reasons["embeddings.token_type_embeddings"] == "small"
    assert "embeddings.word_embeddings" in selection.Packable(bert).choose(KbitConfig(**CONFIG))


def test_resizing_a_packed_table_is_refused(saved):
    model = LlamaForCausalLM.from_pretrained(saved)
    with pytest.raises(TypeError, match=r"weight: found data of type Tensor .*, expected a packed weight"):
        model.resize_token_embeddings(120)
    assert torch.equal(output(model), output(LlamaForCausalLM.from_pretrained(saved)))
