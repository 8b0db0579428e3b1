"""The ops: of each its schema, argument checks, fake, autograd and, of public ones, documented wrapper, in that order.

Past 800 lines, half of them documentation: what belongs to an op stands in one place.

``reference`` implements all of them on every device; a compiled library (``native``) takes over a device by
registering its kernels for that dispatch key, and ``triton`` has some ops for other GPUs. ``bits`` is never an
argument where a codebook is one: a codebook has ``2**bits`` levels.

Shapes: N out_features, K in_features, B = ceil(K / 32) blocks a row, ``*`` any leading dimensions. All tensors of a
call are on one device. The *planes* of a weight are its stored form, its *tiles* a private form for GPUs (``repack``).

``columns`` and ``rotated`` say how the stored weight was made from the one that it stands for (``transforms``); what
has neither is stored as it is. Every op takes and gives W and x in the original basis, K wide.
"""

import functools
import math
import sys
from collections.abc import Sequence

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from hf_kbit import reference
from hf_kbit.codebooks import bits_of
from hf_kbit.format import absmax_shape, check_bits, num_blocks, weight_shape
from hf_kbit.ops import native

_LIB = torch.library.Library("hf_kbit", "DEF")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_GEMM_FLOATS = (*_FLOATS, torch.float64)  # float64 so that gradients can be checked numerically


# --- checks shared by the ops ---------------------------------------------------------------------


def _check_dtype(name: str, tensor: torch.Tensor, expected: Sequence[torch.dtype]) -> None:
    if tensor.layout != torch.strided:
        raise TypeError(f"{name}: found layout {str(tensor.layout).removeprefix('torch.')}, expected a dense tensor")
    if tensor.dtype not in expected:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in expected)
        raise TypeError(f"{name}: found dtype {str(tensor.dtype).removeprefix('torch.')}, expected {names}")


def _check_device(**tensors: torch.Tensor | None) -> None:
    (first, reference_tensor), *others = tensors.items()
    for name, tensor in others:
        if tensor is not None and tensor.device != reference_tensor.device:
            found, expected = tensor.device, reference_tensor.device
            remedy = f": call model.to({expected.type!r}) when the weights of a skeleton are loaded"
            raise ValueError(
                f"{name}: found on {found}, expected on {expected} like {first}{remedy if tensor.is_meta else ''}"
            )


def _check_codebook(codebook: torch.Tensor) -> int:
    _check_dtype("codebook", codebook, (torch.float32,))
    if codebook.dim() != 1:
        raise ValueError(f"codebook: found shape {list(codebook.shape)}, expected one dimension")
    return bits_of(codebook.shape[0])


def _check_weight(weight: torch.Tensor, absmax: torch.Tensor, bits: int, shape: Sequence[int], tiled: bool) -> None:
    _check_dtype("weight", weight, (torch.int32,))
    _check_dtype("absmax", absmax, (torch.uint8,))
    _check_device(weight=weight, absmax=absmax)
    if len(shape) != 2 or shape[0] < 1 or shape[1] < 1:
        raise ValueError(f"shape: found {list(shape)}, expected [out_features, in_features], both 1 or more")
    if tiled:
        form, (words, scales) = "tiles", reference.tiled_shapes(*shape, bits)
    else:
        form, (words, scales) = "planes", (weight_shape(*shape, bits), absmax_shape(*shape))
    for name, tensor, expected in (("weight", weight, words), ("absmax", absmax, scales)):
        if tuple(tensor.shape[-len(expected) :]) != tuple(expected):
            raise ValueError(
                f"{name}: found shape {list(tensor.shape)}, expected {[*expected]} for the {form} of a "
                f"[{shape[0]}, {shape[1]}] weight in {bits} bits"
            )
    if weight.shape[: -len(words)] != absmax.shape[: -len(scales)]:
        raise ValueError(
            f"absmax: found shape {list(absmax.shape)}, expected the leading dimensions of weight {list(weight.shape)}"
        )


def _check_columns(columns: torch.Tensor | None, in_features: int) -> None:
    if columns is None:
        return
    _check_dtype("columns", columns, (torch.uint8,))
    if tuple(columns.shape) != (in_features,):
        raise ValueError(f"columns: found shape {list(columns.shape)}, expected [{in_features}]")


# --- quantize -------------------------------------------------------------------------------------

_LIB.define("quantize(Tensor weight, Tensor codebook, bool search=False, bool signed=False) -> (Tensor, Tensor)")


def _check_quantize(weight, codebook):
    _check_dtype("weight", weight, _FLOATS)
    if weight.dim() < 2 or 0 in weight.shape:
        raise ValueError(f"weight: found shape {list(weight.shape)}, expected [*, out_features, in_features], none 0")
    _check_device(weight=weight, codebook=codebook)
    return _check_codebook(codebook)


@torch.library.impl(_LIB, "quantize", "CompositeExplicitAutograd")
def _(weight, codebook, search=False, signed=False):
    _check_quantize(weight, codebook)
    native.warn_missing(weight.device.type)
    return reference.quantize(weight, codebook, search, signed)


@torch.library.register_fake("hf_kbit::quantize", lib=_LIB)
def _(weight, codebook, search=False, signed=False):
    bits = _check_quantize(weight, codebook)
    *rows, in_features = weight.shape
    blocks = num_blocks(in_features)
    return (
        weight.new_empty((*rows, blocks * bits), dtype=torch.int32),
        weight.new_empty((*rows, blocks), dtype=torch.uint8),
    )


