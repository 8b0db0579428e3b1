"""The compiled gemm against float64, for every number of tokens at which its path changes."""

import cases
import pytest
import torch

from hf_kbit import codebooks, reference

TOKENS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 70, 256, 257]
FORMS = pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])


def as_tiles(packed, codebook, shape):
    return reference.repack(*packed, codebook.numel().bit_length() - 1, list(shape))


def assert_gemm(x, packed, codebook, shape, bias, device, tiled):
    dense = reference.dequantize(*packed, codebook, list(shape), torch.float32)
    words = as_tiles(packed, codebook, shape) if tiled else packed
    inputs = [None if tensor is None else tensor.to(device) for tensor in (x, *words, codebook, bias)]
    found = torch.ops.hf_kbit.gemm(*inputs, shape[0])
    assert found.dtype == x.dtype and found.shape == (*x.shape[:-1], shape[0]) and found.is_contiguous()
    many = tiled and device != "cpu" and x.itemsize == 2 and x.numel() > 16 * shape[1]
    cases.assert_product(found.cpu(), x, dense.T, bias, roundings=2 if many else 1)  # of a level, of a weight


@pytest.fixture(autouse=True)
def full_precision_sums(device, monkeypatch):
    if device == "cpu":
        return
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("dtype", cases.FLOATS)
@FORMS
def test_every_number_of_tokens(device, tokens, bits, dtype, poison, tiled):
    shape = (35, 1000)
    *packed, codebook = cases.quantized(shape, bits)
    x, bias = cases.x((tokens,), shape[1], dtype), cases.x((), shape[0], dtype)
    poison(device, tokens * shape[0] * x.itemsize)
    assert_gemm(x, packed, codebook, shape, bias, device, tiled)


@pytest.mark.parametrize("bits", cases.BITS)
@FORMS
@pytest.mark.parametrize("shape", [*cases.SHAPES, (48, 2048), (3, 4096 + 40)], ids=str)
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_every_shape(device, shape, bits, dtype, tiled):
    *packed, codebook = cases.quantized(shape, bits)
    for tokens in (1, 6, 16, 40):
        assert_gemm(cases.x((tokens,), shape[1], dtype), packed, codebook, shape, None, device, tiled)


@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("other", [None, 0, 7, 15, 16, 31], ids="{}".format)
def test_levels_that_are_not_antisymmetric(device, other, tokens):
    """At 5 bits a CPU takes half as many look-ups where the upper levels are the lower ones with the other sign."""
    shape = (35, 520)
    packed = cases.random_packed(shape, 5)
    codebook = torch.tensor(codebooks.optimal(5, signed=True)) if other is None else cases.codebook(5)
    if other is not None:
        codebook[other] *= 0.75
    assert_gemm(cases.x((tokens,), shape[1]), packed, codebook, shape, None, device, False)


@pytest.mark.parametrize("tokens", [1, 5, 16, 40])
@pytest.mark.parametrize("dtype", cases.FLOATS)
@FORMS
@pytest.mark.parametrize("kind", ["tiny", "large", "heavy tails", "zeros", "one-hot"])
def test_kinds_of_input(device, kind, dtype, tokens, tiled):
    shape = (64, 512)
    *packed, codebook = cases.quantized(shape, 4)
    x = cases.x((tokens,), 512)
    if kind == "one-hot":
        x = torch.eye(512)[torch.randint(512, (tokens,), generator=cases.generator(tokens))]
    x = {"tiny": x * 1e-3, "large": x * 1e3, "heavy tails": x / (x[:, :1].abs() + 1e-3), "zeros": x * 0}.get(kind, x)
    assert_gemm(x.to(dtype), packed, codebook, shape, None, device, tiled)


@pytest.mark.parametrize("tokens", [1, 33])
def test_float64_is_exact(device, tokens):
    *packed, codebook = cases.quantized((35, 100), 3)
    x, bias = cases.x((tokens,), 100, torch.float64), cases.x((), 35, torch.float64)
    dense = reference.dequantize(*packed, codebook, [35, 100], torch.float64)
    found = torch.ops.hf_kbit.gemm(*(t.to(device) for t in (x, *packed, codebook, bias)), 35)
    torch.testing.assert_close(found.cpu(), torch.nn.functional.linear(x, dense, bias))


@pytest.mark.parametrize("tokens", [1, 40])
def test_large_layer_in_slices(device, tokens):
    """More weights than one slice of the CPU path holds."""
    shape = (1100, 4096)
    *packed, codebook = cases.quantized(shape, 2)
    assert_gemm(cases.x((tokens,), 4096), packed, codebook, shape, cases.x((), 1100), device, False)


@pytest.mark.parametrize("tokens", [1, 16, 40])
@FORMS
@pytest.mark.parametrize("dtype", cases.FLOATS)
def test_same_result_every_time(device, tokens, tiled, dtype):
    *packed, codebook = cases.quantized((300, 1000), 3)
    packed = as_tiles(packed, codebook, (300, 1000)) if tiled else packed
    packed, codebook = [tensor.to(device) for tensor in packed], codebook.to(device)
    x = cases.x((tokens,), 1000, dtype).to(device)
    first = torch.ops.hf_kbit.gemm(x, *packed, codebook, None, 300)
    assert all(torch.equal(first, torch.ops.hf_kbit.gemm(x, *packed, codebook, None, 300)) for _ in range(5))


BAD = {
    "x: found dtype int64": {"x": lambda t: t.long()},
    "x: found a scalar": {"x": lambda t: t[0, 0]},
    r"weight: found shape \[35, 12\]": {"x": lambda t: t[:, :31]},
    "weight: found dtype int64": {"weight": lambda t: t.long()},
    "absmax: found dtype int32": {"absmax": lambda t: t.int()},
    r"absmax: found shape \[34, 4\]": {"absmax": lambda t: t[1:]},
    "codebook: found dtype float64": {"codebook": lambda t: t.double()},
    r"codebook: found shape \[7\]": {"codebook": lambda t: t[1:]},
    "bias: found dtype float64, expected float32": {"bias": lambda t: t.double()},
    r"bias: found shape \[34\], expected \[35\]": {"bias": lambda t: t[1:]},
    "one matrix, without leading dimensions": {"weight": lambda t: t[None], "absmax": lambda t: t[None]},
}


@pytest.mark.parametrize("message", BAD)
def test_refuses(device, message):
    """The compiled op checks for itself what could make it read or write outside its tensors."""
    *packed, codebook = cases.quantized((35, 100), 3)
    tensors = dict(zip(("weight", "absmax", "codebook"), (*packed, codebook), strict=True))
    tensors |= {"x": cases.x((2,), 100), "bias": cases.x((), 35)}
    tensors = {name: BAD[message].get(name, lambda t: t)(tensor.to(device)) for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match=message):
        torch.ops.hf_kbit.gemm(*(tensors[n] for n in ("x", "weight", "absmax", "codebook", "bias")), 35)
