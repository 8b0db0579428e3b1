"""Real architectures with tiny random weights: what is quantized of each, to what, and what is logged of it.

What becomes of them then is for ``test_lifecycle.py``. The second part has the questions for which one or two
architectures are enough: choices in the config, new heads, tensors that a checkpoint has as one.
"""

import copy
import logging
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from architectures import BY_NAME, text
from kinds import ROWS, Life, life, logged, run, same_outputs, same_tensors
from safetensors import safe_open
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import hf_kbit
from hf_kbit import KbitConfig, KbitLinear, codebooks
from hf_kbit.format import reference
from hf_kbit.integrations.transformers.quantizer import KbitHfQuantizer
from hf_kbit.nn.experts import KbitProjection
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.weight.packing import quantize_weight
from hf_kbit.weight.tensor import KbitTensor

NEW_TOKENS = 5


# --- helpers --------------------------------------------------------------------------------------


def rounded(weight: torch.Tensor, bits: int, levels=None, balanced: bool = True) -> torch.Tensor:
    """What a weight ``[N, K]`` becomes, in float32."""
    levels = tuple(levels or codebooks.optimal(bits, True))
    ones = None if balanced else reference.encode_e4m4(torch.ones(weight.shape[1]))
    packed = quantize_weight(weight, levels, search=True, transform="rotated", columns=ones)
    return KbitTensor.of(packed, weight.shape, torch.float32).dequantize()


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def linears(model) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def quantized(model) -> dict[str, KbitWeight]:
    return {name: module for name, module in model.named_modules() if isinstance(module, KbitWeight)}


def dense(model) -> dict[str, nn.Module]:
    return {name: module for name, module in linears(model).items() if not isinstance(module, KbitLinear)}


def pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def dense_weight(model: PreTrainedModel, name: str, layer: KbitWeight) -> nn.Parameter:
    """What ``layer`` stands for, in the float model."""
    return model.get_parameter(name if isinstance(layer, KbitProjection) else f"{name}.weight")


def with_rounded_weights(model: PreTrainedModel, layers: dict[str, KbitWeight]) -> PreTrainedModel:
    """The float model with each weight of ``layers`` replaced by what the format makes of it: of the experts of a
    projection as of one matrix."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    for name, layer in layers.items():
        tensor = dense_weight(model, name, layer)
        weight = tensor.detach().mT if layer.transposed else tensor.detach()
        matrix = weight.reshape(-1, weight.shape[-1])
        weight = rounded(matrix, layer.bits, balanced=tensor is not head).view(weight.shape)
        tensor.data = (weight.mT.contiguous() if layer.transposed else weight).to(tensor.dtype)
    return model


def generate(model: PreTrainedModel, inputs: dict, **kwargs) -> torch.Tensor:
    """The tokens of a greedy generation."""
    inputs = {k: x for k, x in inputs.items() if not k.startswith("decoder_")}
    return model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, **kwargs)


def save(model: PreTrainedModel, path: Path) -> Path:
    model.save_pretrained(path)
    return path


# --- every architecture ---------------------------------------------------------------------------


@pytest.fixture(params=ROWS)
def case(request, tmp_path_factory) -> Life:
    """One for all tests of a row, which ``test_lifecycle.py`` takes further."""
    return life(request.param, tmp_path_factory)


def test_linear_layers_are_replaced_and_the_log_names_the_rest(case):
    original, row, model = linears(case.load("dense")), case.kind.row, case.model
    assert linears(model).keys() == original.keys(), "a layer came or went"
    assert {pattern(name) for name in dense(model)} == set(row.dense)
    for name, layer in quantized(model).items():
        assert layer.bits == row.bits, f"{name}: {layer}"
        if isinstance(layer, KbitLinear):
            assert (layer.bias is None) == (original[name].bias is None), f"{name}: {layer}"
    assert model.dtype == next(iter(original.values())).weight.dtype
    assert any(layer.decoding.exponent for layer in quantized(model).values()), "the small layer needs an exponent"

    (record,) = case.log
    count, left, listing = re.fullmatch(
        r"hf_kbit: (\d+) quantized layers with .*; left as they are: (\d+) tensors with [\d,]+ weights \(\d+%\): (.*)",
        record.getMessage(),
    ).groups()
    floating = [name for name, p in model.named_parameters() if not isinstance(p, KbitTensor) and p.dim() > 1]
    assert (int(count), int(left)) == (len(quantized(model)), len(floating)), listing
    named = {name: int(number) for name, number in re.findall(r"([^\s,]+) \((\d+) x, [\d,]+\)", listing)}
    assert named == Counter(pattern(name.removesuffix(".weight")) for name in floating)


def test_a_warning_says_that_much_is_left_and_only_once(tmp_path):
    path = save_float("llama", tmp_path, vocab_size=9)
    for module_bits, level in (({}, logging.INFO), ({"layers.1": None}, logging.WARNING)):
        with logged() as log:
            config = KbitConfig(bits=3, module_bits=module_bits)
            model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
        assert [record.levelno for record in log.records] == [level], log.output
    with logged() as log:
        AutoModelForCausalLM.from_pretrained(save(model, tmp_path / "saved"))
    assert [record.levelno for record in log.records] == [logging.INFO], "a quantized model is no news"


def test_same_as_float_model_with_rounded_weights(case):
    layers = quantized(case.model)
    reference = with_rounded_weights(case.load("dense"), layers)
    for name, layer in layers.items():
        weight = dense_weight(reference, name, layer)
        expected = weight.mT if layer.transposed else weight
        assert torch.equal(layer.dequantize(), expected), f"{name}: decoded weight"
    same_outputs(case.expected, run(reference, case.inputs), "forward", exact=False)
    # In 16 bits the two best tokens may be nearer each other than products of another order of sums are.
    if case.kind.row.generates and case.model.dtype == torch.float32:
        found, expected = generate(case.model, case.inputs), generate(reference, case.inputs)
        assert found.shape[1] >= NEW_TOKENS and torch.equal(found, expected), "generate"


# --- generating -----------------------------------------------------------------------------------


@pytest.fixture
def load(tmp_path):
    """Builds a row's float model, saves it, and loads it quantized: ``load("llama", KbitConfig(bits=3))``."""

    def load(name: str, config: KbitConfig, **settings) -> PreTrainedModel:
        path = save_float(name, tmp_path, **settings)
        return BY_NAME[name].cls.from_pretrained(path, quantization_config=config)

    return load


