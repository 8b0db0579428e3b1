"""set_batch_invariant: a token's product is the same to the last bit in every batch."""

import cases
import pytest
import torch
from compiled import OPS, cuda_arch, to

import hf_kbit
from hf_kbit.format import reference

BATCHES = [slice(*ends) for ends in ((0, 1), (7, 8), (0, 2), (3, 19), (0, 17), (0, 33), (10, 110), (0, 256))]


@pytest.fixture
def invariant():
    hf_kbit.set_batch_invariant(True)
    yield
    hf_kbit.set_batch_invariant(False)


def weight_on(device, shape, bits, transformed):
    """What ``gemm`` wants after x, as a layer on the device holds it, and the weight as it is stored."""
    planes, codebook = cases.random_packed(shape, bits), cases.codebook(bits)
    columns = cases.columns(shape[1], transformed)
    stored = cases.stored(*planes, codebook, transformed)[:, : None if transformed else shape[1]]
    form = planes if device == "cpu" else reference.repack(*planes, bits, list(shape))
    return (*to(device, *form, codebook, None), shape[0], *to(device, columns), transformed), stored, columns


def differing(x, weight) -> list[slice]:
    """The batches in which a token's product is not what it is among all of them."""
    whole = OPS.gemm(x, *weight)
    return [batch for batch in BATCHES if not torch.equal(OPS.gemm(x[batch], *weight), whole[batch])]


def rows_on(device) -> int:
    """So many that work is divided."""
    return 700 if device == "cuda" else 70


def dtypes(device):
    return (torch.float16, torch.bfloat16) if device == "cuda" else (torch.float32, torch.float16, torch.bfloat16)


def skip_without_products(device):
    if device == "cuda" and cuda_arch() < 800:
        pytest.skip("no fused products")


@pytest.mark.parametrize("transformed", [False, True], ids=["plain", "transformed"])
@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("large", [False, True])
def test_same_bits_in_every_batch(device, invariant, large, bits, transformed):
    skip_without_products(device)
    shape = (rows_on(device), 8192) if large else (35, 1000)
    weight, stored, columns = weight_on(device, shape, bits, transformed)
    for dtype in dtypes(device):
        x = cases.x((300,), shape[1], dtype).to(device) * 2.0**-6
        assert not differing(x, weight), dtype
        found = OPS.gemm(x[:40], *weight).cpu()
        cases.assert_product(found, x[:40].cpu(), stored.T, None, 2, columns, transformed)


def test_without_it_batches_differ(device):
    """Or the test above could not fail."""
    skip_without_products(device)
    weight, *_ = weight_on(device, (rows_on(device), 8192), 4, False)
    assert differing(cases.x((300,), 8192, torch.float16).to(device), weight)


@pytest.mark.gpu
def test_of_large_layers_and_many_tokens(invariant):
    """Shapes whose tiles are divided otherwise, and more tokens than are else multiplied without decoding first."""
    skip_without_products("cuda")
    for shape, tokens in [((10240, 8192), 64), ((4096, 4096), 5000)]:
        linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16, device="cuda")
        layer = hf_kbit.KbitLinear.from_linear(linear, bits=3)
        x = cases.x((tokens,), shape[1], torch.bfloat16).cuda()
        with torch.no_grad():
            whole = layer(x)
            for batch in (slice(0, 1), slice(5, 21), slice(tokens - 40, tokens)):
                assert torch.equal(layer(x[batch]), whole[batch]), (shape, batch)


def test_a_compiled_layer(device):
    """What was compiled before does as it was told after."""
    skip_without_products(device)
    torch.manual_seed(0)
    linear = torch.nn.Linear(8192, rows_on(device), dtype=torch.float16)
    layer = hf_kbit.KbitLinear.from_linear(linear, bits=4).to(device)
    x = cases.x((300,), 8192, torch.float16).to(device)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)

    def same():  # of tokens alone and together: few of them may be so by chance
        return torch.equal(compiled(x)[:16], torch.cat([compiled(token) for token in x[:16].split(1)]))

    with torch.no_grad():
        assert not same()
        hf_kbit.set_batch_invariant(True)
        try:
            assert same()
        finally:
            hf_kbit.set_batch_invariant(False)


@pytest.mark.parametrize("rotated", [(False,) * 4, (True,) * 4, (False, True, False, False)], ids=str)
def test_a_group_gives_what_each_gives_alone(device, invariant, rotated):
    """Of more tiles than an H200 has processors, each of them a tile's whole K."""
    skip_without_products(device)
    rows = (40, 200, 16, 700) if device == "cpu" else (40, 9000, 16, 1700)
    weights = [weight_on(device, (n, 512), 3, its)[0] for n, its in zip(rows, rotated, strict=True)]
    x = cases.x((300,), 512, torch.bfloat16).to(device)
    of_each = [list(column) for column in zip(*weights, strict=True)]
    alone = [OPS.gemm(x, *weight) for weight in weights]
    for tokens in (1, 20, 70, 300):
        for ours, whole in zip(OPS.gemm_group(x[:tokens], *of_each, [None] * 4), alone, strict=True):
            assert torch.equal(ours, whole[:tokens])


def test_gradients_are_as_without_it(device, invariant):
    layer = hf_kbit.KbitLinear.from_linear(torch.nn.Linear(256, 64, dtype=torch.bfloat16), bits=4).to(device)
    x = cases.x((5,), 256, torch.bfloat16).to(device).requires_grad_()
    layer(x).sum().backward()
    hf_kbit.set_batch_invariant(False)
    again = x.detach().requires_grad_()
    layer(again).sum().backward()
    assert torch.equal(x.grad, again.grad)


def test_float64_is_refused(device, invariant):
    weight, *_ = weight_on(device, (35, 1000), 4, False)
    with pytest.raises(ValueError, match=r"x: found dtype float64.*expected.*batch-invariant"):
        OPS.gemm(cases.x((2,), 1000, torch.float64).to(device), *weight)


@pytest.mark.gpu
def test_float32_and_planes_are_refused_on_a_gpu(invariant):
    weight, *_ = weight_on("cuda", (35, 1000), 4, False)
    with pytest.raises(ValueError, match="x: found dtype float32, the weight in tiles, expected float16 or bfloat16"):
        OPS.gemm(cases.x((2,), 1000).cuda(), *weight)
    planes = [tensor.cuda() for tensor in cases.random_packed((35, 1000), 4)]
    with pytest.raises(ValueError, match="the weight in bit-planes, expected"):
        OPS.gemm(cases.x((2,), 1000, torch.float16).cuda(), *planes, weight[2], None, 35)


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_only_true_and_false(value):
    with pytest.raises(TypeError, match=r"enabled: found .*, expected True or False"):
        hf_kbit.set_batch_invariant(value)
