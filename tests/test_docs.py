"""The documentation is true where it can be run: the reader in docs/format.md, the code of other pages."""

import dataclasses
import importlib.util
import inspect
import os
import re
import shlex
import shutil
from itertools import product
from pathlib import Path

import cases
import peft
import pytest
import ranks
import torch
import transformers
from adapters import METHODS, kbit_layers, load, relative
from byte_tokenizer import byte_tokenizer
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from typer.testing import CliRunner

import hf_kbit
from hf_kbit import KbitConfig, KbitLinear, allocation, cli, codebooks
from hf_kbit.calibration import tuning
from hf_kbit.calibration.layerwise import METHODS as CALIBRATION_METHODS
from hf_kbit.integrations.peft.create import IMPOSSIBLE_INITIALISATIONS
from hf_kbit.integrations.peft.layer import KbitTunerLayer
from hf_kbit.memory import bits_for_memory, cache_bytes, embedding_bits_for_memory
from hf_kbit.nn.embedding import KbitEmbedding
from hf_kbit.nn.weight import SCALES, KbitWeight, is_sharded

DOCS = Path(__file__).parents[1] / "docs"


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def reader():
    (code,) = code_blocks("format.md", "python")
    assert "torch" not in code and "hf_kbit." not in code, "the reader must need nothing but the standard library"
    namespace = {}
    exec(compile(code, "docs/format.md", "exec"), namespace)
    return namespace


@pytest.mark.parametrize("bits", cases.BITS)
def test_reader_of_the_format_page(reader, bits, tmp_path):
    torch.manual_seed(bits)
    shape = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=64, **shape))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1e-4
    model.save_pretrained(tmp_path / "dense")
    other = 2 if bits == 5 else bits + 1
    config = hf_kbit.KbitConfig(bits=bits, module_bits={"down_proj": other})
    model = LlamaForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    cases.give_own_levels(model.model.layers[1])
    model.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1

    layers = {name: module for name, module in model.named_modules() if isinstance(module, hf_kbit.KbitLinear)}
    assert layers["model.layers.1.mlp.up_proj"].exponent < 0
    read = reader["read_kbit"](tmp_path / "packed")
    assert read.keys() == layers.keys() and len(layers) == 14
    for name, (rows, width) in read.items():
        layer = layers[name]
        assert width == layer.bits == (other if "down_proj" in name else bits)
        decoded = torch.tensor(rows, dtype=torch.float64).float()[:, : layer.in_features]
        assert torch.equal(decoded, layer.dequantize(torch.float32)), name


