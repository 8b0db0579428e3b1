"""Every type of model in Transformers that a small random configuration can build: quantized, run, saved, reloaded;
the experts of mixtures adapted, beside PEFT's adapters on the decoded model; decoders decoded, beside ``generate``.

``test_architectures.py`` asks more of a chosen few; here nobody chose. What cannot be built small is skipped with its
reason, so a newer Transformers adds its models by itself.
"""

import inspect
from pathlib import Path

import pytest
import small
import torch
from architectures import small_config
from cpu_graph import cpu_graph
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_MAPPING,
    MODEL_MAPPING_NAMES,
)

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.generation import decode_step
from hf_kbit.generation.unsupported import Unsupported
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.plan import selection

pytestmark = pytest.mark.slow

MOST_PARAMETERS = 8_000_000

WRONG = {
    "vit_mae": "it masks at random",
}
BUILT = ("bert", "gemma3_text", "gpt2", "llama", "mamba", "mixtral", "opt", "qwen3", "t5", "vit")  # never skipped
DECODED = ("gemma3_text", "gpt2", "gpt_oss", "llama", "mixtral", "olmo2", "phi3", "qwen3_moe")
CASES = [
    *(("causal", kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    *(("base", kind) for kind in MODEL_MAPPING_NAMES),
]


def build(mapping, kind: str):
    """A small float32 model of that type with random weights, and arguments of a forward pass."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    if hasattr(default, "text_config") or (
        mapping is MODEL_FOR_CAUSAL_LM_MAPPING and hasattr(default, "vision_config")
    ):
        pytest.skip("it is made of several configurations")
    config = small_config(kind)
    model_class = mapping[config_class]
    model_class = model_class[0] if isinstance(model_class, (tuple, list)) else model_class
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in model_class(config_class(**config.to_diff_dict())).parameters())
    if size > MOST_PARAMETERS:
        pytest.skip(f"it has {size:,} parameters")
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.is_floating_point():
            nn.init.normal_(parameter, 0, 0.1)
    known = inspect.signature(model.forward).parameters
    if "input_ids" in known:
        inputs = {"input_ids": torch.randint(3, 90, (1, 12))}
    elif "pixel_values" in known:
        inputs = {"pixel_values": torch.randn(1, getattr(config, "num_channels", 3), 32, 32)}
    else:
        pytest.skip(f"it takes neither token ids nor pixels but {list(known)[:3]}")
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = inputs["input_ids"]
    return model, inputs


@torch.no_grad()
def run(model, inputs) -> torch.Tensor:
    """The first floating tensor of the output."""
    return next(x for x in model(**inputs).values() if isinstance(x, torch.Tensor) and x.is_floating_point())


def run_with_adapters(model, inputs, experts: list[str]) -> torch.Tensor:
    """The output with LoRA on these projections, whose numbers depend on their names and shapes alone."""
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(target_parameters=experts, target_modules=[], r=2))
    for _, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            nn.init.normal_(parameter, 0, 0.1)
    output = run(model, inputs)
    model.unload()
    return output


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= 1e-3 * expected.norm())


def load(task: str, path: Path, **kwargs):
    """As users do: a class takes no checkpoints of types that share it, such as Exaone's of Llama's."""
    return (AutoModelForCausalLM if task == "causal" else AutoModel).from_pretrained(path, **kwargs)


def unchanged(found: dict, expected: dict) -> list[str]:
    return [name for name in found.keys() & expected.keys() if not torch.equal(found[name], expected[name])]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("task, kind", CASES, ids=map("-".join, CASES))
def test_whole_life(task, kind, tmp_path):
    if kind in WRONG:
        pytest.skip(WRONG[kind])
    try:
        model, inputs = build(MODEL_FOR_CAUSAL_LM_MAPPING if task == "causal" else MODEL_MAPPING, kind)
        run(model, inputs)
        model.save_pretrained(tmp_path / "dense")
        dense = load(task, tmp_path / "dense")
        run(dense, inputs)
    except Exception as error:  # whatever a model does to a configuration that does not suit it
        if kind in BUILT:
            raise
        pytest.skip(f"it cannot be built small: {type(error).__name__}: {str(error)[:80]}")

    quantized = load(task, tmp_path / "dense", quantization_config=KbitConfig(bits=4, embedding_bits=5))
    layers = [module for module in quantized.modules() if isinstance(module, KbitWeight)]
    assert not list(small.dense_projections(quantized))
    if not layers:
        assert not selection.Packable(dense).choose(KbitConfig())
        pytest.skip(f"no layer of it is to be quantized: {selection.Packable(dense).reasons}")
    packed = {id(tensor) for layer in layers for tensor in (layer.weight, layer.weight.absmax)}
    left = {name: tensor for name, tensor in quantized.named_parameters() if id(tensor) not in packed}
    assert not unchanged(left, dict(dense.named_parameters()))
    assert not unchanged(dict(quantized.named_buffers()), dict(dense.named_buffers()))

    output = run(quantized, inputs)
    quantized.save_pretrained(tmp_path / "quantized")
    assert close(run(load(task, tmp_path / "quantized"), inputs), output)
    experts = [name for name, module in quantized.named_modules() if isinstance(module, KbitProjection)]
    with_adapters = run_with_adapters(quantized, inputs, experts) if experts else output
    quantized.dequantize()
    assert close(output, run(quantized, inputs))
    if experts:
        assert close(with_adapters, run_with_adapters(quantized, inputs, experts))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_decoding(kind, monkeypatch):
    """``hf_kbit.fast_generate`` finds the tokens of ``generate``, of padded prompts, or says by name why it cannot."""
    monkeypatch.setitem(decode_step.BACKENDS, "cpu", decode_step.Backend(capture=cpu_graph, ahead=2))
    mask = torch.ones(2, 7, dtype=torch.int64)
    mask[1, :3] = 0
    ids = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(1)) * mask
    settings = {"attention_mask": mask, "max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
    try:
        model, _ = build(MODEL_FOR_CAUSAL_LM_MAPPING, kind)
        expected = model.generate(ids, **settings)
    except Exception as error:
        if kind in DECODED:
            raise
        pytest.skip(f"it cannot be built small, or generates nothing: {type(error).__name__}: {str(error)[:80]}")
    try:
        assert torch.equal(model.generate(ids, custom_generate=hf_kbit.fast_generate, **settings), expected)
    except Unsupported:
        assert kind not in DECODED
