"""set_batch_invariant: a token's product is the same to the last bit in every batch."""

import functools

import cases
import pytest
import torch
from compiled import cuda_arch
from contract import REFUSALS, Call, arbitrary, batch_invariant, gemm, gemm_group

import hf_kbit
from hf_kbit.ops import native

BATCHES = [slice(*ends) for ends in ((0, 1), (7, 8), (0, 2), (3, 19), (0, 17), (0, 33), (10, 110), (0, 256))]
TRANSFORMED = pytest.mark.parametrize("transformed", [False, True], ids=["plain", "transformed"])


@pytest.fixture
def device(device):
    """One with such products."""
    if not native.library(device).loaded or (device == "cuda" and cuda_arch() < 800):
        pytest.skip(f"no such products on {device}")
    return device


def dtypes(device):
    return (torch.float16, torch.bfloat16) if device == "cuda" else cases.FLOATS


def rows_on(device) -> int:
    """So many that work is divided."""
    return 700 if device == "cuda" else 70


def as_layers_hold_it(call: Call, device) -> Call:
    return call.forms()[device == "cuda"]


def differing(make, x, device) -> list[slice]:
    """The batches in which a token's products are not what they are among all of them."""

    def products(x):
        return as_layers_hold_it(make(x=x), device).run(device)

    whole = products(x)
    return [batch for batch in BATCHES if not all(map(torch.equal, products(x[batch]), [y[batch] for y in whole]))]


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("large", [False, True])
@TRANSFORMED
def test_same_bits_in_every_batch(device, large, bits, transformed):
    shape = (rows_on(device), 8192) if large else (35, 1000)
    make = functools.partial(gemm, weight=arbitrary(shape, bits, transformed, transformed), roundings=2)
    for dtype in dtypes(device):
        x = cases.x((300,), shape[1], dtype) * 2.0**-6
        with batch_invariant():
            assert not differing(make, x, device), dtype
            as_layers_hold_it(make(x=x[:40]), device).hold(device)


def test_without_it_batches_differ(device):
    """Or the test above could not fail."""
    make = functools.partial(gemm, weight=arbitrary((rows_on(device), 8192), 4))
    assert differing(make, cases.x((300,), 8192, torch.float16) * 2.0**-6, device)


@pytest.mark.parametrize("rotated", [(False,) * 4, (True,) * 4, (False, True, False, False)], ids=str)
def test_a_group_gives_what_each_gives_alone(device, rotated):
    """Of more tiles than an H200 has processors, each of them a tile's whole K."""
    rows = (40, 200, 16, 700) if device == "cpu" else (40, 9000, 16, 1700)
    weights = [arbitrary((n, 512), 3, its, its) for n, its in zip(rows, rotated, strict=True)]
    x = cases.x((300,), 512, torch.bfloat16)
    with batch_invariant():
        alone = [as_layers_hold_it(gemm(x=x, weight=weight), device).run(device)[0] for weight in weights]
        for tokens in (1, 20, 70, 300):
            group = as_layers_hold_it(gemm_group(weights, x=x[:tokens], biased=(True,)), device)
            for ours, whole in zip(group.run(device), alone, strict=True):
                assert torch.equal(ours, whole[:tokens])


def test_a_compiled_layer(device):
    """What was compiled before does as it was told after."""
    linear = torch.nn.Linear(8192, rows_on(device), dtype=torch.float16)
    layer = hf_kbit.KbitLinear.from_linear(linear, bits=4).to(device)
    x = cases.x((300,), 8192, torch.float16).to(device)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)

    def same():  # of tokens alone and together: few of them may be so by chance
        return torch.equal(compiled(x)[:16], torch.cat([compiled(token) for token in x[:16].split(1)]))

    with torch.no_grad():
        assert not same()
        with batch_invariant():
            assert same()


def test_gradients_are_as_without_it(device):
    layer = hf_kbit.KbitLinear.from_linear(torch.nn.Linear(256, 64, dtype=torch.bfloat16), bits=4).to(device)
    gradients = []
    for enabled in (True, False):
        x = cases.x((5,), 256, torch.bfloat16).to(device).requires_grad_()
        with batch_invariant(enabled):
            layer(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_what_has_no_such_product_is_refused(device):
    """float64; on a GPU float32 and planes too."""
    planes, tiles = gemm(4, torch.float64).forms()
    wrong = [(planes, r"x: found dtype float64.*expected.*batch-invariant")]
    if device == "cuda":
        float32 = "x: found dtype float32, the weight in tiles, expected float16 or bfloat16"
        wrong = [(tiles, wrong[0][1]), (gemm(4).forms()[1], float32)]
        wrong.append((gemm(4, torch.float16), "the weight in bit-planes, expected"))
    for call, message in wrong:
        with batch_invariant(), pytest.raises(REFUSALS, match=message):
            call.run(device)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_only_true_and_false(value):
    with pytest.raises(TypeError, match=r"enabled: found .*, expected True or False"):
        hf_kbit.set_batch_invariant(value)


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_of_large_layers_and_many_tokens():
    """Shapes whose tiles are divided otherwise, and more tokens than are else multiplied without decoding first."""
    if cuda_arch() < 800:
        pytest.skip("no fused products")
    for shape, tokens in [((10240, 8192), 64), ((4096, 4096), 5000)]:
        linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16, device="cuda")
        layer = hf_kbit.KbitLinear.from_linear(linear, bits=3)
        x = cases.x((tokens,), shape[1], torch.bfloat16).cuda()
        with torch.no_grad(), batch_invariant():
            whole = layer(x)
            for batch in (slice(0, 1), slice(5, 21), slice(tokens - 40, tokens)):
                assert torch.equal(layer(x[batch]), whole[batch]), (shape, batch)
