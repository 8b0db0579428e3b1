"""QLoRA under DistributedDataParallel, on two processes: a whole model in each, and half of the batch."""

import pytest
import ranks
import torch
from torch.nn.parallel import DistributedDataParallel


def in_each_process(rank, folder):
    found = {}
    for form in ("planes", "tiles"):
        model = ranks.adapt(ranks.load(folder / "qwen3_moe"))
        if form == "tiles":
            ranks.as_on_a_gpu(model)
        found[form] = ranks.trained(DistributedDataParallel(model), ranks.part_of_batch(rank))
        model.save_pretrained(folder / f"{form}{rank}")
    return found


def checkpoints(folder):
    ranks.save_quantized("qwen3_moe", folder)


@pytest.mark.parametrize("form", ["planes", "tiles"])
def test_training_is_that_of_one_process(found, folder, form, tmp_path):
    """Every process has a gradient for all adapters, also on experts that none of its tokens is sent to."""
    model = ranks.adapt(ranks.load(folder / "qwen3_moe"))
    losses = ranks.trained(model, ranks.BATCH)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(torch.stack([process[form] for process in found]).mean(0), losses)
    for rank in range(ranks.SIZE):
        ranks.assert_close_adapters(ranks.saved_adapters(folder / f"{form}{rank}"), ranks.saved_adapters(tmp_path))
