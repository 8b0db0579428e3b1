"""The documentation is true where it can be run: each example once, and figures that can be computed."""

import dataclasses
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import cases
import peft
import pytest
import ranks
import torch
import transformers
from adapters import METHODS, kbit_layers, load, relative
from byte_tokenizer import byte_tokenizer
from command import succeed
from torch import nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import hf_kbit
from hf_kbit import KbitConfig, KbitLinear, codebooks
from hf_kbit.calibration import tuning, writing
from hf_kbit.calibration.data import Text
from hf_kbit.calibration.solving import METHODS as CALIBRATION_METHODS
from hf_kbit.calibration.solving import Solving
from hf_kbit.integrations.peft.create import IMPOSSIBLE_INITIALISATIONS
from hf_kbit.integrations.peft.layer import KbitTunerLayer
from hf_kbit.nn.site import site_of
from hf_kbit.nn.weight import KbitWeight, is_sharded
from hf_kbit.plan import allocation
from hf_kbit.plan.memory import bits_for_memory, cache_bytes, embedding_bits_for_memory
from hf_kbit.weight.packing import SCALES, quantize_weight

DOCS = Path(__file__).parents[1] / "docs"
NOTES = "A model learns what it reads, block by block.\n" * 150


def text_of(page: str) -> str:
    return (DOCS / page).read_text()


def code_blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text_of(page), flags=re.DOTALL | re.MULTILINE)


def benchmark(name: str):
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", DOCS.parent / "benchmarks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
def in_the_hub(hub, monkeypatch):
    """In that folder; with fewer steps of tuning, and less text that a model writes."""
    monkeypatch.chdir(hub)
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    for device in ("cpu", ""):
        monkeypatch.setitem(writing.AMOUNTS, device, (8, 64))
        monkeypatch.setitem(tuning.AMOUNTS, device, (4, 32))
        monkeypatch.setitem(tuning.STEPS, device, 10)


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


# --- docs/format.md ---


def dense_of_all_widths() -> LlamaForCausalLM:
    shape = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=64, **shape))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight *= 1e-4  # needs an exponent
    return model


def mixture_of_all_widths() -> Qwen3MoeForCausalLM:
    shape = {"hidden_size": 40, "moe_intermediate_size": 24, "intermediate_size": 72, "head_dim": 8}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 3, "num_experts_per_tok": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=2, mlp_only_layers=[0], vocab_size=64, **shape))


