"""KbitLinear alone: what it computes, and that nothing torch does to modules can break it."""

import copy
import pickle
from functools import partial

import cases
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import hf_kbit
from hf_kbit import KbitLinear, codebooks
from hf_kbit.format import reference, transforms
from hf_kbit.format.decoding import TRANSFORMS
from hf_kbit.ops import native
from hf_kbit.weight.balance import balance


def linear(out_features=7, in_features=33, bias=True, dtype=torch.float32) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    with torch.no_grad():
        layer.weight.copy_(cases.weight((out_features, in_features)))
    return layer


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_from_linear(bits, bias, dtype):
    dense = linear(64, 100, bias, dtype)
    layer = KbitLinear.from_linear(dense, bits=bits)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features, layer.bits) == (100, 64, bits)
    assert layer.bias is dense.bias
    x = cases.x((2, 3), 100, dtype)
    cases.assert_product(layer(x), x, layer.dequantize(torch.float32).T, dense.bias)


@pytest.mark.parametrize(("bits", "bound"), [(2, 0.1806), (3, 0.0331), (4, 0.00862), (5, 0.00292)])
def test_error_on_gaussian_weights(bits, bound):
    """Mean squared error over variance; the bounds are 1% above what 4M weights gave on 2026-11-21."""
    dense = nn.Linear(1024, 512, bias=False)
    with torch.no_grad():
        dense.weight.normal_(generator=cases.generator(bits))
    error = KbitLinear.from_linear(dense, bits=bits).dequantize() - dense.weight
    assert error.square().mean() < bound * dense.weight.square().mean()


def test_any_codebook():
    table = [3.0, -1.0, 0.5, 7.0]
    dense = linear(64, 100)
    layer = KbitLinear.from_linear(dense, bits=2, codebook=table, transform="none")
    assert layer.decoding.levels == codebooks.canonical(table, 2) == pytest.approx((-1 / 7, 0.5 / 7, 3 / 7, 1.0))
    scale = reference.decode_e4m4(layer.weight.absmax).repeat_interleave(32, dim=1)[:, :100]
    assert torch.isin(layer.dequantize(), scale[..., None] * torch.tensor(layer.decoding.levels)).all()
    nearest = (dense.weight[..., None] - scale[..., None] * torch.tensor(layer.decoding.levels)).abs().amin(-1)
    torch.testing.assert_close((dense.weight - layer.dequantize()).abs(), nearest)


@pytest.mark.parametrize("in_features", [1, 33, 64])
def test_a_transformed_layer_is_what_its_parts_say(in_features):
    """Columns balanced, blocks rotated, quantized; and decoded all the way back, by the functions for each."""
    dense = linear(9, in_features)
    layer = KbitLinear.from_linear(dense, bits=3)
    columns = balance(dense.weight.detach())
    stored = transforms.to_stored(dense.weight.detach(), reference.decode_e4m4(columns), rotated=True)
    words = hf_kbit.ops.quantize(stored, layer.weight.codebook, search=True, signed=True)
    parts = zip((*words, columns), layer.packed.values(), strict=True)
    assert all(torch.equal(*pair) for pair in parts) and layer.decoding.transform == "rotated"
    decoded = cases.stored(*words, layer.weight.codebook, signed=True)
    expected = transforms.to_original(decoded, reference.decode_e4m4(columns), True, in_features)
    assert torch.equal(layer.dequantize(), expected) and torch.equal(layer.to_linear().weight, expected)
    x = cases.x((4,), in_features)
    cases.assert_product(layer(x), x, decoded.T, dense.bias, columns=columns, rotated=True)