def test_reader_of_the_format_page_on_a_mixture(reader, tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 40, "moe_intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "head_dim": 8}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=1, vocab_size=64, **shape, **experts))
    model.save_pretrained(tmp_path / "dense")
    config = hf_kbit.KbitConfig(bits=3, module_bits={"down_proj": 4})
    model = Qwen3MoeForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    model.save_pretrained(tmp_path / "packed")
    layers = {name: module for name, module in model.named_modules() if isinstance(module, KbitWeight)}
    read = reader["read_kbit"](tmp_path / "packed")
    assert read.keys() == layers.keys() and len(layers) == 4 + 2
    for name, (rows, width) in read.items():
        layer = layers[name]
        decoded = torch.tensor(rows, dtype=torch.float64).float()[:, : layer.in_features]
        assert width == layer.bits and torch.equal(decoded, layer.dequantize(torch.float32).flatten(0, -2)), name


def test_example_of_the_format_page():
    page = (DOCS / "format.md").read_text()
    words = [int(number) for number in re.search(r"weight        = \[(.*?)\]", page)[1].split(",")]
    byte = int(re.search(r"weight_absmax = \[(.*?)\]", page)[1], 16)
    value = float(re.search(r"W             = (\S+)", page)[1])
    codebook = torch.tensor(codebooks.normal_float(3))
    assert f"levels[5]     = {codebooks.normal_float(3)[5]}" in page
    planes, absmax = torch.tensor([words], dtype=torch.int32), torch.tensor([[byte]], dtype=torch.uint8)
    decoded = hf_kbit.ops.dequantize(planes, absmax, codebook, (1, 32))
    assert decoded.tolist() == [[value] * 32]
    signed = float(re.search(r"its\s+stored\s+weights\s+are\s+(\S+)\.\n", page)[1])
    assert cases.stored(planes, absmax, 16 * codebook, signed=True).tolist() == [[signed] * 32]


def test_errors_of_codebooks_on_the_quickstart_page():
    """Each row of its table, and a row for each codebook, from the benchmark that is named there."""
    spec = importlib.util.spec_from_file_location("codebooks_benchmark", DOCS.parent / "benchmarks" / "codebooks.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    page = (DOCS / "quickstart.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|(.*)\|.*\|$", page, flags=re.MULTILINE)
    assert {(codebook, scale) for codebook, scale, _ in rows} == set(product(codebooks.NAMED, SCALES))
    for codebook, scale, cells in rows:
        for bits, cell in zip(cases.BITS, cells.split("|"), strict=True):
            if cell.strip():
                error = benchmark.relative_error(benchmark.gaussian(), codebook, scale, bits)
                assert float(cell) == pytest.approx(error, rel=0.01), (codebook, scale, bits)


def test_version_of_the_citation_and_the_changelog():
    """The first heading of the changelog may be of what is not released yet."""
    citation = (DOCS.parent / "CITATION.cff").read_text()
    assert re.findall(r"^version: (.*)$", citation, flags=re.MULTILINE) == [hf_kbit.__version__]
    changelog = (DOCS.parent / "CHANGELOG.md").read_text()
    heading = re.search(r"^## \[(.*?)\](?: - \d{4}-\d\d-\d\d)?$", changelog, flags=re.MULTILINE)
    assert heading[1] in (hf_kbit.__version__, "Unreleased")


# --- docs/finetuning.md ---

NOTES = "A model learns what it reads, block by block.\n" * 300


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A folder in which the pages' name of a model is a folder, with a small one of random weights."""
    folder = tmp_path_factory.mktemp("hub")
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(num_hidden_layers=2, vocab_size=256, head_dim=32, **shape)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder / "Qwen" / "Qwen3-0.6B")
    byte_tokenizer().save_pretrained(folder / "Qwen" / "Qwen3-0.6B")
    (folder / "notes.txt").write_text(NOTES)
    return folder


@pytest.fixture
def run_code(hub, monkeypatch):
    """Runs a page's code as it stands; returns the names it defines."""
    monkeypatch.chdir(hub)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)

    def run(code: str, names: dict) -> dict:
        exec(compile(code, "documentation", "exec"), names)
        return names

    return run


@torch.inference_mode()
def loss_of_notes(model) -> float:
    ids = torch.tensor([list(NOTES[:512].encode())]).to(model.device)
    return model(ids, labels=ids).loss.item()


def kinds_of_layers(model) -> set[type]:
    """Of the linear layers in the blocks of a model, without adapters."""
    blocks = model.get_base_model() if isinstance(model, peft.PeftModel) else model
    return {
        type(module)
        for name, module in blocks.named_modules()
        if isinstance(module, nn.Linear) and ".layers." in name and "lora_" not in name
    }


def tuner_layers(model) -> list[KbitTunerLayer]:
    return [module for module in model.modules() if isinstance(module, KbitTunerLayer)]


