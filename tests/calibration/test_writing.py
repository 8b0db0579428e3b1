"""What a model writes by itself: drawn as it predicts, the same each time, and the model is as before."""

import copy
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import small
import torch
from architectures import BY_NAME
from byte_tokenizer import byte_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import LlamaForCausalLM

import hf_kbit
from hf_kbit.calibration import stream, tuning, writing
from hf_kbit.calibration.data import PROMPTS, Text
from hf_kbit.calibration.layerwise import Calibration
from hf_kbit.calibration.post_training import MEASURED
from hf_kbit.calibration.writing import OPENING, write
from hf_kbit.nn.weight import packed_layers

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
# Encoders and encoder-decoders, and what reads no tokens.
SILENT = ("bert-masked", "bert-classifier", "nomic-bert", "t5", "vit", "swinv2", "swin2sr", "whisper", "clip")
SILENT += ("wav2vec2", "hubert")


def llama(**settings):
    return small.llama(**SHAPE, initializer_range=0.5, **settings)


def texts() -> list[str]:
    return PROMPTS.read_text("utf-8").split("\n\n")


def tensors(model) -> dict[str, tuple]:
    return {name: (x.data_ptr(), x.dtype, x.device) for name, x in (*model.named_parameters(), *model.named_buffers())}


def test_tokens_are_drawn_as_they_are_predicted(device):
    """Within five deviations of 100,000 draws; one of no probability never, also at either end."""
    scores = torch.tensor([-torch.inf, 0.0, 3.0, 1.0, -torch.inf, 2.0, -4.0, -torch.inf], device=device)
    draws = 100_000
    draw = writing._Draw(torch.device(device), lambda drawn: None)
    left = draw(None, scores.expand(draws, -1))
    assert torch.equal(left.isfinite().sum(1), torch.ones(draws, dtype=torch.int64, device=device))
    found, expected = left.argmax(1).bincount(minlength=len(scores)) / draws, scores.softmax(0)
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_a_sequence_goes_on_from_what_was_drawn():
    """Each token but the first is the likeliest after those before it, for a model that is sure of all of them."""
    model = llama()
    model.lm_head.weight.data *= 1e4
    ids = write(model, 3, 12)
    with torch.no_grad():
        assert torch.equal(ids[:, 1:], model(ids).logits[:, :-1].argmax(-1))


def test_same_each_time_and_the_model_is_as_before():
    model = llama().bfloat16().train()
    model.config.use_cache = False
    model.generation_config.update(do_sample=True, top_k=1, max_new_tokens=3)
    before, state, own = tensors(model), torch.get_rng_state(), model.generation_config
    first, second = write(model, 4, 10), write(model, 4, 10)
    assert torch.equal(first, second) and first.shape == (4, 10) and first.dtype == torch.int64
    assert len({tuple(row) for row in first.tolist()}) == 4
    assert tensors(model) == before and torch.equal(torch.get_rng_state(), state)
    assert model.training and model.generation_config is own and not model.config.use_cache


def test_half_of_what_is_written_to_tune_goes_on_from_a_random_token():
    """After the first one, in any share of it; the rest from the first words of the built-in set, or as it draws."""
    model, words = llama(), {text.encode()[:2] for text in texts()}
    model.lm_head.weight.data *= 1e4  # sure of each token
    drawn = write(model, 1, 2)[0, 1]
    opened = write(model, 320, 8, tune=True, tokenizer=byte_tokenizer())
    alone = write(model, 320, 8, tune=True)
    of_words = torch.tensor([bytes(row[1:3]) in words for row in opened.tolist()])
    for ids, half in ((opened, of_words), (alone, alone[:, 1] == drawn)):
        assert (ids[:, 0] == 1).all() and len(ids[~half, 1].unique()) > 80
        assert 150 < half.sum() < 170 and all(
            10 < part.sum() < 30 for part in (*half.view(8, 40), *half.view(40, 8).T)
        )
    assert write(llama(), 3, 2, tune=True).shape == (3, 2)