def quantize(
    weight: torch.Tensor, codebook: torch.Tensor | None = None, search: bool = False, signed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight to the stored form: for each block of 32 in_features one scale and 32 codes.

    The scale is ``max|block| / max|codebook|`` rounded to E4M4; the code of w is the index of the level nearest to
    ``w * (1 / scale)`` with the scale as decoded, halfway going to the lower level. All in float32, so the result is
    the same bytes on every device. A weight outside E4M4's range needs a codebook multiplied by a power of two
    (``format.layer_exponent``).

    Args:
        weight: float32, float16 or bfloat16 ``[*, N, K]``, any strides, N and K at least 1.
        codebook: float32 ``[2**bits]``, ascending, bits 2 to 5; there is no default.
        search: takes for each block, of the scales from about half to 1.3 times that one (0.6 to 1.4 with signs), the
            one with the least squared error of the decoded block.
        signed: gives the scale of a block a sign, as rotated weights have it: the one with which the weight of largest
            magnitude is on the side of the level of largest magnitude. The eighth bit of ``absmax`` is 1 where it is
            negative, the lower seven are E4M4 below 2**-3.

    Returns:
        planes, int32 ``[*, N, B * bits]``, and absmax, uint8 ``[*, N, B]``, both contiguous; see ``format``.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: a shape or device does not fit, or the weight holds NaN or infinity (not checked while compiling
            or capturing a CUDA graph, where a value cannot be looked at).

    Source: block-wise absmax quantization as in QLoRA (arXiv:2305.14314), here with the rounded scale fed back.

    >>> import torch
    >>> from hf_kbit.codebooks import normal_float
    >>> codebook = torch.tensor(normal_float(3))
    >>> planes, absmax = quantize(torch.randn(64, 100), codebook)
    >>> planes.shape, absmax.shape
    (torch.Size([64, 12]), torch.Size([64, 4]))
    """
    if not isinstance(weight, torch.Tensor):
        raise TypeError(
            f"weight: found {type(weight).__name__}, expected a tensor. A model is quantized by "
            "hf_kbit.quantize_model(model, bits=3), with data by hf_kbit.calibrate, or while it is loaded, by "
            "from_pretrained(name, quantization_config=hf_kbit.KbitConfig(bits=3))"
        )
    if codebook is None:
        raise TypeError("codebook: found none, expected float32 levels, such as those of hf_kbit.codebooks")
    if not (
        weight.is_meta
        or torch.compiler.is_compiling()
        or (weight.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        if wrong := weight.numel() - int(torch.isfinite(weight).sum()):
            raise ValueError(f"weight: found {wrong} NaN or infinite values, expected finite ones")
    _check_quantize(weight, codebook)
    return torch.ops.hf_kbit.quantize(weight, codebook, search, signed)


# --- dequantize -----------------------------------------------------------------------------------

_LIB.define(
    "dequantize(Tensor weight, Tensor absmax, Tensor codebook, SymInt[] shape, ScalarType dtype,"
    " Tensor? columns=None, bool rotated=False) -> Tensor",
)


def _check_dequantize(weight, absmax, codebook, shape, dtype, columns):
    bits = _check_codebook(codebook)
    _check_device(weight=weight, codebook=codebook, columns=columns)
    _check_weight(weight, absmax, bits, shape, reference.is_tiled(weight, absmax, bits))
    _check_columns(columns, shape[1])
    if dtype not in _GEMM_FLOATS:
        raise TypeError(f"dtype: found {dtype}, expected a floating type of 16, 32 or 64 bits")
    return bits


@torch.library.impl(_LIB, "dequantize", "CompositeExplicitAutograd")
def _(weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    _check_dequantize(weight, absmax, codebook, shape, dtype, columns)
    native.warn_missing(weight.device.type)
    return native.fallback(weight.device.type).dequantize(weight, absmax, codebook, shape, dtype, columns, rotated)


@torch.library.register_fake("hf_kbit::dequantize", lib=_LIB)
def _(weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    bits = _check_dequantize(weight, absmax, codebook, shape, dtype, columns)
    lead = weight.shape[: -5 if reference.is_tiled(weight, absmax, bits) else -2]
    return weight.new_empty((*lead, *shape), dtype=dtype)


def dequantize(
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    columns: torch.Tensor | None = None,
    rotated: bool = False,
) -> torch.Tensor:
    """The decoded weight, ``codebook[code] * absmax``, turned back and multiplied by its columns' scales.

    Args:
        weight: int32 planes ``[*, N, B * bits]`` or tiles (``repack``) of ``transforms.to_stored`` of the weight.
        absmax: uint8 E4M4 scales ``[*, N, B]``, with signs if ``rotated``, or those of the tiles.
        codebook: float32 ``[2**bits]``.
        shape: ``(N, K)``, without the padding.
        dtype: float32, float16, bfloat16 or float64.
        columns: uint8 ``[K]``, E4M4 as ``absmax``: the scales by which columns were divided, of all matrices; None: 1.
        rotated: whether each block was rotated; if so, its scale has a sign (``quantize``).

    Returns:
        ``dtype`` ``[*, N, K]``, contiguous: what ``transforms.to_original`` makes in float32, rounded to ``dtype``;
        the same bits on every device.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit; the message names the tensor.

    >>> import torch
    >>> from hf_kbit.codebooks import normal_float
    >>> codebook = torch.tensor(normal_float(5))
    >>> weight = torch.randn(64, 100)
    >>> decoded = dequantize(*quantize(weight, codebook), codebook, weight.shape)
    >>> bool((weight - decoded).square().mean() < 0.01)
    True

    With column scales and a rotation:

    >>> from hf_kbit.reference import decode_e4m4, encode_e4m4
    >>> from hf_kbit.transforms import to_stored
    >>> columns = encode_e4m4(weight.std(dim=0))
    >>> codebook = 2.0**6 * codebook  # scales of 2**-3 and more have no byte
    >>> packed = quantize(to_stored(weight, decode_e4m4(columns), rotated=True), codebook, signed=True)
    >>> decoded = dequantize(*packed, codebook, weight.shape, columns=columns, rotated=True)
    >>> bool((weight - decoded).square().mean() < 0.01)
    True
    """
    _check_dequantize(weight, absmax, codebook, shape, dtype, columns)
    return torch.ops.hf_kbit.dequantize(weight, absmax, codebook, list(shape), dtype, columns, rotated)


# --- embed ----------------------------------------------------------------------------------------

_LIB.define(
    "embed(Tensor indices, Tensor weight, Tensor absmax, Tensor codebook, SymInt[] shape, ScalarType dtype,"
    " Tensor? columns=None, bool rotated=False) -> Tensor",
)


def _check_embed(indices, weight, absmax, codebook, shape, dtype, columns):
    _check_dtype("indices", indices, (torch.int64, torch.int32))
    bits = _check_dequantize(weight, absmax, codebook, shape, dtype, columns)
    if weight.dim() != (5 if reference.is_tiled(weight, absmax, bits) else 2):
        raise ValueError(f"weight: found shape {list(weight.shape)}, expected one table, without leading dimensions")
    _check_device(indices=indices, weight=weight)


@torch.library.impl(_LIB, "embed", "CompositeExplicitAutograd")
def _(indices, weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    _check_embed(indices, weight, absmax, codebook, shape, dtype, columns)
    native.warn_missing(weight.device.type)
    return reference.embed(indices, weight, absmax, codebook, shape, dtype, columns, rotated)


@torch.library.register_fake("hf_kbit::embed", lib=_LIB)
def _(indices, weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    _check_embed(indices, weight, absmax, codebook, shape, dtype, columns)
    return weight.new_empty((*indices.shape, shape[1]), dtype=dtype)


def embed(
    indices: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    columns: torch.Tensor | None = None,
    rotated: bool = False,
) -> torch.Tensor:
    """Rows of a packed table: ``dequantize(...)[indices]``, of which only these rows are read and decoded.

    The result has no gradient: the table is frozen.

    Args:
        indices: int64 or int32 ``[*]``, any shape and strides, each 0 to V - 1.
        weight: int32 planes ``[V, B * bits]`` of the table, quantized as a weight is, or their tiles (``repack``).
        absmax: uint8 ``[V, B]``, or that of the tiles.
        codebook: float32 ``[2**bits]``.
        shape: ``(V, D)``, without the padding.
        dtype: float32, float16, bfloat16 or float64.
        columns: uint8 ``[D]`` or None; see ``dequantize``.
        rotated: whether each block was rotated; if so, its scale has a sign.

    Returns:
        ``dtype`` ``[*, D]``, contiguous: bit for bit the rows that ``dequantize`` gives.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit; the message names the tensor.
        ValueError: an index is negative, or V or more. A GPU's kernel, for which nothing waits, stops with an
            assertion instead, after which the process cannot use the GPU any more, as with ``nn.Embedding``.

    >>> import torch
    >>> from hf_kbit.codebooks import normal_float
    >>> codebook = torch.tensor(normal_float(4))
    >>> table = quantize(torch.randn(1000, 96), codebook)
    >>> tokens = torch.tensor([[3, 999, 3], [0, 1, 2]])
    >>> embed(tokens, *table, codebook, (1000, 96), torch.bfloat16).shape
    torch.Size([2, 3, 96])
    >>> torch.equal(embed(tokens, *table, codebook, (1000, 96)), dequantize(*table, codebook, (1000, 96))[tokens])
    True
    """
    _check_embed(indices, weight, absmax, codebook, shape, dtype, columns)
    return torch.ops.hf_kbit.embed(indices, weight, absmax, codebook, list(shape), dtype, columns, rotated)


# --- repack ---------------------------------------------------------------------------------------

_LIB.define(
    "repack(Tensor weight, Tensor absmax, int bits, SymInt[] shape, bool inverse=False) -> (Tensor, Tensor)",
)


def _check_repack(weight, absmax, bits, shape, inverse):
    _check_weight(weight, absmax, check_bits(bits), shape, tiled=inverse)


@torch.library.impl(_LIB, "repack", "CompositeExplicitAutograd")
def _(weight, absmax, bits, shape, inverse=False):
    _check_repack(weight, absmax, bits, shape, inverse)
    native.warn_missing(weight.device.type)
    return reference.repack(weight, absmax, bits, shape, inverse)


@torch.library.register_fake("hf_kbit::repack", lib=_LIB)
def _(weight, absmax, bits, shape, inverse=False):
    _check_repack(weight, absmax, bits, shape, inverse)
    if inverse:
        lead, words, scales = weight.shape[:-5], weight_shape(*shape, bits), absmax_shape(*shape)
    else:
        lead, (words, scales) = weight.shape[:-2], reference.tiled_shapes(*shape, bits)
    return weight.new_empty((*lead, *words)), absmax.new_empty((*lead, *scales))


def repack(
    weight: torch.Tensor, absmax: torch.Tensor, bits: int, shape: Sequence[int], inverse: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns planes into tiles, the order in which a GPU's matrix instructions read weights, or back; loses nothing.

    Tiles pad N to 16 and K to 256. Their layout (``reference.repack``) is private: it may change, and nothing that is
    saved depends on it.

    Args:
        weight: int32 planes ``[*, N, B * bits]``; with ``inverse`` tiles ``[*, N/16, K/256, bits, 32, 4]``.
        absmax: uint8 ``[*, N, B]``; with ``inverse`` ``[*, N/16, K/256, 8, 16]``.
        bits: 2 to 5.
        shape: ``(N, K)``, without the padding.
        inverse: from tiles to planes.

    Returns:
        The words and the scales in the other form, both contiguous.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit; the message names the tensor.

    >>> import torch
    >>> from hf_kbit.codebooks import normal_float
    >>> planes = quantize(torch.randn(64, 100), torch.tensor(normal_float(3)))
    >>> tiles = repack(*planes, bits=3, shape=(64, 100))
    >>> tiles[0].shape
    torch.Size([4, 1, 3, 32, 4])
    >>> all(map(torch.equal, repack(*tiles, bits=3, shape=(64, 100), inverse=True), planes))
    True
    """
    _check_repack(weight, absmax, bits, shape, inverse)
    return torch.ops.hf_kbit.repack(weight, absmax, bits, list(shape), inverse)


# --- gemm -----------------------------------------------------------------------------------------

# Two ops, the same but for autograd, whose Python part takes the host several microseconds where no gradient is wanted
# too; and one for several weights, which inductor.py makes of products of one x.
for _name in ("gemm", "gemm_inference"):
    _LIB.define(
        f"{_name}(Tensor x, Tensor weight, Tensor absmax, Tensor codebook, Tensor? bias, SymInt out_features,"
        " Tensor? columns=None, bool rotated=False) -> Tensor"
    )
_LIB.define(  # `rotated`: 0 or 1 each, the stable ABI has no list of bools
    "gemm_group(Tensor x, Tensor[] weights, Tensor[] absmaxes, Tensor[] codebooks, Tensor?[] biases,"
    " SymInt[] out_features, Tensor?[] columns, SymInt[] rotated) -> Tensor[]"
)


def _check_gemm(x, weight, absmax, codebook, bias, out_features, columns):
    _check_dtype("x", x, _GEMM_FLOATS)
    if x.dim() < 1:
        raise ValueError("x: found a scalar, expected [*, in_features]")
    _check_dequantize(weight, absmax, codebook, (out_features, x.shape[-1]), x.dtype, columns)
    _check_device(x=x, weight=weight, bias=bias)
    if bias is not None:
        _check_dtype("bias", bias, (x.dtype,))
        if tuple(bias.shape) != (out_features,):
            raise ValueError(f"bias: found shape {list(bias.shape)}, expected [{out_features}]")


@torch.library.impl(_LIB, "gemm", "CompositeExplicitAutograd")
@torch.library.impl(_LIB, "gemm_inference", "CompositeExplicitAutograd")
def _(x, weight, absmax, codebook, bias, out_features, columns=None, rotated=False):
    _check_gemm(x, weight, absmax, codebook, bias, out_features, columns)
    native.warn_missing(weight.device.type)
    if native.batch_invariant:
        missing = native.library(weight.device.type).missing
        raise RuntimeError(f"batch-invariant products were asked for, and only libraries have them: {missing}")
    return native.fallback(weight.device.type).gemm(x, weight, absmax, codebook, bias, out_features, columns, rotated)


@torch.library.impl(_LIB, "gemm_group", "CompositeExplicitAutograd")
def _(x, *of_each):
    return [
        torch.ops.hf_kbit.gemm_inference(x, *product, bool(rotated))
        for *product, rotated in zip(*of_each, strict=True)
    ]


@torch.library.register_fake("hf_kbit::gemm", lib=_LIB)
@torch.library.register_fake("hf_kbit::gemm_inference", lib=_LIB)
def _(x, weight, absmax, codebook, bias, out_features, columns=None, rotated=False):
    _check_gemm(x, weight, absmax, codebook, bias, out_features, columns)
    if "torch._inductor.config" in sys.modules:  # about to compile; importing it takes over a second
        from hf_kbit.ops import inductor

        inductor.install()
    return x.new_empty((*x.shape[:-1], out_features))


@torch.library.register_fake("hf_kbit::gemm_group", lib=_LIB)
def _(x, weights, absmaxes, codebooks, biases, out_features, columns, rotated):
    of_each = weights, absmaxes, codebooks, biases, out_features, columns, rotated
    for *product, _ in zip(*of_each, strict=True):
        _check_gemm(x, *product)
    return [x.new_empty((*x.shape[:-1], rows)) for rows in out_features]


def _check_can_train(weight: torch.Tensor) -> None:
    if weight.is_inference():
        raise ValueError(
            "weight: found one that was made under torch.inference_mode(), expected a normal tensor where gradients "
            "are wanted: load or quantize the model outside of it, or run it under torch.no_grad()"
        )


def _gemm_setup_context(ctx, inputs, output):
    x, weight, absmax, codebook, _, out_features, columns, ctx.rotated = inputs
    _check_can_train(weight)
    ctx.save_for_backward(weight, absmax, codebook, columns)
    ctx.shape = [out_features, x.shape[-1]]


def _gemm_backward(ctx, grad):
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        # Decoded again rather than saved: between forward and backward only the packed weight stays in memory.
        *packed, columns = ctx.saved_tensors
        grad_x = gradient(grad, *packed, ctx.shape, columns, ctx.rotated)
    if ctx.needs_input_grad[4]:
        grad_bias = grad.reshape(-1, ctx.shape[0]).sum(dim=0)
    return grad_x, None, None, None, grad_bias, None, None, None


torch.library.register_autograd("hf_kbit::gemm", _gemm_backward, setup_context=_gemm_setup_context, lib=_LIB)


def product(x, weight, absmax, codebook, bias, out_features, columns=None, rotated=False):
    """``gemm`` without its checks, by the op for these inputs: that with gradients only where one is wanted."""
    if forward_ad._current_level >= 0:  # the ops know no tangents, and would drop them
        return _with_tangents(x, weight, absmax, codebook, bias, out_features, columns, rotated)
    wanted = torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
    op = torch.ops.hf_kbit.gemm.default if wanted else torch.ops.hf_kbit.gemm_inference.default
    return op(x, weight, absmax, codebook, bias, out_features, columns, rotated)


def _with_tangents(x, weight, absmax, codebook, bias, out_features, columns, rotated):
    """Forward mode: the tangent of a product is the product of the tangent, and that of the bias is added."""
    (x, along_x), (bias, along_bias) = (
        (tensor, None) if tensor is None else forward_ad.unpack_dual(tensor) for tensor in (x, bias)
    )
    y = torch.ops.hf_kbit.gemm(x, weight, absmax, codebook, bias, out_features, columns, rotated)
    if along_x is None and along_bias is None:
        return y
    along_y = torch.zeros_like(y)
    if along_x is not None:
        along_y = torch.ops.hf_kbit.gemm(along_x, weight, absmax, codebook, None, out_features, columns, rotated)
    return forward_ad.make_dual(y, along_y if along_bias is None else along_y + along_bias)


def gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_features: int | None = None,
    columns: torch.Tensor | None = None,
    rotated: bool = False,
) -> torch.Tensor:
    """``x @ W.T + bias`` for a quantized weight W.

    Differentiable in ``x`` and ``bias``; the weight is frozen and has no gradient. The backward decodes it again.

    Args:
        x: float32, float16, bfloat16 or float64 ``[*, K]``, any strides, any leading dimensions, empty ones too.
        weight: int32 planes ``[N, B * bits]`` or tiles (``repack``).
        absmax: uint8 ``[N, B]``, or that of the tiles.
        codebook: float32 ``[2**bits]``.
        bias: dtype of ``x``, ``[N]``.
        out_features: N; needed for tiles, which hide it behind padding.
        columns: uint8 ``[K]`` or None, see ``dequantize``.
        rotated: whether the weight's blocks were rotated, see ``dequantize``.

    Returns:
        dtype of ``x``, ``[*, N]``, contiguous. W, or first its levels and then W, are rounded to float32 or to the
        dtype of ``x``, whichever is faster where it runs; sums are at least in float32 and rounded once. With
        ``columns`` or ``rotated``, x may be transformed instead of W: in float32, then rounded like W. For tiles,
        float16 or bfloat16, and up to 256 tokens, on Hopper up to 4095 (8191 if W has 40 million numbers or more, 1023
        if it is transformed and has 1536 rows or fewer), a GPU of compute capability 8.0 or newer decodes W on its way
        to the tensor cores; else it decodes W first, a slice at a time.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit; the message names the tensor.

    >>> import torch
    >>> from hf_kbit.codebooks import normal_float
    >>> codebook = torch.tensor(normal_float(3))
    >>> gemm(torch.randn(2, 7, 100), *quantize(torch.randn(64, 100), codebook), codebook).shape
    torch.Size([2, 7, 64])
    """
    if out_features is None:
        out_features = weight.shape[0]
    _check_gemm(x, weight, absmax, codebook, bias, out_features, columns)
    return product(x, weight, absmax, codebook, bias, out_features, columns, rotated)


