"""The ops as functions of plain tensors: quantizing, decoding and multiplying by packed weights, on every device.

``table`` says what each takes, ``autograd`` its gradients. ``reference`` runs it where neither a compiled library
(``native``) nor a kernel of ``triton`` does.
"""

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from hf_kbit.format.trellis import MOST_LEAD
from hf_kbit.ops import native
from hf_kbit.ops import trellis as _trellis  # noqa: F401  defines its ops
from hf_kbit.ops.autograd import can_round, product, product_int8

__all__ = [
    "can_round",
    "combine_experts",
    "decode_trellis",
    "dequantize",
    "embed",
    "encode_trellis",
    "gemm",
    "gemm_experts",
    "gemm_experts_int8",
    "gemm_int8",
    "int8_inverses",
    "product",
    "product_int8",
    "quantize",
    "repack",
    "route_experts",
    "set_batch_invariant",
]


def quantize(
    weight: torch.Tensor, codebook: torch.Tensor | None = None, search: bool = False, signed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes a weight to the stored form: for each block of 32 in_features one scale and 32 codes.

    The scale is ``max|block| / max|codebook|`` rounded to E4M4; the code of w is the index of the level nearest to
    ``w * (1 / scale)`` with the scale as decoded, halfway going to the lower level. All is computed in float32, so the
    bytes are the same on every device. A weight outside E4M4's range needs a codebook multiplied by a power of two
    (``spec.layer_exponent``).

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
        TypeError: the weight is no tensor, or there is no codebook.
        ValueError: a dtype, shape or device does not fit, or the weight holds NaN or infinity (not checked while
            compiling or capturing a CUDA graph, where a value cannot be looked at).

    Source: block-wise absmax quantization as in QLoRA (arXiv:2305.14314), here with the rounded scale fed back.

    >>> import torch
    >>> from hf_kbit.format.codebooks import normal_float
    >>> planes, absmax = quantize(torch.randn(64, 100), torch.tensor(normal_float(3)))
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
    seen = not weight.is_meta and not torch.compiler.is_compiling()
    if seen and not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):
        if wrong := weight.numel() - int(torch.isfinite(weight).sum()):
            raise ValueError(f"weight: found {wrong} NaN or infinite values, expected finite ones")
    return torch.ops.hf_kbit.quantize(weight, codebook, search, signed)


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
        columns: uint8 ``[K]``, E4M4: the scales by which the columns of all matrices were divided; None: 1.
        rotated: whether each block was rotated; if so, its scale has a sign (``quantize``).

    Returns:
        ``dtype`` ``[*, N, K]``, contiguous: what ``transforms.to_original`` makes in float32, rounded to ``dtype``;
        the same bits on every device.

    Raises:
        ValueError: a dtype, shape or device does not fit; the message names the tensor.

    >>> import torch
    >>> from hf_kbit.format.codebooks import normal_float
    >>> from hf_kbit.format.reference import decode_e4m4, encode_e4m4
    >>> from hf_kbit.format.transforms import to_stored
    >>> weight, codebook = torch.randn(64, 100), torch.tensor(normal_float(5))
    >>> decoded = dequantize(*quantize(weight, codebook), codebook, weight.shape)
    >>> bool((weight - decoded).square().mean() < 0.01)
    True

    With column scales and a rotation:

    >>> columns = encode_e4m4(weight.std(dim=0))
    >>> codebook = 2.0**6 * codebook  # scales of 2**-3 and more have no byte
    >>> packed = quantize(to_stored(weight, decode_e4m4(columns), rotated=True), codebook, signed=True)
    >>> decoded = dequantize(*packed, codebook, weight.shape, columns=columns, rotated=True)
    >>> bool((weight - decoded).square().mean() < 0.01)
    True
    """
    return torch.ops.hf_kbit.dequantize(weight, absmax, codebook, list(shape), dtype, columns, rotated)


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

    Args:
        indices: int64 or int32 ``[*]``, any shape and strides, each 0 to V - 1.
        weight: of one table ``[V, D]``; it and those that follow are as ``dequantize`` takes them.
        absmax: its scales.
        codebook: its levels.
        shape: ``(V, D)``, without the padding.
        dtype: float32, float16, bfloat16 or float64.
        columns: its column scales.
        rotated: whether it is rotated.

    Returns:
        ``dtype`` ``[*, D]``, contiguous, without a gradient: bit for bit the rows that ``dequantize`` gives.

    Raises:
        ValueError: a dtype, shape or device does not fit, or an index is negative, or V or more. For an index a GPU's
            kernel, for which nothing waits, stops with an assertion instead, after which the process cannot use the
            GPU any more, as with ``nn.Embedding``.

    >>> import torch
    >>> from hf_kbit.format.codebooks import normal_float
    >>> codebook = torch.tensor(normal_float(4))
    >>> table = quantize(torch.randn(1000, 96), codebook)
    >>> tokens = torch.tensor([[3, 999, 3], [0, 1, 2]])
    >>> torch.equal(embed(tokens, *table, codebook, (1000, 96)), dequantize(*table, codebook, (1000, 96))[tokens])
    True
    """
    return torch.ops.hf_kbit.embed(indices, weight, absmax, codebook, list(shape), dtype, columns, rotated)


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
        ValueError: a dtype, shape or device does not fit; the message names the tensor.

    >>> import torch
    >>> from hf_kbit.format.codebooks import normal_float
    >>> planes = quantize(torch.randn(64, 100), torch.tensor(normal_float(3)))
    >>> tiles = repack(*planes, bits=3, shape=(64, 100))
    >>> tiles[0].shape
    torch.Size([4, 1, 3, 32, 4])
    >>> all(map(torch.equal, repack(*tiles, bits=3, shape=(64, 100), inverse=True), planes))
    True
    """
    return torch.ops.hf_kbit.repack(weight, absmax, bits, list(shape), inverse)


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
    """``x @ W.T + bias`` for a quantized weight W. Differentiable in ``x`` and ``bias``; the weight is frozen.

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
        ValueError: a dtype, shape or device does not fit; the message names the tensor.

    >>> import torch
    >>> from hf_kbit.format.codebooks import normal_float
    >>> codebook = torch.tensor(normal_float(3))
    >>> gemm(torch.randn(2, 7, 100), *quantize(torch.randn(64, 100), codebook), codebook).shape
    torch.Size([2, 7, 64])
    """
    out_features = weight.shape[0] if out_features is None else out_features
    return product(x, weight, absmax, codebook, bias, out_features, columns, rotated)


def gemm_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    columns: torch.Tensor,
    inverses: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gemm`` of a rotated weight with 8-bit inputs: x and W are rounded to int8 on the way. Sums are exact, so
    results are the same to the last bit on every device and in every batch (``docs/format.md`` says each step). A
    GPU does not round up to 64 tokens, which is faster, unless ``set_batch_invariant`` asks for the same bits; nor x
    that no kernel multiplies: float32, or by planes, or before compute capability 8.0.

    Args:
        x: float32, float16 or bfloat16 ``[*, K]``, as for ``gemm``; K 133,120 at most.
        weight: int32 planes ``[N, B * bits]`` or tiles of a weight whose blocks were rotated.
        absmax: uint8 ``[N, B]`` with signs, or that of the tiles.
        codebook: float32 ``[2**bits]``.
        bias: dtype of ``x``, ``[N]``, or None.
        out_features: N.
        columns: uint8 ``[K]``, see ``dequantize``.
        inverses: what ``int8_inverses`` has found of this weight. It is found anew for each product if None.

    Returns:
        dtype of ``x``, ``[*, N]``, contiguous, without a gradient. Of a token with NaN or infinity all is NaN; one of
        numbers below ``2**-100`` counts as zeros.

    Raises:
        ValueError: a dtype, shape or device does not fit; the message names the tensor.

    Source: a scale for each token and one for each row as in LLM.int8() (arXiv:2208.07339), here after a rotation,
    which leaves no outliers.

    >>> import hf_kbit, torch
    >>> weight = hf_kbit.KbitLinear.from_linear(torch.nn.Linear(100, 64), bits=4).weight
    >>> packed = weight.words, weight.absmax, weight.codebook
    >>> gemm_int8(torch.randn(2, 7, 100), *packed, None, 64, weight.columns).shape
    torch.Size([2, 7, 64])
    """
    return torch.ops.hf_kbit.gemm_int8(x, weight, absmax, codebook, bias, out_features, columns, inverses)


