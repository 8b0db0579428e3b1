"""Tables of embeddings in models of Transformers: which are packed, and what is tied to them, all along."""

import re

import kinds
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from hf_kbit import KbitConfig, KbitLinear, calibrate, merge_and_unload, quantize_model
from hf_kbit.format import reference
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.plan import selection

BITS = 5
CONFIG = {"bits": 4, "embedding_bits": BITS}
# {kind: the tables that are packed}; what is tied to them is in ``kinds.py``.
PACKED = {
    "packed head": {"model.embed_tokens"},
    "scaled table": {"model.embed_tokens"},
    "table of positions": {"model.decoder.embed_positions", "model.decoder.embed_tokens"},
    "Conv1D": {"transformer.wte", "transformer.wpe"},
    "encoder": {"bert.embeddings.word_embeddings", "bert.embeddings.position_embeddings"},
    "encoder and decoder": {"shared", "encoder.embed_tokens", "decoder.embed_tokens"},
    "speech": {"model.decoder.embed_tokens"},  # positions are read
}
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
TOKENS = torch.tensor([[5, 6, 7, 40]])


def of_tables(model) -> dict[str, KbitWeight]:
    return {name: m for name, m in model.named_modules() if isinstance(m, KbitEmbedding) or getattr(m, "tied", False)}


@pytest.mark.parametrize("name", PACKED)
def test_which_tables_are_packed(name, tmp_path_factory):
    kind = kinds.life(name, tmp_path_factory)
    tables = {name: m for name, m in kind.model.named_modules() if isinstance(m, KbitEmbedding)}
    assert tables.keys() == PACKED[name]
    assert {table.bits for table in tables.values()} == {kind.kind.config["embedding_bits"]}
    assert kind.model.num_parameters() == kind.load("dense").num_parameters()


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
