"""examples/qlora.py: trains, saves, resumes, merges, and does the same in two processes as in one."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapters import relative
from byte_tokenizer import byte_tokenizer
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainingArguments

import hf_kbit

SCRIPT = Path(__file__).parents[2] / "examples" / "qlora.py"
LINES = [f"for n in range({n}):\n    total += n * {n % 7}\n" for n in range(100, 180)]
BLOCK, STEPS, SAVE_STEPS, HELD_OUT = 64, 6, 3, 0.2
# On a GPU the script computes in bfloat16; with that on a CPU losses differed by 6e-4, adapters by 7e-3 of their norm.
LOSS = {"cpu": 6e-5, "cuda": 5e-3}  # printed with 4 digits
ADAPTER = {"cpu": 1e-4, "cuda": 3e-2}  # the second half of the steps moves every tensor by 5e-2 or more
spec = importlib.util.spec_from_file_location("qlora_example", SCRIPT)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)


def launch(folder: Path, device: str, *options, launcher=(SCRIPT,), batch: int = 4, gpus: str = "0") -> str:
    """Runs the script in ``folder``, which has ``model`` and ``data.jsonl``, on the CPU or these GPUs."""
    command = [sys.executable, *launcher, "--model", "model", "--data", "data.jsonl", "--block", BLOCK]
    command += ["--steps", STEPS, "--save-steps", SAVE_STEPS, "--held-out", HELD_OUT, "--batch", batch]
    command += ["--bits", 3, "--lr", 1e-2, "--seed", 1, *options]
    path = os.pathsep.join([str(Path(hf_kbit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    visible = gpus if device == "cuda" else ""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed_losses(output: str) -> list[float]:
    """On the held-out blocks, before and after training."""
    ((before, after),) = re.findall(r"held-out loss: (\S+) before training, (\S+) after it", output)
    return [float(before), float(after)]


def assert_same_adapter(found: Path, expected: Path, device: str) -> None:
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (found, expected))
    assert ours.keys() == theirs.keys() and len(ours) == 28
    for name, weight in theirs.items():
        assert relative(ours[name], weight) < ADAPTER[device], name


@torch.inference_mode()
def held_out_loss(model) -> float:
    """Mean over the blocks that the script is to hold out: the last fifth of all bytes, each text followed by a 0."""
    text = b"".join(line.encode() + b"\0" for line in LINES)
    number = len(text) // BLOCK
    blocks = torch.tensor(list(text[: number * BLOCK])).view(number, BLOCK)[number - -(-number // 5) :]
    return sum(model(block[None], labels=block[None]).loss.item() for block in blocks) / len(blocks)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, device):
    """A folder with a model, data, and what the script made of it in ``out``; and what it printed."""
    folder = tmp_path_factory.mktemp("qlora")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=256, **shape)).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    return folder, launch(folder, device, "--out", "out", "--merge", "merged")


def quantized(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=hf_kbit.KbitConfig(bits=3))


@pytest.mark.slow
def test_losses_are_those_of_the_models(trained, device):
    """Before, of the quantized model; after, of the saved adapter over it, and of the merged model without it."""
    folder, output = trained
    before, after = printed_losses(output)
    assert after < before - 0.3
    base = quantized(folder / "model")
    assert held_out_loss(base) == pytest.approx(before, abs=LOSS[device])
    assert held_out_loss(PeftModel.from_pretrained(base, folder / "out")) == pytest.approx(after, abs=LOSS[device])
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert not any(isinstance(module, hf_kbit.KbitLinear) for module in merged.modules())
    assert held_out_loss(merged) == pytest.approx(after, abs=LOSS[device])
    assert (folder / "merged" / "tokenizer.json").exists()


@pytest.mark.slow
def test_resume(trained, device):
    """From the checkpoint in the middle to the same adapter; merged and quantized again this time."""
    folder, output = trained
    shutil.copytree(folder / "out" / f"checkpoint-{SAVE_STEPS}", folder / "half" / f"checkpoint-{SAVE_STEPS}")
    # A run that goes on saves as often as the checkpoint says; one that starts anew would save after 2 steps.
    options = ["--out", "half", "--resume", "--save-steps", 2, "--merge", "merged-kbit", "--merge-kbit"]
    again = launch(folder, device, *options)
    assert {path.name for path in (folder / "half").glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (3, 6)}
    assert printed_losses(again) == pytest.approx(printed_losses(output), abs=LOSS[device])
    assert_same_adapter(folder / "half", folder / "out", device)
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged-kbit")
    assert sum(isinstance(module, hf_kbit.KbitLinear) for module in merged.modules()) == 14
    assert held_out_loss(merged) < held_out_loss(quantized(folder / "model")) - 0.1


# Options of ``accelerate launch``; --multi_gpu has it start several processes, which talk through gloo without a GPU.
WAYS = {
    "ddp": ["--multi_gpu"],
    "fsdp2": ["--use_fsdp", "--fsdp_version", 2, "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"],
    "zero1": ["--use_deepspeed", "--zero_stage", 1],
    "zero2": ["--use_deepspeed", "--zero_stage", 2],
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_learn_what_one_does(trained, device, way):
    """With a GPU each, if any, from batches half the size; and from half of the steps on too. FSDP2 shards a model
    that is quantized while it loads, DeepSpeed what the optimizer keeps, and gradients."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("fewer than two GPUs")
    if way == "fsdp2" and device == "cpu":
        pytest.skip("accelerate leaves FSDP out on CPUs")
    if way.startswith("zero") and not importlib.util.find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    folder, output = trained
    precision = "bf16" if device == "cuda" and way != "ddp" else "no"
    launcher = ["-m", "accelerate.commands.launch", "--num_processes", 2, "--num_machines", 1, *WAYS[way]]
    launcher += ["--main_process_port", 0, "--mixed_precision", precision, "--dynamo_backend", "no", SCRIPT]

    def learn(name, *more):
        printed = launch(folder, device, "--out", name, *more, launcher=launcher, batch=2, gpus="0,1")
        assert printed_losses(printed) == pytest.approx(printed_losses(output), abs=LOSS[device])
        assert_same_adapter(folder / name, folder / "out", device)
        assert {path.name for path in (folder / name).glob("checkpoint-*")} == {f"checkpoint-{n}" for n in (3, 6)}

    learn(way)
    half, checkpoint = f"{way} half", f"checkpoint-{SAVE_STEPS}"
    shutil.copytree(folder / way / checkpoint, folder / half / checkpoint)
    learn(half, "--resume", "--save-steps", 2)  # one that began anew would save after 2 steps (test_resume)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "none.txt"], "--data: found no file none.txt"),
        (["--held-out", "1"], "--held-out: found 1.0, expected more than 0 and less than 1"),
        (["--merge-kbit"], "--merge-kbit needs --merge"),
        (["--resume"], "--resume: found no checkpoint in out"),
        (["--out", "done"], "--out: found done/checkpoint-6 of an earlier run; go on with --resume"),
        (
            ["--out", "done", "--resume", "--steps", "6"],
            "--resume: found done/checkpoint-6, which has all of --steps 6",
        ),
    ],
)
def test_command_lines_that_are_refused(options, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("text")
    Path("done/checkpoint-6").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["qlora.py", "--model", "model", "--data", "data.txt", "--out", "out", *options])
    with pytest.raises(SystemExit):
        example.command_line()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"content": "two"}', '{"text": 2}', '["text"]', "two", '{"text": "two"'])
def test_lines_that_are_refused(line, tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one"}\n' + line)
    message = f"line 2: found {line}, expected an object with a string in 'text'"
    with pytest.raises(SystemExit, match=re.escape(message)):
        example.read_texts(file)


def test_too_few_tokens_are_refused():
    with pytest.raises(SystemExit, match="found 4 tokens, expected two blocks of 3 or more"):
        example.make_blocks(["one"], byte_tokenizer(), 3, 0.5)


def test_blocks_hold_every_token_in_order():
    train, held_out = example.make_blocks(["abcd", "efg"], byte_tokenizer(), 3, 0.01)
    assert [bytes(block["input_ids"]) for block in train + held_out] == [b"abc", b"d\0e", b"fg\0"]
    assert len(held_out) == 1 and all(block["labels"] == block["input_ids"] for block in train + held_out)


def test_bits_are_those_of_the_model_where_it_has_some(tmp_path, monkeypatch):
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **shape)).save_pretrained(tmp_path / "dense")
    quantized(tmp_path / "dense").save_pretrained(tmp_path / "packed")
    (tmp_path / "data.txt").write_text("text")

    def load(*options):
        options = ["--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "out"), *options]
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        monkeypatch.setattr(sys, "argv", ["qlora.py", *options])
        arguments = example.command_line()
        model, _ = example.load(arguments, example.training_arguments(arguments))
        return {module.bits for module in model.modules() if isinstance(module, hf_kbit.KbitLinear)}

    assert load("--model", str(tmp_path / "dense")) == {4}
    assert load("--model", str(tmp_path / "packed")) == {3}
    with pytest.raises(SystemExit, match=r"--bits: found 4, expected none, for .*packed is quantized already"):
        load("--model", str(tmp_path / "packed"), "--bits", "4")


def test_one_process_for_several_gpus_is_refused(tmp_path, monkeypatch):
    (tmp_path / "data.txt").write_text("text")
    options = ["--model", "model", "--data", str(tmp_path / "data.txt"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["qlora.py", *options])
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(SystemExit, match=r"found 2 GPUs and one process: .*accelerate launch --num_processes 2"):
        example.training_arguments(example.command_line())
