"""Which rows and columns of a weight each of several processes has."""

from types import SimpleNamespace

import pytest
import torch

from hf_kbit.format.trellis import TrellisDecoding
from hf_kbit.integrations.vllm.linear import KbitLinearMethod, check_columns, own_columns


@pytest.mark.parametrize("rank", range(4))
def test_rows_of_four_processes_that_share_keys_and_values(rank):
    """Four heads of queries and two of keys and values, of eight rows each: two processes have the same of these."""
    method = KbitLinearMethod({"q": None, "k": None, "v": None})
    method.rows, method.all_rows = [8, 8, 8], 96
    layer = SimpleNamespace(tp_rank=rank, tp_size=4, num_kv_head_replicas=2)
    queries, keys, values = torch.arange(32)[:, None], torch.arange(16)[:, None], -torch.arange(16)[:, None]
    q, kv = slice(8 * rank, 8 * rank + 8), slice(8 * (rank // 2), 8 * (rank // 2) + 8)
    assert torch.equal(method._own_rows(layer, queries, (0,)), queries[q])
    assert torch.equal(method._own_rows(layer, keys, (1,)), keys[kv])
    together = method._own_rows(layer, torch.cat([queries, keys, values]), (0, 1, 2))  # one on disk
    assert torch.equal(together, torch.cat([queries[q], keys[kv], values[kv]]))


def test_columns_are_whole_blocks():
    planes, columns = torch.arange(6)[None], torch.arange(96)  # three blocks at two bits
    assert own_columns(planes, 1, 32, 96).tolist() == [[2, 3]]
    assert torch.equal(own_columns(columns, 2, 32, 96), columns[64:])
    with pytest.raises(ValueError, match="down_proj: found 96 columns for 2 processes, expected a multiple of 32"):
        check_columns("down_proj", 48, 96, None)
    check_columns("down_proj", 72, 72, None)
    with pytest.raises(ValueError, match="down_proj: found 384 columns for 4 processes, expected a multiple of 128"):
        check_columns("down_proj", 96, 384, TrellisDecoding(3))


def test_rows_that_vllm_does_not_expect():
    method = KbitLinearMethod({"q": None})
    method.rows, method.all_rows = [8], 16
    with pytest.raises(ValueError, match=r"\['q'\]: found a tensor of 24 rows, expected 16"):
        method._own_rows(SimpleNamespace(tp_rank=0, tp_size=2), torch.zeros(24, 1), (0,))
