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
from hf_kbit.format.trellis import TrellisDecoding
from hf_kbit.ops import inductor, native
from hf_kbit.weight.tensor import KbitTensor, Packed, as_parameter

OPS = torch.ops.hf_kbit
LIMITS = 512, 4  # tokens and products, as the CUDA library says


def tiled(rows: int, columns: int = 100, bits: int = 3, bias: bool = True) -> KbitLinear:
    layer = KbitLinear.from_linear(nn.Linear(columns, rows, bias=bias, dtype=torch.float16), bits).requires_grad_(
        False
    )
    layer.weight = as_parameter(layer.weight._repacked(inverse=False))
    return layer


def with_trellis(rows: int, bits: int = 3, **how) -> KbitLinear:
    made, decoding = KbitLinear(100, rows, bias=rows == 48, dtype=torch.float16), TrellisDecoding(bits, **how)
    tensors = {
        name: torch.randint(-9, 9, size, dtype=torch.int16) if dtype == torch.int16 else torch.ones(size).half()
        for name, (dtype, size) in decoding.layout((rows, 100)).items()
    }
    made.weight = as_parameter(KbitTensor.of(Packed(tensors, decoding), (rows, 100), torch.float16))
    return made.requires_grad_(False)


def joined(run, *inputs, limits=LIMITS) -> list[list[int]]:
    """The rows of the products of each op in what is left of ``run``, which still gives the same."""
    launches = []

    def compiler(module, _):
        inductor.JoinProducts(*limits)(module.graph)
        module.graph.lint()
        module.recompile()
        for node in module.graph.nodes:
            if node.target == OPS.gemm_group.default:
                launches.append(list(node.args[5]))
            elif node.target == OPS.gemm_trellis_group.default:
                launches.append(list(node.args[5]))
            elif node.target == OPS.gemm_trellis_inference.default:
                launches.append([node.args[5][0]])
            elif node.target in inductor.PRODUCTS:
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
def test_products_of_one_input_and_width_are_joined():
    """As many as one op takes, whatever their transforms are; what has none may leave them out."""
    q, k, wide, other = tiled(48), tiled(16, bias=False), tiled(33, bits=4), tiled(20)
    assert joined(lambda x: (q(x) * 2, k(x), wide(x), other(x + 1)), X) == [[48, 16], [33], [20]]
    layers = [tiled(rows) for rows in range(16, 25)]
    launches = joined(lambda x: [layer(x) for layer in layers], X)
    assert sorted(launches) == [[16, 17, 18, 19], [20, 21, 22, 23], [24]]
    assert joined(lambda x: [layer(x) for layer in layers[:3]], X, limits=(6, 2)) == [[16, 17], [18]]
    columns = [cases.columns(100, seed=seed) for seed in range(2)]
    transforms = (columns[0], True), (columns[1],), (None, True), ()
    each = [*zip(layers[:4], transforms, strict=True)]
    assert joined(lambda x: [product(x, layer, *how) for layer, how in each], X) == [[16, 17, 18, 19]]


@torch.no_grad()
def test_products_of_8_bit_inputs_are_joined():
    """With each other, where their inverses are known."""
    q, k, exact, like_q = (tiled(rows) for rows in (48, 16, 33, 48))
    for layer in (q, k):
        layer.eval().take_inputs("int8")
    assert joined(lambda x: (q(x), exact(x), k(x), product(x, exact)), X) == [[48, 16], [33, 33]]

    def without(x):
        packed = q.weight.words, q.weight.absmax, q.weight.codebook
        return [OPS.gemm_int8(x, *packed, layer.bias, 48, q.weight.columns) for layer in (q, like_q)]

    assert joined(without, X) == [[48], [48]]


@torch.no_grad()
def test_products_of_trellises_are_joined():
    """With those of their width, code and block, and of no more tokens than one op takes."""

    q, k, wide, other = with_trellis(48), with_trellis(16), with_trellis(33, bits=4), with_trellis(20, code="mcg")
    assert joined(lambda x: (q(x), k(x), wide(x), other(x)), X) == [[48, 16], [33], [20]]
    assert joined(lambda x: (q(x), k(x)), X, limits=(5, 2)) == [[48], [16]]
    scalar = tiled(24)
    assert joined(lambda x: (q(x), scalar(x), k(x)), X) == [[48, 16], [24]]


@torch.no_grad()
def test_what_no_op_takes_stays_apart():
    """Too many tokens, or none, or a dtype without kernel; and planes."""
    q, k = tiled(48, bias=False), tiled(16, bias=False)
    run = lambda x: (q(x), k(x))  # noqa: E731
    for x in (cases.x((513,), 100, torch.float16), cases.x((0,), 100, torch.float16), cases.x((3,), 100)):
        assert joined(run, x) == [[48], [16]]
    assert joined(run, X, limits=(5, 2)) == [[48], [16]]
    assert joined(lambda x: (q(x), k(x)), cases.x((512,), 100, torch.float16)) == [[48, 16]]
    q, k = (KbitLinear.from_linear(nn.Linear(100, rows, bias=False)) for rows in (48, 16))
    assert joined(lambda x: (q(x), k(x)), X) == [[48], [16]]


@torch.no_grad()
def test_what_is_made_of_another_product_comes_after_it():
    q, k, v = tiled(48), tiled(48, bias=False), tiled(16)

    def by_bias(x):
        first = q(x)
        return first, OPS.gemm_inference(x, k.weight.words, k.weight.absmax, k.weight.codebook, first[0, 0], 48), v(x)

    def by_columns(x):
        first = product(x, q)
        return first, product(x, k, (first[0, 0, :1].abs() * 8 + 150).byte().expand(100).contiguous()), product(x, v)

    assert joined(by_bias, X) == joined(by_columns, X) == [[48, 16], [48]]


@torch.no_grad()
@config.patch(post_grad_custom_pre_pass=None, force_disable_caches=True)
@pytest.mark.parametrize(("make", "op"), [(tiled, "gemm"), (with_trellis, "gemm_trellis")], ids=["levels", "trellis"])
def test_compiled_with_inductor(make, op, monkeypatch):
    """Of one kind alone, whichever it is."""
    monkeypatch.setattr(native, "group_limits", lambda: LIMITS)
    q, k, v = make(48), make(16), make(33)

    def run(x):  # of which no C++ is compiled, which takes seconds
        return q(x), k(x), v(x)

    found, (code,) = run_and_get_code(torch.compile(run, fullgraph=True), X)
    for ours, expected in zip(found, run(X), strict=True):
        torch.testing.assert_close(ours, expected)
    assert code.count(f"{op}_group.default(") == 1
    assert "_inference.default(" not in code


def test_installed_where_a_library_joins_products(monkeypatch):
    """And where no other has the only place."""
    found = []
    for limits, before in (((5, 3), print), ((0, 0), None), ((5, 3), None)):
        monkeypatch.setattr(native, "group_limits", lambda limits=limits: limits)
        with config.patch(post_grad_custom_pre_pass=before):
            inductor.install()
            found.append(config.post_grad_custom_pre_pass)
    assert found[:2] == [print, None] and (found[2].most_tokens, found[2].most_products) == (5, 3)
    assert found[2].uuid() != inductor.JoinProducts(5, 4).uuid()  # Inductor's cache tells them apart


def test_limits_are_the_librarys():
    assert native.group_limits() == (LIMITS if native.library("cuda").loaded else (0, 0))


def test_products_that_need_gradients_are_not_joined():
    """They are another op, with autograd."""
    q, k = tiled(48), tiled(16)
    assert joined(lambda x: (q(x), k(x)), X.clone().requires_grad_()) == []
