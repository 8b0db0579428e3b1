"""Feedback for trellises, beside its definition; and models that are calibrated to have them."""

import itertools
import math

import pytest
import torch
from architectures import BY_NAME
from small import llama, same, tensors
from transformers import AutoModelForCausalLM

import hf_kbit
from hf_kbit import KbitConfig
from hf_kbit.calibration import sensitivity, trellis
from hf_kbit.calibration.layerwise import Calibration
from hf_kbit.format.trellis import MOST_LEAD, TrellisDecoding, block_of, encode, inner, rotate, tiles_of
from hf_kbit.nn.weight import packed_layers
from hf_kbit.weight import trellis_packing
from hf_kbit.weight.tensor import KbitTensor
from hf_kbit.weight.trellis_packing import scales_of

IDS = torch.randint(5, 90, (6, 24), generator=torch.Generator().manual_seed(1))
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 40}


def problem(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor, TrellisDecoding]:
    """A weight, and moments of inputs that depend on one another."""
    torch.manual_seed(rows)
    x = torch.randn(4 * width, width) @ torch.randn(width, width)
    return torch.randn(rows, width), x.T @ x, TrellisDecoding(2, block=block_of(rows, width))


def decoded(packed, shape, dtype=torch.float64) -> torch.Tensor:
    return KbitTensor.of(packed, shape, torch.float32).dequantize(dtype)


def error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    return ((difference.double() @ hessian.double()) * difference).sum().item()


@pytest.mark.parametrize("shape", [(64, 96), (100, 72)])
def test_less_error_than_without_data(shape, device):
    weight, hessian, decoding = problem(*shape)
    weight, hessian = weight.to(device), hessian.to(device)
    ours, plain = (
        decoded(packed, shape) - weight
        for packed in (
            trellis.solve(weight, hessian, decoding, True),
            trellis_packing.quantize(weight, decoding, True, "weight"),
        )
    )
    assert error(ours, hessian) < 0.7 * error(plain, hessian)  # measured: 0.53 to 0.57 at 3 bits


def moments_of_outputs(rows: int) -> torch.Tensor:
    g = torch.randn(4 * rows, rows) @ torch.randn(rows, rows)
    return g.T @ g


@pytest.mark.parametrize("shape", [(64, 96), (100, 72)])
def test_errors_of_outputs_make_up_for_one_another(shape, device):
    """Where it is known what they cost together."""
    weight, hessian, decoding = problem(*shape)
    outputs = moments_of_outputs(shape[0])
    weight, hessian, outputs = (each.to(device) for each in (weight, hessian, outputs))
    both, alone = (
        decoded(trellis.solve(weight, hessian, decoding, True, outputs=its), shape) - weight for its in (outputs, None)
    )
    costs = [((outputs.double() @ error.double() @ hessian.double()) * error).sum().item() for error in (both, alone)]
    assert costs[0] < 0.8 * costs[1]


@pytest.mark.parametrize("shape", [(128, 192), (100, 72)])
def test_what_feedback_leaves(shape):
    """Along inputs, and along both sides, as its Hessians and scales foretell; the last step takes a little more."""
    weight, hessian, decoding = problem(*shape)
    outputs, scales = moments_of_outputs(shape[0]), scales_of(weight, decoding, True)
    sides = trellis.left(hessian, scales.suh, decoding.block, trellis.DAMPING), 1.0
    for its in (None, outputs):
        plain, ours = (
            decoded(packed, shape) - weight
            for packed in (
                trellis_packing.quantize(weight, decoding, True, "weight"),
                trellis.solve(weight, hessian, decoding, True, outputs=its),
            )
        )
        own = torch.eye(len(weight)) if its is None else its
        left = [((own.double() @ each @ hessian.double()) * each).sum().item() for each in (ours, plain)]
        assert left[0] / left[1] == pytest.approx(math.prod(sides), rel=0.25)
        sides = sides[0], trellis.left(outputs, scales.svh, decoding.block, trellis.OUTPUT_DAMPING)
    assert trellis.left(torch.zeros(96, 96), torch.ones(96), 32, 0.03) == 1
    assert trellis.left(torch.eye(96), torch.ones(96), 32, 0.03) == pytest.approx(1)


