"""The contract of the ops: of each op how the arguments of a call are made, and what the call must give.

A function for each op, named like it, makes a ``Call``; functions below it, marked ``tried``, make those that hold on
every backend: the reference, a CPU with any instruction set, a GPU. ``tests/ops/test_contract.py`` goes through them.

- ``quantize``, ``dequantize``, ``embed``, ``repack``, ``int8_inverses``, ``gemm_int8`` and ``gemm_experts_int8`` are
  *exact*: they give the bits that ``hf_kbit.format.reference`` gives of bit-planes, which ``tests/test_reference.py``
  compares with the format's definition. So are ``encode_trellis`` and ``decode_trellis``, by ``format.trellis``, which
  ``tests/test_trellis.py`` compares with loops. ``route_experts`` gives what a stable sort in Python does.
- ``gemm``, ``gemm_inference``, ``gemm_gradient``, ``gemm_experts``, ``gemm_experts_gradient``, ``combine_experts`` and
  what ``gemm_group`` has of 16-bit inputs are products in float64, within a bound that is derived from the roundings.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import cases
import torch
from compiled import cuda_arch, is_hopper
from packaging.version import Version
from torch.utils._pytree import tree_map_only

import hf_kbit
from hf_kbit import codebooks
from hf_kbit.format import reference, transforms, trellis
from hf_kbit.ops import native

OPS = torch.ops.hf_kbit
ALL_DTYPES = [*cases.FLOATS, torch.float64]
TRANSFORMS = [(False, False), *cases.TRANSFORMS]  # scaled, rotated
SHAPE = (35, 1000)  # N and K, where another counts: both ragged, several tiles
# What is raised for what an op refuses: torch 2.15 makes RuntimeErrors of a library's ValueErrors.
REFUSALS = (ValueError, RuntimeError) if Version(torch.__version__) >= Version("2.15") else ValueError


def on(device: str, arguments):
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), arguments)


def as_list(result) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)


@contextlib.contextmanager
def batch_invariant(enabled: bool = True):
    before = native.batch_invariant
    hf_kbit.set_batch_invariant(enabled)
    try:
        yield
    finally:
        hf_kbit.set_batch_invariant(before)


def poison(device: str, *sizes: int) -> None:
    """Fills memory that was just free with ones: an output that a kernel leaves out is not zero by chance."""
    held = [torch.full((size,), -1, dtype=torch.int8, device=device) for size in sizes for _ in range(3)]
    del held


# --- weights --------------------------------------------------------------------------------------


def levels(bits: int, kind: str) -> torch.Tensor:
    """A codebook: "normal" is antisymmetric, "lopsided" is that of rotated layers, "random" what no quantizer makes:
    no level is zero or one."""
    if kind == "normal":
        return cases.codebook(bits)
    if kind == "lopsided":
        return torch.tensor(codebooks.optimal(bits, signed=True))
    return torch.randn(2**bits, generator=cases.generator(bits)).sort().values


@dataclass(frozen=True)
class Weight:
    """A packed weight ``[*, N, K]``."""

    shape: tuple[int, ...]
    planes: tuple[torch.Tensor, torch.Tensor]
    codebook: torch.Tensor
    columns: torch.Tensor | None = None
    rotated: bool = False

    @functools.cached_property
    def tiles(self) -> tuple[torch.Tensor, torch.Tensor]:
        return OPS.repack(*self.planes, self.codebook.numel().bit_length() - 1, list(self.shape[-2:]))

    @functools.cached_property
    def stored(self) -> torch.Tensor:
        """float32, as ``cases.assert_product`` wants it, but for ``[*, N, K]``."""
        stored = cases.stored(*self.planes, self.codebook, self.rotated)
        return stored if self.rotated else stored[..., : self.shape[-1]]

    @functools.cached_property
    def inverses(self) -> torch.Tensor:
        """``int8_inverses`` of each matrix."""
        lead, shape = self.shape[:-2], [*self.shape[-2:]]
        matrices = zip(*(tensor.reshape(-1, *tensor.shape[-2:]) for tensor in self.planes), strict=True)
        found = [reference.int8_inverses(*matrix, self.codebook, shape) for matrix in matrices]
        return torch.stack(found).view(*lead, shape[0])

    @functools.cached_property
    def experts(self) -> list["Weight"]:
        return [replace(self, shape=self.shape[1:], planes=planes) for planes in zip(*self.planes, strict=True)]


@functools.lru_cache(maxsize=8)
def usual(shape, bits: int, scaled=False, rotated=False, seed=0) -> Weight:
    """Quantized Gaussian numbers."""
    columns = cases.columns(shape[-1], scaled, seed)
    *planes, codebook = cases.quantized(shape, bits, seed, columns, rotated)
    return Weight(shape, planes, codebook, columns, rotated)


@functools.lru_cache(maxsize=8)  # some take gigabytes
def arbitrary(shape, bits: int, scaled=False, rotated=False, kind="normal", unit=1.0, seed=0, home="cpu") -> Weight:
    """Any words and any scales; of some rows few scales, small ones or none, where there are so many."""
    words, scales = cases.random_packed(shape, bits)
    if shape[-2] > 6:
        scales[..., 1, :], scales[..., 2, 1:] = 0, 0
        scales[..., 3, :] &= 0x87
    codebook, columns = levels(bits, kind) * unit, cases.columns(shape[-1], scaled, seed)
    words, scales, codebook, columns = on(home, [words, scales, codebook, columns])
    return Weight(shape, (words, scales), codebook, columns, rotated)


# --- a call ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of an op: its arguments, in the order of the schema, and a check of what it gives.

    The check is done where the arguments lie, and is given the call with ``device``, on which it ran.
    """

    op: str
    arguments: dict
    check: Callable[[list[torch.Tensor], "Call"], None]
    weights: tuple[Weight, ...] = ()
    exact: bool = False
    int8: bool = False  # whether all inputs are rounded, or those of some weights
    tiled: bool = False
    device: str = "cpu"

    def forms(self) -> list["Call"]:
        """Of bit-planes and, if there is a packed weight, of tiles."""
        if not self.weights:
            return [self]
        if "weight" in self.arguments:
            tiles = dict(zip(("weight", "absmax"), self.weights[0].tiles, strict=True))
            tiles |= {"inverse": True} if self.op == "repack" else {}
        else:
            words, scales = zip(*(weight.tiles for weight in self.weights), strict=True)
            tiles = {"weights": [*words], "absmaxes": [*scales]}
        return [self, replace(self, arguments=self.arguments | tiles, tiled=True)]

    def runs_on(self, backend: str) -> bool:
        """The reference of an exact op is what planes are compared with. GPUs have 8-bit inputs for tiles and 16-bit
        numbers alone, those of experts on Hopper."""
        if backend == "reference":
            return self.tiled or not self.exact
        if backend == "cpu" or not self.int8:
            return True
        enough = is_hopper() if self.op == "gemm_experts_int8" else cuda_arch() >= 800
        return enough and self.tiled and self.arguments["x"].itemsize == 2

    def run(self, backend: str, change: Callable = lambda tensor: tensor) -> list[torch.Tensor]:
        """The results, which are as the fake says, of what ``change`` makes of each tensor of the arguments."""
        device, ops = ("cpu", reference) if backend == "reference" else (backend, OPS)
        function = getattr(ops, self.op.removesuffix("_inference") if ops is reference else self.op)
        given = tree_map_only(torch.Tensor, change, on(device, self.arguments))
        fakes = as_list(getattr(OPS, self.op)(**on("meta", self.arguments)))
        poison(device, *(tensor.nbytes for tensor in [*fakes, next(iter(given.values()))]))
        # Where inputs of few tokens would not be rounded else.
        with batch_invariant(native.batch_invariant or (self.int8 and device == "cuda")):
            found = as_list(function(*given.values()))
        for ours, fake in zip(found, fakes, strict=True):
            assert (ours.dtype, ours.shape, ours.device.type) == (fake.dtype, fake.shape, device)
            assert ours.is_contiguous() and fake.is_contiguous()
            assert not ours._is_view() or not self.op.startswith(("gemm", "embed")), "no view can be changed in place"
        return found

    def hold(self, backend: str, change: Callable = lambda tensor: tensor) -> list[torch.Tensor]:
        """The results, which are what they must be."""
        home = next(tensor.device for tensor in self.arguments.values() if isinstance(tensor, torch.Tensor))
        try:
            found = self.run(backend, change)
            self.check([tensor.to(home) for tensor in found], replace(self, device=found[0].device.type))
        except AssertionError as error:
            raise AssertionError(f"{self}: {error}") from error
        return found

    def __str__(self) -> str:
        sizes = tree_map_only(torch.Tensor, lambda tensor: (*tensor.shape, tensor.dtype), self.arguments)
        return f"{self.op}({', '.join(f'{name}={value}' for name, value in sizes.items())})"


