"""Adapters on packed tables, besides what ``test_methods.py`` has of them, and what is refused by name.

Unless a test says so the table is one of its own; ``tied`` models have a head that is the same weight.
"""

import copy
import functools

import adapters
import peft
import pytest
import torch
from adapters import adapted, assert_same_state, logits, lora, packed_state, relative
from peft import get_peft_model

import hf_kbit
from hf_kbit.nn.embedding import KbitEmbedding

TARGETS = ["embed_tokens", "q_proj"]
TOKENS = [3, 7, 120]
on_table = functools.partial(lora, target_modules=TARGETS)
on_tokens = functools.partial(lora, target_modules=["q_proj"], trainable_token_indices=TOKENS)
quantized = functools.partial(adapters.quantized, embedding_bits=3)
both = functools.partial(adapters.both, embedding_bits=3)


def table_of(model) -> torch.nn.Module:
    """The input table, or what adapts it."""
    return model.get_input_embeddings()


def moved(model):
    """Its trained rows too are not those of the table."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


# --- refused by name ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        (
            "llama",
            on_table(init_lora_weights="lora_ga"),
            "embed_tokens: a KbitEmbedding of 3 bits, .*'lora_ga' needs",
        ),
        (
            "llama",
            peft.IA3Config(target_modules=TARGETS, feedforward_modules=[]),
            "^model.embed_tokens: IA3 over a Kb",
        ),
        ("llama", lora(modules_to_save=["embed_tokens"]), "embed_tokens: found it in modules_to_save"),
        (
            "tied",
            lora(target_modules=["lm_head"], init_lora_weights="pissa"),
            r"lm_head.weight: found it tied .* expected one of its own for an adapter",
        ),
    ],
)
def test_what_reads_or_trains_a_table(name, config, words):
    model = quantized(name=name)
    before = packed_state(model)
    with pytest.raises(ValueError, match=words):
        get_peft_model(model, config)
    assert type(table_of(model)) is KbitEmbedding
    assert_same_state(packed_state(model), before)


@pytest.mark.parametrize("layer", ["embed_tokens", "lm_head"])
def test_merging_into_what_is_tied(layer):
    """The other would change with it, or would not; so nothing is merged at all."""
    model = adapted(quantized(name="tied"), lora(target_modules=[layer, "q_proj"]))
    before, expected = packed_state(model), logits(model)
    for merging in (model.merge_adapter, lambda: hf_kbit.merge_and_unload(model, dequantize=True)):
        with pytest.raises(ValueError, match=rf"{layer}\.weight: found it tied to a table of embeddings, expected"):
            merging()
    model.unmerge_adapter()
    assert torch.equal(logits(model), expected)
    assert_same_state(packed_state(model), before)


def test_rows_of_a_table_that_has_an_adapter_are_refused():
    with pytest.raises(TypeError, match=r"trainable_token_indices cannot be applied to .*\.lora\.layer\.Embedding"):
        get_peft_model(quantized(), on_tokens(target_modules=TARGETS))


# --- rows that are trained ------------------------------------------------------------------------


def test_trained_rows_start_where_the_table_is(device):
    model = get_peft_model(quantized(device), on_tokens())
    ids = torch.tensor([[1, 3, 7, 120]], device=device)
    assert torch.equal(model(ids).logits, quantized(device)(ids).logits)
    assert torch.equal(copy.deepcopy(model)(ids).logits, model(ids).logits)


def test_trained_rows_of_a_head_of_its_own():
    """``lm_head`` by name, in a model whose head is quantized and not tied."""
    config = lora(target_modules=["q_proj"], trainable_token_indices={"lm_head": TOKENS})
    models = [moved(model) for model in adapters.both(config, module_bits={"lm_head": 4})]
    found = [logits(model) for model in models]
    assert relative(*found) < 1e-5
    with models[0].disable_adapter():
        changed = (logits(models[0]) - found[0]).abs().amax((0, 1)) > 1e-2
    assert changed[TOKENS].all()


def test_two_adapters_with_rows_of_their_own():
    """One after the other; and by name in one batch."""
    models = [moved(model) for model in both(on_tokens())]
    for model in models:
        model.add_adapter("other", lora(target_modules=["q_proj"], trainable_token_indices=[5, 9]))
        table_of(model).token_adapter.trainable_tokens_delta["other"].data += 0.1
        model.eval()
    for names in (["default", "other"], ["other", "__base__"]):
        assert relative(*(logits(model, adapter_names=names) for model in models)) < 1e-5
    for model in models:
        model.set_adapter("other")
    assert relative(*map(logits, models)) < 1e-5
