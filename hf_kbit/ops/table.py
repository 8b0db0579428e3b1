"""The ops: a function for each, with its schema above it, checks the arguments and says what the results will be.

Of it an op's fake and its fallback are made, by ``_op``. A compiled library checks what its ops get by itself, in the
same words (``csrc/ops/arguments.cpp``), so that a call is checked once.

Shapes: N out_features, K in_features, B = ceil(K / 32) blocks a row, ``*`` any leading dimensions. The *planes* of a
weight are its stored form, its *tiles* a private form for GPUs (``repack``). A codebook has ``2**bits`` levels.
``columns`` and ``rotated`` say how the stored weight was made from the one that it stands for (``transforms``): every
op takes and gives W and x in the original basis, K wide.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from hf_kbit.format.codebooks import bits_of
from hf_kbit.format.reference import is_tiled, tiled_shapes
from hf_kbit.format.spec import BITS, absmax_shape, check_bits, num_blocks, weight_shape
from hf_kbit.format.trellis import BITS as TRELLIS_BITS
from hf_kbit.format.trellis import CODES, MOST_LEAD, TILE
from hf_kbit.ops import native

LIBRARY = torch.library.Library("hf_kbit", "DEF")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
WITH_FLOAT64 = (*FLOATS, torch.float64)  # so that gradients can be checked numerically
INDICES = (torch.int64, torch.int32)
MOST_EXPERTS = 2**13  # those that the kernel can count in the shared memory of any GPU
MOST_INT8_FEATURES = (2**31 - 1) // 127**2 // 32 * 32  # products of int8 whose sum int32 holds, in whole blocks
MOST_FEATURES = 2**48  # more than any memory holds; what is computed from sizes up to here does not overflow

Results = list[tuple[Sequence[int], torch.dtype]]


# --- from a function to an op ---------------------------------------------------------------------


def _op(*schemas: str) -> Callable:
    """Defines ops of these schemas, which a function checks: their fakes, and what runs where no library does."""

    def define(check: Callable[..., Results]) -> Callable[..., Results]:
        for schema in schemas:
            LIBRARY.define(schema)
            name = schema.partition("(")[0]
            LIBRARY.impl(name, _fallback(name, check), "CompositeExplicitAutograd")
            torch.library.register_fake(f"hf_kbit::{name}", _fake(schema, check), lib=LIBRARY)
        return check

    return define


def _tensors(arguments: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of a call with their names, those in lists too: ``weights[1]``."""
    for name, found in arguments.items():
        several = isinstance(found, Sequence)
        for place, value in enumerate(found if several else [found]):
            if isinstance(value, torch.Tensor):
                yield (f"{name}[{place}]" if several else name), value


def _checked(check: Callable[..., Results]) -> Callable[..., tuple[torch.Tensor, Results]]:
    """The first tensor of a call, beside which all must lie, and what the results will be."""
    signature = inspect.signature(check)

    def run(*args, **named):
        arguments = signature.bind(*args, **named).arguments
        (first, like), *others = _tensors(arguments)
        for name, tensor in ((first, like), *others):
            if tensor.layout != torch.strided:
                raise ValueError(f"{name}: found layout {_name(tensor.layout)}, expected a dense tensor")
            if tensor.device != like.device:
                remedy = f": call model.to({like.device.type!r}) when the weights of a skeleton are loaded"
                raise ValueError(
                    f"{name}: found on {tensor.device}, expected on {like.device} like {first}"
                    f"{remedy if tensor.is_meta else ''}"
                )
        return like, check(*args, **named)

    return run


def _fallback(name: str, check: Callable[..., Results]) -> Callable:
    checked = _checked(check)

    def run(*args, **named):
        like, _ = checked(*args, **named)
        return native.fallback(name, like.device.type)(*args, **named)

    return run