@pytest.mark.parametrize("bits", cases.BITS)
def test_a_weight_with_outlying_columns_is_better_transformed(bits):
    """In what counts, the product with inputs that are large where the weight is small."""
    sizes = torch.exp2(torch.randn(256, generator=cases.generator(bits, 1)))
    dense = nn.Linear(256, 64, bias=False)
    with torch.no_grad():
        dense.weight.copy_(torch.randn(64, 256, generator=cases.generator(bits)) * sizes)
    x = cases.x((100,), 256) / sizes
    errors = {}
    for transform in TRANSFORMS:
        layer = KbitLinear.from_linear(dense, bits=bits, transform=transform)
        errors[transform] = (layer(x) - dense(x)).square().sum()
    assert errors["rotated"] < 0.5 * errors["none"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bits": 6}, "bits: found 6"),
        ({"bits": 3, "codebook": [1, 2]}, "codebook: found 2 levels"),
        ({"bits": 3, "codebook": "nf4"}, "codebook: found 'nf4'"),
        ({"in_features": 0}, "in_features: found 0"),
        ({"out_features": -1}, "out_features: found -1"),
        ({"transform": "hadamard"}, r"transform: found 'hadamard', expected one of \['rotated', 'none'\]"),
        ({"scale": "best"}, "scale: found 'best', expected one of"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        KbitLinear(**{"in_features": 4, "out_features": 4} | arguments)


@pytest.mark.parametrize("bias", [True, False])
def test_to_linear(bias):
    """On the meta device and under autocast the layer gives the dtype and shape that the linear one gives."""
    layer = KbitLinear.from_linear(linear(bias=bias).bfloat16().eval(), bits=3).float()
    dense = layer.to_linear()
    assert type(dense) is nn.Linear and dense.weight.requires_grad and not dense.training
    assert layer.dequantize().dtype == dense.weight.dtype == torch.float32
    assert layer.to_linear(torch.bfloat16).weight.dtype == torch.bfloat16
    x = cases.x((2,), 33)
    torch.testing.assert_close(dense(x), layer(x))
    for given in map(x.to, (torch.float16, torch.bfloat16, torch.float32, torch.float64)):
        with torch.autocast("cpu", torch.bfloat16):
            found = layer(given)
            assert found.dtype == dense.to(given.dtype)(given).dtype
        assert torch.equal(found, layer(given.to(found.dtype)))
    assert layer.to("meta")(x.to("meta")).shape == (2, 7)


@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.complex64])
def test_no_floats_are_refused(dtype, enabled):
    """Under autocast too: a model that casts its inputs to ``weight.dtype`` has truncated them."""
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        with pytest.raises(TypeError, match=f"x: found dtype {dtype}, expected a floating one"):
            KbitLinear(64, 8)(torch.ones(2, 64).to(dtype))


def test_a_searched_scale_has_less_error():
    dense = linear(64, 100)
    absmax, search = (KbitLinear.from_linear(dense, 3, scale=scale) for scale in ("absmax", "search"))
    errors = [(layer.dequantize() - dense.weight).square().sum() for layer in (absmax, search)]
    assert errors[1] < 0.9 * errors[0]


