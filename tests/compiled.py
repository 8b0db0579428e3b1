"""What tests of compiled kernels share: what they go through, weights, and streams and graphs that must not show."""

import functools
from dataclasses import dataclass, replace

import cases
import pytest
import torch

from hf_kbit.ops import native

OPS = torch.ops.hf_kbit
# The ``pytestmark`` of a file for GPUs alone.
NEEDED = [
    pytest.mark.gpu,
    pytest.mark.skipif(not native.library("cuda").loaded, reason=f"CUDA library: {native.library('cuda').missing}"),
]
BITS = pytest.mark.parametrize("bits", cases.BITS)
HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
FORMS = pytest.mark.parametrize("tiled", [False, True], ids=["planes", "tiles"])
BOTH = pytest.mark.parametrize(("scaled", "rotated"), cases.TRANSFORMS, ids=["columns", "rotated", "both"])
TRANSFORMS = pytest.mark.parametrize(
    ("scaled", "rotated"), [(False, False), *cases.TRANSFORMS], ids=["plain", "columns", "rotated", "both"]
)


def cuda_arch() -> int:
    """The architecture (800 for compute capability 8.0) that products are planned for: of the code that runs on the
    current GPU, which may have been built for an older one. 0 without a GPU or library."""
    return native._cuda_number("arch")


def is_hopper() -> bool:
    return cuda_arch() == 900


def to(device, *tensors):
    """Each on the device, or None."""
    return [None if tensor is None else tensor.to(device) for tensor in tensors]


def random_levels(bits: int) -> torch.Tensor:
    """A codebook that no quantizer would make: not symmetric, no level is zero or one."""
    return torch.randn(2**bits, generator=cases.generator(bits)).sort().values.cuda()


@dataclass
class Weight:
    """Of any codes and scales, ``[*, N, K]``, on the GPU, and products with it."""

    shape: tuple[int, int]
    planes: tuple[torch.Tensor, torch.Tensor]
    tiles: tuple[torch.Tensor, torch.Tensor]
    codebook: torch.Tensor
    columns: torch.Tensor | None
    rotated: bool

    @classmethod
    def random(cls, shape, bits, scaled=False, rotated=False, codebook=None):
        tiles, planes = cases.tiles_on_gpu(shape, bits)
        columns = cases.columns(shape[-1]).cuda() if scaled else None
        codebook = cases.codebook(bits).cuda() if codebook is None else codebook
        return cls(tuple(shape[-2:]), planes, tiles, codebook, columns, rotated)

    @functools.cached_property
    def stored(self) -> torch.Tensor:
        """float32, as ``cases.assert_product`` wants it, but for ``[*, N, K]``."""
        return cases.stored(*self.planes, self.codebook, self.rotated)[..., : None if self.rotated else self.shape[1]]

    def multiply(self, x, bias=None, tiled=True):
        packed = self.tiles if tiled else self.planes
        return OPS.gemm(x, *packed, self.codebook, bias, self.shape[0], self.columns, self.rotated)

    def gradient(self, grad, tiled=True):
        packed = self.tiles if tiled else self.planes
        return OPS.gemm_gradient(grad, *packed, self.codebook, list(self.shape), self.columns, self.rotated)

    def check(self, found, x, bias=None, roundings=1):
        """That it is the product of x."""
        cases.assert_product(found, x, self.stored.T, bias, roundings, self.columns, self.rotated)

    def moved(self) -> "Weight":
        return replace(self, tiles=[*map(moved, self.tiles)], planes=[*map(moved, self.planes)])


WAYS = ("even", "random", "one", "short")


def divided(count, rows, how) -> torch.Tensor:
    """Offsets of experts: rows divided evenly, at random (some experts have none), all to one, or some to nobody."""
    if how == "even":
        inner = torch.arange(1, count) * rows // count
    elif how == "one":
        inner = torch.tensor([0] * (count // 2) + [rows] * (count - 1 - count // 2))
    else:
        inner = torch.randint(0, rows + 1, (count - 1,), generator=cases.generator(count, rows)).sort().values
    offsets = torch.tensor([0, *inner.tolist(), rows])
    return (offsets * 2 // 3 if how == "short" else offsets).int().cuda()


def picked_rows(tokens, rows, seed=0) -> torch.Tensor:
    return torch.randint(0, tokens, (rows,), generator=cases.generator(tokens, rows, seed)).int().cuda()


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """The same where no 16 bytes that a kernel reads at once start, as a loaded tensor may lie.

    On a CPU it starts at an odd byte, as in a file that is mapped into memory.
    """
    if tensor.device.type == "cpu":
        data = bytearray(b"?") + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        return torch.frombuffer(data, dtype=tensor.dtype, offset=1).view(tensor.shape)
    found = torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)
    assert found.is_contiguous() and found.data_ptr() % 16
    return found


def assert_near_in_float16(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal, but for numbers that are rounded first with more range: twice, where float16 loses digits."""
    few_digits = (expected.abs() < 2.0**-14) & (expected.dtype == torch.float16)
    assert ((found - expected).abs() <= 2.0**-24)[few_digits].all()
    assert torch.equal(torch.where(few_digits, expected, found), expected)


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor, told: object = None) -> None:
    """Of 16-bit numbers. Zeros of either sign differ; one NaN is as good as another."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape and found.is_contiguous()
    same = (found.view(torch.int16) == wanted.view(torch.int16)) | (found.isnan() & wanted.isnan())
    assert same.all(), (told, f"{int((~same).sum())} of {same.numel()} differ", (~same).nonzero()[:3].tolist())


def rows_with_special_numbers(run, x: torch.Tensor) -> torch.Tensor:
    """What ``run`` makes of a row of x with infinity, and of one with NaN; others stay the same, to the last bit."""
    expected, rows = run(x), []
    for special in (float("inf"), float("nan")):
        spoilt = x.clone()
        spoilt[2, 100] = special
        found = run(spoilt)
        others = torch.arange(len(x), device=x.device) != 2
        assert torch.equal(found[others], expected[others])
        rows.append(found[2])
    return torch.stack(rows)


def assert_replayed(run, inputs: list[tuple[torch.Tensor, ...]]) -> None:
    """A CUDA graph of ``run`` reads new inputs at each replay; the first are those that it is captured with."""
    held = [tensor.clone() for tensor in inputs[0]]
    run(*held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(*held)
    for given in inputs:
        for tensor, value in zip(held, given, strict=True):
            tensor.copy_(value)
        graph.replay()
        torch.testing.assert_close(found, run(*given), rtol=0, atol=0)


def assert_same_on_streams(run, inputs: list[torch.Tensor], turns: int) -> None:
    """Nothing is shared between calls: streams at once give what each gives alone, to the last bit."""
    expected = [run(x) for x in inputs]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in inputs], [[] for _ in inputs]
    for _ in range(turns):
        for x, stream, outputs in zip(inputs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(run(x))
    torch.cuda.synchronize()
    for outputs, alone in zip(found, expected, strict=True):
        assert all(torch.equal(output, alone) for output in outputs)
