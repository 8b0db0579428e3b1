"""Which layers of a model of vLLM wait for packed tables, which cannot, and for which rows."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer

from hf_kbit.format.codebooks import optimal
from hf_kbit.format.decoding import ScalarDecoding
from hf_kbit.integrations.vllm.embedding import KbitHeadMethod, make_room

TABLES = SimpleNamespace(inputs={}, layers={}, tables={"table": (ScalarDecoding(optimal(4)), False)}, head="")


@pytest.mark.parametrize(
    ("layer", "found"),
    [(nn.Linear(64, 8), "Linear"), (nn.Embedding(8, 64, max_norm=1.0), "Embedding"), (None, "NoneType")],
)
def test_no_place_for_a_table(layer, found):
    model = nn.ModuleDict({} if layer is None else {"table": layer})
    with pytest.raises(ValueError, match=f"^table: found a packed table .* a layer of type {found}, expected"):
        make_room(model, TABLES)


def test_a_table_that_another_process_has():
    """One stage of a pipeline has it."""
    model = nn.ModuleDict({"table": PPMissingLayer()})
    make_room(model, TABLES)
    assert isinstance(model["table"], PPMissingLayer)


@pytest.mark.parametrize(("first", "end"), [(0, 128), (128, 250)])
def test_rows_of_one_of_two_processes(first, end):
    """250 rows are 256 in vLLM, of which the last are zeros."""
    method = KbitHeadMethod({"lm_head": None})
    method.rows = [128]
    indices = SimpleNamespace(org_vocab_start_index=first, org_vocab_end_index=end)
    absmax = torch.arange(1, 251, dtype=torch.uint8)[:, None]
    expected = torch.cat([absmax[first:end], torch.zeros(128 - (end - first), 1, dtype=torch.uint8)])
    assert torch.equal(
        method._own_rows(SimpleNamespace(shard_indices=indices, org_vocab_size=250), absmax, (0,)), expected
    )