def save_float(name: str, path: Path, **settings) -> Path:
    return save(BY_NAME[name].build(**settings), path / f"float-{name}")


@pytest.fixture
def compilations():
    """Dynamo's statistics, from zero: a test that silently ran without compiling would prove nothing."""
    torch.compiler.reset()
    counters.clear()
    return counters["stats"]


def test_generate_with_a_compiled_static_cache(load, compilations):
    model, inputs = load("llama", KbitConfig(bits=3)), text()
    config = CompileConfig(fullgraph=True, backend="aot_eager", mode=None)
    config._compile_all_devices = True  # or generate() compiles on GPUs alone
    found = generate(model, inputs, cache_implementation="static", compile_config=config)
    assert compilations["unique_graphs"] > 0 and torch.equal(found, generate(model, inputs))


# --- what is quantized, and how -------------------------------------------------------------------


MIXED = KbitConfig(
    bits=4,
    module_bits={
        "lm_head": 5,
        "layers.0.mlp": None,
        "down_proj": 2,
        r"model.layers.\d.self_attn.[qk]_proj": 3,
        "up_proj": 4,
    },
)


def test_module_bits_gives_layers_widths_of_their_own(load, tmp_path):
    model = load("llama", MIXED)
    widths = {
        **{f"model.layers.{i}.self_attn.{x}_proj": 3 if x in "qk" else 4 for i in range(2) for x in "qkvo"},
        "model.layers.1.mlp.gate_proj": 4,
        "model.layers.1.mlp.up_proj": 4,
        "model.layers.1.mlp.down_proj": 2,
        "lm_head": 5,
    }
    assert {name: layer.bits for name, layer in quantized(model).items()} == widths
    reference = with_rounded_weights(BY_NAME["llama"].cls.from_pretrained(tmp_path / "float-llama"), quantized(model))
    same_outputs(run(model, text()), run(reference, text()), "forward", exact=False)


def test_codebooks_of_the_user(load, tmp_path):
    """Tables in any order and at any scale; {bits: table} for several widths."""
    tables = {2: (3.0, -1.0, 0.5, -4.0), 3: [0.0, 1.0, 2.0, 3.0, -3.0, -2.0, -1.0, 0.1]}
    model = load("llama", KbitConfig(bits=2, codebook=tables, module_bits={"down_proj": 3}))
    reference = BY_NAME["llama"].cls.from_pretrained(tmp_path / "float-llama")
    levels = {2: (-1.0, -0.25, 0.125, 0.75), 3: sorted(torch.tensor(tables[3]).div(3.0).tolist())}
    for name, layer in quantized(model).items():
        assert layer.bits == (3 if name.endswith("down_proj") else 2), name
        expected = rounded(reference.get_submodule(name).weight.detach(), layer.bits, levels[layer.bits])
        assert torch.equal(layer.dequantize(), expected), name


