"""Each benchmark that needs no GPU, or only its clock, runs on a small case and writes lines with what it times."""

import itertools
import re

import pytest
import torch
from adapters import IDS, decoded, quantized
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from hf_kbit.calibration import tuning
from hf_kbit.ops import native

GROUP = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SMALLER = {
    "llama-3-8b": {"intermediate_size": 96},
    "qwen3-30b-a3b": {"moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2},
    "gpt-oss-20b": {"intermediate_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2},
}


@pytest.mark.parametrize("shape", [pytest.param("tiny", marks=pytest.mark.slow), "qwen3-30b-a3b"])
def test_calibrate(benched, shape, monkeypatch):
    """What a layer takes is told from the rest; tuning takes the stage of layers alone."""
    module = benched("calibrate")
    monkeypatch.setattr(tuning, "ROOM", tuning.ROOM)
    monkeypatch.setattr(tuning, "tune_model", None)
    monkeypatch.setitem(
        module.SHAPES, shape, module.SHAPES[shape] | (SMALL | SMALLER[shape] if shape != "tiny" else {})
    )
    options = ["--device", "cpu", "--sequences", "4", "--length", "32", "--batch", "2", "--layers", "2"]
    tune = ["--tune", "20"] if shape == "tiny" else []
    (line,) = module.run_main("--shape", shape, *options, "--methods", "weighted", *tune)
    assert (line["shape"], line["method"], line["bits"], line["gpu_GB"]) == (shape, "weighted", 4, 0)
    layers = module.SHAPES[shape]["num_hidden_layers"]
    assert line["all_layers_s"] == pytest.approx(line["rest_s"] + layers * line["layer_s"]) and line["seconds"] > 0
    with pytest.raises(SystemExit):
        module.run_main("--shape", shape, *options[:-1], "1")


def test_experts(benched, monkeypatch):
    """A line for each width, with ours and the peers."""
    module = benched("experts")
    small = {"hidden_size": 64, "num_experts_per_tok": 2}
    configs = [Qwen3MoeConfig(**small, moe_intermediate_size=96, num_experts=8)]
    configs += [MixtralConfig(**small, intermediate_size=96, num_local_experts=4)]
    models = {
        name: (cls, config, 2) for (name, (cls, _, _)), config in zip(module.MODELS.items(), configs, strict=True)
    }
    monkeypatch.setattr(module, "MODELS", models)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "gpu_and_command", dict)
    monkeypatch.setattr(module, "floor_us", lambda block, calls: 1.0)
    monkeypatch.setattr(
        module, "in_turns_us", lambda sides, *_, **__: {s: len([c() for c in o]) for s, o in sides.items()}
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    lines = module.run_main("--bits", "2,4", "--tokens", "1,20")
    assert [(line["model"], line["tokens"], line["bits"]) for line in lines] == [
        *itertools.product(models, (1, 20), (2, 4))
    ]
    fields = ("us", "up_us", "down_us", "grouped_mm_us", "batched_mm_us", "floor_us", "floor_16_us")
    if native.has_int8("cpu"):
        fields += ("int8_us", "int8_up_us", "int8_down_us")
    assert all(line[field] > 0 for line in lines for field in fields)


@pytest.mark.slow
def test_mixture(benched, monkeypatch, capsys):
    module = benched("mixture")
    monkeypatch.setattr(module, "READ", 16)
    monkeypatch.setattr(module, "HELD_OUT", 4)
    module.run_main("--steps", "10", "--bits", "2,4", "--methods", "feedback", json_lines=False)
    dense, *lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"16 bits: loss [2-5]\.\d{4}", dense)
    found = dict(
        re.fullmatch(r"(. bits, [\w ]+): errors ([\d., ]+); loss \+-?[\d.]+", line).groups() for line in lines
    )
    assert found.keys() == {f"{bits} bits, {n}" for bits in (2, 4) for n in ("none", "experts without", "feedback")}
    assert found["4 bits, feedback"] != found["4 bits, experts without"] != found["4 bits, none"]
    two, four = ([float(error) for error in found[f"{bits} bits, none"].split(", ")] for bits in (2, 4))
    assert all(few > many for few, many in zip(two, four, strict=True))


@pytest.mark.parametrize(
    "shape", [pytest.param(shape, marks=[pytest.mark.slow] * ("qwen" not in shape)) for shape in SMALLER]
)
def test_model(benched, shape, monkeypatch):
    """A line for each measurement and way, beside the same of 16 bits; a mixture's experts are packed."""
    module, packed = benched("model"), []
    monkeypatch.setitem(module.SHAPES, shape, module.SHAPES[shape] | SMALL | SMALLER[shape])
    load, make, init, prefill = module.load, module.make_checkpoint, module.nn.Linear.__init__, module.prefill_ms

    def prefill_ms(model, tokens):
        packed.append(type(getattr(model.model.layers[0].mlp, "experts", None)).__name__.startswith("Kbit"))
        return prefill(model, tokens)

    def on_cpu(self, *args, device=None, **kwargs):
        init(self, *args, device="cpu" if device == "cuda" else device, **kwargs)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", itertools.count().__next__)
    monkeypatch.setattr(module, "load", lambda folder, _, **kwargs: (*load(folder, "cpu", **kwargs)[:2], 1))
    monkeypatch.setattr(module, "make_checkpoint", lambda shape, folder, _, **kw: make(shape, folder, "cpu", **kw))
    monkeypatch.setattr("load.gpu_and_command", dict)
    monkeypatch.setattr(module, "host_us", lambda layer: 1.0)
    monkeypatch.setattr(module.nn.Linear, "__init__", on_cpu)
    monkeypatch.setattr(module, "prefill_ms", prefill_ms)
    monkeypatch.setattr(module, "PREFILLS", 2)
    monkeypatch.setattr(module, "NEW_TOKENS", module.SETTLED + 3)
    options = ["--model-layers", "2", "--bits", "4", "--batches", "3", "--prefill", "16", "--peers", ""]
    lines = module.run_main("--shape", shape, *options)
    assert {(line["shape"], line["layers"]) for line in lines} == {(shape, 2)}
    whats = [("host", None), ("load", None), ("prefill", None), *[("decode", 3)] * 3]
    for name in ("bf16", "hf_kbit"):
        assert [(line["what"], line.get("batch")) for line in lines if line["name"] == name] == whats
    assert all(line["ms"] > 0 and line["ms_over_bf16"] > 0 for line in lines if "ms" in line)
    assert packed == [False, shape != "llama-3-8b"]


@pytest.mark.slow
def test_parallel(benched, monkeypatch, tmp_path):
    """In a group of one process; a second run finds the checkpoint of the first."""
    for name, value in GROUP.items():
        monkeypatch.setenv(name, value)
    module = benched("parallel")
    monkeypatch.setattr(module, "DEVICE", "cpu")
    options = ["--folder", str(tmp_path), "--shape", "tiny", "--layers", "3", "--sequences", "1", "--tokens", "16"]
    lines = module.run_main(*options, "--ways", "tensor,fsdp,ddp", "--modes", "eager")
    assert [line["way"] for line in lines] == ["tensor", "fsdp", "ddp"]
    assert all(line["ms"] > 0 and line["processes"] == 1 for line in lines)
    assert len(AutoModelForCausalLM.from_pretrained(tmp_path / "tiny-3-4").model.layers) == 3
    made = (tmp_path / "tiny-3-4" / "config.json").stat().st_mtime_ns
    module.run_main(*options, "--ways", "ddp")
    assert (tmp_path / "tiny-3-4" / "config.json").stat().st_mtime_ns == made


@pytest.mark.parametrize(("make", "prepared"), [(quantized, False), (quantized, True)])
def test_a_step_of_qlora_trains(benched, make, prepared, device):
    """Losses fall, and are those of the decoded model in bfloat16 but for rounding."""
    module = benched("qlora")

    def losses(make, prepared):
        torch.manual_seed(0)
        model = module.adapted(make(device, dtype=torch.bfloat16), prepared)
        assert model.is_gradient_checkpointing and model.training
        assert model.lm_head.weight.dtype == (torch.float32 if prepared else torch.bfloat16)
        optimizer = module.optimizer_of(model)
        return [module.step(model, optimizer, IDS.to(device)) for _ in range(20)]

    found = losses(make, prepared)
    assert found[-1] < found[0] - 0.1 and found == pytest.approx(losses(decoded, False), abs=0.02)


def test_ops(benched, monkeypatch):
    module = benched("ops")
    monkeypatch.setitem(module.LOOK_UPS, "cpu", (8, 64))
    lines = module.run_main("--device", "cpu", "--shapes", "16x64")
    ops = {"quantize", "quantize searched", "dequantize planes", "embed planes", "gemm", "gemm_int8", "gemm_trellis"}
    assert {line["op"] for line in lines} == ops
    assert {line["bits"] for line in lines} == {2, 3, 4, 5} and all(line["us"] > 0 for line in lines)


def test_load(benched):
    lines = benched("load").run_main("--shape", "tiny", "--device", "cpu", "--bits", "3", "--rounds", "1")
    ways = ["16 bits", "3 bits, on the fly", "3 bits, quantized before"]
    assert [line["way"] for line in lines] == ways and lines[0]["model_GB"] > lines[1]["model_GB"]
