"""EXL3's trellis, the second kind of weight, in plain PyTorch and bit for bit: the specification, and the fallback.

A weight ``W[N, K]`` of a layer lies in tiles of 16 x 16. A tile is one stream of ``256 * bits`` bits, and each of its
weights owns ``bits`` of them. What a weight decodes to follows from its *window*: the 16 bits of the stream that end
with its own, around the end of the tile. A *code* makes a number of a window, by a multiplication. No table is read,
and there are no scales of blocks: both sides are rotated in blocks of 128, and each input and output has one scale.

``docs/format.md`` says it in words. Sources: QTIP (arXiv:2406.11235) for the trellis and computed codes; exllamav3
1.4.1 (MIT), of which the form was read, and beside which ``tests/test_trellis.py`` compares every bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from hf_kbit.format.decoding import Decoding, Layout
from hf_kbit.format.transforms import butterflies

BITS = tuple(range(1, 9))
TILE, WINDOW, ROTATED = 16, 16, 128
BLOCKS = 32, 64, ROTATED  # of rotations
# Of a code: what a window is multiplied by, and what is added, modulo 2**32.
CODES = {"3inst": (89226354, 64248484), "mcg": (0xCBAC1FED, 0), "mul1": (0x83DCD12D, 0)}
# Of ``mul1``: scale and shift of the sum of four bytes, as the bits of float16.
SCALE, SHIFT = 0x1EEE, 0xC931 - (1 << 16)
AT_A_TIME = 1 << 16  # tiles that are decoded at a time

MOST_LEAD = TILE**2 // 2
# The sum of four bytes of which ``mul1`` makes x is ``x * SUM_OF_ONE + SUM_OF_ZERO``; numbers of float32.
SUM_OF_ONE, SUM_OF_ZERO = 2**18 / 1774, 1329 * 2**11 / 1774 - 1024
# By bits: sums are counted in units of ``1 / UNITS``, and weights are rounded to multiples of ``STEPS`` of these.
UNITS, STEPS = (4, 4, 4, 8, 16, 16, 16, 16), (2, 2, 4, 4, 8, 8, 1, 1)
WINDOWS_AT_A_TIME = 1 << 19  # of tiles that are encoded at a time

# Where weight t of a tile lies: an input, and an output.
_PLACES = torch.arange(TILE**2)
INPUT = _PLACES // 8 % 4 * 2 + torch.tensor([0, 1, 8, 9])[_PLACES % 4]
OUTPUT = _PLACES // 32 + _PLACES % 8 // 4 * 8


def bits_of(trellis: torch.Tensor, name: str = "trellis") -> int:
    """The width of a trellis int16 ``[K / 16, N / 16, 16 * bits]``.

    Raises:
        ValueError: it has another dtype or shape; the message begins with ``name``.
    """
    bits, rest = divmod(trellis.shape[-1], TILE) if trellis.dim() == 3 else (0, 1)
    if trellis.dtype != torch.int16 or rest or bits not in BITS:
        found = f"dtype {str(trellis.dtype).removeprefix('torch.')} and shape {list(trellis.shape)}"
        raise ValueError(f"{name}: found {found}, expected int16 [K / 16, N / 16, 16 * bits] of 1 to 8 bits")
    return bits


def windows(trellis: torch.Tensor) -> torch.Tensor:
    """int32 ``[K / 16, N / 16, 256]``, 0 to 65535: the window of each weight of a tile.

    >>> windows(torch.full((1, 1, 16), -1, dtype=torch.int16)).unique().tolist()
    [65535]
    """
    bits = bits_of(trellis)
    halves = trellis.long() & 0xFFFF
    words = halves[..., 1::2] << 16 | halves[..., ::2]  # the first bit of the stream is the highest of the first word
    first = ((_PLACES.to(trellis.device) + 1) * bits - WINDOW) % (TILE**2 * bits)
    word, skipped = first // 32, first % 32
    pairs = words[..., word] << 32 | words[..., (word + 1) % words.shape[-1]]
    return (pairs >> (48 - skipped) & 0xFFFF).int()


def pack(own: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of ``windows``: int16 ``[K / 16, N / 16, 16 * bits]`` of numbers whose lowest ``bits`` bits each
    weight is to own.

    >>> trellis = torch.randint(-(2**15), 2**15, (2, 3, 48), dtype=torch.int16)
    >>> torch.equal(pack(windows(trellis), 3), trellis)
    True
    """
    stream = (own[..., None] >> torch.arange(bits - 1, -1, -1, device=own.device) & 1).flatten(-2)
    halves = (stream.unflatten(-1, (-1, 16)) << torch.arange(15, -1, -1, device=own.device)).sum(-1)
    return halves.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).to(torch.int16)