@pytest.mark.parametrize(
    ("make", "settings", "layers_and_version"),
    [
        (dense_of_all_widths, {}, (14, 2)),
        (dense_of_all_widths, {"transform": "none"}, (14, 1)),
        (mixture_of_all_widths, {"embedding_bits": 5}, (8 + 3 + 2 + 1, 2)),
    ],
)
def test_reader_of_the_format_page(make, settings, layers_and_version, tmp_path):
    (code,) = code_blocks("format.md")
    assert "torch" not in code and "hf_kbit." not in code, "the reader must need nothing but the standard library"
    exec(compile(code, "docs/format.md", "exec"), reader := {})
    torch.manual_seed(0)
    make().save_pretrained(tmp_path / "dense")
    config = KbitConfig(bits=4, module_bits={"q_proj": 2, "v_proj": 5, "down_proj": 3}, **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    layer = model.model.layers[0].self_attn.q_proj  # gets levels of its own, as releases to 0.1.0 gave layers
    layer.load(
        quantize_weight(layer.dequantize(), (-1.0, -0.125, 0.25, 1.0), search=True, transform=layer.recipe.transform)
    )
    model.save_pretrained(tmp_path / "packed", max_shard_size="20KB")
    assert len(list((tmp_path / "packed").glob("*.safetensors"))) > 1

    layers = {name: module for name, module in model.named_modules() if isinstance(module, KbitWeight)}
    recorded = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert (len(layers), recorded["format_version"]) == layers_and_version
    if make is dense_of_all_widths:
        assert {layer.bits for layer in layers.values()} == set(cases.BITS)
        assert layers["model.layers.1.mlp.up_proj"].decoding.exponent < 0
    assert "levels" in recorded["layers"]["model.layers.0.self_attn.q_proj"]
    read = reader["read_kbit"](tmp_path / "packed")
    assert read.keys() == layers.keys()
    for name, (rows, width) in read.items():
        decoded = layers[name].dequantize(torch.float32).flatten(0, -2)
        found = torch.tensor(rows, dtype=torch.float64).float()[:, : decoded.shape[1]]
        assert width == layers[name].bits and torch.equal(found, decoded), name


def test_example_of_the_format_page():
    page = text_of("format.md")
    words = [int(number) for number in re.search(r"weight        = \[(.*?)\]", page)[1].split(",")]
    byte = int(re.search(r"weight_absmax = \[(.*?)\]", page)[1], 16)
    value = float(re.search(r"W             = (\S+)", page)[1])
    codebook = torch.tensor(codebooks.normal_float(3))
    assert f"levels[5]     = {codebooks.normal_float(3)[5]}" in page
    planes, absmax = torch.tensor([words], dtype=torch.int32), torch.tensor([[byte]], dtype=torch.uint8)
    assert hf_kbit.ops.dequantize(planes, absmax, codebook, (1, 32)).tolist() == [[value] * 32]
    signed = float(re.search(r"its\s+stored\s+weights\s+are\s+(\S+)\.\n", page)[1])
    assert cases.stored(planes, absmax, 16 * codebook, signed=True).tolist() == [[signed] * 32]


# --- code and commands of pages ---


def stand_ins(code: str) -> dict:
    """What code is about that the page does not make."""
    if "hf_kbit.save(" in code:
        saved, fresh = nn.Sequential(nn.Linear(64, 64)), nn.Sequential(nn.Linear(64, 64))
        hf_kbit.quantize_model(saved, bits=4)
        return {"model": saved, "fresh": fresh}
    if "pipeline" in code:
        layers = {name: nn.Linear(64, 64) for name in ("to_q", "head")}
        return {"pipeline": SimpleNamespace(transformer=nn.ModuleDict(layers))}
    if code.startswith("hf_kbit.quantize_model("):
        return {"model": Qwen3ForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")}
    if "target_parameters" in code:
        small = {"hidden_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1, "num_experts": 4}
        mixture = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, num_experts_per_tok=2, **small))
        return {"model": load(mixture, bits=3)}
    if "**inputs, max_new_tokens=200" in code:
        return {"model": dense_of_all_widths().eval(), "inputs": {"input_ids": torch.tensor([[1, 5, 9]])}}
    return {}


def of_eva(layer: KbitTunerLayer) -> bool:
    """Whether the rows of its first factor are directions of what the layer is given."""
    a = layer.lora_A["default"].weight.detach().float()
    return torch.allclose(a @ a.T, torch.eye(len(a), device=a.device), rtol=0, atol=5e-3)


@torch.no_grad()
def repaired(names) -> bool:
    """Whether it predicts what the model in 16 bits does better than without its adapter."""
    ids = torch.tensor([block["input_ids"] for block in names.data])
    aim, found = names.teacher(ids).logits.float(), names.repaired(ids).logits.float()
    with names.repaired.disable_adapter():
        without = names.repaired(ids).logits.float()
    kl = [F.kl_div(x.log_softmax(-1), aim.log_softmax(-1), log_target=True, reduction="sum") for x in (found, without)]
    return bool(kl[0] < kl[1])


# For each page, what holds of the names that are defined after code with these words.
MERGED = {"merge_and_unload(model, dequantize=True)": lambda names: kinds_of_layers(names.merged) == {nn.Linear}}
CHECKS = {
    "../README.md": MERGED,
    "quickstart.md": {
        "same = x @": lambda names: torch.allclose(names.y, names.same, 1e-4, 1e-4) and names.error < 0.3
    },
    "recipes.md": {"get_peft_model(model": lambda names: len(tuner_layers(names.model)) == 14},
    "coming-from.md": {"calibrate(": lambda names: {layer.bits for layer in kbit_layers(names.model).values()} == {3}},
    "decoding.md": {
        "fast_generate": lambda names: names.output.equal(names.model.generate(**names.inputs, max_new_tokens=200))
    },
    "calibration.md": {"tune=True": lambda names: bool(names.model.hf_quantizer.outcome.tuned)},
    "evaluation.md": {
        "evaluate(quantized": lambda names: names.found.kl_divergence > 0,
        "simple_evaluate(": lambda names: names.results["results"] == (names.quantized, ["arc_easy"]),
    },
    "finetuning.md": MERGED
    | {
        "Repair(repaired": repaired,
        "loftq(model)": lambda names: all(layer.lora_B["default"].weight.any() for layer in tuner_layers(names.model)),
        "eva_weights(model": lambda names: all(map(of_eva, tuner_layers(names.model))),
        "gradient_checkpointing_enable(": lambda names: len(tuner_layers(names.model)) == 14,
    },
}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page == "finetuning.md")) for page in CHECKS]
)
def test_code_of_pages(in_the_hub, monkeypatch, page):
    """One block after the other as it stands; what quantizes a model in memory, a line at a time."""
    if page == "evaluation.md":  # with a task that needs the network
        lm_eval = pytest.importorskip("lm_eval")
        monkeypatch.setattr(lm_eval, "simple_evaluate", lambda harness, tasks: {"results": (harness.model, tasks)})
    names, left = {}, dict(CHECKS[page])
    for block in code_blocks(page):
        for code in re.findall(r"^hf_kbit\.quantize_model\(.*\n", block, flags=re.MULTILINE) or [block]:
            names |= stand_ins(code)
            exec(compile(code, page, "exec"), names)
        for words in [words for words in left if words in block]:
            assert left.pop(words)(SimpleNamespace(**names)), words
    assert not left