MODES = {
    "plain": lambda block: block,
    "checkpoint": lambda block: partial(checkpoint, block, use_reentrant=False),
    "reentrant checkpoint": lambda block: partial(checkpoint, block, use_reentrant=True),
    "compile": lambda block: torch.compile(block, backend="aot_eager", fullgraph=True),
    "compile checkpoint": lambda block: torch.compile(
        partial(checkpoint, block, use_reentrant=False), backend="aot_eager"
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tokens", [5, 40])
def test_gradients_of_training_modes(device, mode, autocast, tokens):
    """Those of the same layers with decoded weights in the same mode, and nothing but the packed weight kept."""
    block = nn.Sequential(linear(130, 300), nn.SiLU(), linear(64, 130)).to(device)
    packed = nn.Sequential(*(KbitLinear.from_linear(m, 4) if type(m) is nn.Linear else m for m in block)).to(device)
    dense = nn.Sequential(*(m.to_linear() if type(m) is KbitLinear else m for m in packed))
    weights = [packed[0].weight.clone(), packed[2].weight.clone()]
    grads = []
    for module in (packed, dense):
        torch._dynamo.reset()
        x = cases.x((tokens,), 300).to(device).requires_grad_()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            y = MODES[mode](module)(x)
        y.float().square().sum().backward()
        grads.append((x.grad, module[0].bias.grad, module[2].bias.grad))
    for ours, theirs in zip(*grads, strict=True):
        tolerance = 3e-2 if autocast else 2e-3 if device == "cuda" else 1e-4
        assert (ours - theirs).norm() <= tolerance * theirs.norm()
    assert torch.equal(packed[0].weight, weights[0]) and torch.equal(packed[2].weight, weights[1])
    assert packed[0].weight.grad is None


# --- on a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not native.library("cuda").loaded, reason="no CUDA library")
def test_gpu_holds_one_copy():
    """Moving, saving and repacking never hold a second copy of all weights on the GPU, only of one layer."""
    model = nn.Sequential(*(KbitLinear(4096, 1024, bias=False, bits=4) for _ in range(16)))
    size = 4096 * 1024 * (4 / 8 + 1 / 32)

    def peak(action):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        action()
        return torch.cuda.max_memory_allocated() - start

    assert peak(model.cuda) < 18 * size
    assert all(layer.weight.is_tiled for layer in model)
    assert peak(model.state_dict) < 3 * size
    assert peak(lambda: pickle.dumps(model[0])) < 3 * size
    start = torch.cuda.memory_allocated()
    assert peak(model.cpu) < 3 * size
    assert torch.cuda.memory_allocated() <= start - 15.9 * size


@pytest.mark.gpu
def test_quantized_on_a_gpu_gives_the_same_bytes():
    dense = linear(64, 100)
    on_cpu, on_gpu = KbitLinear.from_linear(dense, bits=3), KbitLinear.from_linear(dense.cuda(), bits=3)
    assert all(map(torch.equal, on_cpu.packed.values(), on_gpu.weight.file_tensors("cpu").values()))


# --- inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 99, 128])
@pytest.mark.parametrize("context", ["eager", "autocast", "compiled"])
def test_another_width_of_x_is_refused(form, width, context):
    """As ``nn.Linear`` does; the ops alone cannot tell it from padding."""
    call = KbitLinear.from_linear(nn.Linear(100, 16), bits=4)
    assert call.weight.is_tiled == (form == "tiles")
    if context == "compiled":
        torch._dynamo.reset()
        call = torch.compile(call, backend="eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=context == "autocast"):
        assert call(torch.ones(2, 100)).shape == (2, 16)
        with pytest.raises(Exception, match=r"x: found shape \[\], expected \[\*, 100\]"):
            call(torch.ones(()))
        with pytest.raises(Exception, match=rf"x: found shape \[2, {width}\], expected \[\*, 100\]"):
            call(torch.ones(2, width))


# --- forward-mode derivatives -----------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
def test_tangents(bias):
    layer = KbitLinear.from_linear(nn.Linear(64, 8, bias=bias), bits=4)
    dense, x, along = layer.to_linear(), torch.randn(2, 64), torch.randn(2, 64)
    for function in (torch.func.jvp(layer, (x,), (along,)), torch.func.jvp(torch.no_grad()(layer), (x,), (along,))):
        torch.testing.assert_close(function, torch.func.jvp(dense, (x,), (along,)))
    torch.testing.assert_close(torch.func.jacfwd(layer)(x), torch.func.jacfwd(dense)(x))


def test_tangents_of_gradients():
    """Forward over reverse, of a function whose gradient is not constant."""
    layer, x, along = KbitLinear.from_linear(nn.Linear(64, 8), bits=4), torch.randn(2, 64), torch.randn(2, 64)

    def tangent(linear):
        with forward_ad.dual_level():
            point = forward_ad.make_dual(x.clone().requires_grad_(), along)
            (grad,) = torch.autograd.grad(linear(point).tanh().sum(), point, create_graph=True)
            return forward_ad.unpack_dual(grad).tangent

    torch.testing.assert_close(tangent(layer), tangent(layer.to_linear()))


# --- 8-bit inputs -----------------------------------------------------------------------------------


def with_int8(transform="rotated", bias=True, dtype=torch.float32) -> KbitLinear:
    layer = KbitLinear.from_linear(linear(9, 33, bias, dtype), bits=4, transform=transform).eval()
    layer.inputs = "int8"
    return layer


def in_16_bits(layer: KbitLinear) -> KbitLinear:
    other = copy.deepcopy(layer)
    other.inputs = None
    return other


def by_the_op(layer: KbitLinear, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, None if layer.bias is None else layer.bias.to(x.dtype)
    return reference.gemm_int8(x, weight.words, weight.absmax, weight.codebook, bias, 9, weight.columns)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", cases.FLOATS)
@torch.no_grad()
def test_8_bit_inputs(bias, dtype):
    layer, x = with_int8(bias=bias, dtype=dtype), cases.x((2, 3), 33, dtype)
    found = layer(x)
    assert torch.equal(found, by_the_op(layer, x)) and not torch.equal(found, in_16_bits(layer)(x))
    assert (found - in_16_bits(layer)(x)).norm() < 0.02 * found.norm()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), found)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), by_the_op(layer, x.bfloat16()))
    assert layer.to("meta")(x.to("meta")).shape == (2, 3, 9)


