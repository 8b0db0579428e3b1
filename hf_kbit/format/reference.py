"""Every op in plain PyTorch: the executable specification, and the fallback wherever no kernel serves.

Works on any device, vectorised over the whole tensor. ``ops`` says what each op takes and returns, ``ops.table`` what
it refuses: arguments arrive here already checked. Tensors of several bytes per element are viewed as bytes, so a
little-endian machine is assumed, as safetensors does.

Shapes: N out_features, K in_features, B = ceil(K / 32) blocks a row; ``*`` any leading dimensions.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import pairwise

import torch
import torch.nn.functional as F

from hf_kbit.format import spec as format
from hf_kbit.format import transforms, trellis
from hf_kbit.format.codebooks import bits_of
from hf_kbit.format.spec import BLOCK_SIZE, num_blocks

# Rows are quantized in slices of about this many weights: enough to keep a device busy, and the float32 and integer
# temporaries of a slice stay a small part of the model.
QUANTIZE_SLICE = 1 << 22

# The tiles: a tile is 16 rows x 64 in_features held by 32 lanes, a slab is four tiles along K.
TILE_ROWS, SLAB_BLOCKS, LANES = 16, 8, 32


def matrices(weight: torch.Tensor | Iterable[torch.Tensor]) -> Iterable[torch.Tensor]:
    """The matrices ``[N, K]`` of a weight ``[*, N, K]``: views of a tensor, without gradients; or the weight itself,
    if it is none but has the ``shape`` and ``device`` of one, and makes its matrices when it is gone through."""
    return weight.detach().reshape(-1, *weight.shape[-2:]) if isinstance(weight, torch.Tensor) else weight


def row_slices(weight: torch.Tensor | Iterable[torch.Tensor], numbers: int) -> Iterator[torch.Tensor]:
    """The rows of a weight (``matrices``), ``[n, K]`` of about so many numbers at a time: views, of any strides."""
    for matrix in matrices(weight):
        yield from matrix.split(max(numbers // weight.shape[-1], 1))


def _look_up(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``table[index]`` for a table of one dimension; ``index_select`` with int32 is 2 to 4 times faster on a CPU."""
    return table.index_select(0, index.flatten().int()).view(index.shape)


# --- scales ---------------------------------------------------------------------------------------


# The lower seven bits of a scale with a sign, to ops: E4M4's lower half. A Decoding gives its levels the power of two
# by which SE3M4 is larger.
MAGNITUDE, SIGN = 127, 128


@cache
def _scales(device: torch.device, signed: bool) -> torch.Tensor:
    values = [format.decode_e4m4(byte) for byte in range(256)]
    if signed:
        values = [*values[:SIGN], *(-value for value in values[:SIGN])]
    return torch.tensor(values, dtype=torch.float32, device=device)


def decode_e4m4(byte: torch.Tensor) -> torch.Tensor:
    """uint8 E4M4 bytes of any shape to their float32 values."""
    return decode_scales(byte, signed=False)