@pytest.mark.slow
def test_code_of_the_finetuning_page(run_code, hub):
    """Every block, one after the other, each with what the text says of it."""
    screen, use, save, exact, requantized, more_bits, loftq, eva, resume, _, rows, average, processes, lean = (
        code_blocks("finetuning.md", "python")
    )
    names = run_code(screen, {})
    trained = names["model"]
    with trained.disable_adapter():
        before = loss_of_notes(trained)
    assert loss_of_notes(trained) < before - 0.03
    assert trained.is_gradient_checkpointing and trained.lm_head.weight.dtype == torch.float32
    assert kinds_of_layers(trained) == {KbitLinear} and not isinstance(trained.lm_head, KbitTunerLayer)
    assert {file.name for file in (hub / "adapter").glob("*.safetensors")} == {"adapter_model.safetensors"}

    run_code(use, names)
    after = loss_of_notes(names["model"])
    assert after == pytest.approx(loss_of_notes(trained), abs=0.02)
    base = peft.AutoPeftModelForCausalLM.from_pretrained("adapter")
    assert kinds_of_layers(base) == {nn.Linear}, "the adapter's files name the base without its KbitConfig"
    run_code(save, names)
    adapted = peft.get_peft_model(names["base"], peft.LoraConfig(target_modules="all-linear"))
    assert adapted.peft_config["default"].base_model_name_or_path == "qwen3-0.6b-4bit"
    names["base"] = adapted.unload()

    run_code(exact, names)
    assert kinds_of_layers(names["merged"]) == {nn.Linear}
    assert loss_of_notes(names["merged"]) == pytest.approx(after, abs=0.02)
    with pytest.warns(UserWarning, match="Requantizing changed the merged weights"):
        run_code(requantized, names)
    assert kinds_of_layers(names["merged"]) == {KbitLinear}
    run_code(more_bits, names)
    assert {module.bits for module in names["model"].modules() if isinstance(module, KbitLinear)} == {5}

    run_code(loftq, names)
    assert all(layer.lora_B["default"].weight.any() for layer in tuner_layers(names["model"]))
    run_code(eva, names)
    for layer in tuner_layers(names["model"]):
        a = layer.lora_A["default"].weight.detach().float()
        torch.testing.assert_close(a @ a.T, torch.eye(len(a), device=a.device), rtol=0, atol=1e-3)
    steps = names["trainer"].state.global_step
    run_code(resume, names)
    assert names["trainer"].state.global_step >= steps
    run_code(rows, names)
    table = names["packed"].get_input_embeddings().token_adapter
    assert type(table.base_layer) is KbitEmbedding and table.trainable_tokens_delta["default"].shape[0] == 2
    run_code(average, names)
    packed = {name: layer.weight for name, layer in kbit_layers(names["model"]).items()}
    assert all(torch.equal(names["averaged"].module.get_submodule(n).weight, packed[n]) for n in packed)
    assert (hub / "averaged-adapter" / "adapter_model.safetensors").exists()
    run_code(processes, names)
    assert not any(
        layer._gradient_checkpointing_func.keywords["use_reentrant"] for layer in names["model"].model.layers
    )
    run_code(lean, names)
    model, data = names["model"].train(), names["data"]
    assert model.lm_head.weight.dtype == torch.bfloat16 and model.is_gradient_checkpointing
    ids = torch.tensor([data[0]["input_ids"]], device=model.device)
    model(ids, labels=ids).loss.backward()
    assert all(layer.lora_B["default"].weight.grad.any() for layer in tuner_layers(model))
    assert all(layer.base_layer.weight.grad is None for layer in tuner_layers(model))


# --- README.md, docs/recipes.md, docs/coming-from.md ---


def test_code_of_the_readme(run_code):
    load, finetune = code_blocks("../README.md", "python")
    assert len([line for line in load.splitlines() if line]) == 6
    names = run_code(load, {})
    packed = {name: layer.weight.clone() for name, layer in kbit_layers(names["model"]).items()}
    assert len(packed) == 14 and all(layer.bits == 4 for layer in kbit_layers(names["model"]).values())
    loaded = Qwen3ForCausalLM.from_pretrained("qwen3-0.6b-4bit")
    assert all(torch.equal(layer.weight, packed[name]) for name, layer in kbit_layers(loaded).items())
    run_code(finetune, names)
    assert Path("adapter/adapter_model.safetensors").exists()
    assert kinds_of_layers(names["merged"]) == {nn.Linear}