def set_batch_invariant(enabled: bool) -> None:
    """Whether a token's product with a quantized weight must be the same to the last bit in every batch.

    Without, which is the default, products choose by the number of tokens how they divide the work, and with it the
    order in which they add up: the same call gives the same bits, but a sequence may differ in the last bit from what
    it is in another batch. With it every token's sums are added up in one order. That holds for all products of the
    process from now on, forward only, in ``gemm`` and in layers, compiled ones too; a CUDA graph keeps what was set
    while it was captured. Other layers, such as attention and norms, need to be batch-invariant by themselves.

    It takes float32, float16 or bfloat16 on a CPU with our library; on a GPU float16 or bfloat16, weights in tiles, as
    layers hold them there, and compute capability 8.0 or newer. Results differ from one GPU or CPU to another.

    Args:
        enabled: True or False.

    Raises:
        TypeError: ``enabled`` is not a bool. Products raise ValueError or RuntimeError where there is no such product.

    >>> import hf_kbit, torch
    >>> layer = hf_kbit.KbitLinear.from_linear(torch.nn.Linear(256, 64), bits=3)
    >>> x = torch.randn(40, 256)
    >>> hf_kbit.set_batch_invariant(True)
    >>> torch.equal(layer(x)[:1], layer(x[:1]))
    True
    >>> hf_kbit.set_batch_invariant(False)
    """
    if not isinstance(enabled, bool):
        raise TypeError(f"enabled: found {enabled!r}, expected True or False")
    native.set_batch_invariant(enabled)