def join_what_is_compiled() -> None:
    """Has Inductor join products of one input, if it is about to compile. For fakes of products."""
    if "torch._inductor.config" in sys.modules:
        from hf_kbit.ops import inductor  # imports Inductor, which takes over a second

        inductor.install()


def _fake(schema: str, check: Callable[..., Results]) -> Callable:
    name, results, checked = schema.partition("(")[0], schema.rpartition("-> ")[2], _checked(check)

    def run(*args, **named):
        like, made = checked(*args, **named)
        if name in ("gemm_inference", "gemm_int8"):
            join_what_is_compiled()
        made = [like.new_empty(shape, dtype=dtype) for shape, dtype in made]
        return made[0] if results == "Tensor" else made if results == "Tensor[]" else tuple(made)

    return run


# --- checks that several ops share ----------------------------------------------------------------


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _check_dtype(name: str, dtype: torch.dtype, expected: Sequence[torch.dtype]) -> None:
    if dtype not in expected:
        *others, last = map(_name, expected)
        raise ValueError(
            f"{name}: found dtype {_name(dtype)}, expected {', '.join(others)}{' or ' * bool(others)}{last}"
        )


def _refuse_shape(name: str, tensor: torch.Tensor, expected: object) -> None:
    raise ValueError(f"{name}: found shape {list(tensor.shape)}, expected {expected}")