# Commands that are not run here: CI runs make and pip, the tests of vLLM and of serving their servers.
ELSEWHERE = re.compile(r"pip install |make |vllm serve |hf-kbit run ")


@pytest.mark.parametrize("page", ["../README.md", "quickstart.md", "recipes.md"])
def test_commands_as_they_stand(hub, tmp_path, monkeypatch, page):
    """In blocks and between words, those of a section one after the other. Chats end at once: nothing is typed."""
    ran = 0
    for number, section in enumerate(re.split("^## ", (DOCS / page).read_text(), flags=re.MULTILINE)):
        monkeypatch.chdir(shutil.copytree(hub, tmp_path / str(number), ignore=shutil.ignore_patterns("*bit*")))
        blocks = [
            line
            for block in re.findall("^```bash\n(.*?)^```", section, re.DOTALL | re.M)
            for line in block.splitlines()
        ]
        for command in blocks + re.findall(r"`((?:hf-kbit|vllm|make) [^`]+ [^`]+)`", section):
            if ELSEWHERE.match(command) or re.search(r" (NAME|COMMAND) ", command):  # words that stand for others
                continue
            name, *arguments = shlex.split(command)
            if arguments[0] == "eval" and not Path(arguments[1]).exists():
                CliRunner().invoke(cli.app, ["quantize", "Qwen/Qwen3-0.6B", arguments[1]])
            if "--calibrate" in arguments:
                arguments += ["--sequences", "2", "--length", "32"]
            if arguments[0] == "bench":
                arguments += ["--new-tokens", "4", "--repeats", "1"]
            result = CliRunner().invoke(cli.app, arguments, input="")
            assert name == "hf-kbit" and result.exit_code == 0, f"{command}: {result.output}"
            ran += 1
    assert ran >= 3


def test_make_in_the_readme():
    """Each target is there, and is run by CI or by a test."""
    makefile = (DOCS.parent / "Makefile").read_text()
    (block,) = [block for block in code_blocks("../README.md", "bash") if "make" in block]
    assert block.split("\n")[:-1] == ["make demo", "make test"]
    assert all(re.search(rf"^{target}:.*## ", makefile, flags=re.MULTILINE) for target in ("demo", "test"))
    assert "$(VENV)/bin/python examples/demo.py" in makefile  # tests/examples/test_demo.py


def test_table_of_the_readme():
    """As ``benchmarks/readme.py`` makes it of the lines of benchmarks; and its limits are few."""
    spec = importlib.util.spec_from_file_location("readme_benchmark", DOCS.parent / "benchmarks" / "readme.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    page = (DOCS.parent / "README.md").read_text()
    start, end = benchmark.MARKS
    assert page.split(start)[1].split(end)[0].strip() == benchmark.table().strip()
    (limits,) = re.findall(r"^## Limits\n(.*?)^## ", page, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall("^- ", limits, flags=re.MULTILINE)) <= 10


def test_code_of_the_recipes_and_of_those_who_come_from_elsewhere(run_code):
    (finetune,) = code_blocks("recipes.md", "python")
    assert len(tuner_layers(run_code(finetune, {})["model"])) == 14
    load, calibrated = code_blocks("coming-from.md", "python")
    names = run_code(load, {})
    assert {layer.bits for layer in kbit_layers(names["model"]).values()} == {4}
    model = run_code(calibrated, names)["model"]
    assert {layer.bits for layer in kbit_layers(model).values()} == {3}


@pytest.mark.parametrize(
    ("heading", "classes"),
    [
        ("bitsandbytes", [transformers.BitsAndBytesConfig]),
        ("HQQ", [transformers.HqqConfig]),
        ("GPTQ and AWQ", [transformers.GPTQConfig, transformers.AwqConfig]),
    ],
)
def test_arguments_of_those_who_come_from_elsewhere(heading, classes):
    """Names on the left are those of the class, all of bitsandbytes' and HQQ's; names on the right are ours."""
    section = (DOCS / "coming-from.md").read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    theirs = {name for c in classes for name in inspect.signature(c).parameters}
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, flags=re.MULTILINE)[1:]
    named = {name for left, _ in rows for name in re.findall(r"`(\w+)", left)}
    assert named <= theirs
    if len(classes) == 1:
        assert named == theirs - {"kwargs"}
    ours = {f.name for f in dataclasses.fields(hf_kbit.KbitConfig)} | set(
        inspect.signature(hf_kbit.calibrate).parameters
    )
    given = {name for _, right in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", right)} - {
        "from_pretrained",
        "KbitConfig",
    }
    assert given <= ours | {"dtype"}