# --- gemm_gradient --------------------------------------------------------------------------------

# ``grad @ W``, the gradient of x; with a gradient of its own, for those who need second derivatives.
_LIB.define(
    "gemm_gradient(Tensor grad, Tensor weight, Tensor absmax, Tensor codebook, SymInt[] shape,"
    " Tensor? columns=None, bool rotated=False) -> Tensor"
)


def _check_gemm_gradient(grad, weight, absmax, codebook, shape, columns):
    _check_dtype("grad", grad, _GEMM_FLOATS)
    _check_dequantize(weight, absmax, codebook, shape, grad.dtype, columns)
    _check_device(grad=grad, weight=weight)
    if grad.dim() < 1 or grad.shape[-1] != shape[0]:
        raise ValueError(f"grad: found shape {list(grad.shape)}, expected [*, {shape[0]}]")


@torch.library.impl(_LIB, "gemm_gradient", "CompositeExplicitAutograd")
def _(grad, weight, absmax, codebook, shape, columns=None, rotated=False):
    _check_gemm_gradient(grad, weight, absmax, codebook, shape, columns)
    native.warn_missing(weight.device.type)
    decode = native.fallback(weight.device.type).dequantize
    return grad @ decode(weight, absmax, codebook, shape, grad.dtype, columns, rotated)