@torch.no_grad()
def test_a_state_dict_says_nothing_of_inputs():
    layer, other = with_int8(), KbitLinear(33, 9, bits=4).eval()
    other.load_state_dict(layer.state_dict())
    x = cases.x((3,), 33)
    assert torch.equal(other(x), in_16_bits(layer)(x))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), by_the_op(layer, x))


def test_what_has_16_bit_inputs_all_the_same():
    """Whatever trains, also where only a bias does; float64; tangents; a weight that is not transformed."""
    layer, x = with_int8(bias=False), cases.x((3,), 33)
    expected = in_16_bits(layer)(x)
    assert torch.equal(layer(x), by_the_op(layer, x)), "no gradient is wanted"
    wanting = x.clone().requires_grad_()
    found = layer(wanting)
    found.sum().backward()
    torch.testing.assert_close(wanting.grad, layer.dequantize().sum(0).expand(3, -1))
    assert torch.equal(found, expected) and torch.equal(copy.deepcopy(layer).train()(x), expected)
    assert torch.equal(layer(x.double()), in_16_bits(layer)(x.double()))
    assert torch.equal(torch.func.jvp(layer, (x,), (x,))[0], expected)
    with_bias, plain = with_int8(), with_int8("none")
    assert torch.equal(with_bias(x), in_16_bits(with_bias)(x)) and torch.equal(plain(x), in_16_bits(plain)(x))
    checkpointed = copy.deepcopy(with_bias).train()
    assert torch.equal(checkpoint(checkpointed, wanting, use_reentrant=True), in_16_bits(with_bias)(x))


def test_8_bit_inputs_are_checked():
    layer = with_int8()
    with torch.no_grad(), pytest.raises(ValueError, match=r"KbitLinear: x: found shape \[2, 64\], expected"):
        layer(torch.ones(2, 64))
    with torch.no_grad(), pytest.raises(ValueError, match="KbitLinear: columns: found on meta, expected on cpu"):
        layer.weight.parts["columns"] = layer.weight.columns.to("meta")
        layer(torch.ones(2, 33))


def test_what_8_bit_inputs_need_is_found_once_and_anew_for_another_weight():
    layer, x = with_int8(), cases.x((3,), 33)
    other = KbitLinear.from_linear(linear(9, 33), bits=4).eval()
    with torch.no_grad():
        layer(x)
        first = layer.weight.parts["inverses"]
        assert torch.equal(layer(x), by_the_op(layer, x)) and layer.weight.parts["inverses"] is first
        ways = {
            "a copy": lambda: copy.deepcopy(layer),
            "a cast": lambda: copy.deepcopy(layer).half().float(),
            "loaded": lambda: layer.load_state_dict(other.state_dict()) and layer,
            "copied into": lambda: layer.weight.copy_(with_int8().weight) is not None and layer,
            "assigned": lambda: setattr(layer, "weight", other.weight) or layer,
            "quantized": lambda: layer.load_dense(torch.randn(9, 33)) or layer,
        }
        for way, change in ways.items():
            changed = change()
            assert "inverses" not in changed.weight.parts, way
            assert torch.equal(changed(x), by_the_op(changed, x)), way
    layer = with_int8()
    with torch.inference_mode():
        layer(x)
    assert not layer.weight.parts["inverses"].is_inference(), "products outside of it may get them too"


def test_errors_of_a_library_name_the_layer(monkeypatch):
    """Whatever torch makes of them; other errors stay what they are."""
    layer = KbitLinear.from_linear(linear())
    for error, expected, said in (
        (RuntimeError("x: found shape [3]"), ValueError, r"^KbitLinear: x: found shape \[3\]$"),
        (ValueError("x: found shape [3]"), ValueError, r"^KbitLinear: x: found shape \[3\]$"),
        (RuntimeError("device-side assert"), RuntimeError, "^device-side assert$"),
        (torch.OutOfMemoryError("x: found none"), torch.OutOfMemoryError, "^x: found none$"),
    ):

        def fails(*_, error=error):
            raise error

        monkeypatch.setattr(type(layer.weight), "product", staticmethod(fails))
        with pytest.raises(expected, match=said) as raised:
            layer(torch.ones(1, 33))
        assert raised.type is expected
