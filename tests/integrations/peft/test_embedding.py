"""Adapters on packed tables: those of PEFT on the decoded model, and by name what would have to read or train a table.

Unless a test says so the table is one of its own; ``tied`` models have a head that is the same weight.
"""

import copy
import functools
import re

import peft
import pytest
import torch
from adapters import (
    IDS,
    adapted,
    assert_same_state,
    decoded,
    expected_state,
    load,
    lora,
    packed_state,
    quantized,
    relative,
    train,
)
from peft import get_peft_model
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

import hf_kbit
from hf_kbit.integrations.peft.layer import KbitTunerLayer
from hf_kbit.nn.embedding import KbitEmbedding

SHAPE = {
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
}
TARGETS = ["embed_tokens", "q_proj"]
on_table = functools.partial(lora, target_modules=TARGETS)
table_quantized = functools.partial(quantized, embedding_bits=3)


def table_decoded(*args, **kwargs) -> LlamaForCausalLM:
    return table_quantized(*args, **kwargs).dequantize()


@functools.cache
def _dense(tied: bool, kind: str) -> LlamaForCausalLM | Gemma3ForCausalLM:
    torch.manual_seed(0)
    if kind == "gemma":
        return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, head_dim=18, tie_word_embeddings=tied))
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))


def tied(kind: str = "llama") -> LlamaForCausalLM | Gemma3ForCausalLM:
    return load(_dense(True, kind), embedding_bits=4)


def table_of(model) -> torch.nn.Module:
    """The input table, or what adapts it."""
    return model.get_input_embeddings()


