"""Products by a weight that has a trellis.

    y = rotate(rotate(x * suh) @ inner.T) * svh + bias

The libraries multiply by a matrix (csrc/ops). Where there is none, or no kernel that takes x, torch multiplies by what
is between the rotations, decoded, with inputs and outputs rotated rather than the weight, which is larger. Products by
experts and gradients are composed here, of kernels where a GPU has them: of rows of experts, and ``dense_trellis``,
which makes the weight itself. The gradient of x is the product with the two sides exchanged. Each decodes again, so
that no dense weight stays in memory.

Here ``words`` are int16 ``[*, N / 16, K / 16, 16 * bits]``, any strides: the trellis of a file with its first two
dimensions exchanged, so that rows come first. ``shape`` is ``(N, K)`` without the padding, ``block`` that of the
rotations (``format.trellis.TrellisDecoding``). Of experts all tensors have further dimensions in front: E, and how
many matrices lie one below the other.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise

import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

from hf_kbit.format.trellis import rotate
from hf_kbit.ops import native
from hf_kbit.ops.autograd import (
    can_round,
    check_can_train,
    register,
    swiglu_backward,
    to_experts,
    to_tokens,
    wants_gradient,
    wide,
    with_tangents,
)
from hf_kbit.ops.grouped import grouped_product, has_grouped_product, owners_of
from hf_kbit.ops.table import LIBRARY, join_what_is_compiled

OPS = torch.ops.hf_kbit
_WEIGHT = "Tensor words, Tensor suh, Tensor svh, int[] shape, str code, int block"
# Of kernels on GPUs for rows of experts: columns and rows of those that add up whole numbers, columns of 8-bit inputs,
# results of those for many rows.
MOST_IN_WHOLE_NUMBERS, MOST_FEW_ROWS, MOST_INT8_FEATURES, MOST_SUMS = 2**15, 2**12, 2**17, 2**31


def product(x, bias, words, suh, svh, shape: Sequence[int], code: str, block: int) -> torch.Tensor:
    """``x @ W.T + bias``, x floating ``[*, K]``; differentiable in x and bias."""
    how = words, suh, svh, list(shape), code, block
    if forward_ad._current_level >= 0:
        return with_tangents(lambda x, bias: OPS.gemm_trellis(x, bias, *how), x, bias)
    # An op with autograd takes the host twice as long.
    return (_WITH_GRADIENT if wants_gradient(x, bias) else _INFERENCE)(x, bias, *how)


def product_int8(x, bias, *weight) -> torch.Tensor:
    """``product`` of inputs that may be rounded to 8 bits, where that is faster and no gradient is wanted."""
    return _INT8(x, bias, *weight) if can_round(x, bias) else product(x, bias, *weight)


def products(x, biases: Sequence, weights: Sequence[tuple], int8: bool) -> list[torch.Tensor]:
    """``product`` of one x by several weights, whose code and block are the same, or ``product_int8``."""
    words, suhs, svhs, shapes, (code, *_), (block, *_) = zip(*weights, strict=True)
    rows = [shape[0] for shape in shapes]
    return OPS.gemm_trellis_group(x, list(biases), list(words), list(suhs), list(svhs), rows, code, block, int8)


def experts_product(x, bias, rows, offsets, words, suh, svh, shape, code: str, block: int, swiglu: bool):
    """As ``ops.gemm_experts``."""
    return OPS.gemm_experts_trellis(x, bias, rows, offsets, words, suh, svh, list(shape), code, block, swiglu)


def experts_product_int8(x, bias, *how):
    """``experts_product``, as ``product_int8``."""
    return (OPS.gemm_experts_trellis_int8 if can_round(x, bias) else OPS.gemm_experts_trellis)(x, bias, *how)


def _check_can_multiply(x: torch.Tensor, shape: Sequence[int], code: str) -> None:
    if not native.batch_invariant:
        return
    if x.is_cuda:
        fits = code == "mul1" and shape[1] <= MOST_IN_WHOLE_NUMBERS and has_kernels(x.device, x.dtype)
    else:
        fits = x.is_cpu and x.dtype != torch.float64 and native.library("cpu").loaded
    if not fits:
        raise ValueError(
            f"set_batch_invariant: found a product of {x.dtype} on {x.device.type} by {shape[1]:,} columns of a "
            f"trellis of code {code!r}, expected hf_kbit's library and, on a CPU, float32, float16 or bfloat16, on a "
            f"GPU of compute capability 8.0 or newer, float16 or bfloat16, code 'mul1' and at most "
            f"{MOST_IN_WHOLE_NUMBERS:,} columns"
        )


def _op(schema: str, shape) -> Callable:
    """Defines an op with one result, of x's dtype or of the one that is asked for; ``shape`` says which shape."""
    name = schema.partition("(")[0]

    def define(run: Callable) -> Callable:
        LIBRARY.define(schema)
        LIBRARY.impl(name, lambda *args: run(*args).contiguous(), "CompositeExplicitAutograd")

        @torch.library.register_fake(f"hf_kbit::{name}", lib=LIBRARY)
        def _(first, *others, **named):
            if name in ("gemm_trellis_inference", "gemm_trellis_int8"):
                join_what_is_compiled()
            dtype = others[-1] if isinstance(others[-1], torch.dtype) else first.dtype
            return first.new_empty(shape(first, *others, **named), dtype=dtype)

        return run

    return define