# Commands that are not run here: CI runs make and pip, the tests of vLLM and of serving their servers.
ELSEWHERE = re.compile(r"pip install |make |vllm serve |hf-kbit run\s|hf-kbit \w+ -")


@pytest.mark.parametrize("page", ["../README.md", "quickstart.md", "recipes.md", "calibration.md"])
def test_commands_as_they_stand(hub, tmp_path, in_the_hub, monkeypatch, page):
    """In blocks and between words, those of a section one after the other. Chats end at once: nothing is typed. The
    memory is smaller, for the model that stands in is."""
    ran = 0
    for number, section in enumerate(re.split("^## ", text_of(page), flags=re.MULTILINE)):
        monkeypatch.chdir(shutil.copytree(hub, tmp_path / str(number), ignore=shutil.ignore_patterns("*bit*")))
        blocks = re.findall("^```bash\n(.*?)^```", section, re.DOTALL | re.M)
        commands = [line for block in blocks for line in block.splitlines()]
        for command in commands + re.findall(r"`((?:hf-kbit|vllm|make) [^`]+ [^`]+)`", section):
            if ELSEWHERE.match(command) or re.search(r" (NAME|COMMAND) ", command):  # words that stand for others
                continue
            command = re.sub(r"--memory \S+ --context 1024", "--memory 1.2MB --context 1024", command)
            name, *arguments = shlex.split(command)
            if arguments[0] == "eval" and not Path(arguments[1]).exists():
                succeed("quantize", "Qwen/Qwen3-0.6B", arguments[1])
            if "--calibrate" in arguments:
                arguments += ["--sequences", "4", "--length", "32"]
            if arguments[0] == "bench":
                arguments += ["--new-tokens", "4", "--repeats", "1"]
            assert name == "hf-kbit", command
            succeed(*arguments)
            if arguments[0] == "quantize":
                assert kinds_of_layers(Qwen3ForCausalLM.from_pretrained(arguments[2])) == {KbitLinear}, command
            ran += 1
    assert ran >= 3


def test_make_in_the_readme():
    makefile = text_of("../Makefile")
    targets = re.findall(r"^make (\w+)$", text_of("../README.md"), flags=re.MULTILINE)
    assert targets == ["demo", "test"] and all(f"\n{target}: " in makefile for target in targets)


def test_table_of_the_readme():
    """As ``benchmarks/readme.py`` makes it of the lines of benchmarks; and its limits are few."""
    readme, page = benchmark("readme"), text_of("../README.md")
    start, end = readme.MARKS
    assert page.split(start)[1].split(end)[0].strip() == readme.table().strip() and len(readme.ROWS) <= 8
    (limits,) = re.findall(r"^## Limits\n(.*?)^## ", page, flags=re.DOTALL | re.MULTILINE)
    assert len(re.findall("^- ", limits, flags=re.MULTILINE)) <= 10


