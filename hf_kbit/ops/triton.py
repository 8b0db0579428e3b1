"""Triton's kernels, for GPUs that no compiled library serves: decoding planes, and products of few tokens with them.

The other ops are plain PyTorch there. ``dequantize`` and ``gemm`` take what those of ``reference`` take, give the same
and decode by its order of float32 operations, so a weight decoded here is the same bit for bit. ``native.fallback``
chooses between the two and imports this file, and with it Triton, where it is about to be used.

They were tested on an H200, not timed, and sizes of tiles not tuned; no AMD or Intel GPU has run them.

Shapes: M tokens, N rows of the weight, K in_features, B = ceil(K / 32) blocks a row.
"""

import torch
import triton
import triton.language as tl

from hf_kbit.format import reference
from hf_kbit.format import spec as format
from hf_kbit.format.codebooks import bits_of
from hf_kbit.format.spec import num_blocks

OPS = ("dequantize", "gemm", "gemm_gradient")
MOST_TOKENS = 16  # of one product: the side of the smallest tile that tl.dot takes

_BLOCK = tl.constexpr(format.BLOCK_SIZE)
_E4M4_BIAS = tl.constexpr(format.E4M4_BIAS)
_ROOT = tl.constexpr(format.BLOCK_SIZE**-0.5)

# No a * b + c is to become one operation, which would round once where reference rounds twice.
_OPTIONS = {"enable_fp_fusion": False}


# --- in a kernel ----------------------------------------------------------------------------------


@triton.jit
def _decode_e4m4(byte):
    exponent, mantissa = byte.to(tl.int32) >> 4, byte.to(tl.int32) & 15
    normal = ((exponent + (127 - _E4M4_BIAS)) << 23 | mantissa << 19).to(tl.float32, bitcast=True)
    return tl.where(exponent > 0, normal, mantissa * 2.0 ** (1 - _E4M4_BIAS - 4))


@triton.jit
def _decode(planes, absmax, codebook, rows, blocks, row_blocks, mask, bits: tl.constexpr, signed: tl.constexpr):
    """``[rows, blocks, 32]`` float32, as they are stored; zeros where ``mask [rows, blocks]`` is not set."""
    index = rows.to(tl.int64)[:, None] * row_blocks + blocks[None, :]
    place = tl.arange(0, _BLOCK)[None, None, :]
    codes = tl.zeros([rows.shape[0], blocks.shape[0], _BLOCK], tl.int32)
    for plane in tl.static_range(bits):
        words = tl.load(planes + index * bits + plane, mask=mask, other=0)
        codes |= (words[:, :, None] >> place & 1) << plane
    byte = tl.load(absmax + index, mask=mask, other=0).to(tl.int32)
    scales = _decode_e4m4(byte & 127 if signed else byte)
    if signed:
        scales = tl.where(byte > 127, -scales, scales)
    return tl.load(codebook + codes) * scales[:, :, None]


@triton.jit
def _rotate(numbers, blocks: tl.constexpr):
    """``transforms.rotate`` of float32 ``[blocks, 32]``. A round takes neighbours and puts all sums before all
    differences: the next round's neighbours were twice as far apart, and after five rounds all are in place again."""
    for _ in tl.static_range(5):
        first, second = tl.split(tl.reshape(numbers, [blocks, _BLOCK // 2, 2]))
        numbers = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 2, 1]), [blocks, _BLOCK])
    return numbers * _ROOT