# --- LoRA -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{}, {"init_lora_weights": "gaussian"}, {"use_rslora": True, "r": 3}, {"use_dora": True}], ids=str
)
def test_outputs_and_gradients(settings, device):
    """As on the decoded model, and no packed tensor changes."""
    models = [adapted(make(device), on_table(**settings)) for make in (table_quantized, table_decoded)]
    layer, before = table_of(models[0]), packed_state(table_quantized())
    assert isinstance(layer, peft.tuners.lora.Embedding) and isinstance(layer, KbitTunerLayer)
    assert type(layer.base_layer) is KbitEmbedding and type(table_of(models[1]).base_layer) is torch.nn.Embedding
    ids = IDS.to(device)
    outputs = [model(ids, labels=ids) for model in models]
    assert relative(outputs[0].logits, outputs[1].logits) < 1e-5
    for output in outputs:
        output.loss.backward()
    found, expected = ({n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in models)
    assert found.keys() == expected.keys() and any("lora_embedding_A" in name for name in found)
    for name, gradient in expected.items():
        assert gradient.any() and relative(found[name], gradient) < 1e-4, name
    state = packed_state(models[0])
    assert_same_state({name: state[name] for name in before}, before)


def test_a_table_with_a_scale_of_its_own(device):
    """Gemma's multiplies what it looks up, adapters' share too."""
    model = load(_dense(False, "gemma"), device, embedding_bits=3)
    models = [
        adapted(each, on_table())
        for each in (model, load(_dense(False, "gemma"), device, embedding_bits=3).dequantize())
    ]
    logits = [each(IDS.to(device)).logits for each in models]
    assert relative(*logits) < 1e-5
    with models[0].disable_adapter():
        assert relative(models[0](IDS.to(device)).logits, logits[0]) > 1e-3


@pytest.mark.parametrize("there, back", [(table_quantized, table_decoded), (table_decoded, table_quantized)])
def test_adapter_files_fit_both(there, back, tmp_path):
    """Those without a table, which PEFT saves beside an adapter of one if it is not told otherwise."""
    model = adapted(there(), on_table())
    model.save_pretrained(tmp_path, save_embedding_layers=False)
    loaded = peft.PeftModel.from_pretrained(back(), tmp_path)
    assert relative(loaded(IDS).logits, model(IDS).logits) < 1e-5


def test_an_adapter_file_has_no_table(tmp_path):
    adapted(table_quantized(), on_table()).save_pretrained(tmp_path)
    found = peft.utils.load_peft_weights(str(tmp_path))
    assert found and all("lora_" in name for name in found)


@pytest.mark.parametrize("safe", [False, True])
def test_merge_and_unmerge(safe, device):
    """The bytes of quantizing what PEFT merges into the decoded table, with its column scales; then those before."""
    model, reference = (adapted(make(device), on_table()) for make in (table_quantized, table_decoded))
    before, logits = packed_state(model), model(IDS.to(device)).logits
    with pytest.warns(UserWarning, match="merged into 3 layers"):
        model.merge_adapter(safe_merge=safe)
    reference.merge_adapter()
    layer = table_of(model).base_layer
    for name, tensor in expected_state(reference, model).items():
        if not tensor.is_floating_point():
            assert (packed_state(model)[name] != tensor).float().mean() <= (0 if device == "cpu" else 0.01), name
    assert not torch.equal(layer.packed["weight"].cpu(), before["model.embed_tokens.weight"])
    model.unmerge_adapter()
    assert_same_state(packed_state(model), before)
    assert torch.equal(model(IDS.to(device)).logits, logits)


def test_merge_and_unload(device):
    """Exactly, into 16 bits; or into a packed table without adapter."""
    model, reference = (adapted(make(device), on_table()) for make in (table_quantized, table_decoded))
    expected = reference.merge_and_unload()
    exact = hf_kbit.merge_and_unload(model, dequantize=True)
    assert type(exact.get_input_embeddings()) is torch.nn.Embedding
    assert relative(exact.get_input_embeddings().weight, expected.get_input_embeddings().weight) < 1e-6
    assert relative(exact(IDS.to(device)).logits, expected(IDS.to(device)).logits) < 1e-5
    with pytest.warns(UserWarning, match="merged into"):
        packed = adapted(table_quantized(device), on_table()).merge_and_unload()
    assert type(packed.get_input_embeddings()) is KbitEmbedding


def test_training_of_a_prepared_model(device):
    """With checkpoints, for which inputs require gradients, and from rows in float32, as of a table in 16 bits."""
    models = [
        peft.prepare_model_for_kbit_training(make(device, torch.bfloat16)) for make in (table_quantized, table_decoded)
    ]
    before = packed_state(models[0])
    assert models[0].get_input_embeddings()(IDS.to(device)).dtype == torch.float32
    models = [get_peft_model(model, on_table(init_lora_weights="orthogonal")) for model in models]
    losses = [train(model, IDS.to(device), steps=8, rate=1e-2) for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=0.02) and losses[0][-1] < losses[0][0] - 0.2
    state = packed_state(models[0])
    assert_same_state({name: state[name] for name in before}, before)


# --- tied tables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@pytest.mark.parametrize("tying", [False, True])
def test_adapters_on_a_tied_table(kind, tying):
    """Of its look-up alone or, if PEFT is asked to tie them, of the head too."""
    config = functools.partial(on_table, ensure_weight_tying=tying)
    models = [adapted(model, config()) for model in (tied(kind), tied(kind).dequantize())]
    assert isinstance(models[0].get_output_embeddings(), KbitTunerLayer) == tying
    assert relative(*(model(IDS).logits for model in models)) < 1e-5


def test_adapters_that_change_a_tied_head_are_refused():
    model = tied()
    before = packed_state(model)
    with pytest.raises(ValueError, match=r"lm_head.weight: found it tied .* expected one of its own for an adapter"):
        get_peft_model(model, lora(target_modules=["lm_head"], init_lora_weights="pissa"))
    assert_same_state(packed_state(model), before)


def test_merging_into_a_tied_table_is_refused():
    """The head would change with it, or would not."""
    model = adapted(tied(), on_table())
    before = packed_state(model)
    with pytest.raises(ValueError, match=r"embed_tokens.weight: found it tied to a table of embeddings"):
        model.merge_adapter()
    assert_same_state(packed_state(model), before)


# --- refused by name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, words",
    [
        (lambda: on_table(init_lora_weights="lora_ga"), "embed_tokens: a KbitEmbedding of 3 bits, .*'lora_ga' needs"),
        (
            lambda: peft.IA3Config(target_modules=TARGETS, feedforward_modules=[]),
            "^model.embed_tokens: IA3 over a Kbit",
        ),
        (lambda: lora(modules_to_save=["embed_tokens"]), "embed_tokens: found it in modules_to_save"),
    ],
)
def test_what_reads_or_trains_a_table(config, words):
    model = table_quantized()
    before = packed_state(model)
    with pytest.raises(ValueError, match=words):
        get_peft_model(model, config())
    assert type(table_of(model)) is KbitEmbedding
    assert_same_state(
        {re.sub("^base_model.model.", "", k): v for k, v in packed_state(model).items() if k in before}, before
    )


# --- rows that are trained ------------------------------------------------------------------------

TOKENS = [3, 7, 120]


def on_tokens(**kwargs) -> peft.LoraConfig:
    return lora(target_modules=["q_proj"], trainable_token_indices=TOKENS, **kwargs)


