"""Products of one input, joined where Inductor compiles. Tiles on the CPU pass for tiles on a GPU."""

import cases
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from hf_kbit import KbitLinear
from hf_kbit.ops import inductor, native

OPS = torch.ops.hf_kbit
LIMITS = 16, 4  # tokens and products of a launch, as the CUDA library says


def tiled(rows: int, columns: int = 100, bits: int = 3, bias: bool = True) -> KbitLinear:
    layer = KbitLinear.from_linear(nn.Linear(columns, rows, bias=bias, dtype=torch.float16), bits).requires_grad_(
        False
    )
    layer.weight = as_parameter(layer.weight._repacked(inverse=False))
    return layer


def joined(run, *inputs, limits=LIMITS) -> list[list[int]]:
    """The rows of the products of each launch in what is left of ``run``, which still gives the same."""
    launches = []

    def compiler(module, _):
        inductor.JoinProducts(*limits)(module.graph)
        module.graph.lint()
        module.recompile()
        for node in module.graph.nodes:
            if node.target == OPS.gemm_group.default:
                launches.append(list(node.args[5]))
            elif node.target == OPS.gemm_inference.default:
                launches.append([node.args[5]])
        return make_boxed_func(module.forward)

    found = torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(*inputs)
    for ours, expected in zip(found, run(*inputs), strict=True):
        assert torch.equal(ours, expected)
    return launches


def product(x, layer, *transform):
    packed = layer.weight.words, layer.weight.absmax, layer.weight.codebook
    return OPS.gemm_inference(x, *packed, layer.bias, layer.out_features, *transform)


X = cases.x((2, 3), 100, torch.float16)


@torch.no_grad()
def test_products_of_one_input_are_joined():
    q, k, v = tiled(48), tiled(16, bias=False), tiled(33)
    assert joined(lambda x: (q(x) * 2, k(x), v(x)), X) == [[48, 16, 33]]


@torch.no_grad()
def test_other_inputs_and_widths_stay_apart():
    q, k, wide, other = tiled(48), tiled(16), tiled(33, bits=4), tiled(20)
    assert joined(lambda x: (q(x), k(x), wide(x), other(x + 1)), X) == [[48, 16], [33], [20]]


@torch.no_grad()
def test_most_products_of_a_launch():
    layers = [tiled(rows) for rows in (16, 17, 18, 19, 20, 21, 22, 23, 24)]
    launches = joined(lambda x: [layer(x) for layer in layers], X)
    assert sorted(launches) == [[16, 17, 18, 19], [20, 21, 22, 23], [24]]


@torch.no_grad()
@pytest.mark.parametrize(
    "x",
    [cases.x((17,), 100, torch.float16), cases.x((0,), 100, torch.float16), cases.x((3,), 100)],
    ids=["too many tokens", "none", "float32"],
)
def test_what_no_launch_takes_stays_apart(x):
    q, k = tiled(48, bias=False), tiled(16, bias=False)
    assert joined(lambda x: (q(x), k(x)), x) == [[48], [16]]


@torch.no_grad()
def test_planes_stay_apart():
    q, k = (KbitLinear.from_linear(nn.Linear(100, rows, bias=False)) for rows in (48, 16))
    assert joined(lambda x: (q(x), k(x)), X) == [[48], [16]]


@torch.no_grad()
def test_a_bias_made_of_another_product_comes_after_it():
    q, k, v = tiled(48), tiled(48, bias=False), tiled(16)

    def run(x):
        first = q(x)
        return first, OPS.gemm_inference(x, k.weight, k.weight.absmax, k.codebook, first[0, 0], 48), v(x)

    assert joined(run, X) == [[48, 16], [48]]


@torch.no_grad()
def test_transforms_go_along():
    """Products are joined whatever their column scales and rotations are; what has neither may leave them out."""
    q, k, v, o = tiled(48), tiled(16, bias=False), tiled(33), tiled(20)
    columns = [cases.columns(100, seed=seed) for seed in range(2)]
    transforms = (columns[0], True), (columns[1],), (None, True), ()

    def run(x):
        return [product(x, layer, *transform) for layer, transform in zip((q, k, v, o), transforms, strict=True)]

    assert joined(run, X) == [[48, 16, 33, 20]]


@torch.no_grad()
def test_columns_made_of_another_product_come_after_it():
    q, k, v = tiled(48), tiled(48, bias=False), tiled(16)

    def run(x):
        first = product(x, q)
        return first, product(x, k, (first[0, 0, :1].abs() * 8 + 150).byte().expand(100).contiguous()), product(x, v)

    assert joined(run, X) == [[48, 16], [48]]


@torch.no_grad()
@config.patch(post_grad_custom_pre_pass=None, force_disable_caches=True)
def test_compiled_with_inductor(monkeypatch):
    monkeypatch.setattr(native, "group_limits", lambda: LIMITS)
    q, k, v = tiled(48), tiled(16, bias=False), tiled(33)

    def run(x):
        return q(x) + 1, k(x).sum(-1), v(x)

    found, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), X)
    for ours, expected in zip(found, run(X), strict=True):
        torch.testing.assert_close(ours, expected)
    assert code.count("gemm_group.default(") == 1 and "gemm_inference.default(" not in code


@config.patch(post_grad_custom_pre_pass=print)
def test_a_pass_of_somebody_else_stays(monkeypatch):
    monkeypatch.setattr(native, "group_limits", lambda: LIMITS)
    inductor.install()
    assert config.post_grad_custom_pre_pass is print


@config.patch(post_grad_custom_pre_pass=None)
def test_installed_where_a_library_joins_products(monkeypatch):
    monkeypatch.setattr(native, "group_limits", lambda: (0, 0))
    inductor.install()
    assert config.post_grad_custom_pre_pass is None
    monkeypatch.setattr(native, "group_limits", lambda: (5, 3))
    inductor.install()
    found = config.post_grad_custom_pre_pass
    assert (found.most_tokens, found.most_products) == (5, 3)
    assert found.uuid() != inductor.JoinProducts(5, 4).uuid()  # Inductor's cache tells them apart


@torch.no_grad()
def test_as_many_as_the_library_says():
    layers = [tiled(rows) for rows in (16, 17, 18)]
    assert joined(lambda x: [layer(x) for layer in layers], X, limits=(6, 2)) == [[16, 17], [18]]
    assert joined(lambda x: [layer(x) for layer in layers], X, limits=(5, 2)) == [[16], [17], [18]]


def test_limits_are_the_librarys():
    assert native.group_limits() == (LIMITS if native.library("cuda").loaded else (0, 0))


def test_products_that_need_gradients_are_not_joined():
    """They are another op, with autograd."""
    q, k = tiled(48), tiled(16)
    targets = []

    def compiler(module, _):
        inductor.JoinProducts(*LIMITS)(module.graph)
        module.recompile()
        targets.extend(node.target for node in module.graph.nodes)
        return make_boxed_func(module.forward)

    def run(x):
        return q(x).sum() + k(x).sum()

    x = X.clone().requires_grad_()
    torch.compile(run, fullgraph=True, backend=aot_autograd(fw_compiler=compiler))(x).backward()
    found, x.grad = x.grad, None
    run(x).backward()
    torch.testing.assert_close(found, x.grad)
    assert targets.count(OPS.gemm.default) == targets.count(OPS.gemm_gradient.default) == 2
    assert OPS.gemm_group.default not in targets