@torch.library.register_fake("hf_kbit::gemm_gradient", lib=_LIB)
def _(grad, weight, absmax, codebook, shape, columns=None, rotated=False):
    _check_gemm_gradient(grad, weight, absmax, codebook, shape, columns)
    return grad.new_empty((*grad.shape[:-1], shape[1]))


def gradient(grad, *weight):
    """The op, in forward mode too, which second derivatives may be in; ``weight``: all other arguments."""
    if forward_ad._current_level < 0:
        return torch.ops.hf_kbit.gemm_gradient(grad, *weight)
    grad, along = forward_ad.unpack_dual(grad)
    grad_x = torch.ops.hf_kbit.gemm_gradient(grad, *weight)
    if along is None:
        return grad_x
    return forward_ad.make_dual(grad_x, torch.ops.hf_kbit.gemm_gradient(along, *weight))


def _gradient_setup_context(ctx, inputs, output):
    _, *packed, ctx.shape, columns, ctx.rotated = inputs
    ctx.save_for_backward(*packed, columns)


def _gradient_backward(ctx, grad):
    *packed, columns = ctx.saved_tensors
    along_grad = product(grad, *packed, None, ctx.shape[0], columns, ctx.rotated)
    return along_grad, None, None, None, None, None, None


torch.library.register_autograd(
    "hf_kbit::gemm_gradient", _gradient_backward, setup_context=_gradient_setup_context, lib=_LIB
)


