"""GPT-OSS from a checkpoint whose experts are in MXFP4: the same numbers as Transformers decodes, in 4 bits."""

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.quantizers.auto import AutoHfQuantizer

from hf_kbit import KbitConfig, KbitLinear, codebooks
from hf_kbit.integrations.transformers import mxfp4
from hf_kbit.nn.experts import KbitProjection
from tests import cases, gpt_oss

E, H, INNER, LAYERS = 3, 64, 96, 2
NAMES = [f"model.layers.{layer}.mlp.experts.{own}" for layer in range(LAYERS) for own in ("gate_up_proj", "down_proj")]
WIDE = NAMES[2]
SAVED = Path(__file__).parents[2] / "data" / "mxfp4"
IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mxfp4")
    assert gpt_oss.save(folder, E, H, INNER, LAYERS).keys() == set(NAMES)
    return folder


@pytest.fixture
def changed(path, tmp_path):
    """The same checkpoint with other tensors, or without those that are None."""

    def change(**tensors):
        (tmp_path / "config.json").write_text((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors") | tensors
        gpt_oss.write(tmp_path, {name: tensor for name, tensor in tensors.items() if tensor is not None})
        return tmp_path

    return change


def load(path, *args, **kwargs):
    config = {"quantization_config": KbitConfig(*args, **kwargs)} if args or kwargs else {}
    return AutoModelForCausalLM.from_pretrained(path, **config).eval()


def decoded(path) -> dict[str, torch.Tensor]:
    """What Transformers makes of each projection, bfloat16 ``[E, K, N]``."""
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True))
    return {name: model.get_parameter(name).detach() for name in NAMES}


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Zeros of the same sign, too."""
    return torch.equal(found.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


def projections(model) -> dict[str, KbitProjection]:
    return {name: module for name, module in model.named_modules() if isinstance(module, KbitProjection)}


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(IDS).logits


def test_whole_life(path, tmp_path):
    """Taken over bit for bit in 4 bits, whatever is chosen for other layers; saved, loaded and undone."""
    model, expected = load(path, bits=5, module_bits={"experts": 4}, codebook="normal_float"), decoded(path)
    assert {module.bits for module in model.modules() if isinstance(module, KbitLinear)} == {5}
    assert projections(model).keys() == set(NAMES)
    for name, projection in projections(model).items():
        assert same_bits(projection.dequantize().mT, expected[name]), name
        assert (projection.bits, projection.decoding.levels) == (4, codebooks.fp4())
        assert projection.weight.columns is None
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert not any(name.endswith(("_blocks", "_scales")) for name in stored)
    again = load(tmp_path)
    assert again.config.quantization_config.quant_method == "kbit"
    assert torch.equal(logits(again), logits(model))
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name

    undone = again.dequantize()
    for name in NAMES:
        assert same_bits(undone.get_parameter(name).detach(), expected[name])
    undone.save_pretrained(tmp_path / "undone")
    assert load_file(tmp_path / "undone" / "model.safetensors").keys() >= set(NAMES)


def test_taken_over_and_saved_by_any_transformers(tmp_path):
    """``tests/data/mxfp4`` was made like this by Transformers 5.23: another version makes the same bytes, so that what
    either saves is what the other reads, and computes the same with them."""
    gpt_oss.save(tmp_path / "original", experts=2, hidden=32, inner=32, layers=1)
    model, saved = load(tmp_path / "original", bits=4), load(SAVED)
    assert len(projections(saved)) == 2 and torch.equal(logits(saved), logits(model))
    for number, own in enumerate((model, saved)):
        own.save_pretrained(tmp_path / str(number) / "mxfp4")
        found = tmp_path / str(number) / "mxfp4"
        assert (found / "model.safetensors").read_bytes() == (SAVED / "model.safetensors").read_bytes()
        configs = [json.loads((folder / "config.json").read_text()) for folder in (found, SAVED)]
        assert configs[0]["quantization_config"] == configs[1]["quantization_config"]


def test_logits_and_gradients_are_those_of_the_decoded_model(path):
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=KbitConfig(modules_to_not_convert=["self_attn"]), dtype=torch.float32
    )
    dense = AutoModelForCausalLM.from_pretrained(path, quantization_config=Mxfp4Config(dequantize=True)).float()
    assert projections(model).keys() == set(NAMES)
    gradients = []
    for own in (model, dense):
        found = own(IDS).logits
        found.square().mean().backward()
        gradients.append((found.detach(), own.get_input_embeddings().weight.grad))
    for found, expected in zip(*gradients, strict=True):
        assert expected.any() and (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_experts_in_16_bits(path):
    """As many as are left so: what Transformers itself decodes."""
    model, expected = load(path, modules_to_not_convert=["experts.down_proj"]), decoded(path)
    assert projections(model).keys() == {name for name in NAMES if "gate_up" in name}
    for name in NAMES:
        if "down" in name:
            assert same_bits(model.get_parameter(name).detach(), expected[name])
    assert logits(model).isfinite().all()


def test_another_width_is_quantized_from_the_decoded_weights(path, log):
    model, expected = load(path, bits=3), decoded(path)
    for name, projection in projections(model).items():
        packed = KbitProjection(*expected[name].mT.shape[:1], *expected[name].shape[1:], bits=3)
        packed.load_dense(expected[name].mT)
        assert torch.equal(packed.weight.words, projection.weight.words) and packed.decoding == projection.decoding
        assert f"{name}: requantized from MXFP4" in log.text


@pytest.fixture
def log(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.INFO, "transformers")
    return caplog


def test_wide_scales_are_requantized_with_a_note(path, changed, log):
    """Only blocks out of range; each then loses a little of itself, nothing of what is large."""
    scales = load_file(path / "model.safetensors")[f"{WIDE}_scales"]
    scales[1, 2, 0], scales[1, 3, 1] = 124 - 18, 124 - 40
    folder = changed(**{f"{WIDE}_scales": scales})
    model, expected = load(folder, bits=4), decoded(folder)
    for name, projection in projections(model).items():
        found, wanted = projection.dequantize(), expected[name].mT
        if name == WIDE:
            small = torch.zeros(scales.shape, dtype=torch.bool)
            small[1, 2, 0] = small[1, 3, 1] = True
            found, wanted = (part.unflatten(-1, (-1, 32)) for part in (found, wanted))
            assert same_bits(found[~small], wanted[~small])
            assert not torch.equal(found[small], wanted[small])
            assert (found[small] - wanted[small]).abs().max() <= 6 * 2.0 ** (124 - 18 - 127)
        else:
            assert same_bits(found, wanted)
    assert "3 projections of MXFP4 taken over exactly" in log.text
    assert f"{WIDE}: taken over from MXFP4, but for 2 blocks" in log.text


@pytest.mark.parametrize("least, most", [(0, 17), (1, 10), (100, 117), (127 - 8, 127 + 9), (234, 251), (251, 251)])
def test_any_eighteen_octaves(least, most):
    generator = cases.generator(least)
    blocks = torch.randint(256, (2, 5, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(least, most + 1, (2, 5, 3), generator=generator, dtype=torch.uint8)
    scales[0, 0, 0], scales[0, 0, 1] = least, most
    stored = mxfp4.Mxfp4(blocks, scales)
    packed, anew = mxfp4.pack(stored, "down_proj")
    assert anew == 0
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6] * 2, dtype=torch.float64) * torch.tensor([1] * 8 + [-1] * 8)
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    expected = (values[halves.int()] * torch.exp2(scales.double() - 127)[..., None]).flatten(-2)
    codebook = packed.decoding.codebook("cpu")
    found = torch.ops.hf_kbit.dequantize(*packed.tensors.values(), codebook, [5, 96], torch.float32)
    assert torch.equal(found.double(), expected)
    assert torch.equal(mxfp4.dense(stored, "down_proj", torch.float32).double(), expected)


def test_scales_of_zeros_mean_nothing():
    blocks, scales = torch.zeros(1, 2, 2, 16, dtype=torch.uint8), torch.full((1, 2, 2), 254, dtype=torch.uint8)
    blocks[0, 0, 1], scales[0, 0, 1] = 0x08, 0
    packed, anew = mxfp4.pack(mxfp4.Mxfp4(blocks, scales), "down_proj")
    assert anew == 0 and packed.decoding.exponent == 0
    blocks[0, 1, 0], scales[0, 1, 0] = 0x21, 127
    packed, anew = mxfp4.pack(mxfp4.Mxfp4(blocks, scales), "down_proj")
    assert anew == 0 and packed.decoding.exponent == 0
    scales[0, 1, 1] = 255
    with pytest.raises(ValueError, match="down_proj_scales: found 255, which is NaN"):
        mxfp4.pack(mxfp4.Mxfp4(blocks, scales), "down_proj")


@pytest.mark.parametrize(
    "suffix, change, message",
    [
        ("_scales", lambda scales: scales.index_fill_(2, torch.tensor(1), 255), "_scales: found 255, which is NaN"),
        ("_scales", lambda scales: scales.fill_(252), r"_scales: found 252, expected at most 251, which is 2\*\*124"),
        (
            "_scales",
            lambda scales: scales[:, :-1].clone(),
            r"_scales: found shape \[3, 191, 2\], expected \[3, 192, 2\]",
        ),
        ("_scales", lambda scales: None, ": not in the checkpoint"),
        ("_blocks", lambda blocks: blocks[..., :8].clone(), r"_blocks: found shape \[3, 192, 2, 8\], expected"),
    ],
)
def test_damaged_checkpoints_are_refused(path, changed, suffix, change, message):
    name = NAMES[0] + suffix
    tensor = change(load_file(path / "model.safetensors")[name])
    with pytest.raises(ValueError, match=f"{NAMES[0]}{message}"):
        load(changed(**{name: tensor}), bits=4)


def test_other_configs_are_transformers_business(path):
    """Without a KbitConfig the checkpoint is what it was, and those of other methods are refused as before."""
    with pytest.raises(ValueError, match="quantized with BitsAndBytesConfig but you are passing a KbitConfig"):
        AutoHfQuantizer.merge_quantization_configs(
            {"quant_method": "bitsandbytes", "load_in_8bit": True}, KbitConfig()
        )
    assert not projections(load(path))
    assert same_bits(load(path).get_parameter(NAMES[0]).detach(), decoded(path)[NAMES[0]])
