"""The shapes, weights, inputs and bounds that tests, benchmarks and sanitizer runs share."""

import collections
import functools
import re
from pathlib import Path

import torch

from hf_kbit import codebooks
from hf_kbit.format import reference, transforms
from hf_kbit.format import spec as format
from hf_kbit.format.spec import BITS as BITS
from hf_kbit.nn.weight import KbitWeight
from hf_kbit.weight.packing import quantize_weight

# [N, K]: one weight, less than a block, exact blocks, a padded last block, exact and padded tiles (16 rows x 256
# columns), more rows than columns and the reverse.
SHAPES = [(1, 1), (3, 31), (5, 32), (7, 33), (16, 256), (17, 257), (64, 100), (130, 64), (2, 1500)]

# Leading dimensions of x: none, one token, several, nested, empty.
BATCHES = [(), (1,), (5,), (2, 3), (1, 1, 4), (0,), (2, 0)]

# Of a weight that is stored transformed: whether it has column scales, and whether its blocks are rotated.
TRANSFORMS = [(True, False), (False, True), (True, True)]

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@functools.cache
def format_page() -> dict:
    """What the reader of docs/format.md defines: the format in plain Python."""
    page = Path(__file__).parents[1] / "docs" / "format.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile(code, str(page), "exec"), names := {})
    return names


def generator(*seed: int) -> torch.Generator:
    """A generator seeded by a tuple of small numbers, so that every case has data of its own."""
    number = 0
    for part in seed:
        number = number * 10007 + part
    return torch.Generator().manual_seed(number)


def codebook(bits: int) -> torch.Tensor:
    return torch.tensor(codebooks.normal_float(bits))


def weight(shape, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Gaussian weights of rows of very different size, with outliers, a block of zeros and negative zeros."""
    rng = generator(*shape, seed)
    values = torch.randn(*shape, generator=rng) * 0.02
    values *= torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1), generator=rng).float())
    values[torch.rand(*shape, generator=rng) < 0.01] *= 20
    if values[..., 0, :].numel() > 64:
        values[..., 0, 32:64] = 0.0
    values[..., -1, -1] = -0.0
    return values.to(dtype)


def give_own_levels(model: torch.nn.Module) -> None:
    """Quantizes each quantized layer of a model again, to levels that no other has, as hf_kbit 0.1.0 did for
    the codebook ``"layer"``."""
    for seed, layer in enumerate(module for module in model.modules() if isinstance(module, KbitWeight)):
        inner = torch.rand(2**layer.bits - 2, generator=generator(seed)) - 0.5
        levels = (-1.0, *inner.sort().values.tolist(), 1.0)
        layer.load(quantize_weight(layer.dequantize(), levels, search=True, transform=layer.recipe.transform))


def columns(in_features: int, scaled: bool = True, seed: int = 0) -> torch.Tensor | None:
    """Scales of columns from 1/4 to 4 as E4M4 bytes, or None."""
    return torch.randint(144, 209, (in_features,), generator=generator(in_features, seed)).byte() if scaled else None


def quantized(shape, bits: int, seed: int = 0, columns: torch.Tensor | None = None, rotated: bool = False):
    """planes, absmax and codebook of ``weight(shape)``, transformed."""
    levels = codebook(bits) * (16 if rotated else 1)  # scales with signs end below 2**-3
    scales = None if columns is None else reference.decode_e4m4(columns)
    stored = transforms.to_stored(weight(shape, seed=seed), scales, rotated)
    return (*torch.ops.hf_kbit.quantize(stored, levels, signed=rotated), levels)


def stored(planes, absmax, codebook: torch.Tensor, signed: bool) -> torch.Tensor:
    """The float32 weight ``[*, N, 32 * B]`` that codes and scales, with signs or not, stand for; not turned back."""
    levels = codebook[reference.unpack_codes(planes, codebook.numel().bit_length() - 1).int()]
    return (levels * reference.decode_scales(absmax, signed)[..., None]).flatten(-2)


def random_packed(shape, bits: int):
    """Any words are codes and any bytes are scales: all 256 of them come up."""
    *lead, rows, columns = shape
    rng = generator(*shape, bits)
    words = (*lead, *format.weight_shape(rows, columns, bits))
    scales = (*lead, *format.absmax_shape(rows, columns))
    planes = torch.randint(-(2**31), 2**31, words, generator=rng).to(torch.int32)
    return planes, torch.randint(0, 256, scales, generator=rng, dtype=torch.uint8)


def tiles_on_gpu(shape, bits: int):
    """Tiles of ``random_packed`` and the planes that they were made from, on a GPU."""
    planes = [tensor.cuda() for tensor in random_packed(shape, bits)]
    return torch.ops.hf_kbit.repack(*planes, bits, list(shape[-2:])), planes


def launched(call) -> collections.Counter:
    """How often a call that has run before launches each kernel; what is no kernel counts under its whole name."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    found = collections.Counter()
    for event in profile.key_averages():
        if event.self_device_time_total > 0:
            ours = re.search(r"\w+_kernel(?=[<(I])", event.key)
            found[ours[0] if ours else event.key] += event.count
    return found


def x(batch, in_features: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*batch, in_features, generator=generator(*batch, in_features, seed)).to(dtype)


# Spacing of the numbers around 1.
EPS = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7, torch.float64: 2.0**-52}


def assert_product(found, x, dense, bias=None, roundings: int = 1, columns=None, rotated: bool = False):
    """That ``found`` is ``x @ dense + bias`` within rounding; ``dense`` float32 ``[K, N]``, of which each weight was
    rounded to the dtype of x so many times at most. With ``columns`` or ``rotated``, ``dense`` is the weight as it is
    stored, all rows of its last blocks, and either it or x was transformed in float32, and x rounded once more."""
    scales = None if columns is None else reference.decode_e4m4(columns).double()
    x, dense = x.double(), dense.double()
    bias = torch.zeros((), dtype=torch.float64, device=x.device) if bias is None else bias.double()
    expected = transforms.of_input(x, scales, rotated) @ dense + bias
    # No weight or input of a block is larger, in either basis, than the sum of all of them times 32**-0.5.
    spread = transforms.of_input(x.abs(), scales, False)
    if rotated:
        spread = torch.nn.functional.pad(spread, (0, len(dense) - spread.shape[-1])).unflatten(-1, (-1, 32))
        spread = (spread.sum(-1, keepdim=True) * 32**-0.5).expand_as(spread).flatten(-2)
    magnitude = spread @ dense.abs() + bias.abs()
    transformed = columns is not None or rotated
    # Rounded weights, K + 1 terms added up in float32, the sum rounded once; a transform is 7 operations of float32.
    # Small weights and sums are rounded to multiples of the smallest number.
    relative = (roundings + transformed) * EPS[found.dtype] / 2
    relative += (len(dense) + 1 + 7 * transformed) * EPS[torch.float32]
    smallest = torch.finfo(found.dtype).smallest_normal * EPS[found.dtype]
    bound = magnitude * relative + expected.abs() * EPS[found.dtype] + 1e-30
    bound += smallest / 2 * (1 + roundings * x.abs().sum(-1, keepdim=True))
    assert ((found.double() - expected).abs() <= bound).all()
