"""The token ids that are made of each kind of data, and the built-in set of texts."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    BatchEncoding,
    CanineTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_kbit
from hf_kbit.calibration import data as calibration_data
from hf_kbit.calibration.data import CHARACTERS, PROMPTS, Text, tokenizer_of

datasets = pytest.importorskip("datasets")

ROWS = ["The first row,\nof two lines.", "Ein zweiter: größer!", "第三行"]
TEXT = "\n\n".join(ROWS)


SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}


def llama(positions: int = 4096, vocab_size: int = 256) -> LlamaForCausalLM:
    return LlamaForCausalLM(LlamaConfig(max_position_embeddings=positions, vocab_size=vocab_size, **SHAPE))


def cut(given, positions: int = 4096, tokenizer=None, **choices) -> torch.Tensor:
    return torch.stack(Text(given, tokenizer or byte_tokenizer(), **choices).ids(llama(positions)))


def read(ids: torch.Tensor) -> list[str]:
    return [bytes(row).decode() for row in ids.tolist()]


# --- kinds of data --------------------------------------------------------------------------------


def test_every_kind_of_text_is_the_same_text(tmp_path):
    (file := tmp_path / "rows.txt").write_bytes(TEXT.encode())
    for data in (
        TEXT,
        file,
        ROWS,
        (row for row in ROWS),
        ["", *ROWS[:2], " \n", ROWS[2], ""],
        datasets.Dataset.from_dict({"id": [1, 2, 3], "text": ROWS}),
        datasets.Dataset.from_dict({"text": ROWS}).to_iterable_dataset(),
        datasets.Dataset.from_dict({"text": ["no"] * 3, "body": ROWS})["body"],
    ):
        ids = cut(data)
        assert ids.dtype == torch.int64 and read(ids) == [TEXT], data
    assert torch.equal(cut(None), cut(PROMPTS))
    ids = torch.randint(256, (150, 3))
    assert torch.equal(cut(ids, sequences=2), ids)


def test_calibrate_takes_so_much_of_it():
    choices = {"tokenizer": byte_tokenizer(), "sequences": 3, "length": 9}
    torch.manual_seed(0)
    model, other = llama(16), llama(16)
    other.load_state_dict(model.state_dict())
    ids = cut(TEXT, **choices)
    found, expected = (
        hf_kbit.calibrate(each, data, method="weighted", **how).state_dict()
        for each, data, how in ((model, TEXT, choices), (other, ids, {}))
    )
    assert ids.shape == (3, 9) and all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# --- cutting --------------------------------------------------------------------------------------


def test_length_of_sequences():
    """At most as many tokens as the model, the tokenizer and the caller want, so that the text is in all of them."""
    text, tokenizer = "0123456789abc" * 400, byte_tokenizer()
    for positions, asked, length in ((64, None, 64), (2049, None, 2048), (4096, 5, 5)):
        rows = read(cut(text, positions, length=asked, sequences=2000))
        count = -(-5200 // length)
        assert (
            {*map(len, rows)} == {5200 // count}
            and len(rows) == count
            and "".join(rows) == text[: 5200 // count * count]
        )
        few = read(cut(text, positions, length=asked, sequences=2))
        assert {*map(len, few)} == {min(length, 2600)}
    assert read(cut("y" * 63, 64)) == ["y" * 63]
    tokenizer.model_max_length = 62  # as for RoBERTa, two of whose position embeddings are no positions
    assert cut("x" * 500, 64, tokenizer).shape == (9, 55)


def test_each_sequence_begins_and_ends_as_a_text():
    """With the tokens that the tokenizer adds, within the length, whoever wrote the tokenizer."""
    text, fast, slow = "0123456789abc" * 100, byte_tokenizer(), CanineTokenizer()
    fast.backend_tokenizer.post_processor = TemplateProcessing(
        single="< $A > >", special_tokens=[("<", 60), (">", 62)]
    )
    slow.model_max_length = 2048
    begin, end = slow("")["input_ids"]
    model = llama(vocab_size=end + 1)
    for length in (4, 10, 1000):
        rows = read(cut(text, tokenizer=fast, length=length, sequences=2000))
        own = 1300 // -(-1300 // (length - 3))
        assert all(len(row) == own + 3 <= length and row[0] == "<" and row[-2:] == ">>" for row in rows)
        assert "".join(row[1:-2] for row in rows) == text[: 1300 // own * own]
        ids = torch.stack(Text(text, slow, length=length, sequences=2000).ids(model))
        own = 1300 // -(-1300 // (length - 2))
        assert ids[:, 0].eq(begin).all() and ids[:, -1].eq(end).all() and ids.shape[1] == own + 2 <= length
        assert read(ids[:, 1:-1].reshape(1, -1)) == [text[: 1300 // own * own]]
    assert read(cut("ab", tokenizer=fast, length=5)) == ["<ab>>"]
    with pytest.raises(ValueError, match="length: found 3, expected more than the 3 that the tokenizer adds"):
        cut(text, tokenizer=fast, length=3)
    for length in (1, 5):
        with pytest.raises(ValueError, match=r"data: found shape \[1, 0\], expected \[sequences"):
            cut("", tokenizer=fast, length=length)


def test_sequences_are_spread_over_the_text():
    rows = [f"{place}" * 64 for place in range(10)]
    for sequences, places in ((1, [4]), (2, [0, 9]), (3, [0, 4, 9]), (10, range(10))):
        assert read(cut("".join(rows) + "rest", 64, sequences=sequences)) == [rows[place] for place in places]


@pytest.mark.parametrize("sequences", [1, 5])
def test_of_a_very_long_text_only_what_is_needed_is_tokenized(sequences):
    pieces = 1000
    text = "".join(f"{place:03d}," * (64 * CHARACTERS // 4) for place in range(pieces))
    tokenizer = Mock(side_effect=byte_tokenizer(), model_max_length=64)
    found = [int(row.split(",")[1]) for row in read(cut(text, tokenizer=tokenizer, sequences=sequences))]
    assert len(tokenizer.call_args[0][0]) == sequences * 64 * CHARACTERS
    expected = [pieces // 2] if sequences == 1 else [0, 250, 500, 750, 999]
    assert len(found) == sequences and all(abs(f - e) <= 1 for f, e in zip(found, expected, strict=True))


# --- what a tokenizer returns ---------------------------------------------------------------------

LENGTHS = (9, 4, 9, 1, 7, 9)


def padded(side: str, rows, padding: int = 0) -> BatchEncoding:
    most, found = max(map(len, rows)), {"input_ids": [], "attention_mask": []}
    for row in rows:
        left = side == "left" if side != "both" else len(row) % 2
        empty = row.new_full((most - len(row),), padding)
        found["input_ids"].append(torch.cat([empty, row] if left else [row, empty]))
        ones = torch.cat([empty * 0, row * 0 + 1] if left else [row * 0 + 1, empty * 0])
        found["attention_mask"].append(ones)
    return BatchEncoding({name: torch.stack(own) for name, own in found.items()})


def rows_of_lengths() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(5, 250, (length,), generator=generator) for length in LENGTHS]


@pytest.mark.parametrize("how", [{}, {"tune": 5}, {"method": "weighted", "resume": True}], ids=str)
def test_padding_is_left_out(how, tmp_path):
    """On the left, on the right, or on both sides in turn; whatever it is. As of rows that have none."""
    rows, found = rows_of_lengths(), []
    lists = {"input_ids": [row.tolist() for row in rows]}
    for place, data in enumerate((lists, *(padded(side, rows, 7) for side in ("left", "right", "both")))):
        torch.manual_seed(0)
        folder = {"resume": tmp_path / f"{place}"} if how.get("resume") else {}
        model = hf_kbit.calibrate(llama(), data, bits=3, batch=2, **how | folder)
        found.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
    assert all(torch.equal(own[name], x) for own in found[1:] for name, x in found[0].items())


def test_padding_is_left_out_of_widths_and_figures():
    rows, model = rows_of_lengths(), llama()
    lists, data = {"input_ids": rows}, padded("left", rows)
    configs = [hf_kbit.choose_widths(model, own, 3.5, transform="none") for own in (lists, data)]
    assert configs[0] == configs[1] and len(set(configs[0].module_bits.values())) > 0
    figures = [hf_kbit.evaluate(model, own) for own in (lists, data)]
    assert figures[0] == figures[1] and figures[0].tokens == sum(LENGTHS) - len(LENGTHS)


def test_ids_that_look_padded_are_warned_of(monkeypatch):
    rows, told = rows_of_lengths(), []
    monkeypatch.setattr(calibration_data.logger, "warning", lambda line, *how: told.append(line % how))
    model = llama()
    model.config.pad_token_id = 0
    Text(padded("left", rows)["input_ids"]).ids(model)
    (line,) = told
    assert "found 3 sequences that begin or end with padding (token 0)" in line and "attention_mask" in line
    Text(padded("left", rows)).ids(model)
    Text(padded("left", rows, 9)["input_ids"]).ids(model)
    assert len(told) == 1


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "limit"),
    [("xlnet", None), ("t5", None), ("mpt", 2048), ("led", 1024), ("gpt2", 1024), ("bert", 512), ("llama", 2048)],
)
def test_positions(kind, limit):
    assert calibration_data.positions(CONFIG_MAPPING[kind]()) == limit


def test_data_that_is_wrong(tmp_path):
    for data, message in (
        (5, "data: found int, expected token ids"),
        (torch.zeros(2, 3), "data: found torch.float32, expected token ids"),
        (datasets.DatasetDict(text=datasets.Dataset.from_dict({"text": ROWS})), "data: found DatasetDict, expected"),
        ({"text": ROWS}, "data: found dict, expected"),
        (["text", 7], "data: found int as row 1, expected text"),
        (b"bytes", "data: found int as row 0, expected text"),
        (["text", None], "data: found NoneType as row 1, expected text"),
    ):
        with pytest.raises(TypeError, match=message):
            cut(data)
    (photo := tmp_path / "photo.jpg").write_bytes(b"\xff\xd8\xff")
    for data, message in (
        (datasets.Dataset.from_dict({"id": [1], "body": ["a"]}), r"columns \['id', 'body'\], .*dataset\['id'\]"),
        (__file__, r"data: found the name of a file, '.*test_data.py', expected a text, or pathlib.Path\("),
        ("", r"data: found shape \[1, 0\], expected \[sequences"),
        (
            {"input_ids": [[1, 2]], "attention_mask": [[1]]},
            "found 1 x 2 tokens in input_ids, 1 x 1 tokens in attention",
        ),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, r"data: found shape \[1, 0\], expected \[sequences"),
        ([" ", ""], r"data: found shape \[1, 0\], expected \[sequences"),
        (photo, "photo.jpg: found bytes that are no UTF-8, expected text"),
    ):
        with pytest.raises(ValueError, match=message):
            cut(data)
    with pytest.raises(FileNotFoundError, match=r"none\.txt"):
        cut(Path("none.txt"))
    with pytest.raises(ValueError, match="tokenizer: found none, expected one"):
        Text("text").ids(llama())
    for name in ("sequences", "length"):
        with pytest.raises(ValueError, match=f"{name}: found 0, expected 1 or more"):
            cut("text", **{name: 0})


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "gpt2", "gpt_neox", "bert", "t5"])
def test_a_tokenizer_that_is_made_up_is_none(kind, tmp_path):
    """As of a folder that has but the config of a model, which tells Transformers the kind."""
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    assert tokenizer_of(tmp_path) is None
    byte_tokenizer().save_pretrained(tmp_path)
    assert tokenizer_of(tmp_path)("ab")["input_ids"] == [97, 98]


# --- the built-in set -----------------------------------------------------------------------------

SCRIPTS = ("а-я", "α-ω", "א-ת", "ء-ي", "क-ह", "ক-হ", "ก-ฮ", "ぁ-ん", "가-힣", "一-龥", "ạ-ỹ")


def test_the_built_in_set_is_diverse():
    """Large, nothing in it twice, many alphabets."""
    paragraphs = PROMPTS.read_bytes().decode("utf-8").split("\n\n")
    assert len(paragraphs) >= 170 and len({tuple(text.split()[:4]) for text in paragraphs}) == len(paragraphs)
    for first, last in (script.split("-") for script in SCRIPTS):
        assert sum(first <= character <= last for text in paragraphs for character in text) >= 50, first
