"""evaluate() against its definition, spelt out in float64 one predicted token at a time."""

import copy
import math

import pytest
import small
import torch
from byte_tokenizer import byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertLMHeadModel, CanineTokenizer, LlamaForCausalLM, LlamaModel, T5Config, T5Model

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.calibration import evaluation
from hf_kbit.calibration.evaluation import evaluate
from hf_kbit.calibration.writing import write

VOCABULARY, POSITIONS = 67, 64
TOKENS = torch.randint(VOCABULARY, (120,), generator=torch.Generator().manual_seed(0))
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}


def llama(vocabulary: int = VOCABULARY, positions: int = POSITIONS) -> LlamaForCausalLM:
    """Weights so large that its distributions, and those of its quantized copy, are far from uniform and differ."""
    sizes = {"vocab_size": vocabulary, "max_position_embeddings": positions}
    return small.llama(**sizes, initializer_range=0.3, attention_dropout=0.5, **SHAPE)


@pytest.fixture(scope="module")
def reference():
    return llama()


@pytest.fixture(scope="module")
def quantized(reference):
    return LlamaForCausalLM.from_pretrained(
        None,
        config=reference.config,
        state_dict=reference.state_dict(),
        quantization_config=KbitConfig(bits=2),
    )


@torch.no_grad()
def by_definition(model, reference, tokens, window, stride):
    """Each token's window is the first that reaches it; nothing but what stands before the token goes in."""
    model, reference = copy.deepcopy(model).dequantize().double(), copy.deepcopy(reference).double()
    rows = []
    for token in range(1, len(tokens)):
        begin = stride * max(0, math.ceil((token - window + 1) / stride))
        if begin == token:
            continue  # the first of a disjoint window
        p, q = (each(tokens[None, begin:token]).logits[0, -1].softmax(-1) for each in (model, reference))
        rows.append(
            [-p[tokens[token]].log(), -q[tokens[token]].log(), (q * (q / p).log()).sum(), p.argmax() == q.argmax()]
        )
    rows = torch.tensor(rows).double()
    nll, reference_nll, divergence, agreement = rows.mean(0).tolist()
    # Of so few tokens 99% and 99.9% are all but none: the test of percentiles has more.
    return math.exp(nll), len(rows), math.exp(reference_nll), divergence, rows[:, 2].max().item(), agreement


def figures(found):
    of_models = found.perplexity, found.tokens, found.reference_perplexity
    return *of_models, found.kl_divergence, found.kl_p999, found.top1_agreement


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_definition(reference, quantized, data):
    tokens = TOKENS[: data.draw(st.integers(2, 40), "length")]
    window = data.draw(st.integers(2, 24), "window")
    stride = data.draw(st.none() | st.integers(1, window), "stride")
    found = evaluate(quantized, tokens, reference=reference, window=window, stride=stride)
    expected = by_definition(quantized, reference, tokens, window, stride or window)
    # float32 against float64: logits of some 10 are off by 1e-6 or so, the two lose up to 5e-6 together.
    assert figures(found) == pytest.approx(expected, rel=5e-5, abs=5e-6)


def test_disjoint_windows_are_those_of_published_tables(reference):
    """GPTQ's script: whole windows alone, the mean of the loss that Transformers computes."""
    whole = TOKENS[: len(TOKENS) // 32 * 32]
    with torch.no_grad():
        losses = [reference(piece[None], labels=piece[None]).loss for piece in whole.split(32)]
    assert len(whole) < len(TOKENS)
    found = evaluate(reference, whole, window=32)
    assert found.perplexity == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-5)
    assert (found.tokens, found.window, found.stride) == (3 * 31, 32, 32)
    assert evaluate(reference, TOKENS[:POSITIONS], window=2048).tokens == POSITIONS - 1, "one that is beyond the text"


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_against_itself(reference, device):
    model = copy.deepcopy(reference).to(device)
    found = evaluate(model, TOKENS, reference=copy.deepcopy(model), window=32)
    assert (found.kl_divergence, found.top1_agreement) == (0, 1)
    assert found.perplexity == found.reference_perplexity


