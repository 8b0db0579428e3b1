"""What layers of all kinds of models are given while they are calibrated, against a pass of the whole dense model; or
by which words a model is refused."""

import pytest
import torch
from architectures import BY_NAME, small_config
from small import same, tensors
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

import hf_kbit
from hf_kbit.calibration import moments, sensitivity, stream
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.site import Site
from hf_kbit.plan import selection

IDS = torch.randint(5, 90, (3, 24), generator=torch.Generator().manual_seed(3))
CPU = torch.device("cpu")
CLASSES = {
    "causal": AutoModelForCausalLM,
    "masked": AutoModelForMaskedLM,
    "seq2seq": AutoModelForSeq2SeqLM,
    "multimodal": AutoModelForImageTextToText,
}


SHARED = dict(num_hidden_layers=4, num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 2)
NARROW = dict(intermediate_size=64, num_attention_heads=2, num_key_value_heads=1, vocab_size=96)
NARROW |= dict(vocab_size_per_layer_input=96, hidden_size_per_layer_input=16, sliding_window=8)
LATENT = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=96)
LATENT |= dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_group=1)
LATENT |= dict(moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, topk_group=1)
CONFIGS = {
    "gemma4_text": lambda: CONFIG_MAPPING["gemma4_text"](
        hidden_size=64, head_dim=32, global_head_dim=32, **NARROW, **SHARED
    ),
    "gemma3n_text": lambda: CONFIG_MAPPING["gemma3n_text"](
        **dict(hidden_size=64, head_dim=32, altup_num_inputs=3, laurel_rank=32, activation_sparsity_pattern=[0.0] * 4),
        **NARROW,
        **SHARED,
    ),
    "deepseek_v2": lambda: CONFIG_MAPPING["deepseek_v2"](**LATENT, num_key_value_heads=4, topk_method="greedy"),
    "deepseek_v3": lambda: CONFIG_MAPPING["deepseek_v3"](**LATENT, num_key_value_heads=4, first_k_dense_replace=1),
    "funnel": lambda: CONFIG_MAPPING["funnel"](
        **dict(vocab_size=96, block_sizes=[2, 1], n_head=4, d_head=16, d_model=64, d_inner=64, num_decoder_layers=1)
    ),
    "reformer": lambda: CONFIG_MAPPING["reformer"](
        **dict(vocab_size=96, hidden_size=64, num_attention_heads=4, attention_head_size=16, feed_forward_size=64),
        **dict(axial_pos_embds_dim=[32, 32], axial_pos_shape=[4, 8], attn_layers=["local", "lsh"], is_decoder=True),
        **dict(local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=4, max_position_embeddings=32),
    ),
    "prophetnet": lambda: CONFIG_MAPPING["prophetnet"](
        **dict(vocab_size=96, hidden_size=64, encoder_ffn_dim=64, decoder_ffn_dim=64, num_encoder_layers=2),
        **dict(num_decoder_layers=2, num_encoder_attention_heads=4, num_decoder_attention_heads=4),
    ),
    "dbrx": lambda: CONFIG_MAPPING["dbrx"](
        **dict(d_model=64, n_heads=4, n_layers=2, vocab_size=96, max_seq_len=64),
        **dict(ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}),
        **dict(attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8}),
    ),
    "llama4_text": lambda: CONFIG_MAPPING["llama4_text"](
        **dict(vocab_size=96, hidden_size=64, intermediate_size=40, intermediate_size_mlp=40, num_hidden_layers=2),
        **dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=4),
    ),
    "ctrl": lambda: CONFIG_MAPPING["ctrl"](vocab_size=96, n_embd=64, dff=64, n_layer=2, n_head=4, n_positions=64),
    "gpt_neo": lambda: CONFIG_MAPPING["gpt_neo"](
        **dict(vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
        **dict(window_size=8, max_position_embeddings=64),
    ),
    "xlnet": lambda: CONFIG_MAPPING["xlnet"](vocab_size=96, d_model=64, n_layer=2, n_head=4, d_inner=64),
    "xlm": lambda: CONFIG_MAPPING["xlm"](vocab_size=96, emb_dim=64, n_layers=2, n_heads=4, n_langs=1),
    "mpt": lambda: CONFIG_MAPPING["mpt"](vocab_size=96, d_model=64, n_heads=4, n_layers=2, max_seq_len=64),
    "rwkv": lambda: CONFIG_MAPPING["rwkv"](
        vocab_size=96, hidden_size=64, num_hidden_layers=2, attention_hidden_size=64
    ),
    "falcon_h1": lambda: CONFIG_MAPPING["falcon_h1"](
        **dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
        **dict(num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=16),
        **dict(mamba_n_groups=1, mamba_chunk_size=8, head_dim=16),
    ),
    # dt_proj is so wide that it gets smaller packed.
    "mamba": lambda: small_config("mamba", time_step_rank=32),
    "jamba": lambda: small_config("jamba", mamba_dt_rank=32),
    "bamba": lambda: small_config("bamba", mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, attn_layer_indices=[1]),
    "qwen3_next": lambda: CONFIG_MAPPING["qwen3_next"](
        **dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4),
        **dict(num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4),
        **dict(linear_key_head_dim=16, linear_value_head_dim=16, num_experts=4, num_experts_per_tok=2),
        **dict(moe_intermediate_size=32, shared_expert_intermediate_size=32),
    ),
    "qwen2_vl": lambda: CONFIG_MAPPING["qwen2_vl"](
        text_config=dict(
            **dict(vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4),
            **dict(num_key_value_heads=2, rope_parameters={"rope_type": "default", "mrope_section": [2, 3, 3]}),
        ),
        vision_config=dict(depth=1, embed_dim=32, hidden_size=64, num_heads=2),
    ),
}


