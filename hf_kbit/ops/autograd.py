"""The gradients of the ops, backward and forward, and what the ops cost in ``FlopCounterMode``.

A backward decodes the packed weight again: between forward and backward no dense weight stays in memory.
"""

import math

import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from hf_kbit.ops.grouped import owners_of
from hf_kbit.ops.table import LIBRARY

OPS = torch.ops.hf_kbit
_GEMM, _GEMM_INFERENCE, _GEMM_INT8 = OPS.gemm.default, OPS.gemm_inference.default, OPS.gemm_int8.default


def register(name: str, setup_context, backward) -> None:
    torch.library.register_autograd(f"hf_kbit::{name}", backward, setup_context=setup_context, lib=LIBRARY)


def check_can_train(weight: torch.Tensor) -> None:
    if weight.is_inference():
        raise ValueError(
            "weight: found one that was made under torch.inference_mode(), expected a normal tensor where gradients "
            "are wanted: load or quantize the model outside of it, or run it under torch.no_grad()"
        )


def wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


# --- gemm, gemm_gradient --------------------------------------------------------------------------


def product(x, weight, absmax, codebook, bias, out_features, columns=None, rotated=False):
    """``gemm`` by the op for these inputs: that with gradients only where one is wanted."""
    if forward_ad._current_level >= 0:
        how = out_features, columns, rotated
        return with_tangents(lambda x, bias: OPS.gemm(x, weight, absmax, codebook, bias, *how), x, bias)
    op = _GEMM if wants_gradient(x, bias) else _GEMM_INFERENCE
    return op(x, weight, absmax, codebook, bias, out_features, columns, rotated)


def product_int8(x, weight, absmax, codebook, bias, out_features, columns, inverses=None):
    """``product`` of 8-bit inputs, or of x as it is."""
    if can_round(x, bias):
        return _GEMM_INT8(x, weight, absmax, codebook, bias, out_features, columns, inverses)
    return product(x, weight, absmax, codebook, bias, out_features, columns, True)


