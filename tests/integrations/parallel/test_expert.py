"""Expert parallelism of quantized mixtures, on two processes: each has half of the experts, whole."""

import pytest
import ranks
from adapters import lora, relative
from peft import get_peft_model
from transformers.distributed import DistributedConfig

from hf_kbit import KbitConfig
from hf_kbit.nn.experts import KbitExperts, KbitProjection
from tests import gpt_oss

MODELS = ("qwen3_moe", "half", "gpt_oss")
# Quantized while they load, or before: as stored, and as tiles.
FORMS = ("quantized", "planes", "tiles")
ROUNDING = 2e-6


def with_8_bit_inputs(model):
    """In its experts alone: of other layers, which share columns, each process rounds its part of a token."""
    for module in model.modules():
        if isinstance(module, KbitProjection):
            module.take_inputs("int8")
    return model


def in_each_process(rank, folder):
    def load(name, **kwargs):
        return ranks.load(folder / name, distributed_config=ranks.expert_parallel(), **kwargs)

    def quantize(name, **kwargs):
        return load(f"{name}/dense", quantization_config=ranks.config(name), **kwargs)

    found = {}
    for name in MODELS:
        for form, way in (("quantized", quantize), ("planes", load)):
            model = way(name)
            parts, modules = ranks.sizes(model), dict(model.named_modules())
            projections = [module for module in modules if isinstance(modules[module], KbitProjection)]
            found[name, form, "experts"] = {m.num_experts for m in modules.values() if isinstance(m, KbitExperts)}
            found[name, form, "kept"] = ranks.kept_besides(model)
            found[name, form, "sizes"] = {parts[projection] for projection in projections}
            found[name, form] = ranks.outcome(model)
            model.save_pretrained(folder / name / f"from {form}")
        ranks.as_on_a_gpu(model)
        found[name, "tiled"] = ranks.all_tiled(model)
        found[name, "tiles"] = ranks.outcome(model)
        model.save_pretrained(folder / name / "from tiles")
    found["8-bit inputs"] = ranks.logits(with_8_bit_inputs(load("qwen3_moe")))
    if not ranks.OLD:
        plan = DistributedConfig(fsdp_size=ranks.SIZE, ep_size=ranks.SIZE)
        model = ranks.load(folder / "qwen3_moe", distributed_config=plan)
        found["beside FSDP2"] = ranks.outcome(model)
        model.save_pretrained(folder / "beside FSDP2")
        dense, config = folder / "qwen3_moe" / "dense", ranks.config("qwen3_moe")
        model = ranks.load(dense, distributed_config=plan, quantization_config=config)
        model.save_pretrained(folder / "quantized beside FSDP2")
    for bits in (3, 4):
        load("mxfp4", quantization_config=KbitConfig(bits=bits)).save_pretrained(folder / "mxfp4" / f"{bits} here")

    def by_rules(name, gate_up, down):
        rules = {".gate_up_proj": gate_up, ".down_proj": down, "": "moe_tp_experts"}
        plan = {f"model.layers.*.mlp.experts{own}": rule for own, rule in rules.items()}
        return ranks.load(folder / name, distributed_config=DistributedConfig(tp_size=ranks.SIZE, tp_plan=plan))

    found["complaints"] = {
        "counted": ranks.complaint(by_rules, "qwen3_moe", "grouped_gemm", "grouped_gemm"),
        "biased": ranks.complaint(by_rules, "gpt_oss", "packed_colwise", "rowwise"),
        "lone": ranks.complaint(load, "llama4"),
        "odd": ranks.complaint(load, "odd"),
        "quantize odd": ranks.complaint_before_reading(quantize, "odd"),
        "mxfp4": ranks.complaint_before_reading(
            load, "mxfp4", quantization_config=KbitConfig(modules_to_not_convert=["down_proj"])
        ),
        "experts": ranks.complaint(
            get_peft_model, load("qwen3_moe"), lora(target_modules=[], target_parameters=["experts.down_proj"])
        ),
    }
    return found