def values(window: torch.Tensor, code: str) -> torch.Tensor:
    """float16 of the same shape: what windows stand for. Sums are exact in float32, and rounded once, as on a GPU.

    >>> values(torch.tensor([0, 1, 65535]), "mul1")
    tensor([-3.4531,  0.6411, -0.6514], dtype=torch.float16)
    """
    factor, added = CODES[code]
    x = (window.long() * factor + added) & 0xFFFFFFFF
    if code == "mul1":
        scale, shift = torch.tensor([SCALE, SHIFT], dtype=torch.int16).view(torch.float16).tolist()
        return ((1024 + sums(window)).float() * scale + shift).half()
    x = x & 0x8FFF8FFF ^ 0x3B603B60
    low, high = ((x >> shift & 0xFFFF).to(torch.uint16).view(torch.float16).float() for shift in (0, 16))
    return (low + high).half()


def sums(window: torch.Tensor) -> torch.Tensor:
    """int64 of the same shape, 0 to 1020: the sum of four bytes of which ``mul1`` makes a window's value."""
    x = window.long() * CODES["mul1"][0]
    return sum(x >> shift & 255 for shift in (0, 8, 16, 24))


def inner(trellis: torch.Tensor, code: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """The weight between the rotations, ``[*, N, K]`` of a trellis ``[*, K / 16, N / 16, 16 * bits]``, with memory for
    some of its tiles besides: numbers of float16, as ``dtype``.

    >>> inner(torch.zeros(2, 4, 3, 32, dtype=torch.int16), "mul1").shape
    torch.Size([2, 48, 64])
    """
    if trellis.dim() > 3:
        *lead, across, down, _ = trellis.shape
        weight = torch.empty((*lead, TILE * down, TILE * across), dtype=dtype, device=trellis.device)
        for own, its in zip(weight.flatten(0, -3), trellis.flatten(0, -4), strict=True):
            own.copy_(inner(its, code, dtype))
        return weight
    bits_of(trellis)
    across, down, _ = trellis.shape
    weight = torch.empty((TILE * down, TILE * across), dtype=dtype, device=trellis.device)
    tiles = weight.view(down, TILE, across, TILE).permute(2, 0, 1, 3)  # [K / 16, N / 16, output, input]
    rows = max(AT_A_TIME // max(down, 1), 1)
    for own, part in zip(tiles.split(rows), trellis.split(rows), strict=True):
        own[..., OUTPUT, INPUT] = values(windows(part), code).to(dtype)
    return weight


def tiles_of(inner: torch.Tensor) -> torch.Tensor:
    """``[K / 16, N / 16, 256]`` of a weight between the rotations, ``[N, K]``: as ``encode`` takes its tiles.

    >>> trellis = torch.randint(-(2**15), 2**15, (2, 3, 48), dtype=torch.int16)
    >>> torch.equal(tiles_of(inner(trellis, "mul1")), values(windows(trellis), "mul1"))
    True
    """
    tiles = inner.unflatten(1, (-1, TILE)).unflatten(0, (-1, TILE)).permute(2, 0, 1, 3).flatten(2)
    return tiles[..., _in_tile(inner.device)]


@cache
def _in_tile(device: torch.device) -> torch.Tensor:
    """int64 ``[256]``: where in a tile its weights lie. Kept, for a copy to a GPU waits for all before it."""
    with torch.inference_mode(False):
        return (OUTPUT * TILE + INPUT).to(device)


def to_units(targets: torch.Tensor, bits: int) -> torch.Tensor:
    """int64 of the same shape: float32 weights as sums in units of ``1 / UNITS``, as near as the steps and the range
    of sums allow. A product and a sum are each rounded in float32; halfway between steps the even one counts.

    >>> to_units(torch.tensor([-9.0, 0.0, 0.004, 9.0]), 2)
    tensor([   0, 2042, 2044, 4080])
    """
    units, steps = UNITS[bits - 1], STEPS[bits - 1]
    sums = targets * SUM_OF_ONE
    sums = (sums + SUM_OF_ZERO) * (units / steps)
    return sums.clamp(0, 1020 * (units // steps)).round().long() * steps


def encode(targets: torch.Tensor, bits: int, lead: int = MOST_LEAD) -> torch.Tensor:
    """Packs the path around each tile whose values by ``mul1`` are nearest to its weights, in sums of squares.

    A state is what the next window keeps of one. Of the paths over ``lead`` weights before the joint and as many
    behind it, the best one says in which state the joint is; the result is the best path around the tile from there
    to there. All are found by dynamic programming (Viterbi). Costs are whole numbers, and of equal ones the lowest
    branch or state counts, so every device finds the same path.

    Args:
        targets: float32 ``[tiles, 256]``, weights in the order of the trellis, in units of the code's standard
            deviation: what ``values`` gives. NaN has no meaning.
        bits: 1 to 8.
        lead: 1 to 128.

    Returns:
        int16 ``[tiles, 16 * bits]``, as ``pack`` makes it.

    Source: trellis-coded quantization by QTIP (arXiv:2406.11235), with tail-biting in two passes.

    >>> targets = torch.randn(2, 256)
    >>> trellis = encode(targets, 2, 16)
    >>> error = values(windows(trellis[None]), "mul1")[0] - targets
    >>> trellis.shape, bool(error.square().mean() < 0.1)
    (torch.Size([2, 32]), True)
    """
    count = max(WINDOWS_AT_A_TIME >> WINDOW, 1)
    return torch.cat([_encode(to_units(part, bits), bits, lead) for part in targets.split(count)])


def _encode(targets: torch.Tensor, bits: int, lead: int) -> torch.Tensor:
    count, device, branches, kept = len(targets), targets.device, 1 << bits, WINDOW - bits
    # A window is a branch, what its state keeps of the one before, and what is new. Costs are times 256, which leaves
    # room for a branch below them; float64 holds them exactly, and is the fastest there.
    reached = 16.0 * UNITS[bits - 1] * sums(torch.arange(1 << WINDOW, device=device)).view(branches, -1, branches)
    weights, numbers = 16.0 * targets[..., None, None, None], torch.arange(branches, device=device)[:, None]
    taken = torch.empty((TILE**2, count, 1 << kept), dtype=torch.uint8, device=device)
    tiles, states = torch.arange(count, device=device), torch.arange(1 << kept, device=device)

    def step(costs: torch.Tensor, t: int) -> torch.Tensor:
        before, off = costs.unflatten(1, (branches, -1)) + numbers, reached - weights[:, t]
        best = torch.addcmul(before[..., None], off, off).amin(1).flatten(1).long()  # the lowest of equal ones
        taken[t] = best & 255
        return (best & ~255).double()

    def window(state: torch.Tensor, t: int) -> torch.Tensor:
        return taken[t, tiles, state].long() << kept | state

    costs = torch.zeros((count, 1 << kept), dtype=torch.float64, device=device)
    for t in (*range(TILE**2 - lead, TILE**2), *range(lead)):
        costs = step(costs, t)
    state = (costs.long() << kept | states).amin(1) & (1 << kept) - 1
    for t in reversed(range(lead)):
        state = window(state, t) >> bits
    costs = torch.where(states == state[:, None], 0.0, 2.0**50)  # more than any path's
    for t in range(TILE**2):
        costs = step(costs, t)
    own = torch.empty_like(targets)
    for t in reversed(range(TILE**2)):
        own[:, t] = its = window(state, t)
        state = its >> bits
    return pack(own, bits)


def unpack_signs(packed: torch.Tensor) -> torch.Tensor:
    """float16 ``[*, 16 * n]`` of int16 ``[*, n]``: what old files have in place of scales. A one is a minus, and the
    first sign is the lowest bit.

    >>> unpack_signs(torch.tensor([6], dtype=torch.int16))[:4]
    tensor([ 1., -1., -1.,  1.], dtype=torch.float16)
    """
    return (1 - 2 * (packed.int()[..., None] >> torch.arange(16, device=packed.device) & 1)).half().flatten(-2)


def rotate(x: torch.Tensor, block: int = ROTATED) -> torch.Tensor:
    """``x`` times Sylvester's Hadamard matrix over its root, in blocks along the last dimension: its own inverse."""
    rows = x.reshape(-1, block).T.clone(memory_format=torch.contiguous_format)
    return (butterflies(rows) * block**-0.5).T.reshape(x.shape)  # some devices divide by a number otherwise


def code_of(names: Mapping[str, object]) -> str:
    """The code of a layer with tensors of these names, one of which may mark it."""
    return next((code for code in ("mul1", "mcg") if code in names), "3inst")


def decode(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32, name: str = "weight"):
    """The weight ``[N, K]`` of a layer, computed in float32, or in float64 for that.

    Args:
        tensors: by the names that files have: ``trellis``; ``suh`` and ``svh``, float16 ``[K]`` and ``[N]``, or ``su``
            and ``sv`` with packed signs; ``mul1`` or ``mcg``, if the code is one of these.
        dtype: of the result.
        name: what errors call the layer.

    Raises:
        ValueError: a tensor is missing, or of another dtype or shape than the trellis needs.

    >>> trellis = torch.randint(-(2**15), 2**15, (8, 16, 32), dtype=torch.int16)
    >>> layer = {"trellis": trellis, "suh": torch.ones(128).half(), "svh": torch.ones(256).half(), "mul1": None}
    >>> decode(layer).shape
    torch.Size([256, 128])
    """
    if "trellis" not in tensors:
        raise ValueError(f"{name}.trellis: found none, expected it among {sorted(tensors)}")
    bits_of(tensors["trellis"], f"{name}.trellis")
    across, down = (TILE * count for count in tensors["trellis"].shape[:2])
    if across % ROTATED or down % ROTATED:
        raise ValueError(f"{name}.trellis: found a weight of {down} x {across}, expected multiples of {ROTATED}")
    scales = [_scale(tensors, side, size, name) for side, size in (("u", across), ("v", down))]
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    of_inputs, of_outputs = (scale.to(exact) for scale in scales)
    weight = rotate(inner(tensors["trellis"], code_of(tensors)).to(exact)) * of_inputs
    return (rotate(weight.T).T * of_outputs[:, None]).to(dtype)


def _scale(tensors: Mapping[str, torch.Tensor], side: str, size: int, name: str) -> torch.Tensor:
    own, signs = f"s{side}h", f"s{side}"
    if own not in tensors and signs not in tensors:
        raise ValueError(f"{name}.{own}: found neither it nor {signs}, expected one of them")
    own = own if own in tensors else signs
    found, wanted = tensors[own], (torch.float16, size) if own.endswith("h") else (torch.int16, size // 16)
    if (found.dtype, found.numel()) != wanted or found.dim() != 1:
        dtype, expected = (str(each).removeprefix("torch.") for each in (found.dtype, wanted[0]))
        raise ValueError(f"{name}.{own}: found {dtype} {list(found.shape)}, expected {expected} [{wanted[1]}]")
    return found if own.endswith("h") else unpack_signs(found)


def block_of(rows: int, width: int) -> int:
    """Of the blocks in which a weight can be rotated without padding the largest; of one that has none the least.

    >>> block_of(1536, 576), block_of(100, 128)
    (64, 32)
    """
    return next((block for block in reversed(BLOCKS) if not rows % block and not width % block), BLOCKS[0])


# --- as the decoding of a layer -------------------------------------------------------------------


@dataclass(frozen=True)
class TrellisDecoding(Decoding):
    """What turns the tensors of a trellis into a weight, besides them.

    Attributes:
        bits: 1 to 8.
        code: of ``CODES``.
        block: both sides are padded with zeros to multiples of it, and rotated in blocks of so many: 32, 64 or 128.
            EXL3 has 128 alone.
        stacked: of experts, how many matrices with scales of their own lie one below the other in each weight.

    >>> TrellisDecoding(bits=3).layout((100, 256))["trellis"]
    (torch.int16, (16, 8, 48))
    """

    kind = "trellis"
    marks = "trellis"
    names = "trellis", "suh", "svh"
    transformed = True
    read_whole = True

    bits: int
    code: str = "mul1"
    block: int = ROTATED
    stacked: int = 1

    @property
    def keeps_inputs(self) -> str:
        return "" if self.code == "mul1" else f"a trellis of code {self.code!r}"

    @property
    def units(self) -> tuple[int, int]:
        return self.block, self.block

    @property
    def described(self) -> str:
        return f"a trellis of code {self.code!r}"

    def layout(self, shape: Sequence[int]) -> Layout:
        *lead, rows, width = shape
        lead = (*lead, self.stacked) if self.stacked > 1 else tuple(lead)
        rows, width = self.padded(rows // self.stacked), self.padded(width)
        tiles = *lead, width // TILE, rows // TILE, TILE * self.bits
        return {
            "trellis": (torch.int16, tiles),
            "suh": (torch.float16, (*lead, width)),
            "svh": (torch.float16, (*lead, rows)),
        }

    def fault(self, tensors: Mapping[str, torch.Tensor]) -> str:
        for own in ("suh", "svh"):
            if wrong := int((~tensors[own].isfinite()).sum()):
                return f"{own}: found {wrong} NaN or infinite values, expected finite ones"
        return ""

    def padded(self, side: int) -> int:
        return -(-side // self.block) * self.block

    def to_dict(self) -> dict[str, Any]:
        """As plain numbers; what is usual is left out, but for the code."""
        usual = {"block": ROTATED, "stacked": 1}
        return {own: value for own, value in asdict(self).items() if value != usual.get(own)}

    def to_tensor(self) -> torch.Tensor:
        """int64 ``[3]``: the number of the code, block and stacked."""
        return torch.tensor([list(CODES).index(self.code), self.block, self.stacked])

    @classmethod
    def from_dict(cls, stored: Any, bits: int, name: str) -> "TrellisDecoding":
        """As of ``Decoding``.

        >>> decoding = TrellisDecoding(3, "mcg", block=64)
        >>> TrellisDecoding.from_dict(decoding.to_dict(), bits=3, name="q_proj") == decoding
        True
        """
        known = {"bits", "code", "block", "stacked"}
        if not isinstance(stored, dict) or stored.keys() - known or "code" not in stored:
            raise ValueError(f"{name}: found {stored!r}, expected code and perhaps {sorted(known - {'code'})}")
        found = cls(**{"bits": bits, **stored})
        widths = [width for width in BITS if width == bits] or BITS
        expected = {"bits": widths, "code": tuple(CODES), "block": BLOCKS, "stacked": tuple(range(1, 9))}
        for own, among in expected.items():
            if (value := getattr(found, own)) not in among or type(value) not in (int, str):
                raise ValueError(f"{name}.{own}: found {value!r}, expected one of {list(among)}")
        return found

    @classmethod
    def from_tensor(cls, stored: torch.Tensor, bits: int, name: str) -> "TrellisDecoding":
        """The inverse of ``to_tensor``; errors as of ``from_dict``.

        >>> decoding = TrellisDecoding(3, "mcg", block=64)
        >>> TrellisDecoding.from_tensor(decoding.to_tensor(), bits=3, name="q_proj") == decoding
        True
        """
        if stored.dtype != torch.int64 or stored.shape != (3,):
            found = f"dtype {stored.dtype} and shape {list(stored.shape)}"
            raise ValueError(f"{name}: found {found}, expected dtype torch.int64 and shape [3]")
        code, block, stacked = stored.tolist()
        code = list(CODES)[code] if 0 <= code < len(CODES) else code
        return cls.from_dict({"code": code, "block": block, "stacked": stacked}, bits, name)