def int8_inverses(
    weight: torch.Tensor, absmax: torch.Tensor, codebook: torch.Tensor, shape: Sequence[int]
) -> torch.Tensor:
    """Of each row what 1 stands for when a rotated weight becomes int8, inverted: all of the weight is read for it, so
    a layer keeps it.

    Args:
        weight: int32 planes ``[N, B * bits]`` or tiles, as for ``gemm_int8``.
        absmax: its scales, with signs.
        codebook: its levels.
        shape: ``(N, K)``, without the padding.

    Returns:
        float16 ``[N]``, the same on every device.

    Raises:
        ValueError: a dtype, shape or device does not fit; the message names the tensor.

    >>> import hf_kbit, torch
    >>> weight = hf_kbit.KbitLinear.from_linear(torch.nn.Linear(100, 64), bits=4).weight
    >>> int8_inverses(weight.words, weight.absmax, weight.codebook, (64, 100)).shape
    torch.Size([64])
    """
    return torch.ops.hf_kbit.int8_inverses(weight, absmax, codebook, list(shape))


def encode_trellis(targets: torch.Tensor, bits: int, lead: int = MOST_LEAD) -> torch.Tensor:
    """Packs tiles of 256 weights as trellises: of each the path around it whose values by the code ``mul1`` have the
    least squared error.

    Args:
        targets: float32 ``[tiles, 256]``, any strides: a tile's weights in the order of the trellis
            (``format.trellis``), divided by their standard deviation. NaN has no meaning, and is not looked for.
        bits: 1 to 8.
        lead: 1 to 128: weights on either side of the joint by which its state is found. Fewer take less time, and
            have a larger error: half of 128 a hundredth at most.

    Returns:
        int16 ``[tiles, 16 * bits]``, contiguous: the bytes that ``format.trellis.encode`` gives, on every device.

    Raises:
        ValueError: a dtype, shape or number does not fit.

    Source: see ``format.trellis.encode``.

    >>> import torch
    >>> encode_trellis(torch.randn(5, 256), 3).shape
    torch.Size([5, 48])
    """
    return torch.ops.hf_kbit.encode_trellis(targets, bits, lead)


