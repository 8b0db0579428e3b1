"""What vLLM does around a model: caches, drafts, other loaders, sleep, and weights that come again."""

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import serving
import torch
from byte_tokenizer import byte_tokenizer
from safetensors.torch import load_file, save_file
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoePreTrainedModel
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from hf_kbit import KbitConfig
from hf_kbit.integrations.vllm.config import KbitVllmConfig
from hf_kbit.integrations.vllm.loading import wrap_initialize_model, wrap_sleep

ALONE = {"distributed_executor_backend": "uni"}
LONG = [[3 + 7 * number % 240 for number in range(90)], [5 + 11 * number % 240 for number in range(70)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return serving.make("tied", tmp_path_factory.mktemp("tied"))


@pytest.mark.parametrize("dtype", serving.DTYPES)
def test_chunks_of_a_prompt_and_what_is_cached_of_it(folder, dtype):
    """Prompts come in pieces of 32 tokens at most; the second time their beginning comes from the cache."""
    chunks = {"max_num_batched_tokens": 32, "enable_chunked_prefill": True, "block_size": 32}
    with serving.engine(folder, **ALONE, **chunks, enable_prefix_caching=True) as model:
        first = serving.complete(model, LONG)
        second = serving.complete(model, LONG)
        (result,) = model.generate({"prompt_token_ids": LONG[0]}, use_tqdm=False)
        assert result.num_cached_tokens == 64
    reference = serving.load(folder, dtype)
    serving.assert_same(first, reference, LONG)
    serving.assert_same(second, reference, LONG)


def counted(model, name: str) -> float:
    """A counter of vLLM, of all engines of this process."""
    return sum(metric.value for metric in model.get_metrics() if metric.name == f"vllm:{name}")


def drafts(folder: Path, speculative: dict) -> tuple[list, float, float]:
    """What vLLM generates, and how many tokens were drafted for it, and accepted."""
    with serving.engine(folder, **ALONE, speculative_config=speculative, disable_log_stats=False) as model:
        names = "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"
        before = [counted(model, name) for name in names]
        found = serving.complete(model)
        return found, *(counted(model, name) - start for name, start in zip(names, before, strict=True))


@pytest.mark.parametrize("dtype", serving.DTYPES)
def test_a_quantized_draft(folder, dtype):
    """It is the model itself, with a packed table and head: vLLM takes what it drafts."""
    speculative = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    found, drafted, accepted = drafts(folder, speculative)
    serving.assert_same(found, serving.load(folder, dtype))
    assert 0 < 0.8 * drafted <= accepted


class Further(NamedTuple):
    """A layer that a model has in its files alone: settings of the model, what the names of the layer begin with that
    it is a copy of, and its own, what joins hidden states and embeddings before it, norms, settings of KbitConfig."""

    settings: dict
    source: str
    before: str
    joins: str
    norms: list[str]
    quantized: dict


FURTHER = {
    "exaone_moe": Further(
        {"mlp_layer_types": ["dense", "sparse"], "layer_types": 2 * ["full_attention"], "sliding_window": 64},
        *("model.layers.0.", "mtp.layers.0.", "mtp.fc"),
        ["mtp.norm", "mtp.pre_fc_norm_hidden", "mtp.pre_fc_norm_embedding"],
        {"bits": 4, "embedding_bits": 5, "module_bits": {"lm_head": 5, "mtp.layers.0.mlp.up_proj": 5}},
    ),
    "glm4_moe": Further(
        {"n_routed_experts": 4, "first_k_dense_replace": 1},
        *("model.layers.1.", "model.layers.2.", "model.layers.2.eh_proj"),
        [f"model.layers.2.{norm}" for norm in ("enorm", "hnorm", "shared_head.norm")],
        {"bits": 5, "module_bits": {"model.layers.2.mlp.experts.down_proj": 4}},
    ),
}


def foretelling(model_type: str, folder: Path) -> None:
    """Saves a model of which one layer alone adds something, and that from the last token alone, with a copy of that
    layer that gets the embedding of a token: so it foretells what the model would say."""
    settings, source, before, joins, norms, _ = FURTHER[model_type]
    settings = settings | {"num_nextn_predict_layers": 1, "n_group": 1, "topk_group": 1, "head_dim": 32}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **serving.SIZES, **serving.MIXTURE, **settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table.copy_(config.hidden_size**0.5 * normalize(table))  # as the copy gets it, through a norm
        for name, parameter in model.named_parameters():
            if "o_proj" in name or ("down_proj" in name and not name.startswith(source)):
                parameter.zero_()
    model.save_pretrained(folder)
    tensors, size = load_file(folder / "model.safetensors"), config.hidden_size
    further = {name.replace(source, before): x.clone() for name, x in tensors.items() if name.startswith(source)}
    further[f"{joins}.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    further |= {f"{norm}.weight": torch.ones(size) for norm in norms}
    save_file(tensors | further, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("dtype", serving.DTYPES)
@pytest.mark.parametrize("model_type", FURTHER)
def test_layers_that_predict_further_tokens(model_type, dtype, tmp_path, monkeypatch):
    """Transformers does not read them, and they are packed with the quantized model, experts too."""
    monkeypatch.setattr(Glm4MoePreTrainedModel, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\."])
    foretelling(model_type, tmp_path / "dense")
    further = FURTHER[model_type]
    config = KbitConfig(**further.quantized)
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", quantization_config=config)
    quantized.save_pretrained(tmp_path / "packed")
    names = load_file(tmp_path / "packed/model.safetensors").keys()
    packed = {name.replace(further.source, further.before) for name in names if name.startswith(further.source)}
    assert packed <= names and any("absmax" in name for name in packed)
    speculative = {"method": "mtp", "num_speculative_tokens": 1}
    found, drafted, accepted = drafts(tmp_path / "packed", speculative)
    serving.assert_same(found, serving.load(tmp_path / "packed", dtype))
    assert 0 < 0.8 * drafted <= accepted


def test_further_layers_that_vllm_calls_otherwise():
    config, place = KbitVllmConfig.__new__(KbitVllmConfig), SimpleNamespace(model="folder")
    config.further = "mtp.layers.0.mlp.up_proj"
    initialize = wrap_initialize_model(lambda **settings: torch.nn.Linear(1, 1))
    settings = SimpleNamespace(quant_config=config, model_config=place)
    with pytest.raises(ValueError, match=r"mtp\.layers\.0\.mlp\.up_proj: found it packed"):
        initialize(settings, model_config=SimpleNamespace(model="folder"))


@pytest.mark.parametrize("dtype", serving.DTYPES)
@pytest.mark.parametrize("name", ["mixed widths", "qwen3_moe"])
def test_another_loader(name, dtype, tmp_path):
    """Packed tables, heads and experts come by any loader that gives a model the tensors of its files."""
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    @register_model_loader("plain")
    class PlainLoader(BaseModelLoader):
        def download_model(self, model_config):
            pass

        def load_weights(self, model, model_config):
            model.load_weights(load_file(folder / "model.safetensors").items())

    folder = serving.make(name, tmp_path)
    found = serving.generate(folder, **ALONE, load_format="plain")
    serving.assert_same(found, serving.load(folder, dtype))


@pytest.mark.parametrize("dtype", serving.DTYPES)
@pytest.mark.parametrize("name", ["tied", "qwen3_moe"])
def test_weights_that_come_again(name, dtype, tmp_path):
    """Are refused before anything has changed."""
    with serving.engine(serving.make(name, tmp_path), **ALONE) as model:
        before = serving.complete(model)
        with pytest.raises(ValueError, match="expected one load"):
            model.collective_rpc("reload_weights")
        with pytest.raises(ValueError, match="expected one load"):
            model.apply_model(load_nothing)
        assert serving.complete(model) == before


def load_nothing(model):
    model.load_weights([])


@pytest.mark.parametrize("dtype", serving.DTYPES)
def test_a_cache_in_8_bits(folder, dtype, tmp_path):
    """It gives what the decoded model gives with such a cache: the first tokens, and in float32 all."""
    serving.load(folder, dtype).dequantize().save_pretrained(tmp_path)

    def completed(its: Path) -> list:
        with serving.engine(its, **ALONE, kv_cache_dtype="fp8") as model:
            return serving.complete(model)

    outcomes = completed(folder), completed(tmp_path)
    plain = serving.agreement(outcomes[0], serving.load(folder, dtype))[1]
    assert max(plain) > serving.TOLERANCES["float32"], "the cache had all bits"
    for (tokens, found), (others, expected) in zip(*outcomes, strict=True):
        same = serving.TOKENS if dtype == "float32" else 1
        assert tokens[:same] == others[:same]
        assert found[:same] == pytest.approx(expected[:same], abs=serving.TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", serving.DTYPES)
def test_answers_of_a_form(dtype, tmp_path):
    """Of the bytes that the form has next, each is the most probable one."""
    pytest.importorskip("xgrammar")
    words = ["cat", "cow", "bird", "bear", "owl"]
    folder = serving.make("llama", tmp_path, vocab_size=256)
    byte_tokenizer().save_pretrained(folder)
    reference = serving.load(folder, dtype)
    form = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=words))
    with serving.engine(folder, **ALONE, skip_tokenizer_init=False) as model:
        for prompt in serving.PROMPTS:
            (answer,) = model.generate({"prompt_token_ids": prompt}, form, use_tqdm=False)
            word = answer.outputs[0].text
            assert word in words
            for n, byte in enumerate(word.encode()):
                ids = torch.tensor([[*prompt, *word[:n].encode()]], device=reference.device)
                with torch.no_grad():
                    scores = reference(ids).logits[0, -1]
                allowed = {ord(other[n]) for other in words if other[:n] == word[:n] and len(other) > n}
                assert scores[byte] >= max(scores[other] for other in allowed) - serving.TOLERANCES[dtype]


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="vLLM wants that no other process takes memory")
def test_sleep(folder):
    """The memory of weights is given back, and their bytes are there again afterwards."""
    with serving.engine(folder, **ALONE, enable_sleep_mode=True) as model:
        before = serving.complete(model)
        model.sleep(level=1)
        model.wake_up()
        assert serving.complete(model) == before


def test_sleep_that_throws_weights_away():
    slept = []
    sleep = wrap_sleep(lambda self, level: slept.append(level))
    worker = SimpleNamespace(vllm_config=SimpleNamespace(quant_config=KbitVllmConfig.__new__(KbitVllmConfig)))
    sleep(worker, 1)
    with pytest.raises(ValueError, match="level: found 2"):
        sleep(worker, 2)
    worker.vllm_config.quant_config = None
    sleep(worker, 2)
    assert slept == [1, 2]


def test_the_benchmark_sees_all_kernels_but_those_of_routers(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    look_inside = importlib.import_module("serving_process").look_inside
    with serving.engine(serving.make("qwen3_moe", tmp_path), **ALONE) as model:
        (inside,) = model.collective_rpc(look_inside)
    assert inside["kernels"] == ["KbitExpertsMethod", "KbitLinearMethod"]