def test_memory_of_the_finetuning_page():
    """Its table, from the shape of the model."""
    shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=128256, num_hidden_layers=32, **shape))
    layers = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    weights = sum(layer.weight.numel() for layer in layers)
    others = 2 * model.lm_head.weight.numel()
    adapters = sum(16 * (layer.in_features + layer.out_features) for layer in layers)
    tokens = 4 * 1024
    expected = {
        "weights of linear layers": [weights * size for size in (3.25 / 8, 4.25 / 8, 2)],
        "embedding and head": [4 * others, 4 * others, 2 * others],
        "adapters, gradients": [16 * adapters] * 3,
        "inputs of layers": [32 * tokens * 4096 * size for size in (4, 4, 2)],
        "logits": [tokens * 128256 * 4] * 3,
    }
    page = (DOCS / "finetuning.md").read_text()
    for row, sizes in expected.items():
        cells = re.search(rf"^\| {row}[^|]*\|.*\|", page, flags=re.MULTILINE)[0].split("|")[-4:-1]
        assert [float(cell) for cell in cells] == pytest.approx([size / 1e9 for size in sizes], abs=0.005), row
    for number in (f"{weights / 1e6:.0f} million", f"{others / 1e6:.0f} million", f"{adapters / 1e6:.1f} million"):
        assert number in page


def test_experts_of_the_finetuning_page(run_code):
    """Its code on a small mixture, and its table from the shapes of the models."""
    (code,) = [code for code in code_blocks("finetuning.md", "python") if "target_parameters" in code]
    small = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_experts": 4}
    model = load(Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, num_experts_per_tok=2, **small)), bits=3)
    names = run_code(code, {"LoraConfig": peft.LoraConfig, "get_peft_model": peft.get_peft_model, "model": model})
    assert len(tuner_layers(names["model"])) == 4 + 2

    qwen = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    qwen |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    everything, attention = {"target_modules": "all-linear"}, {"target_modules": names["attention"]}
    rows = {
        'Qwen3-30B-A3B, `"all-linear"`': (Qwen3MoeForCausalLM, Qwen3MoeConfig(**qwen), 48, everything),
        "attention and experts": (
            Qwen3MoeForCausalLM, Qwen3MoeConfig(**qwen), 48, attention | {"target_parameters": names["experts"]}
        ),
        "attention alone": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**qwen), 48, attention),
        'Mixtral-8x7B, `"all-linear"`': (MixtralForCausalLM, MixtralConfig(), 32, everything),
    }  # fmt: skip
    page = (DOCS / "finetuning.md").read_text()
    for row, (model_class, config, layers, targets) in rows.items():
        expected = []
        for rank in (16, 4):
            config.num_hidden_layers = 1
            with torch.device("meta"):
                lora = peft.LoraConfig(r=rank, **targets)
                model = peft.get_peft_model(model_class(config), lora, low_cpu_mem_usage=True)
            count = layers * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
            expected += [f"{count / 1e6:.0f}", f"{16 * count / 1e9:.1f}"]
        cells = re.search(rf"^\| {re.escape(row)}[^|]*\|(.*)\|$", page, flags=re.MULTILINE)[1].split("|")
        assert [cell.strip() for cell in cells] == expected, row