# --- route_experts --------------------------------------------------------------------------------

# The experts of a mixture, each with the tokens that were sent to it: route_experts, gemm_experts and combine_experts
# in turn. The numbers of tokens stay where they were computed: nothing waits for a GPU.
_LIB.define("route_experts(Tensor experts, SymInt num_experts) -> (Tensor, Tensor, Tensor)")
_MOST_EXPERTS = 2**13  # those that the kernel can count in the shared memory of any GPU


def _check_route_experts(experts, num_experts):
    _check_dtype("experts", experts, (torch.int64, torch.int32))
    if experts.dim() != 2:
        raise ValueError(f"experts: found shape {list(experts.shape)}, expected [tokens, experts of each]")
    if not 1 <= num_experts <= _MOST_EXPERTS:
        raise ValueError(f"num_experts: found {num_experts}, expected 1 to {_MOST_EXPERTS}")


@torch.library.impl(_LIB, "route_experts", "CompositeExplicitAutograd")
def _(experts, num_experts):
    _check_route_experts(experts, num_experts)
    return reference.route_experts(experts, num_experts)


@torch.library.register_fake("hf_kbit::route_experts", lib=_LIB)
def _(experts, num_experts):
    _check_route_experts(experts, num_experts)
    make = functools.partial(experts.new_empty, dtype=torch.int32)
    return make(experts.shape[0] * experts.shape[1]), make(experts.shape), make(num_experts + 1)


