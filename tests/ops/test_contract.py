"""What every op keeps, on every backend: the contract of ``tests/contract.py``, op by op there, test by test here."""

import itertools
from dataclasses import replace

import cases
import contract
import pytest
import torch
from contract import ALL_OPS, OPS, Call, assert_same_bits, examples, on
from torch.library import opcheck

import hf_kbit

BITS = pytest.mark.parametrize("bits", cases.BITS)
EVERY_OP = pytest.mark.parametrize("op", ALL_OPS)
# Ops of which each row of the first argument becomes a row, and how their calls are made of rows.
PRODUCTS = [op for op in ALL_OPS if op.startswith("gemm")]


INPUTS = [pytest.param(*names, marks=pytest.mark.gpu if "cuda" in names else ()) for names in contract.INPUTS]


@pytest.mark.parametrize(("op", "inputs", "backend", "bits"), INPUTS)
def test_results(op, inputs, backend, bits):
    """Of planes and of tiles."""
    for call in contract.INPUTS[op, inputs, backend, bits]():
        for its in call.forms():
            if its.runs_on(backend):
                its.hold(backend)


# --- tensors anywhere -----------------------------------------------------------------------------


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """The same where no 16 bytes that a kernel reads at once start, as a loaded tensor may lie.

    On a CPU it starts at an odd byte, as in a file that is mapped into memory: right on x86 in any case; a library
    built with ``-fsanitize=alignment`` reports where a kernel reads such a number.
    """
    if tensor.device.type == "cpu":
        data = bytearray(b"?") + tensor.contiguous().view(torch.uint8).numpy().tobytes()
        return torch.frombuffer(data, dtype=tensor.dtype, offset=1).view(tensor.shape)
    return torch.cat([tensor.flatten()[:1], tensor.flatten()])[1:].view(tensor.shape)


def spread(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor, tensor + 1], dim=-1)[..., 0]


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    order = [*reversed(range(tensor.dim()))]
    return tensor.permute(order).contiguous().permute(order)


@BITS
@EVERY_OP
@pytest.mark.parametrize("laid", [moved, spread, transposed])
def test_tensors_lie_anywhere(op, laid, bits, device):
    """With any strides, at any address: the same bits, but where cuBLAS adds up otherwise, or torch's silu rounds."""
    for call in examples(op, bits):
        for its in call.forms():
            if its.runs_on(device):
                for found, plain in zip(its.hold(device, laid), its.run(device), strict=True):
                    if device == "cpu" and not its.arguments.get("swiglu"):
                        assert_same_bits(found, plain)


@EVERY_OP
@pytest.mark.parametrize("bits", [3, 4])
def test_same_bits_every_time(op, bits, device):
    for call in examples(op, bits, (300, 1000)):
        for its in call.forms():
            if its.runs_on(device):
                first = its.run(device)
                for _ in range(3):
                    for again, found in zip(its.run(device), first, strict=True):
                        assert_same_bits(again, found)


@EVERY_OP
def test_threads(op):
    """Rows are divided among threads, which have memory of their own."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        for call in examples(op, 5, (700, 1000)):
            for its in call.forms():
                its.hold("cpu")
    finally:
        torch.set_num_threads(before)


# --- rows of inputs -------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("op", PRODUCTS)
def test_what_is_not_finite_stays_in_its_row(op, special, device):
    """Of 8-bit inputs all of that row is NaN. In float16: torch's products of bfloat16 spoil another row on a CPU."""
    many = [{"batch": (300,)}] if device == "cuda" else []
    for call in examples(op, 3, more=many):
        first, *_ = call.arguments
        rows = call.arguments[first].clone()
        if "experts" in op and call.arguments.get("rows") is not None:
            continue
        row = min(2, len(rows) - 1)
        rows[row, 50 % rows.shape[1]] = special
        for its in call.forms():
            if its.runs_on(device):
                spoilt = replace(its, arguments=its.arguments | {first: rows})
                for found, expected in zip(spoilt.run(device), its.run(device), strict=True):
                    others = torch.arange(len(rows), device=found.device) != row
                    assert_same_bits(found[others], expected[others])
                    assert found[row].isnan().all() if its.int8 else not found[row].isfinite().all()


# --- what torch asks of an op ---------------------------------------------------------------------

TRAINED = {"gemm": ("x", "bias"), "gemm_gradient": ("grad",), "combine_experts": ("y", "weights")}
TRAINED |= {"gemm_experts": ("x", "bias"), "gemm_experts_gradient": ("grad",)}


def trained(call: Call) -> dict:
    """The arguments that have gradients, as leaves."""
    of_float = {name: call.arguments[name] for name in TRAINED.get(call.op, ())}
    return {name: value.detach().clone().requires_grad_() for name, value in of_float.items() if value is not None}


@EVERY_OP
def test_opcheck(op, device):
    """Schema, fake, autograd, and tracing with sizes that change."""
    for call in examples(op, 2, (7, 33))[-1].forms():
        its = replace(call, arguments=on(device, call.arguments))
        if its.int8:  # opcheck takes NaN for another NaN
            its.arguments["x"].copy_(cases.x(its.arguments["x"].shape[:-1], 33))
        opcheck(getattr(OPS, op).default, args=(), kwargs=its.arguments | trained(its))


def calls_with_gradients() -> list[Call]:
    calls = [contract.gemm(3, torch.float64, (2, 33), *how, (2,)) for how in contract.TRANSFORMS]
    calls += [contract.gemm_gradient(3, torch.float64, (2, 33), *how, (2,)) for how in contract.TRANSFORMS[::3]]
    calls += [contract.combine_experts(3, 2, 5, torch.float64)]
    picked = torch.tensor([0, 1, 2, 0, 3, 1]).int()  # some twice, the last one by nobody
    for rotated, swiglu, rows in itertools.product((False, True), (False, True), (None, picked)):
        weight, x = contract.usual((3, 3, 33), 3, rotated, rotated), cases.x((4,), 33 * (1 + swiglu), torch.float64)
        given = {"x": x, "rows": rows, "bias": cases.x((3,), 3, torch.float64), "weight": weight}
        shares = torch.tensor([0, 2, 2, 3 if rows is None else 5]).int()
        calls.append(contract.gemm_experts(dtype=torch.float64, swiglu=swiglu, offsets=shares, **given))
    return calls


@pytest.mark.parametrize("call", calls_with_gradients(), ids=lambda call: call.op)
def test_gradients(call):
    """First and second ones; of ``gemm`` forward too. Rows of no expert have none."""
    function = getattr(hf_kbit.ops, call.op, getattr(OPS, call.op))
    forward = call.op == "gemm"
    for its in call.forms()[: None if forward else 1]:
        inputs = trained(its)

        def run(*values, its=its, names=tuple(inputs)):
            return function(*(its.arguments | dict(zip(names, values, strict=True))).values())

        assert torch.autograd.gradcheck(run, (*inputs.values(),), check_forward_ad=forward)
        assert torch.autograd.gradgradcheck(run, (*inputs.values(),), check_fwd_over_rev=forward)