def test_a_text_is_what_its_ids_are(tmp_path):
    """All of it, of any kind, by the tokenizer of the model or of its reference."""
    model, rows = llama(256), ["First, an é.", "Then more of it."]
    (tmp_path / "text").write_text("\n\n".join(rows))
    ids = torch.tensor(list("\n\n".join(rows).encode()))
    for data in ("\n\n".join(rows), iter(rows), tmp_path / "text"):
        assert evaluate(model, data, tokenizer=byte_tokenizer(), window=16) == evaluate(model, ids, window=16)
    for name in ("model", "reference"):
        model.save_pretrained(tmp_path / name)
    byte_tokenizer().save_pretrained(tmp_path / "reference")
    models = [LlamaForCausalLM.from_pretrained(tmp_path / name) for name in ("model", "reference")]
    assert evaluate(models[0], rows, reference=models[1]) == evaluate(model, ids, reference=model)


def test_sequences_are_texts_of_their_own(quantized, reference):
    """Means are over the predictions of all, none of which reaches across from one to another."""
    rows, models = TOKENS.view(4, 30), {"reference": reference, "window": 16}
    found, parts = evaluate(quantized, rows, **models), [evaluate(quantized, row, **models) for row in rows]
    assert found.tokens == sum(part.tokens for part in parts) == 4 * 28
    for name in ("kl_divergence", "top1_agreement"):
        assert getattr(found, name) == pytest.approx(sum(getattr(part, name) for part in parts) / 4, rel=1e-5)


def test_without_data_the_reference_writes_it(quantized, reference):
    assert evaluate(quantized, None, reference=reference) == evaluate(quantized, write(reference), reference=reference)
    assert evaluate(quantized, None) == evaluate(quantized, write(quantized))
    assert not torch.equal(write(quantized), write(reference))


def test_without_data_it_is_written_with_a_tokenizer():
    model, how = llama(256), {"tokenizer": byte_tokenizer()}
    expected = evaluate(model, write(model, **how), reference=model)
    assert evaluate(model, None, reference=model, **how) == expected != evaluate(model, None, reference=model)


@pytest.mark.parametrize("device", DEVICES)
def test_chunks_change_nothing(reference, quantized, monkeypatch, device):
    """Nor does a reference."""
    models = {"model": copy.deepcopy(quantized).to(device), "reference": copy.deepcopy(reference).to(device)}
    whole = evaluate(data=TOKENS, window=32, **models)
    for rows in (1, 5, 31, 1000):
        monkeypatch.setattr(evaluation, "CHUNK", rows * VOCABULARY + 1)
        assert figures(evaluate(data=TOKENS, window=32, **models)) == pytest.approx(figures(whole), rel=1e-6)
    alone = evaluate(models["model"], TOKENS, window=32)
    assert figures(alone) == (pytest.approx(whole.perplexity), whole.tokens, None, None, None, None)


def test_percentiles_and_means():
    """Divergences are 0 to 1999; and means are float64: of 100,000 tokens a float32 sum would be off by 1e-5."""
    found = evaluation.summary(torch.ones(4, 2000) * torch.randperm(2000), 2, 2)
    assert (found.kl_p99, found.kl_p999) == (1979, 1997)
    assert evaluation.summary(torch.full((1, 100_000), 10.1), 2, 2).perplexity == pytest.approx(
        math.exp(torch.tensor(10.1).double()), rel=1e-9
    )


@pytest.mark.gpu
def test_memory():
    """The logits of one window from each model, and half a GiB."""
    model, reference = (llama(128_256, 2048).to("cuda", torch.bfloat16) for _ in range(2))
    tokens = torch.randint(128_256, (6144,))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    evaluate(model, tokens, reference=reference)
    assert torch.cuda.max_memory_allocated() - before < 2 * 2 * 2048 * 128_256 + (1 << 29)


@pytest.mark.gpu
def test_models_on_two_devices(reference, quantized):
    there = copy.deepcopy(reference).to("cuda")
    expected = evaluate(quantized, TOKENS, reference=reference, window=32)
    for found in (
        evaluate(quantized, TOKENS, reference=there, window=32),
        evaluate(copy.deepcopy(quantized).to("cuda"), TOKENS.to("cuda"), reference=reference, window=32),
    ):
        assert figures(found) == pytest.approx(figures(expected), rel=1e-3)