def route_experts(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts what tokens send to experts by expert, those of one expert by token.

    Args:
        experts: int64 or int32 ``[T, k]``, the experts of each token: 0 to ``num_experts - 1``; what is none of these
            comes last.
        num_experts: E, from 1 to 8192.

    Returns:
        ``rows`` int32 ``[T * k]``, the token of each place in that order; ``places`` int32 ``[T, k]``, where in it the
        token is for each of its experts; ``offsets`` int32 ``[E + 1]``, the first place of each expert, and the end
        of the last one's.

    Raises:
        TypeError, ValueError: a dtype or shape does not fit; the message names the tensor.

    >>> rows, places, offsets = route_experts(torch.tensor([[2, 0], [0, 1]]), num_experts=3)
    >>> rows.tolist(), places.tolist(), offsets.tolist()
    ([0, 1, 1, 0], [[3, 0], [1, 2]], [0, 2, 3, 4])
    """
    return torch.ops.hf_kbit.route_experts(experts, num_experts)


# --- combine_experts ------------------------------------------------------------------------------

_LIB.define("combine_experts(Tensor y, Tensor places, Tensor weights) -> Tensor")


def _check_combine_experts(y, places, weights):
    _check_dtype("y", y, _GEMM_FLOATS)
    _check_dtype("places", places, (torch.int32,))
    _check_dtype("weights", weights, (torch.float32, y.dtype))
    for name, tensor in (("y", y), ("places", places)):
        if tensor.dim() != 2:
            raise ValueError(f"{name}: found shape {list(tensor.shape)}, expected two dimensions")
    if weights.shape != places.shape:
        raise ValueError(f"weights: found shape {list(weights.shape)}, expected {list(places.shape)}")
    _check_device(y=y, places=places, weights=weights)


@torch.library.impl(_LIB, "combine_experts", "CompositeExplicitAutograd")
def _(y, places, weights):
    _check_combine_experts(y, places, weights)
    return reference.combine_experts(y, places, weights)


@torch.library.register_fake("hf_kbit::combine_experts", lib=_LIB)
def _(y, places, weights):
    _check_combine_experts(y, places, weights)
    return y.new_empty((places.shape[0], y.shape[1]))


def _combine_setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx, grad):
    y, places, weights = ctx.saved_tensors
    grad_y = grad_weights = None
    wide = torch.promote_types(y.dtype, torch.float32)
    if ctx.needs_input_grad[0]:
        of_places = weights.to(wide)[..., None] * grad.to(wide)[:, None]
        # Each place is that of one token and expert, so nothing is added up.
        grad_y = torch.zeros_like(y).index_put((places.flatten(),), of_places.flatten(0, 1).to(y.dtype))
    if ctx.needs_input_grad[2]:
        grad_weights = (y[places].to(wide) * grad.to(wide)[:, None]).sum(-1).to(weights.dtype)
    return grad_y, None, grad_weights


torch.library.register_autograd(
    "hf_kbit::combine_experts", _combine_backward, setup_context=_combine_setup_context, lib=_LIB
)


def combine_experts(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum over j of weights[i, j] * y[places[i, j]]``: of each token i what its experts made of it.

    Differentiable in ``y`` and ``weights``. Added up in float32 (float64 of float64), in the order of j.

    Args:
        y: float32, float16, bfloat16 or float64 ``[T * k, N]``.
        places: int32 ``[T, k]``, each row of ``y`` once (``route_experts``).
        weights: dtype of ``y`` or float32, ``[T, k]``.

    Returns:
        dtype of ``y``, ``[T, N]``, rounded once.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit; the message names the tensor.
    """
    return torch.ops.hf_kbit.combine_experts(y, places, weights)


# --- gemm_experts, gemm_experts_gradient ----------------------------------------------------------

_LIB.define(
    "gemm_experts(Tensor x, Tensor weight, Tensor absmax, Tensor codebook, Tensor? bias, Tensor? rows, Tensor offsets,"
    " SymInt out_features, Tensor? columns=None, bool rotated=False, bool swiglu=False) -> Tensor"
)
_LIB.define(
    "gemm_experts_gradient(Tensor grad, Tensor weight, Tensor absmax, Tensor codebook, Tensor offsets, SymInt[] shape,"
    " Tensor? columns=None, bool rotated=False) -> Tensor"
)


def _check_experts(name, x, weight, absmax, codebook, offsets, shape, columns):
    """Checks what both have; ``x`` is called ``name``, and ``shape`` is that of one matrix."""
    _check_dtype(name, x, _GEMM_FLOATS)
    if x.dim() != 2:
        raise ValueError(f"{name}: found shape {list(x.shape)}, expected two dimensions")
    bits = _check_dequantize(weight, absmax, codebook, shape, x.dtype, columns)
    lead = weight.shape[: -5 if reference.is_tiled(weight, absmax, bits) else -2]
    if len(lead) != 1:
        raise ValueError(f"weight: found shape {list(weight.shape)}, expected one leading dimension, that of experts")
    _check_dtype("offsets", offsets, (torch.int32,))
    if tuple(offsets.shape) != (lead[0] + 1,):
        raise ValueError(f"offsets: found shape {list(offsets.shape)}, expected [{lead[0] + 1}], experts and one")
    _check_device(**{name: x}, weight=weight, offsets=offsets)


def _check_gemm_experts(x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, swiglu):
    if x.dim() != 2 or (swiglu and x.shape[1] % 2):
        expected = "[tokens, 2 * in_features]" if swiglu else "[tokens, in_features]"
        raise ValueError(f"x: found shape {list(x.shape)}, expected {expected}")
    in_features = x.shape[1] // (2 if swiglu else 1)
    _check_experts("x", x, weight, absmax, codebook, offsets, (out_features, in_features), columns)
    _check_device(x=x, bias=bias, rows=rows)
    if bias is not None:
        _check_dtype("bias", bias, (x.dtype,))
        if tuple(bias.shape) != (offsets.shape[0] - 1, out_features):
            raise ValueError(f"bias: found shape {list(bias.shape)}, expected {[offsets.shape[0] - 1, out_features]}")
    if rows is not None:
        _check_dtype("rows", rows, (torch.int32,))
        if rows.dim() != 1:
            raise ValueError(f"rows: found shape {list(rows.shape)}, expected one dimension")


@torch.library.impl(_LIB, "gemm_experts", "CompositeExplicitAutograd")
def _(x, weight, absmax, codebook, bias, rows, offsets, out_features, columns=None, rotated=False, swiglu=False):
    _check_gemm_experts(x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, swiglu)
    native.warn_missing(weight.device.type)
    packed = weight, absmax, codebook
    return reference.gemm_experts(x, *packed, bias, rows, offsets, out_features, columns, rotated, swiglu)


@torch.library.register_fake("hf_kbit::gemm_experts", lib=_LIB)
def _(x, weight, absmax, codebook, bias, rows, offsets, out_features, columns=None, rotated=False, swiglu=False):
    _check_gemm_experts(x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, swiglu)
    return x.new_empty((x.shape[0] if rows is None else rows.shape[0], out_features))


def _check_gemm_experts_gradient(grad, weight, absmax, codebook, offsets, shape, columns):
    _check_experts("grad", grad, weight, absmax, codebook, offsets, shape, columns)
    if grad.shape[1] != shape[0]:
        raise ValueError(f"grad: found shape {list(grad.shape)}, expected [*, {shape[0]}]")


@torch.library.impl(_LIB, "gemm_experts_gradient", "CompositeExplicitAutograd")
def _(grad, weight, absmax, codebook, offsets, shape, columns=None, rotated=False):
    _check_gemm_experts_gradient(grad, weight, absmax, codebook, offsets, shape, columns)
    native.warn_missing(weight.device.type)
    return reference.gemm_experts_gradient(grad, weight, absmax, codebook, offsets, shape, columns, rotated)


@torch.library.register_fake("hf_kbit::gemm_experts_gradient", lib=_LIB)
def _(grad, weight, absmax, codebook, offsets, shape, columns=None, rotated=False):
    _check_gemm_experts_gradient(grad, weight, absmax, codebook, offsets, shape, columns)
    return grad.new_empty((grad.shape[0], shape[1]))


def _experts_setup_context(ctx, inputs, output):
    x, weight, absmax, codebook, _, rows, offsets, out_features, columns, ctx.rotated, ctx.swiglu = inputs
    _check_can_train(weight)
    ctx.save_for_backward(weight, absmax, codebook, offsets, columns, rows, x if ctx.swiglu else None)
    ctx.shape, ctx.tokens = [out_features, x.shape[1] // (2 if ctx.swiglu else 1)], x.shape[0]


def _experts_backward(ctx, grad):
    grad_x = grad_bias = None
    weight, absmax, codebook, offsets, columns, rows, x = ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        grad_x = torch.ops.hf_kbit.gemm_experts_gradient(
            grad, weight, absmax, codebook, offsets, ctx.shape, columns, ctx.rotated
        )
        if rows is not None:  # index_put adds up in one order, on GPUs too, as index_add does not
            zeros = grad_x.new_zeros((ctx.tokens, ctx.shape[1]), dtype=torch.promote_types(grad.dtype, torch.float32))
            grad_x = zeros.index_put((rows,), grad_x.to(zeros.dtype), accumulate=True).to(grad.dtype)
        if ctx.swiglu:
            grad_x = _swiglu_backward(x, grad_x)
    if ctx.needs_input_grad[4]:
        experts = offsets.shape[0] - 1
        places = torch.arange(grad.shape[0], dtype=torch.int32, device=grad.device)
        owners = torch.searchsorted(offsets[1:], places, right=True)  # `experts`: none
        zeros = grad.new_zeros((experts + 1, ctx.shape[0]), dtype=torch.promote_types(grad.dtype, torch.float32))
        grad_bias = zeros.index_put((owners,), grad.to(zeros.dtype), accumulate=True)[:experts].to(grad.dtype)
    return grad_x, None, None, None, grad_bias, *(None,) * 6


def _swiglu_backward(x, grad):
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    portion = torch.sigmoid(gate)
    along_gate = grad * up * portion * (1 + gate * (1 - portion))
    return torch.cat([along_gate, grad * gate * portion], dim=-1).to(x.dtype)


torch.library.register_autograd(
    "hf_kbit::gemm_experts", _experts_backward, setup_context=_experts_setup_context, lib=_LIB
)


def _experts_gradient_setup_context(ctx, inputs, output):
    _, weight, absmax, codebook, offsets, ctx.shape, columns, ctx.rotated = inputs
    ctx.save_for_backward(weight, absmax, codebook, offsets, columns)


def _experts_gradient_backward(ctx, grad):
    weight, absmax, codebook, offsets, columns = ctx.saved_tensors
    along_grad = torch.ops.hf_kbit.gemm_experts(
        grad, weight, absmax, codebook, None, None, offsets, ctx.shape[0], columns, ctx.rotated
    )
    return along_grad, None, None, None, None, None, None, None


torch.library.register_autograd(
    "hf_kbit::gemm_experts_gradient",
    _experts_gradient_backward,
    setup_context=_experts_gradient_setup_context,
    lib=_LIB,
)


def gemm_experts(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    offsets: torch.Tensor,
    out_features: int,
    columns: torch.Tensor | None = None,
    rotated: bool = False,
    swiglu: bool = False,
) -> torch.Tensor:
    """``y[i] = x[rows[i]] @ W[e].T + bias[e]`` for the rows ``offsets[e]`` to ``offsets[e + 1]`` of each expert e.

    Differentiable in ``x`` and ``bias``; the weights are frozen.

    Args:
        x: float32, float16, bfloat16 or float64 ``[T, K]``; with ``swiglu`` ``[T, 2 K]``, see there.
        weight: int32 planes ``[E, N, B * bits]`` of the experts' matrices, or their tiles (``repack``).
        absmax: uint8 ``[E, N, B]``, or that of the tiles.
        codebook: float32 ``[2**bits]``.
        bias: dtype of ``x``, ``[E, N]``, or None.
        rows: int32 ``[R]``, each 0 to T - 1; None: all rows of x, in order.
        offsets: int32 ``[E + 1]``, ascending from 0. Rows from the last one on are no expert's, and zeros.
        out_features: N.
        columns: uint8 ``[K]`` or None, of all experts; see ``dequantize``.
        rotated: whether the weights' blocks were rotated.
        swiglu: ``silu(x[:, :K]) * x[:, K:]`` stands for x above, rounded once or twice: the gate between two
            projections of experts, made on the way into the second.

    Returns:
        dtype of ``x``, ``[R, N]``, contiguous, rounded as by ``gemm``.

    Raises:
        TypeError, ValueError: a dtype, shape or device does not fit; the message names the tensor.
        NotImplementedError: in forward mode, as no tangents are computed.
    """
    tangents = (x, bias) if forward_ad._current_level >= 0 else ()
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tangents):
        raise NotImplementedError("gemm_experts: found tangents; products of experts have none in forward mode")
    return torch.ops.hf_kbit.gemm_experts(
        x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, rotated, swiglu
    )


# --- what products cost ---------------------------------------------------------------------------

# ``FlopCounterMode`` counts two operations for each weight and token, as of ``nn.Linear``; it hands over shapes.


@register_flop_formula([torch.ops.hf_kbit.gemm, torch.ops.hf_kbit.gemm_inference])
def _(x, weight, absmax, codebook, bias, out_features, columns=None, rotated=False, out_shape=None):
    return 2 * math.prod(x) * out_features


@register_flop_formula(torch.ops.hf_kbit.gemm_group)
def _(x, weights, absmaxes, codebooks, biases, out_features, columns, rotated, out_shape=None):
    return 2 * math.prod(x) * sum(out_features)


@register_flop_formula(torch.ops.hf_kbit.gemm_gradient)
def _(grad, weight, absmax, codebook, shape, columns=None, rotated=False, out_shape=None):
    return 2 * math.prod(grad) * shape[1]


@register_flop_formula(torch.ops.hf_kbit.gemm_experts)
def _(x, weight, absmax, codebook, bias, rows, offsets, out_features, *transform, out_shape=None, swiglu=False):
    # Columns and rotated, which may be in `transform`, do not count; neither does the gate.
    swiglu = swiglu or (len(transform) > 2 and transform[2])
    return 2 * (x if rows is None else rows)[0] * x[1] // (2 if swiglu else 1) * out_features


@register_flop_formula(torch.ops.hf_kbit.gemm_experts_gradient)
def _(grad, weight, absmax, codebook, offsets, shape, columns=None, rotated=False, out_shape=None):
    return 2 * math.prod(grad) * shape[1]


# --- compiled kernels -----------------------------------------------------------------------------

for _name in ("cpu", "cuda"):
    native.library(_name)