def test_outputs_that_cost_alike():
    """Whose U is the identity: codes are those of the inputs alone."""
    weight, hessian, _ = problem(64, 96)
    root = trellis.inverse_root(hessian, trellis.damping_of(hessian, trellis.DAMPING))
    found = trellis._encoded_on_both_sides(weight, root, torch.eye(64), 2)
    assert torch.equal(found, trellis._encoded(weight, root, 2))


def test_both_sides_as_by_definition():
    """Each tile is encoded as the least squares in float64 want it, of the weights to come those that make up best for
    the errors of all that are encoded, one column of tiles after another."""
    weight, hessian, _ = problem(32, 48)
    outputs = moments_of_outputs(32)
    roots = [trellis.inverse_root(each, trellis.damping_of(each, 0.03)) for each in (hessian, outputs)]
    found = inner(trellis._encoded_on_both_sides(weight, *roots, 2), "mul1", torch.float64)
    damped = [each.double() + 0.03 * each.diagonal().mean() * torch.eye(len(each)) for each in (hessian, outputs)]
    whole = torch.kron(damped[0], damped[1])  # of columns of the weight one after another
    aim, made = weight.double().T.flatten(), found.T.flatten()
    done = torch.zeros(32, 48, dtype=torch.bool)
    for column, row in itertools.product(range(0, 48, 16), range(0, 32, 16)):
        place, closed, moved = (slice(row, row + 16), slice(column, column + 16)), done.T.flatten(), aim.clone()
        # For errors E of what is done the least is where H[open, open] x = -H[open, done] E.
        right = whole[~closed][:, closed] @ (made - aim)[closed]
        moved[~closed] -= torch.linalg.solve(whole[~closed][:, ~closed], right)
        tile = moved.view(48, 32).T[place].float()
        own = inner(encode(tiles_of(tile)[0], 2, MOST_LEAD)[None], "mul1", torch.float64)
        assert torch.equal(own, found[place])
        done[place] = True


def test_as_by_definition():
    """The least squares in float64, for each block of 16 columns: of the weights to come those that make up best for
    the errors of all that are encoded."""
    weight, hessian, decoding = problem(32, 64)
    packed = trellis.solve(weight, hessian, decoding, False)
    suh = packed.tensors["suh"].double()
    turned = rotate(rotate(hessian.double() * suh * suh[:, None], 32).T, 32)
    turned += trellis.DAMPING * turned.diagonal().mean() * torch.eye(64)
    scales = trellis_packing.scales_of(weight, decoding, False)
    scales = scales.times(trellis_packing.best_factor(weight, decoding, scales))
    aim = trellis_packing.inner_of(weight, scales.suh, scales.svh, 32).double()
    order = turned.diagonal().view(-1, 16).sum(1).argsort(descending=True).tolist()
    found, left = torch.zeros_like(aim), set(range(64))
    trellises = {}
    for block in order:
        own = range(16 * block, 16 * block + 16)
        done = [column for column in range(64) if column not in left]
        # For errors E of what is done the least is where H[left, left] x = -H[left, done] E.
        open_, errors = sorted(left), (found - aim)[:, done]
        moved = aim.clone()
        moved[:, open_] -= torch.linalg.solve(turned[open_][:, open_], turned[open_][:, done] @ errors.T).T
        trellises[block] = encode(tiles_of(moved[:, list(own)].float())[0], 2, MOST_LEAD)
        found[:, list(own)] = inner(trellises[block][None], "mul1", torch.float64)
        left -= set(own)
    assert torch.equal(packed.tensors["trellis"], torch.stack([trellises[block] for block in range(4)]))


def test_rows_some_at_a_time(monkeypatch):
    weight, hessian, decoding = problem(128, 64)
    expected = trellis.solve(weight, hessian, decoding, True)
    monkeypatch.setattr(trellis, "ROWS", 64)
    assert same(trellis.solve(weight, hessian, decoding, True).tensors, expected.tensors)


