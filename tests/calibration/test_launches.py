"""What is recorded for a GPU, and how often: told here by a recorder for the CPU, which calls the function again."""

import pytest
import torch
from calibration.test_experts import IDS, build, packed
from calibration.test_feedback import problem
from small import same, tensors

import hf_kbit
from hf_kbit import codebooks
from hf_kbit.calibration import feedback, launches


@pytest.fixture
def recorded(monkeypatch):
    """Sizes of the first tensor of each record."""
    sizes = []

    def record(function, like):
        """As a CUDA graph: it reads and writes where its tensors were when it was made."""
        taken = [tensor.clone() for tensor in like]
        results = function(*taken)
        sizes.append(tuple(taken[0].shape))

        def replay(*given):
            for place, new in zip((*taken, *results), (*given, *function(*given)), strict=True):
                place.copy_(new)
            return results

        return replay

    monkeypatch.setitem(launches.RECORDERS, "cpu", record)
    return sizes


def _scaled(x, by, power=1):
    return (x * by**power,)


def test_the_same_function_and_shapes_are_recorded_once(recorded):
    two, three = torch.tensor(2.0), torch.tensor(3.0)

    def run(x, by, **settings):
        (found,) = launches.one_launch(_scaled, x, by, **settings)(x, by)
        assert torch.equal(found, x * by ** settings.get("power", 1))

    with launches.shared():
        for _ in range(2):
            for x in (torch.rand(5), torch.rand(5), torch.rand(4)):
                run(x, two)
                run(x, three)
                run(x, two, power=2)
            run(torch.rand(5).double(), two.double())
    assert sorted(recorded) == [(4,), (4,), (5,), (5,), (5,)]
    for _ in range(2):
        run(torch.rand(5), two)
    assert len(recorded) == 7, "nothing is kept"


def test_what_is_shared_takes_what_it_is_given(device):
    """On a GPU by graphs whose tensors are those of the first call."""
    codebook, given = torch.tensor(codebooks.optimal(3), device=device), []
    for seed in range(3):
        given.append([tensor.to(device) for tensor in problem(50, 200, tokens=300, seed=seed)])
    alone = [feedback.solve(*tensors, codebook) for tensors in given]
    with launches.shared():
        for tensors, expected in zip(given, alone, strict=True):
            assert all(map(torch.equal, feedback.solve(*tensors, codebook), expected))


def test_experts_of_a_projection_share_records(recorded, monkeypatch):
    """Two functions for each projection of 4 experts, and for each of the linear layers; nothing else changes."""
    found = hf_kbit.calibrate(build("gpt_oss"), IDS, bits=3)
    projections = len(packed(found))
    linears = sum(isinstance(module, hf_kbit.KbitLinear) for module in found.modules())
    assert projections == 4 and len(recorded) == 2 * (projections + linears)
    monkeypatch.delitem(launches.RECORDERS, "cpu")
    assert same(tensors(found), tensors(hf_kbit.calibrate(build("gpt_oss"), IDS, bits=3)))
