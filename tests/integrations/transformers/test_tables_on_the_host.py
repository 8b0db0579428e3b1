"""Tables of embeddings that a GPU reads from the memory of the host."""

import pytest
import small
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import hf_kbit
from hf_kbit import KbitConfig, KbitEmbedding
from hf_kbit.nn.host import keep_on_host, tables
from hf_kbit.nn.weight import packed_layers

ROWS, TABLE = 5000, "model.embed_tokens"
IDS = torch.randint(ROWS, (2, 7), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": ROWS}
    small.llama(**shape, tie_word_embeddings=False).bfloat16().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def load(folder, device_map=None, **config):
    config = {"quantization_config": KbitConfig(**config)} if config else {}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, **config)


def test_a_config_says_so_of_this_process_alone(folder, tmp_path):
    """Without a GPU nothing else happens."""
    config = KbitConfig(bits=3, embedding_device="cpu")
    assert "embedding_device" not in config.to_dict() and "embedding_device='cpu'" in repr(config)
    with pytest.raises(ValueError, match="embedding_device: found 'disk', expected 'cpu' or None"):
        KbitConfig(embedding_device="disk")
    found, expected = load(folder, bits=3, embedding_device="cpu"), load(folder, bits=3)
    assert torch.equal(found(IDS).logits, expected(IDS).logits)
    found.save_pretrained(tmp_path / "saved")
    assert load(tmp_path / "saved").config.quantization_config.embedding_device is None


def test_tables_that_a_head_has_too_are_none():
    tied, apart = (small.llama(tie_word_embeddings=tie) for tie in (True, False))
    assert not tables(tied) and tables(apart) == {TABLE: apart.model.embed_tokens}
    hf_kbit.quantize_model(tied, bits=3, embedding_bits=4)
    assert not tables(tied)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [None, 2, 4, 5])
def test_rows_are_read_from_the_host(bits):
    """As from the GPU, which has no memory for it, in a graph with other ids too."""
    dense = nn.Embedding(ROWS, 300).to("cuda", torch.bfloat16).requires_grad_(False)
    expected = dense if bits is None else KbitEmbedding.from_embedding(dense, bits)
    table = nn.Embedding(ROWS, 300, dtype=torch.bfloat16) if bits is None else KbitEmbedding(ROWS, 300, bits=bits)
    table.load_state_dict(expected.state_dict())
    before = torch.cuda.memory_allocated()
    keep_on_host(table.to(torch.bfloat16), torch.device("cuda", 0))
    assert torch.cuda.memory_allocated() == before and table.weight.device.type == "cuda"
    ids, graph = IDS.cuda(), torch.cuda.CUDAGraph()
    assert torch.equal(table(ids), expected(ids))
    with torch.cuda.graph(graph):
        found = table(ids)
    ids.copy_(IDS.flip(0))
    graph.replay()
    assert torch.equal(found, expected(ids))
    for name, tensor in table.state_dict().items():
        assert torch.equal(tensor.cpu(), expected.state_dict()[name].cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["asked", "mapped", "saved", "calibrated", "in memory"])
@pytest.mark.parametrize("embedding_bits", [None, 4])
def test_a_model(way, embedding_bits, folder, tmp_path):
    """It writes what the model with its table on the GPU writes, trains adapters, and is saved as it."""
    config = {"bits": 4, "embedding_bits": embedding_bits}
    if way == "calibrated":
        config |= {"calibrate": IDS.repeat(4, 4)[:, :24], "tune": 0}
    expected, places = load(folder, "cuda", **config), {"": 0, TABLE: "cpu"}
    if way == "saved":
        expected.save_pretrained(tmp_path / "saved")
        model = load(tmp_path / "saved", places)
    elif way == "in memory":
        model = load(folder, "cuda")
        hf_kbit.quantize_model(model, embedding_device="cpu", **config)
    else:
        model = load(folder, *(["cuda"] if way != "mapped" else [places]), **config, **ASKED[way])
    table = model.get_input_embeddings()
    where = [*packed_layers(model).values(), table, model.lm_head]
    assert {layer.weight.device.type for layer in where} == {"cuda"} and not hasattr(table, "_hf_hook")
    stored = table.weight.parts["words"] if embedding_bits else table.weight
    assert not is_of_the_gpu(stored)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    written = [of.generate(IDS.cuda(), **how) for of in (expected, model)]
    written.append(model.generate(IDS.cuda(), custom_generate=hf_kbit.fast_generate, **how))
    assert torch.equal(written[0], written[1]) and written[2].shape == written[1].shape
    model.save_pretrained(tmp_path / "again")
    expected.save_pretrained(tmp_path / "expected")
    file = "model.safetensors"
    assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "expected" / file).read_bytes()
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted(input_ids=IDS.cuda(), labels=IDS.cuda()).loss.backward()
    gradients = [x.grad for name, x in adapted.named_parameters() if "lora_B" in name]
    assert gradients and all(x.isfinite().all() and x.any() for x in gradients)


ASKED = {"asked": {"embedding_device": "cpu"}, "calibrated": {"embedding_device": "cpu"}, "mapped": {}}


def is_of_the_gpu(tensor: torch.Tensor) -> bool:
    """Whether torch's allocator has it."""
    segments = torch.cuda.memory_snapshot()
    return any(0 <= tensor.data_ptr() - each["address"] < each["total_size"] for each in segments)