def test_methods_and_refusals_are_on_the_finetuning_page():
    page = (DOCS / "finetuning.md").read_text()
    (methods,) = re.findall(r"^\| methods \| (.*) \|$", page, flags=re.MULTILINE)
    tried = {method for method in METHODS if method not in ("GLORA", "LN_TUNING")}
    assert tried <= {method.upper() for method in methods.split(", ")}
    assert all(f'init_lora_weights="{name}"' in page for name in IMPOSSIBLE_INITIALISATIONS)


# --- docs/parallel.md ---


def parallel_page(rank, folder):
    """Run in each of two processes."""
    os.chdir(folder)
    _, tensor, expert, quantizing, sharded = code_blocks("parallel.md", "python")
    if ranks.OLD:
        expert = expert.replace("ep_size=2", "enable_expert_parallel=True")
    found, names = [], {"device": "cpu", "name": str(folder / "original" / "dense")}
    for code in (tensor, expert, quantizing, sharded):
        exec(compile(code, "docs/parallel.md", "exec"), names)
        found.append((sum(map(is_sharded, names["model"].parameters())), ranks.logits(names["model"])["logits"]))
    return found


def test_code_of_the_parallel_page(tmp_path, monkeypatch):
    """What it shards computes what one process does, in bfloat16."""
    monkeypatch.chdir(tmp_path)
    ranks.save_quantized("llama", tmp_path, "original")
    ranks.save_quantized("qwen3_moe", tmp_path, "mixture-3bit")
    exec(code_blocks("parallel.md", "python")[0], {"name": str(tmp_path / "original" / "dense")})
    quantized = ("model-3bit", "mixture-3bit", "model-3bit", "model-3bit")
    expected = [ranks.logits(ranks.load(Path(name)))["logits"] for name in quantized]
    for process in ranks.run(parallel_page, tmp_path):
        for (shards, logits), of_one in zip(process, expected, strict=True):
            assert shards and relative(logits, of_one) < 0.05


# --- docs/decoding.md ---


def test_code_of_the_decoding_page():
    (code,) = code_blocks("decoding.md", "python")
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape)).eval()
    names = {"model": model, "inputs": {"input_ids": torch.tensor([[1, 5, 9]])}}
    exec(compile(code, "docs/decoding.md", "exec"), names)
    assert torch.equal(names["output"], model.generate(**names["inputs"], max_new_tokens=200))


# --- docs/calibration.md ---


def test_code_of_the_calibration_page(run_code, monkeypatch, capsys):
    """On less text, and with fewer steps: what it saves is a quantized model."""
    monkeypatch.setitem(tuning.AMOUNTS, "cpu", (4, 32))
    monkeypatch.setitem(tuning.STEPS, "cpu", 10)
    code, tuning_code = code_blocks("calibration.md", "python")
    Path("notes.txt").write_text(NOTES[:3000])
    try:
        names = run_code(code, {})
    finally:
        Path("notes.txt").write_text(NOTES)
    loaded = Qwen3ForCausalLM.from_pretrained("qwen3-0.6b-3bit")
    assert kinds_of_layers(loaded) == {KbitLinear}
    assert loss_of_notes(loaded) == pytest.approx(loss_of_notes(names["model"].to("cpu")), abs=1e-6)
    names = run_code(tuning_code.replace("tune=True", 'tune=True, device="cpu"'), {"hf_kbit": hf_kbit})
    assert names["model"].hf_quantizer.tuned in capsys.readouterr().out


def test_commands_of_the_calibration_page(run_code):
    """Each makes a model that loads; the memory is smaller, for the model that stands in is."""
    for command in "".join(code_blocks("calibration.md", "bash")).splitlines():
        if "--memory" in command:
            command = re.sub(r"(--memory) \S+", r"\1 1.2MB", command)
        name, *arguments = shlex.split(command)
        sequences = ["--sequences", "2"] if "--calibrate" in arguments else []
        result = CliRunner().invoke(cli.app, [*arguments, *sequences, "--device", "cpu"])
        assert name == "hf-kbit" and result.exit_code == 0, result.output
        assert kinds_of_layers(Qwen3ForCausalLM.from_pretrained(arguments[2])) == {KbitLinear}