def checkpoints(folder):
    for name in MODELS:
        ranks.save_quantized(name, folder)
    ranks.save_quantized("llama4", folder)
    ranks.save_quantized("qwen3_moe", folder, "odd", num_experts=3)
    gpt_oss.save(folder / "mxfp4", experts=4, hidden=64, inner=96, layers=1)
    for bits in (3, 4):
        model = ranks.load(folder / "mxfp4", quantization_config=KbitConfig(bits=bits))
        model.save_pretrained(folder / "mxfp4" / str(bits))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_results_are_those_of_one_process(found, folder, name, form):
    """Though in each most tokens are sent to experts that it has not."""
    for what, tensor in ranks.outcome(ranks.load(folder / name)).items():
        for process in found:
            assert process[name, "tiled"]
            assert relative(process[name, form][what], tensor) < ROUNDING, what


def test_8_bit_inputs_are_those_of_one_process(found, folder):
    model = ranks.load(folder / "qwen3_moe")
    exact, rounded = ranks.logits(model)["logits"], ranks.logits(with_8_bit_inputs(model))["logits"]
    for process in found:
        assert relative(process["8-bit inputs"]["logits"], rounded) < ROUNDING < relative(exact, rounded) / 100


@pytest.mark.parametrize("form", ["quantized", "planes"])
@pytest.mark.parametrize("name", MODELS)
def test_each_process_has_half_of_the_experts(found, name, form):
    """But all column scales, which they have in common."""
    for process in found:
        if form == "quantized":
            assert process[name, form, "kept"] == {0}, "no process keeps all experts"
        assert process[name, form, "experts"] == {2}
        assert process[name, form, "sizes"] == {(2, 2, 1)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_saving_gives_the_bytes_of_one_process(found, folder, name, form):
    ranks.assert_saved_as(folder / name / f"from {form}", folder / name)


@pytest.mark.skipif(ranks.OLD, reason="this Transformers combines no ways")
def test_beside_fsdp2(found, folder):
    """Of which experts are no part, but all else is."""
    for what, tensor in ranks.outcome(ranks.load(folder / "qwen3_moe")).items():
        for process in found:
            assert relative(process["beside FSDP2"][what], tensor) < ROUNDING, what
    original = (folder / "qwen3_moe" / "model.safetensors").read_bytes()
    for saved in ("beside FSDP2", "quantized beside FSDP2"):
        assert (folder / saved / "model.safetensors").read_bytes() == original


@pytest.mark.parametrize("bits", [3, 4])
def test_mxfp4_gives_the_bytes_of_one_process(found, folder, bits):
    """Requantized to another width, and taken over in 4 bits."""
    ranks.assert_saved_as(folder / "mxfp4" / f"{bits} here", folder / "mxfp4" / str(bits))


@pytest.mark.parametrize(
    ("what", "complaint"),
    [
        ("counted", "proj: found a rule that leaves a process 2 experts, not 4"),
        ("biased", "proj: found a rule for parts of each expert, expected none: each process adds its"),
        ("odd", "model.layers.0.mlp.experts: found 3 experts, expected a multiple of 2"),
        ("quantize odd", "model.layers.0.mlp.experts: found 3 experts, expected a multiple of 2"),
        ("mxfp4", "model.layers.0.mlp.experts.down_proj: found it left in 16 bits, expected it quantized, for it is"),
        ("experts", "found them sharded over several processes, expected all experts in each"),
    ],
)
def test_refused(found, what, complaint):
    for process in found:
        assert complaint in process["complaints"][what]


def test_experts_that_nobody_sums_up_are_refused(found):
    """Transformers 5.17 has rules for the tensors of Llama 4's experts and none for the experts, 5.20 some that leave
    packed tensors whole, 5.23 has none."""
    reasons = "expected one for model.layers.0.feed_forward.experts too", "4 experts, not 2", "no `ep_plan`"
    for process in found:
        assert any(reason in process["complaints"]["lone"] for reason in reasons)