# --- the sides ------------------------------------------------------------------------------------


@cache
def _hadamard(block: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return rotate(torch.eye(block, dtype=dtype), block).to(device)


def _rotated(x: torch.Tensor, block: int) -> torch.Tensor:
    return (x.unflatten(-1, (-1, block)) @ _hadamard(block, x.dtype, x.device)).flatten(-2)


def _multiplied(x, first, multiply: Callable, second, block: int, size: int) -> torch.Tensor:
    """``[*, size]``, at least float32: x through one side, a product in the dtype of x, and the other side."""
    width = first.shape[-1]
    dtype, unit = wide(x), 2.0 ** -round(math.log2(width) / 2)  # so that float16 holds the results
    turned = _rotated(F.pad(x, (0, width - x.shape[-1])).to(dtype) * first, block)
    y = multiply((turned * unit).to(x.dtype))
    return (_rotated(y.to(dtype), block) * (second / unit))[..., :size]


# --- kernels of the CUDA library ------------------------------------------------------------------

# Of several weights of one width, of which the rows are told; for few tokens of code mul1.
_SEVERAL = "Tensor x, Tensor?[] biases, Tensor[] words, Tensor[] suh, Tensor[] svh, int[] rows"
LIBRARY.define(f"gemm_trellis_few({_SEVERAL}, int block) -> Tensor[]")
LIBRARY.define(f"gemm_trellis_many({_SEVERAL}, str code, int block, bool int8) -> Tensor[]")
LIBRARY.define(
    f"gemm_trellis_experts(Tensor x, Tensor? rows, Tensor offsets, {_WEIGHT}, bool swiglu, str how) -> Tensor"
)
LIBRARY.define(
    "dense_trellis(Tensor words, Tensor suh, Tensor svh, int[] shape, str code, ScalarType dtype) -> Tensor"
)


def has_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a GPU has kernels for products of such inputs: without, each product decodes a whole weight."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) and native.cuda_arch(device) >= 800


def _shares_tiles(x: torch.Tensor) -> bool:
    """Whether Hopper's kernels multiply x, which decode in registers for many rows."""
    return has_kernels(x.device, x.dtype) and native.many_trellis_tokens(x.device) > 0 and not native.batch_invariant


def _makes_dense(x: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor, block: int) -> bool:
    """Whether ``dense_trellis`` makes the weight itself for a product of x."""
    return has_kernels(x.device, x.dtype) and block == 128 and not suh.shape[-1] % 128 and not svh.shape[-1] % 128


# --- decoding -------------------------------------------------------------------------------------


def _inner(words: torch.Tensor, code: str, dtype: torch.dtype) -> torch.Tensor:
    """``[*, N, K]``, padded: the weight between the rotations."""
    # Values are those of float16, which float64 holds as float32 does.
    matrix = OPS.decode_trellis(
        words.transpose(-3, -2).contiguous(), code, torch.float32 if dtype == torch.float64 else dtype
    )
    return matrix.to(dtype)


@_op(
    f"dequantize_trellis({_WEIGHT}, ScalarType dtype) -> Tensor",
    lambda words, _suh, _svh, shape, *_: _shape(words, shape),
)
def dequantize(words, suh, svh, shape, code, block, dtype):
    """The weight ``[*, N, K]``, computed in float32, or in float64 for that."""
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    weight = _rotated(_inner(words, code, exact), block) * suh.to(exact)[..., None, :]
    weight = _rotated(weight.mT, block).mT * svh.to(exact)[..., None]
    whole = _shape(words, shape)
    rows = shape[0] // (words.shape[-4] if words.dim() == 5 else 1)
    return weight[..., :rows, : shape[1]].reshape(whole).to(dtype)


def _shape(words: torch.Tensor, shape: Sequence[int]) -> list[int]:
    return [*words.shape[: min(words.dim() - 3, 1)], *shape]


# --- a matrix -------------------------------------------------------------------------------------


def _gemm(x, bias, words, suh, svh, shape, code, block):
    if x.shape[-1] != shape[1]:
        raise ValueError(f"x: found shape {list(x.shape)}, expected [*, {shape[1]}], the in_features of the weight")
    _check_can_multiply(x, shape, code)
    matrix = _inner(words, code, x.dtype).mT
    y = _multiplied(x, suh, partial(torch.matmul, other=matrix), svh, block, shape[0])
    return (y if bias is None else y + bias).to(x.dtype)


# With gradients and without, with inputs that may be rounded, and what a library leaves to torch.
for _name in ("gemm_trellis", "gemm_trellis_inference", "gemm_trellis_int8", "gemm_trellis_decoded"):
    _op(
        f"{_name}(Tensor x, Tensor? bias, {_WEIGHT}) -> Tensor",
        lambda x, _, w, u, v, shape, *__: (*x.shape[:-1], shape[0]),
    )(_gemm)
_WITH_GRADIENT, _INFERENCE, _INT8 = (
    getattr(OPS, name).default for name in ("gemm_trellis", "gemm_trellis_inference", "gemm_trellis_int8")
)

# Several weights, of which ``inductor`` joins products.
LIBRARY.define(f"gemm_trellis_group({_SEVERAL}, str code, int block, bool int8) -> Tensor[]")


def _group(x, biases, words, suhs, svhs, rows, code, block, int8):
    multiply, shapes = _INT8 if int8 else _INFERENCE, [[count, x.shape[-1]] for count in rows]
    packed = zip(biases, words, suhs, svhs, shapes, strict=True)
    return [multiply(x, bias, *how, code, block) for bias, *how in packed]


LIBRARY.impl("gemm_trellis_group", _group, "CompositeExplicitAutograd")


@torch.library.register_fake("hf_kbit::gemm_trellis_group", lib=LIBRARY)
def _(x, biases, words, suhs, svhs, rows, code, block, int8):
    return [x.new_empty((*x.shape[:-1], count)) for count in rows]


@_op(
    f"gemm_trellis_gradient(Tensor grad, {_WEIGHT}) -> Tensor",
    lambda grad, w, u, v, shape, *_: (*grad.shape[:-1], shape[1]),
)
def _(grad, words, suh, svh, shape, code, block):
    if _makes_dense(grad, suh, svh, block):
        return grad @ OPS.dense_trellis(words, suh, svh, shape, code, grad.dtype)
    matrix = _inner(words, code, grad.dtype)
    return _multiplied(grad, svh, partial(torch.matmul, other=matrix), suh, block, shape[1]).to(grad.dtype)


def _gemm_setup_context(ctx, inputs, output):
    _, _, *packed, ctx.shape, ctx.code, ctx.block = inputs
    check_can_train(packed[0])
    ctx.save_for_backward(*packed)


def _gemm_backward(ctx, grad):
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        how = *ctx.saved_tensors, ctx.shape, ctx.code, ctx.block
        grad_x = with_tangents(lambda grad, _: OPS.gemm_trellis_gradient(grad, *how), grad)
    if ctx.needs_input_grad[1]:
        grad_bias = grad.reshape(-1, ctx.shape[0]).sum(dim=0)
    return grad_x, grad_bias, *(None,) * 6


def _gradient_setup_context(ctx, inputs, output):
    _, *packed, ctx.shape, ctx.code, ctx.block = inputs
    ctx.save_for_backward(*packed)


def _gradient_backward(ctx, grad):
    return OPS.gemm_trellis(grad, None, *ctx.saved_tensors, ctx.shape, ctx.code, ctx.block), *(None,) * 6


register("gemm_trellis", _gemm_setup_context, _gemm_backward)
register("gemm_trellis_gradient", _gradient_setup_context, _gradient_backward)


# --- experts --------------------------------------------------------------------------------------


def _with_groups(words, *sides) -> list[torch.Tensor]:
    """With a dimension behind that of experts, for how many matrices of one lie one below the other."""
    return [
        words if words.dim() == 5 else words[:, None],
        *(each if each.dim() == 3 else each[:, None] for each in sides),
    ]


def _by_a_kernel(x, rows, offsets, words, suh, svh, shape, code: str, block: int, swiglu: bool, int8: bool):
    """``[R, N]`` by a kernel for rows of all experts, or None. Few rows are products by themselves, which read the
    weights that they have; more share tiles of one expert."""
    tokens, width = len(x if rows is None else rows), shape[1]
    if tokens == 0 or not has_kernels(x.device, x.dtype):
        return None
    words, suh, svh = _with_groups(words, suh, svh)
    count, groups = words.shape[:2]
    can_share = _shares_tiles(x) and tokens * groups * (svh.shape[-1] + 128) < MOST_SUMS
    few = tokens <= (count / 2 if can_share else min(2 * count, MOST_FEW_ROWS)) or native.batch_invariant
    offsets, packed = offsets.int(), (words, suh, svh, [shape[0] // groups, width], code, block, swiglu)
    rows = None if rows is None else rows.int()
    if few and code == "mul1" and width <= MOST_IN_WHOLE_NUMBERS:
        step = MOST_FEW_ROWS // groups
        if tokens <= step:
            return OPS.gemm_trellis_experts(x, rows, offsets, *packed, "few")
        picked = torch.arange(tokens, dtype=torch.int32, device=x.device) if rows is None else rows
        return torch.cat(
            [
                OPS.gemm_trellis_experts(x, some, (offsets - step * i).clamp(0, len(some)), *packed, "few")
                for i, some in enumerate(picked.split(step))
            ]
        )
    how = "int8" if int8 and code == "mul1" and width <= MOST_INT8_FEATURES else "many"
    return OPS.gemm_trellis_experts(x, rows, offsets, *packed, how) if can_share else None


def _of_experts(x, first, words, second, offsets, code: str, block: int, size: int, forward: bool):
    """``[R, size]`` for the rows ``[R, k]`` of each expert; zeros for those of none. Several matrices of an expert lie
    one below the other: forward their results, and backward what goes into them are side by side."""
    words, first, second = _with_groups(words, first, second)
    groups = words.shape[1]
    parts = [x] * groups if forward else x.chunk(groups, -1)
    made = []
    for group, part in enumerate(parts):
        how = first[:, group], words[:, group], second[:, group], code, block, size // groups if forward else size
        made.append(_in_turn(part, offsets, forward, *how))
    return torch.cat(made, -1) if forward else sum(made)


def _in_turn(x, offsets, forward: bool, first, words, second, code: str, block: int, size: int) -> torch.Tensor:
    if x.is_cuda and has_grouped_product(x):  # nothing waits for the GPU, which may be capturing a graph
        if _makes_dense(x, first, second, block):
            suh, svh, shape = (first, second, [size, x.shape[1]]) if forward else (second, first, [x.shape[1], size])
            matrices = OPS.dense_trellis(words, suh, svh, shape, code, x.dtype)
            return grouped_product(x, matrices.mT if forward else matrices, None, offsets)
        matrices = _inner(words, code, x.dtype)
        matrices = matrices.mT if forward else matrices
        owners = owners_of(len(x), offsets).clamp(max=len(words) - 1)
        multiply = partial(grouped_product, matrices=matrices, bias=None, offsets=offsets)
        return _multiplied(x, first[owners], multiply, second[owners], block, size)
    parts, numbers = [], offsets.tolist()
    for expert, (start, stop) in enumerate(pairwise(numbers)):
        if stop > start:
            own, sides = x[start:stop], (first[expert], second[expert])
            if forward:
                how = words[expert], *sides, [size, x.shape[1]], code, block
                parts.append(OPS.gemm_trellis_inference(own, None, *how))
            else:
                how = words[expert], *reversed(sides), [x.shape[1], size], code, block
                parts.append(OPS.gemm_trellis_gradient(own, *how))
    return torch.cat([*parts, x.new_zeros(len(x) - numbers[-1], size)])


def _experts(x, bias, rows, offsets, words, suh, svh, shape, code, block, swiglu, int8=False):
    _check_can_multiply(x, shape, code)
    y = _by_a_kernel(x, rows, offsets, words, suh, svh, shape, code, block, swiglu, int8)
    if y is None:
        if swiglu:
            gate, up = x.to(wide(x)).chunk(2, dim=-1)
            x = (F.silu(gate) * up).to(x.dtype)
        x = x if rows is None else x[rows]
        y = _of_experts(x, suh, words, svh, offsets, code, block, shape[0], True)
    if bias is not None:
        owners = owners_of(len(y), offsets)
        y = y + torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[owners]
    return y.to(x.dtype)


for _name, _int8 in (("gemm_experts_trellis", False), ("gemm_experts_trellis_int8", True)):
    _op(
        f"{_name}(Tensor x, Tensor? bias, Tensor? rows, Tensor offsets, {_WEIGHT}, bool swiglu) -> Tensor",
        lambda x, _, rows, __, w, u, v, shape, *___: ((x if rows is None else rows).shape[0], shape[0]),
    )(partial(_experts, int8=_int8))


@_op(
    f"gemm_experts_trellis_gradient(Tensor grad, Tensor offsets, {_WEIGHT}) -> Tensor",
    lambda grad, _, w, u, v, shape, *__: (grad.shape[0], shape[1]),
)
def _(grad, offsets, words, suh, svh, shape, code, block):
    return _of_experts(grad, svh, words, suh, offsets, code, block, shape[1], False).to(grad.dtype)


def _experts_setup_context(ctx, inputs, output):
    x, _, rows, offsets, *packed, ctx.shape, ctx.code, ctx.block, ctx.swiglu = inputs
    check_can_train(packed[0])
    ctx.save_for_backward(*packed, offsets, rows, x if ctx.swiglu else None)
    ctx.tokens = x.shape[0]


def _experts_backward(ctx, grad):
    grad_x = grad_bias = None
    *packed, offsets, rows, x = ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        how = *packed, ctx.shape, ctx.code, ctx.block
        grad_x = to_tokens(OPS.gemm_experts_trellis_gradient(grad, offsets, *how), rows, ctx.tokens)
        grad_x = swiglu_backward(x, grad_x) if ctx.swiglu else grad_x
    if ctx.needs_input_grad[1]:
        grad_bias = to_experts(grad, offsets)
    return grad_x, grad_bias, *(None,) * 9


def _experts_gradient_setup_context(ctx, inputs, output):
    _, offsets, *packed, ctx.shape, ctx.code, ctx.block = inputs
    ctx.save_for_backward(offsets, *packed)


def _experts_gradient_backward(ctx, grad):
    offsets, *packed = ctx.saved_tensors
    how = *packed, ctx.shape, ctx.code, ctx.block
    return OPS.gemm_experts_trellis(grad, None, None, offsets, *how, False), *(None,) * 7


register("gemm_experts_trellis", _experts_setup_context, _experts_backward)
register("gemm_experts_trellis_gradient", _experts_gradient_setup_context, _experts_gradient_backward)


@register_flop_formula(
    [
        OPS.gemm_trellis,
        OPS.gemm_trellis_inference,
        OPS.gemm_trellis_int8,
        OPS.gemm_trellis_gradient,
        OPS.gemm_experts_trellis_gradient,
    ]
)
def _(x, *_, out_shape=None, **__):
    return 2 * x[-1] * math.prod(out_shape)


@register_flop_formula(OPS.gemm_trellis_group)
def _(x, *_, out_shape=None, **__):
    return sum(2 * x[-1] * math.prod(shape) for shape in out_shape)


@register_flop_formula([OPS.gemm_experts_trellis, OPS.gemm_experts_trellis_int8])
def _(x, *others, out_shape=None, **_):
    swiglu = len(others) > 9 and others[9]
    return 2 * x[-1] // (2 if swiglu else 1) * math.prod(out_shape)
