"""Which layers of a model of vLLM wait for packed tables, and which cannot."""

from types import SimpleNamespace

import pytest
from torch import nn
from vllm.model_executor.models.utils import PPMissingLayer

from hf_kbit.codebooks import optimal
from hf_kbit.integrations.vllm.embedding import make_room
from hf_kbit.nn.packed import Decoding

TABLES = SimpleNamespace(layers={}, tables={"table": (Decoding(optimal(4)), False)})


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