def build(task: str, kind: str) -> nn.Module:
    torch.manual_seed(0)
    if task == "table":
        return BY_NAME[kind].build()
    model = CLASSES[task].from_config(CONFIGS[kind]() if kind in CONFIGS else small_config(kind)).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            nn.init.normal_(parameter, 0, 0.1)
    return model


def gram(calls: list[torch.Tensor]) -> torch.Tensor:
    """The mean of x @ x.T over rows, whatever their order."""
    x = torch.cat([call.flatten(0, -2).float() for call in calls])
    return x.T @ x / len(x)


@torch.no_grad()
def inputs_of_whole(model, names, ids) -> dict[str, list[torch.Tensor]]:
    found = {name: [] for name in names}
    with stream.hooked({name: model.get_submodule(name) for name in names}, lambda n, x, *_: found[n].append(x)):
        stream.forward_pass(model, ids)
    return found


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-3 * expected.norm())


def check_inputs(build_model, ids, batch: int, left: dict, monkeypatch) -> None:
    """Of the dense layers, which calibration computes too, for the drift of the quantized ones."""
    given, find = {}, moments.moments

    def told(linear, group, runs, *others):
        calls = [moments.given(linear, run_dense, group.once) for _, run_dense in runs]
        again = [moments.given(linear, run_dense, group.once) for _, run_dense in runs]
        for first, second in zip(calls, again, strict=True):
            assert all(torch.equal(x, y) for (x, *_), (y, *_) in zip(first, second, strict=True))
        for name in group.names:
            given[name] = [[x for x, *_ in own] for own in calls]
        return find(linear, group, runs, *others)

    monkeypatch.setattr(moments, "moments", told)
    model, dense = build_model(), build_model()
    hf_kbit.calibrate(model, ids, batch=batch, device="cpu", bits=5, **left)
    assert given
    expected = inputs_of_whole(dense, given, ids)
    for name, batches in given.items():
        turns = len(batches[0])  # a layer that the model calls again is calibrated for the first calls
        assert close(gram([x for own in batches for x in own]), gram(expected[name][:turns])), name
    projections = [name for name, site in chosen(dense, left).items() if site.kind is KbitProjection]
    assert len(given) + len(projections) >= len([m for m in model.modules() if isinstance(m, hf_kbit.KbitLinear)])


def chosen(model, left: dict) -> dict[str, Site]:
    packable = selection.Packable(model)
    return {name: packable.sites[name] for name in packable.choose(hf_kbit.KbitConfig(**left))}


def check_gradients(model, ids, left: dict) -> None:
    names = [name for name, site in chosen(model, left).items() if site.kind is not KbitProjection]
    found, outputs = {}, {}

    def choose(probabilities):
        return probabilities.argmax(-1, keepdim=True)

    def take(name, module, given, gradient):
        found[name] = found.get(name, 0) + gradient.float().square().sum()

    sensitivity.gradients(model, names, ids, CPU, choose, take)
    hooks = [
        model.get_submodule(name).register_forward_hook(
            lambda _, args, y, name=name: (y.retain_grad(), outputs.setdefault(name, []).append(y)) and None
        )
        for name in names
    ]
    logs = stream.forward_pass(model, ids).logits.float().log_softmax(-1)
    logs.gather(-1, choose(logs.detach())).sum().backward()
    for hook in hooks:
        hook.remove()
    for name in names:
        expected = sum(y.grad.square().sum() for y in outputs[name] if y.grad is not None)
        assert close(torch.as_tensor(found.get(name, 0.0)), torch.as_tensor(expected)), name


