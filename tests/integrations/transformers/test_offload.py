"""The sizes by which Transformers and accelerate place layers on devices and on disk; ``test_lifecycle.py`` has what
offloaded models compute."""

import accelerate
import kinds
import pytest
from transformers import LlamaForCausalLM
from transformers.integrations import accelerate as placement

from hf_kbit import KbitConfig


@pytest.fixture
def kind(tmp_path_factory) -> kinds.Life:
    return kinds.life("mixed widths", tmp_path_factory)


def size(module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


# integrations/accelerate.py of Transformers places layers by compute_module_sizes(model, hf_quantizer), which asks
# the quantizer's param_element_size for every parameter and buffer. What exceeds max_memory={"cpu": ...} goes to disk.


def test_a_budget_that_is_too_small_to_quantize_is_refused(kind):
    settings = {"quantization_config": KbitConfig(**kind.kind.config), "max_memory": {"cpu": size(kind.model) - 1}}
    with pytest.raises(ValueError, match=r"device_map: found .* disk, expected"):
        kind.load("dense", device_map="auto", **settings)


@pytest.mark.parametrize("source", ["dense", "saved"])
def test_every_module_has_its_quantized_size(kind, source, monkeypatch):
    seen, original = [], placement.compute_module_sizes

    def record(model, hf_quantizer=None, **kwargs):
        sizes = original(model, hf_quantizer, **kwargs)
        if isinstance(model, LlamaForCausalLM):  # it is also called for single modules
            seen.append(sizes[0])
        return sizes

    monkeypatch.setattr(placement, "compute_module_sizes", record)
    settings = {"quantization_config": KbitConfig(**kind.kind.config)} if source == "dense" else {}
    kind.load(source, device_map="auto", **settings)
    expected = {name: size(module) for name, module in kind.model.named_modules() if size(module)}
    assert seen
    for sizes in seen:
        assert {name: sizes[name] for name in expected} == expected


def test_accelerate_counts_what_is_packed(tmp_path_factory):
    kind = kinds.life("tied", tmp_path_factory)
    model = kind.fresh().bfloat16()
    sizes = accelerate.utils.compute_module_sizes(model)
    assert sizes[""] == pytest.approx(model.get_memory_footprint(), rel=0.01)
    layer = model.model.layers[0].mlp.up_proj
    assert sizes["model.layers.0.mlp.up_proj"] == layer.weight.nbytes_packed
    room = {"cpu": int(sizes[""] * 1.3)}
    assert set(accelerate.infer_auto_device_map(model, max_memory=room).values()) == {"cpu"}
