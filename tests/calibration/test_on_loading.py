"""``KbitConfig(calibrate=...)``: calibrating in the call that loads a model."""

import copy
import json
from pathlib import Path

import gpt_oss
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from calibration.test_resume import Counting, Killed
from small import llama, same, tensors
from transformers import AutoModelForCausalLM, BertConfig, BertModel, PreTrainedModel, logging

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.calibration.solving import METHODS
from hf_kbit.integrations.transformers.cards import model_card

IDS = torch.randint(256, (8, 24), generator=torch.Generator().manual_seed(0))
TEXT = ["Some words, which are not many. " * 20, "And others, of which there are more. " * 20]


@pytest.fixture
def loads_nothing(monkeypatch):
    fail = staticmethod(lambda *_, **__: pytest.fail("loaded"))
    monkeypatch.setattr(PreTrainedModel, "_load_pretrained_model", fail)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A model with a tokenizer."""
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder, device_map="cpu", **config):
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=KbitConfig(**{"bits": 3, **config}), device_map=device_map
    )


@pytest.mark.parametrize("device_map", [None, "cpu", "auto", {"": "cpu"}])
def test_device_maps(folder, device_map):
    model = load(folder, device_map, calibrate="weighted")
    assert same(tensors(model), tensors(hf_kbit.calibrate(folder, bits=3, method="weighted", device=model.device)))


@pytest.mark.parametrize("enabled", [True, False])
def test_bars_are_shown_where_transformers_shows_its_own(enabled, folder, capfd):
    try:
        if not enabled:
            logging.disable_progress_bar()
        load(folder, calibrate="own")
    finally:
        logging.enable_progress_bar()
    told = capfd.readouterr().err
    assert [bar in told for bar in ("Loading weights:", "writing:", "weighing:", "calibrating:")] == [enabled] * 4


@pytest.mark.parametrize(
    ("calibrate", "others", "as_calibrate", "told"),
    [
        ("weighted", {}, {"method": "weighted"}, "weighted, on 16 x 256 tokens of the built-in text"),
        (
            "own",
            {"codebook": "trellis"},
            {"codebook": "trellis"},
            "feedback, on 64 x 256 tokens of text that the model",
        ),
        (IDS, {"module_bits": {"down_proj": 4}}, {"module_bits": {"down_proj": 4}}, "feedback, on 8 x 24 tokens"),
        (TEXT, {"tune": 2}, {"tune": 2}, "feedback, on 1 x 2,048 tokens of the data"),
        (
            TEXT[:1],
            {},
            {},
            f"the data (1 x {len(TEXT[0])} tokens",
        ),  # which then count more
    ],
    ids=["weighted", "own", "ids", "text", "short text"],
)
def test_is_as_calibrate(folder, tmp_path, calibrate, others, as_calibrate, told):
    """To the same bytes; files say nothing of it, the card does."""
    if others.get("tune"):
        calibrate = [*calibrate, *calibrate, *calibrate, *calibrate]
    model = load(folder, calibrate=calibrate, **others)
    data = None if isinstance(calibrate, str) else calibrate
    expected = hf_kbit.calibrate(folder, data, bits=3, device="cpu", **as_calibrate)
    assert same(tensors(model), tensors(expected))
    model.save_pretrained(tmp_path / "packed")
    stored = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert not {"calibrate", "tune", "resume"} & stored.keys()
    assert same(tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")), tensors(model))
    card = model_card(model, "model").text
    assert "Calibrated by " in card and (told.partition(" tokens")[0] in card or others.get("tune"))
    assert ("Tuned after that" in card) == bool(others.get("tune"))


def test_cards_name_files_without_folders(folder, tmp_path):
    (tmp_path / "rows.txt").write_text(" ".join(TEXT))
    card = model_card(load(folder, calibrate=tmp_path / "rows.txt"), "model").text
    assert " of rows.txt (1 x " in card and str(tmp_path) not in card


def test_a_checkpoint_in_mxfp4_is_refused_before_anything_is_loaded(tmp_path, loads_nothing):
    gpt_oss.save(tmp_path, experts=2, hidden=32, inner=32, layers=1)
    with pytest.raises(ValueError, match=r"calibrate: found .* in MXFP4"):
        load(tmp_path, calibrate=IDS)


def test_a_mean(folder):
    """Gets widths by what they cost on the data."""
    model = load(folder, bits=3.5, calibrate=IDS)
    widths = {layer.bits for layer in model.modules() if isinstance(layer, hf_kbit.KbitLinear)}
    assert len(widths) > 1 and "calibrate" not in repr(model.config.quantization_config)


def test_goes_on(folder, tmp_path, monkeypatch):
    expected = load(folder, calibrate=IDS)
    monkeypatch.setitem(METHODS, "feedback", Counting(9))
    with pytest.raises(Killed):
        load(folder, calibrate=IDS, resume=tmp_path / "finished")
    monkeypatch.setitem(METHODS, "feedback", solver := Counting())
    model = load(folder, calibrate=IDS, resume=tmp_path / "finished")
    assert 0 < solver.calls < 14 and same(tensors(model), tensors(expected))


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"calibrate": Path("missing.txt")}, "missing.txt"),
        ({"calibrate": TEXT, "scale": "absmax"}, "scale: found 'absmax'"),
        ({"calibrate": IDS, "tune": -5, "codebook": "trellis"}, "tune: found -5, expected 0 or more"),
        ({"calibrate": [1, 2]}, "data: found"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(folder, loads_nothing, config, error):
    with pytest.raises((TypeError, ValueError, OSError), match=error):
        load(folder, **config)


def test_no_tokenizer_is_refused_before_anything_is_loaded(folder, loads_nothing):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="tokenizer: found none"):
        load(folder, calibrate="weighted")


def test_a_model_that_cannot_be_tuned(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    BertModel(BertConfig(vocab_size=256, **shape)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="tune: found BertModel"):
        BertModel.from_pretrained(tmp_path, quantization_config=KbitConfig(calibrate=IDS, tune=3))
    config = KbitConfig(bits=3, calibrate=IDS)
    model, expected = (
        BertModel.from_pretrained(tmp_path, quantization_config=config),
        hf_kbit.calibrate(BertModel.from_pretrained(tmp_path), IDS, bits=3),
    )
    assert same(tensors(model), tensors(expected))


def test_config():
    """What files can hold of it comes back; data stays one value, and is not written."""
    own = KbitConfig(bits=3, calibrate="own", tune=5)
    assert KbitConfig.from_dict(json.loads(json.dumps(own.to_dict()))).to_dict() == own.to_dict()
    assert own.to_dict()["calibrate"] == "own" and own.to_dict()["tune"] == 5
    assert not {"calibrate", "tune", "resume"} & KbitConfig(calibrate=IDS, tune=5, resume="folder").to_dict().keys()
    assert not {"calibrate", "tune", "resume"} & KbitConfig().to_dict().keys()
    rows = KbitConfig(calibrate=(text for text in TEXT))
    assert rows.calibrate == TEXT and copy.deepcopy(rows).calibrate is rows.calibrate
    assert repr(KbitConfig(bits=3, calibrate="own")) == "KbitConfig(bits=3, calibrate='own')"
    for config, error in (
        ({"calibrate": "mine"}, "calibrate: found 'mine', expected one of"),
        ({"tune": True}, "tune: found True without calibrate"),
        ({"resume": "folder"}, "resume: found 'folder' without calibrate"),
    ):
        with pytest.raises(ValueError, match=error):
            KbitConfig(**config)