def decode_trellis(trellis: torch.Tensor, code: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """The numbers that trellises stand for, in the order of the weight: between its rotations, and before its scales.

    Args:
        trellis: int16 ``[*, K / 16, N / 16, 16 * bits]``, any strides, bits 1 to 8.
        code: ``3inst``, ``mcg`` or ``mul1``.
        dtype: float16, float32 or bfloat16, to which numbers of float16 are rounded.

    Returns:
        ``dtype`` ``[*, N, K]``, contiguous: what ``format.trellis.inner`` gives, the same bits on every device.

    Raises:
        ValueError: a dtype, shape or name does not fit.

    Source: EXL3's form, see ``format.trellis``.

    >>> import torch
    >>> decode_trellis(torch.zeros(2, 8, 16, 48, dtype=torch.int16), "mul1").shape
    torch.Size([2, 256, 128])
    """
    return torch.ops.hf_kbit.decode_trellis(trellis, code, dtype)


def set_batch_invariant(enabled: bool) -> None:
    """Whether a token's product with a quantized weight must be the same to the last bit in every batch.

    By default products choose by the number of tokens how they divide the work, and with it the order in which they
    add up: the same call gives the same bits, but a sequence may differ in the last bit from what it is in another
    batch. If enabled, every token's sums are added up in one order, in all products of the process from now on:
    forward only, in ``gemm`` and in layers, compiled ones too; and a GPU rounds 8-bit inputs of few tokens as well. A
    CUDA graph keeps what was set while it was captured. Other layers, such as attention and norms, need to be
    batch-invariant by themselves.

    It takes float32, float16 or bfloat16 on a CPU with our library; on a GPU float16 or bfloat16, weights in tiles, as
    layers hold them there, or a trellis of code ``mul1``, and compute capability 8.0 or newer. Results of others than
    such trellises differ from one GPU or CPU to another.

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


# --- experts --------------------------------------------------------------------------------------

# Of a mixture: the three in turn. The numbers of tokens of each expert stay on the device: nothing waits for a GPU.


def route_experts(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sorts the experts of tokens, int64 or int32 ``[T, k]``, by expert, those of one expert by token.

    What is not 0 to ``num_experts - 1``, 8191 at most, comes last.

    Returns:
        ``rows`` int32 ``[T * k]``, the token of each place in that order; ``places`` int32 ``[T, k]``, the place of
        each token for each of its experts; ``offsets`` int32 ``[E + 1]``, the first place of each expert, and the end.

    >>> rows, places, offsets = route_experts(torch.tensor([[2, 0], [0, 1]]), num_experts=3)
    >>> rows.tolist(), places.tolist(), offsets.tolist()
    ([0, 1, 1, 0], [[3, 0], [1, 2]], [0, 2, 3, 4])
    """
    return torch.ops.hf_kbit.route_experts(experts, num_experts)


def combine_experts(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``sum over j of weights[i, j] * y[places[i, j]]``, ``[T, N]``: of each token i what its experts made of it.

    ``y`` is ``[T * k, N]``, ``weights`` ``[T, k]`` of its dtype or float32, ``places`` those of ``route_experts``.
    Differentiable in ``y`` and ``weights``. Added up in float32 (float64 of float64), in the order of j; rounded once.
    """
    return torch.ops.hf_kbit.combine_experts(y, places, weights)


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

    As ``gemm``, but for experts' matrices ``[E, N, K]``, whose ``columns`` are the same, and biases ``[E, N]``, and
    without tangents in forward mode.

    Args:
        x: ``[T, K]``; with ``swiglu`` ``[T, 2 K]``, see there.
        rows: int32 ``[R]``, each 0 to T - 1; None: all rows of x, in order.
        offsets: int32 ``[E + 1]``, ascending from 0. Rows from the last one on are no expert's, and zeros.
        swiglu: ``silu(x[:, :K]) * x[:, K:]`` stands for x above, rounded once or twice: the gate between two
            projections of experts, made on the way into the second.

    Returns:
        dtype of ``x``, ``[R, N]``, contiguous.
    """
    tangents = (x, bias) if forward_ad._current_level >= 0 else ()
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tangents):
        raise NotImplementedError("gemm_experts: found tangents; products of experts have none in forward mode")
    return torch.ops.hf_kbit.gemm_experts(
        x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, rotated, swiglu
    )


def gemm_experts_int8(
    x: torch.Tensor,
    weight: torch.Tensor,
    absmax: torch.Tensor,
    codebook: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor | None,
    offsets: torch.Tensor,
    out_features: int,
    columns: torch.Tensor,
    inverses: torch.Tensor | None = None,
    swiglu: bool = False,
) -> torch.Tensor:
    """``gemm_experts`` of rotated weights with 8-bit inputs: for the rows of each expert what ``gemm_int8`` gives.
    What a gate makes is rounded to the dtype of x before. On a GPU inputs stay in 16 bits up to 32 rows an expert in
    the mean, unless ``set_batch_invariant`` asks for the same bits.

    Args:
        x: float32, float16 or bfloat16 ``[T, K]``, with ``swiglu`` ``[T, 2 K]``.
        inverses: float16 ``[E, N]``, what ``int8_inverses`` has found of each expert's matrix, or None.
        swiglu: as for ``gemm_experts``.

    Returns:
        dtype of ``x``, ``[R, N]``, contiguous, without a gradient.
    """
    return torch.ops.hf_kbit.gemm_experts_int8(
        x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, inverses, swiglu
    )


for _name in ("cpu", "cuda"):
    native.library(_name)
