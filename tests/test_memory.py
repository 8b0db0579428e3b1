"""The bits that a memory allows, and what a model keeps of tokens."""

import pytest
import torch
from architectures import ARCHITECTURES, BY_NAME
from test_widths import SHAPE, llama
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMaskedLM, LlamaForCausalLM

from hf_kbit import KbitConfig, bits_for_memory
from hf_kbit.generation.static_cache import CACHE
from hf_kbit.plan.memory import cache_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("context", [0, 1000])
def test_memory(context, dtype):
    """What is returned takes what was given; a quantized model of that width is as large as was counted."""
    model = llama().to(dtype)
    chosen = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 96)
    rest = dtype.itemsize * (sum(p.numel() for p in model.parameters()) - chosen + context * 2 * 2 * 2 * 16)
    columns = 2 * (4 * 64 + 2 * 64 + 96)
    for bits in (2.0, 2.5, 4.0):
        memory = rest + chosen * (bits + 0.25) / 8
        assert bits_for_memory(model, memory + columns, context=context) == pytest.approx(bits)
        plain = KbitConfig(transform="none")
        assert bits_for_memory(model, memory, context=context, config=plain) == pytest.approx(bits)
    assert bits_for_memory(model, 10 * rest, context=context) == 5
    with pytest.raises(ValueError, match=f"memory: found {rest:,} bytes, expected .* {context:,} tokens"):
        bits_for_memory(model, rest, context=context)


@pytest.mark.parametrize(("dtype", "embedding_bits"), [(torch.float32, 5), (torch.float16, None)])
def test_memory_counts_what_a_saved_model_has(dtype, embedding_bits):
    model = llama().to(dtype)
    config = KbitConfig(bits=3, embedding_bits=embedding_bits)
    quantized = LlamaForCausalLM.from_pretrained(
        None, config=model.config, state_dict=model.state_dict(), quantization_config=config, dtype=dtype
    )
    size = sum(p.nbytes for p in quantized.parameters())
    assert bits_for_memory(model, size, config=config) == pytest.approx(3, abs=1e-6)


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# By kind of model, besides the architectures of the other tests: states that do not grow, latents, windows.
KINDS = {
    "mamba": {"hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {**SHAPE, "state_size": 8, "num_heads": 8, "head_dim": 16, "n_groups": 1},
    "qwen3_next": {
        **SHAPE,
        **EXPERTS,
        **{"num_hidden_layers": 4, "num_experts": 4, "shared_expert_intermediate_size": 32, "head_dim": 16},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16},
        **{"linear_value_head_dim": 16, "num_key_value_heads": 2},
    },
    "deepseek_v3": {
        **SHAPE,
        **EXPERTS,
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
        **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    },
    "gpt_oss": {
        **{**SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
        **{"head_dim": 16, "num_key_value_heads": 2},
    },
}
GENERATE = [row.name for row in ARCHITECTURES if row.generates and row.name != "whisper"]


def bytes_of(part) -> int:
    """Of the tensors in a cache of Transformers."""
    if isinstance(part, torch.Tensor):
        return part.nbytes
    if isinstance(part, dict):
        part = list(part.values())
    if isinstance(part, list):
        return sum(map(bytes_of, part))
    fields = ("self_attention_cache", "cross_attention_cache", "keys", "values", "conv_states", "recurrent_states")
    fields = fields[:2] if hasattr(part, fields[0]) else (*fields[2:], "layers")
    return sum(bytes_of(getattr(part, name)) for name in fields if getattr(part, name, None) is not None)


@pytest.mark.parametrize("name", [*GENERATE, *KINDS])
def test_the_cache_is_what_the_model_keeps(name):
    """Against a forward pass of so many tokens, in bfloat16, in which recurrent states are not."""
    torch.manual_seed(0)
    if name in KINDS:
        config = AutoConfig.for_model(name, vocab_size=99, pad_token_id=0, **KINDS[name])
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        model = BY_NAME[name].build()
    model = model.bfloat16()
    for tokens in (5, 40):
        ids = torch.randint(5, 90, (1, tokens))
        both = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
        with torch.no_grad():
            found = model(ids, use_cache=True, **both)
        kept = found.get(CACHE, found.get("cache_params"))
        assert cache_bytes(model, tokens) == bytes_of(kept) > 0
    assert cache_bytes(model, 0) == 0


def test_the_cache_of_a_model_whose_encoder_reads_no_tokens():
    """Whisper's decoder keeps its own tokens, and all positions of the encoder."""
    model = BY_NAME["whisper"].build()
    config = model.config
    features = torch.zeros(1, config.num_mel_bins, 2 * config.max_source_positions)
    with torch.no_grad():
        found = model(input_features=features, decoder_input_ids=torch.zeros(1, 11, dtype=torch.int64), use_cache=True)
    assert cache_bytes(model, 11) == bytes_of(found[CACHE]) > 0


@pytest.mark.parametrize("name", ["recurrent_gemma", "jamba", "rwkv"])
def test_a_config_that_does_not_say_it_is_refused(name):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, num_hidden_layers=3, hidden_size=64))
    with pytest.raises(ValueError, match=r"context: found 10, but the config of \w+ does not say what .* expected 0"):
        bits_for_memory(model, 10**9, context=10)
    assert bits_for_memory(model, 10**12) == 5


def test_an_encoder_has_no_cache():
    model = BertForMaskedLM(BertConfig(vocab_size=256, **SHAPE))
    assert bits_for_memory(model, 250_000, context=10**6) == bits_for_memory(model, 250_000) < 5


def test_refused_arguments():
    with pytest.raises(ValueError, match="found no linear layer to quantize in Llama"):
        bits_for_memory(llama(), 10**9, modules_to_not_convert=["proj"])
    with pytest.raises(TypeError, match="config: found it and"):
        bits_for_memory(llama(), 10**9, config=KbitConfig(), codebook="int")
    with pytest.raises(ValueError, match="memory: found '3 apples', expected a size such as 20GB or 800MiB"):
        bits_for_memory(llama(), "3 apples")