def test_the_readme_is_short():
    """Few lines, and few figures in a sentence. Dates stand in one line, under the table."""
    page = text_of("../README.md")
    assert len(page.splitlines()) <= 130
    prose = re.sub(r"^```.*?^```|^\|.*?$|`[^`]+`|\]\([^)]+\)", "", page, flags=re.DOTALL | re.MULTILINE)
    assert len([line for line in prose.splitlines() if re.search(r"\d{4}-\d\d-\d\d", line)]) == 1
    sentences = re.split(r"[.:?] |\n\n|\n- ", re.sub(r"^NVIDIA .*$", "", prose, flags=re.MULTILINE))
    crowded = [words for words in sentences if len(re.findall(r"(?<![\w.-])\d+", words)) >= 3]
    assert not crowded, "\n".join(crowded)


@pytest.mark.parametrize("page", ["quality.md", "performance.md"])
def test_what_a_user_decides_by_comes_first(page):
    first, _ = text_of(page).split("\n## All figures\n")
    assert len(first.splitlines()) <= 150 and "](images/" in first


def test_errors_of_codebooks_on_the_quickstart_page():
    """Each row of its table, and a row for each codebook, on a quarter of the weights of the benchmark named there."""
    errors = benchmark("codebooks")
    layer = nn.Linear(4096, 256, bias=False)
    layer.weight.data = errors.gaussian()[0].weight.data[:256]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|(.*)\|.*\|$", text_of("quickstart.md"), flags=re.MULTILINE)
    assert {(codebook, scale) for codebook, scale, _ in rows} == set(product(codebooks.NAMED, SCALES))
    for codebook, scale, cells in rows:
        for bits, cell in zip(cases.BITS, cells.split("|"), strict=True):
            if cell.strip():
                error = errors.relative_error([layer], codebook, scale, bits)
                assert float(cell) == pytest.approx(error, rel=0.01), (codebook, scale, bits)


def test_version_of_the_citation_and_the_changelog():
    """The first heading of the changelog may be of what is not released yet."""
    assert re.findall(r"^version: (.*)$", text_of("../CITATION.cff"), flags=re.MULTILINE) == [hf_kbit.__version__]
    heading = re.search(r"^## \[(.*?)\](?: - \d{4}-\d\d-\d\d)?$", text_of("../CHANGELOG.md"), flags=re.MULTILINE)
    assert heading[1] in (hf_kbit.__version__, "Unreleased")


def test_arguments_for_those_who_come_from_elsewhere():
    """Names on the right of the tables of other libraries' arguments are ours."""
    tables = text_of("coming-from.md").split("| llama.cpp |")[0]
    rows = re.findall(r"^\| `.*? \| (.*) \|$", tables, flags=re.MULTILINE)
    given = {name for row in rows for name in re.findall(r"`(\w+)(?:=[^`]*)?`", row)}
    ours = {field.name for kind in (KbitConfig, Text, Solving) for field in dataclasses.fields(kind)}
    ours |= inspect.signature(hf_kbit.calibrate).parameters.keys()
    assert len(given) > 8 and given - {"from_pretrained", "KbitConfig", "dtype"} <= ours


# --- docs/finetuning.md ---


def test_methods_and_refusals_are_on_the_finetuning_page():
    page = text_of("finetuning.md")
    (methods,) = re.findall(r"^\| methods \| (.*) \|$", page, flags=re.MULTILINE)
    tried = {method for method in METHODS if method not in ("GLORA", "LN_TUNING")}
    assert tried <= {method.upper() for method in methods.split(", ")}
    assert all(f'init_lora_weights="{name}"' in page for name in IMPOSSIBLE_INITIALISATIONS)


# --- docs/parallel.md ---