def moved(model, config) -> peft.PeftModel:
    """The model with an adapter whose trained rows are not those of the table either."""
    model = adapted(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


@pytest.mark.parametrize("make", [table_quantized, tied, lambda: tied("gemma")])
def test_trained_rows(make, tmp_path):
    """Outputs, gradients and files are those of the decoded model, whose tied head has the rows too."""
    models = [moved(model, on_tokens()) for model in (make(), make().dequantize())]
    ids = torch.tensor([[1, 3, 3, 7, 9, 100, 120, 127]])
    outputs = [model(ids, labels=ids) for model in models]
    assert relative(outputs[0].logits, outputs[1].logits) < 1e-5
    with models[0].disable_adapter(), models[1].disable_adapter():
        assert relative(models[0](ids).logits, models[1](ids).logits) < 1e-5
        assert relative(models[0](ids).logits, outputs[0].logits) > 1e-3
    for output in outputs:
        output.loss.backward()
    found, expected = ({n: p.grad for n, p in model.named_parameters() if p.requires_grad} for model in models)
    assert found.keys() == expected.keys() and any("trainable_tokens_delta" in name for name in found)
    for name, gradient in expected.items():
        assert gradient.any() and relative(found[name], gradient) < 1e-4, name
    for there, back in ((0, make().dequantize()), (1, make())):
        models[there].save_pretrained(tmp_path / str(there))
        loaded = peft.PeftModel.from_pretrained(back, tmp_path / str(there))
        assert relative(loaded(ids).logits, outputs[0].logits) < 1e-5
    weights = [peft.utils.load_peft_weights(str(tmp_path / str(each))) for each in (0, 1)]
    assert weights[0].keys() == weights[1].keys()


def test_trained_rows_start_where_the_table_is(device):
    model = get_peft_model(table_quantized(device), on_tokens())
    ids = torch.tensor([[1, 3, 7, 120]], device=device)
    assert torch.equal(model(ids).logits, table_quantized(device)(ids).logits)
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


def test_trained_rows_of_a_head_of_its_own():
    """``lm_head`` by name, in a model whose head is quantized and not tied."""
    config = lora(target_modules=["q_proj"], trainable_token_indices={"lm_head": TOKENS})
    models = [moved(make(module_bits={"lm_head": 4}), config) for make in (quantized, decoded)]
    logits = [model(IDS).logits for model in models]
    assert relative(*logits) < 1e-5
    with models[0].disable_adapter():
        changed = (models[0](IDS).logits - logits[0]).abs().amax((0, 1)) > 1e-2
    assert changed[TOKENS].all()


def test_merging_trained_rows(device):
    """Requantizes the table with its column scales, which changes few of the other rows, and those little."""
    model, reference = (moved(make(device), on_tokens()) for make in (table_quantized, table_decoded))
    before, ids = packed_state(model), IDS.to(device)
    logits, plain = model(ids).logits, table_quantized(device).get_input_embeddings().dequantize()
    with pytest.warns(UserWarning, match="merged into 3 layers"):
        model.merge_adapter()
    reference.merge_adapter()
    found, expected = (each.get_input_embeddings().original_module for each in (model, reference))
    others = [row for row in range(128) if row not in TOKENS]
    assert (found.dequantize()[others] == plain[others]).all(1).float().mean() > 0.9
    assert relative(found.dequantize()[others], plain[others]) < 0.02
    assert 1e-3 < relative(found.dequantize()[TOKENS], expected.weight[TOKENS]) < 0.3
    model.unmerge_adapter()
    assert_same_state(packed_state(model), before)
    assert torch.equal(model(ids).logits, logits)
    exact = hf_kbit.merge_and_unload(model, dequantize=True)
    assert relative(exact.get_input_embeddings().weight, expected.weight) < 1e-6


def test_two_adapters_with_rows_of_their_own():
    """One after the other; and by name in one batch."""
    models = []
    for model in (table_quantized(), table_decoded()):
        model = moved(model, on_tokens())
        model.add_adapter("other", lora(target_modules=["q_proj"], trainable_token_indices=[5, 9]))
        model.base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta["other"].data += 0.1
        models.append(model.eval())
    for names in (["default", "other"], ["other", "__base__"]):
        assert relative(*(model(IDS, adapter_names=names).logits for model in models)) < 1e-5
    for model in models:
        model.set_adapter("other")
    assert relative(*(model(IDS).logits for model in models)) < 1e-5


def test_rows_of_a_table_that_has_an_adapter_are_refused():
    config = lora(target_modules=TARGETS, trainable_token_indices=TOKENS)
    with pytest.raises(TypeError, match=r"trainable_token_indices cannot be applied to .*\.lora\.layer\.Embedding"):
        get_peft_model(table_quantized(), config)