def _check(name: str, tensor: torch.Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> None:
    """None is right too."""
    if tensor is not None:
        _check_dtype(name, tensor.dtype, (dtype,))
        if tuple(tensor.shape) != tuple(shape):
            _refuse_shape(name, tensor, list(shape))


def _bits(codebook: torch.Tensor) -> int:
    _check_dtype("codebook", codebook.dtype, (torch.float32,))
    if codebook.dim() != 1 or codebook.shape[0] not in [2**bits for bits in BITS]:
        _refuse_shape("codebook", codebook, "one dimension of 4, 8, 16 or 32 levels")
    return bits_of(codebook.shape[0])


def _lead(weight, absmax, bits: int, shape: Sequence[int], tiled: bool | None = None) -> tuple[int, ...]:
    """The leading dimensions of packed weights ``[*, N, K]``, in either form or in that which is said."""
    if len(shape) != 2 or not all(1 <= size <= MOST_FEATURES for size in shape):
        raise ValueError(f"shape: found {list(shape)}, expected [out_features, in_features], both from 1 to 2**48")
    _check_dtype("weight", weight.dtype, (torch.int32,))
    _check_dtype("absmax", absmax.dtype, (torch.uint8,))
    if tiled is None:
        tiled = 0 in (weight.dim(), absmax.dim()) or is_tiled(weight, absmax, bits)
    words, scales = tiled_shapes(*shape, bits) if tiled else (weight_shape(*shape, bits), absmax_shape(*shape))
    for name, tensor, expected in (("weight", weight, words), ("absmax", absmax, scales)):
        if tuple(tensor.shape[-len(expected) :]) != tuple(expected):
            form, of = "tiles" if tiled else "planes", f"a {list(shape)} weight in {bits} bits"
            _refuse_shape(name, tensor, f"{[*expected]} for the {form} of {of}")
    lead = weight.shape[: -len(words)]
    if lead != absmax.shape[: -len(scales)]:
        _refuse_shape("absmax", absmax, f"the leading dimensions of weight {list(weight.shape)}")
    return lead


def _packed(weight, absmax, codebook, shape, columns, experts: bool = False) -> tuple[int, ...]:
    """The leading dimensions of one matrix, of which there are none, or of those of experts, which is one."""
    lead = _lead(weight, absmax, _bits(codebook), shape)
    if len(lead) != experts:
        one = "leading dimension, that of experts" if experts else "matrix, without leading dimensions"
        _refuse_shape("weight", weight, f"one {one}")
    _check("columns", columns, torch.uint8, (shape[1],))
    return lead


def _check_int8(x, columns, inverses, rows: tuple[int, ...]) -> None:
    """What a product of 8-bit inputs checks besides, of a weight of so many ``rows``."""
    if columns.shape[0] > MOST_INT8_FEATURES:
        _refuse_shape("x", x, f"[*, in_features] of {MOST_INT8_FEATURES} in_features at most for 8-bit inputs")
    _check("inverses", inverses, torch.float16, rows)


# --- weights --------------------------------------------------------------------------------------


@_op("quantize(Tensor weight, Tensor codebook, bool search=False, bool signed=False) -> (Tensor, Tensor)")
def quantize(weight, codebook, search=False, signed=False):
    _check_dtype("weight", weight.dtype, FLOATS)
    if weight.dim() < 2 or 0 in weight.shape:
        _refuse_shape("weight", weight, "[*, out_features, in_features], none 0")
    bits, (*rows, in_features) = _bits(codebook), weight.shape
    blocks = num_blocks(in_features)
    return [((*rows, blocks * bits), torch.int32), ((*rows, blocks), torch.uint8)]


@_op(
    "dequantize(Tensor weight, Tensor absmax, Tensor codebook, SymInt[] shape, ScalarType dtype,"
    " Tensor? columns=None, bool rotated=False) -> Tensor"
)
def dequantize(weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    _check_dtype("dtype", dtype, WITH_FLOAT64)
    lead = _lead(weight, absmax, _bits(codebook), shape)
    _check("columns", columns, torch.uint8, (shape[1],))
    return [((*lead, *shape), dtype)]


@_op(
    "embed(Tensor indices, Tensor weight, Tensor absmax, Tensor codebook, SymInt[] shape, ScalarType dtype,"
    " Tensor? columns=None, bool rotated=False) -> Tensor"
)
def embed(indices, weight, absmax, codebook, shape, dtype, columns=None, rotated=False):
    _check_dtype("indices", indices.dtype, INDICES)
    _check_dtype("dtype", dtype, WITH_FLOAT64)
    _packed(weight, absmax, codebook, shape, columns)
    return [((*indices.shape, shape[1]), dtype)]


@_op("repack(Tensor weight, Tensor absmax, int bits, SymInt[] shape, bool inverse=False) -> (Tensor, Tensor)")
def repack(weight, absmax, bits, shape, inverse=False):
    lead = _lead(weight, absmax, check_bits(bits), shape, tiled=inverse)
    words, scales = (weight_shape(*shape, bits), absmax_shape(*shape)) if inverse else tiled_shapes(*shape, bits)
    return [((*lead, *words), torch.int32), ((*lead, *scales), torch.uint8)]


# --- trellises ------------------------------------------------------------------------------------


def _check_range(name: str, found: int, most: int) -> None:
    if not 1 <= found <= most:
        raise ValueError(f"{name}: found {found}, expected 1 to {most}")


@_op("encode_trellis(Tensor targets, int bits, int lead) -> Tensor")
def encode_trellis(targets, bits, lead):
    _check_dtype("targets", targets.dtype, (torch.float32,))
    if targets.dim() != 2 or targets.shape[1] != TILE**2:
        _refuse_shape("targets", targets, "[tiles, 256]")
    _check_range("bits", bits, max(TRELLIS_BITS))
    _check_range("lead", lead, MOST_LEAD)
    return [((targets.shape[0], TILE * bits), torch.int16)]


@_op("decode_trellis(Tensor trellis, str code, ScalarType dtype) -> Tensor")
def decode_trellis(trellis, code, dtype):
    _check_dtype("trellis", trellis.dtype, (torch.int16,))
    if trellis.dim() < 3 or trellis.shape[-1] not in [TILE * bits for bits in TRELLIS_BITS]:
        expected = "[*, in_features / 16, out_features / 16, 16 * bits] of 1 to 8 bits"
        _refuse_shape("trellis", trellis, expected)
    if code not in CODES:
        raise ValueError(f"code: found {code}, expected 3inst, mcg or mul1")
    _check_dtype("dtype", dtype, FLOATS)
    *lead, across, down, _ = trellis.shape
    return [((*lead, TILE * down, TILE * across), dtype)]


# --- products -------------------------------------------------------------------------------------


# The same but for autograd, whose Python part takes the host several microseconds also where no gradient is wanted.
@_op(
    "gemm(Tensor x, Tensor weight, Tensor absmax, Tensor codebook, Tensor? bias, SymInt out_features,"
    " Tensor? columns=None, bool rotated=False) -> Tensor",
    "gemm_inference(Tensor x, Tensor weight, Tensor absmax, Tensor codebook, Tensor? bias, SymInt out_features,"
    " Tensor? columns=None, bool rotated=False) -> Tensor",
)
def gemm(x, weight, absmax, codebook, bias, out_features, columns=None, rotated=False):
    _check_dtype("x", x.dtype, WITH_FLOAT64)
    if x.dim() < 1:
        raise ValueError("x: found a scalar, expected [*, in_features]")
    _packed(weight, absmax, codebook, (out_features, x.shape[-1]), columns)
    _check("bias", bias, x.dtype, (out_features,))
    return [((*x.shape[:-1], out_features), x.dtype)]


@_op("int8_inverses(Tensor weight, Tensor absmax, Tensor codebook, SymInt[] shape) -> Tensor")
def int8_inverses(weight, absmax, codebook, shape):
    _packed(weight, absmax, codebook, shape, None)
    return [((shape[0],), torch.float16)]


@_op(
    "gemm_int8(Tensor x, Tensor weight, Tensor absmax, Tensor codebook, Tensor? bias, SymInt out_features,"
    " Tensor columns, Tensor? inverses=None) -> Tensor"
)
def gemm_int8(x, weight, absmax, codebook, bias, out_features, columns, inverses=None):
    _check_dtype("x", x.dtype, FLOATS)
    results = gemm(x, weight, absmax, codebook, bias, out_features, columns)
    _check_int8(x, columns, inverses, (out_features,))
    return results


# Several weights, of which ``inductor`` joins products; one with inverses has 8-bit inputs. The stable ABI has no list
# of bools: `rotated` are 0 or 1.
@_op(
    "gemm_group(Tensor x, Tensor[] weights, Tensor[] absmaxes, Tensor[] codebooks, Tensor?[] biases,"
    " SymInt[] out_features, Tensor?[] columns, SymInt[] rotated, Tensor?[] inverses) -> Tensor[]"
)
def gemm_group(x, weights, absmaxes, codebooks, biases, out_features, columns, rotated, inverses):
    of_each = weights, absmaxes, codebooks, biases, out_features, columns, rotated, inverses
    if {*map(len, of_each)} != {len(weights)}:
        raise ValueError(f"weights: found {len(weights)}, expected as many of each argument but x")
    results = []
    for *product, turned, known in zip(*of_each, strict=True):
        if known is None:
            results += gemm(x, *product, turned)
        elif product[-1] is None or not turned:
            raise ValueError("inverses: found those of a weight that is not rotated, expected none of it")
        else:
            results += gemm_int8(x, *product, known)
    return results


@_op(
    "gemm_gradient(Tensor grad, Tensor weight, Tensor absmax, Tensor codebook, SymInt[] shape,"
    " Tensor? columns=None, bool rotated=False) -> Tensor"
)
def gemm_gradient(grad, weight, absmax, codebook, shape, columns=None, rotated=False):
    _check_dtype("grad", grad.dtype, WITH_FLOAT64)
    _packed(weight, absmax, codebook, shape, columns)
    if grad.dim() < 1 or grad.shape[-1] != shape[0]:
        _refuse_shape("grad", grad, f"[*, {shape[0]}]")
    return [((*grad.shape[:-1], shape[1]), grad.dtype)]


# --- experts --------------------------------------------------------------------------------------


@_op("route_experts(Tensor experts, SymInt num_experts) -> (Tensor, Tensor, Tensor)")
def route_experts(experts, num_experts):
    _check_dtype("experts", experts.dtype, INDICES)
    if experts.dim() != 2:
        _refuse_shape("experts", experts, "[tokens, experts of each]")
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"num_experts: found {num_experts}, expected 1 to {MOST_EXPERTS}")
    shapes = (experts.shape[0] * experts.shape[1],), experts.shape, (num_experts + 1,)
    return [(shape, torch.int32) for shape in shapes]


@_op("combine_experts(Tensor y, Tensor places, Tensor weights) -> Tensor")
def combine_experts(y, places, weights):
    _check_dtype("y", y.dtype, WITH_FLOAT64)
    _check_dtype("places", places.dtype, (torch.int32,))
    if y.dim() != 2:
        _refuse_shape("y", y, "[rows, out_features]")
    if places.dim() != 2:
        _refuse_shape("places", places, "[tokens, experts of each]")
    _check("weights", weights, torch.float32 if weights.dtype == torch.float32 else y.dtype, places.shape)
    return [((places.shape[0], y.shape[1]), y.dtype)]


@_op(
    "gemm_experts(Tensor x, Tensor weight, Tensor absmax, Tensor codebook, Tensor? bias, Tensor? rows, Tensor offsets,"
    " SymInt out_features, Tensor? columns=None, bool rotated=False, bool swiglu=False) -> Tensor"
)
def gemm_experts(
    x, weight, absmax, codebook, bias, rows, offsets, out_features, columns=None, rotated=False, swiglu=False
):
    _check_dtype("x", x.dtype, WITH_FLOAT64)
    if x.dim() != 2 or (swiglu and x.shape[1] % 2):
        _refuse_shape("x", x, "[tokens, 2 * in_features]" if swiglu else "[tokens, in_features]")
    in_features = x.shape[1] // (2 if swiglu else 1)
    (experts,) = _packed(weight, absmax, codebook, (out_features, in_features), columns, experts=True)
    _check("offsets", offsets, torch.int32, (experts + 1,))
    _check("bias", bias, x.dtype, (experts, out_features))
    if rows is not None:
        _check_dtype("rows", rows.dtype, (torch.int32,))
        if rows.dim() != 1:
            _refuse_shape("rows", rows, "one dimension")
    return [((x.shape[0] if rows is None else rows.shape[0], out_features), x.dtype)]


@_op(
    "gemm_experts_int8(Tensor x, Tensor weight, Tensor absmax, Tensor codebook, Tensor? bias, Tensor? rows,"
    " Tensor offsets, SymInt out_features, Tensor columns, Tensor? inverses=None, bool swiglu=False) -> Tensor"
)
def gemm_experts_int8(
    x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, inverses=None, swiglu=False
):
    _check_dtype("x", x.dtype, FLOATS)
    results = gemm_experts(x, weight, absmax, codebook, bias, rows, offsets, out_features, columns, True, swiglu)
    _check_int8(x, columns, inverses, (weight.shape[0], out_features))
    return results


@_op(
    "gemm_experts_gradient(Tensor grad, Tensor weight, Tensor absmax, Tensor codebook, Tensor offsets, SymInt[] shape,"
    " Tensor? columns=None, bool rotated=False) -> Tensor"
)
def gemm_experts_gradient(grad, weight, absmax, codebook, offsets, shape, columns=None, rotated=False):
    _check_dtype("grad", grad.dtype, WITH_FLOAT64)
    (experts,) = _packed(weight, absmax, codebook, shape, columns, experts=True)
    _check("offsets", offsets, torch.int32, (experts + 1,))
    if grad.dim() != 2 or grad.shape[1] != shape[0]:
        _refuse_shape("grad", grad, f"[rows, {shape[0]}]")
    return [((grad.shape[0], shape[1]), grad.dtype)]