def decode_scales(absmax: torch.Tensor, signed: bool) -> torch.Tensor:
    """uint8 scales of any shape to float32: E4M4 or, if ``signed``, the sign and E4M4 of the lower seven bits."""
    return _look_up(_scales(absmax.device, signed), absmax)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float32 ``2**exponent`` of int32 exponents from -126 to 127. ``torch.ldexp`` of torch 2.11 reads memory of
    another device where the tensors are not on the current one."""
    return ((exponent + 127) << 23).view(torch.float32)


def encode_e4m4(value: torch.Tensor, most: int = 255) -> torch.Tensor:
    """float32 values >= 0 of any shape to the nearest E4M4 bytes up to ``most``: ties to even."""
    lowest = 1 - format.E4M4_BIAS
    exponent = torch.where(value > 0, torch.frexp(value).exponent - 1, lowest).clamp(min=lowest)
    sixteenths = (value * power_of_two(4 - exponent)).round()
    return ((exponent + format.E4M4_BIAS - 1) * 16 + sixteenths).clamp(0, most).to(torch.uint8)


def signs_of(blocks: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """The sign that the scale of a block ``[*, 32]`` has, 1 or -1, ``[*]``: with it the block's weight of largest
    magnitude is on the side of the level of largest magnitude. Where both signs would do it is 1."""
    least, most = torch.aminmax(blocks, dim=-1)
    below = codebook[-1] < -codebook[0]  # no `if`: it would wait for the device, and none can be in a CUDA graph
    return torch.where(torch.where(below, most > -least, -least > most), -1.0, 1.0)


# --- bit-planes -----------------------------------------------------------------------------------


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes ``[*, B, 32]`` to int32 bit-planes ``[*, B * bits]``."""
    eight = codes.contiguous().view(torch.int64)  # [*, B, 4], a code in every byte
    planes = [
        # Keep bit `plane` of every byte, then a multiplication brings the eight of them together in the top byte.
        (((eight >> plane) & 0x0101010101010101) * 0x0102040810204080 >> 56).to(torch.uint8)
        for plane in range(bits)
    ]
    return torch.stack(planes, dim=-2).view(torch.int32).flatten(-3)