def test_scales_of_the_largest_magnitudes(load, tmp_path):
    """``scale="absmax"``: chosen while loading, kept, and used again when a layer gets another weight."""
    model = load("llama", KbitConfig(bits=3, codebook="normal_float", scale="absmax", transform="none"))
    reference = BY_NAME["llama"].cls.from_pretrained(tmp_path / "float-llama")
    reloaded = AutoModelForCausalLM.from_pretrained(save(model, tmp_path / "saved"))
    for name, layer in quantized(reloaded).items():
        weight = reference.get_submodule(name).weight.detach()
        codebook = torch.tensor(codebooks.normal_float(3)) * 2.0**layer.decoding.exponent
        planes, absmax = hf_kbit.ops.quantize(weight, codebook)
        assert torch.equal(layer.weight.words, planes) and torch.equal(layer.weight.absmax, absmax), name
        layer.load_dense(weight)
        assert torch.equal(layer.weight.words, planes) and torch.equal(layer.weight.absmax, absmax), name
        assert layer.decoding.transform == "none" and layer.weight.columns is None, name


def test_a_config_can_be_used_again(load):
    """What belongs to one model, such as exponents, is written into a copy."""
    config = KbitConfig(bits=3, module_bits={"0": 2})
    before = (repr(config), copy.deepcopy(config.to_dict()))
    found = [load(name, config).config.quantization_config for name in ("llama", "gpt2")]
    assert (repr(config), config.to_dict()) == before and all(each.stored.layers for each in found)
    assert found[1] == load("gpt2", KbitConfig(bits=3, module_bits={"0": 2})).config.quantization_config


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float16), ("gpt2", torch.bfloat16)], ids=str)
def test_dtype_is_applied_before_quantizing(tmp_path, name, dtype):
    """As Transformers does with every quantizer: a float32 checkpoint loaded in 16 bits is rounded, then quantized."""
    kwargs = {"dtype": dtype, "quantization_config": KbitConfig(bits=5)}
    wide = BY_NAME[name].cls.from_pretrained(save_float(name, tmp_path / "wide"), **kwargs)
    narrow = BY_NAME[name].cls.from_pretrained(save_float(name, tmp_path / "narrow", dtype=dtype), **kwargs)
    same_tensors(wide, narrow, f"float32 checkpoint loaded in {dtype}")


def test_keep_in_float32(tmp_path):
    """T5's wo keeps the dtype that it has in a float model, and the layers around it are quantized all the same."""
    path, t5 = save_float("t5", tmp_path, dtype=torch.float16), BY_NAME["t5"]
    model = t5.cls.from_pretrained(path, dtype=torch.float16, quantization_config=KbitConfig(bits=4))
    kept = [x.dtype for name, x in model.state_dict().items() if name.endswith("wo.weight")]
    assert kept == [torch.float32] * 4


@pytest.mark.parametrize(
    ("name", "layer", "bad"),
    [("llama", "model.layers.1.mlp.up_proj", torch.nan), ("gpt2", "transformer.h.1.mlp.c_fc", -torch.inf)],
)
def test_bad_weights_are_named(tmp_path, name, layer, bad):
    model = BY_NAME[name].build()
    model.get_submodule(layer).weight.data[3, 5] = bad
    path = save(model, tmp_path / "bad")
    with pytest.raises(ValueError, match=rf"{re.escape(layer)}\.weight: found NaN or infinite values"):
        BY_NAME[name].cls.from_pretrained(path, quantization_config=KbitConfig(bits=3))


def test_memory_footprint_counts_packed_bytes(load, tmp_path):
    model = load("llama", KbitConfig(bits=3))
    expected = BY_NAME["llama"].cls.from_pretrained(tmp_path / "float-llama").get_memory_footprint()
    for layer in quantized(model).values():
        blocks = -(-layer.in_features // 32)
        expected += layer.out_features * (blocks * (4 * 3 + 1) - 4 * layer.in_features)
        expected += layer.in_features  # column scales
    assert model.get_memory_footprint() == pytest.approx(expected)


# --- checkpoints in several files, of other classes -----------------------------------------------


DECODER = dict(vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
DECODER |= dict(num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0)
IN_THREE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 4]}
# A checkpoint has these as one tensor: queries, keys, values and a gate; the experts for text and those for images.
FUSED = {
    "hrm_text": ("HrmTextForCausalLM", DECODER | dict(head_dim=16), "attn.gqkv_proj.weight"),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeModel",
        dict(
            text_config=DECODER
            | dict(moe_num_experts=4, moe_k=2, moe_intermediate_size=[40, 24], mlp_layer_types=["sparse", "sparse"])
            | dict(rope_parameters=IN_THREE),
            vision_config=dict(depth=1, hidden_size=32, intermediate_size=48, num_heads=4, patch_size=4),
        ),
        "mlp.experts.0.down_proj.weight",
    ),
}