def test_the_best_scale_of_rows():
    """For outputs, not for weights."""
    weight, hessian, decoding = problem(64, 64)
    packed = trellis.solve(weight, hessian, decoding, True)
    svh = packed.tensors["svh"].clone()

    def errors() -> torch.Tensor:
        difference = decoded(packed, weight.shape) - weight
        return ((difference @ hessian.double()) * difference).sum(1)

    best = errors()
    for factor in (0.99, 1.01):
        packed.tensors["svh"].copy_(svh * factor)
        assert (errors() > best).all()


@pytest.mark.parametrize("method", ["feedback", "weighted"])
def test_a_model(method, tmp_path, monkeypatch):
    """The same bytes each time, from a run that was killed, and when it is loaded again. What was known of outputs is
    let go of with their layer."""
    held, release = [], Calibration._tuned
    monkeypatch.setattr(Calibration, "_tuned", lambda self, dense: held.append(self.outputs) or release(self, dense))
    how = {"bits": 2, "codebook": "trellis", "method": method}
    model = hf_kbit.calibrate(llama(**SMALL), IDS, **how)
    assert {layer.decoding.kind for layer in packed_layers(model).values()} == {"trellis"}
    free = llama(**SMALL)
    hf_kbit.quantize_model(free, bits=2, codebook="trellis")
    assert not same(tensors(model), tensors(free))
    hf_kbit.calibrate(llama(**SMALL), IDS, resume=tmp_path / "run", **how)
    with monkeypatch.context() as patch:
        patch.setattr(hf_kbit.calibration.layerwise, "round_linear", None)
        again = hf_kbit.calibrate(llama(**SMALL), IDS, resume=tmp_path / "run", **how)
    assert same(tensors(model), tensors(again)) and held == 3 * [{}]
    model.save_pretrained(tmp_path / "packed")
    assert same(tensors(model), tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "packed")))


def test_what_errors_of_outputs_cost(monkeypatch):
    """Each layer with a trellis is solved for its own, of those that are known; with levels nothing is asked."""
    known, solved, find, solve = {}, {}, sensitivity.weigh, trellis.solve
    monkeypatch.setattr(sensitivity, "BLOCK", 32)  # gate_proj and up_proj have 40 outputs
    left = "model.layers.0.mlp.up_proj"

    def found(*given):
        weights, outputs = find(*given)
        known.update(outputs)
        outputs.pop(left, None)
        return weights, outputs

    def record(weight, hessian, decoding, balances, name, outputs):
        solved[name.removesuffix(".weight")] = outputs
        return solve(weight, hessian, decoding, balances, name, outputs)

    monkeypatch.setattr(sensitivity, "weigh", found)
    monkeypatch.setattr(trellis, "solve", record)
    model = hf_kbit.calibrate(llama(**SMALL), IDS, bits=2, codebook="trellis")
    assert solved.keys() == known.keys() == packed_layers(model).keys()
    assert solved.pop(left) is None
    for name, outputs in solved.items():
        assert outputs.shape == 2 * (model.get_submodule(name).out_features,)
        assert torch.equal(outputs, torch.block_diag(*known[name]))
    known.clear()
    hf_kbit.calibrate(llama(**SMALL), IDS, bits=2)
    assert not known


def test_experts():
    """Each for what it is sent, or without data where that is too little."""
    model = BY_NAME["qwen3_moe"].build()
    hf_kbit.calibrate(model, IDS, bits=2, codebook="trellis")
    plain = BY_NAME["qwen3_moe"].build()
    hf_kbit.quantize_model(plain, bits=2, codebook="trellis")
    layers, others = packed_layers(model), packed_layers(plain)
    assert layers.keys() == others.keys()
    projections = [name for name, layer in layers.items() if layer.lead]
    assert projections and all(layers[name].decoding.kind == "trellis" for name in projections)
    assert any(not torch.equal(layers[name].weight.words, others[name].weight.words) for name in projections)


def test_widths():
    """Measured ones, and those by rule, of all that a trellis can have."""
    config = KbitConfig(codebook="trellis")
    for found in (
        hf_kbit.choose_widths(llama(**SMALL), IDS, 1.5, config=config),
        hf_kbit.calibration.widths.widths_by_rule(llama(**SMALL), 1.5, config=config),
    ):
        widths = {found.bits, *found.module_bits.values()}
        assert found.codebook == "trellis" and min(widths) == 1 and max(widths) <= 8
