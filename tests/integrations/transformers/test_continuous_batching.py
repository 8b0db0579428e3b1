"""Transformers' continuous batching, behind ``transformers serve`` too, chooses the tokens that ``generate`` does."""

import adapters
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

PROMPTS = [[5, 17, 99, 3], [100, 4, 8, 15, 16, 23, 42], [77]]


def test_same_tokens_as_generate(device):
    # In float32, where no two tokens are closer than 0.003, so that the order of sums does not matter.
    model = adapters.quantized(device)
    settings = GenerationConfig(max_new_tokens=12, do_sample=False, pad_token_id=0)
    # By default its cache takes most of the machine's memory.
    cache = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
    results = model.generate_batch(PROMPTS, generation_config=settings, continuous_batching_config=cache)
    found = {tuple(result.prompt_ids): result.generated_tokens for result in results.values()}
    for prompt in PROMPTS:
        expected = model.generate(torch.tensor([prompt], device=device), generation_config=settings)[0, len(prompt) :]
        assert found[tuple(prompt)] == expected.tolist()
