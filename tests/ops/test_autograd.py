"""How layers train over a packed weight, and what products cost; ``test_contract.py`` checks the gradients."""

import cases
import contract
import pytest
import torch
import torch.nn.functional as F
from contract import OPS, examples
from torch.utils.flop_counter import FlopCounterMode

from hf_kbit.ops import dequantize, embed, gemm, gemm_experts


def taken_by_gemm(call, device="cpu") -> list[torch.Tensor]:
    """x, the weight, its scales and levels, and the bias."""
    return contract.on(device, [*call.arguments.values()][:5])


@pytest.mark.parametrize("dtype", contract.ALL_DTYPES)
@pytest.mark.parametrize("batch", [*cases.BATCHES, (40,)], ids=str)
def test_gradients_are_those_of_a_dense_layer(batch, dtype, device):
    """Also of a product that is changed in place, as where a residual or an adapter is added."""
    x, *packed, bias = taken_by_gemm(contract.gemm(3, dtype, (48, 300), batch=batch), device)
    ours, theirs = ([tensor.clone().requires_grad_() for tensor in (x, bias)] for _ in range(2))
    grad = cases.x(batch, 48, dtype, seed=1).to(device)
    y = gemm(ours[0], *packed, ours[1])
    y += 1
    y.backward(grad)
    F.linear(theirs[0], dequantize(*packed, (48, 300), dtype), theirs[1]).backward(grad)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_only_the_gradients_needed_are_computed():
    x, *packed, bias = taken_by_gemm(contract.gemm(3, shape=(7, 33), batch=(4,)))
    gemm(x, *packed, bias.requires_grad_()).sum().backward()
    assert x.grad is None and torch.equal(bias.grad, torch.full((7,), 4.0))
    assert not gemm(x, *packed).requires_grad


def test_backward_keeps_no_dense_weight():
    x, *packed, _ = taken_by_gemm(contract.gemm(2, shape=(130, 64)))
    saved = []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with keep:
        gemm(x.requires_grad_(), *packed)
    assert [(tensor.dtype, tensor.shape) for tensor in saved] == [(tensor.dtype, tensor.shape) for tensor in packed]


def test_rows_of_a_table_have_no_gradient_but_may_get_one():
    """As PEFT has it, so that gradients reach adapters behind checkpoints; and they are changed in place."""
    arguments = contract.embed(3, shape=(7, 33), indices=torch.tensor([[2, 5]])).arguments
    rows = embed(*arguments.values())
    assert not rows.requires_grad
    rows.requires_grad_()
    (rows * 2).sum().backward()
    assert torch.equal(rows.grad, torch.full((1, 2, 33), 2.0))
    with torch.no_grad():
        rows += 1


def test_rows_of_no_expert_have_no_gradient():
    arguments = contract.gemm_experts(shares=(2, 4, 1), shape=(36, 70)).arguments
    x = arguments["x"].requires_grad_()
    gemm_experts(*arguments.values()).sum().backward()
    assert x.grad[:7].any(dim=1).all() and not x.grad[7:].any()


def flops(run) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("op", [op for op in contract.ALL_OPS if op.startswith("gemm")])
def test_operations_are_counted_as_of_linear_layers(op):
    """Columns, a rotation and a gate do not count."""
    for call in examples(op, 2, (64, 100)):
        first, found = next(iter(call.arguments)), contract.as_list(getattr(OPS, op)(*call.arguments.values()))
        width = call.arguments[first].shape[-1] // (2 if call.arguments.get("swiglu") else 1)
        product = 2 * width * sum(y.numel() for y in found)
        assert flops(lambda call=call: getattr(OPS, op)(*call.arguments.values())) == product
        assert flops(lambda call=call: getattr(OPS, op)(**call.arguments)) == product
        if op in ("gemm", "gemm_experts") and not call.arguments.get("swiglu"):
            call.arguments[first].requires_grad_()
            both = flops(lambda call=call: getattr(OPS, op)(*call.arguments.values()).sum().backward())
            assert both == 2 * product