def wants_gradient(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def can_round(x: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether a product takes 8-bit inputs: not in float64, nor with a gradient or a tangent, which rounding has none
    of."""
    return not wants_gradient(x, bias) and forward_ad._current_level < 0 and x.dtype != torch.float64


def with_tangents(multiply, x, bias=None):
    """``multiply(x, bias)``, and its tangent where x or bias has one, which the ops know nothing of."""
    if forward_ad._current_level < 0:
        return multiply(x, bias)
    (x, along_x), (bias, along_bias) = (
        (tensor, None) if tensor is None else forward_ad.unpack_dual(tensor) for tensor in (x, bias)
    )
    y = multiply(x, bias)
    if along_x is None and along_bias is None:
        return y
    along_y = torch.zeros_like(y) if along_x is None else multiply(along_x, None)
    return forward_ad.make_dual(y, along_y if along_bias is None else along_y + along_bias)


def _gemm_setup_context(ctx, inputs, output):
    x, *packed, _, out_features, columns, ctx.rotated = inputs
    check_can_train(packed[0])
    ctx.save_for_backward(*packed, columns)
    ctx.shape = [out_features, x.shape[-1]]


def _gemm_backward(ctx, grad):
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        *packed, columns = ctx.saved_tensors
        how = *packed, ctx.shape, columns, ctx.rotated
        grad_x = with_tangents(lambda grad, _: OPS.gemm_gradient(grad, *how), grad)
    if ctx.needs_input_grad[4]:
        grad_bias = grad.reshape(-1, ctx.shape[0]).sum(dim=0)
    return grad_x, None, None, None, grad_bias, None, None, None


def _gradient_setup_context(ctx, inputs, output):
    """Of ``gemm_experts_gradient`` too, whose ``offsets`` are the last of ``packed``."""
    _, *packed, ctx.shape, columns, ctx.rotated = inputs
    ctx.save_for_backward(*packed, columns)


def _gradient_backward(ctx, grad):
    *packed, columns = ctx.saved_tensors
    return product(grad, *packed, None, ctx.shape[0], columns, ctx.rotated), *(None,) * 6


register("gemm", _gemm_setup_context, _gemm_backward)
register("gemm_gradient", _gradient_setup_context, _gradient_backward)


# --- experts --------------------------------------------------------------------------------------


def _experts_setup_context(ctx, inputs, output):
    x, *packed, _, rows, offsets, out_features, columns, ctx.rotated, ctx.swiglu = inputs
    check_can_train(packed[0])
    ctx.save_for_backward(*packed, offsets, columns, rows, x if ctx.swiglu else None)
    ctx.shape, ctx.tokens = [out_features, x.shape[1] // (2 if ctx.swiglu else 1)], x.shape[0]


def _experts_backward(ctx, grad):
    grad_x = grad_bias = None
    *packed, offsets, columns, rows, x = ctx.saved_tensors
    if ctx.needs_input_grad[0]:
        grad_x = OPS.gemm_experts_gradient(grad, *packed, offsets, ctx.shape, columns, ctx.rotated)
        grad_x = to_tokens(grad_x, rows, ctx.tokens)
        if ctx.swiglu:
            grad_x = swiglu_backward(x, grad_x)
    if ctx.needs_input_grad[4]:
        grad_bias = to_experts(grad, offsets)
    return grad_x, None, None, None, grad_bias, *(None,) * 6


def to_tokens(grad: torch.Tensor, rows: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Gradients of rows, added up for the tokens that they are of."""
    if rows is None:
        return grad
    # index_put adds up in one order, on GPUs too, as index_add does not.
    zeros = grad.new_zeros((tokens, grad.shape[1]), dtype=wide(grad))
    return zeros.index_put((rows,), grad.to(zeros.dtype), accumulate=True).to(grad.dtype)


def to_experts(grad: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Gradients of rows, added up for the expert that they are of: those of biases."""
    experts = offsets.shape[0] - 1
    zeros = grad.new_zeros((experts + 1, grad.shape[1]), dtype=wide(grad))
    owners = owners_of(len(grad), offsets)
    return zeros.index_put((owners,), grad.to(zeros.dtype), accumulate=True)[:experts].to(grad.dtype)


def swiglu_backward(x, grad):
    gate, up = x.to(wide(x)).chunk(2, dim=-1)
    portion = torch.sigmoid(gate)
    along_gate = grad * up * portion * (1 + gate * (1 - portion))
    return torch.cat([along_gate, grad * gate * portion], dim=-1).to(x.dtype)


def _experts_gradient_backward(ctx, grad):
    *packed, offsets, columns = ctx.saved_tensors
    along_grad = OPS.gemm_experts(grad, *packed, None, None, offsets, ctx.shape[0], columns, ctx.rotated)
    return along_grad, *(None,) * 7


def _combine_setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _combine_backward(ctx, grad):
    y, places, weights = ctx.saved_tensors
    grad_y = grad_weights = None
    dtype = wide(y)
    if ctx.needs_input_grad[0]:
        of_places = weights.to(dtype)[..., None] * grad.to(dtype)[:, None]
        # Each place is that of one token and expert, so nothing is added up.
        grad_y = torch.zeros_like(y).index_put((places.flatten(),), of_places.flatten(0, 1).to(y.dtype))
    if ctx.needs_input_grad[2]:
        grad_weights = (y[places].to(dtype) * grad.to(dtype)[:, None]).sum(-1).to(weights.dtype)
    return grad_y, None, grad_weights


register("gemm_experts", _experts_setup_context, _experts_backward)
register("gemm_experts_gradient", _gradient_setup_context, _experts_gradient_backward)
register("combine_experts", _combine_setup_context, _combine_backward)


# --- operations -----------------------------------------------------------------------------------

# Two for each number of a result and each number that is added up for it, as of ``nn.Linear``; tensors are their
# shapes here. Columns, a rotation and a gate do not count.


@register_flop_formula(
    [
        *(OPS.gemm, OPS.gemm_inference, OPS.gemm_int8, OPS.gemm_group),
        *(OPS.gemm_gradient, OPS.gemm_experts_gradient, OPS.gemm_experts_int8),
    ]
)
def _(x, *_, out_shape=None, **__):
    results = out_shape if isinstance(out_shape, list) else [out_shape]
    return 2 * x[-1] * sum(map(math.prod, results))


@register_flop_formula(OPS.gemm_experts)
def _(x, *others, out_shape=None, swiglu=False, **_):
    swiglu = swiglu or (len(others) > 9 and others[9])
    return 2 * x[-1] // (2 if swiglu else 1) * math.prod(out_shape)