def test_it_goes_on_from_the_first_words_of_texts_of_many_kinds():
    """After the first token, evenly over the built-in set, as many as there are sequences; a short one by itself."""
    how, found = {"tokenizer": byte_tokenizer()}, [text.encode() for text in texts()]
    found = [text for text in found if len(text) >= OPENING]
    ids = write(llama(), 3, 200, **how)
    assert ids.shape == (3, 200) and ids[:, 0].tolist() == [1] * 3
    rows = {bytes(row[:OPENING]): bytes(row[OPENING:]) for row in ids[:, 1:].tolist()}
    for text in (found[0], found[(len(found) - 1) // 2], found[-1]):
        assert rows.pop(text[:OPENING]) != text[OPENING:199]
    many = write(llama(), 400, 8, **how)
    assert {bytes(row) for row in many[:, 1:3].tolist()} == {text[:2] for text in found}
    assert len({tuple(row) for row in many.tolist()}) > 350
    assert torch.equal(write(llama(), 3, 3, **how), write(llama(), 3, 3))
    special = TemplateProcessing(single="! $A", special_tokens=[("!", 33)])  # what it adds to any text
    how["tokenizer"].backend_tokenizer.post_processor = special
    assert how["tokenizer"]("a")["input_ids"] == [33, 97] and torch.equal(write(llama(), 3, 200, **how), ids)


def test_words_are_those_of_the_tokenizer_beside_the_model(tmp_path):
    llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    found = write(model, 3, 60)
    assert torch.equal(found, write(llama(), 3, 60, tokenizer=byte_tokenizer()))
    assert not torch.equal(found, write(llama(), 3, 60))
    with pytest.raises(ValueError, match=r"data: found ids from 10 to \d+, expected 0 to 63, as model has"):
        write(llama(vocab_size=64), 3, 60, tokenizer=byte_tokenizer())


def test_it_goes_on_after_an_end():
    model = llama(vocab_size=4, bos_token_id=0, eos_token_id=1, pad_token_id=2)
    torch.nn.init.zeros_(model.lm_head.weight)  # all tokens alike
    ids = write(model, 16, 40)
    assert ids.shape == (16, 40)
    after = [row[row.index(1) + 1 :] for row in ids.tolist() if 1 in row[:20]]
    assert len(after) > 5 and all(len(set(row)) > 1 for row in after)


def test_where_a_sequence_starts():
    """At the begin, or the end, that the model has in its vocabulary; else anywhere."""
    for begin, end, start in ((7, 8, 7), (None, 8, 8), (None, [9, 8], 9), (256, 8, 8)):
        assert write(llama(bos_token_id=begin, eos_token_id=end), 3, 4)[:, 0].tolist() == [start] * 3
    first, again = (write(llama(bos_token_id=None, eos_token_id=None), 9, 2)[:, 0] for _ in range(2))
    assert len(set(first.tolist())) > 4 and first.max() < 256 and torch.equal(first, again)
    pairs = write(llama(bos_token_id=None, eos_token_id=None), 320, 4, tune=True)[:, :2]
    assert (pairs[:, 0] == pairs[:, 1]).sum() < 20 and len(pairs[:, 0].unique()) > 150


def test_amounts():
    assert write(llama(max_position_embeddings=16)).shape == (writing.AMOUNTS["cpu"][0], 16)
    assert write(llama(max_position_embeddings=4), 2, 3).shape == (2, 3)
    for name in ("sequences", "length"):
        with pytest.raises(ValueError, match=f"{name}: found 0, expected 1 or more"):
            write(llama(), **{name: 0})


def test_on_a_cpu_it_is_written_in_float32():
    for dtype in (torch.bfloat16, torch.float16):
        model, seen = llama().to(dtype), set()
        model.lm_head.register_forward_hook(
            lambda _, args, output, seen=seen: seen.update((args[0].dtype, output.dtype))
        )
        ids = write(model, 4, 20)
        assert seen == {torch.float32} and torch.equal(ids, write(copy.deepcopy(model).float(), 4, 20))


def test_a_short_text_is_filled_up():
    """To as many tokens as are written without one, a third of all by what they count; not if an amount is asked for,
    or token ids are given. Texts of both kinds are in any share."""
    model, tokenizer, text = llama(), byte_tokenizer(), "to be filled up" * 20
    sequences, length = writing.AMOUNTS["cpu"]
    counted = []

    def read(data, amount=(None, None), little=False, of=model):
        found, name, counts = writing.chosen(of, Text(data, tokenizer, *amount), little, amount)
        counted.append(counts)
        return [tuple(row) for row in map(torch.Tensor.tolist, found.ids(of))], name

    rows, name = read(text)
    own = [tuple(row) for row in write(model, sequences - 2, length, tokenizer=tokenizer).tolist()]
    assert name == f"the data (1 x 300 tokens) and text that the model wrote ({sequences - 2} x {length} tokens)"
    assert sorted(rows) == sorted([*own, tuple(text.encode())])
    assert counted[-1][rows.index(tuple(text.encode()))] * 300 == pytest.approx((sequences - 2) * length / 2)
    assert sorted(counted[-1])[:-1] == [1.0] * len(own)
    many, _ = read(text, (None, 32))  # 10 of 30 tokens, then 54 of 32
    assert [len(row) for row in many].count(30) == 10 and len(many) == sequences
    assert all(1 <= sum(len(row) == 30 for row in part) <= 9 for part in (many[:32], many[32:]))
    assert set(read(text * 44) and counted[-1]) == {1.0}  # 13,200 tokens are more than a third
    whole = text * 55  # 16,500 tokens
    ids, name = torch.randint(256, (2, 9)), "the data"
    assert read(whole) == (read(whole, (128, None))[0], name) and counted[-1] is None
    assert read(text, (3, None)) == read(text, little=True) == ([tuple(text.encode())], name)
    assert read(ids) == ([tuple(row) for row in ids.tolist()], name)
    encoder = BY_NAME["bert-masked"].build()
    assert read("a" * 10, of=encoder)[1] == name


def test_more_is_written_for_a_trellis(monkeypatch):
    """By itself, where no amount is asked for; not to fill up a text, to tune, or for widths of what "weighted" does.
    Levels get as much as before."""
    monkeypatch.setattr(writing, "AMOUNTS", {"": (2, 16)})
    monkeypatch.setattr(writing, "TRELLIS_SEQUENCES", {"": 5})
    monkeypatch.setattr(tuning, "AMOUNTS", {"": (4, 16)})
    read, run = [], Calibration.run
    monkeypatch.setattr(Calibration, "run", lambda self: read.append(len(self.text)) or run(self))

    def told(word, line):
        if word == "measuring":
            read.append(int(line.split(" on ")[1].split()[0]) // 16)

    trellis = {"bits": 2, "codebook": "trellis"}
    for how in (trellis, {"bits": 2}, trellis | {"sequences": 3}, trellis | {"tune": 1}):
        hf_kbit.calibrate(llama(), **how)
    hf_kbit.calibrate(llama(), "filled up", tokenizer=byte_tokenizer(), **trellis)
    assert read == [5, 2, 3, 4, 2]
    for how, count in (({}, 5), ({"method": "weighted"}, 2)):
        read.clear()
        hf_kbit.quantize_model(llama(), calibrate=True, report=told, **trellis | {"bits": 2.5} | how)
        assert read == [min(count, MEASURED[0]), count]


@pytest.mark.gpu
def test_a_model_on_the_cpu_is_on_the_gpu_while_it_writes():
    model = llama().bfloat16()
    before, seen = tensors(model), set()
    model.lm_head.register_forward_hook(lambda _, args, output: seen.update((output.device.type, output.dtype)))
    ids = write(model, 4, 10)
    held = torch.cuda.memory_allocated()  # by what ran before, and by cuBLAS from its first product on
    assert seen == {"cuda", torch.bfloat16} and ids.device.type == "cpu" and tensors(model) == before
    assert torch.equal(ids, write(model, 4, 10, device="cuda"))
    assert torch.cuda.memory_allocated() - held < 1e6


@pytest.mark.parametrize("name", BY_NAME)
def test_architectures(name):
    """Decoders write, also those that can see pictures; the others are known beforehand, without a warning."""
    model = BY_NAME[name].build()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        ids = write(model, 2, 6)
    assert ids is None if name in SILENT else ids.shape == (2, 6)


def memory(monkeypatch, total: int = 10**9, available: int = 10**9):
    monkeypatch.setattr(stream.psutil, "virtual_memory", lambda: SimpleNamespace(total=total, available=available))


def test_a_model_that_does_not_fit(monkeypatch):
    """To a machine that is too small it writes in 4 bits; if it is too small for that, it gives another text; memory
    that others take is an error. Counted as free is what is copied: a float32 model on a CPU needs no room."""
    model = llama().bfloat16()
    needed, before = 4 * sum(x.numel() for x in (*model.parameters(), *model.buffers())), tensors(model)
    memory(monkeypatch, total=needed)
    expected = write(model, 4, 60)
    memory(monkeypatch, total=needed - 1)
    copies, quantize = [], writing.quantize_layers
    with monkeypatch.context() as patch:
        patch.setattr(writing, "quantize_layers", lambda plan, *how: copies.append(plan.model) or quantize(plan, *how))
        ids = write(model, 4, 60)
    assert {layer.bits for layer in packed_layers(copies[0]).values()} == {4} and len(packed_layers(copies[0])) == 7
    assert ids.shape == (4, 60) and not torch.equal(ids, expected) and torch.equal(ids[:, :1], expected[:, :1])
    assert tensors(model) == before and not packed_layers(model)
    memory(monkeypatch, total=needed // 8)
    with pytest.warns(UserWarning, match=r"LlamaForCausalLM cannot write .*more memory than there is.* built-in text"):
        assert write(model, 1, 2) is None
    memory(monkeypatch, available=needed - 1)
    with pytest.raises(
        MemoryError, match=r"found less than .*, and 0.0 GB free on cpu, .* for the weights of LlamaForCausalLM"
    ):
        write(model, 1, 2)
    memory(monkeypatch, available=needed + 1000)
    assert write(model, 1, 2) is not None
    memory(monkeypatch, available=0)
    assert write(model.float(), 1, 2) is not None


def test_as_many_at_once_as_the_machine_has_memory_for(monkeypatch):
    """And not as many as are free: what is drawn depends on it."""
    model, sizes = llama(), []
    generate = model.generate

    def counted(ids, **keywords):
        sizes.append(len(ids))
        return generate(ids, **keywords)

    model.generate = counted
    weights, config = 4 * sum(x.numel() for x in (*model.parameters(), *model.buffers())), model.config
    keys = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    each = 6 * 2 * config.num_hidden_layers * keys * 4 + 16 * config.vocab_size
    memory(monkeypatch, total=weights + int(2.5 * each / writing.ROOM))
    texts = [write(model, 5, 6)]
    memory(monkeypatch, total=weights + int(2.5 * each / writing.ROOM), available=0)
    texts.append(write(model, 5, 6))
    assert sizes == [2, 2, 1] * 2 and torch.equal(*texts) and texts[0].shape == (5, 6)
    memory(monkeypatch, total=weights)
    assert write(model, 2, 6).shape == (2, 6) and sizes[6:] == [1, 1]


def test_what_fails_while_it_writes(monkeypatch):
    """The code of a model: another text, and the model is as before. Memory that is short, or NaN, is an error, for
    another text would give other bytes."""
    model = llama().bfloat16()
    before = tensors(model)
    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="ZeroDivisionError"):
        patch.setattr(model.lm_head, "forward", lambda *_: 1 / 0)
        assert write(model, 1, 2) is None
    assert tensors(model) == before
    for error in (torch.OutOfMemoryError("none left"), MemoryError("none left")):
        with monkeypatch.context() as patch, pytest.raises(type(error), match="none left"):
            patch.setattr(model, "generate", Mock(side_effect=error))
            write(model, 5, 6)
    model.lm_head.weight.data[3, 3] = torch.nan
    with pytest.raises(ValueError, match="logits: found NaN where the model writes"):
        write(model, 2, 4)


def test_calibrate_reads_it(device):
    """Computing in float32 on a CPU, in layers of the model's dtype; but for gradients of a few tokens, with which
    others are compared."""
    model = llama().bfloat16().to(device)
    other, ids, seen = copy.deepcopy(model), write(model, 6, 30), set()

    def see(_, args, output):
        if output.shape[1] > 16:
            seen.add(output.dtype)

    model.model.layers[0].mlp.up_proj.register_forward_hook(see)
    arguments = {"bits": 3, "device": device}
    found = hf_kbit.calibrate(model, sequences=6, length=30, **arguments)
    expected = hf_kbit.calibrate(other, ids, **arguments)
    assert all(torch.equal(x, expected.state_dict()[name]) for name, x in found.state_dict().items())
    assert seen == {stream.dtype_on(torch.device(device), torch.bfloat16)}
    assert found.model.layers[0].mlp.up_proj.to_linear().weight.dtype == found.dtype == torch.bfloat16