@triton.jit
def _dequantize_kernel(
    planes, absmax, codebook, columns, out, count, in_features, row_blocks,
    bits: tl.constexpr, scaled: tl.constexpr, rotated: tl.constexpr,
    tile_rows: tl.constexpr, tile_blocks: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    blocks = tl.program_id(1) * tile_blocks + tl.arange(0, tile_blocks)
    mask = (rows < count)[:, None] & (blocks < row_blocks)[None, :]
    numbers = _decode(planes, absmax, codebook, rows, blocks, row_blocks, mask, bits, rotated)
    if rotated:
        numbers = _rotate(tl.reshape(numbers, [tile_rows * tile_blocks, _BLOCK]), tile_rows * tile_blocks)
    numbers = tl.reshape(numbers, [tile_rows, tile_blocks * _BLOCK])
    k = tl.program_id(1) * tile_blocks * _BLOCK + tl.arange(0, tile_blocks * _BLOCK)
    if scaled:
        numbers *= _decode_e4m4(tl.load(columns + k, mask=k < in_features, other=0))[None, :]
    to = out + rows.to(tl.int64)[:, None] * in_features + k[None, :]
    tl.store(to, numbers.to(out.dtype.element_ty), mask=(rows < count)[:, None] & (k < in_features)[None, :])


@triton.jit
def _of_input_kernel(
    x, columns, out, in_features, row_blocks,
    scaled: tl.constexpr, rotated: tl.constexpr, tile_blocks: tl.constexpr,
):  # fmt: skip
    """``transforms.of_input`` of a token's ``tile_blocks`` blocks, rounded to the dtype of x."""
    token = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * tile_blocks * _BLOCK + tl.arange(0, tile_blocks * _BLOCK)
    numbers = tl.load(x + token * in_features + k, mask=k < in_features, other=0).to(tl.float32)
    if scaled:
        numbers *= _decode_e4m4(tl.load(columns + k, mask=k < in_features, other=0))
    if rotated:
        numbers = tl.reshape(_rotate(tl.reshape(numbers, [tile_blocks, _BLOCK]), tile_blocks), [tile_blocks * _BLOCK])
    row = row_blocks * _BLOCK
    tl.store(out + token * row + k, numbers.to(out.dtype.element_ty), mask=k < row)


@triton.jit
def _gemm_kernel(
    x, planes, absmax, codebook, bias, out, tokens, out_features, in_features, row_blocks,
    bits: tl.constexpr, signed: tl.constexpr, biased: tl.constexpr,
    tile_tokens: tl.constexpr, tile_rows: tl.constexpr, tile_blocks: tl.constexpr,
):  # fmt: skip
    """x ``[M, K]`` by the weight as it is stored, of which a program has ``tile_rows`` rows and all of K."""
    rows = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    m = tl.arange(0, tile_tokens)
    sums = tl.zeros([tile_rows, tile_tokens], tl.float32)
    for first in range(0, row_blocks, tile_blocks):
        blocks = first + tl.arange(0, tile_blocks)
        mask = (rows < out_features)[:, None] & (blocks < row_blocks)[None, :]
        numbers = _decode(planes, absmax, codebook, rows, blocks, row_blocks, mask, bits, signed)
        weight = tl.reshape(numbers, [tile_rows, tile_blocks * _BLOCK]).to(x.dtype.element_ty)
        k = first * _BLOCK + tl.arange(0, tile_blocks * _BLOCK)
        there = (k < in_features)[:, None] & (m < tokens)[None, :]
        of_tokens = tl.load(x + m.to(tl.int64)[None, :] * in_features + k[:, None], mask=there, other=0)
        sums = tl.dot(weight, of_tokens, sums, input_precision="ieee")
    if biased:
        sums += tl.load(bias + rows, mask=rows < out_features, other=0).to(tl.float32)[:, None]
    to = out + m.to(tl.int64)[None, :] * out_features + rows[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=(m < tokens)[None, :] & (rows < out_features)[:, None])


# --- launched -------------------------------------------------------------------------------------


def dequantize(weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    """See ``ops.dequantize``. Tiles, which layers have only where a library reads them, go to ``reference``."""
    bits = bits_of(codebook.numel())
    if reference.is_tiled(weight, absmax, bits):
        return reference.dequantize(weight, absmax, codebook, shape, dtype, columns, rotated)
    out = weight.new_empty((*weight.shape[:-2], *shape), dtype=dtype)
    tile = {"tile_rows": 8, "tile_blocks": 4}
    rows, row_blocks = out.numel() // shape[1], num_blocks(shape[1])
    grid = triton.cdiv(rows, tile["tile_rows"]), triton.cdiv(row_blocks, tile["tile_blocks"])
    tensors = [_contiguous(tensor) for tensor in (weight, absmax, codebook, columns)]
    how = {"bits": bits, "scaled": columns is not None, "rotated": rotated}
    with torch.accelerator.device_index(weight.device.index):
        _dequantize_kernel[grid](*tensors, out, rows, shape[1], row_blocks, **how, **tile, **_OPTIONS)
    return out


def gemm(x, weight, absmax, codebook, bias, out_features, columns=None, rotated=False):
    """See ``ops.gemm``: up to ``MOST_TOKENS`` tokens by one kernel, more after decoding the weight."""
    bits, in_features = bits_of(codebook.numel()), x.shape[-1]
    tokens = x.numel() // in_features
    tiled = reference.is_tiled(weight, absmax, bits)
    if tiled or x.dtype == torch.float64 or not 0 < tokens <= MOST_TOKENS:
        dense = dequantize(weight, absmax, codebook, [out_features, in_features], x.dtype, columns, rotated)
        return reference.linear(x, dense, bias)
    out = x.new_empty((*x.shape[:-1], out_features))
    row_blocks = num_blocks(in_features)
    how, tile = {"bits": bits, "signed": rotated, "biased": bias is not None}, {"tile_rows": 16, "tile_blocks": 4}
    with torch.accelerator.device_index(x.device.index):
        x = x.reshape(tokens, in_features).contiguous()
        if columns is not None or rotated:
            x = _of_input(x, columns, rotated)
        packed = [_contiguous(tensor) for tensor in (weight, absmax, codebook, bias)]
        sizes = tokens, out_features, x.shape[1], row_blocks
        grid = (triton.cdiv(out_features, tile["tile_rows"]),)
        _gemm_kernel[grid](x, *packed, out, *sizes, **how, tile_tokens=MOST_TOKENS, **tile, **_OPTIONS)
    return out


def gemm_gradient(grad, weight, absmax, codebook, shape, columns=None, rotated=False):
    """The gradient of ``gemm`` in x."""
    return grad @ dequantize(weight, absmax, codebook, shape, grad.dtype, columns, rotated)


def _of_input(x: torch.Tensor, columns: torch.Tensor | None, rotated: bool) -> torch.Tensor:
    """x ``[M, K]`` as the stored weight wants it, ``[M, 32 * B]``."""
    tokens, in_features = x.shape
    row_blocks = num_blocks(in_features)
    out, tile_blocks = x.new_empty((tokens, row_blocks * format.BLOCK_SIZE)), 16
    how = {"scaled": columns is not None, "rotated": rotated, "tile_blocks": tile_blocks}
    grid = tokens, triton.cdiv(row_blocks, tile_blocks)
    _of_input_kernel[grid](x, _contiguous(columns), out, in_features, row_blocks, **how, **_OPTIONS)
    return out


def check(device_type: str, dtype: torch.dtype) -> None:
    """Runs all kernels once, on a device of which there may be no test, in float16 or bfloat16.

    Raises:
        RuntimeError: they do not give what ``reference`` gives; or whatever Triton raises where it does not work.
    """
    numbers = torch.arange(40, dtype=torch.int32, device=device_type)
    planes, absmax = (numbers[:30] * 0x5BD1E995).view(3, 10), (numbers[:6] * 41).to(torch.uint8).view(3, 2)
    packed = planes, absmax, torch.linspace(-1, 1, 32, device=device_type)
    transform = (numbers * 6).to(torch.uint8), True
    x = torch.ones(2, 40, dtype=dtype, device=device_type)
    found = dequantize(*packed, [3, 40], dtype, *transform)
    expected = reference.dequantize(*packed, [3, 40], dtype, *transform)
    error = gemm(x, *packed, None, 3, *transform) - reference.gemm(x, *packed, None, 3, *transform)
    # To round to bfloat16, in another basis, makes a third of this bound at most.
    if not torch.equal(found, expected) or not (error.abs() < expected.abs().sum(-1) / 16).all():
        raise RuntimeError("they do not give what plain PyTorch gives")


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
