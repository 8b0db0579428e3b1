"""Streams of a GPU while Transformers loads a checkpoint."""

from collections.abc import Mapping

import torch


def hold(given: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> None:
    """Tells the GPU's allocator that the current stream reads these tensors, so that nothing takes their memory before
    it has. Threads of Transformers fill them on the default stream, and take memory there as soon as it is free. Where
    another stream is current, as vLLM leaves it in its process, a weight would be made of what comes next."""
    for tensors in given.values():
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