def save_fused(name: str, path: Path) -> PreTrainedModel:
    class_name, settings, stored = FUSED[name]
    torch.manual_seed(0)
    cls = getattr(transformers, class_name)
    model = cls(cls.config_class(**settings))
    with safe_open(save(model, path) / "model.safetensors", "pt") as file:
        assert any(own.endswith(stored) for own in file.keys())
    return model


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("hrm_text", []),
        ("hrm_text", ["self_attn.gate_proj"]),  # the first of the tensors that Transformers makes, or another
        ("hrm_text", ["k_proj"]),
        ("ernie4_5_vl_moe", ["text_moe"]),
        ("ernie4_5_vl_moe", ["vision_moe"]),
    ],
)
def test_layers_of_one_tensor_of_the_checkpoint(tmp_path, name, left):
    """Each is quantized or left as it is by itself."""
    original = save_fused(name, tmp_path / "float")
    config = KbitConfig(bits=3, modules_to_not_convert=left)
    model = type(original).from_pretrained(tmp_path / "float", quantization_config=config)
    layers = quantized(model)
    assert len(layers) > 8 and not any(part in own for own in layers for part in left)
    for own, layer in layers.items():
        packed = layer.quantize(dense_weight(original, own, layer).detach())
        assert all(torch.equal(layer.packed[part], tensor) for part, tensor in packed.tensors.items()), own
    for own, parameter in model.named_parameters():
        if not isinstance(parameter, KbitTensor):
            assert torch.equal(parameter, original.get_parameter(own)), own
    reloaded = type(original).from_pretrained(save(model, tmp_path / "saved"))
    same_tensors(reloaded, model, "reload")


def test_a_weight_that_came_past_the_quantizer_is_no_new_head(tmp_path, monkeypatch):
    """Which would be drawn anew."""
    original = save_fused("hrm_text", tmp_path)
    update = KbitHfQuantizer.update_weight_conversions

    def forgetful(self, *args):
        updated, self.made_together = update(self, *args), []
        return updated

    monkeypatch.setattr(KbitHfQuantizer, "update_weight_conversions", forgetful)
    config = KbitConfig(bits=3, modules_to_not_convert=["k_proj", "self_attn.gate_proj"])
    with pytest.raises(ValueError, match=r"0\.self_attn\.q_proj\.weight: found it in torch\.float32 after loading"):
        type(original).from_pretrained(tmp_path, quantization_config=config)


NEW_HEADS = [
    ("llama", "LlamaForCausalLM", "LlamaForSequenceClassification", "score"),
    ("bert-masked", "BertModel", "BertForQuestionAnswering", "qa_outputs"),
]


@pytest.mark.parametrize("source", ["float", "quantized"])
@pytest.mark.parametrize("skip_default_modules", [True, False])
@pytest.mark.parametrize(("name", "saved_class", "new_class", "head"), NEW_HEADS)
def test_new_head(tmp_path, name, saved_class, new_class, head, skip_default_modules, source):
    """A head that the checkpoint lacks is a float nn.Linear, initialised as ever; the base is quantized."""
    saved_class, new_class = getattr(transformers, saved_class), getattr(transformers, new_class)
    config = KbitConfig(bits=3, skip_default_modules=skip_default_modules)
    path = save(BY_NAME[name].build(model_class=saved_class.__name__), tmp_path / "float")
    if source == "quantized":
        path = save(saved_class.from_pretrained(path, quantization_config=config), tmp_path / "quantized")
    model = new_class.from_pretrained(path, **({"quantization_config": config} if source == "float" else {}))

    new = model.get_submodule(head)
    assert type(new) is nn.Linear and new.weight.requires_grad and new.weight.dtype == torch.float32
    assert 0.3 < new.weight.std() / model.config.initializer_range < 3, "not initialised as the model does"
    assert new.bias is None or not new.bias.any()
    assert set(dense(model)) - {head} <= {"bert.pooler.dense"}
    assert all(x.isfinite().all() for x in run(model, text()).values())
    # The new head is saved with the rest.
    reloaded = new_class.from_pretrained(save(model, tmp_path / "saved"))
    same_tensors(reloaded, model, "reload")
    same_outputs(run(reloaded, text()), run(model, text()), "reload")