def parallel_page(rank, folder):
    """Run in each of two processes."""
    os.chdir(folder)
    _, tensor, expert, quantizing, sharded = code_blocks("parallel.md")
    if ranks.OLD:
        expert = expert.replace("ep_size=2", "enable_expert_parallel=True")
    found, names = [], {"device": "cpu", "name": str(folder / "original" / "dense")}
    for code in (tensor, expert, quantizing, sharded):
        exec(compile(code, "docs/parallel.md", "exec"), names)
        found.append((sum(map(is_sharded, names["model"].parameters())), ranks.logits(names["model"])["logits"]))
    return found


@pytest.mark.slow
def test_code_of_the_parallel_page(tmp_path, monkeypatch):
    """What it shards computes what one process does, in bfloat16."""
    monkeypatch.chdir(tmp_path)
    ranks.save_quantized("llama", tmp_path, "original")
    ranks.save_quantized("qwen3_moe", tmp_path, "mixture-3bit")
    exec(code_blocks("parallel.md")[0], {"name": str(tmp_path / "original" / "dense")})
    one = {name: ranks.logits(ranks.load(Path(name)))["logits"] for name in ("model-3bit", "mixture-3bit")}
    expected = [one[name] for name in ("model-3bit", "mixture-3bit", "model-3bit", "model-3bit")]
    for process in ranks.run(parallel_page, tmp_path):
        for (shards, logits), of_one in zip(process, expected, strict=True):
            assert shards and relative(logits, of_one) < 0.05


# --- docs/calibration.md ---


def test_methods_on_the_calibration_page():
    methods = re.findall(r'^\| `"(\w+)"`', text_of("calibration.md"), flags=re.MULTILINE)
    assert set(methods) == set(CALIBRATION_METHODS)


def test_memory_in_the_commands_is_enough():
    """For the model that they name, of the shape that it has on the Hub; and the figures beside them are true."""
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    config = Qwen3Config(
        vocab_size=151936, num_hidden_layers=28, head_dim=128, tie_word_embeddings=True, dtype=torch.bfloat16, **shape
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).bfloat16()
    page, readme = text_of("calibration.md"), text_of("../README.md")
    commands = re.findall(r"hf-kbit quantize Qwen/Qwen3-0\.6B [^`\n]*--memory[^`\n]*", page + readme)
    assert len(commands) == 2
    ((size, tokens),) = {re.search(r"--memory (\d+)MB --context (\d+)", command).groups() for command in commands}
    assert all(f"qwen3-{size}mb" in command for command in commands)
    memory, tokens = int(size) * 10**6, int(tokens)
    prose = " ".join(page.split())
    assert f"{size} MB give {bits_for_memory(model, memory, context=tokens):.2f} bits" in prose
    embedding, kept = model.model.embed_tokens.weight.nbytes, cache_bytes(model, tokens)
    assert f"the embedding takes {embedding / 1e6:.0f} MB and {tokens:,} tokens take {kept / 1e6:.0f} MB" in prose
    assert [embedding_bits_for_memory(model, f"{size}MB", context=tokens) for size in (662, 663)] == [5, None]
    packed = allocation.packed_bytes({site_of(model, "model.embed_tokens"): 5}, KbitConfig()) / 1e6
    assert f"in less than 663 MB the embedding gets 5 bits and takes {packed:.0f} MB" in prose
    with pytest.raises(ValueError, match=r"expected 343,[0-9,]* or more"):
        bits_for_memory(model, 10**6, context=tokens, embedding_bits=5)
    assert "it needs 344 MB" in prose


# --- docs/evaluation.md ---


def test_commands_of_the_evaluation_page(in_the_hub):
    """Those that need no network, on the CPU. The first quantizes while loading what the second has loaded packed."""
    config = KbitConfig(bits=3)
    model = Qwen3ForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained("qwen3-0.6b-3bit")
    page, shown = text_of("evaluation.md"), []
    for command in re.findall(r"^hf-kbit (eval .*notes\.txt.*)$", page, flags=re.MULTILINE):
        shown.append(succeed(*shlex.split(command), "--device", "cpu", "--limit-tokens", "300").stdout)
    assert len(shown) == 2 and shown[0] == shown[1]
    labels = re.findall(r"^\| `(.*)` \|", page, flags=re.MULTILINE)
    assert [line[:14].strip() for line in shown[0].splitlines()] == labels