def assert_same_bits(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Zeros of either sign differ; one NaN is as good as another."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[found.itemsize]
    same = found.view(bits) == wanted.view(bits)
    same |= found.isnan() & wanted.isnan() if found.is_floating_point() else False
    assert same.all(), f"{int((~same).sum())} of {same.numel()} differ, at {(~same).nonzero()[:3].tolist()}"


def exact(op: str, arguments: dict, *weights: Weight) -> Call:
    """A call that gives the bits that the reference gives of the same arguments: of planes, where ``forms`` has tiles
    in their place."""
    expected = functools.cache(lambda: as_list(getattr(reference, op)(*arguments.values())))

    def check(found, _):
        for ours, wanted in zip(found, expected(), strict=True):
            assert_same_bits(ours, wanted)

    return Call(op, arguments, check, weights, exact=True, int8=op.endswith("_int8"))


INPUTS: dict[tuple[str, str, str, int], Callable[[], Iterator[Call]]] = {}


def tried(op: str, *backends: str, widths=cases.BITS) -> Callable:
    """Calls of an op, by a width, that are to hold on all backends, or on the named ones. The reference has one path
    for all numbers, and is run where sizes or forms differ."""

    def add(calls):
        for backend, bits in itertools.product(backends or ("cpu", "cuda"), widths):
            INPUTS[op, calls.__name__.lstrip("_"), backend, bits] = functools.partial(calls, bits)
        return calls

    return add


EVERYWHERE = "reference", "cpu", "cuda"


# --- whole weights: exact -------------------------------------------------------------------------

# Beside the usual ones: several tiles, long rows, rows that end in part of a block but with whole octets, leading
# dimensions.
WEIGHTS = [*cases.SHAPES, (33, 1024), (3, 4096), (200, 96), (2, 3, 5, 40), (16, 40), (40, 24)]


def quantize(bits=3, dtype=torch.float32, shape=SHAPE, search=False, signed=False, weight=None, codebook=None) -> Call:
    weight = cases.weight(shape, dtype) if weight is None else weight
    codebook = cases.codebook(bits) if codebook is None else codebook
    return exact("quantize", {"weight": weight, "codebook": codebook, "search": search, "signed": signed})


def quantized_in_all_ways(bits: int, weight=None, codebook=None, **how) -> Iterator[Call]:
    for search, signed in itertools.product((False, True), repeat=2):
        yield quantize(bits, search=search, signed=signed, weight=weight, codebook=codebook, **how)


@tried("quantize")
def shapes(bits):
    for shape in WEIGHTS[:-2]:
        yield from quantized_in_all_ways(bits, shape=shape)
        for dtype, search in itertools.product(cases.FLOATS[1:], (False, True)):
            yield quantize(bits, dtype, shape, search, search)


def odd_codebooks(bits: int) -> dict[str, torch.Tensor]:
    """Levels that a search may get wrong: lopsided, equal, closer than any grid, one away from zero, very large."""
    n, rng = 2**bits, cases.generator(bits, 7)
    crowded = torch.cat([torch.linspace(0.5, 0.5001, n - 1), torch.tensor([-1.0])]).sort().values
    return {
        "normal_float": cases.codebook(bits),
        "random": (torch.rand(n, generator=rng) * 2 - 1).sort().values,
        "equal": torch.tensor([-1.0] * (n // 2) + [0.25] * (n // 2 - 1) + [1.0]),
        "crowded": crowded,
        "lopsided": torch.linspace(0.01, 1, n),
        "zeros and one": torch.tensor([0.0] * (n - 1) + [1.0]),
        "scaled": cases.codebook(bits) * 2.0**20,
        "negative": torch.linspace(-1, -0.5, n),
    }


@tried("quantize")
def any_codebook(bits):
    for codebook in odd_codebooks(bits).values():
        yield from quantized_in_all_ways(bits, cases.weight((64, 256)) * codebook.abs().max(), codebook)


@tried("quantize")
def halfway_and_its_neighbours(bits):
    """Weights on the midpoints of levels and one step beside them, at scales that make ratios exact and not."""
    for codebook in [*odd_codebooks(bits).values()][:4]:
        halfway = (codebook[1:] + codebook[:-1]) / 2
        near = torch.cat([halfway, *(torch.nextafter(halfway, torch.tensor(to)) for to in (-9.0, 9.0))])
        for scale in (1.0, 0.75, 1.0625, 2.0**-9):
            rows = near.repeat(-(-31 * 64 // len(near)))[: 31 * 64].reshape(64, 31) * scale
            largest = torch.full((64, 1), float(codebook.abs().max()) * scale)
            yield from quantized_in_all_ways(bits, torch.cat([largest, rows], dim=1), codebook)


@tried("quantize")
def extreme_magnitudes(bits):
    """Zeros, subnormals, scales below, at the edges of and above the range of E4M4."""
    powers = torch.exp2(torch.arange(-140.0, 15.0))
    rows = torch.cat([powers, powers * 1.03, powers * 1.97, torch.zeros(1)])[:, None] * cases.x((), 64).clamp(-1, 1)
    for dtype in cases.FLOATS:
        yield from quantized_in_all_ways(bits, rows.clamp(-65504, 65504).to(dtype))


@tried("quantize")
def every_scale(bits):
    """A block for each of the 256 scales, and for the points where rounding turns to the next."""
    scales = reference.decode_e4m4(torch.arange(256, dtype=torch.uint8))
    between = (scales[1:] + scales[:-1]) / 2
    edges = [torch.nextafter(between, torch.tensor(to)) for to in (0.0, 99.0)]
    yield from quantized_in_all_ways(bits, torch.cat([scales, between, *edges])[:, None] * torch.linspace(-1, 1, 32))


def packed(weight: Weight) -> dict:
    return {"weight": weight.planes[0], "absmax": weight.planes[1], "codebook": weight.codebook}


def dequantize(bits=3, dtype=torch.float32, shape=SHAPE, scaled=False, rotated=False, weight=None) -> Call:
    weight = weight or arbitrary(shape, bits, scaled, rotated)
    how = {"shape": [*weight.shape[-2:]], "dtype": dtype, "columns": weight.columns, "rotated": weight.rotated}
    return exact("dequantize", packed(weight) | how, weight)


@tried("dequantize")
def _shapes(bits):
    """In the original basis too; any byte scales a column."""
    for shape, (scaled, rotated) in itertools.product(WEIGHTS, TRANSFORMS):
        weight = arbitrary(shape, bits, rotated=rotated)
        columns = torch.randint(0, 256, (shape[-1],), generator=cases.generator(*shape)).byte() if scaled else None
        for dtype in ALL_DTYPES:
            yield dequantize(dtype=dtype, weight=replace(weight, columns=columns))


@tried("dequantize")
def levels_that_are_not_finite(bits):
    """Infinite only in float16; NaN, of which some, rounded to bfloat16 like numbers, would carry over into zero."""
    yield dequantize(dtype=torch.float16, weight=arbitrary((16, 256), bits, unit=2.0**14))
    for nan in (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001):
        codebook = cases.codebook(bits)
        codebook.view(torch.int32)[1] = nan - (nan >> 31 << 32)
        for dtype in ALL_DTYPES:
            yield dequantize(dtype=dtype, weight=replace(arbitrary((3, 45), bits), codebook=codebook))


def embed(bits=3, dtype=torch.float32, shape=SHAPE, scaled=False, rotated=False, indices=None, home="cpu") -> Call:
    """Rows of what ``dequantize`` gives."""
    weight = arbitrary(shape, bits, scaled, rotated, home=home)
    if indices is None:  # some come up again; the last and the first row are among them
        indices = torch.randint(0, shape[0], (37,), generator=cases.generator(shape[0]))
        indices[0], indices[-1] = shape[0] - 1, 0
    how = {"shape": [*shape], "dtype": dtype, "columns": weight.columns, "rotated": rotated}

    def check(found, _):
        rows = reference.dequantize(*weight.planes, weight.codebook, *how.values())
        assert_same_bits(found[0], rows[indices.long()])

    return Call("embed", {"indices": indices.to(home)} | packed(weight) | how, check, (weight,))


@tried("embed")
def _shapes(bits):
    """Also more than a turn of a GPU's warp, several turns and part of one."""
    for shape, dtype in itertools.product([shape for shape in WEIGHTS if len(shape) == 2] + [(19, 2600)], ALL_DTYPES):
        yield embed(bits, dtype, shape)


@tried("embed", *EVERYWHERE)
def in_the_original_basis(bits):
    for shape, dtype, how in itertools.product([(7, 33), (19, 40), (21, 1376)], ALL_DTYPES, cases.TRANSFORMS):
        yield embed(bits, dtype, shape, *how)


@tried("embed", *EVERYWHERE)
def any_indices(bits):
    """Of both dtypes, any shape, none, and with strides."""
    grid = torch.randint(0, 50, (2, 3, 4), generator=cases.generator(bits))
    others = grid[0, 0, 0], grid[:0], grid[:, :, :0], grid.permute(2, 0, 1), grid[..., ::2], grid[..., 1]
    for indices in (grid, *others):
        yield embed(bits, shape=(50, 96), indices=indices)
        yield embed(bits, shape=(50, 96), indices=indices.int())


def repack(bits=3, shape=SHAPE) -> Call:
    """To tiles, zeros in the padding too; of ``forms`` the second is the way back."""
    weight, how = arbitrary(shape, bits), {"bits": bits, "shape": [*shape[-2:]], "inverse": False}
    (words, scales), tiles = weight.planes, reference.repack(*weight.planes, bits, how["shape"])

    def check(found, ran):
        for ours, wanted in zip(found, weight.planes if ran.tiled else tiles, strict=True):
            assert_same_bits(ours, wanted)

    return Call("repack", {"weight": words, "absmax": scales} | how, check, (weight,))


@tried("repack", *EVERYWHERE)
def _shapes(bits):
    for shape in [*WEIGHTS, (2, 3, 17, 300)]:
        yield repack(bits, shape)


def int8_inverses(bits=3, shape=SHAPE, kind="random", unit=1.0) -> Call:
    weight = arbitrary(shape, bits, rotated=True, kind=kind, unit=unit)
    return exact("int8_inverses", packed(weight) | {"shape": [*shape]}, weight)


@tried("int8_inverses")
def _shapes(bits):
    for shape, how in itertools.product([*cases.SHAPES, SHAPE, (264, 776)], [("normal",), ("random", 2.0**-30)]):
        yield int8_inverses(bits, shape, *how)


# --- trellises: exact -----------------------------------------------------------------------------


def gaussian_tiles(count: int) -> torch.Tensor:
    return torch.randn(count, 256, generator=cases.generator(count))


def odd_tiles(bits: int) -> torch.Tensor:
    """Beyond what the code reaches, of either sign and both; zeros, where costs are equal; the smallest, the largest
    and infinite numbers; numbers halfway between steps."""
    tiles = gaussian_tiles(6) * torch.tensor([1, 1e-3, 2, 5, 30, 1e4])[:, None]
    few = torch.tensor([1e-38, -1e-38, 1e-45, 3e38, -3e38, torch.inf, -torch.inf, 0.0]).repeat(32)
    constant = torch.tensor([0.0, 9.0, -9.0, 0.5])[:, None].expand(4, 256)
    return torch.cat([tiles, 20 * gaussian_tiles(1).sign(), few[None], constant, trellis_halfway(bits)])


def trellis_halfway(bits: int) -> torch.Tensor:
    """float32 ``[1, 256]`` that are halfway between steps when they are rounded to them."""
    finer = trellis.UNITS[bits - 1] / trellis.STEPS[bits - 1]
    x = ((torch.arange(300 * finer, 700 * finer) + 0.5) / finer - trellis.SUM_OF_ZERO) / trellis.SUM_OF_ONE
    near = torch.cat([x.float(), *(torch.nextafter(x.float(), torch.tensor(to)) for to in (-9.0, 9.0))])
    steps = (near * trellis.SUM_OF_ONE + trellis.SUM_OF_ZERO) * finer
    found = near[steps.frac() == 0.5]
    assert len(found) > 50
    return found[torch.randint(0, len(found), (1, 256), generator=cases.generator(bits))]


def encode_trellis(bits=3, lead=9, targets=None) -> Call:
    targets = gaussian_tiles(4) if targets is None else targets
    return exact("encode_trellis", {"targets": targets, "bits": bits, "lead": lead})


@tried("encode_trellis", widths=trellis.BITS)
def leads(bits):
    for lead in (128, 40, 1):
        yield encode_trellis(bits, lead, gaussian_tiles(1))
    yield encode_trellis(bits, targets=torch.empty(0, 256))


@tried("encode_trellis", widths=trellis.BITS)
def any_weights(bits):
    yield encode_trellis(bits, 16, odd_tiles(bits))


def decode_trellis(bits=3, code="mul1", dtype=torch.float16, tiles=(3, 5)) -> Call:
    shape = *tiles, 16 * bits
    words = torch.randint(-(2**15), 2**15, shape, generator=cases.generator(*shape)).to(torch.int16)
    return exact("decode_trellis", {"trellis": words, "code": code, "dtype": dtype})


@tried("decode_trellis", widths=trellis.BITS)
def all_codes(bits):
    """Sides of one tile, of those that a GPU's warp and its threads share and of others; leading dimensions; none."""
    shapes = (1, 1), (1, 3), (7, 2), (8, 8), (36, 1), (3, 40), (2, 3, 4, 2), (0, 2), (2, 0), (0, 3, 2), (3, 0, 2, 2)
    for tiles, code, dtype in itertools.product(shapes, trellis.CODES, cases.FLOATS):
        yield decode_trellis(bits, code, dtype, tiles)


# --- products: within rounding --------------------------------------------------------------------

# Around those at which some path, of some instruction set or GPU, ends.
TOKENS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 70, 256, 257]
LONG = [*cases.SHAPES, (48, 2048), (3, 4096 + 40)]


def gemm(
    bits=3, dtype=torch.float32, shape=SHAPE, scaled=False, rotated=False, batch=(5,), biased=True, x=None,
    weight=None, roundings=None, op="gemm",
) -> Call:  # fmt: skip
    weight = weight or usual(shape, bits, scaled, rotated)
    home, (rows, in_features) = weight.codebook.device, weight.shape
    x = cases.x(batch, in_features, dtype).to(home) if x is None else x
    bias = cases.x((), rows, x.dtype, seed=1).to(home) if biased else None
    how = {"bias": bias, "out_features": rows, "columns": weight.columns, "rotated": weight.rotated}

    def check(found, ran):
        many = x.numel() > 16 * in_features or weight.columns is not None or weight.rotated
        by_tensor_cores = ran.tiled and ran.device != "cpu" and x.itemsize == 2 and many
        # Each number of a weight is rounded to the dtype of x; there first its level, then it.
        assert_product(found[0], x, weight, bias, roundings or 1 + by_tensor_cores)

    return Call(op, {"x": x} | packed(weight) | how, check, (weight,))


gemm_inference = functools.partial(gemm, op="gemm_inference")


def assert_product(found, x, weight: Weight, bias, roundings: int) -> None:
    rows, in_features = weight.shape
    x, found = x.reshape(-1, in_features), found.reshape(-1, rows)
    cases.assert_product(found, x, weight.stored.T, bias, roundings, weight.columns, weight.rotated)


@tried("gemm")
def tokens(bits):
    for dtype, how in itertools.product(ALL_DTYPES, TRANSFORMS):
        for count in (1, 33) if dtype == torch.float64 else (1, 2, 5, 16, 17, 33, 70) if any(how) else TOKENS:
            yield gemm(bits, dtype, SHAPE, *how, (count,))


@tried("gemm")
def _shapes(bits):
    """Where K is no multiple of 32, the last block of a rotated row has numbers beyond it, which count too."""
    for shape, how, dtype in itertools.product(LONG, TRANSFORMS if bits == 3 else TRANSFORMS[:1], cases.FLOATS):
        for count in (1, 6, 16, 40):
            yield gemm(bits, dtype, shape, *how, (count,), biased=False)


@tried("gemm", *EVERYWHERE)
def batches(bits):
    for batch, how, dtype in itertools.product(cases.BATCHES, TRANSFORMS, (torch.float32, torch.bfloat16)):
        yield gemm(bits, dtype, (7, 100), *how, batch)


@tried("gemm")
def _any_codebook(bits):
    """At 5 bits a CPU takes half as many look-ups where the upper levels are the lower ones with the other sign."""
    codebooks = [levels(bits, kind) for kind in ("normal", "lopsided", "random")]
    for other in {0, 2**bits // 4 - 1, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1}:
        codebooks.append(cases.codebook(bits))
        codebooks[-1][other] *= 0.75
    for codebook, count in itertools.product(codebooks, (1, 5, 40)):
        yield gemm(batch=(count,), weight=replace(arbitrary((35, 520), bits), codebook=codebook))


@tried("gemm", widths=[4])
def kinds_of_input(bits):
    for dtype, count in itertools.product(cases.FLOATS, (1, 5, 16, 40)):
        x = cases.x((count,), 512)
        one_hot = torch.eye(512)[torch.randint(512, (count,), generator=cases.generator(count))]
        for kind in (x * 1e-3, x * 500, x / (x[:, :1].abs() + 1e-3), x * 0, one_hot):
            yield gemm(x=kind.to(dtype), weight=usual((64, 512), bits))


@tried("gemm", widths=[2])
def more_weights_than_a_slice(bits):
    """Of the CPU's path for many tokens."""
    for count in (1, 40):
        yield gemm(batch=(count,), weight=arbitrary((1100, 4096), bits))


@tried("gemm_inference", *EVERYWHERE)
def _shapes(bits):
    for number, shape in enumerate(LONG):
        for dtype in ALL_DTYPES[(number + bits) % 2 :: 2]:
            yield gemm_inference(bits, dtype, shape, *TRANSFORMS[number % 4], (4,))


def gemm_gradient(
    bits=3, dtype=torch.float32, shape=SHAPE, scaled=False, rotated=False, batch=(5,), grad=None, weight=None
) -> Call:
    weight = weight or usual(shape, bits, scaled, rotated)
    grad = cases.x(batch, weight.shape[0], dtype).to(weight.codebook.device) if grad is None else grad
    how = {"shape": [*weight.shape], "columns": weight.columns, "rotated": weight.rotated}

    limits = functools.cache(lambda: limits_of_gradient(grad, weight))

    def check(found, _):
        assert_gradient(found[0], *limits())

    return Call("gemm_gradient", {"grad": grad} | packed(weight) | how, check, (weight,))


def assert_gradient(found: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    assert ((found.reshape(expected.shape).double() - expected).abs() <= bound).all()


def limits_of_gradient(grad: torch.Tensor, weight: Weight) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64, and by how much it may be missed: of the weight in either basis each number is rounded
    twice; N + 1 terms are added up; of a transformed one the sum may be rounded, then turned back by 7 operations of
    float32."""
    rows, in_features = weight.shape
    grad, dtype = grad.reshape(-1, rows).double(), grad.dtype
    scales = None if weight.columns is None else reference.decode_e4m4(weight.columns).double()
    stored, transformed = weight.stored.double(), weight.rotated or scales is not None
    expected = grad @ transforms.to_original(stored, scales, weight.rotated, in_features)
    relative = (1 + transformed / 2) * cases.EPS[dtype] + 7 * transformed * cases.EPS[torch.float32]
    relative += (rows + 1) * cases.EPS[torch.promote_types(dtype, torch.float32)]
    half_step = 2.0**-25 * (dtype == torch.float16)  # between its smallest numbers, to which each of these is rounded
    bound = grad.abs() @ stored.abs() * relative + half_step * (1 + 2 * grad.abs().sum(-1, keepdim=True))
    if weight.rotated:  # no number of a block is larger, in either basis, than the sum of all times 32**-0.5
        blocks = bound.unflatten(-1, (-1, 32))
        bound = (blocks.sum(-1, keepdim=True) * 32**-0.5).expand_as(blocks).flatten(-2)[:, :in_features]
    bound = bound if scales is None else bound * scales
    return expected, bound + expected.abs() * cases.EPS[dtype] + half_step + 1e-30


@tried("gemm_gradient")
def _shapes(bits):
    for shape, how, dtype in itertools.product([SHAPE, (1, 1), (7, 33), (130, 513)], TRANSFORMS, ALL_DTYPES):
        for batch in ((2, 3), (40,)):
            yield gemm_gradient(bits, dtype, shape, *how, batch)


@tried("gemm_gradient", widths=[3])
def in_slices(bits):
    """Of 256 columns, each with its own scales; the last one ends within a block."""
    for how in TRANSFORMS:
        yield gemm_gradient(dtype=torch.float64, batch=(2,), weight=arbitrary((17_000, 300), bits, *how))


# --- products of 8-bit inputs: exact --------------------------------------------------------------


def int8_x(batch, in_features: int, dtype) -> torch.Tensor:
    """Usual tokens and, where there are several, one of zeros, one with an outlier, one so small that it counts as
    zeros; where there are many also NaN, infinity and numbers that overflow when they are transformed."""
    x = cases.x(batch, in_features).to(dtype)
    rows, most = x.view(-1, in_features), torch.finfo(dtype).max
    if len(rows) > 3:
        rows[1], rows[2, in_features // 2] = 0, 3e4
        rows[3] *= 2.0**-110
    if len(rows) > 10:
        rows[4, -1], rows[5, 0], rows[6, in_features // 2] = torch.nan, torch.inf, -torch.inf
        rows[7], rows[8] = rows[7] * 2.0**-12, rows[8].clamp(-1, 1) * (most / 2)
        rows[9] *= 2.0**-98 if dtype != torch.float16 else 1
    return x


def gemm_int8(
    bits=3, dtype=torch.float32, shape=SHAPE, batch=(5,), biased=True, known=True, x=None, weight=None
) -> Call:
    weight = weight or arbitrary(shape, bits, True, True, "lopsided")
    home, (rows, in_features) = weight.codebook.device, weight.shape
    x = int8_x(batch, in_features, dtype).to(home) if x is None else x
    bias = cases.x((), rows, x.dtype, seed=1).to(home) if biased else None
    how = {"bias": bias, "out_features": rows, "columns": weight.columns}
    return exact(
        "gemm_int8", {"x": x} | packed(weight) | how | {"inverses": weight.inverses if known else None}, weight
    )


@tried("gemm_int8")
def _tokens(bits):
    for dtype, count in itertools.product(cases.FLOATS, (1, 2, 3, 4, 5, 7, 8, 9, 16, 33, 40, 64, 128, 300)):
        yield gemm_int8(bits, dtype, batch=(count,))
        yield gemm_int8(bits, dtype, batch=(count,), biased=False, known=False)


@tried("gemm_int8")
def _shapes(bits):
    others = [(1100, 256), (33, 2100), (5, 4096 + 40), (130, 513), (264, 776)]
    for shape, dtype, count in itertools.product([*cases.SHAPES, *others], (torch.float32, torch.bfloat16), (1, 6)):
        yield gemm_int8(bits, dtype, shape, (count,), biased=False)


@tried("gemm_int8", *EVERYWHERE)
def _batches(bits):
    for batch, dtype in itertools.product(cases.BATCHES, cases.FLOATS):
        yield gemm_int8(bits, dtype, (64, 300), batch)


@tried("gemm_int8")
def _any_codebook(bits):
    """Levels of any size, and of very different ones."""
    spread = levels(bits, "random") * torch.linspace(-20, 20, 2**bits).exp2()
    codebooks = [levels(bits, "random") * unit for unit in (2.0**-120, 2.0**-60, 2.0**-12, 2.0**20, 2.0**100, 0)]
    for codebook, dtype, unit in itertools.product([*codebooks, spread], (torch.float32, torch.bfloat16), (0, -90)):
        weight = replace(arbitrary((100, 300), bits, True, True), codebook=codebook)
        yield gemm_int8(x=cases.x((40,), 300).to(dtype) * 2.0**unit, weight=weight)


@tried("gemm_int8")
def every_code_of_every_scale(bits):
    """In rows of large and small ones: products that are halves are rounded to even."""
    count, rows = 2**bits, 256
    codes = torch.arange(count).repeat(rows, 8 * 32 // count).view(rows, 8, 32).to(torch.uint8)
    absmax = (torch.arange(rows)[:, None] + torch.arange(8) * 37).remainder(256).to(torch.uint8)
    planes = reference.pack_codes(codes, bits), absmax
    for unit in (2.0**-90, 1.0, 2.0**100):
        weight = Weight((rows, 256), planes, torch.linspace(-1, 0.75, count) * unit, cases.columns(256), True)
        for dtype in cases.FLOATS:
            yield gemm_int8(x=(torch.eye(256)[:40] * 3).to(dtype), weight=weight, biased=False)


@tried("gemm_int8")
def largest_sums(bits):
    """All numbers 127, or with the other sign: nothing saturates, and what wraps around is right in the end."""
    for in_features in (4096, 133_120):
        blocks = in_features // 32
        planes, absmax = torch.full((3, blocks * bits), -1).int(), torch.full((3, blocks), 100).byte()
        absmax[1] += 128
        columns, x = torch.full((in_features,), 176).byte(), torch.zeros(5, in_features)
        x[:, ::32] = torch.tensor([1.0, -1, 1, -1, 1])[:, None]  # which a rotation spreads
        assert (reference.tokens_to_int8(x, columns)[0].abs() == 127).all()
        weight = Weight((3, in_features), (planes, absmax), torch.linspace(-0.9, 1, 2**bits), columns, True)
        for count, dtype in itertools.product((1, 5), (torch.float32, torch.bfloat16)):
            yield gemm_int8(x=x[:count].to(dtype), weight=weight, biased=False)


# --- products of one input ------------------------------------------------------------------------


def gemm_group(
    weights=None, dtype=torch.float32, batch=(5,), biased=(False, True), int8=(False,), x=None, bits=3, roundings=None
) -> Call:
    """Of each weight what ``gemm`` gives or, as ``int8`` says in turn, ``gemm_int8``; so has each a bias or none."""
    weights = weights or [
        usual((rows, 100), bits, *how) for rows, how in zip((48, 7, 33, 16), TRANSFORMS, strict=True)
    ]
    home, in_features = weights[0].codebook.device, weights[0].shape[1]
    x = (int8_x if all(int8) else cases.x)(batch, in_features, dtype).to(home) if x is None else x
    calls, each = [], []
    for weight, has_bias, rounded in zip(weights, itertools.cycle(biased), itertools.cycle(int8), strict=False):
        make = gemm_int8 if rounded else functools.partial(gemm, roundings=roundings)
        calls.append(make(x=x, weight=weight, biased=has_bias))
        _, *its = calls[-1].arguments.values()
        each.append((*its[:6], int(weight.rotated), weight.inverses if rounded else None))
    names = "weights", "absmaxes", "codebooks", "biases", "out_features", "columns", "rotated", "inverses"

    def check(found, ran):
        for number, (ours, call) in enumerate(zip(found, calls, strict=True)):
            try:
                call.check([ours], replace(call, tiled=ran.tiled, device=ran.device))
            except AssertionError as error:
                raise AssertionError(f"product {number}: {error}") from error

    of_each = dict(zip(names, map(list, zip(*each, strict=True)), strict=True))
    return Call("gemm_group", {"x": x} | of_each, check, tuple(weights), int8=any(int8))


@tried("gemm_group", *EVERYWHERE)
def each_with_its_own_transform(bits):
    for dtype in ALL_DTYPES:
        for batch in [(3,), (40,), *(cases.BATCHES if dtype == torch.bfloat16 else [])]:
            yield gemm_group(None, dtype, batch, bits=bits)


@tried("gemm_group", *EVERYWHERE)
def of_8_bit_inputs(bits):
    """Of other rows, widths and levels, column scales in common or not; some of them with 16-bit inputs."""
    shapes = (35, bits, 0), (7, 4, 0), (130, 4, 1), (1, 3, 2)
    weights = [
        replace(
            arbitrary((rows, 1000), width, True, True, "lopsided", 2.0**width), columns=cases.columns(1000, seed=seed)
        )
        for rows, width, seed in shapes
    ]
    for dtype, count, int8 in itertools.product(cases.FLOATS[::2], (1, 70), ((True,), (False, True))):
        yield gemm_group(weights, dtype, (count,), int8=int8)


# --- experts --------------------------------------------------------------------------------------

SHARES = [  # rows of each expert
    (3, 0, 5, 0, 3),  # some have none
    (0, 0, 11, 0),
    (11,),
    (*[1, 0] * 9, 2, 0, 0),  # more experts than rows
    (0, 0),
    (0, 1, 2, 5, 0, 9, 17, 33, 0, 1),  # all numbers at which the path of a CPU changes
]


def shares_for(bits: int) -> list[tuple[int, ...]]:
    """Each is one width's."""
    return SHARES[bits - 2 :: 4]


def mixture(weight: Weight, dtype, shares, picked: bool, swiglu: bool, make_x, **given) -> dict:
    """x, bias, rows and offsets: tokens in order without a bias, three of which are nobody's, or rows that pick from
    20 tokens, with one; or what is given."""
    count, rows, in_features = weight.shape
    total, home = sum(shares) + 3, weight.codebook.device
    x = make_x((20 if picked else total,), in_features * (1 + swiglu), dtype)
    index = torch.randint(0, 20, (total,), generator=cases.generator(total)).int() if picked else None
    bias = cases.x((count,), rows, dtype, seed=2) if picked else None
    made = {"x": x, "bias": bias, "rows": index, "offsets": torch.tensor([0, *shares]).cumsum(0).int()}
    return on(home, made) | given


def of_experts(op: str, weight: Weight, tokens: dict, **how) -> dict:
    x, bias, rows, offsets = (tokens[name] for name in ("x", "bias", "rows", "offsets"))
    tokens = {"bias": bias, "rows": rows, "offsets": offsets, "out_features": weight.shape[1]}
    return {"x": x} | packed(weight) | tokens | how


def gemm_experts(
    bits=3, dtype=torch.float32, shape=SHAPE, scaled=False, rotated=False, shares=(3, 0, 5, 0, 3), picked=False,
    swiglu=False, weight=None, **given,
) -> Call:  # fmt: skip
    """Of the rows of each expert what ``gemm`` gives; zeros of the rows behind."""
    weight = weight or usual((len(shares), *shape), bits, scaled, rotated)
    tokens = mixture(weight, dtype, shares, picked, swiglu, cases.x, **given)

    def check(found, _):
        x, rows = tokens["x"], tokens["rows"]
        if swiglu:  # whose roundings are three more at most
            gate, up = x.double().chunk(2, dim=-1)
            x = torch.nn.functional.silu(gate) * up
        for expert, its in shares_of(tokens["offsets"], found[0]):
            bias = None if tokens["bias"] is None else tokens["bias"][expert]
            inputs = x[its] if rows is None else x[rows[its].long()]
            assert_product(found[0][its], inputs, weight.experts[expert], bias, 5 if swiglu else 2)

    how = {"columns": weight.columns, "rotated": weight.rotated, "swiglu": swiglu}
    return Call("gemm_experts", of_experts("gemm_experts", weight, tokens, **how), check, (weight,))


def shares_of(offsets, found) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and where; what is found behind is zero."""
    ends = offsets.tolist()
    assert not found[ends[-1] :].any()
    for expert, (first, end) in enumerate(itertools.pairwise(ends)):
        if first < end:
            yield expert, slice(first, end)


@tried("gemm_experts", *EVERYWHERE)
def shares(bits):
    for its, dtype, rotated, picked in itertools.product(shares_for(bits), ALL_DTYPES, (False, True), (False, True)):
        shape = (36, 70) if picked else (40, 72)  # of multiples of eight torch has a grouped product
        yield gemm_experts(bits, dtype, shape, rotated, rotated, its, picked)
    for empty in ({"x": cases.x((0,), 70), "rows": None}, {"rows": torch.zeros(0).int()}):
        given = empty | {"offsets": torch.zeros(4).int(), "bias": None}
        yield gemm_experts(weight=usual((3, 36, 70), bits), **given)


@tried("gemm_experts", *EVERYWHERE)
def behind_a_gate(bits):
    for its, dtype, (width, rotated) in itertools.product(
        ((5, 0, 4), (100, 0, 98)), ALL_DTYPES, ((72, True), (70, False))
    ):
        yield gemm_experts(bits, dtype, (36, width), rotated, rotated, its, True, True)


def gemm_experts_int8(
    bits=3, dtype=torch.float32, shape=SHAPE, shares=(3, 0, 5, 0, 3), picked=False, swiglu=False, known=True,
    weight=None, **given,
) -> Call:  # fmt: skip
    """The bits of each expert's ``gemm_int8``, of what a gate makes in the dtype of x."""
    weight = weight or arbitrary((len(shares), *shape), bits, True, True, "lopsided")
    make_x = (lambda *args: exactly_gated(cases.x(*args))) if swiglu else int8_x
    tokens = mixture(weight, dtype, shares, picked, swiglu, make_x, **given)
    how = {"columns": weight.columns, "inverses": weight.inverses if known else None, "swiglu": swiglu}
    return exact("gemm_experts_int8", of_experts("gemm_experts_int8", weight, tokens, **how), weight)


def exactly_gated(x: torch.Tensor) -> torch.Tensor:
    """Halves ``[*, 2 K]`` of which a gate makes the same in any arithmetic: silu of 32 or more is that number."""
    numbers = x.chunk(2, dim=-1)[1]
    gates = torch.tensor([32, 64, 128, 0, 256], dtype=x.dtype, device=x.device)
    gate = gates[torch.arange(numbers.numel(), device=x.device) % 5].view_as(numbers)
    return torch.cat([gate, torch.where(gate == 0, numbers, numbers / gate)], dim=-1)


@tried("gemm_experts_int8", *EVERYWHERE)
def _shares(bits):
    for its, dtype, picked, swiglu in itertools.product(shares_for(bits), cases.FLOATS, (False, True), (False, True)):
        yield gemm_experts_int8(bits, dtype, (35, 300), its, picked, swiglu, known=picked)


@tried("gemm_experts_int8")
def _shapes(bits):
    given = {
        "x": cases.x((5,), 70).half(),
        "rows": torch.zeros(0).int(),
        "offsets": torch.zeros(4).int(),
        "bias": None,
    }
    yield gemm_experts_int8(weight=arbitrary((3, 36, 70), bits, True, True), **given)
    for shape in [*cases.SHAPES, SHAPE]:
        yield gemm_experts_int8(bits, cases.FLOATS[bits % 3], shape, SHARES[-1], True)


def gemm_experts_gradient(
    bits=3, dtype=torch.float32, shape=SHAPE, scaled=False, rotated=False, shares=(3, 0, 5, 0, 3), weight=None, **given
) -> Call:
    """Of the rows of each expert what ``gemm_gradient`` gives; zeros of the rows behind."""
    weight = weight or usual((len(shares), *shape), bits, scaled, rotated)
    grad = cases.x((sum(shares) + 3,), weight.shape[1], dtype)
    tokens = {"grad": grad, "offsets": torch.tensor([0, *shares]).cumsum(0).int()}
    tokens = on(weight.codebook.device, tokens) | given

    def check(found, _):
        for expert, its in shares_of(tokens["offsets"], found[0]):
            assert_gradient(found[0][its], *limits_of_gradient(tokens["grad"][its], weight.experts[expert]))

    how = {"shape": [*weight.shape[1:]], "columns": weight.columns, "rotated": weight.rotated}
    arguments = {"grad": tokens["grad"]} | packed(weight) | {"offsets": tokens["offsets"]} | how
    return Call("gemm_experts_gradient", arguments, check, (weight,))


@tried("gemm_experts_gradient", *EVERYWHERE)
def _shares(bits):
    for its, dtype, how in itertools.product(shares_for(bits), ALL_DTYPES, TRANSFORMS):
        yield gemm_experts_gradient(bits, dtype, (40, 72), *how, its)
    given = {"grad": cases.x((0,), 36), "offsets": torch.zeros(4).int()}
    yield gemm_experts_gradient(weight=usual((3, 36, 70), bits), **given)


def route_experts(tokens=17, each=4, count=32, numbers=torch.int64) -> Call:
    """As a stable sort in Python has it; some numbers are no experts here, and come last."""
    experts = torch.randint(-2, count + 3, (tokens, each), generator=cases.generator(tokens, each, count))

    def check(found, _):
        rows, places, offsets = found
        known = experts.where((experts >= 0) & (experts < count), count).flatten()
        order = sorted(range(tokens * each), key=known.tolist().__getitem__)
        assert rows.tolist() == [slot // each for slot in order]
        assert places.flatten()[order].tolist() == [*range(tokens * each)]
        assert offsets.tolist() == [0, *known.bincount(minlength=count + 1)[:count].cumsum(0).tolist()]

    return Call("route_experts", {"experts": experts.to(numbers), "num_experts": count}, check)


@tried("route_experts", *EVERYWHERE, widths=[3])
def numbers_of_experts(_):
    sizes = [(1, 8, 128), (17, 4, 32), (256, 8, 128), (5000, 8, 128), (33, 3, 1500), (700, 1, 1), (0, 2, 4)]
    for size, numbers in itertools.product([*sizes, (2, 3, 2**13)], (torch.int64, torch.int32)):
        yield route_experts(*size, numbers)


def combine_experts(tokens=9, each=2, columns=36, dtype=torch.float32, wide=False) -> Call:
    y = cases.x((tokens * each,), columns, dtype)
    weights = cases.x((tokens,), each, torch.float32 if wide else dtype, seed=1)
    places = torch.randperm(tokens * each, generator=cases.generator(3)).int().view(tokens, each)

    def check(found, _):
        terms = y.double()[places.long()] * weights.double()[..., None]
        bound = terms.abs().sum(1) * each * cases.EPS[torch.promote_types(dtype, torch.float32)]
        assert ((found[0] - terms.sum(1)).abs() <= bound + terms.sum(1).abs() * cases.EPS[dtype]).all()

    return Call("combine_experts", {"y": y, "places": places, "weights": weights}, check)


@tried("combine_experts", *EVERYWHERE, widths=[3])
def _shapes(_):
    sizes = [(1, 8, 64), (9, 2, 36), (300, 4, 35), (64, 6, 1000), (5, 1, 1), (0, 2, 36)]
    for size, dtype, wide in itertools.product(sizes, ALL_DTYPES, (False, True)):
        yield combine_experts(*size, dtype, wide)


def examples(op: str, bits: int, shape=SHAPE, more=()) -> list[Call]:
    """A few calls of an op, with all of its arguments; in float16 at 3 bits, in bfloat16 at 4."""
    of_any = {"dtype": {3: torch.float16, 4: torch.bfloat16}.get(bits, torch.float32)}
    of_any |= {"shape": shape, "scaled": True, "rotated": True}
    ways = {
        "quantize": [{"search": search, "signed": search} for search in (False, True)],
        "gemm_group": [{"batch": (count,)} for count in (1, 40)],
        "gemm_experts": [{}, {"picked": True}, {"picked": True, "swiglu": True}],
        "gemm_experts_int8": [{"picked": picked} for picked in (False, True)],
    }
    batches = [{"batch": (1,)}, {"batch": (3,), "scaled": False, "rotated": False}, {"batch": (40,)}]
    make = globals()[op]
    taken = {*inspect.signature(make).parameters}
    if "batch" in taken:
        ways.setdefault(op, [*batches, *more])
    calls = [of_any | how | {"bits": bits} for how in ways.get(op, [{}])]
    return [make(**{name: value for name, value in how.items() if name in taken}) for how in calls]


ALL_OPS = sorted({op for op, *_ in INPUTS})