def test_memory_in_the_commands_is_enough():
    """For the model that they name, of the shape that it has on the Hub; and the figures beside them are true."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(
        vocab_size=151936, num_hidden_layers=28, head_dim=128, tie_word_embeddings=True, dtype=torch.bfloat16, **shape
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).bfloat16()
    page, readme = ((DOCS / name).read_text() for name in ("calibration.md", "../README.md"))
    commands = re.findall(r"hf-kbit quantize Qwen/Qwen3-0\.6B [^`\n]*--memory[^`\n]*", page + readme)
    assert len(commands) == 2
    for command in commands:
        size, tokens = re.search(r"--memory (\d+)MB --context (\d+)", command).groups()
        memory, tokens = int(size) * 10**6, int(tokens)
        assert f"qwen3-{memory // 10**6}mb" in command
        bits = bits_for_memory(model, memory, context=tokens)
    prose = " ".join(page.split())
    assert f"{memory // 10**6} MB give {bits:.2f} bits" in prose
    embedding, kept = model.model.embed_tokens.weight.nbytes, cache_bytes(model, tokens)
    assert f"the embedding takes {embedding / 1e6:.0f} MB and {tokens:,} tokens take {kept / 1e6:.0f} MB" in prose
    assert [embedding_bits_for_memory(model, f"{size}MB", context=tokens) for size in (662, 663)] == [5, None]
    packed = allocation.packed_bytes(model, {"model.embed_tokens": 5}, KbitConfig()) / 1e6
    assert f"in less than 663 MB the embedding gets 5 bits and takes {packed:.0f} MB" in prose
    with pytest.raises(ValueError, match=r"expected 343,[0-9,]* or more"):
        bits_for_memory(model, 10**6, context=tokens, embedding_bits=5)
    assert "it needs 344 MB" in prose


def test_methods_of_the_calibration_page():
    rows = re.findall(r'^\| `"(\w+)"`', (DOCS / "calibration.md").read_text(), flags=re.MULTILINE)
    assert set(rows) == set(CALIBRATION_METHODS)


# --- docs/evaluation.md ---


def test_commands_of_the_evaluation_page(run_code):
    """Those that need no network, on the CPU. The first quantizes while loading what the second has loaded packed."""
    model = Qwen3ForCausalLM.from_pretrained(
        "Qwen/Qwen3-0.6B", dtype=torch.bfloat16, quantization_config=hf_kbit.KbitConfig(bits=3)
    )
    model.save_pretrained("qwen3-0.6b-3bit")
    commands = re.findall(r"^hf-kbit (eval .*notes\.txt.*)$", (DOCS / "evaluation.md").read_text(), flags=re.MULTILINE)
    shown = []
    for command in commands:
        result = CliRunner().invoke(cli.app, [*shlex.split(command), "--device", "cpu", "--limit-tokens", "300"])
        assert result.exit_code == 0, result.output
        shown.append(result.stdout)
    assert len(commands) == 2 and shown[0] == shown[1]
    labels = re.findall(r"^\| `(.*)` \|", (DOCS / "evaluation.md").read_text(), flags=re.MULTILINE)
    assert [line[:14].strip() for line in shown[0].splitlines()] == labels


def test_code_of_the_evaluation_page(run_code, monkeypatch):
    evaluation, harness = code_blocks("evaluation.md", "python")
    names = run_code(evaluation, {})
    assert names["found"].kl_divergence > 0 and names["found"].tokens > 10_000
    lm_eval = pytest.importorskip("lm_eval")
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda harness, tasks: {"results": (harness.model, tasks)})
    names = run_code(harness, names)
    assert names["results"]["results"] == (names["quantized"], ["arc_easy"])