# --- the list -------------------------------------------------------------------------------------

# So many sequences and tokens at once: the last batch is smaller; or as many as heads and tokens, and twice as layers.
SIZES = {"ragged": (IDS, 2), "coinciding": (IDS.view(-1)[:16].view(4, 4), 4)}
NOT_REACHED = "found that tokens do not go through it"
QUICK = [
    ("causal", "gemma4_text", {}),
    ("causal", "gemma3n_text", {}),
    ("causal", "bloom", {}),
    ("causal", "xlnet", {}),
    ("causal", "deepseek_v3", {}),
    ("causal", "llama4_text", {}),
    ("masked", "albert", {}),
    ("masked", "deberta-v2", {}),
    ("masked", "funnel", {}),
    ("seq2seq", "t5", {}),
    ("table", "llava", {"modules_to_not_convert": ["vision_tower", "multi_modal_projector"]}),
]
PLAIN = {
    "causal": """
        afmoe apertus aria_text bailing_hybrid biogpt bitnet codegen cohere2 ctrl dbrx deepseek_v2 diffllama doge dory
        ernie4_5_moe exaone4 falcon_h1 flex_olmo gemma2 gemma3_text glm4_moe gpt_neo gpt_neox gpt_oss gptj granitemoe
        helium jetmoe lfm2 mellum mimo_v2_flash minimax mixtral mpt olmo2 olmoe opt persimmon phi phi3 phimoe
        qwen3_moe qwen3_next recurrent_gemma rwkv stablelm starcoder2 xglm xlm
    """,
    "masked": """
        bart bert big_bird camembert convbert data2vec-text deberta distilbert electra flaubert fnet gte megatron-bert
        mobilebert modernbert mpnet mra mvp nomic_bert nystromformer rembert roberta
    """,
    "seq2seq": "bigbird_pegasus fsmt longt5 m2m_100 mt5 nllb-moe pegasus plbart prophetnet switch_transformers umt5",
}
OTHERS = [
    ("causal", "jamba", {"modules_to_not_convert": ["dt_proj"]}),
    ("multimodal", "qwen2_vl", {"modules_to_not_convert": ["visual"]}),
    ("table", "falcon", {}),
    ("causal", "bamba", {}),
]
SLOW = [(task, kind, {}) for task, kinds in PLAIN.items() for kind in kinds.split()] + OTHERS
REFUSED = {
    ("causal", "reformer"): r"layers\.\d\.\S+: found inputs that differ by .* or random numbers are drawn",
    ("causal", "mamba"): rf"mixer\.dt_proj: {NOT_REACHED}",
    ("causal", "jamba"): rf"mamba\.dt_proj: {NOT_REACHED}",
    ("causal", "bart"): rf"encoder_attn\.k_proj: {NOT_REACHED}",
    ("masked", "longformer"): rf"key_global: {NOT_REACHED}",
    ("seq2seq", "led"): rf"key_global: {NOT_REACHED}",
    ("table", "llava"): rf"multi_modal_projector\.linear_1: {NOT_REACHED}",
    ("table", "whisper"): "expected a model that reads token ids",
    ("table", "clip"): "found that CLIPModel does not run on token ids alone",
}


@pytest.mark.parametrize(
    ("task", "kind", "left"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_calibrated(task, kind, left, monkeypatch):
    for ids, batch in SIZES.values():
        with monkeypatch.context() as patch:
            check_inputs(lambda: build(task, kind), ids, batch, left, patch)
    model = build(task, kind)
    if stream.predicts_tokens(model):
        check_gradients(model, IDS, left)


@pytest.mark.parametrize(("task", "kind"), REFUSED)
def test_refused(task, kind):
    model = build(task, kind)
    before = tensors(model)
    with pytest.raises(ValueError, match=REFUSED[task, kind]):
        hf_kbit.calibrate(model, IDS, bits=3)
    assert same(tensors(model), before)