@cache
def _spread_tables(bits: int, places: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
    """For each plane an int64 [256]: bit j of a byte moved to ``places[j]``, plus the number of the plane."""
    byte, bit = torch.arange(256, device=device)[:, None], torch.arange(8, device=device)
    spread = (((byte >> bit) & 1) << torch.tensor(places, device=device)).sum(dim=1)
    return [spread << plane for plane in range(bits)]


def _gather_codes(planes: torch.Tensor, bits: int, places: tuple[int, ...]) -> torch.Tensor:
    """int32 bit-planes ``[*, B * bits]`` to int64 ``[*, B, 4]``, each holding eight codes at the given bit places."""
    octets = planes.contiguous().view(torch.uint8).unflatten(-1, (-1, bits, 4)).int()
    first, *others = _spread_tables(bits, places, planes.device)
    gathered = _look_up(first, octets[..., 0, :])
    for plane, table in enumerate(others, start=1):
        gathered |= _look_up(table, octets[..., plane, :])
    return gathered


def unpack_codes(planes: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 bit-planes ``[*, B * bits]`` to uint8 codes ``[*, B, 32]``."""
    return _gather_codes(planes, bits, tuple(range(0, 64, 8))).view(torch.uint8)


# --- quantize, dequantize -------------------------------------------------------------------------


# Steps between bytes, down and up from that of absmax, in which a scale is searched: about half to 1.3 times it, or,
# with signs, when levels may end before -1, 0.6 to 1.4 times.
SEARCH, SEARCH_SIGNED = (16, 6), (13, 9)


def search_steps(signed: bool) -> range:
    """In this order: of equal errors the first wins."""
    below, above = SEARCH_SIGNED if signed else SEARCH
    return range(-below, above + 1)


def quantize(weight, codebook, search=False, signed=False):
    """See ``ops.quantize``."""
    in_features, bits = weight.shape[-1], bits_of(codebook.numel())
    rows = weight.reshape(-1, in_features)
    slices = rows.split(max(QUANTIZE_SLICE // in_features, 1))
    parts = [quantize_rows(part, codebook, bits, search, signed) for part in slices]
    planes, absmax = map(torch.cat, zip(*parts, strict=True))
    return planes.unflatten(0, weight.shape[:-1]), absmax.unflatten(0, weight.shape[:-1])


def quantize_rows(
    rows: torch.Tensor, codebook: torch.Tensor, bits: int, search: bool, signed: bool, importance=None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``quantize`` of rows at once; ``importance``, float32 ``[K]``, weights the squared errors that a search
    compares, all alike if None."""
    padding = -rows.shape[-1] % BLOCK_SIZE
    blocks = F.pad(rows.float(), (0, padding)).unflatten(-1, (-1, BLOCK_SIZE))
    largest = codebook.abs().amax()
    if search:  # in units of a power of two, so that no square leaves the range of float32
        unit = power_of_two((1 - torch.frexp(largest).exponent).clamp(-126, 126))
        blocks, codebook, largest = blocks * unit, codebook * unit, largest * unit
    if signed:  # what follows is of blocks whose scales are positive
        signs = signs_of(blocks, codebook)
        blocks = blocks * signs[..., None]
    most = MAGNITUDE if signed else 255
    absmax = encode_e4m4(blocks.abs().amax(dim=-1) / largest, most)
    if search:
        factors = rows.new_ones(rows.shape[-1], dtype=torch.float32) if importance is None else importance.sqrt()
        factors = F.pad(factors, (0, padding)).unflatten(-1, (-1, BLOCK_SIZE))
        absmax = _least_error(blocks, factors, codebook, absmax, search_steps(signed), most)
    codes = nearest(over_scales(blocks, absmax), halfway(codebook)).to(torch.uint8)
    return pack_codes(codes, bits), with_signs(absmax, signs) if signed else absmax


def with_signs(absmax: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """Bytes below 128 with the signs, 1 or -1, that their scales have; zero has none."""
    return torch.where((signs < 0) & (absmax > 0), absmax + SIGN, absmax)


def over_scales(blocks: torch.Tensor, absmax: torch.Tensor) -> torch.Tensor:
    """The weights as the levels see them: over the scale, without a sign, that a reader will decode."""
    scale = decode_e4m4(absmax)
    return blocks * torch.where(scale > 0, 1 / scale, 0)[..., None]


def halfway(codebook: torch.Tensor) -> torch.Tensor:
    """``[levels - 1]``: what is as far from a level as from the next one."""
    return (codebook[1:] + codebook[:-1]) / 2


def nearest(ratios: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """The code, int32, of the nearest of the levels of which ``between`` is ``halfway``; halfway goes to the lower."""
    return torch.bucketize(ratios, between, out_int32=True)


def _least_error(blocks, factors, codebook, absmax, steps, most) -> torch.Tensor:
    """Of the bytes ``steps`` from ``absmax``, from 1 to ``most``, that with the least squared error; if several,
    ``absmax``, else the lowest. ``factors`` multiply the errors: 0 where there is padding. Every operation is one of
    float32, and a sum has one order: all devices agree."""

    between = halfway(codebook)

    def squared_error(byte):
        ratios = over_scales(blocks, byte)
        difference = (ratios - _look_up(codebook, nearest(ratios, between))) * factors
        squares = difference * difference
        while squares.shape[-1] > 1:
            squares = squares[..., : squares.shape[-1] // 2] + squares[..., squares.shape[-1] // 2 :]
        scale = decode_e4m4(byte)
        return squares[..., 0] * scale * scale

    best, least = absmax, squared_error(absmax)
    for step in steps:
        byte = (absmax.int() + step).clamp(1, most).to(torch.uint8)
        error = squared_error(byte)
        better = (error < least) & (absmax > 0)
        best, least = torch.where(better, byte, best), torch.where(better, error, least)
    return best


def dequantize(weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    """See ``ops.dequantize``."""
    bits = bits_of(codebook.numel())
    if is_tiled(weight, absmax, bits):
        weight, absmax = repack(weight, absmax, bits, shape, inverse=True)
    # One look-up serves two neighbouring codes: an entry of the table is a pair of levels, seen as one int64.
    low, high = codebook.expand(2**bits, -1), codebook[:, None].expand(-1, 2**bits)
    table = torch.stack([low, high], dim=-1).view(torch.int64).flatten()
    pairs = _gather_codes(weight, bits, tuple(16 * (j // 2) + bits * (j % 2) for j in range(8))).view(torch.int16)
    levels = _look_up(table, pairs).view(torch.float32)
    stored = levels.mul_(decode_scales(absmax, signed=rotated)[..., None]).flatten(-2)
    scales = None if columns is None else decode_e4m4(columns)
    return transforms.to_original(stored, scales, rotated, shape[-1]).to(dtype).contiguous()


def embed(indices, weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    """See ``ops.embed``. Tiles, which layers have only where a library reads them, are all turned into planes."""
    if is_tiled(weight, absmax, bits_of(codebook.numel())):
        weight, absmax = repack(weight, absmax, bits_of(codebook.numel()), shape, inverse=True)
    rows = _checked_index("indices", indices.flatten(), shape[0])
    packed = weight.index_select(0, rows), absmax.index_select(0, rows)
    found = dequantize(*packed, codebook, [len(rows), shape[1]], dtype, columns, rotated)
    return _unviewed(found, (*indices.shape, shape[1]))


def _unviewed(rows: torch.Tensor, shape) -> torch.Tensor:
    """Rows in another shape, not as a view, which nobody may change in place when it comes from an op of ours."""
    return torch.ops.aten._unsafe_view(rows, shape)


def _checked_index(name: str, index: torch.Tensor, count: int) -> torch.Tensor:
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < count:
        raise ValueError(f"{name}: found {int(index.min())} to {int(index.max())}, expected 0 to {count - 1}")
    return index


# --- tiles ----------------------------------------------------------------------------------------


def is_tiled(weight: torch.Tensor, absmax: torch.Tensor, bits: int) -> bool:
    """Whether the words are tiles; a row of bit-planes has ``bits`` words for each scale."""
    return weight.shape[-1] != absmax.shape[-1] * bits


def tiled_shapes(out_features: int, in_features: int, bits: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the int32 words and the uint8 scales of the tiled form, padded to 16 rows and 256 columns."""
    slabs = -(-out_features // TILE_ROWS), -(-num_blocks(in_features) // SLAB_BLOCKS)
    return (*slabs, bits, LANES, 4), (*slabs, TILE_ROWS // 2, 2 * SLAB_BLOCKS)


def repack(weight, absmax, bits, shape, inverse=False):
    """See ``ops.repack``.

    The order in which an ``m16n8k16`` matrix instruction of a GPU needs the weights as its A operand, so that a lane's
    loads are 16 bytes wide, coalesced, and need no shuffling. With g = lane // 4 and t = lane % 4, a lane of a 16 x 64
    tile owns rows g and g + 8 and, in each of the tile's two blocks, columns 8 t .. 8 t + 7. Neighbours along K form
    pairs; the pair of (block, instruction, half_of_k, half_of_rows), each 0 or 1, is one register of one instruction.
    The words of a tile, from their low ends, the first neighbour of a pair below the second:

    - 2 bits: byte ``2 * instruction + half_of_k`` of word ``block`` holds the pairs of both rows, whose codes
      alternate, g below g + 8. So a byte looks up two registers, and ``word & 0x33333333`` makes nibbles of row g.
    - 3 bits: byte ``2 * half_of_k + half_of_rows`` of word ``2 * block + instruction`` holds a pair in bits 2 to 7.
      The pairs of a fourth word lie in the lowest two bits of the same bytes of the three others, bits 0 and 1 of a
      pair in word 2, bits 2 and 3 in word 1, bits 4 and 5 in word 0. So a byte looks up one register, in a table that
      ignores its lowest two bits.
    - 4 and 5 bits: a word holds ``32 // (2 * bits)`` pairs, numbered ``8 * block + 4 * instruction + 2 * half_of_k +
      half_of_rows``; at 5 bits the two bits left at the top of every word together are the sixteenth pair.

    The four tiles of a slab give a lane ``4 * bits`` words, stored as ``bits`` loads of 4. The scales of rows g and
    g + 8 of a slab are 16 neighbouring bytes, the two rows alternating.
    """
    rows, blocks = shape[0], num_blocks(shape[1])
    (row_tiles, slabs, *_), _ = tiled_shapes(*shape, bits)
    order = _places(bits, weight.device)
    if inverse:
        slab = _reorder(weight.flatten(-3), order)
        planes = slab.unflatten(-1, (TILE_ROWS, -1)).transpose(-3, -2).flatten(-4, -3).flatten(-2)
        # from [*, row tile, slab, g, block, half of rows] to [*, row tile, half of rows, g, slab, block]
        scales = absmax.unflatten(-1, (-1, 2)).movedim((-1, -4), (-4, -2)).flatten(-5, -3).flatten(-2)
        return planes[..., :rows, : blocks * bits].contiguous(), scales[..., :rows, :blocks].contiguous()
    pad_rows, pad_blocks = row_tiles * TILE_ROWS - rows, slabs * SLAB_BLOCKS - blocks
    slab = F.pad(weight, (0, pad_blocks * bits, 0, pad_rows)).unflatten(-1, (slabs, -1))
    slab = slab.unflatten(-3, (row_tiles, -1)).transpose(-3, -2).flatten(-2)
    words = _reorder(slab, order.argsort())
    scales = F.pad(absmax, (0, pad_blocks, 0, pad_rows)).unflatten(-1, (slabs, -1)).unflatten(-3, (row_tiles, 2, -1))
    scales = scales.movedim((-4, -2), (-1, -4)).flatten(-2)
    return words.unflatten(-1, (bits, LANES, 4)), scales.contiguous()


def _reorder(words: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """int32 ``[*, W]`` made of those of its bits that ``order`` ``[32 * W]`` says."""
    found = unpack_codes(words, 1).flatten(-2)
    return pack_codes(found.gather(-1, order.expand_as(found)).unflatten(-1, (-1, 32)), 1)


@cache
def _places(bits: int, device: torch.device) -> torch.Tensor:
    """int64 ``[4096 * bits]``: of each bit of a slab's planes ``[16, 8 * bits]`` its place in the slab's tiles."""
    sizes = 2, 8, 4, 2, bits, 4, 2, 2, 2
    grid = torch.cartesian_prod(*(torch.arange(size, device=device) for size in sizes)).T
    half_of_rows, g, tile, block, plane, t, instruction, half_of_k, neighbour = grid
    bit = bits * neighbour + plane  # of the pair
    if bits == 2:
        places = 32 * block + 16 * instruction + 8 * half_of_k + 4 * neighbour + 2 * half_of_rows + plane
    elif bits == 3:
        word, byte = 2 * block + instruction, 16 * half_of_k + 8 * half_of_rows
        places = torch.where(word < 3, 32 * word + byte + 2 + bit, 32 * (2 - bit // 2) + byte + bit % 2)
    else:
        pair, per_word = 8 * block + 4 * instruction + 2 * half_of_k + half_of_rows, 32 // (2 * bits)
        own, spread = 32 * (pair // per_word) + 2 * bits * (pair % per_word) + bit, 32 * (bit // 2) + 30 + bit % 2
        places = torch.where(pair < per_word * bits, own, spread)
    word = bits * tile + places // 32  # of the lane
    lane = 4 * g + t
    return 32 * (4 * (LANES * (word // 4) + lane) + word % 4) + places % 32


# --- trellises, by the names of ops ---------------------------------------------------------------

encode_trellis, decode_trellis = trellis.encode, trellis.inner


# --- gemm -----------------------------------------------------------------------------------------


def gemm(x, weight, absmax, codebook, bias, out_features, columns=None, rotated=False):
    """See ``ops.gemm``."""
    dense = dequantize(weight, absmax, codebook, [out_features, x.shape[-1]], x.dtype, columns, rotated)
    return linear(x, dense, bias)


def linear(x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear``, but no view."""
    return _unviewed(F.linear(x.reshape(-1, x.shape[-1]), dense, bias), (*x.shape[:-1], len(dense)))


def gemm_group(x, *of_each):
    """``gemm`` of each of several weights, of which ``of_each`` has lists, or ``gemm_int8`` of one with inverses."""
    return [
        gemm(x, *product, bool(rotated)) if inverses is None else gemm_int8(x, *product, inverses)
        for *product, rotated, inverses in zip(*of_each, strict=True)
    ]


def gemm_gradient(grad, weight, absmax, codebook, shape, columns=None, rotated=False):
    """The gradient of ``gemm`` in x."""
    return grad @ dequantize(weight, absmax, codebook, shape, grad.dtype, columns, rotated)


# --- gemm of 8-bit inputs -------------------------------------------------------------------------

# A scale is used in sixteenths, as which float16 has its bits, and levels as of 2**14 to 2**15: then 127 over the
# largest number of a row is a normal number of float16. A row of zeros gets the most, by which no scale is infinite.
LARGEST_LEVEL, MOST_INVERSE = 15, 2.0**15
NO_TOKEN = 2.0**-100  # a token of smaller numbers counts as zeros: 127 over them might be infinite
INT8_SLICE = 1024  # float32 holds sums of so many products of int8, in any order


def gemm_int8(x, weight, absmax, codebook, bias, out_features, columns, inverses=None):
    """See ``ops.gemm_int8``. Each step rounds once, in the order of docs/format.md, which all devices follow."""
    tokens, of_tokens = tokens_to_int8(x.reshape(-1, x.shape[-1]), columns)
    rows, of_rows = rows_to_int8(weight, absmax, codebook, [out_features, x.shape[-1]], inverses)
    y = _exact_product(tokens, rows).float() * of_tokens * of_rows
    y = y if bias is None else y + bias.float()
    return _unviewed(y.to(x.dtype), (*x.shape[:-1], out_features))


def tokens_to_int8(x: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[M, K]``, transformed: int8 ``[M, 32 * B]``, and what 1 stands for, float32 ``[M, 1]``.

    A token with what is not finite gets zeros that stand for NaN or infinity: all of its results are NaN.
    """
    turned = transforms.of_input(x, decode_e4m4(columns), rotated=True)
    largest = turned.abs().amax(dim=-1, keepdim=True)
    usual = (largest >= NO_TOKEN) & (largest < torch.inf)
    # Products with constants and reciprocals: what torch makes of a division by a number depends on the device.
    rounded = (turned * (127 * largest.reciprocal())).round()
    return rounded.where(usual, 0).to(torch.int8), largest * (1 / 127)


def int8_inverses(weight, absmax, codebook, shape):
    """See ``ops.int8_inverses``."""
    levels, scales, _ = _levels_and_scales(weight, absmax, codebook, shape)
    return _inverses(levels, scales)


def rows_to_int8(weight, absmax, codebook, shape, inverses=None) -> tuple[torch.Tensor, torch.Tensor]:
    """A stored weight whose scales have signs: int8 ``[N, 32 * B]``, and what 1 stands for, float32 ``[N]``.

    No number exceeds 127: the two roundings to float16 add at most 0.125 to that.
    """
    levels, scales, shift = _levels_and_scales(weight, absmax, codebook, shape)
    inverses = (_inverses(levels, scales) if inverses is None else inverses).float()
    multipliers = (scales * inverses[:, None]).half().float()
    rows = (levels * multipliers[..., None]).round().to(torch.int8)
    return rows.flatten(-2), power_of_two(4 - shift) / inverses


def _inverses(levels: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    # Products of two numbers of float16 are exact in float32, here and where they are rounded, once, to integers.
    largest = (levels * scales[..., None]).abs().amax(dim=(-2, -1))
    return (127 * largest.reciprocal()).clamp(max=MOST_INVERSE).half()


def _levels_and_scales(weight, absmax, codebook: torch.Tensor, shape):
    """Numbers of float16, in float32: levels ``[N, B, 32]`` and scales ``[N, B]``; and the power of two of levels."""
    bits = bits_of(codebook.numel())
    if is_tiled(weight, absmax, bits):
        weight, absmax = repack(weight, absmax, bits, shape, inverse=True)
    shift = (LARGEST_LEVEL - torch.frexp(codebook.abs().amax()).exponent).clamp(max=126)
    levels = _look_up((codebook * power_of_two(shift)).half().float(), unpack_codes(weight, bits))
    return levels, decode_scales(absmax, signed=True) * (1 / 16), shift


def _exact_product(tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``tokens @ rows.T`` of int8, in int32."""
    slices = zip(tokens.split(INT8_SLICE, dim=-1), rows.split(INT8_SLICE, dim=-1), strict=True)
    with torch.autocast(tokens.device.type, enabled=False):  # which would round the sums
        return sum((some.float() @ others.float().T).int() for some, others in slices)


# --- experts --------------------------------------------------------------------------------------


def route_experts(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See ``ops.route_experts``."""
    known = (experts >= 0) & (experts < num_experts)
    numbers, order = torch.sort(experts.where(known, num_experts).flatten(), stable=True)
    bounds = torch.arange(num_experts + 1, dtype=numbers.dtype, device=numbers.device)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    rows = order.div(experts.shape[1], rounding_mode="floor").int() if len(order) else places
    return rows, places.view(experts.shape), torch.searchsorted(numbers, bounds, out_int32=True)


def combine_experts(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See ``ops.combine_experts``."""
    wide = torch.promote_types(y.dtype, torch.float32)
    return (y[places].to(wide) * weights.to(wide)[..., None]).sum(dim=1).to(y.dtype)


def gemm_experts(
    x, weight, absmax, codebook, bias, rows, offsets, out_features, columns=None, rotated=False, swiglu=False
):
    """See ``ops.gemm_experts``."""
    x = swiglu_of(x) if swiglu else x

    def multiply(x, expert, bias):
        return gemm(x, weight[expert], absmax[expert], codebook, bias, out_features, columns, rotated)

    return _by_experts(multiply, x, bias, rows, offsets, out_features)


def gemm_experts_int8(
    x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, inverses=None, swiglu=False
):
    """See ``ops.gemm_experts_int8``."""
    x = swiglu_of(x) if swiglu else x

    def multiply(x, expert, bias):
        own = None if inverses is None else inverses[expert]
        return gemm_int8(x, weight[expert], absmax[expert], codebook, bias, out_features, columns, own)

    return _by_experts(multiply, x, bias, rows, offsets, out_features)


def swiglu_of(x: torch.Tensor) -> torch.Tensor:
    """The usual gate between two projections of experts: ``[*, 2 K]`` to ``[*, K]``."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _by_experts(multiply, x, bias, rows, offsets, out_features) -> torch.Tensor:
    """``multiply`` of the rows, number and bias of an expert at a time, so that one decoded matrix is in memory."""
    x = x if rows is None else x[_checked_index("rows", rows, len(x))]
    y = x.new_zeros((len(x), out_features))
    for expert, (first, last) in enumerate(_shares(offsets, len(x))):
        if last > first:
            y[first:last] = multiply(x[first:last], expert, None if bias is None else bias[expert])
    return y


def gemm_experts_gradient(grad, weight, absmax, codebook, offsets, shape, columns=None, rotated=False):
    """The gradient of ``gemm_experts`` for the rows that it multiplied: each times its expert's matrix."""
    grad_x = grad.new_zeros((len(grad), shape[1]))
    for expert, (first, last) in enumerate(_shares(offsets, len(grad))):
        if last > first:
            packed = weight[expert], absmax[expert], codebook
            grad_x[first:last] = gemm_gradient(grad[first:last], *packed, shape, columns, rotated)
    return grad_x


def _shares(offsets: torch.Tensor, rows: int) -> list[tuple[int, int]]:
    """First and last row of each expert."""
    numbers = offsets.tolist()
    shares = list(pairwise(numbers))
    if numbers[0] != 0 or numbers[-1] > rows or any(last < first for first, last in shares):
        raise ValueError(f"offsets: found {numbers}, expected ascending numbers from 0 to {rows} at most")
    return shares
