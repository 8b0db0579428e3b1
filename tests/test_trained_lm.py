"""Trained weights: the loss rises as bits fall, within bounds."""

import pytest
import torch
from trained_lm import held_out, mean_loss, trained_lm
from transformers import AutoModelForCausalLM

from hf_kbit import KbitConfig

pytestmark = pytest.mark.slow  # the model is trained first

# Loss over that of the float32 model, in nats per byte. Measured on 2026-11-21 (torch 2.13 CPU, Transformers 5.23):
# 0.0004, 0.0011, 0.0072 and 0.0491 over 1.5386. The bounds leave twice that and 0.002 more, for training differs a
# little from machine to machine.
BOUNDS = {5: 0.003, 4: 0.005, 3: 0.017, 2: 0.101}


@pytest.fixture(scope="module")
def losses():
    folder, sequences = trained_lm(), held_out()
    found = {None: mean_loss(AutoModelForCausalLM.from_pretrained(folder), sequences)}
    for bits in BOUNDS:
        model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=KbitConfig(bits=bits))
        found[bits] = mean_loss(model, sequences)
    return found


def test_loss_stays_within_bounds(losses):
    """And the model is trained: ln 256 = 5.5 before, 1.55 after it."""
    assert losses[None] < 1.7 and losses[5] < losses[4] < losses[3] < losses[2]
    assert all(losses[bits] - losses[None] < bound for bits, bound in BOUNDS.items())


def test_generation_continues_python(losses):
    """The 4-bit model, like the float one, has learned what follows ``def __init__(``."""
    prompt = torch.tensor([list(b"class Point:\n    def __init__(")])
    for config in (None, KbitConfig(bits=4)):
        model = AutoModelForCausalLM.from_pretrained(trained_lm(), quantization_config=config)
        text = bytes(model.generate(prompt, max_new_tokens=4, do_sample=False)[0].tolist())
        assert text.endswith(b"self"), text