def test_adapters_count(reference, quantized):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(copy.deepcopy(quantized), config)
    found = evaluate(adapted, TOKENS, reference=reference, window=32)
    merged = hf_kbit.merge_and_unload(adapted, dequantize=True)
    assert figures(found) == pytest.approx(figures(evaluate(merged, TOKENS, reference=reference, window=32)), rel=1e-3)
    assert found.perplexity != pytest.approx(evaluate(quantized, TOKENS, window=32).perplexity, rel=3e-3)


def test_modes_are_restored(reference):
    model = copy.deepcopy(reference).train()
    model.model.norm.eval()
    before = [module.training for module in model.modules()]
    assert evaluate(model, TOKENS, window=32) == evaluate(reference, TOKENS, window=32), "dropout was on"
    assert [module.training for module in model.modules()] == before
    with torch.no_grad():
        model.lm_head.weight.fill_(math.inf)
    with pytest.raises(ValueError, match="infinite"):
        evaluate(model, TOKENS, window=32)
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(
    ("value", "name", "rows"), [(math.nan, "model", 2), (math.inf, "reference", 1000), (-math.inf, "model", 1000)]
)
def test_logits_that_are_not_finite(reference, monkeypatch, value, name, rows):
    """One logit of the third window, before its tenth token."""
    broken, windows = copy.deepcopy(reference), iter(range(9))

    def spoil(module, inputs, logits):
        if next(windows) == 2:
            logits[0, 8, 5] = value

    broken.lm_head.register_forward_hook(spoil)
    models = {"model": reference, "reference": reference, name: broken}
    monkeypatch.setattr(evaluation, "CHUNK", rows * VOCABULARY)
    with pytest.raises(ValueError, match=rf"^{name}: found NaN or infinite logits where it predicts token 41,"):
        evaluate(data=TOKENS, window=16, **models)


def test_a_perplexity_beyond_float64(reference):
    model = copy.deepcopy(reference)
    with torch.no_grad():
        model.lm_head.weight *= 1e5
    assert evaluate(model, TOKENS, window=32).perplexity == math.inf


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"data": 5, "tokenizer": byte_tokenizer()}, TypeError, "data: found int, expected token ids"),
        ({"data": "a text"}, ValueError, "tokenizer: found none, expected one, for the data is a text"),
        ({"data": "", "tokenizer": CanineTokenizer()}, ValueError, r"data: found shape \[0\], expected \[length\] or"),
        ({"data": TOKENS.int()}, TypeError, "data: found torch.int32, expected token ids, a tensor of int64"),
        ({"data": TOKENS[:1]}, ValueError, r"data: found shape \[1\], expected \[length\] or"),
        ({"data": TOKENS[:, None]}, ValueError, r"data: found shape \[120, 1\], expected \[length\] or"),
        ({"data": TOKENS[None, :0]}, ValueError, r"data: found shape \[1, 0\], expected \[length\] or"),
        ({"data": TOKENS + 1}, ValueError, "data: found ids from 1 to 67, expected 0 to 66, as model has"),
        ({"data": TOKENS - 1}, ValueError, "data: found ids from -1 to 65, expected 0 to 66"),
        ({"window": 1}, ValueError, "window: found 1, expected 2 or more"),
        ({"window": 65}, ValueError, "window: found 65 tokens, expected at most 64, the positions of model"),
        ({"stride": 0}, ValueError, "stride: found 0, expected 1 to 32"),
        ({"stride": 33}, ValueError, "stride: found 33, expected 1 to 32"),
        ({"reference": llama(80)}, ValueError, "reference: found a vocabulary of 80 tokens, expected 67"),
    ],
)
def test_arguments_out_of_range(reference, arguments, error, message):
    with pytest.raises(error, match=message):
        evaluate(reference, **{"data": TOKENS, "window": 32, **arguments})


def test_models_that_predict_no_next_token(reference):
    bert = BertLMHeadModel(BertConfig(vocab_size=VOCABULARY, **SHAPE))
    with pytest.raises(ValueError, match="reference: found bert, an encoder, expected a causal language model"):
        evaluate(reference, TOKENS, reference=bert, window=32)
    bert.config.is_decoder = True
    assert evaluate(bert, TOKENS, window=32).tokens > 0
    t5 = T5Model(T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=32, d_kv=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="model: found t5, which has an encoder and a decoder"):
        evaluate(t5, TOKENS)
    headless = LlamaModel(reference.config)
    with pytest.raises(ValueError, match="LlamaModel: found an output without logits"):
        evaluate(headless, TOKENS, window=32)
